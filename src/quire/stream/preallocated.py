"""Files that are to become segments: made ahead, zero-filled, or taken over from segments that are gone.

Rules
  1. A spare is named `.tmp` until it is a segment: what a crash leaves is swept when the stream is opened.
  2. One is kept ahead, not more. A full disk is `DiskFull` and changes nothing.
  3. What a taken-over file holds means nothing in its new life: the header's salt is new, and every checksum depends on it.

Threads: any; one lock around what is kept, none while a file is made. Raises what the disk raises.
"""

from __future__ import annotations

import threading
from contextlib import suppress
from itertools import count

from quire.core.errors import StorageFault
from quire.core.events import emit
from quire.core.limits import KIB
from quire.durable.failpoints import hit
from quire.durable.files import File, preallocate
from quire.durable.names import Tier
from quire.stream.files import StreamFiles
from quire.stream.segment import ALIGN, aligned

SEGMENT_BYTES_MIN = 256 * KIB
"""The first segment of a stream. Each further one has twice what the one before had used: larger only if that was filled."""


TRIM_BYTES_MIN = 4 * KIB
"""Less than a block of the file system is not worth a call."""


def next_bytes(used: int, limit: int) -> int:
    """The size of a segment that follows one of which so much was used."""
    return min(limit, max(SEGMENT_BYTES_MIN, 2 * aligned(used, ALIGN)))


def trim(file: File, size: int) -> None:
    """Give back what a sealed file does not use (N2). A failure costs space, and is mended when the stream is opened."""
    try:
        if file.size() - size >= TRIM_BYTES_MIN:
            file.truncate(size)
    except StorageFault as fault:
        emit("warning", "stream.not_trimmed", path=file.path, error=str(fault))


class Spares:
    """The files made ahead for one stream."""

    def __init__(self, files: StreamFiles) -> None:
        self._files = files
        self._numbers = count(1)
        # guarded by _lock
        self._lock = threading.Lock()
        self._kept: tuple[File, int] | None = None
        self._closed = False
        self.recycled = 0

    @property
    def has_one(self) -> bool:
        return self._kept is not None

    def prepare(self, size: int) -> bool:
        """Make one, unless there is one; whether it is kept."""
        if self.has_one or self._closed:
            return False
        file = preallocate(self._files.disk, self._files.spare(next(self._numbers)), size)
        hit("stream.hot.prepared")
        return self._keep(file, size)

    def recycle(self, segment_id: int, size: int) -> bool:
        """Take over the file of a segment that is gone, if it has about this size and none is kept; else it is left alone."""
        path, disk = self._files.segment(Tier.HOT, segment_id), self._files.disk
        if self.has_one or self._closed or not disk.exists(path) or not size * 3 // 4 <= disk.size(path) <= size:
            return False
        target = self._files.spare(next(self._numbers))
        disk.rename(path, target)
        disk.sync_dir(self._files.folder(Tier.HOT))
        hit("stream.hot.recycled")
        file = disk.open(target)
        try:
            file.allocate(size)  # a sealed file has only what it used
        except StorageFault as fault:
            emit("info", "stream.not_recycled", path=target, error=str(fault))
            self._drop(file)
            return True
        self.recycled += 1
        self._keep(file, size)
        return True

    def take(self, size: int) -> tuple[File, int]:
        """A file of at least this size, and its size."""
        with self._lock:
            kept, self._kept = self._kept, None
        if kept is not None:
            if kept[1] >= size:
                return kept
            self._drop(kept[0])
        return preallocate(self._files.disk, self._files.spare(next(self._numbers)), size), size

    def close(self) -> None:
        """Give up what is kept."""
        if (kept := self._end()) is not None:
            self._drop(kept)

    def abandon(self) -> None:
        """The same as a crash would: the file stays, to be swept (rule 1)."""
        if (kept := self._end()) is not None:
            with suppress(StorageFault):
                kept.close()

    def _end(self) -> File | None:
        with self._lock:
            self._closed = True
            kept, self._kept = self._kept, None
        return None if kept is None else kept[0]

    def _keep(self, file: File, size: int) -> bool:
        with self._lock:
            if self._kept is None and not self._closed:
                self._kept = (file, size)
                return True
        self._drop(file)
        return False

    def _drop(self, file: File) -> None:
        with suppress(StorageFault, FileNotFoundError):  # what is left is swept at the next opening
            file.close()
            self._files.disk.remove(file.path)
