"""The format page of segments and the code agree, byte for byte; what is encoded is read back; invalid input is
refused."""

from __future__ import annotations

import itertools
import pickle
import re
import struct
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.core.errors import Corruption, FormatTooNew, InvalidInput, OutOfRange
from quire.core.limits import PAGE_SIZE_MAX, PAGE_SIZE_MIN
from quire.durable.checksums import crc64
from quire.pages import segment as fmt
from quire.pages.segment import (
    ENTRY,
    FRAME,
    HEADER,
    HEADER_BYTES,
    HEADER_CHECKED_BYTES,
    ZERO,
    Geometry,
    PageWrite,
    SegmentHeader,
    check_frame,
    check_pages,
    decode_header,
    encode,
    encode_one,
    next_file_bytes,
)
from quire.pages.segment_scan import entries_of, parse_heads

PAGE = (Path(__file__).parents[2] / "docs/formats/segment.md").read_text("utf-8")
PAGE_SIZES = [512, 1024, 2048, 4096, 8192, 16384, 32768, 65536]

# The example of the format page, repeated: neither the code nor the page can change alone.
GOLDEN_HEADER = (
    "5157414c53454731 0200 0000 00020000 07000000 1f000000 02000000 00000000 6712000000000000 efcdab8967452301"
    " 0068e5cf8b010000 d8d3c02eff0e255d"
)
GOLDEN_ENTRIES = (
    "04000000 00000000 6712000000000000 0000000000000000 00000000 01000000 4e8fa0631d6226bb ccdd25bcb0e336f1"
    "00000000 05000000 6812000000000000 6810000000000000 1e000000 00000000 6a49377ad52e7d24 7497adf37cac5454"
)


def header(page_size: int = 512, capacity: int = 2, salt: int = 0x0123456789ABCDEF) -> SegmentHeader:
    geometry = Geometry(page_size, capacity)
    return SegmentHeader(
        geometry=geometry, db_id=7, segment_id=31, first_lsn=4711, salt=salt, created_at_ms=1_700_000_000_000
    )


EXAMPLE_PAGES: list[PageWrite] = [(4, None, 0, 0), (0, b"\xab" * 512, 4200, 30)]


def fields(title: str) -> list[tuple[str, str, str]]:
    """The rows of a table of the format page: (field, offset, bytes)."""
    table = PAGE.split(f"| {title} | offset | bytes | meaning |")[1].split("\n\n")[0]
    return re.findall(r"^\| (\w+) \| ([^|]+) \| ([^|]+) \|", table, re.MULTILINE)


def example() -> dict[int, bytes]:
    """The lines of the page's dump: offset → 16 bytes."""
    lines = re.findall(r"^([0-9a-f]{4})  ((?:[0-9a-f]{2} ?)+)$", PAGE, re.MULTILINE)
    return {int(offset, 16): bytes.fromhex(data) for offset, data in lines}


@pytest.mark.parametrize(
    ("title", "layout", "names"),
    [
        (
            "header field",
            HEADER,
            "magic version reserved page_size db_id segment_id capacity reserved first_lsn salt created_at_ms crc64",
        ),
        ("entry field", ENTRY, "page db_size lsn prev_lsn prev_segment flags frame_crc64 entry_crc64"),
        (
            "frame field",
            FRAME,
            "page db_size lsn prev_lsn prev_segment flags durable_upto_lsn commit_ms reserved crc64",
        ),
    ],
)
def test_the_format_pages_tables_match_the_structs(title: str, layout: struct.Struct, names: str) -> None:
    rows = [row for row in fields(title) if row[0] != "image"]
    assert [name for name, _, _ in rows] == names.split()
    sizes = [int(size) for _, _, size in rows]
    assert [int(start) for _, start, _ in rows] == [0, *itertools.accumulate(sizes)][:-1]
    codes = re.findall(r"8s|[HIQ]", layout.format)
    assert sizes == [struct.calcsize(f"<{code}") for code in codes]
    assert sum(sizes) == layout.size


def test_the_format_pages_numbers_match_the_code() -> None:
    assert f"`{fmt.MAGIC.decode()}`" in PAGE
    assert f"The version is {fmt.VERSION}." in PAGE
    assert f"{fmt.FILE_BYTES_MIN >> 10} KiB for a database's first segment" in PAGE
    assert f"up to {fmt.FILE_BYTES_MAX >> 20} MiB" in PAGE
    assert f"Pages are {PAGE_SIZE_MIN} to {PAGE_SIZE_MAX} bytes" in PAGE
    assert f"A page costs {fmt.ENTRY_BYTES + fmt.FRAME_HEAD_BYTES} bytes more" in PAGE
    assert ("image", str(fmt.FRAME_HEAD_BYTES), "page size") in fields("frame field")
    assert f"{crc64(b'123456789'):x}" in PAGE
    assert ZERO == 1


def test_the_format_pages_example_is_what_the_code_writes_and_reads() -> None:
    segment = header()
    encoded = encode(segment, 0, EXAMPLE_PAGES, db_size=5, durable_upto_lsn=4710, commit_ms=1_700_000_000_123)
    entries = entries_of(segment, parse_heads(encoded.heads)).tobytes()
    file = bytearray(segment.geometry.file_bytes)
    file[:HEADER_BYTES] = segment.encode()
    file[HEADER_BYTES : HEADER_BYTES + len(entries)] = entries
    for offset, piece in encoded.pieces:
        file[offset : offset + len(piece)] = piece
    assert len(file) == 1312
    dump = example()
    assert len(dump) == 10 + 4 + 4
    assert {offset: bytes(file[offset : offset + 16]) for offset in dump} == dump
    assert segment.encode() == bytes.fromhex(GOLDEN_HEADER)
    assert entries == bytes.fromhex(GOLDEN_ENTRIES)
    assert decode_header(bytes(file), "x", db_id=7, segment_id=31) == segment
    commit = check_frame(segment, 1, file[0x2E0:])
    assert commit is not None
    assert (commit.page, commit.db_size, commit.lsn, commit.prev_lsn, commit.prev_segment) == (0, 5, 4712, 4200, 30)
    assert (commit.durable_upto_lsn, commit.commit_ms) == (4710, 1_700_000_000_123)


def test_the_seed_is_the_headers_checksum_and_the_frames_number() -> None:
    segment = header()
    entries = entries_of(segment, parse_heads(encode(segment, 0, EXAMPLE_PAGES, db_size=5).heads)).tobytes()
    assert segment.crc64 == crc64(segment.encode()[:HEADER_CHECKED_BYTES])
    for number in (0, 1):
        entry = entries[48 * number : 48 * number + 48]
        assert crc64(entry[:40], segment.crc64 ^ number) == int.from_bytes(entry[40:], "little")


# ── geometry and sizes ────────────────────────────────────────────────────────────────────────────────────────────────
@given(page_size=st.sampled_from(PAGE_SIZES), file_bytes=st.integers(HEADER_BYTES + 112 + 512, 40 << 20))
def test_a_geometry_fills_the_file_without_gaps(page_size: int, file_bytes: int) -> None:
    smallest = HEADER_BYTES + 112 + page_size
    if file_bytes < smallest:
        with pytest.raises(OutOfRange):
            Geometry.fitting(page_size=page_size, file_bytes=file_bytes)
        return
    geometry = Geometry.fitting(page_size=page_size, file_bytes=file_bytes)
    assert geometry.file_bytes <= file_bytes < geometry.file_bytes + 112 + page_size
    assert geometry.entry_offset(0) == HEADER_BYTES
    assert geometry.entry_offset(geometry.capacity) == geometry.frame_offset(0) == geometry.frames_offset
    assert geometry.frame_offset(1) - geometry.frame_offset(0) == geometry.stride == 64 + page_size
    assert pickle.loads(pickle.dumps(geometry)) == geometry


@pytest.mark.parametrize(("page_size", "capacity"), [(512, 420), (4096, 62), (65536, 3)])
def test_number_of_frames_of_the_first_segment(page_size: int, capacity: int) -> None:
    assert Geometry.fitting(page_size=page_size, file_bytes=fmt.FILE_BYTES_MIN).capacity == capacity


@pytest.mark.parametrize("page_size", [-112, 0, 1, 256, 513, 4095, 131072])
def test_only_powers_of_two_within_limits_are_page_sizes(page_size: int) -> None:
    with pytest.raises(OutOfRange):
        Geometry(page_size, 10)
    with pytest.raises(OutOfRange):
        Geometry.fitting(page_size=page_size, file_bytes=1 << 20)


@pytest.mark.parametrize("capacity", [-1, 0, 1 << 32])
def test_a_capacity_fits_its_field(capacity: int) -> None:
    with pytest.raises(OutOfRange):
        Geometry(512, capacity)


def test_segments_double_up_to_the_largest() -> None:
    sizes = [next_file_bytes()]
    while len(sizes) < 9:
        sizes.append(next_file_bytes(sizes[-1]))
    assert [size >> 10 for size in sizes] == [256, 512, 1024, 2048, 4096, 8192, 16384, 16384, 16384]
    assert next_file_bytes(256 << 10, wanted=100) == 512 << 10
    assert next_file_bytes(256 << 10, wanted=3 << 20) == 4 << 20
    assert next_file_bytes(wanted=1 << 40) == fmt.FILE_BYTES_MAX


# ── header ────────────────────────────────────────────────────────────────────────────────────────────────────────────
@given(
    page_size=st.sampled_from(PAGE_SIZES),
    capacity=st.integers(1, 2**32 - 1),
    db_id=st.integers(1, 2**32 - 1),
    segment_id=st.integers(1, 2**32 - 1),
    first_lsn=st.integers(1, 2**63),
    salt=st.integers(0, 2**64 - 1),
    created_at_ms=st.integers(0, 2**64 - 1),
)
def test_headers_round_trip(
    page_size: int, capacity: int, db_id: int, segment_id: int, first_lsn: int, salt: int, created_at_ms: int
) -> None:
    written = SegmentHeader(
        geometry=Geometry(page_size, capacity),
        db_id=db_id,
        segment_id=segment_id,
        first_lsn=first_lsn,
        salt=salt,
        created_at_ms=created_at_ms,
    )
    data = written.encode()
    assert len(data) == HEADER_BYTES
    assert decode_header(data, "x", db_id=db_id, segment_id=segment_id) == written
    assert pickle.loads(pickle.dumps(written)) == written


@pytest.mark.parametrize(
    "invalid",
    [
        {"db_id": 0},
        {"db_id": 1 << 32},
        {"segment_id": 0},
        {"first_lsn": 0},
        {"first_lsn": 2**64 - 2},
        {"salt": 1 << 64},
        {"created_at_ms": -1},
    ],
)
def test_a_header_that_cannot_be_written_is_refused(invalid: dict[str, int]) -> None:
    valid = {"db_id": 7, "segment_id": 31, "first_lsn": 4711, "salt": 1, "created_at_ms": 0}
    with pytest.raises(OutOfRange):
        SegmentHeader(geometry=Geometry(512, 2), **(valid | invalid))


@given(position=st.integers(0, HEADER_BYTES - 1), flip=st.integers(1, 255))
def test_any_changed_byte_of_a_header_is_detected(position: int, flip: int) -> None:
    data = bytearray(header().encode())
    data[position] ^= flip
    with pytest.raises(Corruption) as caught:
        decode_header(data, "some/path")
    assert caught.value.where["path"] == "some/path"
    assert "quire verify" in caught.value.hint


@given(data=st.binary(max_size=100))
def test_any_bytes_are_refused_as_a_header_without_a_crash(data: bytes) -> None:
    with pytest.raises(Corruption):
        decode_header(data, "x")


def checked(*values: object) -> bytes:
    body = HEADER.pack(*values, 0)[:HEADER_CHECKED_BYTES]
    return body + crc64(body).to_bytes(8, "little")


def test_a_newer_version_is_refused_as_such() -> None:
    with pytest.raises(FormatTooNew):
        decode_header(checked(fmt.MAGIC, 3, 0, 512, 7, 31, 2, 0, 4711, 1, 0), "x")


@pytest.mark.parametrize(
    "values", [(513, 7, 31, 2, 4711), (512, 0, 31, 2, 4711), (512, 7, 31, 0, 4711), (512, 7, 31, 2, 0)]
)
def test_a_header_with_a_good_checksum_and_impossible_fields_is_corrupt(values: tuple[int, ...]) -> None:
    page_size, db_id, segment_id, capacity, first_lsn = values
    with pytest.raises(Corruption):
        decode_header(checked(fmt.MAGIC, 1, 0, page_size, db_id, segment_id, capacity, 0, first_lsn, 1, 0), "x")


def test_reserved_fields_are_ignored_but_checked() -> None:
    """A header with reserved fields in use has another checksum, and its frames have other seeds."""
    data = checked(fmt.MAGIC, 1, 9, 512, 7, 31, 2, 9, 4711, 1, 0)
    decoded = decode_header(data, "x")
    assert decoded.crc64 == int.from_bytes(data[56:], "little")
    assert decoded.first_lsn == 4711


@pytest.mark.parametrize("expected", [{"db_id": 8}, {"segment_id": 30}, {"db_id": 31, "segment_id": 7}])
def test_a_segment_under_the_name_of_another_is_corrupt(expected: dict[str, int]) -> None:
    with pytest.raises(Corruption) as caught:
        decode_header(header().encode(), "x", **expected)
    assert caught.value.where["segment_id"] == 31


# ── frames ────────────────────────────────────────────────────────────────────────────────────────────────────────────
@given(
    page_size=st.sampled_from(PAGE_SIZES),
    frame_no=st.integers(0, 3),
    fills=st.lists(st.one_of(st.none(), st.integers(0, 255)), min_size=1, max_size=5),
    db_size=st.integers(0, 2**32 - 1),
    commit_ms=st.integers(0, 2**64 - 1),
)
def test_every_frame_is_valid_at_its_position_and_has_what_was_written(
    page_size: int, frame_no: int, fills: list[int | None], db_size: int, commit_ms: int
) -> None:
    segment = header(page_size, 8)
    images = [None if fill is None else bytes([fill]) * page_size for fill in fills]
    pages: list[PageWrite] = [(2**32 - 1 - i, image, 2**64 - 1, i) for i, image in enumerate(images)]
    encoded = encode(segment, frame_no, pages, db_size=db_size, durable_upto_lsn=4710, commit_ms=commit_ms)
    assert (encoded.first_frame, encoded.frame_count) == (frame_no, len(pages))
    assert encoded.last_lsn == 4711 + frame_no + len(pages) - 1
    entries = entries_of(segment, parse_heads(encoded.heads)).tobytes()
    data = bytearray(b"\xee" * segment.geometry.file_bytes)  # what a previous use of the file may have left
    for offset, piece in encoded.pieces:
        data[offset : offset + len(piece)] = piece
    for i, image in enumerate(images):
        number = frame_no + i
        start = segment.geometry.frame_offset(number)
        head = check_frame(segment, number, data[start : start + segment.geometry.stride])
        last = i == len(images) - 1
        assert head is not None
        assert (head.page, head.lsn, head.prev_lsn, head.prev_segment) == (
            pages[i][0],
            4711 + number,
            2**64 - 1,
            i,
        )
        assert head.db_size == (db_size if last else 0)
        promised = (4710, commit_ms) if last and db_size else (0, 0)
        assert (head.durable_upto_lsn, head.commit_ms) == promised
        assert bool(head.flags & ZERO) is (image is None)
        if image is not None:
            assert data[start + 64 : start + 64 + page_size] == image
        entry = ENTRY.unpack_from(entries, 48 * i)
        assert entry[:6] == head[:6]
        assert entry[6] == head.crc64


@given(
    frame_no=st.integers(0, 1),
    page=st.integers(0, 2**32 - 1),
    prev=st.tuples(st.integers(0, 2**64 - 1), st.integers(0, 2**32 - 1)),
    db_size=st.integers(0, 2**32 - 1),
    durable=st.integers(0, 4710),
    commit_ms=st.integers(0, 2**64 - 1),
    image=st.binary(min_size=512, max_size=512),
)
def test_a_single_page_is_encoded_as_one_of_several(
    frame_no: int, page: int, prev: tuple[int, int], db_size: int, durable: int, commit_ms: int, image: bytes
) -> None:
    """`encode_one` is `encode` without its loop."""
    segment, write = header(), (page, image, *prev)
    expected = encode(segment, frame_no, [write], db_size=db_size, durable_upto_lsn=durable, commit_ms=commit_ms)
    head, frame = encode_one(segment, frame_no, write, db_size, durable, commit_ms)
    assert (head, [(segment.geometry.frame_offset(frame_no), frame)]) == (expected.heads, expected.pieces)


@pytest.mark.parametrize(("frame_no", "page", "size"), [(2, 1, 512), (-1, 1, 512), (0, 1, 511), (0, 2**32, 512)])
def test_a_single_page_is_refused_as_one_of_several(frame_no: int, page: int, size: int) -> None:
    with pytest.raises(InvalidInput if size != 512 else OutOfRange):
        encode_one(header(), frame_no, (page, bytes(size), 0, 0), 1, 0, 0)


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_the_image_of_a_zero_frame_is_ignored(page_size: int) -> None:
    segment = header(page_size, 2)
    encoded = encode(segment, 1, [(3, None, 0, 0)], db_size=4)
    ((offset, piece),) = encoded.pieces
    assert offset == segment.geometry.frame_offset(1)
    assert len(piece) == (64 if page_size >= fmt.GAP_BYTES else 64 + page_size)
    for garbage in (b"\x00", b"\xff"):
        head = check_frame(segment, 1, piece[:64] + garbage * page_size)
        assert head is not None
        assert head.page == 3


def test_large_zero_pages_leave_gaps_and_small_ones_do_not() -> None:
    large, small = b"\x01" * fmt.GAP_BYTES, b"\x01" * (fmt.GAP_BYTES // 2)
    for image, pieces in ((large, 3), (small, 1)):
        pages: list[PageWrite] = [(0, image, 0, 0), (1, None, 0, 0), (2, None, 0, 0), (3, image, 0, 0)]
        assert len(encode(header(len(image), 4), 0, pages, db_size=4).pieces) == pieces


@given(
    kind=st.sampled_from(["salt", "db_id", "segment_id", "first_lsn", "frame_no"]), zero=st.booleans(), data=st.data()
)
def test_a_frame_is_valid_at_no_other_position(kind: str, zero: bool, data: st.DataObject) -> None:
    values = {"salt": 5, "db_id": 7, "segment_id": 31, "first_lsn": 4711}
    segment = SegmentHeader(geometry=Geometry(512, 9), **values)
    ((_, piece),) = encode(segment, 4, [(3, None if zero else bytes(512), 0, 0)], db_size=4).pieces
    assert check_frame(segment, 4, piece) is not None
    if kind == "frame_no":
        elsewhere = data.draw(st.integers(0, 8).filter(lambda number: number != 4))
        assert check_frame(segment, elsewhere, piece) is None
    else:
        values[kind] = data.draw(st.integers(1, 2**32 - 1).filter(lambda value: value != values[kind]))
        assert check_frame(SegmentHeader(geometry=Geometry(512, 9), **values), 4, piece) is None


@given(position=st.integers(0, 64 + 511), flip=st.integers(1, 255), zero=st.booleans())
def test_any_changed_byte_of_a_frame_is_detected(position: int, flip: int, zero: bool) -> None:
    segment = header()
    ((_, piece),) = encode(segment, 1, [(3, None if zero else b"\x07" * 512, 0, 0)], db_size=4).pieces
    damaged = bytearray(piece)
    damaged[position] ^= flip
    good = check_frame(segment, 1, damaged) is not None
    assert good is (zero and position >= 64)


def test_a_frame_of_another_length_is_not_a_frame() -> None:
    ((_, piece),) = encode(header(), 0, [(3, b"\x07" * 512, 0, 0)], db_size=4).pieces
    for size in (0, 10, 63, 64, 575):
        assert check_frame(header(), 0, piece[:size]) is None


def test_any_buffer_is_an_image() -> None:
    image = bytes(range(256)) * 2
    expected = encode(header(), 0, [(3, image, 0, 0)], db_size=4)
    for buffer in (bytearray(image), memoryview(image), memoryview(b"x" + image)[1:]):
        assert encode(header(), 0, [(3, buffer, 0, 0)], db_size=4) == expected


# ── what cannot be encoded ────────────────────────────────────────────────────────────────────────────────────────────
@pytest.mark.parametrize(("frame_no", "count"), [(0, 0), (0, 3), (1, 2), (2, 1), (-1, 1)])
def test_transactions_that_do_not_fit_are_refused(frame_no: int, count: int) -> None:
    pages: list[PageWrite] = [(page, None, 0, 0) for page in range(count)]
    with pytest.raises(OutOfRange):
        encode(header(), frame_no, pages, db_size=4)
    with pytest.raises(OutOfRange):
        check_pages(header(), frame_no, pages)


@pytest.mark.parametrize("size", [0, 511, 513, 4096])
def test_images_of_another_size_are_refused(size: int) -> None:
    pages: list[PageWrite] = [(0, None, 0, 0), (77, bytes(size), 0, 0)]
    for refuse in (lambda: encode(header(), 0, pages, db_size=4), lambda: check_pages(header(), 0, pages)):
        with pytest.raises(InvalidInput) as caught:
            refuse()
        assert caught.value.where == {"page": 77, "size": size, "page_size": 512}


@pytest.mark.parametrize(
    "page", [(-1, None, 0, 0), (1 << 32, None, 0, 0), (0, None, 1 << 64, 0), (0, None, 0, 1 << 32), (0, None, -1, 0)]
)
def test_numbers_that_do_not_fit_their_fields_are_refused(page: PageWrite) -> None:
    with pytest.raises(OutOfRange):
        encode(header(), 0, [page], db_size=4)


def test_commit_fields_that_do_not_fit_are_refused() -> None:
    for invalid in ({"db_size": 1 << 32}, {"db_size": -1}, {"db_size": 4, "commit_ms": 1 << 64}):
        with pytest.raises(OutOfRange):
            encode(header(), 0, [(0, None, 0, 0)], **invalid)


def test_a_frame_may_not_prove_its_own_durability() -> None:
    with pytest.raises(AssertionError):
        encode(header(), 0, [(0, None, 0, 0)], db_size=4, durable_upto_lsn=4711)
