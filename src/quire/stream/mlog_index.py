"""The state of every segment of a stream, as a fold of the records of its manifest log and nothing else.

An *entry* is one segment: the code of its state, and the newest record of each type about it, as bytes. A *forward* record is
about a segment that is not opened yet: it is kept, and folded when the segment is opened. A *rejected* record is one that the
transition table does not allow, or whose key differs from that of the record it answers: it changes nothing and is counted, as
is a record of an unknown type. *Own deletes* are objects of the log itself that are to be deleted.

Equal records produce equal indexes, byte for byte (`mlog_snapshot` encodes them), however they are divided into chunks, and
whether they were folded live or replayed. Segments are opened in the order of their ids: an id without an entry, at or below
the highest opened one, was retired, and no further record about it is allowed.

Importable on executors. Threads: one, or the holder of the log's lock.
Raises: `IllegalTransition` (from `check` only), `ManifestIntegrityError` for a payload that does not match its type."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

import msgspec
import numpy as np

from quire.core.errors import IllegalTransition
from quire.stream.mlog_format import NO_SEGMENT, RECORD, RECORD_BYTES, damaged
from quire.stream.mlog_reader import Chunk
from quire.stream.mlog_records import (
    CustomEvent,
    Payload,
    RecordType,
    Schema,
    Tier2Deleted,
    Tier2DeleteQueued,
    decode,
    encode,
    key_of,
)
from quire.stream.mlog_states import STATES, TABLE, Event, Hydration, Remote, State, Warm, tiers_of

SLOTS = 14
"""Number of record types of which an entry keeps the newest record."""
REJECTIONS_KEPT = 64
_CUSTOM: dict[int, Event] = {
    Schema.WARM_EVICTED: Event.WARM_EVICTED,
    Schema.SEGMENT_RETIRED: Event.RETIRED,
    Schema.NEEDS_REPAIR: Event.NEEDS_REPAIR,
    Schema.REPAIRED: Event.REPAIRED,
}
_ANSWERS: dict[int, tuple[int, int]] = {
    Event.UPLOAD_DONE: (Event.UPLOAD_STARTED + 1, RECORD_BYTES + 4),
    Event.UPLOAD_FAILED: (Event.UPLOAD_STARTED + 1, RECORD_BYTES + 8),
    Event.DELETE_QUEUED: (Event.UPLOAD_STARTED + 1, RECORD_BYTES + 2),
    Event.DELETED: (Event.DELETE_QUEUED + 1, RECORD_BYTES + 2),
}
"""Event → (slot of the record in the entry whose key the event must repeat, offset of the key in the event's record)."""
_KEYED = bytes(kind in _ANSWERS for kind in range(SLOTS))
_SIZE_AT, _KEY_AT = RECORD_BYTES, RECORD_BYTES + 2
"""Offsets of the key's length and of the key in the records that are answered."""

_OPENED = TABLE[Event.OPENED][0]
_NO_RECORDS = (None,) * (SLOTS - 1)

Entry = list[Any]
"""[code, record of type 0, …, record of type 13]: a list, because folding creates and modifies millions of entries."""


class SegmentInfo(msgspec.Struct, frozen=True, kw_only=True):
    """The log's information about one segment."""

    segment_id: int
    state: State
    records: dict[RecordType, Payload]
    """The newest record of each type."""

    @property
    def tiers(self) -> frozenset[int]:
        """The tiers with a complete copy."""
        return tiers_of(self.state)

    def field(self, record_type: RecordType, name: str) -> Any:
        """Return a field of the newest record of a type; `None` if there is none."""
        return getattr(self.records.get(record_type), name, None)

    @property
    def key(self) -> str | None:
        """The key of its object, if it has one or is being uploaded."""
        if self.state.remote in (Remote.NONE, Remote.DELETED):
            return None
        key: str | None = self.field(RecordType.UPLOAD_STARTED, "key")
        return key


class UnfinishedWork(msgspec.Struct, frozen=True, kw_only=True):
    """Work that was started and not finished. A coordinator continues it after a restart, without issuing it again."""

    compressions: dict[int, int]
    """segment → job"""
    uploads: dict[int, str]
    """segment → key, including failed uploads: they are to be retried"""
    deletes: dict[str, int]
    """key → segment, 0 for objects of the log itself"""
    hydrations: dict[int, int]
    """segment → source tier, including failed hydrations"""


class Rejection(msgspec.Struct, frozen=True):
    """A record that was not allowed: its ordinal, its type and segment, and the segment's state at that point."""

    ordinal: int
    record_type: int
    segment_id: int
    state: State


class ManifestIndex(msgspec.Struct, eq=False):
    """The fold. Its fields are its whole state; `mlog_snapshot` encodes them."""

    entries: dict[int, Entry] = msgspec.field(default_factory=dict)
    waiting: dict[int, list[bytes]] = msgspec.field(default_factory=dict)
    """Forward records by segment."""
    own_deletes: dict[str, bytes] = msgspec.field(default_factory=dict)
    needs_repair: set[int] = msgspec.field(default_factory=set)
    """Segments whose only copy is an object that was found missing."""
    unknown: Counter[int] = msgspec.field(default_factory=Counter)
    customs: Counter[int] = msgspec.field(default_factory=Counter)
    """Users' custom events by schema."""
    records: int = 0
    """Number of folded records: the ordinal of the next one."""
    opened_max: int = 0
    last_ms: int = 0
    snapshot_id: int = 0
    snapshot_ms: int = 0
    """Time of the newest snapshot marker in milliseconds, 0 if there is none. The marker has it; a snapshot's bytes do not."""
    rejected: int = 0
    rejections: list[Rejection] = msgspec.field(default_factory=list)
    """The first rejections since this index was created; not part of the state."""

    # ── folding ───────────────────────────────────────────────────────────────────────────────────────────────────────
    def fold_chunk(self, chunk: Chunk) -> int:
        """Fold the records of a chunk that were not folded yet, by their ordinals, and return how many."""
        skip = self.records - chunk.header.base_record
        if not 0 <= skip <= len(chunk.offsets):
            raise damaged(
                "the log's records do not continue where the state ends",
                chunk=chunk.index,
                offset=0,
                base_record=chunk.header.base_record,
                expected=self.records,
            )
        offsets = chunk.offsets[skip:]
        if not offsets:
            return 0
        data, entries, table, keyed = chunk.data, self.entries, TABLE, _KEYED
        get = entries.get
        types, segments = _columns(chunk, skip)
        ends = [*offsets[1:], chunk.header.committed_len]
        first = self.records
        for kind, segment, begin, end in zip(types, segments, offsets, ends, strict=True):
            raw = data[begin:end]
            # The common cases of `_fold`, without a call. While forward records wait, an opening is not one of them.
            entry = get(segment)
            if entry is not None:
                code = table[kind][entry[0]] if kind < SLOTS else -1
                if code >= 0 and (not keyed[kind] or _answers(entry, kind, raw)):
                    entry[0] = code
                    entry[kind + 1] = raw
                    continue
            elif not kind and segment > self.opened_max and not self.waiting:
                self.opened_max = segment
                entries[segment] = [_OPENED, raw, *_NO_RECORDS]
                continue
            # For `_reject`, which notes the ordinal.
            self.records = first + bisect_left(offsets, begin)
            self._fold(kind, segment, raw)
        self.records = first + len(offsets)
        self.last_ms = max(self.last_ms, RECORD.unpack_from(data, offsets[-1])[5])
        return len(offsets)

    def fold_raw(self, raw: bytes) -> None:
        """Fold one record, header and payload."""
        kind, _, _, segment, _, timestamp_ms, _ = RECORD.unpack_from(raw)
        self._fold(kind, segment, raw)
        self.records += 1
        self.last_ms = max(self.last_ms, timestamp_ms)

    def check(self, value: Payload, segment_id: int) -> None:
        """Refuse a record that the fold would reject. Forward records are allowed."""
        event = _event_of(value)
        if segment_id == NO_SEGMENT:
            self._check_own(value, event)
        if event is None or segment_id == NO_SEGMENT:
            return
        entry = self.entries.get(segment_id)
        if entry is None and segment_id > self.opened_max:
            return
        code = entry[0] if entry is not None else 0
        if segment_id <= self.opened_max and entry is None:
            what = "the segment was retired, or never opened"
        elif TABLE[event][code] < 0:
            what = "a segment in this state does not allow this step"
        elif entry is not None and not _answers(entry, event, bytes(RECORD_BYTES) + encode(value)):
            what = "the record names a different key than the record it answers"
        else:
            return
        raise IllegalTransition(what, segment=segment_id, record=type(value).__name__, state=_words(STATES[code]))

    def _check_own(self, value: Payload, event: Event | None) -> None:
        if event is None or isinstance(value, Tier2DeleteQueued):
            return
        if not isinstance(value, Tier2Deleted) or value.key not in self.own_deletes:
            raise IllegalTransition(
                "the log has no object in a state that allows this step",
                segment=NO_SEGMENT,
                record=type(value).__name__,
            )

    def _fold(self, kind: int, segment: int, raw: bytes) -> None:
        if kind > RecordType.CUSTOM_EVENT:
            self.unknown[kind] += 1
        elif kind == RecordType.SNAPSHOT_MARKER:
            self.snapshot_id = int.from_bytes(raw[RECORD_BYTES + 16 : RECORD_BYTES + 24], "little")
            self.snapshot_ms = RECORD.unpack_from(raw)[5]
        elif kind == RecordType.CUSTOM_EVENT:
            schema = int.from_bytes(raw[RECORD_BYTES : RECORD_BYTES + 4], "little")
            event = _CUSTOM.get(schema)
            if event is None:
                self.customs[schema] += 1
            else:
                self._fold_event(event, segment, raw)
        elif segment == NO_SEGMENT:
            self._fold_own(kind, raw)
        else:
            self._fold_event(Event(kind), segment, raw)

    def _fold_event(self, event: Event, segment: int, raw: bytes) -> None:
        entry = self.entries.get(segment)
        if entry is None:
            if segment <= self.opened_max:
                self._reject(event, segment, 0)
            elif event is Event.OPENED:
                self.opened_max = segment
                self.entries[segment] = [_OPENED, raw, *_NO_RECORDS]
                if self.waiting:
                    self._fold_waiting(segment)
            else:
                self.waiting.setdefault(segment, []).append(raw)
            return
        code = TABLE[event][entry[0]]
        if code < 0 or not _answers(entry, event, raw):
            self._reject(event, segment, entry[0])
        elif event is Event.RETIRED:
            del self.entries[segment]
            self.needs_repair.discard(segment)
        elif event is Event.NEEDS_REPAIR:
            self.needs_repair.add(segment)
        elif event is Event.REPAIRED:
            self.needs_repair.discard(segment)
        else:
            entry[0] = code
            if event < SLOTS:
                entry[event + 1] = raw

    def _fold_waiting(self, segment: int) -> None:
        """Fold the forward records of a segment that was just opened, and those of lower ids, which can no longer be opened."""
        for opened_id in [segment, *sorted(waiting_id for waiting_id in self.waiting if waiting_id < segment)]:
            for raw in self.waiting.pop(opened_id, ()):
                self._fold(RECORD.unpack_from(raw)[0], opened_id, raw)

    def _fold_own(self, kind: int, raw: bytes) -> None:
        key = key_of(kind, raw[RECORD_BYTES:]).decode(errors="replace")
        if kind == RecordType.TIER2_DELETE_QUEUED:
            self.own_deletes[key] = raw
        elif kind == RecordType.TIER2_DELETED and key in self.own_deletes:
            del self.own_deletes[key]
        else:
            self._reject(kind, NO_SEGMENT, 0)

    def _reject(self, kind: int, segment: int, code: int) -> None:
        self.rejected += 1
        if len(self.rejections) < REJECTIONS_KEPT:
            self.rejections.append(Rejection(self.records, kind, segment, STATES[code]))

    # ── queries ───────────────────────────────────────────────────────────────────────────────────────────────────────
    def __len__(self) -> int:
        return len(self.entries)

    def get(self, segment_id: int) -> SegmentInfo | None:
        """Return one segment; `None` if it is not opened yet or retired."""
        entry = self.entries.get(segment_id)
        return None if entry is None else _info(segment_id, entry)

    def segments(self) -> Iterator[SegmentInfo]:
        """Yield all segments, in the order of their ids."""
        for segment_id in sorted(self.entries):
            yield _info(segment_id, self.entries[segment_id])

    def reconciliation(self) -> dict[int, int]:
        """Return the segments that have forward records, with the number of records waiting for each."""
        return {segment: len(self.waiting[segment]) for segment in sorted(self.waiting)}

    def outstanding(self) -> UnfinishedWork:
        """Return the work that was started and not finished."""
        work = UnfinishedWork(
            compressions={}, uploads={}, deletes=dict.fromkeys(sorted(self.own_deletes), 0), hydrations={}
        )
        for segment in sorted(self.entries):
            entry = self.entries[segment]
            state = STATES[entry[0]]
            if state.warm is Warm.COMPRESSING:
                work.compressions[segment] = _field(entry, RecordType.COMPRESSION_STARTED, "job_id")
            if state.remote in (Remote.UPLOADING, Remote.FAILED):
                work.uploads[segment] = _field(entry, RecordType.UPLOAD_STARTED, "key")
            if state.remote is Remote.DELETING:
                work.deletes[_field(entry, RecordType.TIER2_DELETE_QUEUED, "key")] = segment
            if state.hydration is not Hydration.IDLE:
                work.hydrations[segment] = _field(entry, RecordType.HYDRATION_STARTED, "source_tier")
        return work

    def minimal(self) -> Iterator[bytes]:
        """Yield the records that make up the state, by segment and type: what remains of a history after folding."""
        for segment in sorted(self.entries):
            yield from (raw for raw in self.entries[segment][1:] if raw is not None)
        for segment in sorted(self.waiting):
            yield from self.waiting[segment]
        for key in sorted(self.own_deletes):
            yield self.own_deletes[key]


def replay(index: ManifestIndex, chunks: Iterable[Chunk]) -> ManifestIndex:
    """Fold consecutive chunks, starting where the index ends."""
    for chunk in chunks:
        index.fold_chunk(chunk)
    return index


def _columns(chunk: Chunk, skip: int) -> tuple[list[int], list[int]]:
    """Return types and segments of the records after the first `skip` ones."""
    if chunk.places is None:
        heads = [RECORD.unpack_from(chunk.data, offset) for offset in chunk.offsets[skip:]]
        return [head[0] for head in heads], [head[3] for head in heads]
    words = np.frombuffer(chunk.data, "<u8", count=len(chunk.data) // 8)
    at = chunk.places[skip:]
    return (words[at] & np.uint64(0xFFFF)).tolist(), words[at + 1].tolist()


def _event_of(value: Payload) -> Event | None:
    if isinstance(value, CustomEvent):
        return _CUSTOM.get(value.schema_id)
    return Event(value.TYPE) if value.TYPE < SLOTS else None


def _answers(entry: Entry, event: int, raw: bytes) -> bool:
    """Return whether a record has the key of the record that it answers."""
    if event not in _ANSWERS:
        return True
    slot, at = _ANSWERS[event]
    begun = entry[slot]
    size = raw[_SIZE_AT:_KEY_AT]
    if begun is None or begun[_SIZE_AT:_KEY_AT] != size:
        return False
    length = size[0] | size[1] << 8
    return bool(raw[at : at + length] == begun[_KEY_AT : _KEY_AT + length])


def _info(segment_id: int, entry: Entry) -> SegmentInfo:
    records = {RecordType(kind): _decoded(kind, raw) for kind, raw in enumerate(entry[1:]) if raw is not None}
    return SegmentInfo(segment_id=segment_id, state=STATES[entry[0]], records=records)


def _field(entry: Entry, kind: RecordType, name: str) -> Any:
    return getattr(_decoded(kind, entry[kind + 1]), name)


def _decoded(kind: int, raw: bytes) -> Payload:
    return decode(kind, raw[RECORD_BYTES:], segment=RECORD.unpack_from(raw)[3])


def _words(state: State) -> str:
    return " ".join(f"{name}={value.name.lower()}" for name, value in zip(State._fields, state, strict=True))
