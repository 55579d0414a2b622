"""Moves the segments of a stream between its tiers: compress, upload, evict, hydrate, retire.

A move is started in the log, carried out, and completed in the log; a move that was started and not completed is continued. A
copy is recorded only when it is durable and verified, and removed from the log before its bytes are deleted. The object is the
compressed copy, written once (`create_only`): an existing object with the same contents is adopted, any other is an error.

What exists after each durable step, and what happens after a crash that follows it:
  CompressionStarted   hot                     compressed again; the file is replaced as a whole
  compressed file      hot, an unknown file    the same
  UploadStarted        local, maybe an object  put again: adopted if it exists
  LocalEvicted         a surplus file          swept
  Tier2DeleteQueued    maybe an object         deleted again, which is no error
  SegmentRetired       surplus files           swept

Threads: any; one move at a time. Raises: `Corruption`, `IllegalTransition`, and what disk and object store raise."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, contextmanager, suppress
from enum import IntEnum
from typing import TYPE_CHECKING

from quire.core.checked_read import checked_read
from quire.core.errors import (
    AlreadyExists,
    Corruption,
    InvalidInput,
    NotFound,
    QuireError,
    StorageFault,
    StoreClosed,
    StoreUnusable,
    Unavailable,
)
from quire.core.events import emit
from quire.core.ids import ArtifactKey, ArtifactKind
from quire.core.settings import StreamSettings
from quire.durable.checksums import crc64
from quire.durable.failpoints import hit
from quire.durable.files import read_all
from quire.durable.names import TEMPORARY, Tier, object_key
from quire.stream.files import StreamClock, StreamFiles
from quire.stream.hot import HotLog
from quire.stream.mlog_records import (
    CompressionDone,
    CompressionFailed,
    CompressionStarted,
    CustomEvent,
    HydrationDone,
    HydrationFailed,
    HydrationStarted,
    LocalEvicted,
    Schema,
    Tier2Deleted,
    Tier2DeleteQueued,
    UploadDone,
    UploadFailed,
    UploadStarted,
)
from quire.stream.mlog_states import Hydration, Remote, Warm
from quire.stream.segment import sealed_blocks
from quire.stream.segment_events import Ledger, Step
from quire.stream.segments import StreamSegment
from quire.stream.sources import VERIFY
from quire.stream.warm import FOOTER_BYTES, Dictionaries, WarmReader, bounded, compress, reader_of

if TYPE_CHECKING:
    from quire.objects.api import ExistingObject, ObjectStore
    from quire.stream.mlog_log import Collect


class Reason(IntEnum):
    """`reason_code` of failed moves."""

    GIVEN_UP = 0
    UNAVAILABLE = 1
    STORAGE = 2
    DAMAGED = 3
    OTHER = 4


class Tiers:
    """Moves one stream's segments."""

    def __init__(
        self,
        files: StreamFiles,
        ledger: Ledger,
        hot: HotLog,
        store: Callable[[], ObjectStore],
        collect: Collect,
        settings: StreamSettings,
        clock: StreamClock,
        dictionaries: Dictionaries,
    ) -> None:
        # constant after construction
        self._files = files
        self._ledger = ledger
        self._hot = hot
        self._store = store
        self._collect = collect
        self._settings = settings
        self._clock = clock
        # guarded by _moving
        self._moving = threading.RLock()
        self._dictionaries = dictionaries
        # single steps of dicts are atomic
        self._used: dict[int, float] = {}
        self._pins: Counter[int] = Counter()

    def _need(self, segment_id: int) -> StreamSegment:
        segment = self._ledger.view.get(segment_id)
        if segment is None:
            hint = "`quire stream info` lists them"
            raise InvalidInput("the stream has no such segment", hint=hint, segment=segment_id)
        if not segment.is_sealed:
            raise InvalidInput("only sealed segments can be moved", hint="seal it first", segment=segment_id)
        return segment

    # ── use ───────────────────────────────────────────────────────────────────────────────────────────────────────────
    def touch(self, segment_id: int) -> None:
        """Note that a segment is being read."""
        self._used[segment_id] = self._clock.monotonic()

    @contextmanager
    def pin(self, segment_ids: Iterable[int]) -> Iterator[None]:
        """Keep local copies of segments while the context is held."""
        pinned = list(segment_ids)
        with self._moving:
            self._pins.update(pinned)
        try:
            yield
        finally:
            with self._moving:
                self._pins.subtract(pinned)

    def coldest(self, segments: Iterable[StreamSegment]) -> list[StreamSegment]:
        """Return the segments that are not pinned, longest unused first; segments that were never used by age."""
        free = [segment for segment in segments if self._pins[segment.segment_id] <= 0]
        return sorted(free, key=lambda segment: (self._used.get(segment.segment_id, 0.0), segment.segment_id))

    # ── tier 0 → tier 1 ───────────────────────────────────────────────────────────────────────────────────────────────
    def compress(self, segment_id: int) -> StreamSegment:
        """Compress a segment, unless it has a compressed copy."""
        with self._moving:
            segment = self._need(segment_id)
            if segment.is_warm:
                return segment
            if segment.state.warm is not Warm.COMPRESSING:
                self._ledger.record_steps((CompressionStarted(0), segment_id))  # not a job: docs/decisions/032
                hit("stream.compress.started")
            try:
                size, dictionary_id = self._compress(segment)
            except QuireError as error:
                self._give_up(error, (CompressionFailed(_reason(error)), segment_id))
                raise
            self._ledger.record_steps((CompressionDone(size, dictionary_id), segment_id))
            hit("stream.compress.done")
            return self._need(segment_id)

    def _compress(self, segment: StreamSegment) -> tuple[int, int]:
        source = self._files.segment(Tier.HOT, segment.segment_id)
        target = self._files.segment(Tier.WARM, segment.segment_id)
        with _present(source, segment):
            # The file may be longer than the segment: trimming it after the seal is best effort.
            raw = memoryview(read_all(self._files.disk, source))[: segment.durable_bytes]
        blocks = sealed_blocks(raw, segment.durable_bytes, path=source)
        if crc64(raw) != segment.crc64:
            raise Corruption("a segment is not what was sealed", hint=VERIFY, path=source, segment=segment.segment_id)
        dictionary = self._dictionaries.choose(raw, blocks)
        data = b"".join(compress(raw, blocks, dictionary=dictionary))
        if _check(data, target) != segment.crc64:  # a copy that cannot be read back is not recorded
            raise Corruption(
                "a compressed segment does not decompress to what was sealed", path=target, segment=segment.segment_id
            )
        self._replace(target, Tier.WARM, [data])
        hit("stream.compress.written")
        return len(data), dictionary.id

    def _replace(self, target: str, tier: Tier, parts: Iterable[bytes]) -> None:
        """Replace a file atomically and durably."""
        disk, temporary = self._files.disk, target + TEMPORARY
        file = disk.open(temporary, create=True)
        try:
            # An attempt that failed may have left a longer file under this name.
            file.truncate(0)
            at = 0
            for part in parts:
                file.write_at(part, at)
                at += len(part)
            file.sync()
        except BaseException:
            file.close()
            with suppress(StorageFault, FileNotFoundError):
                disk.remove(temporary)
            raise
        file.close()
        disk.rename(temporary, target)
        disk.sync_dir(self._files.folder(tier))

    # ── tier 1 → tier 2 ───────────────────────────────────────────────────────────────────────────────────────────────
    def upload(self, segment_id: int) -> StreamSegment:
        """Upload a segment unless its object exists. It is compressed first if necessary."""
        with self._moving:
            segment = self._need(segment_id)
            if segment.is_remote:
                return segment
            if not segment.is_warm:
                segment = self.compress(segment_id)
            key = self._upload_key(segment)
            if key != segment.key or segment.state.remote not in (Remote.UPLOADING, Remote.FAILED):
                if segment.state.remote is Remote.UPLOADING:  # started in an earlier owner epoch
                    given_up = UploadFailed(segment.key, Reason.GIVEN_UP)
                    self._ledger.record_steps((given_up, segment_id, segment.base_record))
                self._ledger.record_steps((UploadStarted(key), segment_id, segment.base_record))
                hit("stream.upload.started")
            elif segment.state.remote is Remote.FAILED:
                self._ledger.guarded(self._ledger.log.count_retry)
            # LMDB has the key before a byte is sent, also if an earlier attempt failed here: a sweep removes objects that
            # it does not know.
            self._ledger.project_now()
            try:
                etag = self._put(segment, key)
            except QuireError as error:
                self._give_up(error, (UploadFailed(key, _reason(error)), segment_id, segment.base_record))
                raise
            self._ledger.record_steps((UploadDone(key, etag), segment_id, segment.base_record))
            hit("stream.upload.done")
            self._ledger.project()
            return self._need(segment_id)

    def _upload_key(self, segment: StreamSegment) -> str:
        """Return the full key, below the current owner epoch's prefix. The log records it, so every later epoch finds the
        object.

        An upload that was started in an earlier epoch gets a new key: another owner may be writing below the old prefix. An
        object that it left there is an orphan, which a sweep removes.
        """
        prefix = self._ledger.projection.prefixes()[0]
        if segment.key.startswith(f"{prefix}/"):
            return segment.key
        return f"{prefix}/{object_key(ArtifactKey(self._files.stream_id, ArtifactKind.WAL, segment.segment_id, 0))}"

    def objects_there(self) -> dict[str, int]:
        """List the objects below the prefixes of this stream's segments, with their sizes; one listing for each prefix."""
        origins = {segment.key.rsplit("/", 2)[0] for segment in self._ledger.view if segment.is_remote}
        store = self._store()
        pages = (page for origin in sorted(origins) for page in store.list_pages(f"{origin}/"))
        return {info.key: info.size_bytes for page in pages for info in page}

    def send_again(self, segment_id: int) -> bool:
        """Upload a segment's missing object again from the local copy. The log does not change, except by the records of a
        compression. Return False if there is no local copy, or if the segment is being removed.

        After a takeover the key belongs to an earlier epoch. The bytes are the right ones nevertheless: only one line of owners
        writes below an epoch's prefix, and its log has this upload as completed, so an owner that still writes there has the
        same sealed segment; and the put is create-only. An upload that was only started gets a new key (`_upload_key`).
        """
        with self._moving:
            segment = self._need(segment_id)
            if not segment.is_remote or not (segment.is_hot or segment.is_warm):
                return False
            if not segment.is_warm:
                segment = self.compress(segment_id)
            self._put(segment, segment.key)
            emit("warning", "stream.object_sent_again", stream=self._files.stream_id, segment_id=segment_id)
            return True

    def _put(self, segment: StreamSegment, key: str) -> str:
        path = self._files.segment(Tier.WARM, segment.segment_id)
        with _present(path, segment):
            file = self._files.disk.open(path, write=False)
        with closing(file):
            size = file.size()
            footer = file.read_at(FOOTER_BYTES, size - FOOTER_BYTES)

        def same(existing: ExistingObject) -> bool:
            # The footer has the checksums of the table and of the segment; the table has those of all frames.
            return existing.info.size_bytes == size and existing.read_tail(FOOTER_BYTES) == footer

        store = self._store()
        try:
            put = store.put_file(key, path, create_only=True, identity=same)
        except AlreadyExists as error:
            raise Corruption(
                "a different object has the segment's name",
                hint="nothing was overwritten; check the object, remove it, and upload again",
                segment=segment.segment_id,
                key=key,
            ) from error
        hit("stream.upload.sent")
        # Read back before the log counts it as a copy: from then on the local copies may be evicted.
        if put.size_bytes != size or store.get_range(key, size - FOOTER_BYTES, FOOTER_BYTES) != footer:
            raise Corruption(
                "the object differs from what was uploaded", hint="try again", segment=segment.segment_id, key=key
            )
        return put.etag or ""

    # ── eviction ──────────────────────────────────────────────────────────────────────────────────────────────────────
    def evict(self, segment_id: int, *, warm: bool = False) -> bool:
        """Evict the hot copy of a segment, or with `warm` the compressed one; return False if there is none or it is pinned.

        The last copy is never evicted: `IllegalTransition`.
        """
        with self._moving:
            segment = self._need(segment_id)
            if self._pins[segment_id] > 0 or not (segment.is_warm if warm else segment.is_hot):
                return False
            # The log first: it refuses to evict the last copy, and a file that it has evicted is swept at the next
            # opening.
            if warm:
                self._ledger.record_steps((CustomEvent(Schema.WARM_EVICTED), segment_id))
            else:
                self._ledger.record_steps((LocalEvicted(segment.durable_bytes), segment_id, segment.durable_bytes))
            hit("stream.evict.told")
            self._remove(Tier.WARM if warm else Tier.HOT, segment_id)
            hit("stream.evict.removed")
            self._ledger.project()
            return True

    def _remove(self, tier: Tier, segment_id: int) -> None:
        if tier is Tier.WARM or not self._hot.recycle(segment_id):
            self._files.remove(tier, [segment_id])

    # ── hydration ─────────────────────────────────────────────────────────────────────────────────────────────────────
    def hydrate(self, segment_id: int) -> StreamSegment:
        """Restore the hot file of a segment from its compressed copy or its object, unless it exists."""
        with self._moving:
            segment = self._need(segment_id)
            if segment.is_hot:
                return segment
            if segment.state.hydration is not Hydration.RUNNING:
                self._ledger.record_steps((HydrationStarted(1 if segment.is_warm else 2), segment_id))
                hit("stream.hydrate.started")
            try:
                self._hydrate(segment)
            except QuireError as error:
                self._give_up(error, (HydrationFailed(_reason(error)), segment_id))
                raise
            self._ledger.record_steps((HydrationDone(segment.durable_bytes), segment_id))
            hit("stream.hydrate.done")
            self._ledger.project()
            self.touch(segment_id)
            return self._need(segment_id)

    def _hydrate(self, segment: StreamSegment) -> None:
        reader = checked_read(lambda: self._compressed(segment))
        target = self._files.segment(Tier.HOT, segment.segment_id)
        self._replace(target, Tier.HOT, (reader.raw(number) for number in range(reader.frames)))
        hit("stream.hydrate.written")

    def _compressed(self, segment: StreamSegment) -> WarmReader:
        """Read the compressed copy of a segment into memory and verify every byte."""
        path = self._files.segment(Tier.WARM, segment.segment_id)
        if segment.is_warm:
            with _present(path, segment):
                data = read_all(self._files.disk, path)
        else:
            path = segment.key
            data = bounded(self._store(), segment.key, segment.durable_bytes)
        reader = reader_of(data, path, segment.durable_bytes)
        if _check(data, path) != segment.crc64:
            raise Corruption(
                "a compressed segment is not the one that was sealed",
                hint=VERIFY,
                path=path,
                segment=segment.segment_id,
            )
        return reader

    def hydrate_if_room(self, segment_id: int) -> bool:
        """Hydrate a segment for a reader that wants most of it, if the hot budget has room. A failure is not raised."""
        with self._moving:
            # Under the lock, so that readers that hydrate at the same time do not exceed the budget together.
            view = self._ledger.view
            segment = view.get(segment_id)
            taken = sum(segment.durable_bytes for segment in view if segment.is_hot)
            if segment is None or taken + segment.durable_bytes > self._settings.hot_bytes:
                return False
            try:
                self.hydrate(segment_id)
            except (StoreClosed, StoreUnusable):
                raise
            except QuireError as error:  # the reader continues with range reads, and gets the error from them
                emit("warning", "stream.hydration_failed", stream=self._files.stream_id, error=str(error))
                return False
            return True

    # ── retirement ────────────────────────────────────────────────────────────────────────────────────────────────────
    def retire(self, segment_id: int) -> bool:
        """Remove a segment from all tiers; return False if it is pinned or has another holder."""
        with self._moving:
            segment = self._need(segment_id)
            self._ledger.project_now()  # LMDB keeps the highest id even when no segment is left
            if self._pins[segment_id] > 0 or self._ledger.projection.pinned(segment_id):
                return False
            self._end_moves(segment)
            segment = self._need(segment_id)
            # A failed upload may have left an object. Logged before the deletion: otherwise a crash in between would
            # leave a log that promises an object that is gone.
            if segment.state.remote in (Remote.DONE, Remote.FAILED):
                self._ledger.record_steps((Tier2DeleteQueued(segment.key), segment_id))
                hit("stream.retire.queued")
                segment = self._need(segment_id)
            if segment.state.remote is Remote.DELETING:
                self._collect([segment.key])
                hit("stream.retire.deleted")
                self._ledger.record_steps((Tier2Deleted(segment.key), segment_id))
            self._ledger.record_steps((CustomEvent(Schema.SEGMENT_RETIRED), segment_id))
            hit("stream.retire.told")
            for tier in Tier:
                self._remove(tier, segment_id)
            self._ledger.project()
            self._used.pop(segment_id, None)
            return True

    def _end_moves(self, segment: StreamSegment) -> None:
        """Record unfinished moves of a segment that is being retired as failed."""
        if segment.state.warm is Warm.COMPRESSING:
            self._ledger.record_steps((CompressionFailed(Reason.GIVEN_UP), segment.segment_id))
        if segment.state.hydration is Hydration.RUNNING:
            self._ledger.record_steps((HydrationFailed(Reason.GIVEN_UP), segment.segment_id))
        if segment.state.remote is Remote.UPLOADING:
            failed = UploadFailed(segment.key, Reason.GIVEN_UP)
            self._ledger.record_steps((failed, segment.segment_id, segment.base_record))

    def _give_up(self, error: QuireError, step: Step) -> None:
        """Record a failed move, unless the log itself failed."""
        if not isinstance(error, (StoreClosed, StoreUnusable)):
            self._ledger.record_steps(step)
        emit(
            "warning",
            "stream.move_failed",
            stream=self._files.stream_id,
            segment_id=step[1],
            tier_action=type(step[0]).__name__,
            error=str(error),
        )


@contextmanager
def _present(path: str, segment: StreamSegment) -> Iterator[None]:
    """Raise `Corruption` if the file of a segment is missing: the log says that it exists."""
    try:
        yield
    except FileNotFoundError:
        raise Corruption("a segment's file is missing", hint=VERIFY, path=path, segment=segment.segment_id) from None


def _check(data: bytes, path: str) -> int:
    """Verify every byte of a compressed copy, and return the checksum of the segment in it."""
    return reader_of(data, path).verify()


def _reason(error: QuireError) -> Reason:
    if isinstance(error, Unavailable):
        return Reason.UNAVAILABLE
    if isinstance(error, StorageFault):
        return Reason.STORAGE
    return Reason.DAMAGED if isinstance(error, (Corruption, NotFound)) else Reason.OTHER
