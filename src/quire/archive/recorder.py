"""A `Disk` that hands every change of a store's files over to the archive's queue (A5).

Terms
  shipped    files whose bytes go into the log as they are written: WAL segments, hot segments, logs, small files
  artifact   a file that is complete when it gets its name or is synced, and never changes: tables, compressed segments. It is
             uploaded as an object of its own
  ignored    files that can be recreated or are in the bucket already: caches, scratch, leases, tokens

Rules
  1. A change is handed over after it was made and before the call returns, by the thread that made it. No thread can rely on a
     change whose event is not in the queue.
  2. Files are identified by inode, which does not change when they are renamed, linked, closed or reopened. An inode number
     that is reused identifies another file from its `CreateEvent` on.
  3. A write that raises is not handed over: it leaves the same state as a torn write.
  4. While the queue is closed, nothing is recorded. Whether it is open is checked *after* each change: a change made before
     it was opened is on disk when a base is read.
  5. A shipped file that was written elsewhere (staged by a job and renamed) is handed over whole.
  6. Changes of a file that has lost its last name are not handed over: one thread may still zero-fill a log that another has
     removed, and a base that is read in between does not contain the file. So a name and its event change under one lock, and
     a thread that hands over a write checks under that lock whether the file has a name. This is remembered for open files,
     because a system call would release the interpreter lock in the middle of a commit.

Threads: any. Raises the errors of the disk below.
"""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from enum import Enum

from quire.archive.format import (
    AnyEvent,
    CreateEvent,
    DirectoryEvent,
    LinkEvent,
    RemoveEvent,
    RenameEvent,
    ReserveEvent,
    TruncateEvent,
    WriteEvent,
    ZeroEvent,
)
from quire.archive.queue import EventQueue
from quire.core.limits import KIB, MIB
from quire.durable import names
from quire.durable.files import DirectFile, Disk, DiskLayer, File, FileLayer, begin_write_back, write_synced

ZEROS = bytes(64 * KIB)
PIECE_BYTES = 4 * MIB
"""A large file is handed over in pieces of this size."""
ARCHIVE_STATE = "archive.json"
"""In a store's directory: the position of the archive. It concerns this directory only, so it is not shipped."""
SPOOL = "archive"
"""In a store's directory: files that wait to be uploaded."""
REMOTE_FILES = "remote_files.json"
"""In a store's directory: artifacts that a restore left in the bucket."""


class Shipping(Enum):
    """How a file is archived."""

    BYTES = "its bytes are shipped as they are written"
    WHOLE = "it is shipped whole when it is complete"
    NOT = "it is not shipped"


def shipping(path: str) -> Shipping:
    """Return how the file with this path, relative to the store's directory, is archived.

    >>> shipping("pages/00000007/wal/0000001f.seg").name, shipping("lsm/00000007/sst/000031.sst").name
    ('BYTES', 'WHOLE')
    >>> shipping("pages/00000007/cache/00000007/00000002/base:00000003").name, shipping("readers/x.lease").name
    ('NOT', 'NOT')
    """
    parts = path.split("/")
    match parts[0]:
        case names.PAGES:
            return Shipping.BYTES if len(parts) == 4 and parts[2] == "wal" else Shipping.NOT
        case names.STREAMS:
            if len(parts) == 4 and parts[2] == names.Tier.WARM:
                return Shipping.WHOLE
            return Shipping.NOT if parts[-1].endswith(".lock") else Shipping.BYTES
        case names.LSM:
            return Shipping.WHOLE if len(parts) > 2 and parts[-2] == "sst" else Shipping.BYTES
        case names.CONFIG:
            return Shipping.BYTES
        case names.QUARANTINE:
            return Shipping.WHOLE if path.endswith(".sst") else Shipping.BYTES
    return Shipping.NOT


class Recorder(DiskLayer):
    """A `Disk` over another, for the owner of one store."""

    def __init__(self, inner: Disk, root: str, queue: EventQueue, complete: Callable[[str, str], None]) -> None:
        """Create the layer. `complete(path, relative)` is called for each artifact that is complete, and hands it over."""
        super().__init__(inner)
        # constant after construction
        self._prefix = os.path.join(os.path.abspath(root), "")
        self.queue = queue
        self._complete = complete
        self.naming = threading.Lock()
        """Held while names change, and while a change of a file's bytes is handed over (rule 6)."""
        # guarded by naming
        self.nameless: set[int] = set()
        """Open files that have lost their last name."""
        self._handles: dict[int, int] = {}
        """Number of handles of each open file."""
        self._renamed: dict[str, int] | None = None
        """Names that files have received while a base is read, with their inodes: its directory walk may have missed them."""

    # ── files ─────────────────────────────────────────────────────────────────────────────────────────────────────────
    def open(self, path: str, *, create: bool = False, exclusive: bool = False, write: bool = True) -> File:
        if not write or (kind := self._kind(path)) is Shipping.NOT:
            return self._inner.open(path, create=create, exclusive=exclusive, write=write)
        was_open = self.queue.is_open
        is_new = exclusive or (create and was_open and not self._inner.exists(path))
        file = self._inner.open(path, create=create, exclusive=exclusive, write=True)
        if kind is Shipping.WHOLE:
            return ArtifactFile(file, self)
        recorded = RecordedFile(file, self)
        # If the queue was opened during this call, a base may or may not have seen the file. It is empty, so creating
        # it twice loses nothing.
        if self.queue.is_open and (is_new or (create and not was_open and not file.size())):
            recorded.hand_over(CreateEvent(recorded.number, self._relative(path)))
        return recorded

    def completed(self, path: str) -> None:
        """Hand over an artifact that is complete, unless its name is still temporary. Called by `ArtifactFile`."""
        if self.queue.is_open and not path.endswith(names.TEMPORARY):
            self._complete(path, self._relative(path))

    def rename(self, source: str, target: str) -> None:
        before, after = self._kind(source), self._kind(target)
        if (before, after) == (Shipping.NOT, Shipping.NOT):
            self._inner.rename(source, target)
            return
        number = self._inode_at(source)
        with self.naming:
            # Before the rename: afterwards no path leads to the file that is replaced.
            replaced = _last_name_of(target)
            self._inner.rename(source, target)
            self._lose_name(replaced)
            if (before, after) == (Shipping.BYTES, Shipping.BYTES):
                if not self._inner.exists(source):  # else both name the same file, and rename(2) has done nothing
                    self.queue.append(RenameEvent(number, self._relative(source), self._relative(target)))
                    self._note_name(target, number)
                return
        if not self.queue.is_open:
            return
        if after is Shipping.WHOLE:
            self.completed(target)
        elif after is Shipping.BYTES:
            for event in whole_file(self._inner, target, self._relative(target)):
                self.queue.append(event)
        # After the new name: in between the file has both names, never none.
        if before is not Shipping.NOT:
            self.queue.append(RemoveEvent(number, self._relative(source)))

    def link(self, source: str, target: str) -> None:
        if self._kind(target) is not Shipping.BYTES:
            self._inner.link(source, target)
            if self._kind(target) is Shipping.WHOLE:
                self.completed(target)
            return
        with self.naming:  # a base's walk may miss both names if the first one is removed meanwhile
            self._inner.link(source, target)
            number = self._inode_at(target)
            self.queue.append(LinkEvent(number, self._relative(target)))
            self._note_name(target, number)

    def remove(self, path: str) -> None:
        if self._kind(path) is Shipping.NOT:
            self._inner.remove(path)
            return
        number = self._inode_at(path)
        with _blocks_kept(path), self.naming:
            removed = _last_name_of(path)
            self._inner.remove(path)
            self._lose_name(removed)
            self.queue.append(RemoveEvent(number, self._relative(path)))

    def _lose_name(self, number: int) -> None:
        # Without a handle no thread can write to the file, and the system may give its number to another one.
        if number in self._handles:
            self.nameless.add(number)

    def opened(self, file: File) -> int:
        """Count a handle of a file. Return the file's number. Called by `RecordedFile`."""
        with self.naming:
            status = os.fstat(file.fileno())
            self._handles[status.st_ino] = self._handles.get(status.st_ino, 0) + 1
            if not status.st_nlink:
                self.nameless.add(status.st_ino)
            return status.st_ino

    def closed(self, number: int) -> None:
        """Release a handle of a file. Called by `RecordedFile`. After the last one, the system may reuse the number."""
        with self.naming:
            self._handles[number] -= 1
            if not self._handles[number]:
                del self._handles[number]
                self.nameless.discard(number)

    def _note_name(self, path: str, number: int) -> None:
        if self._renamed is not None:
            self._renamed[path] = number

    def make_dirs(self, path: str) -> None:
        self._inner.make_dirs(path)
        relative = self._relative(path)
        if relative.split("/")[0] in (names.PAGES, names.STREAMS, names.LSM):
            self.queue.append(DirectoryEvent(relative))

    # ── while a base is read ──────────────────────────────────────────────────────────────────────────────────────────
    def watch_renames(self) -> None:
        """Begin to remember the names that files receive."""
        with self.naming:
            self._renamed = {}

    def renamed(self) -> dict[str, int]:
        """Return the paths that files received since the last call, with their inodes. A file may have received several, and
        lost some again."""
        with self.naming:
            renamed, self._renamed = self._renamed or {}, {}
            return renamed

    def end_watch(self) -> None:
        with self.naming:
            self._renamed = None

    def _relative(self, path: str) -> str:
        absolute = os.path.abspath(path)
        return absolute.removeprefix(self._prefix) if absolute.startswith(self._prefix) else ""

    def _kind(self, path: str) -> Shipping:
        relative = self._relative(path)
        return shipping(relative) if relative else Shipping.NOT

    def _inode_at(self, path: str) -> int:
        with suppress(FileNotFoundError):
            return os.stat(path).st_ino
        with closing(self._inner.open(path, write=False)) as file:  # the file is in the bucket (remote_files.py)
            return inode(file)


class RecordedFile(FileLayer, DirectFile):
    """A file whose bytes are shipped as they are written."""

    __slots__ = ("_is_closed", "_queue", "_recorder", "number")

    def __init__(self, inner: File, recorder: Recorder) -> None:
        super().__init__(inner)
        self._queue = recorder.queue
        self._recorder = recorder
        self._is_closed = False
        self.number = recorder.opened(inner)
        """The inode, which identifies the file in the archive."""

    def write_at(self, data: bytes | bytearray | memoryview, offset: int) -> None:
        self._inner.write_at(data, offset)
        # After the write: one that ended before the queue was opened is on disk when the base is read (rule 4).
        if self._queue.is_open:
            self._hand_over_write(data, offset)

    def write_synced_at(self, data: bytes | bytearray | memoryview, offset: int) -> None:
        write_synced(self._inner, data, offset)
        if self._queue.is_open:
            self._hand_over_write(data, offset)

    def begin_write_back(self, size: int, offset: int) -> None:
        begin_write_back(self._inner, size, offset)

    def truncate(self, size: int) -> None:
        self._inner.truncate(size)
        if self._queue.is_open:
            self.hand_over(TruncateEvent(self.number, size))

    def allocate(self, size: int) -> None:
        self._inner.allocate(size)
        if self._queue.is_open:
            self.hand_over(ReserveEvent(self.number, size))

    def close(self) -> None:
        """Close the file. Idempotent."""
        if not self._is_closed:
            self._is_closed = True
            self._recorder.closed(self.number)  # before the close: until then the number cannot be reused
        self._inner.close()

    def _hand_over_write(self, data: bytes | bytearray | memoryview, offset: int) -> None:
        if len(data) <= PIECE_BYTES:
            self.hand_over(write_event(self.number, offset, data))
            return
        # An object has whole events, and a bound that readers enforce. A cut between two pieces is a torn write.
        view = memoryview(data).cast("B")
        for start in range(0, len(view), PIECE_BYTES):
            self.hand_over(write_event(self.number, offset + start, view[start : start + PIECE_BYTES]))

    def hand_over(self, event: AnyEvent) -> None:
        """Hand over a change of this file, unless the file has lost its last name (rule 6)."""
        recorder = self._recorder
        with recorder.naming:
            if self.number not in recorder.nameless:
                self._queue.append(event)


class ArtifactFile(FileLayer, DirectFile):
    """A file that is written once. It is complete when it is synced under its final name."""

    __slots__ = ("_recorder",)

    def __init__(self, inner: File, recorder: Recorder) -> None:
        super().__init__(inner)
        self._recorder = recorder

    def write_synced_at(self, data: bytes | bytearray | memoryview, offset: int) -> None:
        write_synced(self._inner, data, offset)
        self._recorder.completed(self.path)

    def begin_write_back(self, size: int, offset: int) -> None:
        begin_write_back(self._inner, size, offset)

    def sync(self) -> None:
        self._inner.sync()
        self._recorder.completed(self.path)


def _last_name_of(path: str) -> int:
    """Return the number of the file if this is its only name, else 0; also 0 if there is no file."""
    try:
        status = os.stat(path)
    except FileNotFoundError:
        return 0
    return status.st_ino if status.st_nlink == 1 else 0


@contextmanager
def _blocks_kept(path: str) -> Iterator[None]:
    """Delay the freeing of a removed file's blocks until the block ends: it can take milliseconds, too long under a lock."""
    try:
        held = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except FileNotFoundError:  # the file is in the bucket
        held = -1
    try:
        yield
    finally:
        if held >= 0:
            os.close(held)


def write_event(number: int, offset: int, data: bytes | bytearray | memoryview) -> AnyEvent:
    """Return the event of a write, with a copy of the bytes, because callers reuse their buffers."""
    if len(data) >= len(ZEROS) and is_zero(data):
        return ZeroEvent(number, offset, len(data))
    return WriteEvent(number, offset, bytes(data))


def is_zero(data: bytes | bytearray | memoryview) -> bool:
    """Return whether all bytes are zero. For nearly all other data, the first comparison decides."""
    view = memoryview(data).cast("B")
    return all(view[at : at + len(ZEROS)] == ZEROS[: len(view) - at] for at in range(0, len(view), len(ZEROS)))


def inode(file: File) -> int:
    """Return the number that identifies a file in the archive."""
    number: int | None = getattr(file, "number", None)  # set for a file in the bucket (remote_files.py)
    return os.fstat(file.fileno()).st_ino if number is None else number


def whole_file(disk: Disk, path: str, relative: str, seen: set[int] | None = None) -> list[AnyEvent]:
    """Return the events that recreate a file; only its name if its inode was `seen`. Writes made meanwhile are corrected by
    their own events, which follow in the log."""
    with closing(disk.open(path, write=False)) as file:
        number, size = inode(file), file.size()
        if seen is not None:
            if number in seen:
                # A second `CreateEvent` would take the first name away from the file (decision 038).
                return [LinkEvent(number, relative)]
            seen.add(number)
        events: list[AnyEvent] = [CreateEvent(number, relative)]
        for offset in range(0, size, PIECE_BYTES):
            if data := file.read_at(min(PIECE_BYTES, size - offset), offset):
                events.append(write_event(number, offset, data))
        events.append(ReserveEvent(number, size))
        return events


def sha256_of(path: str) -> bytes:
    """Return the SHA-256 of a file that never changes."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").digest()
