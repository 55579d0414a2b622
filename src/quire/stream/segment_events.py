"""Records what happens to a stream's segments: in the manifest log first, in LMDB second, and for readers by a new view.

The truth is the index that counts: the log's own in mode `on`; in modes `shadow` and `off` one in memory, which LMDB and the
directories can rebuild. A step is checked against the transition table, logged and synced before anything depends on it (S1).
In mode `on` LMDB follows when somebody calls `project`; otherwise it follows at once, because it is what the next opening
believes.

A shadow is written beside and stops nothing: a step that it does not allow is reported and counted; one that cannot be
written ends the shadow for a while (`AbsentLog`). Switching to a mode in which the log is written first brings the log up to
the truth, by records; the mode is remembered on disk before the log falls behind, and after it has caught up. LMDB has no
word for a segment that is going, its object queued for deletion: while the log is not believed, that is remembered beside the
mode.

Threads: any; one lock. Raises `IllegalTransition`, `StoreUnusable`, and what log and manifest raise."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Collection
from dataclasses import replace
from typing import TypeVar

import msgspec

from quire.core.errors import IllegalTransition, QuireError, StoreFenced
from quire.core.events import emit, listening
from quire.stream.files import StreamClock
from quire.stream.metrics import LogFigures
from quire.stream.mlog_format import encode_record
from quire.stream.mlog_index import ManifestIndex
from quire.stream.mlog_log import AbsentLog, ManifestLog
from quire.stream.mlog_modes import Divergence, Mode, SegmentFacts, catch_up, compare, facts_of
from quire.stream.mlog_reader import LogPosition
from quire.stream.mlog_records import (
    CustomEvent,
    LocalEvicted,
    Payload,
    Schema,
    SealSegment,
    Tier2Deleted,
    Tier2DeleteQueued,
    UploadDone,
    UploadFailed,
    UploadStarted,
    encode,
)
from quire.stream.mlog_states import STATES, Remote
from quire.stream.projection import StreamProjection
from quire.stream.segments import SegmentList, StreamSegment, view_of

WARNINGS_MAX = 16
"""Divergent segments that one comparison warns about; the figure counts all."""
WATCH_SECONDS = 60.0
"""Somebody else may have written into the log, or into LMDB."""

Done = TypeVar("Done")
Step = tuple[Payload, int] | tuple[Payload, int, int]
"""(what, segment), and a logical offset if it has one."""


class Ledger:
    """The one place where the state of a stream changes."""

    def __init__(
        self,
        log: ManifestLog,
        projection: StreamProjection,
        clock: StreamClock,
        *,
        mode: Mode,
        own: ManifestIndex | None = None,
        remember: Callable[[Mode, Collection[int]], None] = lambda _, __: None,
        reopen: Callable[[], ManifestLog],
    ) -> None:
        # constant after construction
        self.projection = projection
        self._clock = clock
        self._remember = remember
        self._reopen = reopen
        self.told: Callable[[], None] = lambda: None
        """Called after every step; set once, by the stream."""
        # guarded by _lock
        self._lock = threading.RLock()
        self.log = log
        self.mode = mode
        self._own = own
        self._behind: set[int] = set()
        """Segments whose rows are to be folded again."""
        self._divergent: frozenset[int] = frozenset()
        """Segments of which log and LMDB differed at the last comparison since the last switch."""
        self.shadow_refused = 0
        """Steps that the log did not allow while it was a shadow."""
        self._watched = (-1, -1)
        """Records of the log, and steps that it refused, at the last comparison of a shadow."""
        self._watched_at = self._lost_at = clock.monotonic()
        # replaced under _lock, read by all
        self.view: SegmentList = view_of(self.index)

    @property
    def index(self) -> ManifestIndex:
        """The truth."""
        return self.log.index if self._own is None else self._own

    # ── telling ───────────────────────────────────────────────────────────────────────────────────────────────────────
    def tell(self, *steps: Step) -> None:
        """Make steps, together and durably."""
        with self._lock:
            places: list[LogPosition | None] = []
            for step in steps:
                value, segment_id, offset = step if len(step) == 3 else (*step, 0)
                places.append(self._tell(value, segment_id, offset))
            self.guarded(self.log.commit)
            if self.mode is not Mode.ON and any(isinstance(step[0], Tier2DeleteQueued) for step in steps):
                self._remember(self._remembered(), self.going())
            if listening():
                self._announce(steps, places)
            changed = frozenset(step[1] for step in steps)
            self.view = view_of(self.index, self.view, changed)
            self._behind |= changed
            if self.mode is not Mode.ON:
                self._project()
        self.told()

    def rotate_when_due(self) -> float | None:
        """Seal the log's chunk if its time has come; else in how many seconds that is."""
        return self.guarded(self.log.rotate_when_due)

    def reserve(self) -> None:
        """Have room in the log for a few steps: `DiskFull` comes here, and changes nothing."""
        self.guarded(self.log.reserve)

    def guarded(self, step: Callable[[], Done]) -> Done | None:
        """Have the log do something, unless it is absent. A shadow that fails is left, and what it did is `None`."""
        if isinstance(self.log, AbsentLog):
            return None
        try:
            return step()
        except Exception as error:
            if self._own is None or isinstance(error, StoreFenced):
                raise
            self._lose(error)
            return None

    def close(self) -> None:
        """Close the log. A shadow whose last commit fails is told to have missed something."""
        if self._own is None:
            self.log.close()
        else:
            self.guarded(self.log.commit)
            self.log.close()

    def _lose(self, error: Exception) -> None:
        """The shadow cannot be written: go on without it. That it has missed something is on disk before anything else is."""
        if isinstance(self.log, AbsentLog):
            return
        with self._lock:
            emit("error", "stream.mlog.shadow_failed", stream=self.log.files.stream_id, error=str(error))
            self._remember(Mode.OFF, self.going())
            self._lost_at = self._clock.monotonic()
            self.leave_log()

    def leave_log(self) -> None:
        """Close the log; an `AbsentLog` stands in for it."""
        with self._lock:
            log = self.log
            try:
                log.close()
            except Exception as error:  # what it held is not believed
                emit("warning", "stream.mlog.left", stream=log.files.stream_id, error=str(error))
                log.abandon()
            self.log = AbsentLog(log.files, log.objects, self._clock, self._reopen)

    def _tell(self, value: Payload, segment_id: int, offset: int) -> LogPosition | None:
        """Where in the log the step stands, if it does."""
        if self._own is None:
            return self.log.append(value, segment_id, logical_offset=offset)
        self._own.check(value, segment_id)
        fold(self._own, value, segment_id, offset, self._clock.now_ms())
        if isinstance(self.log, AbsentLog):
            return None
        try:
            return self.log.append(value, segment_id, logical_offset=offset)
        except IllegalTransition as error:  # a shadow stops nothing
            self.shadow_refused += 1
            emit("warning", "stream.mlog.shadow_refused", stream=self.log.files.stream_id, error=str(error))
        except StoreFenced:
            raise
        except Exception as error:
            self._lose(error)
        return None

    def _announce(self, steps: tuple[Step, ...], places: list[LogPosition | None]) -> None:
        """One event for each step, with the place of its record: from there `quire manifest inspect` goes on."""
        for step, place in zip(steps, places, strict=True):
            at = {"chunk_index": place.chunk_index, "chunk_offset": place.offset} if place is not None else {}
            action = type(step[0]).__name__
            emit("info", "stream.step", stream=self.log.files.stream_id, segment_id=step[1], tier_action=action, **at)

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

    @property
    def is_behind(self) -> bool:
        """Whether LMDB has not been told of something."""
        return bool(self._behind)

    def _project(self) -> None:
        if self._behind:
            self.projection.fold(self.view, self._behind)
            self._behind = set()

    def fold_all(self) -> int:
        """Compare every row with the truth, and mend; how many operations that took."""
        with self._lock:
            return self.projection.fold(self.view)

    def going(self) -> list[int]:
        """Segments that retention has begun to take, by the truth."""
        return being_deleted(self.index)

    # ── modes ─────────────────────────────────────────────────────────────────────────────────────────────────────────
    def switch(self, mode: Mode) -> None:
        """Change the mode, now."""
        with self._lock:
            if mode is self.mode:
                return
            self._project()
            if mode is Mode.OFF:
                self._remember(mode, self.going())
            if self._own is None:
                self._own = copy.deepcopy(self.log.index)
            if mode is not Mode.OFF:
                self._bring_up()
            if mode is Mode.SHADOW:
                self._remember(mode, self.going())
            former, self.mode = self.mode, mode
            self._divergent = frozenset()
            emit("info", "stream.mlog.mode", stream=self.log.files.stream_id, former=former.value, mode=mode.value)
            if mode is Mode.OFF:
                self.leave_log()
            if mode is Mode.ON:
                left = compare(self.log.index, facts_of_index(self._own))
                self._own = None
                self.view = view_of(self.index)
                self._remember(mode, ())
                for step in left:
                    emit("error", "stream.mlog.divergence", stream=self.log.files.stream_id, segment_id=step.segment_id)

    def _bring_up(self) -> None:
        """Have the log open, and as far as the truth is. What fails leaves everything as it was."""
        assert self._own is not None
        if isinstance(self.log, AbsentLog):
            absent = self.log
            try:
                log = absent.open_again()
            except BaseException:
                self.log = AbsentLog(absent.files, absent.objects, self._clock, self._reopen)
                raise
            self.log = log
        bring_up(self.log, self._own)

    def _remembered(self) -> Mode:
        """The mode that the next opening is told: a shadow that failed has missed something, as one that is off."""
        return Mode.OFF if isinstance(self.log, AbsentLog) else self.mode

    def compare(self) -> list[Divergence]:
        """Where log and LMDB differ; the figure `manifest_shadow_divergence` is their number."""
        with self._lock:
            known = facts_of_index(self.index)
            etags = {segment_id: facts.etag for segment_id, facts in known.items()}
            is_open = {segment_id: facts for segment_id, facts in known.items() if not facts.sealed}
            if self.mode is Mode.ON:
                self._project()
            divergences = compare(self.log.index, {**self.projection.facts(etags), **is_open})
            known_before, self._divergent = self._divergent, frozenset(step.segment_id for step in divergences)
            for segment_id in sorted(self._divergent - known_before)[
                :WARNINGS_MAX
            ]:  # each once, when it begins to differ
                emit("warning", "stream.mlog.divergence", stream=self.log.files.stream_id, segment_id=segment_id)
            return divergences

    def figures(self) -> LogFigures:
        """The manifest log's figures, by the design document's names."""
        return msgspec.structs.replace(
            self.log.figures(),
            manifest_shadow_divergence=len(self._divergent),
            manifest_segments_needing_repair=len(self.index.needs_repair),
        )

    def watch(self) -> None:
        """Compare if the log is a shadow, and it is time to."""
        with self._lock:
            if self.mode is not Mode.SHADOW:
                return
            now, mark = self._clock.monotonic(), (self.log.index.records, self.shadow_refused)
            if mark != self._watched or now - self._watched_at >= WATCH_SECONDS:
                self._watched, self._watched_at = mark, now
                if isinstance(self.log, AbsentLog) and now - self._lost_at >= WATCH_SECONDS:  # it failed: try again
                    self._lost_at = now
                    try:
                        self._bring_up()
                        self._remember(self.mode, self.going())
                    except QuireError as error:
                        emit("warning", "stream.mlog.shadow_failed", stream=self.log.files.stream_id, error=str(error))
                self.compare()


def facts_of_index(index: ManifestIndex) -> dict[int, SegmentFacts]:
    """What an index says, comparably."""
    return {info.segment_id: facts_of(info) for info in index.segments()}


def fold(index: ManifestIndex, value: Payload, segment_id: int, offset: int, timestamp_ms: int) -> None:
    """Fold a step that no log has."""
    raw = encode_record(value.TYPE, segment_id, encode(value), logical_offset=offset, timestamp_ms=timestamp_ms)
    index.fold_raw(raw)


def bring_up(log: ManifestLog, index: ManifestIndex) -> int:
    """Append what brings a log that has missed something up to the truth; how many records."""
    view, wanted = view_of(index), facts_of_index(index)
    known = set(being_deleted(log.index))
    leaving = [
        segment
        for segment_id in being_deleted(index)
        if segment_id not in known and (segment := view.get(segment_id)) is not None
    ]
    for segment in leaving:  # first to where there is an object that can go, and under its name
        wanted[segment.segment_id] = replace(wanted[segment.segment_id], key=segment.key)
    records = catch_up(log.index, wanted)
    for segment in leaving:
        records.append((Tier2DeleteQueued(segment.key), segment.segment_id))
        if segment.state.remote is Remote.DELETED:
            records.append((Tier2Deleted(segment.key), segment.segment_id))
    for segment_id in sorted(index.needs_repair ^ log.index.needs_repair):
        lost = segment_id in index.needs_repair
        if segment_id in wanted:
            records.append((CustomEvent(Schema.NEEDS_REPAIR if lost else Schema.REPAIRED), segment_id))
    for value, segment_id in records:
        log.append(value, segment_id, logical_offset=_logical_offset(value, view.get(segment_id)))
    log.commit()
    return len(records)


def _logical_offset(value: Payload, segment: StreamSegment | None) -> int:
    """What a record's `logical_offset` says: the end of a sealed segment, its base with uploads, its bytes with an eviction."""
    if segment is None:
        return 0
    if isinstance(value, SealSegment):
        return segment.end_record
    if isinstance(value, (UploadStarted, UploadDone, UploadFailed)):
        return segment.base_record
    return segment.durable_bytes if isinstance(value, LocalEvicted) else 0


def being_deleted(index: ManifestIndex) -> list[int]:
    """Segments of an index whose objects are being deleted, or are, and which are not retired yet."""
    gone = (Remote.DELETING, Remote.DELETED)
    return [segment_id for segment_id, entry in index.entries.items() if STATES[entry[0]].remote in gone]


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
