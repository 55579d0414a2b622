"""Random, valid histories of segments: records that a coordinator could have written."""

from __future__ import annotations

import random

from quire.core.errors import IllegalTransition
from quire.stream import mlog_records as r
from quire.stream.mlog_format import encode_record
from quire.stream.mlog_index import ManifestIndex


class RandomHistory:
    """Generates valid records about a few segments at a time."""

    def __init__(self, seed: int, alive: int = 6) -> None:
        self.rng = random.Random(seed)
        self.index = ManifestIndex()
        self.alive = alive
        self.next_segment = 1

    def next(self) -> tuple[r.Payload, int]:
        """A record that is valid in the current state, and its segment. It is folded into `index` as well."""
        while True:
            value, segment = self._guess()
            try:
                self.index.check(value, segment)
            except IllegalTransition:
                continue
            self.index.fold_raw(encode_record(value.TYPE, segment, r.encode(value), timestamp_ms=5))
            return value, segment

    def many(self, count: int) -> list[tuple[r.Payload, int]]:
        return [self.next() for _ in range(count)]

    def _guess(self) -> tuple[r.Payload, int]:
        rng = self.rng
        if (len(self.index.entries) < self.alive and rng.random() < 0.5) or not self.index.entries:
            self.next_segment = self.index.opened_max + 1
            return r.SegmentOpened(self.next_segment * 100, rng.randrange(9)), self.next_segment
        segment = rng.choice(list(self.index.entries))
        key = f"objects/{segment}"
        values: list[r.Payload] = [
            r.SealSegment(rng.randrange(1 << 20), rng.getrandbits(64)),
            r.CompressionStarted(rng.randrange(100)),
            r.CompressionDone(rng.randrange(1 << 20), 3),
            r.CompressionFailed(1),
            r.UploadStarted(key),
            r.UploadDone(key, f"etag-{rng.randrange(100)}"),
            r.UploadFailed(key, 7),
            r.Tier2DeleteQueued(key),
            r.Tier2Deleted(key),
            r.HydrationStarted(2),
            r.HydrationDone(77),
            r.HydrationFailed(3),
            r.LocalEvicted(99),
            r.CustomEvent(r.Schema.WARM_EVICTED),
            r.CustomEvent(r.Schema.SEGMENT_RETIRED),
            r.CustomEvent(5000, b"note"),
            r.UnknownRecord(99, b"later"[:5] + b"..."),
        ]
        return rng.choice(values), segment
