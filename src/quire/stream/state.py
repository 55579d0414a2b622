"""State that a stream keeps outside its log (`stream.json`): its consumers, its retention, the mode in which it was last open,
and where its log and its record ids continued when the store was taken over.

The file is replaced atomically and ends with a checksum: no segment is retired because of a damaged retention or position.
Positions of consumers only rise. Records that a consumer has not read are kept, whatever their age and size. A consumer that
has not called `ack` for `hold_seconds` holds nothing any more, so that a dead consumer does not fill the disk.

Threads: any; one lock. Raises: `UnknownCursor`, `OutOfRange`, `InvalidName`, `InvalidInput`, `Corruption`."""

from __future__ import annotations

import os
import threading
from collections.abc import Collection, Iterable, Sequence
from typing import Literal

import msgspec

from quire.core.clock import Clock
from quire.core.decoding import UNDECODABLE, described
from quire.core.errors import Corruption, InvalidInput, OutOfRange, UnknownCursor
from quire.core.recent_keys import RecentKeys
from quire.core.timeline import Gap
from quire.durable.checksums import crc64
from quire.durable.files import Disk, read_all, write_atomic
from quire.durable.names import MODE_FILE, STREAMS, check_name
from quire.objects.api import ObjectStore
from quire.stream.files import StreamFiles
from quire.stream.gaps import gaps_between, gaps_with_range
from quire.stream.mlog_tier2 import EpochBegin, LogObjects
from quire.stream.segments import StreamSegment


class Consumer(msgspec.Struct, frozen=True):
    """How far a consumer has read."""

    position: int
    """The id of the first record that it has not read."""
    acked_ms: int
    """Time of its last `ack`, in milliseconds."""


class Retention(msgspec.Struct, frozen=True):
    """When segments are removed. 0 and False disable a reason."""

    seconds: float = 0.0
    bytes: int = 0
    consumed: bool = False
    """Whether records are removed as soon as every consumer has read them."""
    hold_seconds: float = 0.0
    """A consumer holds nothing this many seconds after its last `ack`; 0: it holds forever."""

    def __post_init__(self) -> None:
        # Also refuses NaN and infinity: the state file cannot represent them, and the stream would not open again.
        if not all(0 <= limit < LIMIT_MAX for limit in (self.seconds, self.bytes, self.hold_seconds)):
            raise InvalidInput("retention limits must be from 0 to 2⁶³", hint="0 means no limit")


class QueryBatch(msgspec.Struct, frozen=True):
    """The progress of a streaming query that appends to the stream."""

    batch: int = -1
    """The newest batch that was appended; -1 before the first."""
    pending: int = -1
    """The batch that is being appended; -1 if there is none."""
    call: int = 0
    """The idempotency key of the pending append."""


class StoredState(msgspec.Struct, frozen=True):
    """The contents of `stream.json`."""

    version: Literal[1] = 1
    mode: Literal["off", "shadow", "on"] = "on"
    """The manifest-log mode in which the stream was last open."""
    consumers: dict[str, Consumer] = {}
    retention: Retention | None = None
    """The stream's own retention; `None` if the store's applies."""
    going: tuple[int, ...] = ()
    """Segments that retention had begun to remove while the log was not authoritative: LMDB cannot represent that."""
    log_records: int = 0
    """Records in the manifest log at the last clean close; it never has fewer."""
    begins: tuple[EpochBegin, ...] = ()
    """Where the manifest log continued for each owner epoch that took over."""
    log_segment: int = 0
    """The highest segment that the manifest log had opened when it was closed: it is not read while its mode is off."""
    calls: tuple[tuple[int, int], ...] = ()
    """Idempotency keys of the newest appends in sealed segments, with their first records. The open segment holds its own."""
    gaps: tuple[Gap, ...] = ()
    """Record ids that takeovers have skipped, in order."""
    queries: dict[str, QueryBatch] = {}
    """Streaming queries that append here, by id; the one that appended last comes last."""
    crc64: str = ""
    """Checksum, in hex, of the file with this value left empty. Empty in memory, and in files of older versions."""


LIMIT_MAX = 2**63
_HINT = "restore it from a backup, or remove it: consumers and retention are then forgotten"


def load_state(files: StreamFiles) -> StoredState:
    """Read and verify `stream.json`; return the state of a new stream if it does not exist."""
    path = files.state
    try:
        data = read_all(files.disk, path)
        stored = msgspec.json.decode(data, type=described(StoredState))
    except FileNotFoundError:
        return StoredState()
    except UNDECODABLE as error:
        raise Corruption(f"a stream's state file cannot be read: {error}", hint=_HINT, path=path) from error
    before, digits, after = data.rpartition(stored.crc64.encode()) if stored.crc64 else (data, b"", b"")
    if stored.crc64 and digits != b"%016x" % crc64(before + after):
        raise Corruption("a stream's state file differs from what was written", hint=_HINT, path=path)
    return msgspec.structs.replace(stored, crc64="")


def log_records_at_close(files: StreamFiles) -> int | None:
    """Return the number of records in the manifest log at the last clean close; `None` if the log is not authoritative."""
    stored = load_state(files)
    return stored.log_records if stored.mode == "on" else None


def begins_of(files: StreamFiles) -> tuple[EpochBegin, ...]:
    """Return where the manifest log continued for owner epochs that took over, for readers."""
    return load_state(files).begins


def log_objects(files: StreamFiles, store: ObjectStore, prefixes: tuple[str, ...], store_id: str = "") -> LogObjects:
    """Return the objects of a stream's manifest log, for readers, with the owner epochs that `stream.json` lists."""
    return LogObjects(store, files.stream_id, prefixes, store_id, begins_of(files))


class _StoreWide(msgspec.Struct, frozen=True):
    mode: Literal["off", "shadow", "on"]


def load_mode(disk: Disk, root: str) -> Literal["off", "shadow", "on"] | None:
    """Return the manifest-log mode that was set for all streams of this store; `None` if none was set."""
    path = os.path.join(root, MODE_FILE)
    try:
        return msgspec.json.decode(read_all(disk, path), type=described(_StoreWide)).mode
    except FileNotFoundError:
        return None
    except UNDECODABLE as error:
        hint = "remove it, then set the mode again with `quire manifest mode`"
        raise Corruption(f"the mode of manifest logs cannot be read: {error}", hint=hint, path=path) from error


def save_mode(disk: Disk, root: str, mode: Literal["off", "shadow", "on"]) -> None:
    """Record the mode for every later opening of a stream. It overrides quire.toml."""
    disk.make_dirs(os.path.join(root, STREAMS))
    write_atomic(disk, os.path.join(root, MODE_FILE), msgspec.json.encode(_StoreWide(mode)))


QUERIES_MAX = 1_024
"""Queries that are kept; those that appended longest ago are dropped."""


class StreamState:
    """The persistent state of one stream outside its log."""

    def __init__(self, files: StreamFiles, clock: Clock) -> None:
        self._files = files
        self._clock = clock
        # guarded by _lock
        self._lock = threading.Lock()
        self.stored = load_state(files)

    def _save(self, stored: StoredState) -> None:
        """Replace the file. REQUIRES the lock."""
        text = msgspec.json.format(msgspec.json.encode(stored))
        before, _, after = text.rpartition(b'""')  # the checksum is the last field
        write_atomic(self._files.disk, self._files.state, before + b'"%016x"' % crc64(text) + after)
        # After the write: retention must not remove records because of a position that a crash would undo.
        self.stored = stored

    def persist_mode(
        self, mode: Literal["off", "shadow", "on"], going: Iterable[int] = (), log_segment: int = 0
    ) -> None:
        """Record the mode, the segments being removed and the highest segment of the log, for the next opening."""
        with self._lock:
            highest = max(log_segment, self.stored.log_segment)
            stored = msgspec.structs.replace(self.stored, mode=mode, going=tuple(sorted(going)), log_segment=highest)
            if stored != self.stored:
                self._save(stored)

    def persist_log_records(self, log_records: int) -> None:
        """Record the number of records in the log, outside the log itself, which cannot show that its end was lost."""
        with self._lock:
            if log_records != self.stored.log_records:
                self._save(msgspec.structs.replace(self.stored, log_records=log_records))

    def persist_epoch_begin(self, objects: LogObjects, chunk: int, snapshot: int) -> LogObjects:
        """Record where the log continues for the current owner epoch, unless it is recorded; return `objects` with all begins.

        Called before the first record of the epoch: chunks of earlier epochs from there on in tier 2 are the history of a
        deposed owner. A store with a single epoch records nothing.
        """
        epoch = objects.owner_epoch
        with self._lock:
            if len(objects.prefixes) > 1 and epoch not in {begin.owner_epoch for begin in self.stored.begins}:
                begins = (*self.stored.begins, EpochBegin(epoch, chunk, snapshot))
                self._save(msgspec.structs.replace(self.stored, begins=begins))
        return msgspec.structs.replace(objects, begins=self.stored.begins)

    def persist_calls(self, calls: Iterable[tuple[int, int]]) -> None:
        """Record the idempotency keys of appends in segments that the next opening will not scan."""
        with self._lock:
            newest = tuple(RecentKeys(calls).newest())
            if newest != self.stored.calls:
                self._save(msgspec.structs.replace(self.stored, calls=newest))

    def persist_gaps(
        self, segments: Sequence[StreamSegment], own_end: int, range_starts: Sequence[int]
    ) -> tuple[Gap, ...]:
        """Continue record ids in the last of the store's ranges (none if it was never taken over), and return the gaps.

        Called before the first record of the range: if the process dies in between, the next opening computes the same gap.
        Gaps between segments can be derived again if the file was lost.
        """
        with self._lock:
            recorded = gaps_between(self.stored.gaps, segments, range_starts)
            gaps = gaps_with_range(recorded, own_end, max(range_starts, default=0))
            if gaps != self.stored.gaps:
                self._save(msgspec.structs.replace(self.stored, gaps=gaps))
            return gaps

    # ── streaming queries ─────────────────────────────────────────────────────────────────────────────────────────────
    def has_batch(self, query: str, batch: int) -> bool:
        """Return whether this batch of a query, or a later one, was appended."""
        query_batch = self.stored.queries.get(query)
        return query_batch is not None and query_batch.batch >= batch

    def begin_batch(self, query: str, batch: int, call: int) -> None:
        """Record that a query's batch is about to be appended with this idempotency key."""
        query_batch = self.stored.queries.get(query, QueryBatch())
        self._put_query(query, msgspec.structs.replace(query_batch, pending=batch, call=call))

    def end_batch(self, query: str, batch: int) -> None:
        """Record that a query's batch is durable."""
        self._put_query(query, QueryBatch(batch))

    def settle_batches(self, appended: Collection[int]) -> None:
        """Resolve batches that a crash left pending: `appended` are the idempotency keys of the newest surviving appends."""
        for query, query_batch in self.stored.queries.items():
            if query_batch.pending >= 0:
                self._put_query(
                    query, QueryBatch(query_batch.pending if query_batch.call in appended else query_batch.batch)
                )

    def _put_query(self, query: str, query_batch: QueryBatch) -> None:
        with self._lock:
            others = [(name, value) for name, value in self.stored.queries.items() if name != query]
            queries = dict([*others[1 - QUERIES_MAX :], (query, query_batch)])
            self._save(msgspec.structs.replace(self.stored, queries=queries))

    # ── consumers ─────────────────────────────────────────────────────────────────────────────────────────────────────
    def position(self, name: str) -> int:
        """Return the position of a consumer."""
        consumer = self.stored.consumers.get(name)
        if consumer is None:
            raise UnknownCursor("the stream has no such consumer", hint="create it with `register`", name=name)
        return consumer.position

    def register(self, name: str, position: int) -> int:
        """Create a consumer at a position unless it exists, and return its position."""
        check_name("consumer", name)
        with self._lock:
            if name not in self.stored.consumers:
                self._put(name, position)
            return self.stored.consumers[name].position

    def ack(self, name: str, position: int, *, end: int) -> None:
        """Record durably that a consumer has read everything below a position.

        A position that is not ahead moves nothing, but still renews the consumer's hold.
        """
        with self._lock:
            consumer = self.stored.consumers.get(name)
            if consumer is None:
                raise UnknownCursor("the stream has no such consumer", hint="create it with `register`", name=name)
            if position > end:
                raise OutOfRange("a consumer cannot acknowledge records that do not exist", position=position, end=end)
            if position > consumer.position or self._clock.now_ms() > consumer.acked_ms:
                self._put(name, max(position, consumer.position))

    def _put(self, name: str, position: int) -> None:
        consumer = Consumer(position, self._clock.now_ms())
        self._save(msgspec.structs.replace(self.stored, consumers={**self.stored.consumers, name: consumer}))

    def drop(self, name: str) -> None:
        """Remove a consumer. A missing one is not an error."""
        with self._lock:
            if name in self.stored.consumers:
                left = {entry: value for entry, value in self.stored.consumers.items() if entry != name}
                self._save(msgspec.structs.replace(self.stored, consumers=left))

    # ── retention ─────────────────────────────────────────────────────────────────────────────────────────────────────
    def retain(self, retention: Retention | None) -> None:
        """Set the stream's own retention; `None` applies the store's."""
        with self._lock:
            self._save(msgspec.structs.replace(self.stored, retention=retention))


def due(
    segments: Sequence[StreamSegment], retention: Retention, consumers: Sequence[Consumer], *, now_ms: int
) -> list[StreamSegment]:
    """Return the sealed segments that retention removes, oldest first."""
    silent = now_ms - retention.hold_seconds * 1000 if retention.hold_seconds else None
    holders = [consumer.position for consumer in consumers if silent is None or consumer.acked_ms >= silent]
    held_from = min(holders, default=None)
    total = sum(segment.durable_bytes for segment in segments if segment.is_sealed)
    gone: list[StreamSegment] = []
    for segment in segments:
        # Ends at the first segment that stays: records are removed from the beginning only, without holes.
        if not segment.is_sealed or (held_from is not None and segment.end_record > held_from):
            break
        aged = bool(retention.seconds) and segment.sealed_ms <= now_ms - retention.seconds * 1000
        heavy = bool(retention.bytes) and total > retention.bytes
        if not (aged or heavy or (retention.consumed and consumers)):
            break
        total -= segment.durable_bytes
        gone.append(segment)
    return gone
