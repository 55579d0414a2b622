"""Compares a stream's manifest log with independent records of its segments, before anything is removed because of the log.

The *witness* is what LMDB has of a stream. Its rows were folded from the log, so the log either contains all of it or has lost
something. Every crash leaves a log with more than LMDB. A log with less is *behind*: a chunk is missing or was replaced by an
older copy, or the log belongs to another stream. The witness is taken before the log is read, so that it is never ahead of the
log of a live writer. A block is written only after the log has its segment, so a file with complete blocks whose segment is not
in the log also shows that the log is behind. The number of records at the last clean close is recorded in `stream.json`.

Not detected: after a crash, an older copy of the last chunk that lacks only what no witness has. The log has then lost steps
that are repeated (an upload, a compression), or copies that are reported as missing, but no segment.

Importable on executors. Threads: any (pure functions, except for reading files). Raises: what the disk raises."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing
from typing import TYPE_CHECKING

import msgspec

from quire.core.errors import Corruption, FormatTooNew
from quire.durable.files import read_all
from quire.durable.names import Tier
from quire.stream.files import StreamFiles
from quire.stream.mlog_index import ManifestIndex, SegmentInfo
from quire.stream.mlog_records import RecordType
from quire.stream.mlog_states import Life, Remote
from quire.stream.segment import scan
from quire.stream.warm import header_fields

if TYPE_CHECKING:
    from quire.manifest.records import WalRecord

REASONS_MAX = 3
"""Reasons that an error lists; `quire manifest verify` lists all."""


class KnownSegment(msgspec.Struct, frozen=True):
    """What LMDB has of a sealed segment that is not retired."""

    segment_id: int
    base_record: int
    end_record: int
    durable_bytes: int
    crc64: int
    has_object: bool


class Witness(msgspec.Struct, frozen=True):
    """What LMDB has of a stream."""

    segments: tuple[KnownSegment, ...] = ()
    last_segment: int = 0
    """The highest segment that ever had a row."""


class UnknownFile(msgspec.Struct, frozen=True):
    """The contents of a file that may belong to no segment."""

    tier: Tier
    segment_id: int
    base_record: int
    end_record: int
    """The id after its last record; equal to `base_record` if the file has no complete commit."""


def witness_of(rows: Mapping[int, WalRecord], last_segment: int) -> Witness:
    """Return the witness that LMDB's rows form."""
    known = (
        KnownSegment(segment_id, row.first_lsn, row.last_lsn + 1, row.used_bytes, row.crc64, bool(row.suffix))
        for segment_id, row in sorted(rows.items())
    )
    return Witness(tuple(known), last_segment)


def files_above(files: StreamFiles, last_segment: int) -> list[UnknownFile]:
    """Return the contents of the files of segments above `last_segment`. Files that cannot be read are left out."""
    files_found = (
        segment_extent(files, tier, segment_id)
        for tier in Tier
        for segment_id in files.segments(tier)
        if segment_id > last_segment
    )
    return [held for held in files_found if held is not None]


def segment_extent(files: StreamFiles, tier: Tier, segment_id: int) -> UnknownFile | None:
    """Return the contents of a segment's file; `None` if the file is another segment's, missing or damaged."""
    path = files.segment(tier, segment_id)
    try:
        if tier is Tier.WARM:
            with closing(files.disk.open(path, write=False)) as file:
                whose, base, end = header_fields(lambda offset, size: file.read_at(size, offset), file.size(), path)
        else:
            blocks = scan(read_all(files.disk, path), path=path)
            whose = (blocks.header.stream_id, blocks.header.segment_id)
            base, end = blocks.header.base_record, blocks.end_record
    except (FileNotFoundError, Corruption, FormatTooNew):
        return None
    return UnknownFile(tier, segment_id, base, end) if whose == (files.stream_id, segment_id) else None


def missing_from_log(
    index: ManifestIndex, witness: Witness, *, held: Iterable[UnknownFile] = (), closed_records: int = 0
) -> Iterator[str]:
    """Yield what is missing from a log; nothing if it agrees with its witnesses."""
    if index.records < closed_records:
        yield f"the log has {index.records} records, and had {closed_records} when the stream was last closed"
    if witness.last_segment > index.opened_max:
        yield f"LMDB had segment {witness.last_segment}, the log ends with segment {index.opened_max}"
    for row in witness.segments:
        info = index.get(row.segment_id)
        if info is None:
            # A segment at or below it was retired: the log is ahead of LMDB, as after every crash.
            if row.segment_id > index.opened_max:
                yield f"LMDB has segment {row.segment_id}, the log has no record of it"
        elif (what := _differs(info, row)) is not None:
            yield f"segment {row.segment_id}: {what}"
    for file in held:
        if file.segment_id > index.opened_max and file.end_record > file.base_record:
            records = f"records {file.base_record} to {file.end_record - 1}"
            yield f"the {file.tier} file of segment {file.segment_id} has {records}, the log has no record of it"


def _differs(info: SegmentInfo, row: KnownSegment) -> str | None:
    if info.state.life is not Life.SEALED:
        return "LMDB has it sealed, the log has it open"
    log = (
        info.field(RecordType.SEGMENT_OPENED, "base_offset"),
        info.field(RecordType.SEAL_SEGMENT, "durable_bytes"),
        info.field(RecordType.SEAL_SEGMENT, "segment_crc64"),
    )
    if log != (row.base_record, row.durable_bytes, row.crc64):
        return "LMDB and the log have different records, bytes or checksums for it"
    if row.has_object and info.state.remote is Remote.NONE:
        return "LMDB has its object, the log has not uploaded it"
    return None


def log_behind_error(name: str, stream_id: int, why: list[str]) -> Corruption:
    """Return the error of a stream whose log is behind."""
    more = f" (and {len(why) - REASONS_MAX} more)" if len(why) > REASONS_MAX else ""
    return Corruption(
        f"the manifest log of a stream is behind: {'; '.join(why[:REASONS_MAX])}{more}",
        hint=f"nothing was removed; `quire stream repair {shlex.quote(name)}` shows what can be rebuilt",
        stream_id=stream_id,
    )
