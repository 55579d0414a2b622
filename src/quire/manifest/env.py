"""The LMDB environment: opening it, its map, its gate, and the translation of its errors.

Terms
  map    the address range LMDB may use; reserved large at open, so growing is the emergency path (M4)
  gate   what keeps `set_mapsize` and read transactions of this process apart: resizing under a live reader kills it
  slot   a place in LMDB's table of readers, shared by all processes

Rules
  1. One environment per process and file; only the owner opens it for writing, only the owner grows the map.
  2. A read transaction passes the gate when it begins and again when it ends; growing waits until none is inside.
  3. Every LMDB error leaves this module as one of ours, with what to do (completeness is tested).
  4. A file that is too short for the pages its meta page names is refused before LMDB touches them: reading beyond the end
     of a mapped file is SIGBUS, not an error.
  5. After fork() the child's environment is dead: LMDB's locks and slots belong to the parent (M12).

Threads: any thread may read; write transactions are begun by the writer thread alone.
Raises `ManifestDamaged`, `StoreNotFound`, `NotWritable`, `TooManyReaders`, `DiskFull`, `StorageFault`, `StoreClosed`.
"""

from __future__ import annotations

import errno
import os
import resource
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import lmdb

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
from quire.core.events import emit
from quire.core.limits import GIB, MIB
from quire.core.settings import ManifestSettings
from quire.durable.files import FULL_ERRNOS
from quire.manifest.change import CHANGE_LOG
from quire.manifest.tables import TABLES

TABLES_MAX = 96
"""Named databases LMDB makes room for: three times today's, because the number is fixed at open."""

assert CHANGE_LOG.name in TABLES
assert len(TABLES) <= TABLES_MAX

_ALREADY_OPEN = "already open in this process"
_RESTORE = "restore the manifest from a backup, or follow docs/operations.md"


def translate(error: lmdb.Error | OSError, path: str) -> QuireError:
    """What an LMDB error means for the caller (rule 3)."""
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
    if isinstance(error, (lmdb.ReadonlyError, lmdb.LockError)) or _mentions(
        error, errno.EACCES, errno.EROFS, errno.EPERM
    ):
        return NotWritable("the manifest cannot be opened for writing", hint="check owner and mode", path=path)
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


class Gate:
    """Counts read transactions of this process; `exclusive` waits until there are none and keeps new ones out."""

    def __init__(self) -> None:
        self._changed = threading.Condition(threading.Lock())
        self._inside: dict[int, tuple[float, str]] = {}
        self._closed = False
        self._next = 0

    def enter(self) -> int:
        with self._changed:
            while self._closed:
                self._changed.wait()
            self._next += 1
            self._inside[self._next] = (time.monotonic(), threading.current_thread().name)
            return self._next

    def leave(self, ticket: int) -> None:
        with self._changed:
            self._inside.pop(ticket, None)
            if self._closed:
                self._changed.notify_all()

    @contextmanager
    def exclusive(self, timeout: float) -> Iterator[None]:
        with self._changed:
            self._closed = True
            try:
                if not self._changed.wait_for(lambda: not self._inside, timeout):
                    raise TimedOut(
                        "open read transactions keep the manifest's map from growing",
                        hint="end them; `quire doctor` lists readers",
                        readers=sorted({name for _, name in self._inside.values()}),
                    )
                yield
            finally:
                self._closed = False
                self._changed.notify_all()

    def older_than(self, seconds: float) -> list[tuple[int, float, str]]:
        """(ticket, age, thread) of read transactions open for longer than `seconds`."""
        now = time.monotonic()
        with self._changed:
            return [(n, now - since, who) for n, (since, who) in self._inside.items() if now - since > seconds]


class ManifestEnv:
    """The opened environment with a handle per table."""

    def __init__(self, path: str, settings: ManifestSettings, *, write: bool, create: bool = True) -> None:
        self.path = path
        self.settings = settings
        self.write = write
        self.gate = Gate()
        self._reported: set[int] = set()
        self._closed: str | None = None
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
                raise translate(error, self.path) from error

    def _require_file(self) -> None:
        """LMDB takes an empty file for a new environment: fatal where there must be one already."""
        if not os.path.exists(self.path):
            raise StoreNotFound("there is no manifest here", hint="`quire init` makes a store", path=self.path)
        if os.path.getsize(self.path) == 0:
            raise ManifestDamaged("the manifest is empty", hint=_RESTORE, path=self.path)

    def _refuse_truncated(self) -> None:
        """Rule 4. Pages freed before they were ever written may lawfully lie beyond the end: then LMDB's verifier decides."""
        needed = (self._env.info()["last_pgno"] + 1) * self._env.stat()["psize"]
        present = os.stat(self.path).st_size
        if present >= needed:
            return
        from lmdb.verify import verify

        problems = verify(self.path, subdir=False)  # type: ignore[no-untyped-call]  # the module has no stubs
        if problems:
            raise ManifestDamaged(
                f"the manifest is truncated: {problems[0]}", hint=_RESTORE, path=self.path, bytes=present, needed=needed
            )

    def _open_tables(self) -> dict[str, Any]:
        """A handle per table; for readers of a store older than a table, `None`: it reads as empty."""
        handles: dict[str, Any] = {}
        if self.write:
            with self._env.begin(write=True) as txn:
                for name in TABLES:
                    handles[name] = self._env.open_db(name.encode(), txn=txn, create=True)
            return handles
        for name in TABLES:
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
            raise translate(error, self.path) from error

    def begin_read(self) -> tuple[lmdb.Transaction, int]:
        """A snapshot and the ticket to give back to `end_read`."""
        self._check()
        ticket = self.gate.enter()
        try:
            return self._begin_read(), ticket
        except lmdb.MapResizedError:
            self.gate.leave(ticket)
        except BaseException as error:
            self.gate.leave(ticket)
            if isinstance(error, lmdb.Error):
                raise translate(error, self.path) from error
            raise
        with self.gate.exclusive(self.settings.grow_wait_seconds):
            self._env.set_mapsize(0)
        return self.begin_read()

    def _begin_read(self) -> lmdb.Transaction:
        try:
            return self._env.begin()
        except lmdb.ReadersFullError:
            if not self._env.reader_check():
                raise
            return self._env.begin()

    def end_read(self, txn: lmdb.Transaction, ticket: int) -> None:
        """End a snapshot."""
        try:
            txn.abort()
        finally:
            self.gate.leave(ticket)

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

    def grow(self) -> None:
        """Double the map, behind the gate. Writer thread only, with no transaction open."""
        old = int(self._env.info()["map_size"])
        new = min(old * 2, self.settings.map_bytes_max)
        if new <= old:
            raise DiskFull("the manifest's map is full", hint="raise manifest.map_bytes_max in quire.toml", bytes=old)
        with self.gate.exclusive(self.settings.grow_wait_seconds):
            self._env.set_mapsize(new)
        emit("warning", "manifest.map_grown", path=self.path, old_bytes=old, new_bytes=new)

    # ── state ─────────────────────────────────────────────────────────────────────────────────────────────────────────
    def info(self) -> dict[str, int]:
        """LMDB's own figures, for `doctor` and metrics."""
        figures: dict[str, Any] = {**self._env.info()}
        figures.update(page_size=self._env.stat()["psize"], file_bytes=os.stat(self.path).st_size)
        return figures

    def report_long_reads(self) -> None:
        """Warn once about each read transaction that has been open for too long."""
        for ticket, age, who in self.gate.older_than(self.settings.long_read_seconds):
            if ticket not in self._reported:
                self._reported.add(ticket)
                emit(
                    "warning",
                    "manifest.long_read",
                    seconds=round(age, 1),
                    thread=who,
                    hint="LMDB cannot reuse pages while a read transaction is open; end it",
                )

    def copy(self, path: str) -> None:
        """A consistent copy of the environment while it is in use (a hot backup)."""
        self._check()
        try:
            self._env.copy(path, compact=True)
        except (lmdb.Error, OSError) as error:
            raise translate(error, path) from error

    def _check(self) -> None:
        if self._closed is not None:
            raise StoreClosed(self._closed, hint="open the store again", path=self.path)

    def close(self) -> None:
        """Close the environment; further use raises `StoreClosed`."""
        if self._closed is None:
            self._closed = "the manifest is closed"
            self._env.close()

    def _forked(self) -> None:
        self._closed = "the manifest belongs to the parent of this fork()"
        for hook in self.fork_hooks:
            hook()

    def out_of_room(self) -> bool:
        """Whether the file could not grow by a MiB. LMDB calls a short write, which is how a disk fills up, EIO."""
        limit, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
        disk = os.statvfs(self.path)
        used = os.stat(self.path).st_size
        return disk.f_bavail * disk.f_frsize < MIB or (limit != resource.RLIM_INFINITY and used + MIB > limit)


_LIVE: weakref.WeakSet[ManifestEnv] = weakref.WeakSet()


def _after_fork_in_child() -> None:
    for env in list(_LIVE):
        env._forked()


os.register_at_fork(after_in_child=_after_fork_in_child)
