"""Every byte of a segment that was promised is vouched for: a flipped one is told."""

from __future__ import annotations

from quire.pages.segment import ENTRY_BYTES
from quire.pages.segment_scan import open_damage, sealed_damage
from tests.pages.segments import DB_ID, FIRST_LSN, SEGMENT_ID, Segment, Transaction

PAGES = Transaction(pages=((0, 1), (3, 2), (1, 2)))
WITH_ZEROS = Transaction(pages=((0, 1), (3, None)))


def sealed(segment: Segment, data: bytes | None = None, *, db_id: int = DB_ID, segment_id: int = SEGMENT_ID) -> str:
    body = bytes(segment.data) if data is None else data
    used = segment.header.geometry.frame_offset(segment.used)
    read = lambda at, size: body[at : at + size]  # noqa: E731
    return sealed_damage(read, used, path="x", db_id=db_id, segment_id=segment_id)


def live(segment: Segment, data: bytes, synced_lsn: int) -> str:
    read = lambda at, size: data[at : at + size]  # noqa: E731
    return open_damage(read, path="x", db_id=DB_ID, segment_id=SEGMENT_ID, synced_lsn=synced_lsn)


def test_a_sealed_segment_is_sound_and_each_of_its_bytes_is_vouched_for() -> None:
    segment = Segment(capacity=8).write_all([PAGES, PAGES])
    assert sealed(segment) == ""
    geometry, body = segment.header.geometry, bytes(segment.data)
    spare = range(
        geometry.entry_offset(segment.used), geometry.frames_offset
    )  # entries of frames that were never written
    for offset in range(geometry.frame_offset(segment.used)):
        flipped = body[:offset] + bytes([body[offset] ^ 0x10]) + body[offset + 1 :]
        assert bool(sealed(segment, flipped)) == (offset not in spare), offset


def test_a_segment_of_somebody_else_or_cut_short_is_told() -> None:
    segment = Segment(capacity=8).write_all([PAGES, WITH_ZEROS])
    assert sealed(segment) == ""
    assert "a different segment" in sealed(segment, db_id=DB_ID + 1)
    assert "a different segment" in sealed(segment, segment_id=SEGMENT_ID + 1)
    geometry = segment.header.geometry
    for size in (0, 10, geometry.entry_offset(1), geometry.frame_offset(1), geometry.frame_offset(segment.used) - 1):
        assert sealed(segment, bytes(segment.data[:size]))


def test_a_lost_entry_of_a_sealed_segment_is_told() -> None:
    """Zeros, as a lost write leaves them: frames alone would not show it."""
    segment = Segment(capacity=8).write_all([PAGES])
    at = segment.header.geometry.entry_offset(1)
    segment.data[at : at + ENTRY_BYTES] = bytes(ENTRY_BYTES)
    assert "index entry of frame 1" in sealed(segment)


def test_of_a_segment_that_is_written_only_what_was_synced_counts() -> None:
    segment = Segment(capacity=8).write_all([PAGES, PAGES])
    geometry, body = segment.header.geometry, bytes(segment.data)
    synced = FIRST_LSN + 2
    for frame, is_told in ((1, True), (4, False)):
        offset = geometry.frame_offset(frame) + 100
        flipped = body[:offset] + bytes([body[offset] ^ 1]) + body[offset + 1 :]
        assert bool(live(segment, flipped, synced)) == is_told
    assert live(segment, body, synced) == ""
    assert live(segment, body, FIRST_LSN - 1) == ""
