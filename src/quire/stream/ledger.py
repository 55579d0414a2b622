"""Tells what happens to a stream's segments: to the manifest log first, to LMDB second, and to readers by a new view.

Terms
  truth   the index that counts: the log's own in mode `on`; in modes `shadow` and `off` one in memory, which LMDB and the
          directories can rebuild

Rules
  1. A step is checked against the transition table, logged and synced before anything depends on it (S1).
  2. In mode `on` LMDB follows when somebody calls `project`: it can be folded again at any time. Otherwise it follows at
     once, because it is what the next opening believes.
  3. In `shadow` the log is written beside; a step that it does not allow is told and counted, and stops nothing.
  4. Switching to a mode in which the log is written first brings the log up to the truth, by records. The mode is remembered
     on disk before the log falls behind, and after it has caught up.

Threads: any; one lock. Raises `IllegalTransition`, `StoreUnusable`, and what log and manifest raise.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable

from quire.core.errors import IllegalTransition, QuireError
from quire.core.events import emit
from quire.stream.catalogue import View, view_of
from quire.stream.files import StreamClock
from quire.stream.mlog_format import encode_record
from quire.stream.mlog_index import ManifestIndex
from quire.stream.mlog_log import ManifestLog
from quire.stream.mlog_modes import Divergence, GatedLog, Mode, SegmentFacts, catch_up, compare, facts_of
from quire.stream.mlog_records import Payload, SealSegment, encode
from quire.stream.projection import Projection

Step = tuple[Payload, int] | tuple[Payload, int, int]
"""(what, segment), and a logical offset if it has one."""


class Ledger:
    """The one place where the state of a stream changes."""

    def __init__(
        self,
        log: ManifestLog,
        projection: Projection,
        clock: StreamClock,
        *,
        mode: Mode,
        own: ManifestIndex | None = None,
        remember: Callable[[Mode], None] = lambda _: None,
    ) -> None:
        # constant after construction
        self.gated = GatedLog(log, mode)
        self.projection = projection
        self._clock = clock
        self._remember = remember
        # guarded by _lock
        self._lock = threading.RLock()
        self._own = own
        self._behind: set[int] = set()
        """Segments whose rows are to be folded again."""
        self.shadow_refused = 0
        """Steps that the log did not allow while it was a shadow."""
        # replaced under _lock, read by all
        self.view: View = view_of(self.index)

    @property
    def log(self) -> ManifestLog:
        return self.gated.log

    @property
    def index(self) -> ManifestIndex:
        """The truth."""
        return self.log.index if self._own is None else self._own

    @property
    def mode(self) -> Mode:
        return self.gated.mode

    # ── telling ───────────────────────────────────────────────────────────────────────────────────────────────────────
    def tell(self, *steps: Step) -> None:
        """Make steps, together and durably (rule 1)."""
        with self._lock:
            for step in steps:
                value, segment_id, offset = step if len(step) == 3 else (*step, 0)
                self._tell(value, segment_id, offset)
            if self.mode is not Mode.OFF:
                self.log.commit()
            changed = frozenset(step[1] for step in steps)
            self.view = view_of(self.index, self.view, changed)
            self._behind |= changed
            if self.mode is not Mode.ON:
                self._project()

    def _tell(self, value: Payload, segment_id: int, offset: int) -> None:
        if self._own is None:
            self.log.append(value, segment_id, logical_offset=offset)
            return
        self._own.check(value, segment_id)
        fold(self._own, value, segment_id, offset, self._clock.now_ms())
        try:
            self.gated.append(value, segment_id, logical_offset=offset)
        except IllegalTransition as error:  # rule 3
            self.shadow_refused += 1
            emit("warning", "stream.mlog.shadow_refused", stream=self.log.files.stream_id, error=str(error))

    def project(self) -> None:
        """Bring LMDB up to the truth, as far as it is behind; what fails is told and tried again with the next."""
        with self._lock:
            try:
                self._project()
            except QuireError as error:
                emit("warning", "stream.projection_failed", stream=self.log.files.stream_id, error=str(error))

    def project_now(self) -> None:
        """The same, and what fails is raised."""
        with self._lock:
            self._project()

    def _project(self) -> None:
        if self._behind:
            self.projection.fold(self.view, self._behind)
            self._behind = set()

    def fold_all(self) -> int:
        """Compare every row with the truth, and mend; how many operations that took."""
        with self._lock:
            return self.projection.fold(self.view)

    # ── modes ─────────────────────────────────────────────────────────────────────────────────────────────────────────
    def switch(self, mode: Mode) -> None:
        """Change the mode, now (rule 4)."""
        with self._lock:
            former = self.mode
            if mode is former:
                return
            self._project()
            if mode is not Mode.ON:
                self._remember(mode)
            if self._own is None:
                self._own = copy.deepcopy(self.log.index)
            if mode is not Mode.OFF:
                bring_up(self.log, self._own)
            self.gated.switch(mode)
            if mode is Mode.ON:
                left = compare(self.log.index, facts_of_index(self._own))
                self._own = None
                self.view = view_of(self.index)
                self._remember(mode)
                for each in left:
                    emit("error", "stream.mlog.divergence", stream=self.log.files.stream_id, segment=each.segment_id)

    def compare(self) -> list[Divergence]:
        """Where log and LMDB differ; the figure `manifest_shadow_divergence` is their number."""
        with self._lock:
            known = facts_of_index(self.index)
            etags = {each: facts.etag for each, facts in known.items()}
            is_open = {each: facts for each, facts in known.items() if not facts.sealed}
            if self.mode is Mode.ON:
                self._project()
            return self.gated.compare({**self.projection.facts(etags), **is_open})


def facts_of_index(index: ManifestIndex) -> dict[int, SegmentFacts]:
    """What an index says, comparably."""
    return {info.segment_id: facts_of(info) for info in index.segments()}


def fold(index: ManifestIndex, value: Payload, segment_id: int, offset: int, timestamp_ms: int) -> None:
    """Fold a step that no log has."""
    raw = encode_record(value.TYPE, segment_id, encode(value), logical_offset=offset, timestamp_ms=timestamp_ms)
    index.fold_raw(raw)


def bring_up(log: ManifestLog, index: ManifestIndex) -> int:
    """Append what brings a log that has missed something up to the truth; how many records."""
    view = view_of(index)
    records = catch_up(log.index, facts_of_index(index))
    for value, segment_id in records:
        segment = view.get(segment_id)
        ends = isinstance(value, SealSegment) and segment is not None
        log.append(value, segment_id, logical_offset=segment.end_record if ends and segment is not None else 0)
    log.commit()
    return len(records)


def rebuilt(facts: dict[int, SegmentFacts], ends: dict[int, tuple[int, int]], now_ms: int) -> ManifestIndex:
    """The truth from what LMDB and the directories say. `ends`: (end_record, sealed_ms) of each segment.

    When a segment was opened nobody remembers: as late as now, which makes searches by time begin too early, never too late.
    """
    index = ManifestIndex()
    for value, segment_id in catch_up(index, facts):
        end, sealed_ms = ends.get(segment_id, (0, now_ms))
        sealing = isinstance(value, SealSegment)
        fold(index, value, segment_id, end if sealing else 0, sealed_ms if sealing else now_ms)
    return index
