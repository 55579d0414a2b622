"""Where the files of one stream are, and the one clock that its timestamps come from.

All names are `quire.durable.names`' business; this module joins them to a root and lists what is there.

Rules
  1. `.tmp` files are never read: they are swept when the stream is opened.
  2. Timestamps of a stream, in blocks and in its manifest log, never fall in the order in which they are given out, whatever
     the machine's clock does: so segments and blocks can be searched by time.

Threads: any. Raises what the disk raises.
"""

from __future__ import annotations

import os
import threading
from contextlib import suppress

import msgspec

from quire.core.clock import Clock
from quire.durable.files import Disk
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
        """The path of a segment's copy in a tier."""
        name = StreamSegmentFile(stream_id=self.stream_id, tier=tier, segment_id=segment_id)
        return os.path.join(self.root, name.path)

    def spare(self, number: int) -> str:
        """The path of a file that is to become a segment."""
        return os.path.join(self.root, spare_path(self.stream_id, number))

    def make(self) -> None:
        """Make the directories."""
        for tier in Tier:
            self.disk.make_dirs(self.folder(tier))

    def segments(self, tier: Tier) -> list[int]:
        """The segments that have a file in a tier, in order."""
        try:
            names = self.disk.names(self.folder(tier))
        except FileNotFoundError:
            return []
        return sorted(number for name in names if (number := parse_segment_name(name)) is not None)

    def remove(self, tier: Tier, segment_ids: list[int]) -> None:
        """Remove files of segments, durably; those that are gone already are fine."""
        for segment_id in segment_ids:
            with suppress(FileNotFoundError):
                self.disk.remove(self.segment(tier, segment_id))
        if segment_ids:
            self.disk.sync_dir(self.folder(tier))

    def sweep(self) -> int:
        """Remove what a dead writer left half made (rule 1); how many files."""
        count = 0
        for folder in (self.folder(Tier.HOT), self.folder(Tier.WARM), self.home):
            left = [name for name in self.disk.names(folder) if name.endswith(TEMPORARY)]
            for name in left:
                self.disk.remove(os.path.join(folder, name))
            if left:
                self.disk.sync_dir(folder)
            count += len(left)
        return count


class StreamClock:
    """A clock whose wall time never falls (rule 2)."""

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
        """No timestamp from here on is below this one."""
        with self._lock:
            self._last_ms = max(self._last_ms, timestamp_ms)


class LogFiles(msgspec.Struct, frozen=True):
    """The files of one stream's manifest log."""

    disk: Disk
    root: str
    stream_id: int
    store_locked: bool = False
    """Whether the caller owns the store: its lock covers that of the log."""
    store_id: str = ""
    """The store's, which its chunks carry; empty if it is not known, and then any store's will do."""

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
        """The path of a chunk."""
        name = ManifestLogFile(stream_id=self.stream_id, chunk_index=index, temporary=temporary)
        return os.path.join(self.root, name.path)

    def snapshot(self, snapshot_id: int) -> str:
        """The path of a snapshot."""
        return os.path.join(self.root, ManifestLogSnapshotFile(stream_id=self.stream_id, snapshot_id=snapshot_id).path)

    def chunks(self) -> list[int]:
        """The indexes of the chunks that are here, in order."""
        parsed = [parse_path(self._relative(name)) for name in self._names()]
        return sorted(file.chunk_index for file in parsed if isinstance(file, ManifestLogFile) and not file.temporary)

    def snapshots(self) -> list[int]:
        """The ids of the snapshots that are here, newest first."""
        parsed = [parse_path(self._relative(name)) for name in self._names()]
        return sorted((file.snapshot_id for file in parsed if isinstance(file, ManifestLogSnapshotFile)), reverse=True)

    def sweep(self) -> int:
        """Remove what a dead writer left half made (rule 1); how many files."""
        left = [name for name in self._names() if name.endswith(TEMPORARY)]
        for name in left:
            with suppress(FileNotFoundError):
                self.disk.remove(os.path.join(self.directory, name))
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
