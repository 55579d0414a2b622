"""The LMDB environment: opening it, its map, its end, and the translation of its errors.

Terms
  map    the address range LMDB may use; reserved large at open, so growing is the emergency path (M4)
  gate   what keeps read transactions of this process away from `set_mapsize` and `close` (`env_gate.py`)
  slot   a place in LMDB's table of readers, shared by all processes

One environment per process and file. Only the owner opens it for writing and grows the map. Whatever touches LMDB outside the
writer thread passes the gate first; the map is replaced, and the environment closed, when nobody is inside.

After fork() the child's environment is dead (M12): it neither ends transactions nor closes the environment, nor lets Python
do so. LMDB's table of slots is shared memory, so it would end those of the parent, and it would wait for ever for calls that
were under way in threads it does not have.

Threads: any thread may read; write transactions are begun by the writer thread alone. Every LMDB error leaves this module as
one of ours: `ManifestDamaged`, `StoreNotFound`, `NotWritable`, `TooManyReaders`, `DiskFull`, `StorageFault`, `StoreClosed`.
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
"""Named databases LMDB makes room for: three times today's, because the number is fixed at open."""

CLOSE_WAIT_SECONDS = 1.0
"""How long closing waits for read transactions of other threads to end."""

CHANGE_LOG_NAME = "change_log"
"""The one table that is declared elsewhere, beside the operations it is made of: those who only read load none of them (a test
compares)."""

assert len(TABLES) < TABLES_MAX

_ALREADY_OPEN = "already open in this process"
_RESTORE = "restore the manifest from a backup, or follow docs/operations.md"
_NO_FORK = "open the store after the fork, or start the process in another way (spawn, forkserver)"


def translate(error: lmdb.Error | OSError, path: str) -> QuireError:
    """What an LMDB error means for the caller."""
    if _ALREADY_OPEN in str(error):
        return StoreLocked("this process has the manifest open already", hint="use the store you have", path=path)
    if isinstance(error, lmdb.MapFullError):
        return DiskFull("the manifest's map is full", hint="raise manifest.map_bytes_max in quire.toml", path=path)
    if isinstance(error, lmdb.ReadersFullError):
        return TooManyReaders(
            "all reader slots of the manifest are taken",
            hint="close readers, or raise manifest.readers_max in quire.toml",
            path=path,
        )
    if isinstance(error, (lmdb.DiskError,)) or getattr(error, "errno", None) in FULL_ERRNOS or _is_full(error):
        return DiskFull("the disk is full", hint="free space, then try again", path=path)
    for number in (errno.ENFILE, errno.EMFILE):  # in this order: the text of one begins with that of the other
        if _mentions(error, number):
            return too_many_open_files("opening the manifest", number, path=path)
    if isinstance(error, (lmdb.ReadonlyError, lmdb.LockError)) or _mentions(
        error, errno.EACCES, errno.EROFS, errno.EPERM
    ):
        hint = "check owner and mode of the file, of its lock file (…-lock) and of their directory"
        return NotWritable(f"access to the manifest was denied: {error}", hint=hint, path=path)
    if isinstance(error, _DAMAGE):
        return ManifestDamaged(f"the manifest is damaged: {error}", hint=_RESTORE, path=path)
    if isinstance(error, lmdb.VersionMismatchError):
        return FormatTooNew("the manifest was written by another version of LMDB", hint="upgrade quire", path=path)
    if isinstance(error, (lmdb.MemoryError,)):
        return StorageFault("not enough memory or address space for the manifest", path=path)
    if isinstance(error, _BUGS):
        return InternalError(f"LMDB refused a call: {type(error).__name__}: {error}", path=path)
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


class ManifestEnv:
    """The opened environment with a handle per table."""

    def __init__(self, path: str, settings: ManifestSettings, *, write: bool, create: bool = True) -> None:
        self.path = path
        self.settings = settings
        self.write = write
        self.gate = MapGate()
        self._closed: tuple[str, str] | None = None
        """Why nothing is begun any more, and what to do."""
        self._is_over = False
        """Whether there is nothing left to close."""
        self.refused: dict[tuple[str, int], tuple[str, str]] = {}
        """What breaks a rule and is closed to everyone: ("database" or "counter", id) → what is wrong, and what to do."""
        self.reported: set[int] = set()
        """Databases whose damaged rows a reader has reported."""
        self.fork_hooks: list[Callable[[], None]] = []
        """Called in the child of a fork(), after which nothing here may be used."""
        if not (write and create):
            self._require_file()
        self._env = self._open()
        _LIVE.add(self)
        try:
            self._refuse_truncated()
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
                # An address-space limit (containers, ulimit -v) refuses the reservation: take what there is.
                if size <= GIB:
                    raise translate(error, self.path) from error
                size //= 4
            except (lmdb.Error, OSError) as error:
                raise self._why_not_opened(error) from error

    def _why_not_opened(self, error: lmdb.Error | OSError) -> QuireError:
        failure = translate(error, self.path)
        if isinstance(failure, NotWritable):
            return denied(self.path, write=self.write) or failure
        if isinstance(failure, StoreLocked) and os.path.realpath(self.path) in _inherited:
            return StoreLocked("the manifest was open when this process was forked", hint=_NO_FORK, path=self.path)
        return failure

    def _require_file(self) -> None:
        """LMDB takes an empty file for a new environment: fatal where there must be one already."""
        try:
            size = os.stat(self.path).st_size
        except (FileNotFoundError, NotADirectoryError) as error:
            hint = "`quire init` makes a store"
            raise StoreNotFound("there is no manifest here", hint=hint, path=self.path) from error
        except OSError as error:
            raise self._why_not_opened(error) from error
        if size == 0:
            raise ManifestDamaged("the manifest is empty", hint=_RESTORE, path=self.path)

    def _refuse_truncated(self) -> None:
        """Refuse a file too short for the pages its meta page names: reading beyond the end of a mapped file is SIGBUS, not an
        error. Pages freed before they were ever written may lie beyond the end: then LMDB's verifier decides."""
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
        """A handle per table; for readers of a store older than a table, `None`: it reads as empty."""
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
        """The one write transaction. Writer thread only."""
        self._check()
        try:
            return self._env.begin(write=True)
        except lmdb.Error as error:
            raise self.explain(error) from error

    def transact(self, change: Callable[[Any], T]) -> T:
        """What `change` returns, which is called with a write transaction that is durable afterwards.

        A full map is grown and the change made again. For whoever writes without the writer: migrations and replicas.
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
        """A snapshot, and the ticket to give back to `end_read`. Its place at the gate is free once `owner` is gone."""
        while True:
            if self._closed is not None:
                self._check()
            ticket = self.gate.enter(owner)
            try:
                return self._env.begin(), ticket
            except lmdb.Error as error:
                self.gate.leave(ticket)
                if not self._has_made_way(error):
                    raise self.explain(error) from error
            except BaseException:
                self.gate.leave(ticket)
                raise

    def _has_made_way(self, error: lmdb.Error) -> bool:
        """Whether a read transaction that could not begin should be tried again."""
        try:
            if isinstance(error, lmdb.MapResizedError):
                self.gate.exclusive(self.settings.grow_wait_seconds, lambda: self._env.set_mapsize(0))
                return True
            return isinstance(error, lmdb.ReadersFullError) and self._env.reader_check() > 0
        except lmdb.Error as another:
            raise self.explain(another) from another

    def end_read(self, txn: lmdb.Transaction, ticket: Ticket) -> None:
        """End a snapshot; again does no harm."""
        try:
            if not self._is_over:  # else it has ended with the environment, or it is the parent's
                txn.abort()
        finally:
            self.gate.leave(ticket)

    @contextmanager
    def _inside(self) -> Iterator[lmdb.Environment]:
        """LMDB's environment for calls that have no transaction of ours."""
        self._check()
        guest = _Guest()
        ticket = self.gate.enter(guest)
        try:
            yield self._env
        finally:
            self.gate.leave(ticket)

    def explain(self, error: lmdb.Error | OSError) -> QuireError:
        """What an error of LMDB means here: whatever goes wrong once the manifest is closed, goes wrong because it is."""
        return self._refusal(self._closed) if self._closed is not None else translate(error, self.path)

    def _check(self) -> None:
        if self._closed is not None:
            raise self._refusal(self._closed)

    def _refusal(self, closed: tuple[str, str]) -> StoreClosed:
        return StoreClosed(closed[0], hint=closed[1], path=self.path)

    def check_sound(self, kind: str, number: int) -> None:
        """Raise if this database or counter was closed because it breaks a rule of the manifest."""
        if (refusal := self.refused.get((kind, number))) is not None:
            raise ManifestDamaged(refusal[0], hint=refusal[1], path=self.path, **{f"{kind}_id": number})

    # ── the map ───────────────────────────────────────────────────────────────────────────────────────────────────────
    def last_txn_id(self) -> int:
        """The id of the last committed transaction."""
        return self._env.info()["last_txnid"]

    def is_nearly_full(self) -> bool:
        """Whether the map has passed its watermark and can still be grown.

        At the limit a full map is no reason to stop: freed pages are reused.
        """
        info = self._env.info()
        used, size = (info["last_pgno"] + 1) * self.page_bytes, info["map_size"]
        return used > size * self.settings.map_watermark and size < self.settings.map_bytes_max

    def grow(self, wait_seconds: float | None = None) -> None:
        """Double the map, once no read transaction of this process is open. Writer thread only, with no transaction open.

        `TimedOut` if one stays for longer than `wait_seconds`, normally `grow_wait_seconds`.
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
        """LMDB's own figures, for `doctor` and metrics."""
        try:
            with self._inside() as env:
                figures: dict[str, Any] = {**env.info()}
                figures.update(page_size=env.stat()["psize"], file_bytes=os.stat(self.path).st_size)
                return figures
        except (lmdb.Error, OSError) as error:
            raise self.explain(error) from error

    def report_long_reads(self) -> None:
        """Warn once about each read transaction that has been open for too long."""
        for age, thread in self.gate.unreported(self.settings.long_read_seconds):
            hint = "LMDB cannot reuse pages while a read transaction is open; end it"
            emit_safely("warning", "manifest.long_read", seconds=round(age, 1), thread=thread, hint=hint)

    def copy(self, path: str) -> None:
        """A consistent copy of the environment while it is in use (a hot backup). The map does not grow meanwhile."""
        try:
            with self._inside() as env:
                env.copy(path, compact=True)
        except (lmdb.Error, OSError) as error:
            raise (translate(error, path) if self._closed is None else self.explain(error)) from error

    # ── the end ───────────────────────────────────────────────────────────────────────────────────────────────────────
    def close(self) -> None:
        """Close the environment; further use raises `StoreClosed`. If it is interrupted, call it again."""
        if self._is_over:
            return
        self._closed = ("the manifest is closed", "open the store again")
        try:
            self.gate.exclusive(CLOSE_WAIT_SECONDS, self._env.close)
        except TimedOut:
            self._cut_off()
        self._is_over = True

    def _cut_off(self) -> None:
        """Close under transactions that stay: they raise `StoreClosed` from then on.

        py-lmdb's `close` marks them, then waits for calls under way, but only once: a thread between two steps of one call
        goes on to read memory that is no longer mapped, and the process dies. Its `set_mapsize` waits until there is none,
        and ends all transactions: what comes later is refused.
        """
        with suppress(lmdb.Error):  # a write transaction is open: `close` waits for that
            self._env.set_mapsize(0)
        self._env.close()

    def _forked(self) -> None:
        """Drop the environment in a forked child without touching LMDB: slots and locks are the parent's."""
        visitors = self.gate.visitors()
        _keep_for_ever((self._env, *visitors))
        if not self._is_over:
            _inherited.add(os.path.realpath(self.path))
        self._closed = ("the manifest belongs to the parent of this fork()", _NO_FORK)
        self._is_over = True
        self.gate = MapGate()
        for visitor in visitors:
            visitor.abandon()
        for hook in self.fork_hooks:
            hook()

    def out_of_room(self) -> bool:
        """Whether the file could not grow by a MiB. LMDB calls a short write, which is how a disk fills up, EIO."""
        limit, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
        disk = os.statvfs(self.path)
        used = os.stat(self.path).st_size
        return disk.f_bavail * disk.f_frsize < MIB or (limit != resource.RLIM_INFINITY and used + MIB > limit)


class _Guest:
    """A visitor that has no transaction: a copy, a look at LMDB's figures."""

    def abandon(self) -> None:
        """Its thread is not in the child."""


_LIVE: weakref.WeakSet[ManifestEnv] = weakref.WeakSet()
_inherited: set[str] = set()
"""The manifests that were open when this process was forked."""


class _Knot(msgspec.Struct, gc=False):
    """Holds on to itself, out of the garbage collector's sight: never freed, not even when Python ends."""

    held: object
    itself: _Knot | None = None


def _keep_for_ever(held: object) -> None:
    knot = _Knot(held)
    knot.itself = knot


def _after_fork_in_child() -> None:
    for env in list(_LIVE):
        env._forked()


os.register_at_fork(after_in_child=_after_fork_in_child)


_READERS_TOO = "readers need it too: they leave a mark there, so that the owner keeps the pages they look at"


def denied(path: str, *, write: bool) -> QuireError | None:
    """The file or directory of the manifest at `path` that this user has too few rights to, and what to do about it."""
    folder, lock = os.path.dirname(path) or ".", f"{path}-lock"
    if not _may(folder, os.X_OK):
        return StorageFault("this user may not enter the manifest's directory", hint="`chmod +x` it", path=folder)
    if not os.path.exists(path):
        if not _may(folder, os.W_OK):
            return NotWritable("this user may not make a manifest here", hint="`chmod +w` the directory", path=folder)
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
                "the manifest's lock file is missing, and this user may not make it", hint=hint, path=lock
            )
    elif not _may(lock, os.R_OK | os.W_OK):
        hint = f"`chmod +rw` this file for the user; {_READERS_TOO}"
        return NotWritable("this user may not write the manifest's lock file", hint=hint, path=lock)
    return None


def _may(path: str, mode: int) -> bool:
    return os.access(path, mode, effective_ids=True)
