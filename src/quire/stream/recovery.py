"""Recovers a stream: determines its state, cuts the segment that was open, and handles surplus and missing files.

The state is that of the manifest log, unless the stream was last open in a mode in which the log was not authoritative; then it
is that of LMDB and the directories, and the log is brought up to it. A log that lacks something that LMDB has (`witnesses.py`)
is not trusted: the stream is not opened, nothing is removed, and the error names the repair command. A segment that was open
is cut after its last complete commit, sealed there, and never appended to again (P4). A file that is not part of the state is
removed only if it is proven to be garbage; any other is moved to `quarantine/`. A missing copy is recorded as evicted if the
segment has another one; otherwise it is reported, and reading it raises.

Threads: one; no other thread has the stream. Raises: `Corruption`, `FormatTooNew`, and what disk, log and manifest raise."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace

import msgspec

from quire.core.errors import Corruption, QuireError, StoreLocked
from quire.core.events import emit
from quire.core.settings import ManifestLogSettings
from quire.core.timeline import Gap, skip_gap
from quire.durable.checksums import crc64
from quire.durable.failpoints import hit
from quire.durable.files import drop_cached_pages
from quire.durable.names import StreamSegmentFile, Tier
from quire.durable.quarantine import move
from quire.manifest.records import Residency
from quire.stream.files import TRIM_BYTES_MIN, LogFiles, StreamClock, StreamFiles, trim
from quire.stream.mlog_index import ManifestIndex
from quire.stream.mlog_log import AbsentLog, Collect, ManifestLog
from quire.stream.mlog_modes import Mode
from quire.stream.mlog_records import (
    CompressionFailed,
    CustomEvent,
    LocalEvicted,
    RecordType,
    Schema,
    SealSegment,
    SegmentOpened,
    Tier2DeleteQueued,
    UploadFailed,
    UploadStarted,
)
from quire.stream.mlog_recovery import restore_log
from quire.stream.mlog_states import Warm
from quire.stream.mlog_tier2 import LogObjects
from quire.stream.projection import StreamProjection
from quire.stream.segment import HEADER_BYTES, StreamSegmentHeader, scan
from quire.stream.segment_events import Ledger, bring_up, facts_of_index, fold, rebuilt
from quire.stream.segments import StreamSegment
from quire.stream.state import StreamState
from quire.stream.warm import NO_DICTIONARY, Dictionaries, WarmReader
from quire.stream.witnesses import files_above, log_behind_error, missing_from_log, segment_extent

REPAIR = "restore it from a copy, or see what `quire stream repair` can recover"


class RecoveredStream(msgspec.Struct, frozen=True, kw_only=True):
    """The recovered state of a stream, from which writing continues."""

    ledger: Ledger
    dictionaries: Dictionaries
    next_segment: int
    next_record: int
    gaps: tuple[Gap, ...]
    epoch: int
    torn_bytes: int


def recover_stream(
    files: StreamFiles,
    log: ManifestLog,
    projection: StreamProjection,
    state: StreamState,
    clock: StreamClock,
    mode: Mode,
    reopen: Callable[[], ManifestLog],
) -> RecoveredStream:
    """Recover a stream from its log, its projection and its files; a new stream is empty."""
    # Timestamps never decrease, also if the wall clock was set back while the stream was closed.
    clock.raise_to(log.index.last_ms)
    ledger = _open_ledger(files, log, projection, state, clock, mode, reopen)
    torn = sum(
        _seal_open_segment(files, ledger, clock, state, segment) for segment in ledger.view if not segment.is_sealed
    )
    _sweep(files, ledger, clock)
    ledger.fold_all()
    segments = ledger.view.segments
    # LMDB's mark, too: a retired segment leaves nothing in the view, and its ids are never reused (M5).
    own_end = max([projection.next_record(), *(segment.end_record for segment in segments)])
    gaps = state.persist_gaps(segments, own_end, projection.range_starts())
    return RecoveredStream(
        ledger=ledger,
        dictionaries=_dictionaries(files, segments),
        # LMDB has rows of sealed segments only; `log_segment` stands in for a log that is not read because it is off.
        next_segment=max(ledger.index.opened_max, state.stored.log_segment, projection.last_segment()) + 1,
        next_record=skip_gap(gaps, own_end),
        gaps=gaps,
        epoch=max((segment.epoch for segment in segments), default=0) + 1,
        torn_bytes=torn,
    )


# ── the log and its witnesses ─────────────────────────────────────────────────────────────────────────────────────────
def open_log(
    at: LogFiles,
    objects: LogObjects,
    state: StreamState,
    clock: StreamClock,
    mode: Mode,
    reopen: Callable[[], ManifestLog],
) -> ManifestLog:
    """Open the manifest log, or return an `AbsentLog` for one that is off and was not authoritative before.

    A shadow log that cannot be opened is reported and also replaced by an `AbsentLog`; the next opening brings it up.
    """
    former = Mode(state.stored.mode)
    if Mode.ON in (mode, former):
        return reopen()
    if former is Mode.SHADOW or mode is Mode.SHADOW:
        try:
            return reopen()  # even if the new mode is off: the log knows which segment ids were assigned
        except StoreLocked:
            raise
        except QuireError as error:
            emit("error", "stream.mlog.shadow_failed", stream=at.stream_id, error=str(error))
            state.persist_mode(Mode.OFF.value, state.stored.going)
    return AbsentLog(at, objects, clock, reopen)


def open_checked(
    files: StreamFiles,
    at: LogFiles,
    objects: LogObjects,
    projection: StreamProjection,
    state: StreamState,
    clock: StreamClock,
    settings: ManifestLogSettings,
    collect: Collect,
) -> ManifestLog:
    """Open the log and check that it contains everything its witnesses show.

    A log that is behind is completed from its sealed chunks in tier 2; if that is not enough, opening the stream fails.
    """
    log = ManifestLog.open(at, clock=clock, settings=settings, objects=objects, collect=collect)
    try:
        why = log_behind(files, log, projection, state)
        if why:
            log.abandon()
            chunks = restore_log(at, objects, at_ms=clock.now_ms())
            emit("warning", "stream.mlog.behind", stream=files.stream_id, why=why[0], reasons=len(why), chunks=chunks)
            log = ManifestLog.open(at, clock=clock, settings=settings, objects=objects, collect=collect)
            why = log_behind(files, log, projection, state)
        if why:
            raise log_behind_error(projection.name(), files.stream_id, why)
        newest = max([log.index.snapshot_id, *at.snapshots()])
        log.objects = state.persist_epoch_begin(objects, log.committed.chunk_index, newest)
    except BaseException:
        log.abandon()
        raise
    return log


def log_behind(files: StreamFiles, log: ManifestLog, projection: StreamProjection, state: StreamState) -> list[str]:
    """Return what is missing from the manifest log according to its witnesses; empty if the log is not authoritative."""
    if Mode(state.stored.mode) is not Mode.ON:
        return []
    witness = projection.witness()
    held = files_above(files, max(witness.last_segment, log.index.opened_max))
    return list(missing_from_log(log.index, witness, held=held, closed_records=state.stored.log_records))


# ── the state ─────────────────────────────────────────────────────────────────────────────────────────────────────────
def _open_ledger(
    files: StreamFiles,
    log: ManifestLog,
    projection: StreamProjection,
    state: StreamState,
    clock: StreamClock,
    mode: Mode,
    reopen: Callable[[], ManifestLog],
) -> Ledger:
    """Return the ledger in its mode, with the state that the last opening left."""
    former = Mode(state.stored.mode)
    memory_index: ManifestIndex | None = None
    if former is not Mode.ON:
        memory_index = _from_projection(files, log, projection, state, clock)
        if not isinstance(log, AbsentLog) and (mode is Mode.ON or former is Mode.OFF is not mode):
            bring_up(log, memory_index)
        if mode is Mode.ON:
            memory_index = None
    elif mode is not Mode.ON:
        memory_index = copy.deepcopy(log.index)
    ledger = Ledger(
        log,
        projection,
        clock,
        mode=mode,
        memory_index=memory_index,
        persist_mode=lambda new, ids: state.persist_mode(new.value, ids, ledger.log.index.opened_max),
        reopen=reopen,
    )
    ledger.fold_all()  # before the mode is recorded: LMDB may be authoritative for the next opening
    # A log that is not written falls behind, whatever the mode: record it as off.
    log_mode = Mode.OFF if isinstance(log, AbsentLog) else mode
    state.persist_mode(log_mode.value, ledger.being_removed() if mode is not Mode.ON else (), log.index.opened_max)
    if mode is Mode.OFF and not isinstance(log, AbsentLog):
        ledger.detach_log()
    return ledger


def _from_projection(
    files: StreamFiles, log: ManifestLog, projection: StreamProjection, state: StreamState, clock: StreamClock
) -> ManifestIndex:
    """Rebuild the state from LMDB and the directories, including segments that were open.

    Of a segment that retention had begun to remove, LMDB has only the object's name, until the object is deleted; that it is
    being removed is recorded in `stream.json`, next to the mode.
    """
    rows = projection.rows()
    etags = {segment_id: facts.etag for segment_id, facts in facts_of_index(log.index).items()}
    ends = {segment_id: (row.last_lsn + 1, row.sealed_at_ms) for segment_id, row in rows.items()}
    clock.raise_to(max((sealed_ms for _, sealed_ms in ends.values()), default=0))  # the log lacks them if it was off
    now, facts = clock.now_ms(), projection.facts(etags)
    being_removed = [segment_id for segment_id in state.stored.going if segment_id in facts]
    for segment_id in being_removed:
        facts[segment_id] = replace(facts[segment_id], key=rows[segment_id].suffix)
        if not rows[segment_id].suffix:
            del facts[segment_id]  # its object is gone: only the entry is left to drop
    index = rebuilt(facts, ends, now)
    for segment_id in being_removed:
        if segment_id in facts:
            fold(index, Tier2DeleteQueued(rows[segment_id].suffix), segment_id, 0, now)
    for segment_id, row in rows.items():
        is_begun = bool(row.suffix) and row.residency is Residency.LOCAL and segment_id not in being_removed
        if is_begun and segment_id in facts and facts[segment_id].warm_bytes is not None:
            # An upload that did not end: it is continued under its key.
            fold(index, UploadStarted(row.suffix), segment_id, 0, now)
            fold(index, UploadFailed(row.suffix, 0), segment_id, 0, now)
    end = projection.next_record()
    for segment_id in files.segments(Tier.HOT):
        if segment_id <= projection.last_segment():
            continue
        header = _header(files, segment_id)
        if header is None or header.base_record < end:
            continue  # the file never got its header, or its records were written to another segment
        known = log.index.get(segment_id)  # a shadow log has the epoch in which it was opened
        epoch = known.field(RecordType.SEGMENT_OPENED, "epoch") if known is not None else 0
        fold(index, SegmentOpened(header.base_record, epoch), segment_id, 0, now)
    return index


def _header(files: StreamFiles, segment_id: int) -> StreamSegmentHeader | None:
    file = files.disk.open(files.segment(Tier.HOT, segment_id), write=False)
    try:
        return StreamSegmentHeader.decode(file.read_at(HEADER_BYTES, 0), path=file.path)
    except Corruption:
        return None
    finally:
        file.close()


# ── the open segment ──────────────────────────────────────────────────────────────────────────────────────────────────
def _seal_open_segment(
    files: StreamFiles, ledger: Ledger, clock: StreamClock, state: StreamState, segment: StreamSegment
) -> int:
    """Seal a segment that was open, and return how many bytes after the cut were discarded."""
    path, segment_id = files.segment(Tier.HOT, segment.segment_id), segment.segment_id
    try:
        file = files.disk.open(path)
    except FileNotFoundError:
        raise Corruption("the file of the open segment is missing", hint=REPAIR, path=path) from None
    with closing(file):
        file.sync()  # no decision may rest on bytes that could still be lost
        drop_cached_pages(file)  # after a failed sync the page cache may have blocks that the disk does not
        raw = file.read_at(file.size(), 0)
    blocks = scan(raw, durable_upto=segment.base_record, path=path)
    header = blocks.header
    if (header.stream_id, header.segment_id, header.base_record) != (files.stream_id, segment_id, segment.base_record):
        raise Corruption("the file of the open segment belongs to another segment", hint=REPAIR, path=path)
    clock.raise_to(max(blocks.last_ms, header.created_at_ms))
    state.persist_calls((*state.stored.calls, *blocks.calls.items()))  # before sealing: it is not scanned again
    sealed = SealSegment(blocks.cut, crc64(memoryview(raw)[: blocks.cut]))
    # Retired in the same commit: a view relies on an empty segment having no successor (segments.py).
    if blocks.end_record == segment.base_record:
        gone = CustomEvent(Schema.SEGMENT_RETIRED)
        ledger.record_steps((sealed, segment_id, blocks.end_record), (gone, segment_id))
        files.remove(Tier.HOT, [segment_id])
    else:
        ledger.record_steps((sealed, segment_id, blocks.end_record))
    hit("stream.recovery.sealed")
    emit(
        "info", "stream.recovered", stream=files.stream_id, segment_id=segment_id, cut=blocks.cut,
        end_record=blocks.end_record, torn_bytes=blocks.torn_bytes,
    )  # fmt: skip
    return blocks.torn_bytes


# ── surplus and missing files ─────────────────────────────────────────────────────────────────────────────────────────
def _sweep(files: StreamFiles, ledger: Ledger, clock: StreamClock) -> None:
    view = ledger.view
    hot, warm = set(files.segments(Tier.HOT)), set(files.segments(Tier.WARM))
    known = {
        Tier.HOT: {segment.segment_id for segment in view if segment.is_hot},
        Tier.WARM: {segment.segment_id for segment in view if segment.is_warm},
    }
    for tier, here in ((Tier.HOT, hot), (Tier.WARM, warm)):
        garbage = []
        for segment_id in sorted(here - known[tier]):
            if (why := _not_garbage(files, ledger, tier, segment_id)) is None:
                garbage.append(segment_id)
                continue
            name = StreamSegmentFile(stream_id=files.stream_id, tier=tier, segment_id=segment_id)
            move(files.disk, files.root, name.path, why=why, at_ms=clock.now_ms(), database=files.stream_id)
        files.remove(tier, garbage)
    hit("stream.recovery.swept")
    _trim(files, [segment for segment in view if segment.is_hot and segment.is_sealed and segment.segment_id in hot])
    for segment in view:
        if segment.is_hot and segment.segment_id not in hot:
            _missing(files, ledger, segment, Tier.HOT)
        if segment.is_warm and segment.segment_id not in warm:
            _missing(files, ledger, segment, Tier.WARM)


def _trim(files: StreamFiles, segments: list[StreamSegment]) -> None:
    """Trim sealed files to their used bytes, where the process that sealed them was killed before it did so or was an older
    version that did not trim."""
    for segment in segments:
        path = files.segment(Tier.HOT, segment.segment_id)
        if segment.durable_bytes and files.disk.size(path) - segment.durable_bytes >= TRIM_BYTES_MIN:
            with closing(files.disk.open(path)) as file:
                trim(file, segment.durable_bytes)


def _not_garbage(files: StreamFiles, ledger: Ledger, tier: Tier, segment_id: int) -> str | None:
    """Return why a file that is no segment's copy may not be removed; `None` if it may."""
    segment = ledger.view.get(segment_id)
    if segment is not None:
        if segment.is_hot or segment.is_warm or segment.is_remote or segment.is_being_removed:
            return None  # the log evicted this copy while there was another, or its creation did not finish
        return "the log has no copy of its segment"
    held = segment_extent(files, tier, segment_id)
    if held is None:
        return "not a known segment, nor a sound file of one"
    if held.base_record == held.end_record:
        return None  # created and never recorded in the log, or discarded by an earlier recovery
    first = min((segment.base_record for segment in ledger.view), default=ledger.projection.next_record())
    # Retention removes from the beginning: an opened segment below the first retained record is a retired one.
    if segment_id <= ledger.index.opened_max and held.base_record < first:
        return None  # the log has retired it
    return f"records {held.base_record} to {held.end_record - 1} of a segment that the state does not contain"


def _missing(files: StreamFiles, ledger: Ledger, segment: StreamSegment, tier: Tier) -> None:
    """Record a missing copy as evicted if there is another one; otherwise report the damage and continue."""
    segment_id = segment.segment_id
    others = (segment.is_warm if tier is Tier.HOT else segment.is_hot) or segment.is_remote
    path = files.segment(tier, segment_id)
    emit("error", "stream.copy_missing", stream=files.stream_id, segment_id=segment_id, path=path, others=others)
    if not others:
        return
    if tier is Tier.WARM:
        ledger.record_steps((CustomEvent(Schema.WARM_EVICTED), segment_id))
        return
    if segment.state.warm is Warm.COMPRESSING:
        ledger.record_steps((CompressionFailed(0), segment_id))
    ledger.record_steps((LocalEvicted(segment.durable_bytes), segment_id, segment.durable_bytes))


def _dictionaries(files: StreamFiles, segments: tuple[StreamSegment, ...]) -> Dictionaries:
    """Continue with the newest dictionary that is on the local disk."""
    next_id = max((segment.dictionary_id for segment in segments), default=0) + 1
    with_one = [segment for segment in segments if segment.dictionary_id and segment.is_warm]
    if not with_one:
        return Dictionaries(NO_DICTIONARY, next_id=next_id)
    path = files.segment(Tier.WARM, with_one[-1].segment_id)
    try:
        file = files.disk.open(path, write=False)
    except FileNotFoundError:
        return Dictionaries(NO_DICTIONARY, next_id=next_id)
    try:
        reader = WarmReader(lambda offset, size: file.read_at(size, offset), file.size(), path=path)
        return Dictionaries(reader.dictionary(), next_id=next_id)
    except Corruption:  # reading the segment raises it; a new dictionary is trained
        return Dictionaries(NO_DICTIONARY, next_id=next_id)
    finally:
        file.close()
