"""The modes of a stream's manifest log, and its comparison with the projection: LMDB's rows about the stream's segments (S1).

  mode     appends              authoritative at opening
  off      are not logged       the projection; the log is not even opened
  shadow   go to the log        the projection; `compare` shows where the two differ
  on       go to the log        the log

*Facts* are the comparable part of a segment's state. A log that lacks something is brought up to them by appending records
(`catch_up`).

Threads: any (pure functions and values)."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import cache

import msgspec

from quire.stream.mlog_index import ManifestIndex, SegmentInfo
from quire.stream.mlog_records import (
    CompressionDone,
    CompressionFailed,
    CompressionStarted,
    CustomEvent,
    HydrationDone,
    HydrationFailed,
    HydrationStarted,
    LocalEvicted,
    Payload,
    RecordType,
    Schema,
    SealSegment,
    SegmentOpened,
    Tier2Deleted,
    Tier2DeleteQueued,
    UploadDone,
    UploadFailed,
    UploadStarted,
)
from quire.stream.mlog_states import NOTHING, Event, Hot, Life, Remote, State, Warm, is_valid, next_state


class Mode(StrEnum):
    OFF = "off"
    SHADOW = "shadow"
    ON = "on"


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentFacts:
    """The facts by which log and projection are compared. Defaults are those of a new segment."""

    base_offset: int
    epoch: int = 0
    """The epoch in which it was opened; 0 if unknown: without the log, recovery finds an open segment by its file alone."""
    sealed: bool = False
    durable_bytes: int = 0
    segment_crc64: int = 0
    hot: bool = True
    warm_bytes: int | None = None
    """Size of the tier 1 copy, `None` if there is none."""
    dictionary_id: int = 0
    key: str | None = None
    """Key of the tier 2 copy, `None` if there is none."""
    etag: str = ""
    """Empty if unknown: LMDB does not store it."""
    packed: tuple[int, int] | None = field(default=None, compare=False)
    """(size, dictionary) of the tier 2 copy, if known. LMDB does not store it, so it is not compared."""


class Divergence(msgspec.Struct, frozen=True):
    """A segment for which log and projection differ; `None` where one of them does not have it."""

    segment_id: int
    log: SegmentFacts | None
    projection: SegmentFacts | None


def facts_of(info: SegmentInfo) -> SegmentFacts:
    """Return the comparable part of a segment's state in the log."""
    state = info.state
    sealed = state.life is Life.SEALED
    warm = state.warm is Warm.DONE
    remote = state.remote is Remote.DONE
    return SegmentFacts(
        base_offset=info.field(RecordType.SEGMENT_OPENED, "base_offset"),
        epoch=info.field(RecordType.SEGMENT_OPENED, "epoch"),
        sealed=sealed,
        durable_bytes=info.field(RecordType.SEAL_SEGMENT, "durable_bytes") if sealed else 0,
        segment_crc64=info.field(RecordType.SEAL_SEGMENT, "segment_crc64") if sealed else 0,
        hot=state.hot is Hot.RESIDENT,
        warm_bytes=info.field(RecordType.COMPRESSION_DONE, "compressed_bytes") if warm else None,
        dictionary_id=info.field(RecordType.COMPRESSION_DONE, "dictionary_id") if warm else 0,
        key=info.key if remote else None,
        etag=info.field(RecordType.UPLOAD_DONE, "etag") if remote else "",
        packed=packed_of(info) if remote else None,
    )


def packed_of(info: SegmentInfo) -> tuple[int, int] | None:
    """Return (size, dictionary) of a segment's compressed form, if the log has ever recorded one."""
    size = info.field(RecordType.COMPRESSION_DONE, "compressed_bytes")
    return (size, info.field(RecordType.COMPRESSION_DONE, "dictionary_id")) if size else None


def compare(index: ManifestIndex, projection: Mapping[int, SegmentFacts]) -> list[Divergence]:
    """Return the segments for which log and projection differ, in order of their ids."""
    log = {info.segment_id: facts_of(info) for info in index.segments()}
    return [
        Divergence(segment_id, log.get(segment_id), projection.get(segment_id))
        for segment_id in sorted(log.keys() | projection.keys())
        if not _agree(log.get(segment_id), projection.get(segment_id))
    ]


def _agree(log: SegmentFacts | None, projection: SegmentFacts | None) -> bool:
    """Return whether the two are equal in the facts that the projection has."""
    if log is None or projection is None:
        return log is projection
    return replace(log, etag=projection.etag and log.etag, epoch=projection.epoch and log.epoch) == projection


def catch_up(index: ManifestIndex, projection: Mapping[int, SegmentFacts]) -> list[tuple[Payload, int]]:
    """Return the records that bring a log up to a projection.

    They are the shortest path in the transition table to the projection's state, so they may contain steps that never happened.
    If an object's size is known, a compression on the path records it. Where both have a copy and differ only in its size, key
    or etag, no record is added: `compare` shows the difference.
    """
    records: list[tuple[Payload, int]] = []
    for segment_id in sorted(projection.keys() | index.entries.keys()):
        info = index.get(segment_id)
        wanted = projection.get(segment_id)
        if info is None and segment_id <= index.opened_max:
            continue  # retired in the log: ids are never reused
        if info is None or wanted is None or not _agree(facts_of(info), wanted):
            records += [(value, segment_id) for value in _transition(info, wanted)]
    return records


def _transition(info: SegmentInfo | None, wanted: SegmentFacts | None) -> Iterable[Payload]:
    """Yield the payloads of the events on the shortest path from a segment's state to the wanted one (`None`: retired)."""
    start = info.state if info is not None else NOTHING
    goal = (
        None if wanted is None else (wanted.sealed, wanted.hot, wanted.warm_bytes is not None, wanted.key is not None)
    )
    facts = wanted or SegmentFacts(base_offset=0)
    events = _shortest_path(start, goal)
    is_told = info is not None and packed_of(info) is not None
    if facts.packed and not is_told and Event.UPLOAD_DONE in events and Event.COMPRESSION_DONE not in events:
        # Only a compression records the object's size: there was one, whose file has been removed since.
        size, dictionary_id = facts.packed
        facts = replace(facts, warm_bytes=size, dictionary_id=dictionary_id)
        events = (*_shortest_path(start, (True, facts.hot, True, True)), Event.WARM_EVICTED)
    key: str = (info.field(RecordType.UPLOAD_STARTED, "key") if info is not None else None) or ""
    for event in events:
        if event is Event.UPLOAD_STARTED:
            key = facts.key or key
        yield _payload(event, facts, key)


def _payload(event: Event, facts: SegmentFacts, key: str) -> Payload:
    match event:
        case Event.OPENED:
            return SegmentOpened(facts.base_offset, facts.epoch)
        case Event.SEALED:
            return SealSegment(facts.durable_bytes, facts.segment_crc64)
        case Event.COMPRESSION_STARTED:
            return CompressionStarted(0)
        case Event.COMPRESSION_DONE:
            return CompressionDone(facts.warm_bytes or 0, facts.dictionary_id)
        case Event.COMPRESSION_FAILED:
            return CompressionFailed(0)
        case Event.UPLOAD_STARTED:
            return UploadStarted(key)
        case Event.UPLOAD_DONE:
            return UploadDone(key, facts.etag)
        case Event.UPLOAD_FAILED:
            return UploadFailed(key, 0)
        case Event.DELETE_QUEUED:
            return Tier2DeleteQueued(key)
        case Event.DELETED:
            return Tier2Deleted(key)
        case Event.HYDRATION_STARTED:
            return HydrationStarted(1)
        case Event.HYDRATION_DONE:
            return HydrationDone(facts.durable_bytes)
        case Event.HYDRATION_FAILED:
            return HydrationFailed(0)
        case Event.LOCAL_EVICTED:
            return LocalEvicted(facts.durable_bytes)
        case Event.WARM_EVICTED:
            return CustomEvent(Schema.WARM_EVICTED)
        case Event.RETIRED:
            return CustomEvent(Schema.SEGMENT_RETIRED)
        case Event.NEEDS_REPAIR:
            return CustomEvent(Schema.NEEDS_REPAIR)
        case Event.REPAIRED:
            return CustomEvent(Schema.REPAIRED)


@cache
def _shortest_path(start: State, goal: tuple[bool, bool, bool, bool] | None) -> tuple[Event, ...]:
    """Return the shortest sequence of allowed events to a state like `goal` (sealed, hot, warm, remote), breadth first.

    Empty if there is none: a segment that the log has sealed is not opened again, whatever LMDB had before a crash.
    """

    def reached(state: State) -> bool:
        if goal is None or state.life is Life.ABSENT:
            return goal is None and state.life is Life.ABSENT
        actual = (
            state.life is Life.SEALED,
            state.hot is Hot.RESIDENT,
            state.warm is Warm.DONE,
            state.remote is Remote.DONE,
        )
        return actual == goal

    ways: dict[State, tuple[Event, ...]] = {start: ()}
    edge = deque([start])
    while edge:
        state = edge.popleft()
        if reached(state):
            return ways[state]
        for event in Event:
            if not is_valid(state, event) or (new := next_state(state, event)) in ways:
                continue
            if goal is None or new.life is not Life.ABSENT:  # the id of a retired segment is never reused
                ways[new] = (*ways[state], event)
                edge.append(new)
    return ()
