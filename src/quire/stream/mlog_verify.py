"""Inspects a manifest log: decodes every record, and checks every rule that the log must satisfy.

Terms
  row       one decoded record, with its position in the log
  problem   a broken rule, and where it is broken

Rules
  L1  every chunk on disk is valid: header, checksums, records
  L2  chunks follow each other: indexes, ordinals, sealed before the next; no chunk after the end of the log was uploaded
  L3  every snapshot is valid, and the newest one agrees with the log
  L4  no record was rejected by the transition table
  L5  tier 2 has every sealed chunk that is not on disk, and its objects have the same contents as the chunks
  L6  local retention: the newest snapshot's chunks and everything not uploaded are on disk; nothing unneeded is kept
      (reported as a leak: harmless)
  L7  every segment is in at least one tier; its object exists
  L8  the log has every segment that LMDB has, and every file with records; it has not become shorter since the last close.
      Checked only for an authoritative log, and if a witness is given. The reverse, a log with more than LMDB, is what every
      crash leaves: opening the stream corrects LMDB, and `quire stream verify` then compares the two

Modifies nothing. Works alongside a live writer, whose uncommitted tail is ignored. Threads: any (functions without state).
Raises: what disk and object store raise; damage is a problem, not an error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import msgspec

from quire.core.clock import SystemClock
from quire.core.errors import ManifestIntegrityError, QuireError
from quire.core.settings import ManifestLogSettings
from quire.durable.files import read_all
from quire.objects.api import exists
from quire.stream.files import LogFiles, StreamFiles
from quire.stream.mlog_format import (
    CHUNK_BYTES,
    RECORD,
    RECORD_BYTES,
    UPLOADED,
    decode_chunk_header,
    decode_copy,
    unsound,
)
from quire.stream.mlog_reader import Chunk, ManifestLogReader, RecordView, check_sequence
from quire.stream.mlog_records import Payload, RecordType, UnknownRecord, decode
from quire.stream.mlog_recovery import RecoveredLog, local_facts, objects_apart, recover
from quire.stream.mlog_snapshot import newest_snapshots
from quire.stream.mlog_tier2 import LogObjects
from quire.stream.state import log_records_at_close
from quire.stream.witnesses import Witness, files_above, missing_from_log


class LogProblem(msgspec.Struct, frozen=True, kw_only=True):
    """A broken rule."""

    rule: str
    what: str
    where: dict[str, Any] = msgspec.field(default_factory=dict)
    leak: bool = False
    """Whether the problem only wastes space."""


class LogRow(msgspec.Struct, frozen=True, kw_only=True):
    """One record, decoded."""

    chunk_index: int
    chunk_offset: int
    ordinal: int
    record: str
    segment_id: int
    logical_offset: int
    timestamp_ms: int
    fields: dict[str, Any]
    tier2: str
    """State of the chunk's object: `here` if the chunk is only on disk, `there` if only in tier 2, `same`, or the error of the
    object. For the record of a completed upload, also whether the segment's object is missing."""

    @property
    def diverges(self) -> bool:
        """Whether tier 2 differs from the log."""
        return self.tier2 not in AGREEING


AGREEING = frozenset({"here", "there", "same"})


def inspect(files: LogFiles, objects: LogObjects | None = None, *, start_chunk: int | None = None) -> Iterator[LogRow]:
    """Yield the records of the log from the first chunk on disk on; raise at the first damage.

    A `start_chunk` before that is fetched from tier 2; if it is in a bundle, reading begins with the bundle.
    """
    bad = objects_apart(files, objects) if objects is not None else {}
    uploaded = _uploaded(files, objects) if objects is not None else {}
    here = set(files.chunks())
    for chunk in ManifestLogReader(files, objects.fetch if objects is not None else None).chunks(start_chunk):
        kept = "same" if chunk.header.uploaded else "here"
        tier2 = bad.get(chunk.index) or (kept if chunk.index in here else "there")
        for place, view in enumerate(chunk.records()):
            row = _row(view, chunk.header.base_record + place, tier2)
            if objects is not None and view.record_type == RecordType.UPLOAD_DONE:
                key = row.fields["key"]
                if uploaded.get(view.segment_id) == key and not exists(objects.store, key):
                    row = msgspec.structs.replace(row, tier2="the segment's object is missing")
            yield row


def minimal_rows(files: LogFiles, objects: LogObjects | None = None) -> Iterator[dict[str, Any]]:
    """Yield the decoded records that make up the log's state: what remains of the history after folding."""
    for raw in recover(files, SystemClock(), objects.fetch if objects is not None else None).index.minimal():
        kind, _, _, segment_id, logical_offset, timestamp_ms, _ = RECORD.unpack_from(raw)
        name, fields = _named(decode(kind, raw[RECORD_BYTES:], segment=segment_id))
        yield {
            "record": name,
            "segment_id": segment_id,
            "logical_offset": logical_offset,
            "timestamp_ms": timestamp_ms,
            "fields": fields,
        }


def _uploaded(files: LogFiles, objects: LogObjects) -> dict[int, str | None]:
    """Return the keys of segments that should be in tier 2; none if the log is damaged, which reading it reports."""
    try:
        index = recover(files, SystemClock(), objects.fetch).index
    except ManifestIntegrityError:
        return {}
    return {info.segment_id: info.key for info in index.segments() if 2 in info.tiers}


def verify(
    files: LogFiles,
    objects: LogObjects | None = None,
    *,
    settings: ManifestLogSettings | None = None,
    object_exists: Callable[[str], bool] | None = None,
    deep: bool = True,
    witness: Witness | None = None,
) -> Iterator[LogProblem]:
    """Yield every broken rule. `witness` is what LMDB had before this call."""
    stream = StreamFiles(files.disk, files.root, files.stream_id)
    # Files, state and listing are read before the log, so that a live writer's log is never behind them.
    held = files_above(stream, witness.last_segment) if witness is not None else []
    closed = log_records_at_close(stream) if witness is not None else None
    uploaded = max(objects.listing().chunks, default=-1) if objects is not None else -1
    broken = list(_chunks(files))
    yield from broken
    yield from _headers(files)
    yield from _snapshots(files)
    recovered: RecoveredLog | None = None
    if not broken:
        try:
            recovered = recover(files, SystemClock(), objects.fetch if objects is not None else None)
        except ManifestIntegrityError as error:
            yield LogProblem(rule="L3", what=error.what, where=error.where)
    if recovered is not None:
        if uploaded >= recovered.end.chunk_index:
            yield LogProblem(
                rule="L2", what="the newest chunk is not on disk: tier 2 has it", where={"chunk": uploaded}
            )
        yield from _state(recovered, object_exists)
        if witness is not None and closed is not None:
            for what in missing_from_log(recovered.index, witness, held=held, closed_records=closed):
                yield LogProblem(rule="L8", what=f"the log is behind: {what}")
        yield from _retention(files, recovered, settings or ManifestLogSettings())
    if objects is not None and not broken:
        for chunk, what in objects_apart(files, objects).items():
            yield LogProblem(rule="L5", what=what, where={"chunk": chunk})
        if deep:
            yield from _bodies(objects)


def _named(value: Payload) -> tuple[str, dict[str, Any]]:
    """Return a record's name and fields in readable form."""
    if isinstance(value, UnknownRecord):
        return f"unknown {value.record_type}", {"payload": value.payload.hex()}
    fields = {
        name: field.hex() if isinstance(field, bytes) else field
        for name, field in msgspec.structs.asdict(value).items()
    }
    return type(value).__name__, fields


def _row(view: RecordView, ordinal: int, tier2: str) -> LogRow:
    name, fields = _named(view.value())
    return LogRow(
        chunk_index=view.chunk.index,
        chunk_offset=view.offset,
        ordinal=ordinal,
        record=name,
        segment_id=view.segment_id,
        logical_offset=view.logical_offset,
        timestamp_ms=view.timestamp_ms,
        fields=fields,
        tier2=tier2,
    )


def _chunks(files: LogFiles) -> Iterator[LogProblem]:
    """Check L1 and L2 for each chunk separately, so that a damaged one does not hide the next."""
    reader = ManifestLogReader(files)
    here = files.chunks()
    before: Chunk | None = None
    for index in here:
        try:
            chunk = reader.chunk(index)
        except QuireError as error:
            yield LogProblem(rule="L1", what=error.what, where=error.where)
            before = None
            continue
        expected = before.facts.next_record if before is not None else (0 if index == 0 else None)
        if before is not None and index != before.index + 1:
            yield LogProblem(
                rule="L2", what="chunks are missing in between", where={"chunk": index, "before": before.index}
            )
            expected = None
        try:
            check_sequence(chunk.header, expected, is_last=index == here[-1])
        except ManifestIntegrityError as error:
            yield LogProblem(rule="L2", what=error.what, where=error.where)
        before = chunk


def _headers(files: LogFiles) -> Iterator[LogProblem]:
    """Check L1 for headers and commit copies: readers need only one of the two, but damage to the other is reported as well."""
    here = files.chunks()
    for index in here:
        try:
            what = _header(read_all(files.disk, files.chunk(index)), index, is_last=index == here[-1])
        except FileNotFoundError:
            continue  # it has moved to tier 2
        if what is not None:
            yield LogProblem(rule="L1", what=what, where={"chunk": index, "path": files.chunk(index)})


def _header(data: bytes, index: int, *, is_last: bool) -> str | None:
    """Return what is wrong with a chunk's header or its commit copy, if the other one is valid.

    A commit writes the copy before the header, so a crash may leave the last chunk with an older or torn header. A crash while
    a chunk is being marked as uploaded leaves a header without that mark.
    """
    header, copy = decode_chunk_header(data) if len(data) >= CHUNK_BYTES else None, decode_copy(data)
    if header is None:
        return None  # reported as a chunk that is too short
    sound = data[:CHUNK_BYTES] == header.encode() and unsound(header, data, index) is None
    if copy is None or unsound(copy.header, data, index) is not None:
        return "the chunk's commit copy is damaged, its header is not" if sound and not is_last else None
    newer = copy.header
    if header in (newer, newer._replace(flags=newer.flags & ~UPLOADED)) and sound:
        return None
    older = header.committed_len <= newer.committed_len == newer.tail_offset and header.flags in (0, newer.flags)
    begun = (header.base_record, header.tail_offset) == (newer.base_record, header.committed_len)
    if is_last and (not sound or (older and begun)):
        return None
    return "the chunk's header is damaged, its commit copy is not"


def _snapshots(files: LogFiles) -> Iterator[LogProblem]:
    for snapshot in newest_snapshots(files):
        if isinstance(snapshot, ManifestIntegrityError):
            yield LogProblem(rule="L3", what=snapshot.what, where=snapshot.where)


def _state(recovered: RecoveredLog, object_exists: Callable[[str], bool] | None) -> Iterator[LogProblem]:
    index = recovered.index
    for rejection in index.rejections:
        yield LogProblem(
            rule="L4",
            what="a record was not allowed in its segment's state",
            where={"ordinal": rejection.ordinal, "segment": rejection.segment_id, "record_type": rejection.record_type},
        )
    if index.rejected > len(index.rejections):
        count = index.rejected - len(index.rejections)
        yield LogProblem(rule="L4", what="records were not allowed in their segments' states", where={"count": count})
    for segment, count in index.reconciliation().items():
        yield LogProblem(
            rule="L4",
            what="records refer to a segment that was never opened",
            where={"segment": segment, "count": count},
        )
    for info in index.segments():
        key = info.key if 2 in info.tiers else None
        if key is not None and object_exists is not None and not object_exists(key):
            yield LogProblem(
                rule="L7", what="a segment's object is missing", where={"segment": info.segment_id, "key": key}
            )
        elif info.segment_id in index.needs_repair and object_exists is None:
            yield LogProblem(
                rule="L7", what="a segment needs repair: its object is missing", where={"segment": info.segment_id}
            )
        if not info.tiers and RecordType.TIER2_DELETE_QUEUED not in info.records:
            yield LogProblem(rule="L7", what="a segment is in no tier", where={"segment": info.segment_id})


def _retention(files: LogFiles, recovered: RecoveredLog, settings: ManifestLogSettings) -> Iterator[LogProblem]:
    """Check L6. A chunk that is missing on disk is in tier 2; otherwise recovery would have failed (L3)."""
    here = files.chunks()
    if not here:
        return
    first = recovered.snapshot_position.chunk_index
    if here[0] > first:
        yield LogProblem(rule="L6", what="chunks since the newest snapshot are not on disk", where={"chunk": first})
    spare = [index for index in here[: -settings.sealed_kept - 1] if index < first]
    done = [index for index in spare if local_facts(files.disk, files, index).header.uploaded]
    if len(done) > settings.snapshot_chunks:
        yield LogProblem(
            rule="L6", what="uploaded chunks from before the newest snapshot are still on disk", where={"count": len(done)},
            leak=True,
        )  # fmt: skip


def _bodies(objects: LogObjects) -> Iterator[LogProblem]:
    listing = objects.listing()
    for index in sorted(listing.chunks):
        yield from _body(partial(objects.check, index), index)
    for first, last in sorted(listing.bundles):
        yield from _body(partial(objects.check, first, last), first)
    for snapshot_id in sorted(listing.snapshots):
        try:
            objects.get_snapshot(snapshot_id)
        except ManifestIntegrityError as error:
            yield LogProblem(rule="L5", what=error.what, where=error.where)


def _body(read: Callable[[], None], index: int) -> Iterator[LogProblem]:
    try:
        read()
    except QuireError as error:
        yield LogProblem(rule="L5", what=f"its object is damaged: {error.what}", where={"chunk": index, **error.where})
