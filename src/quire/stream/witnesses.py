"""Holds a stream's manifest log against what else knows of its segments: before anything is removed by what the log says.

The witness is what LMDB has of a stream: its rows were folded from the log, so the log knows all of it, or has lost it. A log
that knows more is what every crash leaves; one that knows less is behind: a chunk is missing, or an older copy of it is in
its place, or the log is another stream's. A witness is taken before the log is read: beside a live writer it is then never
ahead. A block is written after the log knows its segment, so a file with whole blocks that the log does not know says that
the log is behind, too. How many records the log had at the last clean close is remembered in `stream.json`.

What stays unseen: an older copy of the last chunk that hides only what no witness has, after a crash. Then the log has lost
steps that are taken again (an upload, a compression) or copies that are reported as missing; no segment is.

Pure functions but for reading files; any thread. Importable on executors. Raises what the disk raises."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator, Mapping
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

TOLD_MAX = 3
"""Reasons that an error gives; `quire manifest verify` gives all."""


class KnownSegment(msgspec.Struct, frozen=True):
    """What LMDB has of a sealed segment that is not gone."""

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
    """What a file holds that may belong to no segment."""

    tier: Tier
    segment_id: int
    base_record: int
    end_record: int
    """The same as `base_record` if there is no whole commit in it."""


def witness_of(rows: Mapping[int, WalRecord], last_segment: int) -> Witness:
    """What rows say of their segments."""
    known = (
        KnownSegment(segment_id, row.first_lsn, row.last_lsn + 1, row.used_bytes, row.crc64, bool(row.suffix))
        for segment_id, row in sorted(rows.items())
    )
    return Witness(tuple(known), last_segment)


def held_above(files: StreamFiles, last_segment: int) -> list[UnknownFile]:
    """What is in the files of segments that have no row yet; a file that cannot be read holds nothing here."""
    files_found = (
        segment_extent(files, tier, segment_id)
        for tier in Tier
        for segment_id in files.segments(tier)
        if segment_id > last_segment
    )
    return [held for held in files_found if held is not None]


def segment_extent(files: StreamFiles, tier: Tier, segment_id: int) -> UnknownFile | None:
    """What the file of a segment holds; `None` if it is not this segment's, or not sound."""
    path = files.segment(tier, segment_id)
    try:
        if tier is Tier.WARM:
            file = files.disk.open(path, write=False)
            try:
                whose, base, end = header_fields(lambda offset, size: file.read_at(size, offset), file.size(), path)
            finally:
                file.close()
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
    """What a log does not know and should; nothing if it agrees with its witnesses."""
    if index.records < closed_records:
        yield f"the log has {index.records} records, and had {closed_records} when the stream was last closed"
    if witness.last_segment > index.opened_max:
        yield f"LMDB has had segment {witness.last_segment}, the log ends with segment {index.opened_max}"
    for row in witness.segments:
        info = index.get(row.segment_id)
        if info is None:
            if row.segment_id > index.opened_max:
                yield f"LMDB has segment {row.segment_id}, the log does not know it"
        elif (what := _differs(info, row)) is not None:
            yield f"segment {row.segment_id}: {what}"
    for file in held:
        if file.segment_id > index.opened_max and file.end_record > file.base_record:
            records = f"records {file.base_record} to {file.end_record - 1}"
            yield f"the {file.tier} file of segment {file.segment_id} has {records}, the log does not know it"


def _differs(info: SegmentInfo, row: KnownSegment) -> str | None:
    if info.state.life is not Life.SEALED:
        return "LMDB has it sealed, the log has it open"
    log = (
        info.field(RecordType.SEGMENT_OPENED, "base_offset"),
        info.field(RecordType.SEAL_SEGMENT, "durable_bytes"),
        info.field(RecordType.SEAL_SEGMENT, "segment_crc64"),
    )
    if log != (row.base_record, row.durable_bytes, row.crc64):
        return "LMDB and the log have other records, bytes or checksums for it"
    if row.has_object and info.state.remote is Remote.NONE:
        return "LMDB has its object, the log has not uploaded it"
    return None


def log_behind_error(name: str, stream_id: int, why: list[str]) -> Corruption:
    """The error of a stream whose log is behind."""
    more = f" (and {len(why) - TOLD_MAX} more)" if len(why) > TOLD_MAX else ""
    return Corruption(
        f"the manifest log of a stream is behind: {'; '.join(why[:TOLD_MAX])}{more}",
        hint=f"nothing was removed; `quire stream repair {shlex.quote(name)}` shows what can be rebuilt",
        stream_id=stream_id,
    )
