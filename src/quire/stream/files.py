"""The paths of a stream's files and of its manifest log, its preallocated files, and the clock of its timestamps.

All names are built in `quire.durable.names`; this module joins them to a root and lists directories. `.tmp` files, which
include spares, are never read: they are removed when the stream is opened.

Threads: any. Raises: what the disk raises, `DiskFull`.
"""

from __future__ import annotations

import os
import threading
from contextlib import suppress
from itertools import count

import msgspec

from quire.core.clock import Clock
from quire.core.errors import StorageFault
from quire.core.events import emit
from quire.core.limits import KIB
from quire.durable.failpoints import hit
from quire.durable.files import Disk, File, preallocate, remove_if_exists
from quire.durable.names import (
    TEMPORARY,
    ManifestLogFile,
    ManifestLogLock,
    ManifestLogSnapshotFile,
    StreamSegmentFile,
    Tier,
    parse_path,
    parse_segment_name,
    spare_path,
    state_path,
    stream_dir,
    stream_home,
)
from quire.stream.mlog_format import Identity, identity_of
from quire.stream.segment import ALIGN, aligned


class StreamFiles(msgspec.Struct, frozen=True):
    """The files of one stream."""

    disk: Disk
    root: str
    stream_id: int

    @property
    def home(self) -> str:
        return os.path.join(self.root, stream_home(self.stream_id))

    @property
    def state(self) -> str:
        return os.path.join(self.root, state_path(self.stream_id))

    def folder(self, tier: Tier) -> str:
        return os.path.join(self.root, stream_dir(self.stream_id, tier))

    def segment(self, tier: Tier, segment_id: int) -> str:
        """Return the path of a segment's copy in a tier."""
        name = StreamSegmentFile(stream_id=self.stream_id, tier=tier, segment_id=segment_id)
        return os.path.join(self.root, name.path)

    def spare(self, number: int) -> str:
        """Return the path of a file that is to become a segment."""
        return os.path.join(self.root, spare_path(self.stream_id, number))

    def make(self) -> None:
        """Create the directories."""
        for tier in Tier:
            self.disk.make_dirs(self.folder(tier))

    def segments(self, tier: Tier) -> list[int]:
        """Return the ids of the segments that have a file in a tier, in order."""
        try:
            names = self.disk.names(self.folder(tier))
        except FileNotFoundError:
            return []
        return sorted(number for name in names if (number := parse_segment_name(name)) is not None)

    def remove(self, tier: Tier, segment_ids: list[int]) -> None:
        """Remove files of segments durably. Missing files are not errors."""
        for segment_id in segment_ids:
            remove_if_exists(self.disk, self.segment(tier, segment_id))
        if segment_ids:
            self.disk.sync_dir(self.folder(tier))

    def sweep(self) -> int:
        """Remove the temporary files that a dead writer left, and return how many."""
        removed = 0
        for folder in (self.folder(Tier.HOT), self.folder(Tier.WARM), self.home):
            left = [name for name in self.disk.names(folder) if name.endswith(TEMPORARY)]
            for name in left:
                self.disk.remove(os.path.join(folder, name))
            if left:
                self.disk.sync_dir(folder)
            removed += len(left)
        return removed


class StreamClock:
    """A clock whose wall time never goes back."""

    __slots__ = ("_clock", "_last_ms", "_lock", "monotonic")

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.monotonic = clock.monotonic
        # guarded by _lock
        self._lock = threading.Lock()
        self._last_ms = 0

    def now_ms(self) -> int:
        with self._lock:
            self._last_ms = max(self._last_ms, self._clock.now_ms())
            return self._last_ms

    def raise_to(self, timestamp_ms: int) -> None:
        """Return no timestamp below this one from now on."""
        with self._lock:
            self._last_ms = max(self._last_ms, timestamp_ms)


class LogFiles(msgspec.Struct, frozen=True):
    """The files of one stream's manifest log."""

    disk: Disk
    root: str
    stream_id: int
    store_locked: bool = False
    """Whether the caller holds the store's lock: the log then takes none."""
    store_id: str = ""
    """The store's id, which the log's chunks carry. Empty if it is unknown: then chunks of any store are accepted."""

    @property
    def identity(self) -> Identity:
        return identity_of(self.store_id, self.stream_id)

    @property
    def directory(self) -> str:
        return os.path.join(self.root, stream_dir(self.stream_id, "manifest"))

    @property
    def lock(self) -> str:
        return os.path.join(self.root, ManifestLogLock(stream_id=self.stream_id).path)

    def chunk(self, index: int, *, temporary: bool = False) -> str:
        """Return the path of a chunk."""
        name = ManifestLogFile(stream_id=self.stream_id, chunk_index=index, temporary=temporary)
        return os.path.join(self.root, name.path)

    def snapshot(self, snapshot_id: int) -> str:
        """Return the path of a snapshot."""
        return os.path.join(self.root, ManifestLogSnapshotFile(stream_id=self.stream_id, snapshot_id=snapshot_id).path)

    def chunks(self) -> list[int]:
        """Return the indexes of the local chunks, in order."""
        parsed = [parse_path(self._relative(name)) for name in self._names()]
        return sorted(file.chunk_index for file in parsed if isinstance(file, ManifestLogFile) and not file.temporary)

    def snapshots(self) -> list[int]:
        """Return the ids of the local snapshots, newest first."""
        parsed = [parse_path(self._relative(name)) for name in self._names()]
        return sorted((file.snapshot_id for file in parsed if isinstance(file, ManifestLogSnapshotFile)), reverse=True)

    def sweep(self) -> int:
        """Remove the temporary files that a dead writer left, and return how many."""
        left = [name for name in self._names() if name.endswith(TEMPORARY)]
        for name in left:
            remove_if_exists(self.disk, os.path.join(self.directory, name))
        if left:
            self.disk.sync_dir(self.directory)
        return len(left)

    def _names(self) -> list[str]:
        try:
            return self.disk.names(self.directory)
        except FileNotFoundError:
            return []

    def _relative(self, name: str) -> str:
        return f"{stream_dir(self.stream_id, 'manifest')}/{name}"


# ── preallocated files ─────────────────────────────────────────────────────────────────────────────────────────────────
SEGMENT_BYTES_MIN = 256 * KIB
"""Size of a stream's first segment. Each later one has twice the bytes that its predecessor used, so segments grow only while
they are filled."""


TRIM_BYTES_MIN = 4 * KIB
"""Freeing less than a block of the file system is not worth a call."""


def next_bytes(used: int, limit: int) -> int:
    """Return the size of a segment whose predecessor used `used` bytes."""
    return min(limit, max(SEGMENT_BYTES_MIN, 2 * aligned(used, ALIGN)))


def trim(file: File, size: int) -> None:
    """Truncate a sealed file to its used bytes (N2). A failure only costs space, and is corrected when the stream is opened."""
    try:
        if file.size() - size >= TRIM_BYTES_MIN:
            file.truncate(size)
    except StorageFault as fault:
        emit("warning", "stream.not_trimmed", path=file.path, error=str(fault))


class Spares:
    """Files that are to become segments of one stream: preallocated and zero-filled, or recycled from removed segments.

    At most one is kept. A full disk is `DiskFull` and changes nothing. The old contents of a recycled file are invalid: the
    header's salt is new, and every checksum depends on it. A lock guards the kept file; it is not held while a file is
    created.
    """

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
        """Preallocate a file unless one is kept; return whether the new one is kept."""
        if self.has_one or self._closed:
            return False
        file = preallocate(self._files.disk, self._files.spare(next(self._numbers)), size)
        hit("stream.hot.prepared")
        return self._keep(file, size)

    def recycle(self, segment_id: int, size: int) -> bool:
        """Take over the file of a removed segment if it has about this size and no file is kept; return False otherwise."""
        path, disk = self._files.segment(Tier.HOT, segment_id), self._files.disk
        if self.has_one or self._closed or not disk.exists(path) or not size * 3 // 4 <= disk.size(path) <= size:
            return False
        target = self._files.spare(next(self._numbers))
        # Renamed before a byte is overwritten: a crash then leaves a file to sweep, not a damaged segment.
        disk.rename(path, target)
        disk.sync_dir(self._files.folder(Tier.HOT))
        hit("stream.hot.recycled")
        file = disk.open(target)
        try:
            file.allocate(size)  # a sealed file was trimmed to its used bytes
        except StorageFault as fault:
            emit("info", "stream.not_recycled", path=target, error=str(fault))
            self._drop(file)
            return True  # the segment's file no longer exists
        self.recycled += 1
        self._keep(file, size)
        return True

    def take(self, size: int) -> tuple[File, int]:
        """Return a file of at least this size, and its size."""
        with self._lock:
            kept, self._kept = self._kept, None
        if kept is not None:
            if kept[1] >= size:
                return kept
            self._drop(kept[0])
        return preallocate(self._files.disk, self._files.spare(next(self._numbers)), size), size

    def close(self) -> None:
        """Remove the kept file, and keep no more."""
        if (kept := self._end()) is not None:
            self._drop(kept)

    def abandon(self) -> None:
        """Close as a crash would: the kept file stays on disk until it is swept."""
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
        with suppress(StorageFault, FileNotFoundError):  # a file that is left is swept at the next opening
            file.close()
            self._files.disk.remove(file.path)
