"""One consumer of many streams: acknowledges its positions and returns where the streams end, in one call.

A consumer of a pattern of streams is a consumer of each of them, under one name (`Stream.register`). It polls all of them
often, so a poll must be cheap: a stream that the engine has closed is not opened again, because nothing changes it while it is
closed (`StreamEngine.extent`). A consumer's hold is renewed when a quarter of the stream's `hold_seconds` has passed, not at
every poll: each renewal is a synced write.

Threads: any. Raises what `Stream.ack` and opening a stream raise.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from quire.core.errors import DatabaseTombstoned, UnknownDatabase
from quire.manifest.records import DbKind
from quire.stream.remote_read import PolledStream
from quire.stream.state import Consumer

if TYPE_CHECKING:
    from quire.manifest.store import ManifestStore
    from quire.stream.engine import StreamEngine, StreamExtent

RENEWALS = 4
"""Renewals of a consumer within `hold_seconds`."""


def poll_streams(
    engine: StreamEngine, manifest: ManifestStore, consumer: str, positions: Sequence[tuple[int, int]]
) -> list[PolledStream | None]:
    """Acknowledge for a consumer everything below the position of each stream, given as (id, position); return the streams,
    `None` for one that no longer exists. Position 0 only renews the consumer's hold; an empty consumer changes nothing."""
    return [_poll(engine, manifest, consumer, *position) for position in positions]


def _poll(
    engine: StreamEngine, manifest: ManifestStore, consumer: str, stream_id: int, position: int
) -> PolledStream | None:
    try:
        with manifest.read() as txn:
            _, record = txn.live(stream_id, DbKind.STREAM)
        extent = engine.extent(stream_id)
        known = extent.consumers.get(consumer)
        now_ms = manifest.clock.now_ms()
        if known is not None and (
            position > known.position or (not position and _is_renewal_due(known, extent, now_ms))
        ):
            stream = engine.open(stream_id)
            stream.ack(consumer, position)
            known = stream.consumers.get(consumer)
    except DatabaseTombstoned:
        return PolledStream("")
    except UnknownDatabase:
        return None
    return PolledStream(record.name, known.position if known is not None else 0, extent.end_record, extent.gaps)


def _is_renewal_due(consumer: Consumer, extent: StreamExtent, now_ms: int) -> bool:
    """Return whether a consumer should renew its hold on a stream's records."""
    hold_ms = extent.hold_seconds * 1_000
    return 0 < hold_ms <= RENEWALS * (now_ms - consumer.acked_ms)
