"""Files that engines write to, within a bound: a descriptor is closed when its file is not used, and opened again when it is.

A process has 1,024 descriptors unless it asked for more, and a store may have many more databases than that, each with a log
that it writes to now and then. So engines open what they write through this `Disk`; what they hold is a `File` as before
(docs/decisions/024-open-files.md).

A clean file that was not used between two looks, a second apart, is closed. Beyond `limit` open files one is closed by
chance, used or not: where a few more files than that are used in turn, the one opened longest ago would always be the next to
be used. A *dirty* file, written and not synced since, keeps its descriptors: what a sync would report must reach the one who
wrote. If all are dirty, the one to close is synced first; should that fail, its writer is told by its next use of the file. All
handles of a file are closed and opened together: two handles are there because Linux tells of a failed write-back once per
handle, and one that was opened behind a write would miss that news.

Why a use needs no lock: it marks the entry as busy before it looks for its handle, and who closes takes the handles away
before it looks whether the entry is busy. So either the user finds no handle and waits for the lock, or the closer finds it
busy and gives the handles back. The marks are appends to a list, which are atomic, as is the look at it.

Locks, in this order: `_naming` while a path is opened or renamed, an entry's while its file is opened again, `_lock` for what
is known. No system call is made under `_lock` (but the sync of a dirty file, if all are): with more files in use than the
bound, each use opens one, and threads must not wait for each other's calls. `forget` takes `_lock` alone, because the end of
an object may call it at any line.

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
"""Between two looks for what is not used."""


class _OpenFile:
    """One file by its path, with all handles that are open on it here. All but `busy`, `is_dirty` and `was_used` is guarded by
    the pool's lock."""

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
    """A `Disk` whose files to write are kept within a bound; everything else is the disk's below."""

    def __init__(self, inner: Disk, limit: int, *, ticking: bool = True) -> None:
        """`ticking=False`: nothing is closed by time; tests call `close_idle`."""
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
        """Those with descriptors."""
        self._ticker: threading.Thread | None = None

    def __len__(self) -> int:
        """How many files have a descriptor."""
        return len(self._open)

    # ── opening ───────────────────────────────────────────────────────────────────────────────────────────────────────
    def open(self, path: str, *, create: bool = False, exclusive: bool = False, write: bool = True) -> File:
        """As `Disk.open`; a file to write gives its descriptor up while it is not used."""
        if not write:
            return self._inner.open(path, create=create, exclusive=exclusive, write=False)
        return self._pooled(path, create=create, exclusive=exclusive, write=True)

    def open_to_read(self, path: str) -> File:
        """A file to read that gives its descriptor up while it is not used: for files that stay as long as somebody has them
        open (tables of key-value databases). Other readers have bounds of their own, and read on when a file is removed."""
        return self._pooled(path, create=False, exclusive=False, write=False)

    def _pooled(self, path: str, *, create: bool, exclusive: bool, write: bool) -> PooledFile:
        with self._naming:
            self._make_room(None)
            file = self._inner.open(path, create=create, exclusive=exclusive, write=write)
            try:
                entry = self._entry(path, _identity(file))
                entry.busy.append(None)  # from here on nobody closes it
                try:
                    with entry.opening:
                        if entry.handles:
                            self._open_again(entry)
                        handle = PooledFile(self, entry, file, writes=write)
                        with self._lock:
                            self._entries[path] = entry  # it may have been forgotten meanwhile
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
        """What is known of the file under a path."""
        with self._lock:
            entry = self._entries.get(path)
            if entry is not None and entry.identity != identity:
                # Under this path is another file now; whoever has the former one goes on with it, while it is open.
                entry.is_pinned = True
                entry = None
            if entry is None:
                entry = self._entries[path] = _OpenFile(path)
                entry.identity = identity
            return entry

    def _open_again(self, entry: _OpenFile) -> None:
        """Open all handles of an entry together, if it has none that is open and the path still leads to the same file.
        REQUIRES that the entry is busy, and its lock."""
        with self._lock:
            handles = [] if entry in self._open else [*entry.handles]
        files: list[File] = []
        try:
            for handle in handles:
                file = self._inner.open(entry.path, write=handle.writes)
                files.append(file)
                if _identity(file) != entry.identity:
                    raise StorageFault(
                        "the file was replaced while it was not used",
                        hint="only quire may change files of a store; restore it, then open the database again",
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

    def wake(self, handle: PooledFile) -> File:
        """The file of a handle that was found without one, and was marked as busy before; for `PooledFile`."""
        entry = handle.entry
        with entry.opening:
            if entry.failure is not None:
                raise entry.failure
            with self._lock:  # not between the two looks of one who closes
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
        """Close what was not used since the last look; how many files."""
        with self._lock:
            idle = [entry for entry in self._open if not entry.was_used and not entry.is_dirty]
            for entry in self._open:
                entry.was_used = False
            taken = [files for entry in idle if (files := self._take(entry))]
        _close_all(taken)
        return len(taken)

    def _make_room(self, but: _OpenFile | None) -> None:
        """Close entries until the bound holds, syncing dirty ones first."""
        if len(self._open) < self._limit:
            return
        taken: list[list[File]] = []
        with self._lock:
            entries = list(self._open)
            start = random.randrange(len(entries)) if entries else 0
            for syncing in (False, True):
                for entry in entries[start:] + entries[:start]:
                    if len(self._open) < self._limit:
                        break
                    if syncing and entry.is_dirty and not entry.busy and not entry.is_pinned:
                        self._sync(entry)
                    if entry is not but and (files := self._take(entry)):
                        taken.append(files)
        _close_all(taken)

    def _sync(self, entry: _OpenFile) -> None:
        file = entry.handles[0].file
        entry.is_dirty = False
        try:
            if file is not None:
                file.sync()
        except StorageFault as fault:
            emit("error", "files.sync_failed", path=entry.path, error=str(fault))
            entry.failure = fault
            entry.is_dirty = True

    def _take(self, entry: _OpenFile) -> list[File]:
        """Take an entry's files away, to be closed without the lock; none if somebody is using them, or must not miss their
        news. REQUIRES the lock."""
        if entry.is_pinned or entry.is_dirty or entry.busy or entry.failure is not None:
            return []
        files = [(handle, handle.file) for handle in entry.handles]
        for handle, _ in files:
            handle.file = None
        if entry.busy or entry.is_dirty:
            for handle, file in files:
                handle.file = file
            return []
        del self._open[entry]
        return [file for _, file in files if file is not None]

    def forget(self, handle: PooledFile) -> None:
        """A handle is closed for good; for `PooledFile`."""
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
        while not self._stopping.wait(LOOK_SECONDS):
            self.close_idle()
            with self._lock:
                if not self._open:  # an idle store needs no thread; the next file that is opened starts another
                    self._ticker = None
                    return

    def close(self) -> None:
        """End the looks; files are closed by who has opened them."""
        self._stopping.set()
        ticker = self._ticker
        if ticker is not None:
            ticker.join()

    def rename(self, source: str, target: str) -> None:
        """As `Disk.rename`; handles that are open on the file go with it."""
        with self._naming:
            entry = self._entries.get(source)
            with entry.opening if entry is not None else nullcontext():  # or it would be opened by its former name
                self._inner.rename(source, target)
                with self._lock:
                    if (entry := self._entries.pop(source, None)) is not None:
                        entry.path = target
                        self._entries[target] = entry


class PooledFile(DirectFile):
    """A `File` whose descriptor comes and goes. Made by `OpenFiles.open`."""

    __slots__ = ("_pool", "entry", "file", "writes")

    def __init__(self, pool: OpenFiles, entry: _OpenFile, file: File, *, writes: bool) -> None:
        self._pool = pool
        self.entry = entry
        self.writes = writes
        self.file: File | None = file
        """`None` while it has no descriptor. The pool's, under its lock; read by all."""

    @property
    def path(self) -> str:
        return self.entry.path

    def read_at(self, size: int, offset: int) -> bytes:
        entry = self.entry
        entry.busy.append(None)
        try:
            entry.was_used = True
            return (self.file or self._pool.wake(self)).read_at(size, offset)
        finally:
            entry.busy.pop()

    def write_at(self, data: bytes | bytearray | memoryview, offset: int) -> None:
        entry = self.entry
        entry.busy.append(None)
        try:
            file = self.file or self._pool.wake(self)
            entry.was_used = entry.is_dirty = True
            file.write_at(data, offset)
            entry.is_dirty = True  # once more: a sync that began meanwhile need not cover all of it
        finally:
            entry.busy.pop()

    def write_synced_at(self, data: bytes | bytearray | memoryview, offset: int) -> None:
        """As `files.write_synced`: it leaves the file as dirty as it was."""
        entry = self.entry
        entry.busy.append(None)
        try:
            file = self.file or self._pool.wake(self)
            entry.was_used = True
            try:
                write_synced(file, data, offset)
            except BaseException:
                entry.is_dirty = True
                raise
        finally:
            entry.busy.pop()

    def begin_write_back(self, size: int, offset: int) -> None:
        """As `files.begin_write_back`."""
        entry = self.entry
        entry.busy.append(None)
        try:
            begin_write_back(self.file or self._pool.wake(self), size, offset)
        finally:
            entry.busy.pop()

    @contextmanager
    def _in_use(self) -> Iterator[File]:
        """The file, not closed meanwhile. Calls that are part of every commit or read mark the entry themselves: a context
        manager costs as much as the system call."""
        self.entry.busy.append(None)
        try:
            yield self.file or self._pool.wake(self)
        finally:
            self.entry.busy.pop()

    def sync(self) -> None:
        entry = self.entry
        entry.busy.append(None)
        try:
            file = self.file or self._pool.wake(self)
            if entry.failure is not None:
                raise entry.failure
            entry.was_used, entry.is_dirty = True, False  # before: what is written meanwhile makes it dirty again
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

    def forget_cached(self) -> None:
        """As `files.forget_cached`; asks for the descriptor without keeping it."""
        with self._in_use() as file, suppress(OSError, AttributeError):
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)

    def fileno(self) -> int:
        with self._in_use() as file:
            self.entry.is_pinned = True  # a map or a lock needs the descriptor: it stays open until it is closed
            return file.fileno()

    def close(self) -> None:
        self._pool.forget(self)


def open_to_read(disk: Disk, path: str) -> File:
    """A file that is kept open to be read for as long as its owner wants, within the bound if the disk has one."""
    return disk.open_to_read(path) if isinstance(disk, OpenFiles) else disk.open(path, write=False)


def _close_all(taken: list[list[File]]) -> None:
    for files in taken:
        for file in files:
            file.close()


def _identity(file: File) -> tuple[int, int]:
    status = os.fstat(file.fileno())
    return status.st_dev, status.st_ino
