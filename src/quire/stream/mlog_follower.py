"""A follower: computes the state of a stream from its objects in tier 2 alone, by polling.

A poll folds new chunks, or the bundles that contain them, in order. A *gap* is a missing chunk although later ones exist; the
follower crosses it with the newest snapshot after it, and without one waits and reports the chunk. The state equals the owner's
as of the last record seen. The *mirror* is one snapshot and the chunks after it, in the follower's own files, so that a restart
need not start over. A segment is scheduled for hydration once, when its upload is seen.

Threads: one polls. Raises: `ManifestIntegrityError` (the state is unchanged), and what disk and object store raise."""

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
"""A mirror with more chunks than this replaces them with a snapshot."""


class ToHydrate(msgspec.Struct, frozen=True, kw_only=True):
    """A segment to fetch."""

    segment_id: int
    key: str


class Polled(msgspec.Struct):
    """The result of a poll."""

    chunks: int = 0
    records: int = 0
    waiting_for: int | None = None
    """The chunk that is missing although later ones exist."""
    hydrations: list[ToHydrate] = msgspec.field(default_factory=list)


class LogFollower:
    """Follows one stream."""

    def __init__(
        self, objects: LogObjects, mirror: LogFiles, *, clock: Clock | None = None, scheduled: Iterable[int] = ()
    ) -> None:
        self._objects = objects
        self._mirror = mirror
        self.segments = StreamFiles(mirror.disk, mirror.root, mirror.stream_id)
        """The files of hydrated segments; those from before a restart are not fetched again."""
        self.segments.make()
        self.segments.sweep()
        self._scheduled = {*scheduled, *self.segments.segments(Tier.WARM)}
        mirror.disk.make_dirs(mirror.directory)
        mirror.sweep()
        recovered = recover(mirror, clock or SystemClock(), objects.fetch)
        self.index: ManifestIndex = recovered.index
        self.next_chunk = recovered.end.chunk_index
        """The next chunk to fold."""

    def poll(self) -> Polled:
        """Fold new chunks, and return what was found."""
        polled = Polled()
        listing = self._objects.listing()
        if not self.index.records:
            self._cross(listing)
        before = self.index.records
        while (chunk := self._next(listing, polled)) is not None:
            self._keep(chunk)
            # Folds nothing for a bundle, which `_keep` has folded: records are skipped by their ordinals.
            self.index.fold_chunk(chunk)
            self.next_chunk = chunk.last_index + 1
            polled.chunks += 1
        polled.records = self.index.records - before
        if len(self._mirror.chunks()) > MIRROR_CHUNKS:
            self._condense(LogPosition(self.next_chunk, CHUNK_BYTES))
        polled.hydrations = self._schedule()
        return polled

    def hydrate(self, wanted: Iterable[ToHydrate]) -> list[int]:
        """Fetch segments into the mirror as compressed files, verify each against its sealed checksum, and return their ids.

        A segment whose object no longer exists is scheduled again by a later poll, unless the log records its deletion.
        """
        fetched = []
        for segment in wanted:
            info = self.index.get(segment.segment_id)
            if info is None or info.key != segment.key:
                continue  # retired or moved meanwhile
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
        """Remove the files of segments that the stream no longer has, and return their ids."""
        gone = [segment_id for segment_id in self.segments.segments(Tier.WARM) if segment_id not in self.index.entries]
        self.segments.remove(Tier.WARM, gone)
        self._scheduled.difference_update(gone)
        return gone

    def _next(self, listing: LogListing, polled: Polled) -> Chunk | None:
        """Return the next chunk or bundle; cross a gap if possible."""
        while True:
            if self.next_chunk in listing.chunks:
                return self._objects.get_chunk(self.next_chunk)
            if (span := listing.bundle_of(self.next_chunk)) is not None:
                return self._objects.get_bundle(*span)
            if not any(index > self.next_chunk for index in listing.chunks):
                return None
            if not self._cross(listing):
                polled.waiting_for = self.next_chunk
                return None

    def _cross(self, listing: LogListing) -> bool:
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
        """Write the state as a snapshot, and remove all earlier files of the mirror."""
        older = self._mirror.snapshots()
        write_snapshot(self._mirror, max(older, default=0) + 1, position, self.index)
        for path in [*map(self._mirror.snapshot, older), *map(self._mirror.chunk, self._mirror.chunks())]:
            self._mirror.disk.remove(path)
        self._mirror.disk.sync_dir(self._mirror.directory)

    def _keep(self, chunk: Chunk) -> None:
        if chunk.index == chunk.last_index:
            write_atomic(self._mirror.disk, self._mirror.chunk(chunk.index), object_bytes(chunk))
            return
        # A bundle cannot be stored among the chunks: store a snapshot of the state after it instead.
        self.index.fold_chunk(chunk)
        self._condense(LogPosition(chunk.last_index + 1, CHUNK_BYTES))

    def _schedule(self) -> list[ToHydrate]:
        """Return the segments in tier 2 that were not scheduled yet, and mark them as scheduled."""
        new = []
        for segment_id in sorted(self.index.entries.keys() - self._scheduled):
            if STATES[self.index.entries[segment_id][0]].remote is Remote.DONE:
                info = self.index.get(segment_id)
                assert info is not None
                assert info.key is not None
                new.append(ToHydrate(segment_id=segment_id, key=info.key))
        self._scheduled.update(segment.segment_id for segment in new)
        return new
