"""Verifies every copy of every segment of a stream, and reports problems.

Rules
  T1  a hot copy is the segment that was sealed: header, blocks, the checksum of the whole
  T2  a compressed copy decompresses to the segment that was sealed
  T3  an object exists and is what was uploaded; `deep`: it decompresses to the segment that was sealed
  T4  segments have consecutive records, except for gaps of takeovers, and only the last one is open
  T5  every segment has a copy
  T6  there are no files that are not part of the state (reported as a leak: harmless)
  T7  the manifest log and LMDB agree about every segment

Modifies nothing. A copy that moves meanwhile is checked again. Threads: any (functions without state).
Raises: what disk and object store raise, for example `ObjectStoreUnavailable`; damage is a problem, not an error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING

from quire.core.errors import Corruption, ObjectNotFound, OutOfRange, QuireError
from quire.core.timeline import skip_gap
from quire.durable.checksums import crc64
from quire.durable.files import read_all
from quire.durable.names import Tier
from quire.stream.mlog_modes import Mode
from quire.stream.mlog_verify import LogProblem
from quire.stream.segment import sealed_blocks
from quire.stream.segments import StreamSegment
from quire.stream.stream import Stream
from quire.stream.warm import WarmReader, bounded, reader_of

if TYPE_CHECKING:
    from quire.objects.api import ObjectStore


def problems(stream: Stream, *, deep: bool = True) -> Iterator[LogProblem]:
    """Yield every broken rule. `deep` reads whole objects."""
    view = stream.ledger.view
    for one, other in pairwise(view):
        if not one.is_sealed or skip_gap(stream.gaps, one.end_record) != other.base_record:
            where = {"segment": one.segment_id, "next": other.segment_id, "end": one.end_record}
            yield LogProblem(rule="T4", what="segments do not follow each other", where=where)
    for segment in view:
        problems = list(_of_segment(stream, segment, deep))
        if problems and stream.ledger.view.get(segment.segment_id) != segment:
            again = stream.ledger.view.get(segment.segment_id)
            problems = list(_of_segment(stream, again, deep)) if again is not None else []
        yield from problems
    yield from _leaks(stream)
    yield from _differences(stream)


def _differences(stream: Stream) -> Iterator[LogProblem]:
    """Check T7 in both directions, except for local copies, which LMDB does not record: T1, T2 and T6 check those."""
    for difference in stream.compare() if stream.mode is Mode.ON else ():
        log, rows = difference.log, difference.projection
        if log is None or rows is None:
            what = f"only {'LMDB' if log is None else 'the manifest log'} has a segment"
        elif replace(log, hot=rows.hot, warm_bytes=rows.warm_bytes, dictionary_id=rows.dictionary_id) == rows:
            continue
        else:
            what = "the manifest log and LMDB differ about a segment"
        yield LogProblem(rule="T7", what=what, where={"segment": difference.segment_id})


def _of_segment(stream: Stream, segment: StreamSegment, deep: bool) -> Iterator[LogProblem]:
    if not segment.is_sealed or segment.is_being_removed:
        return
    if not (segment.is_hot or segment.is_warm or segment.is_remote):
        yield LogProblem(rule="T5", what="a segment has no copy", where={"segment": segment.segment_id})
    if segment.is_hot:
        yield from _checked("T1", segment, lambda: _hot_crc(stream, segment))
    if segment.is_warm:
        yield from _checked("T2", segment, lambda: _warm_crc(stream, segment))
    if segment.is_remote:
        yield from _checked("T3", segment, lambda: _remote_crc(stream.store, segment, deep))


def _checked(rule: str, segment: StreamSegment, crc: Callable[[], int]) -> Iterator[LogProblem]:
    try:
        if crc() != segment.crc64:
            yield LogProblem(
                rule=rule, what="a copy differs from the segment that was sealed", where={"segment": segment.segment_id}
            )
    except (Corruption, ObjectNotFound, OutOfRange) as error:
        yield LogProblem(rule=rule, what=error.what, where={"segment": segment.segment_id, **_coordinates(error)})
    except FileNotFoundError as error:
        where = {"segment": segment.segment_id, "path": str(error.filename)}
        yield LogProblem(rule=rule, what="a copy's file is missing", where=where)


def _coordinates(error: QuireError) -> dict[str, object]:
    return {name: value for name, value in error.where.items() if name != "segment"}


def _hot_crc(stream: Stream, segment: StreamSegment) -> int:
    path = stream.files.segment(Tier.HOT, segment.segment_id)
    raw = memoryview(read_all(stream.files.disk, path))[: segment.durable_bytes]
    blocks = sealed_blocks(raw, segment.durable_bytes, path=path)
    if blocks.end_record != segment.end_record:
        raise Corruption("a segment has the wrong number of records", path=path, end=blocks.end_record)
    return crc64(raw)


def _warm_crc(stream: Stream, segment: StreamSegment) -> int:
    path = stream.files.segment(Tier.WARM, segment.segment_id)
    data = read_all(stream.files.disk, path)
    return reader_of(data, path, segment.durable_bytes).verify()


def _remote_crc(store: ObjectStore, segment: StreamSegment, deep: bool) -> int:
    if deep:
        return reader_of(
            bounded(store, segment.key, segment.durable_bytes), segment.key, segment.durable_bytes
        ).verify()
    size, expected = store.head(segment.key).size_bytes, segment.durable_bytes
    reader = WarmReader(
        lambda offset, length: store.get_range(segment.key, offset, length), size, path=segment.key, raw_bytes=expected
    )
    return reader.raw_crc64


def _leaks(stream: Stream) -> Iterator[LogProblem]:
    for tier in Tier:
        here = set(stream.files.segments(tier))
        view = stream.ledger.view  # after the listing, so that it has every listed file that was created meanwhile
        known = {segment.segment_id for segment in view if (segment.is_hot if tier is Tier.HOT else segment.is_warm)}
        for segment_id in sorted(here - known):
            where = {"segment": segment_id, "path": stream.files.segment(tier, segment_id)}
            yield LogProblem(rule="T6", what="a file belongs to no copy", where=where, leak=True)
