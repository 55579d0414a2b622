"""A follower: the state of a stream from its objects in tier 2 alone, kept up with by polling.

A poll folds what has come, in order: chunks, or bundles that hold them. A gap, a chunk that is missing although later ones
are there, is crossed by the newest snapshot behind it; without one the follower waits there and says so. The state equals the
owner's as of the last record seen. The mirror has one snapshot and the chunks since, as files of the follower's own, so that
a restart need not begin again. A segment is scheduled for hydration once, when its upload is seen.

Threads: one polls. Raises `ManifestIntegrityError` (the state stays where it was), and what disk and object store raise."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from quire.core.clock import Clock, SystemClock
from quire.core.errors import Corruption, ManifestIntegrityError, ObjectNotFound
from quire.core.events import emit
from quire.durable.files import write_atomic
from quire.durable.names import Tier
from quire.stream.files import LogFiles, StreamFiles
from quire.stream.mlog_format import CHUNK_BYTES, log_fields
from quire.stream.mlog_index import ManifestIndex
from quire.stream.mlog_reader import Chunk, LogPosition
from quire.stream.mlog_records import RecordType
from quire.stream.mlog_recovery import recover
from quire.stream.mlog_snapshot import LogSnapshot, write_snapshot
from quire.stream.mlog_states import STATES, Remote
from quire.stream.mlog_tier2 import LogListing, LogObjects, object_bytes
from quire.stream.warm import bounded, reader_of

MIRROR_CHUNKS = 64
"""Chunks of a mirror before they become a snapshot."""


class ToHydrate(msgspec.Struct, frozen=True, kw_only=True):
    """A segment to fetch."""

    segment_id: int
    key: str


class Polled(msgspec.Struct):
    """What a poll found."""

    chunks: int = 0
    records: int = 0
    jumped_to: int | None = None
    """The snapshot that a gap was crossed with."""
    waiting_for: int | None = None
    """The chunk that is missing although later ones are there."""
    hydrations: list[ToHydrate] = msgspec.field(default_factory=list)


class LogFollower:
    """Follows one stream."""

    def __init__(
        self, objects: LogObjects, mirror: LogFiles, *, clock: Clock | None = None, scheduled: Iterable[int] = ()
    ) -> None:
        self._objects = objects
        self._mirror = mirror
        self.segments = StreamFiles(mirror.disk, mirror.root, mirror.stream_id)
        """Where hydrated segments are; those of an earlier life are not fetched again."""
        self.segments.make()
        self.segments.sweep()
        self._scheduled = {*scheduled, *self.segments.segments(Tier.WARM)}
        mirror.disk.make_dirs(mirror.directory)
        mirror.sweep()
        recovered = recover(mirror, clock or SystemClock(), objects.fetch)
        self.index: ManifestIndex = recovered.index
        self.next_chunk = recovered.end.chunk_index
        """The chunk whose records come next."""

    def poll(self) -> Polled:
        """Fold what is new."""
        polled = Polled()
        listing = self._objects.listing()
        if not self.index.records:
            self._cross(listing, polled)
        before = self.index.records
        while (chunk := self._next(listing, polled)) is not None:
            self._keep(chunk)
            self.index.fold_chunk(chunk)
            self.next_chunk = chunk.last_index + 1
            polled.chunks += 1
        polled.records = self.index.records - before
        if len(self._mirror.chunks()) > MIRROR_CHUNKS:
            self._condense(LogPosition(self.next_chunk, CHUNK_BYTES))
        polled.hydrations = self._schedule()
        return polled

    def hydrate(self, wanted: Iterable[ToHydrate]) -> list[int]:
        """Fetch segments into the mirror, as compressed files, each checked against what was sealed; which are here now.

        One whose object is gone meanwhile is scheduled again by a later poll, unless the log says that it was deleted.
        """
        fetched = []
        for segment in wanted:
            info = self.index.get(segment.segment_id)
            if info is None or info.key != segment.key:
                continue  # retired, or moved, since
            size = info.field(RecordType.SEAL_SEGMENT, "durable_bytes")
            try:
                data = bounded(self._objects.store, segment.key, size)
            except ObjectNotFound:
                self._scheduled.discard(segment.segment_id)
                continue
            if reader_of(data, segment.key, size).verify() != info.field(RecordType.SEAL_SEGMENT, "segment_crc64"):
                raise Corruption("the object is not the segment that was sealed", key=segment.key)
            write_atomic(self._mirror.disk, self.segments.segment(Tier.WARM, segment.segment_id), data)
            fetched.append(segment.segment_id)
        return fetched

    def prune(self) -> list[int]:
        """Remove the files of segments that the stream no longer has; which."""
        gone = [segment_id for segment_id in self.segments.segments(Tier.WARM) if segment_id not in self.index.entries]
        self.segments.remove(Tier.WARM, gone)
        self._scheduled.difference_update(gone)
        return gone

    def _next(self, listing: LogListing, polled: Polled) -> Chunk | None:
        """The next chunk or bundle; crosses a gap if it can."""
        while True:
            if self.next_chunk in listing.chunks:
                return self._objects.get_chunk(self.next_chunk)
            if (span := listing.bundle_of(self.next_chunk)) is not None:
                return self._objects.get_bundle(*span)
            if not any(index > self.next_chunk for index in listing.chunks):
                return None
            if not self._cross(listing, polled):
                polled.waiting_for = self.next_chunk
                return None

    def _cross(self, listing: LogListing, polled: Polled) -> bool:
        snapshot = self._snapshot_behind(listing)
        if snapshot is None:
            return False
        emit(
            "info",
            "stream.mlog.follower_jumped",
            stream=self._objects.stream_id,
            chunk_index=snapshot.position.chunk_index,
            chunk_offset=snapshot.position.offset,
        )
        self.index = snapshot.index
        self.next_chunk = snapshot.position.chunk_index
        self._condense(snapshot.position)
        polled.jumped_to = snapshot.snapshot_id
        return True

    def _snapshot_behind(self, listing: LogListing) -> LogSnapshot | None:
        for snapshot_id in sorted(listing.snapshots, reverse=True):
            try:
                snapshot = self._objects.get_snapshot(snapshot_id)
            except ManifestIntegrityError as error:
                emit("warning", "stream.mlog.snapshot_damaged", stream=self._objects.stream_id, **log_fields(error))
                continue
            if snapshot.index.records > self.index.records:
                return snapshot
        return None

    def _condense(self, position: LogPosition) -> None:
        """Keep the state as a snapshot, and nothing that was before it."""
        older = self._mirror.snapshots()
        write_snapshot(self._mirror, max(older, default=0) + 1, position, self.index)
        for path in [*map(self._mirror.snapshot, older), *map(self._mirror.chunk, self._mirror.chunks())]:
            self._mirror.disk.remove(path)
        self._mirror.disk.sync_dir(self._mirror.directory)

    def _keep(self, chunk: Chunk) -> None:
        if chunk.index == chunk.last_index:
            write_atomic(self._mirror.disk, self._mirror.chunk(chunk.index), object_bytes(chunk))
            return
        # A bundle has no place among the chunks: what it amounts to has, a snapshot of the state behind it.
        self.index.fold_chunk(chunk)
        self._condense(LogPosition(chunk.last_index + 1, CHUNK_BYTES))

    def _schedule(self) -> list[ToHydrate]:
        """Segments that are in tier 2 and were not scheduled yet."""
        new = []
        for segment_id in sorted(self.index.entries.keys() - self._scheduled):
            if STATES[self.index.entries[segment_id][0]].remote is Remote.DONE:
                info = self.index.get(segment_id)
                assert info is not None
                assert info.key is not None
                new.append(ToHydrate(segment_id=segment_id, key=info.key))
        self._scheduled.update(segment.segment_id for segment in new)
        return new
