"""Checksums cover every used byte of a segment: a flipped byte is reported."""

from __future__ import annotations

import numpy as np
import pytest

from quire.pages.segment import ENTRY_BYTES
from quire.pages.segment_scan import ENTRY_DTYPE, _lineage_damage, open_damage, sealed_damage
from tests.pages.segments import DB_ID, FIRST_LSN, SEGMENT_ID, Segment, Transaction

PAGES = Transaction(pages=((0, 1), (3, 2), (1, 2)))
WITH_ZEROS = Transaction(pages=((0, 1), (3, None)))


def sealed(segment: Segment, data: bytes | None = None, *, db_id: int = DB_ID, segment_id: int = SEGMENT_ID) -> str:
    body = bytes(segment.data) if data is None else data
    used = segment.header.geometry.frame_offset(segment.used)
    read = lambda offset, size: body[offset : offset + size]  # noqa: E731
    return sealed_damage(read, used, path="x", db_id=db_id, segment_id=segment_id)


def live(segment: Segment, data: bytes, synced_lsn: int) -> str:
    read = lambda offset, size: data[offset : offset + size]  # noqa: E731
    return open_damage(read, path="x", db_id=DB_ID, segment_id=SEGMENT_ID, synced_lsn=synced_lsn)


def test_a_sealed_segment_is_sound_and_each_of_its_bytes_is_covered() -> None:
    segment = Segment(capacity=8).write_all([PAGES, PAGES])
    assert sealed(segment) == ""
    geometry, body = segment.header.geometry, bytes(segment.data)
    spare = range(
        geometry.entry_offset(segment.used), geometry.frames_offset
    )  # entries of frames that were never written
    for offset in range(geometry.frame_offset(segment.used)):
        flipped = body[:offset] + bytes([body[offset] ^ 0x10]) + body[offset + 1 :]
        assert bool(sealed(segment, flipped)) == (offset not in spare), offset


def test_a_foreign_or_truncated_segment_is_reported() -> None:
    segment = Segment(capacity=8).write_all([PAGES, WITH_ZEROS])
    assert sealed(segment) == ""
    assert "a different segment" in sealed(segment, db_id=DB_ID + 1)
    assert "a different segment" in sealed(segment, segment_id=SEGMENT_ID + 1)
    geometry = segment.header.geometry
    for size in (0, 10, geometry.entry_offset(1), geometry.frame_offset(1), geometry.frame_offset(segment.used) - 1):
        assert sealed(segment, bytes(segment.data[:size]))


@pytest.mark.parametrize(
    ("lsn", "segment_id"),
    [(FIRST_LSN + 1, SEGMENT_ID), (FIRST_LSN, SEGMENT_ID - 1), (5, SEGMENT_ID), (5, SEGMENT_ID + 1), (0, 3), (5, 0)],
)
def test_a_predecessor_that_cannot_be_is_reported(lsn: int, segment_id: int) -> None:
    """`prev_lsn` and `prev_segment` of a version are its lineage; their checksum is right, and what they say is not."""
    header = Segment(capacity=8).header
    entries = np.zeros(2, ENTRY_DTYPE)
    entries["lsn"] = FIRST_LSN, FIRST_LSN + 1
    entries["prev_lsn"][1], entries["prev_segment"][1] = FIRST_LSN, SEGMENT_ID
    assert _lineage_damage(header, entries) == ""
    entries["prev_lsn"][0], entries["prev_segment"][0] = FIRST_LSN - 1, SEGMENT_ID - 1
    assert _lineage_damage(header, entries) == ""
    entries["prev_lsn"][1], entries["prev_segment"][1] = lsn, segment_id
    assert "the predecessor of frame 1" in _lineage_damage(header, entries)


def test_a_lost_entry_of_a_sealed_segment_is_reported() -> None:
    """Zeros, as a lost write leaves them; the frames alone would not reveal it."""
    segment = Segment(capacity=8).write_all([PAGES])
    offset = segment.header.geometry.entry_offset(1)
    segment.data[offset : offset + ENTRY_BYTES] = bytes(ENTRY_BYTES)
    assert "index entry of frame 1" in sealed(segment)


def test_only_the_synced_part_of_an_open_segment_is_checked() -> None:
    segment = Segment(capacity=8).write_all([PAGES, PAGES])
    geometry, body = segment.header.geometry, bytes(segment.data)
    synced = FIRST_LSN + 2
    for frame, is_reported in ((1, True), (4, False)):
        offset = geometry.frame_offset(frame) + 100
        flipped = body[:offset] + bytes([body[offset] ^ 1]) + body[offset + 1 :]
        assert bool(live(segment, flipped, synced)) == is_reported
    assert live(segment, body, synced) == ""
    assert live(segment, body, FIRST_LSN - 1) == ""
