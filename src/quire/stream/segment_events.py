"""Records every change of a stream's segments: in the manifest log first, in LMDB second, and for readers as a new view.

*The truth* is the authoritative index: the log's own in mode `on`; in modes `shadow` and `off` an index in memory, which LMDB
and the directories can rebuild. A *step* is one change of a segment's state. It is checked against the transition table, logged
and synced before anything depends on it (S1). In mode `on` LMDB is updated when `project` is called; otherwise at once, because
LMDB is authoritative for the next opening.

A shadow log is written in addition and blocks nothing: a step that it does not allow is reported and counted; a step that
cannot be written suspends the shadow for a while (`AbsentLog`). Switching to a mode in which the log is written first appends
the records that bring the log up to the truth; the mode is recorded on disk before the log falls behind, and after it has
caught up. LMDB cannot represent a segment whose object is queued for deletion: while the log is not authoritative, such
segments are recorded in `stream.json`, next to the mode.

Threads: any; one lock. Raises: `IllegalTransition`, `StoreUnusable`, and what log and manifest raise."""

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
"""Divergent segments that one comparison warns about; the metric counts all."""
WATCH_SECONDS = 60.0
"""Interval of comparisons without a new record: another process may have written to the log or to LMDB."""

Done = TypeVar("Done")
Step = tuple[Payload, int] | tuple[Payload, int, int]
"""(payload, segment id), and a logical offset if it has one."""


class Ledger:
    """The only place where the state of a stream's segments changes."""

    def __init__(
        self,
        log: ManifestLog,
        projection: StreamProjection,
        clock: StreamClock,
        *,
        mode: Mode,
        memory_index: ManifestIndex | None = None,
        persist_mode: Callable[[Mode, Collection[int]], None] = lambda _, __: None,
        reopen: Callable[[], ManifestLog],
    ) -> None:
        # constant after construction
        self.projection = projection
        self._clock = clock
        self._persist_mode = persist_mode
        self._reopen = reopen
        self.on_recorded: Callable[[], None] = lambda: None
        """Called after steps were recorded; set once, by the stream."""
        # guarded by _lock
        self._lock = threading.RLock()
        self.log = log
        self.mode = mode
        self._memory_index = memory_index
        self._behind: set[int] = set()
        """Segments whose rows in LMDB are out of date."""
        self._divergent: frozenset[int] = frozenset()
        """Segments for which log and LMDB differed at the last comparison since the last switch."""
        self.shadow_refused = 0
        """Steps that the log did not allow while it was a shadow."""
        self._watched = (-1, -1)
        """Records in the log, and steps that it refused, at the last comparison of a shadow."""
        self._watched_at = self._suspended_at = clock.monotonic()
        # replaced under _lock, read by any thread
        self.view: SegmentList = view_of(self.index)

    @property
    def index(self) -> ManifestIndex:
        """The authoritative index."""
        return self.log.index if self._memory_index is None else self._memory_index

    # ── recording steps ───────────────────────────────────────────────────────────────────────────────────────────────
    def record_steps(self, *steps: Step) -> None:
        """Record steps together, durably."""
        with self._lock:
            places: list[LogPosition | None] = []
            for step in steps:
                value, segment_id, offset = step if len(step) == 3 else (*step, 0)
                places.append(self._record_step(value, segment_id, offset))
            self.guarded(self.log.commit)
            if self.mode is not Mode.ON and any(isinstance(step[0], Tier2DeleteQueued) for step in steps):
                self._persist_mode(self._mode_to_persist(), self.being_removed())
            if listening():
                self._announce(steps, places)
            # After the commit: whoever sees a step in the view may act on it, for example remove a file.
            changed = frozenset(step[1] for step in steps)
            self.view = view_of(self.index, self.view, changed)
            self._behind |= changed
            if self.mode is not Mode.ON:
                self._project()
        # Without the lock: it takes that of the background threads.
        self.on_recorded()

    def rotate_when_due(self) -> float | None:
        """Seal the log's chunk if it is due; return the seconds until it is, `None` if nothing is to be sealed."""
        return self.guarded(self.log.rotate_when_due)

    def reserve(self) -> None:
        """Reserve space in the log for a few steps. `DiskFull` is raised here, and changes nothing."""
        self.guarded(self.log.reserve)

    def guarded(self, step: Callable[[], Done]) -> Done | None:
        """Run an operation of the log, unless it is absent. A shadow that fails is suspended, and the result is `None`."""
        if isinstance(self.log, AbsentLog):
            return None
        try:
            return step()
        except Exception as error:
            if self._memory_index is None or isinstance(error, StoreFenced):
                raise
            self._suspend_shadow(error)
            return None

    def close(self) -> None:
        """Close the log. A shadow whose last commit fails is recorded as behind."""
        if self._memory_index is None:
            self.log.close()
        else:
            self.guarded(self.log.commit)
            self.log.close()

    def _suspend_shadow(self, error: Exception) -> None:
        """Continue without a shadow that cannot be written. First record on disk that it is behind, before any other change."""
        if isinstance(self.log, AbsentLog):
            return
        with self._lock:
            emit("error", "stream.mlog.shadow_failed", stream=self.log.files.stream_id, error=str(error))
            self._persist_mode(Mode.OFF, self.being_removed())
            self._suspended_at = self._clock.monotonic()
            self.detach_log()

    def detach_log(self) -> None:
        """Close the log, and replace it with an `AbsentLog`."""
        with self._lock:
            log = self.log
            try:
                log.close()
            except Exception as error:  # its contents are not authoritative
                emit("warning", "stream.mlog.left", stream=log.files.stream_id, error=str(error))
                log.abandon()
            self.log = AbsentLog(log.files, log.objects, self._clock, self._reopen)

    def _record_step(self, value: Payload, segment_id: int, offset: int) -> LogPosition | None:
        """Record one step, and return its position in the log; `None` if the log does not have it."""
        if self._memory_index is None:
            return self.log.append(value, segment_id, logical_offset=offset)
        self._memory_index.check(value, segment_id)
        fold(self._memory_index, value, segment_id, offset, self._clock.now_ms())
        if isinstance(self.log, AbsentLog):
            return None
        try:
            return self.log.append(value, segment_id, logical_offset=offset)
        except IllegalTransition as error:  # a shadow blocks nothing
            self.shadow_refused += 1
            emit("warning", "stream.mlog.shadow_refused", stream=self.log.files.stream_id, error=str(error))
        except StoreFenced:
            raise
        except Exception as error:
            self._suspend_shadow(error)
        return None

    def _announce(self, steps: tuple[Step, ...], places: list[LogPosition | None]) -> None:
        """Emit an event for each step, with the position of its record, for use with `quire manifest inspect`."""
        for step, place in zip(steps, places, strict=True):
            at = {"chunk_index": place.chunk_index, "chunk_offset": place.offset} if place is not None else {}
            action = type(step[0]).__name__
            emit("info", "stream.step", stream=self.log.files.stream_id, segment_id=step[1], tier_action=action, **at)

    def project(self) -> None:
        """Bring LMDB up to the truth where it is behind. A failure is reported, and the next call tries again."""
        with self._lock:
            try:
                self._project()
            except QuireError as error:
                emit("warning", "stream.projection_failed", stream=self.log.files.stream_id, error=str(error))

    def project_now(self) -> None:
        """Bring LMDB up to the truth, and raise on failure."""
        with self._lock:
            self._project()

    @property
    def is_behind(self) -> bool:
        """Whether LMDB lacks recorded steps."""
        return bool(self._behind)

    def _project(self) -> None:
        if self._behind:
            self.projection.fold(self.view, self._behind)
            self._behind = set()

    def fold_all(self) -> int:
        """Compare every row with the truth and correct it; return the number of operations."""
        with self._lock:
            return self.projection.fold(self.view)

    def being_removed(self) -> list[int]:
        """Return the segments that retention has begun to remove."""
        return being_deleted(self.index)

    # ── modes ─────────────────────────────────────────────────────────────────────────────────────────────────────────
    def switch(self, mode: Mode) -> None:
        """Change the mode."""
        with self._lock:
            if mode is self.mode:
                return
            self._project()
            if mode is Mode.OFF:
                self._persist_mode(mode, self.being_removed())  # before the log falls behind
            if self._memory_index is None:
                self._memory_index = copy.deepcopy(self.log.index)
            if mode is not Mode.OFF:
                self._bring_up()
            if mode is Mode.SHADOW:
                self._persist_mode(mode, self.being_removed())
            former, self.mode = self.mode, mode
            self._divergent = frozenset()
            emit("info", "stream.mlog.mode", stream=self.log.files.stream_id, former=former.value, mode=mode.value)
            if mode is Mode.OFF:
                self.detach_log()
            if mode is Mode.ON:
                left = compare(self.log.index, facts_of_index(self._memory_index))
                self._memory_index = None
                self.view = view_of(self.index)
                # Last: until here a crash must find LMDB authoritative, because the log may not have caught up.
                self._persist_mode(mode, ())
                for step in left:
                    emit("error", "stream.mlog.divergence", stream=self.log.files.stream_id, segment_id=step.segment_id)

    def _bring_up(self) -> None:
        """Open the log, and bring it up to the truth. A failure leaves everything unchanged."""
        assert self._memory_index is not None
        if isinstance(self.log, AbsentLog):
            absent = self.log
            try:
                log = absent.open_again()
            except BaseException:
                self.log = AbsentLog(absent.files, absent.objects, self._clock, self._reopen)
                raise
            self.log = log
        bring_up(self.log, self._memory_index)

    def _mode_to_persist(self) -> Mode:
        """Return the mode to record for the next opening: a suspended shadow is behind, like a log that is off."""
        return Mode.OFF if isinstance(self.log, AbsentLog) else self.mode

    def compare(self) -> list[Divergence]:
        """Return where log and LMDB differ. The metric `manifest_shadow_divergence` is the number of differences."""
        with self._lock:
            known = facts_of_index(self.index)
            etags = {segment_id: facts.etag for segment_id, facts in known.items()}
            is_open = {segment_id: facts for segment_id, facts in known.items() if not facts.sealed}
            if self.mode is Mode.ON:
                self._project()
            divergences = compare(self.log.index, {**self.projection.facts(etags), **is_open})
            known_before, self._divergent = self._divergent, frozenset(step.segment_id for step in divergences)
            # Each segment is reported once, when it begins to differ.
            for segment_id in sorted(self._divergent - known_before)[:WARNINGS_MAX]:
                emit("warning", "stream.mlog.divergence", stream=self.log.files.stream_id, segment_id=segment_id)
            return divergences

    def figures(self) -> LogFigures:
        """Return the manifest log's metrics, under the design document's names."""
        return msgspec.structs.replace(
            self.log.figures(),
            manifest_shadow_divergence=len(self._divergent),
            manifest_segments_needing_repair=len(self.index.needs_repair),
        )

    def watch(self) -> None:
        """Compare log and LMDB if the log is a shadow and a comparison is due."""
        with self._lock:
            if self.mode is not Mode.SHADOW:
                return
            now, mark = self._clock.monotonic(), (self.log.index.records, self.shadow_refused)
            if mark != self._watched or now - self._watched_at >= WATCH_SECONDS:
                self._watched, self._watched_at = mark, now
                if isinstance(self.log, AbsentLog) and now - self._suspended_at >= WATCH_SECONDS:  # try again
                    self._suspended_at = now
                    try:
                        self._bring_up()
                        self._persist_mode(self.mode, self.being_removed())
                    except QuireError as error:
                        emit("warning", "stream.mlog.shadow_failed", stream=self.log.files.stream_id, error=str(error))
                self.compare()


def facts_of_index(index: ManifestIndex) -> dict[int, SegmentFacts]:
    """Return the facts of all segments in an index."""
    return {info.segment_id: facts_of(info) for info in index.segments()}


def fold(index: ManifestIndex, value: Payload, segment_id: int, offset: int, timestamp_ms: int) -> None:
    """Fold a step that is not in the log into an index."""
    raw = encode_record(value.TYPE, segment_id, encode(value), logical_offset=offset, timestamp_ms=timestamp_ms)
    index.fold_raw(raw)


def bring_up(log: ManifestLog, index: ManifestIndex) -> int:
    """Append the records that bring a log up to the truth, and return their number."""
    view, wanted = view_of(index), facts_of_index(index)
    known = set(being_deleted(log.index))
    leaving = [
        segment
        for segment_id in being_deleted(index)
        if segment_id not in known and (segment := view.get(segment_id)) is not None
    ]
    for segment in leaving:  # the log must have the object, under its key, before its deletion can be queued
        wanted[segment.segment_id] = replace(wanted[segment.segment_id], key=segment.key)
    records = catch_up(log.index, wanted)
    for segment in view:
        if segment.state.remote in (Remote.UPLOADING, Remote.FAILED) and not _has_upload(log.index, segment.segment_id):
            # LMDB has the key of an upload from its beginning: a log without it would count as behind.
            records.append((UploadStarted(segment.key), segment.segment_id))
            if segment.state.remote is Remote.FAILED:
                records.append((UploadFailed(segment.key, 0), segment.segment_id))
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


def _has_upload(index: ManifestIndex, segment_id: int) -> bool:
    info = index.get(segment_id)
    return info is not None and info.state.remote is not Remote.NONE


def _logical_offset(value: Payload, segment: StreamSegment | None) -> int:
    """Return a record's `logical_offset`: the segment's end for a seal, its base for uploads, its bytes for an eviction."""
    if segment is None:
        return 0
    if isinstance(value, SealSegment):
        return segment.end_record
    if isinstance(value, (UploadStarted, UploadDone, UploadFailed)):
        return segment.base_record
    return segment.durable_bytes if isinstance(value, LocalEvicted) else 0


def being_deleted(index: ManifestIndex) -> list[int]:
    """Return the segments of an index whose objects are being deleted or are deleted, and that are not retired yet."""
    gone = (Remote.DELETING, Remote.DELETED)
    return [segment_id for segment_id, entry in index.entries.items() if STATES[entry[0]].remote in gone]


def rebuilt(facts: dict[int, SegmentFacts], ends: dict[int, tuple[int, int]], now_ms: int) -> ManifestIndex:
    """Rebuild the truth from LMDB and the directories. `ends`: (end_record, sealed_ms) of each segment.

    The time at which a segment was opened is not stored there. It is set to now, so that searches by time begin too early,
    never too late.
    """
    index = ManifestIndex()
    for value, segment_id in catch_up(index, facts):
        end, sealed_ms = ends.get(segment_id, (0, now_ms))
        sealing = isinstance(value, SealSegment)
        fold(index, value, segment_id, end if sealing else 0, sealed_ms if sealing else now_ms)
    return index
