"""Bounds the number of open files: closes the descriptors of files that are not in use, and reopens them on the next use.

A process has 1,024 descriptors by default, and a store may have many more databases than that, each with a log
that is written occasionally. Engines therefore open the files they write through this `Disk`, and get a `File` as usual
(docs/decisions/024-open-files.md).

A clean file that was not used between two checks, one second apart, is closed. Above `limit` open files, a random file is
closed, used or not: if slightly more files than that are used in rotation, the one opened longest ago would always be the next
one needed. A *dirty* file, written and not synced since, keeps its descriptors, so that an error reported by a sync reaches the
writer. If all files are dirty, the one to close is synced first; if that fails, it stays open, and the writer's next sync
raises the error. All handles of a file are closed and reopened together: a file has two handles because Linux reports a
write-back error once per handle, and a handle opened after the write would miss it.

Why a use needs no lock: a use marks the entry as busy before it reads its handle, and the closing thread removes the handles
before it checks whether the entry is busy. So either the user finds no handle and waits for the lock, or the closing thread
finds the entry busy and puts the handles back. The marks are appends to a list; appending and testing it are atomic.

Locks, in this order: `_naming` while a path is opened or renamed, an entry's while its file is reopened, `_lock` for the pool's
tables. No system call is made under `_lock` (except the sync of a dirty file, if all are dirty): with more files in use than
the bound, each use opens a file, and threads must not wait for each other's system calls. `forget` takes only `_lock`, because
a finalizer may call it at any line.

Threads: any. Raises what the disk below raises.
"""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress

from quire.core.errors import StorageFault
from quire.core.events import emit
from quire.durable.files import DirectFile, Disk, DiskLayer, File, begin_write_back, write_synced

LOOK_SECONDS = 1.0
"""Between two checks for unused files."""

_RANDOM = random.Random()
"""Not the generator of the module, whose numbers belong to the program: it may have seeded it."""


class _OpenFile:
    """One file, identified by its path, and all of its handles in this pool. The pool's lock guards everything but `busy`,
    `is_dirty` and `was_used`."""

    __slots__ = ("busy", "failure", "handles", "identity", "is_dirty", "is_pinned", "opening", "path", "was_used")

    def __init__(self, path: str) -> None:
        self.path = path
        self.handles: list[PooledFile] = []
        self.identity = (0, 0)
        self.busy: list[None] = []
        self.is_dirty = False
        self.was_used = True
        self.is_pinned = False
        self.failure: StorageFault | None = None
        self.opening = threading.RLock()


class OpenFiles(DiskLayer):
    """A `Disk` that bounds the number of open writable files; all other operations are forwarded."""

    def __init__(self, inner: Disk, limit: int, *, ticking: bool = True) -> None:
        """With `ticking=False` no thread closes unused files; tests call `close_idle` instead."""
        super().__init__(inner)
        # constant after construction
        self._limit = limit
        self._ticking = ticking
        self._stopping = threading.Event()
        self._naming = threading.RLock()
        # guarded by _lock
        self._lock = threading.RLock()
        self._entries: dict[str, _OpenFile] = {}
        self._open: dict[_OpenFile, None] = {}
        """The entries with descriptors."""
        self._ticker: threading.Thread | None = None

    def __len__(self) -> int:
        """Return how many files have a descriptor."""
        return len(self._open)

    # ── opening ───────────────────────────────────────────────────────────────────────────────────────────────────────
    def open(self, path: str, *, create: bool = False, exclusive: bool = False, write: bool = True) -> File:
        """Open a file as `Disk.open` does; a writable file releases its descriptor while it is not in use."""
        if not write:
            return self._inner.open(path, create=create, exclusive=exclusive, write=False)
        return self._pooled(path, create=create, exclusive=exclusive, write=True)

    def open_to_read(self, path: str) -> File:
        """Open a read-only file that releases its descriptor while it is not in use.

        For files that are not removed while they have readers (tables of key-value databases). Other readers have their own
        bounds, and continue to read a removed file.
        """
        return self._pooled(path, create=False, exclusive=False, write=False)

    def _pooled(self, path: str, *, create: bool, exclusive: bool, write: bool) -> PooledFile:
        with self._naming:
            # Before the file is opened: at the limit of the process, opening it would fail.
            self._make_room(None)
            file = self._inner.open(path, create=create, exclusive=exclusive, write=write)
            try:
                entry = self._entry(path, _identity(file))
                entry.busy.append(None)  # from here on no thread closes it
                try:
                    with entry.opening:
                        if entry.handles:
                            self._open_again(entry)
                        handle = PooledFile(self, entry, file, writes=write)
                        with self._lock:
                            self._entries[path] = entry  # `forget` may have removed it in the meantime
                            entry.handles.append(handle)
                            entry.was_used = True
                            self._open[entry] = None
                finally:
                    entry.busy.pop()
            except BaseException:
                file.close()
                raise
            self._start_ticker()
            return handle

    def _entry(self, path: str, identity: tuple[int, int]) -> _OpenFile:
        """Return the entry of the file at a path, creating it if necessary."""
        with self._lock:
            entry = self._entries.get(path)
            if entry is not None and entry.identity != identity:
                # The path now names another file. Existing handles keep the former one, which could not be reopened.
                entry.is_pinned = True
                entry = None
            if entry is None:
                entry = self._entries[path] = _OpenFile(path)
                entry.identity = identity
            return entry

    def _open_again(self, entry: _OpenFile) -> None:
        """Reopen all handles of an entry together, if none is open and the path still names the same file.

        REQUIRES that the entry is busy, and its lock.
        """
        with self._lock:
            handles = [] if entry in self._open else [*entry.handles]
        files: list[File] = []
        try:
            for handle in handles:
                file = self._inner.open(entry.path, write=handle.writes)
                files.append(file)
                if _identity(file) != entry.identity:
                    raise StorageFault(
                        "the file was replaced while it was not in use",
                        hint="restore the original file, then open the database again; only quire may change it",
                        path=entry.path,
                    )
        except BaseException:
            for file in files:
                file.close()
            raise
        closed: list[File] = []
        with self._lock:
            for handle, file in zip(handles, files, strict=True):
                if handle in entry.handles:
                    handle.file = file
                    self._open[entry] = None
                else:
                    closed.append(file)
        for file in closed:
            file.close()

    def reopen(self, handle: PooledFile) -> File:
        """Return the file of a handle that was found without one, reopening it; for `PooledFile`.

        REQUIRES that the entry is marked as busy.
        """
        entry = handle.entry
        with entry.opening:
            with self._lock:  # so that no thread is between removing the handles and putting them back
                if entry.failure is not None:
                    raise entry.failure
                is_closed, file = handle not in entry.handles, handle.file
            if file is None and not is_closed:
                self._make_room(entry)
                self._open_again(entry)
                self._start_ticker()
                with self._lock:
                    file = handle.file
            if file is None:
                raise StorageFault("the file was closed", path=entry.path)
            return file

    # ── closing ───────────────────────────────────────────────────────────────────────────────────────────────────────
    def close_idle(self) -> int:
        """Close the files that were not used since the last check, and return how many."""
        with self._lock:
            # Copies: a finalizer may call `forget` in this thread at any step.
            idle = [entry for entry in [*self._open] if not entry.was_used and not entry.is_dirty]
            for entry in [*self._open]:
                entry.was_used = False
            detached = [files for entry in idle if (files := self._detach_files(entry))]
        _close_all(detached)
        return len(detached)

    def _make_room(self, but: _OpenFile | None) -> None:
        """Close entries until the bound holds, syncing dirty ones first."""
        if len(self._open) < self._limit:
            return
        detached: list[list[File]] = []
        with self._lock:
            entries = list(self._open)
            start = _RANDOM.randrange(len(entries)) if entries else 0
            for syncing in (False, True):
                for entry in entries[start:] + entries[:start]:
                    if len(self._open) < self._limit:
                        break
                    if entry not in self._open:  # a finalizer called `forget` in the meantime
                        continue
                    if syncing and entry.is_dirty and not entry.busy and not entry.is_pinned:
                        self._sync(entry)
                    if entry is not but and (files := self._detach_files(entry)):
                        detached.append(files)
        _close_all(detached)

    def _sync(self, entry: _OpenFile) -> None:
        """Sync an entry on behalf of its writer, unless it is in use. REQUIRES the lock.

        The handles are removed during the sync, so that a concurrent use waits for the lock and then sees the failure. Linux
        reports a write-back error once per handle: a concurrent sync by the writer would succeed.
        """
        files = [(handle, handle.file) for handle in entry.handles]
        for handle, _ in files:
            handle.file = None
        try:
            if entry.busy:
                return
            entry.is_dirty = False
            for _, file in files[:1]:
                if file is not None:
                    file.sync()
        except BaseException as error:
            entry.is_dirty = True  # also if a signal handler raised: it is unknown whether the file is synced
            if not isinstance(error, StorageFault):
                raise
            emit("error", "files.sync_failed", path=entry.path, error=str(error))
            entry.failure = error
        finally:
            _put_back(entry, files)

    def _detach_files(self, entry: _OpenFile) -> list[File]:
        """Remove an entry's files from its handles and return them, to be closed without the lock.

        Empty if a thread is using them, or an error of theirs must still reach the writer. REQUIRES the lock.
        """
        if entry.is_pinned or entry.is_dirty or entry.busy or entry.failure is not None:
            return []
        files = [(handle, handle.file) for handle in entry.handles]
        for handle, _ in files:
            handle.file = None
        if entry.busy or entry.is_dirty:
            _put_back(entry, files)
            return []
        self._open.pop(entry, None)  # unless a finalizer called `forget` in the meantime
        return [file for _, file in files if file is not None]

    def forget(self, handle: PooledFile) -> None:
        """Close a handle permanently; for `PooledFile`."""
        with self._lock:
            entry, file = handle.entry, handle.file
            handle.file = None
            if handle in entry.handles:
                entry.handles.remove(handle)
            if not entry.handles:
                self._open.pop(entry, None)
                if self._entries.get(entry.path) is entry:
                    del self._entries[entry.path]
        if file is not None:
            file.close()

    def _start_ticker(self) -> None:
        if self._ticking and self._ticker is None and not self._stopping.is_set():
            self._ticker = threading.Thread(target=self._tick, name="quire-files", daemon=True)
            self._ticker.start()

    def _tick(self) -> None:
        try:
            while not self._stopping.wait(LOOK_SECONDS):
                self.close_idle()
                with self._lock:
                    if not self._open:  # an idle store needs no thread; opening the next file starts one
                        self._ticker = None
                        return
        except BaseException:
            self._ticker = None  # opening the next file starts another thread
            raise

    def close(self) -> None:
        """Stop the thread that closes unused files. Handles are closed by their owners."""
        self._stopping.set()
        ticker = self._ticker
        if ticker is not None:
            ticker.join()

    def rename(self, source: str, target: str) -> None:
        """Rename as `Disk.rename` does; open handles follow the file."""
        with self._naming:
            entry = self._entries.get(source)
            with entry.opening if entry is not None else nullcontext():  # no reopening under the former name
                self._inner.rename(source, target)
                with self._lock:
                    if (entry := self._entries.pop(source, None)) is not None:
                        entry.path = target
                        self._entries[target] = entry


class PooledFile(DirectFile):
    """A `File` whose descriptor is closed and reopened by the pool. Created by `OpenFiles.open`."""

    __slots__ = ("_pool", "entry", "file", "writes")

    def __init__(self, pool: OpenFiles, entry: _OpenFile, file: File, *, writes: bool) -> None:
        self._pool = pool
        self.entry = entry
        self.writes = writes
        self.file: File | None = file
        """`None` while it has no descriptor. Written by the pool, under its lock; read by any thread."""

    @property
    def path(self) -> str:
        return self.entry.path

    def read_at(self, size: int, offset: int) -> bytes:
        entry = self.entry
        entry.busy.append(None)
        try:
            entry.was_used = True
            return (self.file or self._pool.reopen(self)).read_at(size, offset)
        finally:
            entry.busy.pop()

    def write_at(self, data: bytes | bytearray | memoryview, offset: int) -> None:
        entry = self.entry
        entry.busy.append(None)
        try:
            file = self.file or self._pool.reopen(self)
            entry.was_used = entry.is_dirty = True
            file.write_at(data, offset)
            entry.is_dirty = True  # again: a sync that began during the write may not cover all of it
        finally:
            entry.busy.pop()

    def write_synced_at(self, data: bytes | bytearray | memoryview, offset: int) -> None:
        """Write as `files.write_synced` does. Whether the file is dirty does not change, unless the write fails."""
        entry = self.entry
        entry.busy.append(None)
        try:
            file = self.file or self._pool.reopen(self)
            if entry.failure is not None:  # as in `sync`: no later write is reported as durable
                raise entry.failure
            entry.was_used = True
            try:
                write_synced(file, data, offset)
            except BaseException:
                entry.is_dirty = True
                raise
        finally:
            entry.busy.pop()

    def begin_write_back(self, size: int, offset: int) -> None:
        """Start write-back, as `files.begin_write_back` does."""
        entry = self.entry
        entry.busy.append(None)
        try:
            begin_write_back(self.file or self._pool.reopen(self), size, offset)
        finally:
            entry.busy.pop()

    @contextmanager
    def _in_use(self) -> Iterator[File]:
        """Yield the file and keep it open during the block.

        Calls that are part of every commit or read mark the entry themselves, because a context manager costs as much as the
        system call.
        """
        self.entry.busy.append(None)
        try:
            yield self.file or self._pool.reopen(self)
        finally:
            self.entry.busy.pop()

    def sync(self) -> None:
        entry = self.entry
        entry.busy.append(None)
        try:
            file = self.file or self._pool.reopen(self)
            if entry.failure is not None:
                raise entry.failure
            entry.was_used, entry.is_dirty = True, False  # before the sync, so that a concurrent write sets it again
            try:
                file.sync()
            except BaseException:
                entry.is_dirty = True
                raise
        finally:
            entry.busy.pop()

    def size(self) -> int:
        with self._in_use() as file:
            return file.size()

    def truncate(self, size: int) -> None:
        with self._in_use() as file:
            self.entry.was_used = self.entry.is_dirty = True
            file.truncate(size)

    def allocate(self, size: int) -> None:
        with self._in_use() as file:
            self.entry.was_used = self.entry.is_dirty = True
            file.allocate(size)

    def drop_cached_pages(self) -> None:
        """Drop cached pages, as `files.drop_cached_pages` does, without pinning the descriptor."""
        with self._in_use() as file, suppress(OSError, AttributeError):
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)

    def fileno(self) -> int:
        with self._in_use() as file:
            self.entry.is_pinned = True  # a map or a lock needs the descriptor: it stays open until the file is closed
            return file.fileno()

    def close(self) -> None:
        self._pool.forget(self)


def open_to_read(disk: Disk, path: str) -> File:
    """Open a file that its owner keeps open for reading, within the bound on open files if the disk has one."""
    return disk.open_to_read(path) if isinstance(disk, OpenFiles) else disk.open(path, write=False)


def _put_back(entry: _OpenFile, files: list[tuple[PooledFile, File | None]]) -> None:
    for handle, file in files:
        if handle in entry.handles:
            handle.file = file
        elif file is not None:  # a finalizer called `forget` in the meantime
            file.close()


def _close_all(detached: list[list[File]]) -> None:
    for files in detached:
        for file in files:
            file.close()


def _identity(file: File) -> tuple[int, int]:
    status = os.fstat(file.fileno())
    return status.st_dev, status.st_ino
