"""What a stream remembers beside its log: its consumers, its retention, the mode in which it was last open, and where its log
and its record ids went on when the store was taken over.

The file is replaced whole and ends with a checksum: nothing is retired by a retention or a position that is not the one that
was written. Positions of consumers only rise. What some consumer has not read stays, whatever age and bytes say; one that has
been silent for `hold_seconds` holds nothing any more, so that a dead one does not fill the disk. Every `ack` breaks the
silence.

Threads: any; one lock. Raises `UnknownCursor`, `OutOfRange`, `InvalidName`, `InvalidInput`, `Corruption`."""

from __future__ import annotations

import os
import threading
from collections.abc import Collection, Iterable, Sequence
from typing import Literal

import msgspec

from quire.core.clock import Clock
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
    """Who has read how far."""

    position: int
    """The id of the first record that it has not read."""
    acked_ms: int
    """When it last said so."""


class Retention(msgspec.Struct, frozen=True):
    """What may go; 0 and False: nothing for this reason."""

    seconds: float = 0.0
    bytes: int = 0
    consumed: bool = False
    """Whether records go as soon as every consumer has read them."""
    hold_seconds: float = 0.0
    """Consumers that were silent for longer hold nothing; 0: they hold for ever."""

    def __post_init__(self) -> None:
        if min(self.seconds, self.bytes, self.hold_seconds) < 0:
            raise InvalidInput("retention limits must not be negative", hint="0 means no limit")


class QueryBatch(msgspec.Struct, frozen=True):
    """The newest batch of a streaming query that was appended."""

    batch: int = -1
    """-1 before the first."""
    pending: int = -1
    """The one that is being appended; -1 if there is none."""
    call: int = 0
    """The idempotency key of its append."""


class StoredState(msgspec.Struct, frozen=True):
    """What `stream.json` holds."""

    version: Literal[1] = 1
    mode: Literal["off", "shadow", "on"] = "on"
    """In which the stream was last open."""
    consumers: dict[str, Consumer] = {}
    retention: Retention | None = None
    """The stream's own, `None` if it has that of the store."""
    going: tuple[int, ...] = ()
    """Segments that retention had begun to take, if the log was not believed then: LMDB has no word for it."""
    log_records: int = 0
    """How many records the manifest log had at the last clean close; it never has fewer."""
    begins: tuple[EpochBegin, ...] = ()
    """Where the manifest log went on for owner epochs that took over."""
    log_segment: int = 0
    """The highest segment that the manifest log had opened when it was left: it is not asked while it is off."""
    calls: tuple[tuple[int, int], ...] = ()
    """Idempotency keys of the newest appends in sealed segments, with their first records; those of the open one are in it."""
    gaps: tuple[Gap, ...] = ()
    """Record ids that takeovers have left out, in order."""
    queries: dict[str, QueryBatch] = {}
    """Streaming queries that append here, by their ids; who appended last comes last."""
    crc64: str = ""
    """Of the file with nothing in its place, in hex. Empty in memory, and in files from before."""


_HINT = "restore it from a backup, or remove it: consumers and retention are then forgotten"


def load_state(files: StreamFiles) -> StoredState:
    """What `stream.json` says; what a new stream has, if it is not there."""
    path = files.state
    try:
        data = read_all(files.disk, path)
        stored = msgspec.json.decode(data, type=StoredState)
    except FileNotFoundError:
        return StoredState()
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise Corruption(f"a stream's state file cannot be read: {error}", hint=_HINT, path=path) from error
    before, digits, after = data.rpartition(stored.crc64.encode()) if stored.crc64 else (data, b"", b"")
    if stored.crc64 and digits != b"%016x" % crc64(before + after):
        raise Corruption("a stream's state file differs from what was written", hint=_HINT, path=path)
    return msgspec.structs.replace(stored, crc64="")


def believed_end(files: StreamFiles) -> int | None:
    """How many records the manifest log had at the last clean close; `None` if it is not what is believed."""
    stored = load_state(files)
    return stored.log_records if stored.mode == "on" else None


def begins_of(files: StreamFiles) -> tuple[EpochBegin, ...]:
    """Where the manifest log went on for owner epochs that took over, for whoever only reads."""
    return load_state(files).begins


def log_objects(files: StreamFiles, store: ObjectStore, prefixes: tuple[str, ...], store_id: str = "") -> LogObjects:
    """The objects of a stream's manifest log, for whoever only reads them, with what stream.json says of owner epochs."""
    return LogObjects(store, files.stream_id, prefixes, store_id, begins_of(files))


class _StoreWide(msgspec.Struct, frozen=True):
    mode: Literal["off", "shadow", "on"]


def load_mode(disk: Disk, root: str) -> Literal["off", "shadow", "on"] | None:
    """How much the manifest logs of all streams are believed, if somebody has said so for this store."""
    path = os.path.join(root, MODE_FILE)
    try:
        return msgspec.json.decode(read_all(disk, path), type=_StoreWide).mode
    except FileNotFoundError:
        return None
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        hint = "remove it, then set the mode again with `quire manifest mode`"
        raise Corruption(f"the mode of manifest logs cannot be read: {error}", hint=hint, path=path) from error


def save_mode(disk: Disk, root: str, mode: Literal["off", "shadow", "on"]) -> None:
    """Have every later opening of a stream know it, in place of what quire.toml says."""
    disk.make_dirs(os.path.join(root, STREAMS))
    write_atomic(disk, os.path.join(root, MODE_FILE), msgspec.json.encode(_StoreWide(mode)))


QUERIES_MAX = 1_024
"""Queries that are remembered; those that appended longest ago are forgotten."""


class StreamState:
    """The memory of one stream."""

    def __init__(self, files: StreamFiles, clock: Clock) -> None:
        self._files = files
        self._clock = clock
        # guarded by _lock
        self._lock = threading.Lock()
        self.stored = load_state(files)

    def _save(self, stored: StoredState) -> None:
        """REQUIRES the lock."""
        text = msgspec.json.format(msgspec.json.encode(stored))
        before, _, after = text.rpartition(b'""')  # the checksum is the last field
        write_atomic(self._files.disk, self._files.state, before + b'"%016x"' % crc64(text) + after)
        self.stored = stored

    def remember_mode(
        self, mode: Literal["off", "shadow", "on"], going: Iterable[int] = (), log_segment: int = 0
    ) -> None:
        """Have the next opening know all three."""
        with self._lock:
            highest = max(log_segment, self.stored.log_segment)
            stored = msgspec.structs.replace(self.stored, mode=mode, going=tuple(sorted(going)), log_segment=highest)
            if stored != self.stored:
                self._save(stored)

    def remember_end(self, log_records: int) -> None:
        """The log ends here: outside of its own bytes, which cannot say that some of them are gone."""
        with self._lock:
            if log_records != self.stored.log_records:
                self._save(msgspec.structs.replace(self.stored, log_records=log_records))

    def remember_begin(self, objects: LogObjects, chunk: int, snapshot: int) -> LogObjects:
        """The log goes on here for the current owner epoch, unless that is known; objects by what is remembered then.

        Before the first record of the epoch: what earlier ones have there in tier 2 is the line of an owner that was deposed.
        An only epoch has nothing before it, and is not remembered.
        """
        epoch = objects.owner_epoch
        with self._lock:
            if len(objects.prefixes) > 1 and epoch not in {begin.owner_epoch for begin in self.stored.begins}:
                begins = (*self.stored.begins, EpochBegin(epoch, chunk, snapshot))
                self._save(msgspec.structs.replace(self.stored, begins=begins))
        return msgspec.structs.replace(objects, begins=self.stored.begins)

    def remember_calls(self, calls: Iterable[tuple[int, int]]) -> None:
        """Have the next opening know the idempotency keys of appends in segments that it will not scan."""
        with self._lock:
            newest = tuple(RecentKeys(calls).newest())
            if newest != self.stored.calls:
                self._save(msgspec.structs.replace(self.stored, calls=newest))

    def remember_gaps(
        self, segments: Sequence[StreamSegment], own_end: int, range_starts: Sequence[int]
    ) -> tuple[Gap, ...]:
        """Record ids go on in the last of the store's ranges (none if it was never taken over): the gaps then.

        Before the first record of the range: if the process dies in between, the next opening comes to the same gap. Gaps
        between segments are known again after the file was lost.
        """
        with self._lock:
            known = gaps_between(self.stored.gaps, segments, range_starts)
            gaps = gaps_with_range(known, own_end, max(range_starts, default=0))
            if gaps != self.stored.gaps:
                self._save(msgspec.structs.replace(self.stored, gaps=gaps))
            return gaps

    # ── streaming queries ─────────────────────────────────────────────────────────────────────────────────────────────
    def has_batch(self, query: str, batch: int) -> bool:
        """Whether a query's batch, or a later one, was appended."""
        known = self.stored.queries.get(query)
        return known is not None and known.batch >= batch

    def begin_batch(self, query: str, batch: int, call: int) -> None:
        """A query's batch is going to be appended, with this idempotency key."""
        known = self.stored.queries.get(query, QueryBatch())
        self._put_query(query, msgspec.structs.replace(known, pending=batch, call=call))

    def end_batch(self, query: str, batch: int) -> None:
        """It is durable."""
        self._put_query(query, QueryBatch(batch))

    def settle_batches(self, appended: Collection[int]) -> None:
        """Decide what a crash left open: `appended` are the idempotency keys of the newest appends that are there."""
        for query, known in self.stored.queries.items():
            if known.pending >= 0:
                self._put_query(query, QueryBatch(known.pending if known.call in appended else known.batch))

    def _put_query(self, query: str, known: QueryBatch) -> None:
        with self._lock:
            others = [(name, value) for name, value in self.stored.queries.items() if name != query]
            queries = dict([*others[1 - QUERIES_MAX :], (query, known)])
            self._save(msgspec.structs.replace(self.stored, queries=queries))

    # ── consumers ─────────────────────────────────────────────────────────────────────────────────────────────────────
    def position(self, name: str) -> int:
        """Where a consumer is."""
        consumer = self.stored.consumers.get(name)
        if consumer is None:
            raise UnknownCursor("the stream has no such consumer", hint="create it with `register`", name=name)
        return consumer.position

    def register(self, name: str, position: int) -> int:
        """Make a consumer that begins at a position, or leave the one that is there; where it is."""
        check_name("consumer", name)
        with self._lock:
            if name not in self.stored.consumers:
                self._put(name, position)
            return self.stored.consumers[name].position

    def ack(self, name: str, position: int, *, end: int) -> None:
        """A consumer has read everything below a position; durable on return.

        A position that is not ahead moves nothing, and still says that the consumer is alive.
        """
        with self._lock:
            known = self.stored.consumers.get(name)
            if known is None:
                raise UnknownCursor("the stream has no such consumer", hint="create it with `register`", name=name)
            if position > end:
                raise OutOfRange("a consumer cannot acknowledge records that do not exist", position=position, end=end)
            if position > known.position or self._clock.now_ms() > known.acked_ms:
                self._put(name, max(position, known.position))

    def _put(self, name: str, position: int) -> None:
        consumer = Consumer(position, self._clock.now_ms())
        self._save(msgspec.structs.replace(self.stored, consumers={**self.stored.consumers, name: consumer}))

    def drop(self, name: str) -> None:
        """Forget a consumer; one that is not there is fine."""
        with self._lock:
            if name in self.stored.consumers:
                left = {entry: value for entry, value in self.stored.consumers.items() if entry != name}
                self._save(msgspec.structs.replace(self.stored, consumers=left))

    # ── retention ─────────────────────────────────────────────────────────────────────────────────────────────────────
    def retain(self, retention: Retention | None) -> None:
        """Give the stream its own retention, or with `None` that of the store."""
        with self._lock:
            self._save(msgspec.structs.replace(self.stored, retention=retention))


def due(
    segments: Sequence[StreamSegment], retention: Retention, consumers: Sequence[Consumer], *, now_ms: int
) -> list[StreamSegment]:
    """The sealed segments that may go, oldest first."""
    silent = now_ms - retention.hold_seconds * 1000 if retention.hold_seconds else None
    holders = [consumer.position for consumer in consumers if silent is None or consumer.acked_ms >= silent]
    held_from = min(holders, default=None)
    total = sum(segment.durable_bytes for segment in segments if segment.is_sealed)
    gone: list[StreamSegment] = []
    for segment in segments:
        if not segment.is_sealed or (held_from is not None and segment.end_record > held_from):
            break
        aged = bool(retention.seconds) and segment.sealed_ms <= now_ms - retention.seconds * 1000
        heavy = bool(retention.bytes) and total > retention.bytes
        if not (aged or heavy or (retention.consumed and consumers)):
            break
        total -= segment.durable_bytes
        gone.append(segment)
    return gone
