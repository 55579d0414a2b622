"""Which moments an archive can restore, from the bucket alone: the newest and the oldest (A8, A13).

Reads listings and headers, writes nothing. Pure of state, any thread. Raises what `chain.find` raises.
"""

from __future__ import annotations

import msgspec

from quire.archive.chain import find
from quire.archive.format import Position
from quire.archive.window import Line, list_archive
from quire.objects.api import ObjectStore


class Moments(msgspec.Struct, frozen=True, kw_only=True):
    """How far back, and how far on, a store can be restored."""

    newest: Position
    newest_at_ms: int
    oldest: Position
    oldest_at_ms: int


def moments(store: ObjectStore, store_id: str) -> Moments:
    """The newest and the oldest restorable moment of a store: of the line that leads to the newest, not of abandoned epochs."""
    newest = find(store, store_id)
    oldest = Line(store, list_archive(store, store_id)).oldest()
    return Moments(
        newest=newest.position,
        newest_at_ms=newest.at_ms,
        oldest=oldest.position if oldest is not None else newest.position,
        oldest_at_ms=oldest.at_ms if oldest is not None else newest.at_ms,
    )
