"""The LMDB environment: opens it, manages its map, closes it, and translates its errors.

Terms
  map    the address range LMDB may use; a large one is reserved at open, so growing it is the emergency path (M4)
  gate   keeps read transactions of this process away from `set_mapsize` and `close` (`env_gate.py`)
  slot   an entry in LMDB's table of readers, which all processes share

There is one environment per process and file. Only the owner opens it for writing and grows the map. Every use of LMDB
outside the writer thread passes the gate first; the map is replaced, and the environment closed, while the gate is
empty.

After fork() the child's environment is unusable (M12). The child neither ends transactions nor closes the environment,
and prevents Python from doing so: LMDB's table of slots is shared memory, so the child would end the parent's
transactions, and it would wait forever for calls that were in progress in threads it does not have.

Threads: any thread may read; only the writer thread begins write transactions. Every LMDB error leaves this module as a
quire error: `ManifestDamaged`, `StoreNotFound`, `NotWritable`, `TooManyReaders`, `DiskFull`, `StorageFault`,
`StoreClosed`.
"""

from __future__ import annotations

import errno
import os
import resource
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, TypeVar

import lmdb
import msgspec
from lmdb.verify import verify

from quire.core.errors import (
    DiskFull,
    FormatTooNew,
    InternalError,
    ManifestDamaged,
    NotWritable,
    QuireError,
    StorageFault,
    StoreClosed,
    StoreLocked,
    StoreNotFound,
    TimedOut,
    TooManyReaders,
)
from quire.core.events import emit_safely
from quire.core.limits import GIB, MIB
from quire.durable.files import FULL_ERRNOS, too_many_open_files
from quire.manifest.env_gate import MapGate, Ticket, Visitor
from quire.manifest.tables import TABLES

if TYPE_CHECKING:
    from quire.core.settings import ManifestSettings

T = TypeVar("T")

TABLES_MAX = 96
"""Maximum number of named LMDB databases: three times the current number, because it is fixed at open."""

CLOSE_WAIT_SECONDS = 1.0
"""How long closing waits for read transactions of other threads to end, in seconds."""

CHANGE_LOG_NAME = "change_log"
"""The one table that is declared elsewhere, next to the operations its records consist of, so that read-only processes
need not load the operations (a test compares the names)."""

assert len(TABLES) < TABLES_MAX

_ALREADY_OPEN = "already open in this process"
_RESTORE = "restore the manifest from a backup, or follow docs/operations.md"
_NO_FORK = "open the store after the fork, or start the process in another way (spawn, forkserver)"


def translate(error: lmdb.Error | OSError, path: str) -> QuireError:
    """Translate an LMDB error into a quire error."""
    if _ALREADY_OPEN in str(error):
        return StoreLocked(
            "this process already has the manifest open",
            hint="use the store that is already open, or close it first",
            path=path,
        )
    if isinstance(error, lmdb.MapFullError):
        return DiskFull("the manifest's map is full", hint="raise manifest.map_bytes_max in quire.toml", path=path)
    if isinstance(error, lmdb.ReadersFullError):
        return TooManyReaders(
            "all reader slots of the manifest are taken",
            hint="close readers, or raise manifest.readers_max in quire.toml",
            path=path,
        )
    if isinstance(error, (lmdb.DiskError,)) or getattr(error, "errno", None) in FULL_ERRNOS or _is_full(error):
        return DiskFull("the disk is full", hint="free up space, then try again", path=path)
    for number in (errno.ENFILE, errno.EMFILE):  # in this order: the text of one begins with that of the other
        if _mentions(error, number):
            return too_many_open_files("opening the manifest", number, path=path)
    if isinstance(error, (lmdb.ReadonlyError, lmdb.LockError)) or _mentions(
        error, errno.EACCES, errno.EROFS, errno.EPERM
    ):
        hint = "check the owner and mode of the file, its lock file (…-lock) and their directory"
        return NotWritable(f"access to the manifest was denied: {error}", hint=hint, path=path)
    if isinstance(error, _DAMAGE):
        return ManifestDamaged(f"the manifest is damaged: {error}", hint=_RESTORE, path=path)
    if isinstance(error, lmdb.VersionMismatchError):
        return FormatTooNew("the manifest was written by another version of LMDB", hint="upgrade quire", path=path)
    if isinstance(error, (lmdb.MemoryError,)):
        return StorageFault("not enough memory or address space for the manifest", path=path)
    if isinstance(error, _BUGS):
        return InternalError(f"LMDB rejected a call: {type(error).__name__}: {error}", path=path)
    return StorageFault(f"the manifest failed: {error}", hint="check the disk and the system log", path=path)


_DAMAGE = (
    lmdb.CorruptedError,
    lmdb.InvalidError,
    lmdb.PageNotFoundError,
    lmdb.PanicError,
    lmdb.BadChecksumError,
    lmdb.ProblemError,
    lmdb.CryptoFailError,
    lmdb.EnvEncryptionError,
)
_BUGS = (
    lmdb.BadDbiError,
    lmdb.BadRslotError,
    lmdb.BadTxnError,
    lmdb.BadValsizeError,
    lmdb.CursorFullError,
    lmdb.DbsFullError,
    lmdb.IncompatibleError,
    lmdb.InvalidParameterError,
    lmdb.KeyExistsError,
    lmdb.NotFoundError,
    lmdb.PageFullError,
    lmdb.TlsFullError,
    lmdb.TxnFullError,
    lmdb.MapResizedError,
)


def _mentions(error: Exception, *numbers: int) -> bool:
    return any(os.strerror(number) in str(error) for number in numbers)


def _is_full(error: Exception) -> bool:
    return _mentions(error, *FULL_ERRNOS)


Refusals = dict[tuple[str, int], tuple[str, str]]
"""What is closed because it breaks a rule: ("database" or "counter", id) → what is wrong, and a hint."""


class ManifestEnv:
    """The open environment, with one handle per table."""

    def __init__(self, path: str, settings: ManifestSettings, *, write: bool, create: bool = True) -> None:
        self.path = path
        self.settings = settings
        self.write = write
        self.gate = MapGate()
        self._closed: tuple[str, str] | None = None
        """Why no transaction can begin any more, and a hint; None while open."""
        self._is_over = False
        """Whether nothing is left to close."""
        self.refused: Refusals = {}
        """Closed because they break a rule. Replaced whole, so that every thread sees what is closed at any time."""
        self.checked_sequence: int | None = None
        """The last change before the checked point on disk (checked_point.py); `None` if there is no point."""
        self.reported: set[int] = set()
        """Databases whose damaged rows have been reported by a reader."""
        self.fork_hooks: list[Callable[[], None]] = []
        """Called in the child of a fork(); nothing in this object may be used afterwards."""
        if not (write and create):
            self._require_file()
        self._env = self._open()
        _LIVE.add(self)
        try:
            # Before the first read of a table: in a truncated file that may be SIGBUS, which no caller can handle.
            self._refuse_truncated()
            # Slots of readers that were killed would keep LMDB from reusing pages, and the file would grow.
            self._env.reader_check()
            self.page_bytes = int(self._env.stat()["psize"])
            self.handles = self._open_tables()
        except (lmdb.Error, OSError) as error:
            self.close()
            raise translate(error, path) from error
        except BaseException:
            self.close()
            raise

    # ── opening ───────────────────────────────────────────────────────────────────────────────────────────────────────
    def _open(self) -> lmdb.Environment:
        size = self.settings.map_bytes
        while True:
            try:
                return lmdb.open(
                    self.path,
                    subdir=False,
                    readonly=not self.write,
                    create=self.write,
                    map_size=size,
                    max_dbs=TABLES_MAX,
                    max_readers=self.settings.readers_max,
                    mode=0o644,
                    meminit=False,
                )
            except lmdb.MemoryError as error:
                # An address-space limit (containers, ulimit -v) refuses the reservation: retry with a smaller map.
                if size <= GIB:
                    raise translate(error, self.path) from error
                size //= 4
            except (lmdb.Error, OSError) as error:
                raise self._why_not_opened(error) from error

    def _why_not_opened(self, error: lmdb.Error | OSError) -> QuireError:
        failure = translate(error, self.path)
        if isinstance(failure, NotWritable):
            return access_error(self.path, write=self.write) or failure
        if isinstance(failure, StoreLocked) and os.path.realpath(self.path) in _inherited:
            return StoreLocked("the manifest was open when this process was forked", hint=_NO_FORK, path=self.path)
        return failure

    def _require_file(self) -> None:
        """Raise unless the file exists and is not empty: LMDB would turn an empty file into a new environment."""
        try:
            size = os.stat(self.path).st_size
        except (FileNotFoundError, NotADirectoryError) as error:
            hint = "`quire init` creates a store"
            raise StoreNotFound("no manifest found", hint=hint, path=self.path) from error
        except OSError as error:
            raise self._why_not_opened(error) from error
        if size == 0:
            raise ManifestDamaged("the manifest is empty", hint=_RESTORE, path=self.path)

    def _refuse_truncated(self) -> None:
        """Refuse a file that is too short for the pages its meta page names: reading past its end would raise SIGBUS.

        Pages that were freed before they were ever written may lie past the end; then LMDB's verifier decides.
        """
        needed = (self._env.info()["last_pgno"] + 1) * self._env.stat()["psize"]
        present = os.stat(self.path).st_size
        if present >= needed:
            return

        problems = verify(self.path, subdir=False)  # type: ignore[no-untyped-call]  # the module has no stubs
        if problems:
            raise ManifestDamaged(
                f"the manifest is truncated: {problems[0]}", hint=_RESTORE, path=self.path, bytes=present, needed=needed
            )

    def _open_tables(self) -> dict[str, Any]:
        """Open a handle per table. For a read-only process, a table that an older store lacks is `None` and reads as empty."""
        handles: dict[str, Any] = {}
        names = dict.fromkeys((*TABLES, CHANGE_LOG_NAME))
        if self.write:
            with self._env.begin(write=True) as txn:
                for name in names:
                    handles[name] = self._env.open_db(name.encode(), txn=txn, create=True)
            return handles
        for name in names:
            try:
                handles[name] = self._env.open_db(name.encode(), create=False)
            except (lmdb.NotFoundError, lmdb.ReadonlyError):
                handles[name] = None
        return handles

    # ── transactions ──────────────────────────────────────────────────────────────────────────────────────────────────
    def begin_write(self) -> lmdb.Transaction:
        """Begin the one write transaction. Writer thread only."""
        self._check()
        try:
            return self._env.begin(write=True)
        except lmdb.Error as error:
            raise self.explain(error) from error

    def transact(self, change: Callable[[Any], T]) -> T:
        """Call `change` with a write transaction, commit it, and return the result of `change`.

        If the map is full, it is grown and `change` is called again. For code that writes without the writer thread:
        migrations and replicas.
        """
        while True:
            txn = self.begin_write()
            try:
                result = change(txn)
                txn.commit()
                return result
            except lmdb.MapFullError:
                txn.abort()
                self.grow()
            except lmdb.Error as error:
                txn.abort()
                raise self.explain(error) from error
            except BaseException:
                txn.abort()
                raise

    def begin_read(self, owner: Visitor) -> tuple[lmdb.Transaction, Ticket]:
        """Begin a read transaction; pass its ticket to `end_read`. The ticket goes when `owner` is freed."""
        while True:
            if self._closed is not None:
                self._check()
            ticket = self.gate.enter(owner)
            try:
                return self._env.begin(), ticket
            except lmdb.Error as error:
                self.gate.leave(ticket)
                if not self._should_retry_read(error):
                    raise self.explain(error) from error
            except BaseException:
                self.gate.leave(ticket)
                raise

    def _should_retry_read(self, error: lmdb.Error) -> bool:
        """Return whether a read transaction that could not begin should be tried again."""
        try:
            if isinstance(error, lmdb.MapResizedError):
                # the owner grew the map: adopt the new size
                self.gate.exclusive(self.settings.grow_wait_seconds, lambda: self._env.set_mapsize(0))
                return True
            return isinstance(error, lmdb.ReadersFullError) and self._env.reader_check() > 0
        except lmdb.Error as another:
            raise self.explain(another) from another

    def end_read(self, txn: lmdb.Transaction, ticket: Ticket) -> None:
        """End a read transaction. Idempotent."""
        try:
            if not self._is_over:  # otherwise it ended with the environment, or belongs to the parent of a fork
                txn.abort()
        finally:
            self.gate.leave(ticket)

    @contextmanager
    def _inside(self) -> Iterator[lmdb.Environment]:
        """Yield LMDB's environment for a call without a transaction, inside the gate."""
        self._check()
        guest = _Guest()
        ticket = self.gate.enter(guest)
        try:
            yield self._env
        finally:
            self.gate.leave(ticket)

    def explain(self, error: lmdb.Error | OSError) -> QuireError:
        """Translate an LMDB error; once the manifest is closed, every error is `StoreClosed`."""
        return self._refusal(self._closed) if self._closed is not None else translate(error, self.path)

    def _check(self) -> None:
        if self._closed is not None:
            raise self._refusal(self._closed)

    def _refusal(self, closed: tuple[str, str]) -> StoreClosed:
        return StoreClosed(closed[0], hint=closed[1], path=self.path)

    def require_not_refused(self, kind: str, number: int, refused: Refusals | None = None) -> None:
        """Raise if this database or counter is closed because it breaks a rule of the manifest. `refused`: what is closed
        for the caller, if that differs from what this process has closed."""
        if (refusal := (self.refused if refused is None else refused).get((kind, number))) is not None:
            raise ManifestDamaged(refusal[0], hint=refusal[1], path=self.path, **{f"{kind}_id": number})

    # ── the map ───────────────────────────────────────────────────────────────────────────────────────────────────────
    def last_txn_id(self) -> int:
        """Return the id of the last committed transaction."""
        return self._env.info()["last_txnid"]

    def is_nearly_full(self) -> bool:
        """Return whether the map has passed its watermark and can still grow.

        A map at its maximum size does not count: freed pages are reused.
        """
        info = self._env.info()
        used, size = (info["last_pgno"] + 1) * self.page_bytes, info["map_size"]
        return used > size * self.settings.map_watermark and size < self.settings.map_bytes_max

    def grow(self, wait_seconds: float | None = None) -> None:
        """Double the map when no read transaction of this process is open. Writer thread only, with no transaction open.

        Raises `TimedOut` if a read transaction stays open for longer than `wait_seconds` (default: `grow_wait_seconds`).
        """
        old = int(self._env.info()["map_size"])
        new = min(old * 2, self.settings.map_bytes_max)
        if new <= old:
            raise DiskFull("the manifest's map is full", hint="raise manifest.map_bytes_max in quire.toml", bytes=old)
        wait_seconds = self.settings.grow_wait_seconds if wait_seconds is None else wait_seconds
        self.gate.exclusive(wait_seconds, lambda: self._env.set_mapsize(new))
        emit_safely("warning", "manifest.map_grown", path=self.path, old_bytes=old, new_bytes=new)

    # ── state ─────────────────────────────────────────────────────────────────────────────────────────────────────────
    def info(self) -> dict[str, int]:
        """Return LMDB's own figures, for `doctor` and metrics."""
        try:
            with self._inside() as env:
                figures: dict[str, Any] = {**env.info()}
                figures.update(page_size=env.stat()["psize"], file_bytes=os.stat(self.path).st_size)
                return figures
        except (lmdb.Error, OSError) as error:
            raise self.explain(error) from error

    def report_long_reads(self) -> None:
        """Warn once about each read transaction that is open for longer than `long_read_seconds`."""
        for age, thread in self.gate.unreported(self.settings.long_read_seconds):
            hint = "LMDB cannot reuse pages while a read transaction is open; end it"
            emit_safely("warning", "manifest.long_read", seconds=round(age, 1), thread=thread, hint=hint)

    def copy(self, path: str) -> None:
        """Write a consistent copy of the environment while it is in use (a hot backup). The map does not grow meanwhile."""
        try:
            with self._inside() as env:
                env.copy(path, compact=True)
        except (lmdb.Error, OSError) as error:
            raise (translate(error, path) if self._closed is None else self.explain(error)) from error

    # ── the end ───────────────────────────────────────────────────────────────────────────────────────────────────────
    def close(self) -> None:
        """Close the environment; further use raises `StoreClosed`. If the call is interrupted, call it again."""
        if self._is_over:
            return
        # Before the gate: readers that wait there must find it when they are let in, and not begin a transaction.
        self._closed = ("the manifest is closed", "open the store again")
        try:
            self.gate.exclusive(CLOSE_WAIT_SECONDS, self._env.close)
        except TimedOut:
            self._close_with_open_reads()
        self._is_over = True

    def _close_with_open_reads(self) -> None:
        """Close although transactions are still open; they raise `StoreClosed` from then on.

        py-lmdb's `close` marks the transactions, then waits for calls in progress, but only once: a thread between two
        steps of one call continues, reads memory that is no longer mapped, and the process crashes. `set_mapsize` waits
        until no call is in progress and ends all transactions, so later calls are refused.
        """
        with suppress(lmdb.Error):  # a write transaction is open: `close` waits for it
            self._env.set_mapsize(0)
        self._env.close()

    def _forked(self) -> None:
        """Drop the environment in a forked child without touching LMDB: slots and locks belong to the parent."""
        visitors = self.gate.visitors()
        _leak_deliberately((self._env, *visitors))
        if not self._is_over:
            _inherited.add(os.path.realpath(self.path))
        self._closed = ("the manifest belongs to the parent of this fork()", _NO_FORK)
        self._is_over = True
        # A thread that the child does not have may hold the lock of the old one.
        self.gate = MapGate()
        for visitor in visitors:
            visitor.abandon()
        for hook in self.fork_hooks:
            hook()

    def cannot_grow_file(self) -> bool:
        """Return whether the file cannot grow by 1 MiB. LMDB reports a short write, which is how a disk fills up, as EIO."""
        limit, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
        disk = os.statvfs(self.path)
        used = os.stat(self.path).st_size
        return disk.f_bavail * disk.f_frsize < MIB or (limit != resource.RLIM_INFINITY and used + MIB > limit)


class _Guest:
    """A visitor without a transaction: a copy, a query of LMDB's figures."""

    def abandon(self) -> None:
        """Do nothing: its thread does not exist in the child."""


_LIVE: weakref.WeakSet[ManifestEnv] = weakref.WeakSet()
_inherited: set[str] = set()
"""Paths of the manifests that were open when this process was forked."""


class _UncollectableCycle(msgspec.Struct, gc=False):
    """A reference cycle that the garbage collector does not track: never freed, not even when the interpreter exits."""

    value: object
    itself: _UncollectableCycle | None = None


def _leak_deliberately(value: object) -> None:
    cycle = _UncollectableCycle(value)
    cycle.itself = cycle


def _after_fork_in_child() -> None:
    for env in list(_LIVE):
        env._forked()


os.register_at_fork(after_in_child=_after_fork_in_child)


_READERS_TOO = "readers need it too: they register in it, so that the owner keeps the pages they read"


def access_error(path: str, *, write: bool) -> QuireError | None:
    """Return an error that names the file or directory of the manifest at `path` this user lacks rights to, or None."""
    folder, lock = os.path.dirname(path) or ".", f"{path}-lock"
    if not _may(folder, os.X_OK):
        return StorageFault("this user may not access the manifest's directory", hint="`chmod +x` it", path=folder)
    if not os.path.exists(path):
        if not _may(folder, os.W_OK):
            return NotWritable(
                "this user may not create a manifest in the directory", hint="`chmod +w` the directory", path=folder
            )
    elif not _may(path, os.R_OK):
        return StorageFault("this user may not read the manifest", hint="`chmod +r` it", path=path)
    elif write and not _may(path, os.W_OK):
        return NotWritable(
            "this user may not write the manifest", hint='`chmod +w` it, or open with mode="r"', path=path
        )
    if not os.path.exists(lock):
        if not _may(folder, os.W_OK):
            hint = f"let the owner open the store once, or `chmod +w` the directory; {_READERS_TOO}"
            return NotWritable(
                "the manifest's lock file is missing, and this user may not create it", hint=hint, path=lock
            )
    elif not _may(lock, os.R_OK | os.W_OK):
        hint = f"`chmod +rw` this file for the user; {_READERS_TOO}"
        return NotWritable("this user may not write the manifest's lock file", hint=hint, path=lock)
    return None


def _may(path: str, mode: int) -> bool:
    return os.access(path, mode, effective_ids=True)
