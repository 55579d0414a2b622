"""What an owner tells other processes of a stream that they read (`remote_read.py`).

Rules
  1. A share is of durable records: of the open segment it says how far its file may be read, and no further.
  2. With `upload` every record that was asked for is in an object when this returns: the open segment is sealed first if it
     has some of them.

Threads: any. Raises `CursorLost`, `OutOfRange`, and what uploading raises.
"""

from __future__ import annotations

from bisect import bisect_left

from quire.core.errors import CursorLost, OutOfRange
from quire.stream.reader import is_going
from quire.stream.remote_read import SharedSegment, SharedStream
from quire.stream.segments import StreamSegment
from quire.stream.stream import Stream

SEGMENTS_MAX = 8_192
"""Of one answer: about 1 MiB. Whoever wants more asks from the end of the last one on."""


def share(
    stream: Stream,
    start: int | None,
    stop: int | None,
    *,
    upload: bool = False,
    segments_max: int = SEGMENTS_MAX,
    store_id: str = "",
    objects_url: str = "",
) -> SharedStream:
    """The segments with records of [start, stop); of everything that is retained and durable, if nothing is said."""
    first, end = stream.first_record, stream.end_record
    begin, last = first if start is None else start, end if stop is None else min(stop, end)
    if begin < first:
        hint = f"the first one is {first}"
        raise CursorLost("these records are no longer retained", hint=hint, start=begin, first=first)
    if begin > end:
        raise OutOfRange("there is no such record yet", hint=f"the next one is {end}", start=begin, end=end)
    if upload and begin < last:
        _upload(stream, begin, last)
    shared: list[SharedSegment] = []
    for segment in stream.ledger.view:
        if len(shared) >= min(segments_max, SEGMENTS_MAX):
            break
        entry = _told(stream, segment, end)
        if entry is not None and entry.base_record < last and entry.end_record > begin and begin < last:
            shared.append(entry)
    files = stream.files
    return SharedStream(store_id, stream.stream_id, files.root, objects_url, first, end, tuple(shared))


def _upload(stream: Stream, begin: int, last: int) -> None:
    """Upload every record that was asked for, sealing the open segment first if it has some of them (rule 2)."""
    view = stream.ledger.view.segments
    if view and not view[-1].is_sealed and last > view[-1].base_record:
        stream.seal()
    for segment in stream.ledger.view:
        if segment.is_sealed and not segment.is_remote and segment.base_record < last and segment.end_record > begin:
            stream.tiers.upload(segment.segment_id)


def _told(stream: Stream, segment: StreamSegment, durable: int) -> SharedSegment | None:
    """A segment as others see it; `None` if it has nothing for them."""
    if is_going(segment):
        return None
    if segment.is_sealed:
        key = segment.key if segment.is_remote else ""
        return SharedSegment(
            segment.segment_id, segment.base_record, segment.end_record, segment.durable_bytes, segment.crc64,
            segment.sealed_ms, segment.warm_bytes, key,
        )  # fmt: skip
    live = stream.hot.segment
    if live is None or live.segment_id != segment.segment_id:  # it has just been sealed: the next look knows
        return None
    place = bisect_left(live.firsts, durable)
    stored = live.offsets[place] if place < len(live.offsets) else live.offset
    if durable <= segment.base_record:
        return None
    return SharedSegment(segment.segment_id, segment.base_record, durable, stored, 0, 0)
