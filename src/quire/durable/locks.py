"""An advisory file lock that records its holder: one owner per store, one process per reader's lease.

The lock is the kernel's (`flock`), not the existence or contents of the file: it ends with the process, however that ends, and
a leftover file means nothing. The contents (pid, host, start time) serve error messages only. The file is never removed:
removing and recreating it would allow two locks. The lock is on an inode, but other processes find it by path: `verify` raises
as soon as the path no longer names that inode. After `fork()` the lock stays with the parent; in the child every call but
`close` raises `StoreClosed` (M12).

Threads: any. Local file systems only: over a network file system, `flock` guarantees what that file system does. Raises
`StoreLocked` with the holder's pid, `StoreFenced`, `StoreClosed`, and `StorageFault` if the file cannot be opened.
"""

from __future__ import annotations

import fcntl
import os
import time
import weakref
from contextlib import suppress
from typing import Self

import msgspec

from quire.core.clock import Clock, SystemClock, moment
from quire.core.closing import ClosedOnExit
from quire.core.decoding import UNDECODABLE, described
from quire.core.errors import StoreClosed, StoreFenced, StoreLocked, Unavailable
from quire.durable.files import translate, translated

ATTEMPTS = 5
PAUSE_SECONDS = 0.002
"""Between attempts. `is_held` probes with a shared lock for microseconds; five attempts over 8 ms outlast it."""
CONTENTS_BYTES_MAX = 4096


class LockHolder(msgspec.Struct, frozen=True, kw_only=True):
    """The process that took a lock, as it recorded itself."""

    pid: int
    host: str
    since_ms: int


class FileLock(ClosedOnExit):
    """A lock that this process holds; created by `acquire`, released by `close` or the end of the process."""

    __slots__ = ("__weakref__", "_fd", "_inode", "_path", "_pid")

    def __init__(self, fd: int, path: str) -> None:
        self._fd = fd
        self._inode = _inode_of(fd)
        self._path = path
        self._pid = os.getpid()
        _live.add(self)

    @classmethod
    def acquire(cls, path: str, clock: Clock | None = None) -> FileLock:
        """Take the lock without waiting, or raise `StoreLocked`; creates the file if necessary."""
        fd = _open_and_lock(path)
        try:
            me = LockHolder(pid=os.getpid(), host=os.uname().nodename, since_ms=(clock or SystemClock()).now_ms())
            # A full disk must not prevent opening the store: that may be the only way to free space.
            with suppress(OSError):
                os.ftruncate(fd, 0)
                os.pwrite(fd, msgspec.json.encode(me) + b"\n", 0)
        except BaseException:
            os.close(fd)
            raise
        return cls(fd, path)

    @property
    def path(self) -> str:
        return self._path

    def check(self) -> None:
        """Raise `StoreClosed` unless this process holds the lock."""
        if self._fd < 0 or self._pid != os.getpid():
            what = "the lock was released" if self._pid == os.getpid() else "the lock belongs to the parent of a fork()"
            raise StoreClosed(what, hint="open the store again in this process", path=self._path, pid=self._pid)

    def verify(self) -> None:
        """Raise `StoreFenced` unless the path still names the locked file. Costs one `stat`."""
        self.check()
        try:
            now = os.stat(self._path)
        except FileNotFoundError:
            raise self._lost("was removed", None) from None
        except OSError as error:
            # Not with `translated`: every sync calls `verify`, and a context manager costs as much as the `stat`.
            raise translate(error, self._path, "checking the lock file") from error
        if (now.st_dev, now.st_ino) != self._inode:
            raise self._lost("was renamed or replaced", holder(self._path))

    def _lost(self, how: str, successor: LockHolder | None) -> StoreFenced:
        hint = "writes have stopped; find the process or script that moved the file, then open the store again"
        where = {} if successor is None else {"successor_pid": successor.pid, "successor_host": successor.host}
        what = f"the lock file {how} while this process held it, so another process may own the store"
        return StoreFenced(what, hint=hint, path=self._path, **where)

    def close(self) -> None:
        """Release the lock. Does nothing in a forked child or when already closed."""
        if self._fd < 0:
            return
        fd, self._fd = self._fd, -1
        _live.discard(self)
        if self._pid == os.getpid():
            # Unlock explicitly: a descriptor that leaked into a child must not hold the store until the child ends.
            with suppress(OSError):
                os.ftruncate(fd, 0)
            fcntl.flock(fd, fcntl.LOCK_UN)
        os.close(fd)

    def _forget(self) -> None:
        """Close a forked child's copy without unlocking it: unlocking any copy unlocks all of them."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def __enter__(self) -> Self:
        self.check()
        return self


class NoopLock:
    """A placeholder for a lock that another lock already covers: a store's owner need not lock each of its logs, and one
    descriptor per log would exceed the limit of a process."""

    def verify(self) -> None:
        """Do nothing: the covering lock is verified by its owner."""

    def close(self) -> None:
        """Do nothing."""


_live: weakref.WeakSet[FileLock] = weakref.WeakSet()


def _forget_after_fork() -> None:
    for lock in list(_live):
        lock._forget()
    _live.clear()


os.register_at_fork(after_in_child=_forget_after_fork)


def is_held(path: str) -> bool:
    """Return whether any process, this one included, holds the lock at `path`; false for a missing file."""
    try:
        with translated(path, "opening the lock file"):
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        # Shared: two probes at the same time must not take each other for the holder.
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False


def holder(path: str) -> LockHolder | None:
    """Return the last holder recorded in the lock file, `None` if there is no readable record.

    It may no longer hold the lock: see `is_held`.
    """
    try:
        with translated(path, "opening the lock file"):
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    try:
        return _read_holder(fd)
    finally:
        os.close(fd)


def _inode_of(file: int | str) -> tuple[int, int]:
    status = os.stat(file)
    return status.st_dev, status.st_ino


def _open_and_lock(path: str) -> int:
    """Return a locked descriptor of the file at `path`."""
    for _ in range(ATTEMPTS):
        with translated(path, "opening the lock file"):
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            if not _try_lock(fd):
                raise _locked(path, _read_holder(fd))
            # If the file was moved away between opening and locking, no other process would see this lock: try again.
            with suppress(FileNotFoundError):
                if _inode_of(path) == _inode_of(fd):
                    return fd
        except BaseException:
            os.close(fd)
            raise
        os.close(fd)
    raise Unavailable(
        "the lock file keeps being replaced",
        hint="look for a script or sync tool that deletes or renames the file",
        path=path,
    )


def _try_lock(fd: int) -> bool:
    for attempt in range(ATTEMPTS):
        if attempt:
            time.sleep(PAUSE_SECONDS)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            continue
        return True
    return False


def _read_holder(fd: int) -> LockHolder | None:
    try:
        return msgspec.json.decode(os.pread(fd, CONTENTS_BYTES_MAX, 0), type=described(LockHolder))
    except (OSError, *UNDECODABLE):
        return None


def _locked(path: str, holder: LockHolder | None) -> StoreLocked:
    if holder is None:
        return StoreLocked("another process holds the lock", hint="wait for it to end", path=path, pid=None)
    if holder.pid == os.getpid():
        hint = "it is already open in this process: use that one, or close it first"
    else:
        hint = f"wait for process {holder.pid} to end or stop it, use quire.connect if it runs a server, or open with mode='r'"
    where = {"path": path, "pid": holder.pid, "host": holder.host, "since": moment(holder.since_ms)}
    return StoreLocked("another owner has this open", hint=hint, **where)
