"""Rebuilds the manifest log of a stream from everything that remains: local chunks, chunks in tier 2, LMDB, files, objects.

A survey modifies nothing. `apply` carries it out and deletes nothing: damaged and obstructing files are moved to `quarantine/`.
The state of a segment comes from the newest available state of the log (chunks, else a snapshot), else from LMDB, else from the
segment's own file. A local copy counts only after it was read and verified, an object if it exists. Objects that neither the
log nor LMDB ever recorded are adopted if they are valid and hold records that no other segment has. Segments that retention has
removed are not restored. A segment without a valid copy stays in the log: reading it raises, and retention can remove it.

The log is brought up by appending records in one commit. A crash before that commit leaves a log that is behind: the stream
stays closed, and the repair can be repeated.

Threads: one; the stream is closed meanwhile. Raises: `Corruption` if there is nothing to rebuild from, and what disk, object
store and manifest raise."""

from __future__ import annotations

import copy
import os
from collections.abc import Container, Iterator
from dataclasses import replace
from typing import NamedTuple

import msgspec

from quire.core.errors import Corruption, FormatTooNew, ManifestIntegrityError
from quire.core.ids import ArtifactKind
from quire.core.settings import ManifestLogSettings
from quire.durable.checksums import crc64
from quire.durable.files import read_all, write_atomic
from quire.durable.names import Tier, parse_object_key
from quire.durable.quarantine import entries, move
from quire.manifest.records import WalRecord
from quire.objects.api import ObjectInfo, ObjectStore, exists, list_objects
from quire.stream.files import LogFiles, StreamClock, StreamFiles
from quire.stream.mlog_format import CHUNK_BYTES
from quire.stream.mlog_index import ManifestIndex
from quire.stream.mlog_log import ManifestLog
from quire.stream.mlog_modes import SegmentFacts, catch_up, facts_of
from quire.stream.mlog_reader import START, Chunk, check_sequence, load_chunk
from quire.stream.mlog_records import SealSegment
from quire.stream.mlog_recovery import restore_chunk
from quire.stream.mlog_snapshot import LogSnapshot, read_snapshot
from quire.stream.mlog_tier2 import LogObjects
from quire.stream.projection import StreamProjection
from quire.stream.segment import Scan, scan
from quire.stream.segment_events import bring_up, fold
from quire.stream.segments import StreamSegment, view_of
from quire.stream.state import StreamState, log_records_at_close
from quire.stream.warm import WARM_HEADER_BYTES, WarmReader, check_header, dictionary_of


class Strays(NamedTuple):
    """Objects of a stream's segments that neither its manifest log nor LMDB has recorded."""

    objects: dict[int, ObjectInfo]
    """Objects of the current owner epoch, by segment."""
    doubtful: list[str]
    """Keys of earlier epochs, which a deposed owner may have written, and keys without a store id, which may belong to another
    store: reported and left alone."""


def list_strays(objects: LogObjects, known: Container[int]) -> Strays:
    """List the bucket for objects of segments that are not in `known`."""
    strays = Strays({}, [])
    for prefix in objects.prefixes:
        below = f"{prefix}/" if prefix else ""
        for info in list_objects(objects.store, f"{below}{objects.stream_id:08x}/"):
            key = parse_object_key(info.key.removeprefix(below))
            if key is None or key.kind is not ArtifactKind.WAL or key.id in known:
                continue
            if prefix and prefix == objects.prefixes[0]:
                strays.objects[key.id] = info
            else:
                strays.doubtful.append(info.key)
    return strays


def read_stray(objects: LogObjects, segment_id: int, info: ObjectInfo) -> tuple[SegmentFacts, int]:
    """Return (facts, end record) of a segment according to its object, which is trusted because all of it is verified."""
    store, key = objects.store, info.key
    head = store.get_range(key, 0, min(WARM_HEADER_BYTES, info.size_bytes))
    reader = WarmReader(lambda offset, size: store.get_range(key, offset, size), info.size_bytes, path=key)
    header, checksum = reader.header(), reader.verify()
    whose = (objects.stream_id, segment_id)
    if check_header(head, path=key) != whose or (header.stream_id, header.segment_id) != whose:
        raise Corruption("it belongs to another segment", key=key)
    facts = SegmentFacts(
        base_offset=header.base_record,
        sealed=True,
        durable_bytes=reader.raw_bytes,
        segment_crc64=checksum,
        hot=False,
        key=key,
        etag=info.etag or "",
        packed=(info.size_bytes, dictionary_of(head, path=key)),
    )
    return facts, reader.end_record


class StreamSurvey(msgspec.Struct, kw_only=True):
    """What exists, what is to be done, and what cannot be recovered."""

    steps: list[str] = msgspec.field(default_factory=list)
    """Descriptions of what `apply` does, in order."""
    lost: list[str] = msgspec.field(default_factory=list)
    """Descriptions of what cannot be recovered."""
    notes: list[str] = msgspec.field(default_factory=list)
    """Notes for the administrator to consider before applying."""
    records: tuple[int, int] = (0, 0)
    """The first kept record and the id after the last, including records lost in between."""
    segments: int = 0
    to_quarantine: dict[str, str] = msgspec.field(default_factory=dict)
    """path → reason"""
    to_fetch: list[int] = msgspec.field(default_factory=list)
    """Chunks of the log to restore from tier 2."""
    snapshot: int = 0
    """The snapshot of the log to restore from tier 2; 0 for none."""
    facts: dict[int, SegmentFacts] = msgspec.field(default_factory=dict)
    ends: dict[int, tuple[int, int]] = msgspec.field(default_factory=dict)
    """segment → (end_record, sealed_ms)"""
    known: ManifestIndex = msgspec.field(default_factory=ManifestIndex)
    """The newest state found in any part of the log."""


class Repair:
    """The repair of one stream."""

    def __init__(
        self,
        files: StreamFiles,
        projection: StreamProjection,
        objects: LogObjects,
        clock: StreamClock,
        settings: ManifestLogSettings,
        *,
        store_locked: bool = False,
    ) -> None:
        self._files = files
        self._log = LogFiles(files.disk, files.root, files.stream_id, store_locked, objects.store_id)
        self._projection = projection
        self._objects = objects
        self._store: ObjectStore = objects.store
        self._clock = clock
        self._settings = settings

    # ── survey ────────────────────────────────────────────────────────────────────────────────────────────────────────
    def survey(self) -> StreamSurvey:
        """Determine what can be rebuilt."""
        survey = StreamSurvey()
        survey.known = self._survey_log(survey)
        self._survey_segments(survey)
        closed = log_records_at_close(self._files) or 0
        if closed > survey.known.records:
            lost = closed - survey.known.records
            survey.steps.append(
                f"continue with a log that has {lost} fewer records than when the stream was last closed"
            )
        quarantined = [
            entry for entry in entries(self._files.disk, self._files.root) if entry.database == self._files.stream_id
        ]
        if quarantined:
            numbers = " ".join(str(entry.number) for entry in quarantined)
            survey.notes.append(
                f"{len(quarantined)} of its files are in quarantine ({numbers}): first restore what you need "
                "with `quire quarantine restore`"
            )
        return survey

    def _survey_log(self, survey: StreamSurvey) -> ManifestIndex:
        """Choose the chain of chunks after which the log continues; return the newest state found in any part of the log."""
        snapshots = self._snapshots(survey)
        best, chain, base = ManifestIndex(), list[Chunk](), None
        for candidate in [*snapshots, None]:
            index = copy.deepcopy(candidate.index) if candidate is not None else ManifestIndex()
            chunks = self._chain(candidate, index, survey)
            if chunks is not None and (index.records > best.records or not (chain or base)):
                best, chain, base = index, chunks, candidate
        last = chain[-1].last_index if chain else (base.position.chunk_index - 1 if base is not None else -1)
        here = self._log.chunks()
        for number in here:
            if number > last and self._log.chunk(number) not in survey.to_quarantine:
                self._put_aside(survey, self._log.chunk(number), "a chunk of the log after a missing or damaged one")
        for snapshot_id in self._log.snapshots():
            if base is None or snapshot_id > base.snapshot_id:
                why = "a snapshot beyond the end of the log"
                self._put_aside(survey, self._log.snapshot(snapshot_id), why)
        survey.to_fetch = [chunk.index for chunk in chain if self._is_to_fetch(chunk, survey)]
        if base is not None and base.snapshot_id not in self._log.snapshots():
            survey.snapshot = base.snapshot_id
            survey.steps.append(f"restore snapshot {base.snapshot_id} of the log from tier 2")
        if survey.to_fetch:
            survey.steps.append(f"restore chunks {_numbers(survey.to_fetch)} of the log from tier 2")
        return max([best, *(snapshot.index for snapshot in snapshots)], key=lambda index: index.records)

    def _snapshots(self, survey: StreamSurvey) -> list[LogSnapshot]:
        """Return every valid snapshot, newest first. A local snapshot is preferred to the same one in tier 2."""
        sound: dict[int, LogSnapshot] = {}
        for snapshot_id in self._log.snapshots():
            try:
                sound[snapshot_id] = read_snapshot(self._log, snapshot_id)
            except ManifestIntegrityError as error:
                self._put_aside(survey, self._log.snapshot(snapshot_id), error.what)
        for snapshot_id in self._objects.listing().snapshots:
            if snapshot_id not in sound:
                try:
                    sound[snapshot_id] = self._objects.get_snapshot(snapshot_id)
                except ManifestIntegrityError as error:
                    survey.notes.append(f"snapshot {snapshot_id} of the log in tier 2 is damaged: {error.what}")
        return [sound[index] for index in sorted(sound, reverse=True)]

    def _chain(self, base: LogSnapshot | None, index: ManifestIndex, survey: StreamSurvey) -> list[Chunk] | None:
        """Fold the chunks from a snapshot on into `index`, and return them; `None` if the log does not reach the snapshot."""
        start = base.position if base is not None else START
        chain: list[Chunk] = []
        number = start.chunk_index
        while (chunk := self._chunk(number, survey)) is not None:
            try:
                if chain:
                    check_sequence(chunk.header, chain[-1].facts.next_record, is_last=True)
                index.fold_chunk(chunk)
            except ManifestIntegrityError as error:
                self._put_aside(survey, self._log.chunk(number), error.what)
                break
            chain.append(chunk)
            if not chunk.header.sealed:
                break
            number = chunk.last_index + 1
        reaches = bool(chain) or start.offset == CHUNK_BYTES
        return chain if reaches else None

    def _chunk(self, number: int, survey: StreamSurvey) -> Chunk | None:
        """Return the local chunk if it is valid and not older than the one in tier 2; otherwise the one in tier 2."""
        path, local = self._log.chunk(number), None
        if path not in survey.to_quarantine:
            try:
                local = load_chunk(
                    read_all(self._files.disk, path), chunk_index=number, path=path, owner=self._log.identity
                )
            except FileNotFoundError:
                pass
            except (ManifestIntegrityError, FormatTooNew) as error:
                self._put_aside(survey, path, error.what)
        if local is not None and local.header.sealed:
            return local
        try:
            stored = self._objects.fetch(number)
        except ManifestIntegrityError as error:
            survey.notes.append(f"chunk {number} of the log in tier 2 is damaged: {error.what}")
            stored = None
        if stored is not None and local is not None:
            self._put_aside(survey, path, "the chunk is not sealed here, but was uploaded sealed")
        return stored if stored is not None else local

    def _is_to_fetch(self, chunk: Chunk, survey: StreamSurvey) -> bool:
        path = self._log.chunk(chunk.index)
        gone = path in survey.to_quarantine or not self._files.disk.exists(path)
        return gone and chunk.last_index == chunk.index

    def _put_aside(self, survey: StreamSurvey, path: str, why: str) -> None:
        if path not in survey.to_quarantine and self._files.disk.exists(path):
            survey.to_quarantine[path] = why
            survey.steps.append(f"move {os.path.relpath(path, self._files.root)} to quarantine: {why}")

    # ── segments ──────────────────────────────────────────────────────────────────────────────────────────────────────
    def _survey_segments(self, survey: StreamSurvey) -> None:
        known, rows, ranges = survey.known, self._projection.rows(), self._projection.range_starts()
        listed = self._projection.facts({info.segment_id: facts_of(info).etag for info in known.segments()})
        here = {segment_id for tier in Tier for segment_id in self._files.segments(tier)}
        strays = self._strays(survey, {segment_id: facts.base_offset for segment_id, facts in listed.items()})
        view, first, end = view_of(known), 0, 0
        for segment_id in sorted({*known.entries, *rows, *here, *strays}):
            info, segment = known.get(segment_id), view.get(segment_id)
            if info is None and segment_id <= known.opened_max:
                continue  # retired: opening the stream handles its files
            if info is not None and segment is not None and segment.is_being_removed:
                survey.facts[segment_id] = facts_of(info)
                continue
            sealed = facts_of(info) if info is not None and segment is not None and segment.is_sealed else None
            remote = strays.get(segment_id)
            sealed = sealed or listed.get(segment_id) or (remote[0] if remote is not None else None)
            hot, warm = self._hot(segment_id, sealed, survey), self._warm(segment_id, sealed, survey)
            facts = self._sealed(sealed, hot, warm) if sealed is not None else self._unsealed(segment_id, hot, warm)
            if facts is None:
                if info is not None:
                    base = facts_of(info).base_offset
                    survey.lost.append(
                        f"records from {base} on: segment {segment_id} was being written, and its file is missing"
                    )
                continue
            if sealed is None and facts.base_offset < end:
                for tier in Tier:
                    self._put_aside(survey, self._files.segment(tier, segment_id), "its records are in another segment")
                continue
            last = self._end_of(rows.get(segment_id), segment, hot, remote or warm)
            if end and facts.base_offset > end and facts.base_offset not in ranges:
                survey.lost.append(f"records {end} to {facts.base_offset - 1}: no copy of their segment is known")
            if sealed is not None and hot is None and facts.hot:
                survey.lost.append(f"records {facts.base_offset} to {last - 1}: segment {segment_id} has no sound copy")
            sealed_ms = rows[segment_id].sealed_at_ms if segment_id in rows else self._clock.now_ms()
            survey.facts[segment_id], survey.ends[segment_id] = facts, (last, sealed_ms)
            first, end = first or facts.base_offset, max(end, last)
        survey.segments, survey.records = len(survey.facts), (first, end)
        if appended := {segment_id for _, segment_id in catch_up(known, survey.facts)}:
            survey.steps.append(f"add missing records of segments {_numbers(sorted(appended))} to the log")

    def _strays(self, survey: StreamSurvey, bases: dict[int, int]) -> dict[int, tuple[SegmentFacts, int]]:
        """Return (facts, end record) of each segment that only the bucket has. `bases`: first records according to LMDB."""
        known = survey.known
        bases = bases | {info.segment_id: facts_of(info).base_offset for info in known.segments()}
        stored = list_strays(self._objects, {*bases, *self._projection.ever()})
        for key in stored.doubtful:
            survey.notes.append(f"object {key} is left alone: it belongs to an earlier owner, or its name has no store")
        taken: dict[int, tuple[SegmentFacts, int]] = {}
        end = 0
        for segment_id in sorted(segment_id for segment_id in stored.objects if segment_id > known.opened_max):
            info = stored.objects[segment_id]
            try:
                facts, last = read_stray(self._objects, segment_id, info)
            except (Corruption, FormatTooNew) as error:
                survey.notes.append(f"object {info.key} is unknown and damaged: {error.what}")
                continue
            before = max((base for other, base in bases.items() if other < segment_id), default=0)
            behind = min((base for other, base in bases.items() if other > segment_id), default=last)
            if facts.base_offset < end or facts.base_offset <= before or last > behind:
                survey.notes.append(f"object {info.key} is unknown, and its records are in other segments")
                continue
            end, taken[segment_id] = last, (facts, last)
            survey.steps.append(f"adopt object {info.key}: records {facts.base_offset} to {last - 1}")
        return taken

    def _sealed(self, sealed: SegmentFacts, hot: Scan | None, warm: tuple[SegmentFacts, int] | None) -> SegmentFacts:
        """Return the facts of a segment that is sealed in the log or in LMDB, with the copies that exist."""
        key = sealed.key if sealed.key and exists(self._store, sealed.key) else None
        size, dictionary_id = (warm[0].warm_bytes, warm[0].dictionary_id) if warm is not None else (None, 0)
        # The log cannot represent a segment without a copy: it is recorded as hot, and reading it finds no file.
        is_hot = hot is not None or (key is None and warm is None)
        etag = sealed.etag if key else ""
        return replace(sealed, hot=is_hot, warm_bytes=size, dictionary_id=dictionary_id, key=key, etag=etag)

    def _unsealed(
        self, segment_id: int, hot: Scan | None, warm: tuple[SegmentFacts, int] | None
    ) -> SegmentFacts | None:
        """Return the facts of a segment that is sealed in neither, from its file alone. It counts as sealed if a later segment
        exists."""
        if hot is None:
            return warm[0] if warm is not None else None
        base = hot.header.base_record
        if not any(other > segment_id for tier in Tier for other in self._files.segments(tier)):
            return SegmentFacts(base_offset=base)
        if hot.end_record == base:
            return None
        raw = read_all(self._files.disk, self._files.segment(Tier.HOT, segment_id))
        checksum = crc64(memoryview(raw)[: hot.cut])
        return SegmentFacts(base_offset=base, sealed=True, durable_bytes=hot.cut, segment_crc64=checksum)

    def _end_of(
        self,
        row: WalRecord | None,
        segment: StreamSegment | None,
        hot: Scan | None,
        warm: tuple[SegmentFacts, int] | None,
    ) -> int:
        if row is not None:
            return row.last_lsn + 1
        if segment is not None and segment.is_sealed:
            return segment.end_record
        if hot is not None:
            return hot.end_record
        return warm[1] if warm is not None else 0

    def _hot(self, segment_id: int, facts: SegmentFacts | None, survey: StreamSurvey) -> Scan | None:
        """Return the scan of a segment's hot copy; `None` if the copy is missing or damaged."""
        path = self._files.segment(Tier.HOT, segment_id)
        try:
            raw = read_all(self._files.disk, path)
            scanned = scan(raw, path=path)
            whose = (scanned.header.stream_id, scanned.header.segment_id)
            if whose != (self._files.stream_id, segment_id):
                raise Corruption("it belongs to another segment")
            sealed = facts is not None and facts.sealed
            if facts is not None and sealed and crc64(raw[: facts.durable_bytes]) != facts.segment_crc64:
                raise Corruption("it is not the segment that was sealed")
        except (Corruption, FormatTooNew) as error:
            self._put_aside(survey, path, error.what)
            return None
        except FileNotFoundError:
            return None
        return scanned

    def _warm(
        self, segment_id: int, facts: SegmentFacts | None, survey: StreamSurvey
    ) -> tuple[SegmentFacts, int] | None:
        """Return (facts, end record) from a segment's compressed copy; `None` if the copy is missing or damaged."""
        path = self._files.segment(Tier.WARM, segment_id)
        try:
            data = read_all(self._files.disk, path)
            reader = WarmReader(lambda offset, size: data[offset : offset + size], len(data), path=path)
            header, checksum = reader.header(), reader.verify()
            if (header.stream_id, header.segment_id) != (self._files.stream_id, segment_id):
                raise Corruption("it belongs to another segment")
            if facts is not None and facts.sealed and checksum != facts.segment_crc64:
                raise Corruption("it is not the segment that was sealed")
        except (Corruption, FormatTooNew) as error:
            self._put_aside(survey, path, error.what)
            return None
        except FileNotFoundError:
            return None
        warm = SegmentFacts(
            base_offset=header.base_record, sealed=True, durable_bytes=reader.raw_bytes, segment_crc64=checksum, hot=False,
            warm_bytes=len(data), dictionary_id=dictionary_of(data, path=path),
        )  # fmt: skip
        return warm, reader.end_record

    # ── apply ─────────────────────────────────────────────────────────────────────────────────────────────────────────
    def apply(self, survey: StreamSurvey) -> None:
        """Carry out a survey. The stream can be opened afterwards."""
        files, now = self._files, self._clock.now_ms()
        for path, why in survey.to_quarantine.items():
            relative = os.path.relpath(path, files.root)
            move(files.disk, files.root, relative, why=f"repair: {why}", at_ms=now, database=files.stream_id)
        files.make()
        files.disk.make_dirs(self._log.directory)
        if survey.snapshot:
            _, data = self._objects.fetch_snapshot(survey.snapshot)
            write_atomic(files.disk, self._log.snapshot(survey.snapshot), data)
        for number in survey.to_fetch:
            restore_chunk(self._log, self._objects, number)
        log = ManifestLog.open(self._log, clock=self._clock, settings=self._settings, objects=self._objects)
        with log:
            bring_up(log, self._repaired_index(survey))
            records = log.index.records
        state = StreamState(files, self._clock)
        state.persist_mode("on")
        # Only a repair may lower this number: the log has fewer records than at the last close.
        state.persist_log_records(records)

    def _repaired_index(self, survey: StreamSurvey) -> ManifestIndex:
        """Return the state to which the log is brought up: its own, and what the survey has found."""
        index, now = copy.deepcopy(survey.known), self._clock.now_ms()
        for value, segment_id in catch_up(survey.known, survey.facts):
            end, sealed_ms = survey.ends.get(segment_id, (0, now))
            sealing = isinstance(value, SealSegment)
            fold(index, value, segment_id, end if sealing else 0, sealed_ms if sealing else now)
        return index


def _numbers(numbers: list[int]) -> str:
    """Format numbers as ranges: `3, 5 to 9`."""
    return ", ".join(_runs(sorted(numbers)))


def _runs(numbers: list[int]) -> Iterator[str]:
    while numbers:
        count = next((place for place, number in enumerate(numbers) if number != numbers[0] + place), len(numbers))
        yield str(numbers[0]) if count == 1 else f"{numbers[0]} to {numbers[count - 1]}"
        numbers = numbers[count:]
