"""Segments of version 1, whose entries were written with their frames (docs/decisions/008)."""

from __future__ import annotations

import os
from functools import partial

import pytest

from quire.durable.files import OsDisk
from quire.pages import segment_file
from quire.pages.segment import PageWrite, SegmentHeader, decode_header, encode
from quire.pages.segment_file import IndexWriter, SegmentFile
from quire.pages.segment_scan import entries_of, parse_heads, sealed_entries
from tests.pages.engine_harness import Model, Pages, assert_reads, image, write
from tests.pages.test_segment import EXAMPLE_PAGES

# The example of docs/formats/segment.md, in version 1.
OLD_HEADER = (
    "5157414c53454731 0100 0000 00020000 07000000 1f000000 02000000 00000000 6712000000000000 efcdab8967452301"
    " 0068e5cf8b010000 a3a1ba54bfdc84af"
)
OLD_ENTRIES = (
    "04000000 00000000 6712000000000000 0000000000000000 00000000 01000000 e179e87c8edc5133 b0af7255da4475e9"
    "00000000 05000000 6812000000000000 6810000000000000 1e000000 00000000 22a1bc908e7ee276 8561a79a12228da0"
)


def _path(pages: Pages, segment_id: int) -> str:
    return os.path.join(pages.root, f"pages/00000001/wal/{segment_id:08x}.seg")


def test_a_segment_of_version_1_is_read_as_it_was_written() -> None:
    segment = decode_header(bytes.fromhex(OLD_HEADER), "x", db_id=7, segment_id=31)
    assert segment.version == 1
    assert segment.encode() == bytes.fromhex(OLD_HEADER)
    encoded = encode(segment, 0, EXAMPLE_PAGES, db_size=5, durable_upto_lsn=4710, commit_ms=1_700_000_000_123)
    assert entries_of(segment, parse_heads(encoded.heads)).tobytes() == bytes.fromhex(OLD_ENTRIES)
    entries = sealed_entries(segment, bytes.fromhex(OLD_ENTRIES), 2, path="x")
    assert entries["page"].tolist() == [4, 0]


def test_segments_whose_entries_were_written_with_their_frames_recover(pages: Pages) -> None:
    """An owner that wrote version 1 of the format was killed; this one opens the store."""
    append = SegmentFile.append

    def old_append(
        file: SegmentFile, writes: list[PageWrite], *, db_size: int, durable_upto_lsn: int = 0, commit_ms: int = 0
    ) -> bytes:
        first = file.used
        heads = append(file, writes, db_size=db_size, durable_upto_lsn=durable_upto_lsn, commit_ms=commit_ms)
        with IndexWriter(OsDisk(), file.path, file.header) as index:
            index.write(first, entries_of(file.header, parse_heads(heads)).tobytes())
        return heads

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(segment_file, "SegmentHeader", partial(SegmentHeader, version=1))
        patch.setattr(SegmentFile, "append", old_append)
        store, model = pages.database(), Model()
        write(store, model, {0: image(), 1: image()})
        store.wal.publish()
        write(store, model, {0: image(), 2: image()})
        pages.crash()
    with SegmentFile.open(OsDisk(), _path(pages, 1)) as file:
        assert file.header.version == 1
    store = pages.database()
    with store.open_snapshot() as reader:
        assert_reads(reader, model.newest)
    write(store, model, {0: image()})
    with SegmentFile.open(OsDisk(), _path(pages, 2)) as file:
        assert file.header.version == 2
    with store.open_snapshot(at=model.versions[1].lsn) as past:
        assert_reads(past, model.versions[1])
