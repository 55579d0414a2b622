"""Which version a libSQL replica has, named by its generation and frame number on this server.

Such a replica counts the frames that it gets, in 32 bits, and has no other name for its version. It returns with (generation,
frame) and requests the frames after it. So the meaning of a pair is stored durably before the replica receives it:

  1. One pair never means two versions. Replicas that get different pages on their way to a version reach it under different
     numbers; a number that is taken, or may have been, is avoided by sending the last page again. A replica that would get
     more pages for that than the database has goes on to the next generation.
  2. The low `TAG_BITS` bits of a generation are a hash of the history (`revisions.py`). A pair of another history is not known
     here, and its generation nearly always shows that.
  3. A generation begins with an export. Frame 0 means the version that was newest when the generation was created: every export
     of it is at least as new, and gets more pages than it needs. A generation is exported for `EXPORT_SECONDS`.
  4. A generation with our tag that did not begin with an export is entered by a replica whose pair is not known: its frame 0
     means that it needs every page.
  5. Frame numbers that are multiples of `STEP` are not positions: long answers are cut there (`frames.py`). A replica that
     returns with one was interrupted.

Maintenance removes old pairs (`jobs/replica_positions.py`); one that a replica uses is renewed. Table `replica_positions`,
docs/formats/manifest.md.

Threads: any; one lock. Blocks for commits of the manifest.
"""

from __future__ import annotations

import secrets
import threading
from hashlib import blake2b

from quire.core.clock import Clock
from quire.manifest import tables as t
from quire.manifest.ops.local import PutReplicaPosition
from quire.manifest.store import ManifestStore
from quire.service.replicas.revisions import HistoryId

TAG_BITS = 8
GENERATION_MAX = (1 << 31) - 1
STEP = 64
EXPORT_SECONDS = 3_600.0
RENEWED_MS = 24 * 3600 * 1000
"""Age at which a pair is renewed when a replica uses it."""


def tag_of(history: HistoryId) -> int:
    """Return the low bits of every generation of a history."""
    text = f"{history.store_id}-{history.db_id}-{history.range_start}"
    return blake2b(text.encode(), digest_size=1).digest()[0]


def next_generation(history: HistoryId, generation: int) -> int:
    """Return the next generation, one with our tag, for a replica whose own is not known.

    >>> history = HistoryId("abc", 1, 0)
    >>> [(next_generation(history, at) - tag_of(history)) % 256 for at in (1, 255, 256)]
    [0, 0, 0]
    """
    return generation + 1 + (tag_of(history) - generation - 1) % (1 << TAG_BITS)


class Positions:
    """The positions of one store's replicas."""

    def __init__(self, manifest: ManifestStore) -> None:
        self._manifest = manifest
        self._clock: Clock = manifest.clock
        # guarded by _lock
        self._lock = threading.Lock()
        self._exports: dict[HistoryId, tuple[int, float]] = {}
        """The generation that is currently exported, and until when."""

    def find(self, history: HistoryId, generation: int, frame: int) -> int | None:
        """Return the lsn that a replica has; 0 if it needs everything, `None` if its pair is not known (rules 2 to 5)."""
        lsn = self._known(history, generation, frame)
        if lsn is None and not frame and generation & ((1 << TAG_BITS) - 1) == tag_of(history):
            return 0
        return lsn

    def is_export(self, history: HistoryId, generation: int) -> bool:
        """Return whether a generation began with an export."""
        return self._known(history, generation, 0) is not None

    def _known(self, history: HistoryId, generation: int, frame: int) -> int | None:
        with self._manifest.read() as txn:
            row = txn.get(t.REPLICA_POSITIONS, history.db_id, generation, frame)
        if row is None or row.range_start != history.range_start or row.used_below:
            return None
        # A replica of a database that does not change gets no new pair, however often it asks.
        if row.at_ms < self._clock.now_ms() - RENEWED_MS:
            self._put(history, generation, frame, row.lsn)
        return row.lsn

    def exported(self, history: HistoryId, newest_lsn: int) -> int:
        """Return the generation that a new replica begins with (rule 3)."""
        with self._lock:
            now = self._clock.monotonic()
            known = self._exports.get(history)
            if known is not None and now < known[1] and self.is_export(history, known[0]):
                return known[0]
            while True:
                generation = secrets.randbelow(GENERATION_MAX >> TAG_BITS) + 1 << TAG_BITS | tag_of(history)
                with self._manifest.read() as txn:
                    is_free = next(iter(txn.raw_scan(t.REPLICA_POSITIONS, history.db_id, generation)), None) is None
                if is_free and generation <= GENERATION_MAX:
                    break
            # Before any client receives the generation: exports of it are read later, so they are at least as new as
            # this version (rule 3).
            self._put(history, generation, 0, newest_lsn)
            self._exports[history] = (generation, now + EXPORT_SECONDS)
            return generation

    def reach(self, history: HistoryId, generation: int, frame: int, frame_max: int, lsn: int) -> int | None:
        """Record that a replica will have a version at this frame number, or at the next free one; return the number, or `None`
        if none is free up to `frame_max` (rule 1)."""
        with self._lock:
            free = self._free(history, generation, frame, frame_max, lsn)
            if free is not None and self._known(history, generation, free) is None:
                self._put(history, generation, free, lsn)
            return free

    def _free(self, history: HistoryId, generation: int, frame: int, frame_max: int, lsn: int) -> int | None:
        """Return the first number from `frame` on that can mean this version, or already does (rules 1 and 5)."""
        with self._manifest.read() as txn:
            first = txn.get(t.REPLICA_POSITIONS, history.db_id, generation, 0)
            for number in range(max(frame, first.used_below if first is not None else 0), frame_max + 1):
                row = txn.get(t.REPLICA_POSITIONS, history.db_id, generation, number)
                if number % STEP and (row is None or (row.lsn, row.range_start) == (lsn, history.range_start)):
                    return number
        return None

    def _put(self, history: HistoryId, generation: int, frame: int, lsn: int) -> None:
        put = PutReplicaPosition(history.db_id, generation, frame, lsn, history.range_start)
        self._manifest.submit([put]).result()
