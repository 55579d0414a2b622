"""A stream in numbers, for people and for metrics. Threads: any."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from quire.stream.state import Consumer, Retention

if TYPE_CHECKING:
    from quire.stream.stream import Stream


class StreamInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A stream in numbers."""

    stream_id: int
    first_record: int
    end_record: int
    segments: int
    hot_segments: int
    hot_bytes: int
    warm_segments: int
    warm_bytes: int
    remote_segments: int
    remote_bytes: int
    mode: str
    consumers: dict[str, Consumer]
    retention: Retention
    torn_bytes: int
    """Bytes behind the cut of the last recovery."""
    needs_repair: list[int] = []
    """Segments whose only copy was an object that is gone."""

    @property
    def records(self) -> int:
        return self.end_record - self.first_record


def info_of(stream: Stream) -> StreamInfo:
    """The numbers of a stream that is open, as they are now."""
    segments = stream.ledger.view.segments
    hot, warm = [each for each in segments if each.is_hot], [each for each in segments if each.is_warm]
    remote = [each for each in segments if each.is_remote]
    live = stream.hot.segment
    return StreamInfo(
        stream_id=stream.stream_id,
        first_record=stream.first_record,
        end_record=stream.end_record,
        segments=len(segments),
        hot_segments=len(hot),
        hot_bytes=sum(each.durable_bytes for each in hot) + (live.offset if live is not None else 0),
        warm_segments=len(warm),
        warm_bytes=sum(each.warm_bytes for each in warm),
        remote_segments=len(remote),
        remote_bytes=sum(each.warm_bytes or stream.upkeep.object_bytes.get(each.segment_id, 0) for each in remote),
        mode=stream.mode.value,
        consumers=stream.consumers,
        retention=stream.retention,
        torn_bytes=stream.torn_bytes,
        needs_repair=sorted(stream.ledger.index.needs_repair),
    )
