"""The verdict on a segment (clean, torn or corrupt) for every kind of wrong bytes, and what its entries become."""

from __future__ import annotations

import random
import struct
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.core.errors import Corruption, OutOfRange
from quire.durable.checksums import crc64
from quire.manifest.ops.pageindex import ROW
from quire.pages.segment import ENTRY_BYTES, HEADER_BYTES, PageWrite, check_frame, encode
from quire.pages.segment_scan import (
    ENTRY_DTYPE,
    ROW_DTYPE,
    CutReason,
    SegmentScan,
    as_rows,
    entries_of,
    page_map,
    parse_entries,
    parse_heads,
    scan_segment,
    sealed_entries,
    valid_entries,
)
from tests.pages.segments import TRANSACTIONS, Segment, Transaction, count_scanned, valid_frames

ONE = Transaction(pages=((0, 1), (3, None), (1, 2)))
TWO = Transaction(pages=((2, 1),))
Wipe = Callable[[Segment, int], None]
UNSYNCED = Transaction(pages=((5, 1), (4, 2)), synced=False)


def indexed_choices(segment: Segment) -> list[int]:
    """What `indexed_upto_lsn` may be: 0, or a synced commit."""
    return [
        0,
        *(
            lsn
            for i in range(len(segment.written_transactions))
            if (lsn := segment.lsn_after(i + 1)) <= segment.durable_lsn
        ),
    ]


def verdict(segment: Segment, indexed_upto_lsn: int = 0) -> SegmentScan | Corruption:
    try:
        return segment.scan(indexed_upto_lsn=indexed_upto_lsn)
    except Corruption as error:
        return error


# ── clean ─────────────────────────────────────────────────────────────────────────────────────────────────────────────
@given(transactions=TRANSACTIONS, page_size=st.sampled_from([512, 4096, 8192]), data=st.data())
def test_what_was_written_is_found_whatever_is_indexed(
    transactions: list[Transaction], page_size: int, data: st.DataObject
) -> None:
    segment = Segment(page_size=page_size, capacity=24).write_all(transactions)
    indexed = data.draw(st.sampled_from(indexed_choices(segment)))
    scan = segment.scan(indexed_upto_lsn=indexed)
    assert count_scanned(segment, scan) == len(transactions)
    assert (scan.cut_reason, scan.cut_frames, len(scan.unfinished)) == (CutReason.NOTHING, 0, 0)
    assert scan.proven_lsn == max(indexed, *segment.claims, 0)
    assert scan.used_bytes == segment.header.geometry.frame_offset(segment.used)
    read = scan.commits["lsn"] > indexed
    assert scan.commits["commit_ms"][read].tolist() == [
        transaction.commit_ms
        for transaction, was_read in zip(segment.written_transactions, read, strict=True)
        if was_read
    ]


def test_a_full_segment_is_clean() -> None:
    segment = Segment(capacity=8).write_all([ONE, TWO, ONE, TWO])
    scan = segment.scan()
    assert count_scanned(segment, scan) == 4
    assert (scan.cut, scan.cut_reason) == (8, CutReason.NOTHING)


def test_an_empty_segment_is_clean() -> None:
    scan = Segment().scan()
    assert (scan.cut, scan.last_lsn, scan.size_pages, scan.proven_lsn) == (0, 4710, 0, 0)
    assert scan.cut_reason is CutReason.NOTHING


def test_bodies_at_or_below_the_published_lsn_are_not_read() -> None:
    segment = Segment().write_all([ONE, TWO, UNSYNCED])
    reads: list[tuple[int, int]] = []
    raw = segment.read_raw

    def record_reads(first: int, count: int) -> bytes:
        reads.append((first, count))
        return raw(first, count)

    scan_segment(segment.header, segment.index(), record_reads, path="x", indexed_upto_lsn=segment.lsn_after(2))
    assert reads == [(4, 28)]
    reads.clear()
    scan = scan_segment(segment.header, segment.index(), record_reads, path="x", indexed_upto_lsn=segment.lsn_after(3))
    assert reads == [(6, 26), (5, 1)]  # the last commit's own frame, for its time
    assert scan.last_commit_ms == UNSYNCED.commit_ms


# ── torn ──────────────────────────────────────────────────────────────────────────────────────────────────────────────
def test_a_transaction_without_its_commit_is_unfinished() -> None:
    segment = Segment().write_all([ONE])
    pages: list[PageWrite] = [(9, bytes(512), 0, 0), (8, None, 0, 0)]
    encoded = encode(segment.header, segment.used, pages, db_size=0)
    for offset, piece in encoded.pieces:
        segment.data[offset : offset + len(piece)] = piece
    scan = segment.scan()
    assert count_scanned(segment, scan) == 1
    assert (scan.cut, scan.good, scan.cut_frames) == (3, 5, 2)
    assert scan.cut_reason is CutReason.UNFINISHED
    assert scan.unfinished["page"].tolist() == [9, 8]


def wipe_entry(segment: Segment, number: int) -> None:
    start = segment.header.geometry.entry_offset(number)
    segment.data[start : start + ENTRY_BYTES] = bytes(ENTRY_BYTES)


def wipe_frame(segment: Segment, number: int) -> None:
    geometry = segment.header.geometry
    segment.data[geometry.frame_offset(number) : geometry.frame_offset(number + 1)] = bytes(geometry.stride)


def wipe_body(segment: Segment, number: int) -> None:
    geometry = segment.header.geometry
    segment.data[geometry.frame_offset(number) + 64 : geometry.frame_offset(number + 1)] = bytes(geometry.page_size)


@pytest.mark.parametrize("wipe", [wipe_frame, wipe_body])
def test_an_entry_without_its_frame_is_torn(wipe: Wipe) -> None:
    segment = Segment().write_all([ONE, UNSYNCED, UNSYNCED])
    wipe(segment, 4)
    scan = segment.scan()
    assert count_scanned(segment, scan) == 1
    assert (scan.cut_reason, scan.cut_frames, scan.good) == (CutReason.BAD_FRAME, 4, 4)


@given(transactions=TRANSACTIONS, garbage=st.randoms(use_true_random=False), data=st.data())
def test_entries_above_the_published_lsn_are_ignored(
    transactions: list[Transaction], garbage: random.Random, data: st.DataObject
) -> None:
    """Not written yet, written before a crash without its batch, or partly written: only the frames count there."""
    segment = Segment(capacity=24).write_all(transactions)
    indexed = data.draw(st.sampled_from(indexed_choices(segment)))
    expected = segment.scan(indexed_upto_lsn=indexed)
    start = segment.header.geometry.entry_offset(max(indexed - segment.first_lsn + 1, 0))
    for fill in (bytes, garbage.randbytes):
        segment.data[start : segment.header.geometry.frames_offset] = fill(
            segment.header.geometry.frames_offset - start
        )
        scan = segment.scan(indexed_upto_lsn=indexed)
        assert count_scanned(segment, scan) == len(transactions)
        assert scan.entries.tobytes() == expected.entries.tobytes(), "recovery writes the same entries"
        assert scan.proven_lsn == expected.proven_lsn


def test_entries_of_other_frames_above_the_published_lsn_do_not_count() -> None:
    """They are valid at their position, but what the frame says is published."""
    segment = Segment().write_all([ONE, UNSYNCED])
    other = encode(segment.header, 3, [(9, b"\x55" * 512, 6, 3), (8, None, 0, 0)], db_size=0)
    segment.enter(other)
    scan = segment.scan()
    assert count_scanned(segment, scan) == 2
    assert scan.entries["page"].tolist()[3:] == [5, 4]


@given(transactions=TRANSACTIONS, previous=TRANSACTIONS, salt=st.integers(0, 2**64 - 1))
def test_frames_of_a_previous_use_are_never_valid(
    transactions: list[Transaction], previous: list[Transaction], salt: int
) -> None:
    old = Segment(salt=salt, first_lsn=4000).write_all(previous)
    new = Segment().write_all(transactions)
    geometry = new.header.geometry
    new.data[geometry.entry_offset(new.used) : geometry.frames_offset] = old.data[
        geometry.entry_offset(new.used) : geometry.frames_offset
    ]
    new.data[geometry.frame_offset(new.used) :] = old.data[geometry.frame_offset(new.used) :]
    scan = new.scan()
    assert count_scanned(new, scan) == len(transactions)
    assert scan.cut_reason is CutReason.NOTHING


def test_frames_of_a_previous_use_are_invalid_even_with_the_same_lsns() -> None:
    """Worse than anything that can occur (P5): everything is the same except the salt."""
    old = Segment(salt=1).write_all([ONE, TWO])
    old.data[:HEADER_BYTES] = (new := Segment(salt=2)).header.encode()
    new.data = old.data
    scan = new.scan()
    assert scan.cut == 0
    assert (scan.cut_reason, scan.cut_frames) == (CutReason.BAD_FRAME, 4)


# ── corrupt ───────────────────────────────────────────────────────────────────────────────────────────────────────────
@pytest.mark.parametrize("wipe", [wipe_frame, wipe_body])
@pytest.mark.parametrize("number", [0, 2, 3])
def test_damage_at_or_below_a_later_commits_claim_is_corruption(wipe: Wipe, number: int) -> None:
    segment = Segment().write_all([ONE, TWO, UNSYNCED])
    wipe(segment, number)
    with pytest.raises(Corruption) as caught:
        segment.scan()
    where = caught.value.where
    assert (where["path"], where["db_id"], where["segment_id"]) == ("x", 7, 31)
    assert (where["frame"], where["lsn"]) == (number, 4711 + number)
    assert where["offset"] == segment.header.geometry.frame_offset(number)
    assert where["page"] == (None if wipe is wipe_frame else [0, 3, 1, 2][number])
    assert "quire verify" in caught.value.hint


def test_a_damaged_commit_proves_nothing() -> None:
    segment = Segment().write_all([ONE, TWO, UNSYNCED])
    wipe_frame(segment, 1)
    wipe_frame(segment, 5)  # the only commit that proves that ONE and TWO are durable
    segment_two = Segment().write_all([ONE, TWO])
    wipe_frame(segment_two, 1)
    with pytest.raises(Corruption):
        segment.scan()  # TWO's commit still proves ONE
    with pytest.raises(Corruption):
        segment_two.scan()
    wipe_frame(segment_two, 3)
    assert count_scanned(segment_two, segment_two.scan()) == 0


def test_frames_that_the_caller_knows_to_be_durable_are_never_torn() -> None:
    segment = Segment().write_all([ONE, TWO])
    wipe_frame(segment, 3)
    assert count_scanned(segment, segment.scan()) == 1
    with pytest.raises(Corruption):
        segment.scan(proven_lsn=segment.lsn_after(2))


def test_a_missing_entry_at_or_below_the_published_lsn_is_corruption() -> None:
    segment = Segment().write_all([ONE, TWO])
    wipe_entry(segment, 3)
    with pytest.raises(Corruption):
        segment.scan(indexed_upto_lsn=segment.lsn_after(2))


def test_damage_to_a_published_body_is_found_when_it_is_read() -> None:
    segment = Segment().write_all([ONE, TWO])
    wipe_frame(segment, 0)
    assert count_scanned(segment, segment.scan(indexed_upto_lsn=segment.lsn_after(2))) == 2
    assert valid_frames(segment) == [False, True, True, True]
    wipe_frame(segment, 3)  # every scan reads the last commit
    with pytest.raises(Corruption):
        segment.scan(indexed_upto_lsn=segment.lsn_after(2))


def test_frames_that_were_never_written_are_not_missing() -> None:
    """Rule 5: a segment was sealed early, and the proof is in the next segment."""
    segment = Segment().write_all([ONE, TWO])
    later = segment.lsn_after(2) + 50
    for known in ({"indexed_upto_lsn": later}, {"proven_lsn": later}):
        with pytest.raises(Corruption):
            segment.scan(**known)
        scan = segment.scan(limit=segment.used, **known)
        assert count_scanned(segment, scan) == 2


def test_frames_beyond_the_limit_are_ignored() -> None:
    segment = Segment().write_all([ONE, TWO, UNSYNCED])
    assert segment.scan(limit=3).cut == 3
    assert segment.scan(limit=0).cut == 0
    for limit in (-1, 33):
        with pytest.raises(OutOfRange):
            segment.scan(limit=limit)


def test_a_file_that_ends_after_its_frames_is_accepted() -> None:
    segment = Segment().write_all([ONE, TWO])
    del segment.data[segment.header.geometry.frame_offset(segment.used) :]
    assert count_scanned(segment, segment.scan()) == 2
    del segment.data[-1:]
    assert count_scanned(segment, segment.scan()) == 1
    with pytest.raises(Corruption):
        segment.scan(proven_lsn=segment.lsn_after(2))


# ── any damage ────────────────────────────────────────────────────────────────────────────────────────────────────────
@given(transactions=TRANSACTIONS.filter(bool), flip=st.integers(1, 255), data=st.data())
def test_a_changed_byte_is_found_or_irrelevant(transactions: list[Transaction], flip: int, data: st.DataObject) -> None:
    """Whatever byte changes: what is returned was written, and what had been synced is returned or reported."""
    segment = Segment(capacity=24).write_all(transactions)
    indexed = data.draw(st.sampled_from(indexed_choices(segment)))
    geometry = segment.header.geometry
    used = st.one_of(
        st.integers(HEADER_BYTES, geometry.entry_offset(segment.used) - 1),
        st.integers(geometry.frames_offset, geometry.frame_offset(segment.used) - 1),
    )
    position = data.draw(st.one_of(used, st.integers(HEADER_BYTES, geometry.file_bytes - 1)))
    before = bytes(segment.data)
    segment.data[position] ^= flip
    scan = verdict(segment, indexed)
    if isinstance(scan, Corruption):
        bad = scan.where["frame"]
        at_entry = geometry.entry_offset(bad) <= position < geometry.entry_offset(bad + 1)
        at_frame = geometry.frame_offset(bad) <= position < geometry.frame_offset(bad + 1)
        assert at_entry or at_frame, "another frame was reported"
        assert scan.where["lsn"] <= segment.durable_lsn
        return
    count = count_scanned(segment, scan)
    lost = segment.lsn_after(count) < segment.lsn_after(len(transactions))
    assert not lost or segment.lsn_after(count) >= max(indexed, scan.proven_lsn)
    after = [check_frame(segment.header, number, segment.frame(number)) for number in range(scan.cut)]
    for number, head in enumerate(after):
        start = geometry.frame_offset(number)
        same = before[start : start + geometry.stride] == segment.frame(number)
        assert same or head is None or head.flags == 1  # changed: refused when it is read, or an image without meaning


@given(transactions=TRANSACTIONS, data=st.data())
def test_random_bytes_in_random_places_never_break_the_scan(
    transactions: list[Transaction], data: st.DataObject
) -> None:
    segment = Segment(capacity=16)
    for transaction in transactions:
        if segment.used + len(transaction.pages) <= 16:
            segment.write(transaction)
    for _ in range(data.draw(st.integers(1, 5))):
        start = data.draw(st.integers(HEADER_BYTES, len(segment.data) - 1))
        garbage = data.draw(st.binary(min_size=1, max_size=200))[: len(segment.data) - start]
        segment.data[start : start + len(garbage)] = garbage
    scan = verdict(segment)
    if isinstance(scan, Corruption):
        assert scan.where["lsn"] <= segment.durable_lsn
    else:
        count_scanned(segment, scan)


# ── sealed segments, rows and maps ────────────────────────────────────────────────────────────────────────────────────
def test_a_sealed_segment_gives_its_entries_from_a_part_of_the_region() -> None:
    segment = Segment().write_all([ONE, TWO])
    for index in (segment.index(), segment.index()[: 4 * ENTRY_BYTES]):
        entries = sealed_entries(segment.header, index, 4, path="x")
        assert entries["page"].tolist() == [0, 3, 1, 2]
    with pytest.raises(OutOfRange):
        sealed_entries(segment.header, segment.index()[: 3 * ENTRY_BYTES], 4, path="x")
    with pytest.raises(Corruption):
        sealed_entries(segment.header, segment.index(), 5, path="x")
    wipe_entry(segment, 1)
    with pytest.raises(Corruption) as caught:
        sealed_entries(segment.header, segment.index(), 4, path="x")
    assert caught.value.where["frame"] == 1


def test_many_entries_are_checked_like_few() -> None:
    """Many rows are checked by numpy, few one by one; both must give the same result."""
    segment = Segment(capacity=700)
    pages: list[PageWrite] = [(page, None, 0, 0) for page in range(700)]
    encoded = encode(segment.header, 0, pages, db_size=700)
    entries = bytearray(entries_of(segment.header, parse_heads(encoded.heads)).tobytes())
    entries[48 * 650 + 3] ^= 1
    valid = valid_entries(segment.header, parse_entries(entries))
    assert np.flatnonzero(~valid).tolist() == [650]
    assert valid_entries(segment.header, parse_entries(entries[: 48 * 100])).all()


def test_rows_are_what_the_manifest_publishes() -> None:
    segment = Segment().write_all([ONE, TWO])
    scan = segment.scan()
    rows = as_rows(segment.header, scan.entries)
    unpacked = list(ROW.iter_unpack(rows.tobytes()))
    assert rows.dtype == ROW_DTYPE
    assert ROW_DTYPE.itemsize == ROW.size == struct.calcsize("<IIQQQIIII")
    for number, (page, frame, lsn, prev, crc, segment_id, origin, flags, reserved) in enumerate(unpacked):
        head = check_frame(segment.header, number, segment.frame(number))
        assert head is not None
        assert (page, frame, lsn, prev) == (head.page, number, head.lsn, head.prev_lsn)
        assert (crc, segment_id, origin, flags, reserved) == (head.crc64, 31, 7, head.flags, 0)


def test_rows_of_a_later_part_keep_their_frame_numbers() -> None:
    segment = Segment().write_all([ONE, TWO])
    rows = as_rows(segment.header, segment.scan().entries[3:])
    assert rows["frame_no"].tolist() == [3]


@given(transactions=TRANSACTIONS, later=TRANSACTIONS, shuffled=st.booleans(), data=st.data())
def test_a_page_map_is_the_newest_version_at_or_below(
    transactions: list[Transaction], later: list[Transaction], shuffled: bool, data: st.DataObject
) -> None:
    first = Segment().write_all(transactions)
    second = Segment(first_lsn=first.lsn_after(len(transactions)) + 1, salt=9).write_all(later)
    parts = [as_rows(segment.header, segment.scan().entries) for segment in (first, second)]
    rows = np.concatenate(parts[::-1] if shuffled else parts)
    upto = data.draw(st.integers(4700, 4711 + first.used + second.used + 3))
    expected: dict[int, int] = {}
    for page, lsn in sorted(zip(rows["page"].tolist(), rows["lsn"].tolist(), strict=True), key=lambda pair: pair[1]):
        if lsn <= upto:
            expected[page] = lsn
    newest = page_map(rows, upto)
    assert dict(zip(newest["page"].tolist(), newest["lsn"].tolist(), strict=True)) == expected
    assert newest["page"].tolist() == sorted(expected)
    assert newest.dtype == ROW_DTYPE


def test_a_page_map_does_not_depend_on_the_order_of_segments() -> None:
    first = Segment().write_all([ONE, TWO])
    second = Segment(first_lsn=5000).write_all([TWO, ONE])
    parts = [as_rows(segment.header, segment.scan().entries) for segment in (second, first)]
    for rows in (np.concatenate(parts), np.concatenate(parts[::-1])):
        assert page_map(rows, 5003)["lsn"].tolist() == [5001, 5003, 5000, 5002]
        assert page_map(rows, 4999)["lsn"].tolist() == [4711, 4713, 4714, 4712]


def test_a_page_map_of_nothing_is_empty() -> None:
    assert len(page_map(np.empty(0, ENTRY_DTYPE), 10)) == 0


def test_an_entry_of_zeros_is_never_valid() -> None:
    segment = Segment()
    assert not valid_entries(segment.header, parse_entries(bytes(48 * 32))).any()
    assert crc64(bytes(40), segment.header.crc64) != 0


def test_an_entry_or_frame_with_another_lsn_is_not_valid_whatever_its_checksum() -> None:
    """No crash produces one, but a writer that miscounts would."""
    segment = Segment().write_all([TWO])
    entry, frame = bytearray(segment.index()[:ENTRY_BYTES]), bytearray(segment.frame(0))
    entry[8] ^= 1
    entry[40:] = struct.pack("<Q", crc64(entry[:40], segment.header.crc64))
    assert not valid_entries(segment.header, parse_entries(entry)).any()
    frame[8] ^= 1
    frame[56:64] = struct.pack("<Q", crc64(frame[64:], crc64(frame[:56], segment.header.crc64)))
    assert check_frame(segment.header, 0, frame) is None
