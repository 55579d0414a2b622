"""Which moments an archive can restore, from the bucket alone: the newest and the oldest (A8, A13).

Reads listings and headers, writes nothing. Pure of state, any thread. Raises what `chain.find` raises.
"""

from __future__ import annotations

import msgspec

from quire.archive.chain import epochs, find, header_of, log_positions
from quire.archive.format import NONE, BaseEvent, Kind, Position, decode_object, log_key
from quire.objects.api import ObjectStore


class Moments(msgspec.Struct, frozen=True, kw_only=True):
    """How far back, and how far on, a store can be restored."""

    newest: Position
    newest_at_ms: int
    oldest: Position
    oldest_at_ms: int


def moments(store: ObjectStore, store_id: str) -> Moments:
    """The newest and the oldest restorable moment of a store."""
    newest = find(store, store_id)
    oldest, oldest_at_ms = newest.position, newest.at_ms
    for epoch in epochs(store, store_id):
        position = _oldest_of(store, store_id, epoch)
        if position is not None:
            oldest, oldest_at_ms = position, header_of(store, store_id, position).at_ms
            break
    return Moments(newest=newest.position, newest_at_ms=newest.at_ms, oldest=oldest, oldest_at_ms=oldest_at_ms)


def _oldest_of(store: ObjectStore, store_id: str, epoch: int) -> Position | None:
    """The first object of an epoch whose base, and the log since that base began, are still there. Bases only move on, so what
    holds for one object holds for all behind it."""
    positions = log_positions(store, store_id, epoch)
    if positions and header_of(store, store_id, positions[-1]).kind is Kind.SEAL:
        positions.pop()
    if not positions:
        return None
    first, low, high = positions[0].number, 0, len(positions)
    while low < high:
        middle = (low + high) // 2
        if _restorable(store, store_id, positions[middle], first) is not None:
            high = middle
        else:
            low = middle + 1
    return _restorable(store, store_id, positions[low], first) if low < len(positions) else None


def _restorable(store: ObjectStore, store_id: str, position: Position, first: int) -> Position | None:
    header = header_of(store, store_id, position)
    if NONE in (header.restorable, header.base) or min(header.restorable, header.base) < first:
        return None
    key = log_key(store_id, Position(position.epoch, header.base))
    bases = [event for event in decode_object(store.get(key), key)[1] if isinstance(event, BaseEvent)]
    return Position(position.epoch, header.restorable) if bases and bases[-1].first_log >= first else None
