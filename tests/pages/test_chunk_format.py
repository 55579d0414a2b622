"""The format page of chunks and the code agree, byte for byte and number for number; headers, trailers and frames are
checked."""

from __future__ import annotations

import math
import re
import tracemalloc
from pathlib import Path

import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from quire.core.errors import ChecksumMismatch, Corruption, FormatTooNew, InvalidInput, OutOfRange
from quire.core.ids import ArtifactKey, ArtifactKind
from quire.durable.checksums import crc64
from quire.manifest.records import Compression
from quire.pages import chunk_format as form
from quire.pages.chunk_format import (
    HEADER,
    HEADER_BYTES,
    HEADER_SIGNED_BYTES,
    PAGE_CRC,
    TRAILER_BYTES,
    ChunkIdentity,
    check_identity,
    compressor,
    decode_header,
    decode_trailer,
    encode_header,
    encode_trailer,
    pack_frame,
    unpack_frame,
)
from quire.pages.chunk_reader import GAP_BYTES, PIECE_BYTES
from quire.pages.chunk_verify import verify
from tests.pages.chunks import Blob, footer_of, frame_location, identity, image, some_pages, write_chunk

PAGE = (Path(__file__).parents[2] / "docs/formats/chunk.md").read_text("utf-8")

EXAMPLE = ChunkIdentity(
    key=ArtifactKey(origin_db_id=7, kind=ArtifactKind.DELTA, id=2, generation=9, delta_id=3),
    plan_digest=bytes(range(32)),
    covered_lsn=0x1234,
    lsn_start=0x1200,
    base_generation=5,
    page_size=512,
    pages_per_chunk=131_072,
)
EXAMPLE_PAGES = {1: b"q" * 512, 5: b"q" * 512}


def fields(title: str) -> list[tuple[str, str, str]]:
    """The rows of a table of the format page: (field, offset, bytes)."""
    table = PAGE.split(f"| {title} field | offset | bytes | meaning |")[1].split("\n\n")[0]
    return re.findall(r"^\| (\w+) \| ([^|]+) \| ([^|]+) \|", table, re.MULTILINE)


def example() -> bytes:
    return bytes.fromhex("".join(re.findall(r"^[0-9a-f]{4}  ((?:[0-9a-f]{2} ?)+)$", PAGE, re.MULTILINE)))


@pytest.mark.parametrize(
    ("title", "size", "names"),
    [
        (
            "header",
            form.HEADER_BYTES,
            "magic version kind compression page_size pages_per_chunk origin_db_id chunk_id generation delta_id reserved"
            " base_generation lsn_start covered_lsn plan_digest crc64",
        ),
        ("frame entry", form.FRAME_ENTRY_BYTES, "offset length crc64"),
        (
            "trailer",
            form.TRAILER_BYTES,
            "footer_offset footer_bytes version reserved footer_crc64 crc64 magic",
        ),
    ],
)
def test_a_table_of_the_format_page_matches_the_struct(title: str, size: int, names: str) -> None:
    end = 0
    for _, start, length in fields(title):
        assert int(start) == end
        end += int(length)
    assert end == size
    assert [name for name, _, _ in fields(title)] == names.split()
    assert {"header": form.HEADER, "frame entry": form.FRAME, "trailer": form.TRAILER}[title].size == size


def test_the_format_pages_footer_table_matches_the_struct() -> None:
    rows = fields("footer")
    head = [(name, int(start), int(size)) for name, start, size in rows[:5]]
    assert [name for name, _, _ in head] == ["header", "page_count", "frame_count", "bitmap_bytes", "reserved"]
    assert [start for _, start, _ in head] == [0, 96, 100, 104, 108]
    assert sum(size for _, _, size in head) == form.FOOTER.size == form.FOOTER_HEAD_BYTES
    assert rows[5:] == [
        ("bitmap", str(form.FOOTER_HEAD_BYTES), "bitmap_bytes"),
        ("frames", f"{form.FOOTER_HEAD_BYTES} + bitmap_bytes", f"{form.FRAME_ENTRY_BYTES} × frame_count"),
        ("page_crcs", "after the frames", f"{form.PAGE_CRC_BYTES} × page_count"),
    ]


def test_the_format_pages_numbers_match_the_code() -> None:
    assert f"`{form.MAGIC.decode()}`" in PAGE
    assert f"`{form.END_MAGIC.decode()}`" in PAGE
    assert f"The version is {form.VERSION}." in PAGE
    assert f"zstd level {form.LEVEL} by default" in PAGE
    assert f"the last {form.TAIL_BYTES} bytes ({form.TAIL_BYTES // 1024} KiB)" in PAGE
    assert f"at most {form.BITMAP_BYTES_MAX}" in PAGE
    assert f"r % {form.PAGES_PER_FRAME} of frame r // {form.PAGES_PER_FRAME}" in PAGE
    assert f"up to {math.ceil(form.FOOTER_BYTES_MAX * 10 / (1 << 20)) / 10} MiB" in PAGE
    assert f"{form.FRAME_BYTES_MAX >> 20} MiB for a frame" in PAGE
    assert f"{GAP_BYTES >> 10} KiB apart are fetched together, {PIECE_BYTES >> 20} MiB at a time" in PAGE
    assert f"{crc64(b'123456789'):x}" in PAGE
    full, info = write_chunk(dict.fromkeys(range(16_384), bytes(4096)), identity(4096))
    assert len(info.bitmap) == 15
    assert f"{len(footer_of(full)):,} bytes with pages of 4 KiB" in PAGE


def test_the_format_pages_example_is_read_by_the_code() -> None:
    reader = Blob(example()).reader()
    assert reader.identity == EXAMPLE
    assert dict(reader.iter_pages()) == EXAMPLE_PAGES
    assert reader.footer.offset == 0x73
    assert (reader.footer.frame(0).offset, reader.footer.frame(0).length) == (0x60, 19)
    assert not list(verify(Blob(example()).read, len(example())))
    assert (len(footer_of(example())), len(example())) == (164, 319)


def test_the_format_pages_example_is_what_the_code_writes() -> None:
    written, _ = write_chunk(EXAMPLE_PAGES, EXAMPLE)
    if zstandard.ZSTD_VERSION != (1, 5, 7):
        pytest.skip("another zstd version may compress the frame differently; reading the example is tested anyway")
    assert written == example()


# ── header and trailer ────────────────────────────────────────────────────────────────────────────────────────────────
identities = st.builds(
    ChunkIdentity,
    key=st.builds(
        ArtifactKey,
        origin_db_id=st.integers(1, 2**32 - 1),
        kind=st.just(ArtifactKind.DELTA),
        id=st.integers(0, 2**32 - 1),
        generation=st.integers(0, 2**32 - 1),
        delta_id=st.integers(0, 2**16 - 1),
    ),
    plan_digest=st.binary(min_size=32, max_size=32),
    covered_lsn=st.integers(2**32, 2**64 - 1),
    lsn_start=st.integers(0, 2**32),
    base_generation=st.integers(0, 2**32 - 1),
    page_size=st.sampled_from([512, 4096, 65_536]),
    pages_per_chunk=st.integers(1, 1024),
)


@given(chunk_identity=identities, compression=st.sampled_from(Compression))
def test_headers_round_trip(chunk_identity: ChunkIdentity, compression: Compression) -> None:
    header = encode_header(chunk_identity, compression)
    assert len(header) == HEADER_BYTES
    assert decode_header(header, "x") == (chunk_identity, compression)


@given(position=st.integers(0, HEADER_BYTES - 1), flip=st.integers(1, 255))
def test_any_changed_byte_of_a_header_is_detected(position: int, flip: int) -> None:
    header = bytearray(encode_header(EXAMPLE, Compression.ZSTD))
    header[position] ^= flip
    with pytest.raises(Corruption) as raised:
        decode_header(bytes(header), "the object")
    assert raised.value.where["object"] == "the object"


@given(data=st.binary(max_size=120))
def test_any_bytes_are_refused_as_a_header_or_a_trailer(data: bytes) -> None:
    with pytest.raises(Corruption):
        decode_header(data, "x")
    with pytest.raises(Corruption):
        decode_trailer(data, 1000, "x")


def signed_header(**changes: int) -> bytes:
    names = "magic version kind compression page_size pages origin slot generation delta reserved base start covered digest crc"
    values = dict(zip(names.split(), HEADER.unpack(encode_header(EXAMPLE, Compression.ZSTD)), strict=True)) | changes
    signed = HEADER.pack(*values.values())[:HEADER_SIGNED_BYTES]
    return signed + PAGE_CRC.pack(crc64(signed))


@pytest.mark.parametrize(
    "changes",
    [
        {"kind": 2},
        {"kind": 0},
        {"compression": 9},
        {"page_size": 0},
        {"page_size": 256},
        {"page_size": 1000},
        {"page_size": 2**31},
        {"pages": 0},
        {"pages": 131_073},
        {"pages": 2**32 - 1},
        {"origin": 0},
        {"start": 0x1235},
        {"version": 0},
    ],
    ids=str,
)
def test_an_impossible_header_is_refused_although_its_checksum_is_valid(changes: dict[str, int]) -> None:
    with pytest.raises(Corruption):
        decode_header(signed_header(**changes), "x")


def test_a_newer_version_is_refused_as_such() -> None:
    with pytest.raises(FormatTooNew):
        decode_header(signed_header(version=2), "x")
    trailer = bytearray(encode_trailer(96, bytes(112)))
    trailer[12] = 2
    trailer[24:32] = PAGE_CRC.pack(crc64(bytes(trailer[:24])))
    with pytest.raises(FormatTooNew):
        decode_trailer(bytes(trailer), 96 + 112 + TRAILER_BYTES, "x")


def test_reserved_fields_are_ignored() -> None:
    assert decode_header(signed_header(reserved=77), "x") == (EXAMPLE, Compression.ZSTD)


@pytest.mark.parametrize(
    "invalid",
    [
        {"key": ArtifactKey(7, ArtifactKind.WAL, 2, 9)},
        {"key": ArtifactKey(7, ArtifactKind.BASE, 2, 9, 3)},
        {"key": ArtifactKey(7, ArtifactKind.BASE, 2, 9)},
        {"key": ArtifactKey(0, ArtifactKind.DELTA, 2, 9, 3)},
        {"key": ArtifactKey(7, ArtifactKind.DELTA, 2, 9, 65_536)},
        {"key": ArtifactKey(7, ArtifactKind.DELTA, 2**32, 9)},
        {"plan_digest": b"short"},
        {"page_size": 513},
        {"page_size": 131_072},
        {"pages_per_chunk": 0},
        {"pages_per_chunk": 131_073},
        {"lsn_start": 0x1235},
        {"covered_lsn": 2**64},
        {"base_generation": -1},
    ],
    ids=str,
)
def test_an_impossible_identity_is_refused(invalid: dict[str, object]) -> None:
    values = {name: getattr(EXAMPLE, name) for name in ChunkIdentity.__dataclass_fields__} | invalid
    with pytest.raises(InvalidInput):
        check_identity(ChunkIdentity(**values))


@pytest.mark.parametrize(("offset", "size"), [(95, 247), (96, 249), (2**60, 248), (96, 10**9)])
def test_a_trailer_whose_footer_does_not_fit_the_object_is_refused(offset: int, size: int) -> None:
    with pytest.raises(Corruption):
        decode_trailer(encode_trailer(offset, bytes(112)), size, "x")


def test_a_trailer_that_claims_a_huge_footer_is_refused() -> None:
    too_long = bytes(form.FOOTER_BYTES_MAX + 1)
    with pytest.raises(Corruption):
        decode_trailer(encode_trailer(96, too_long), 96 + len(too_long) + TRAILER_BYTES, "x")


# ── frames ────────────────────────────────────────────────────────────────────────────────────────────────────────────
@given(flavours=st.lists(st.integers(0, 40), min_size=1, max_size=16), page_size=st.sampled_from([512, 4096]))
def test_frames_round_trip_and_are_never_longer_than_their_pages(flavours: list[int], page_size: int) -> None:
    plain = b"".join(image(page_size, flavour) for flavour in flavours)
    for packer in (None, compressor()):
        stored = pack_frame(memoryview(plain), packer)
        assert len(stored) <= len(plain)
        assert unpack_frame(stored, frame_location(stored, len(plain)), "x") == plain


def test_a_frame_that_claims_gigabytes_is_refused_before_they_are_allocated() -> None:
    bomb = zstandard.ZstdCompressor(level=3).compress(bytes(1 << 28))
    assert len(bomb) < 8192 * 16
    tiny_bomb = b"\x28\xb5\x2f\xfd\xe0" + (1 << 40).to_bytes(8, "little") + b"\x01\x00\x00"
    tracemalloc.start()
    for stored in (bomb, tiny_bomb):
        with pytest.raises(Corruption):
            unpack_frame(stored, frame_location(stored, 8192 * 16), "x")
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1 << 20


def test_a_frame_that_needs_a_huge_window_is_refused() -> None:
    """Its size is correct, but it is incomplete; zstd would allocate memory for the window."""
    frame = b"\x28\xb5\x2f\xfd\x80\x80" + (8192 * 16).to_bytes(4, "little") + b"\x00\x00\x00"
    assert zstandard.get_frame_parameters(frame).window_size == 1 << 26
    with pytest.raises(Corruption, match="too much memory"):
        unpack_frame(frame, frame_location(frame, 8192 * 16), "x")


@pytest.mark.parametrize(
    "stored",
    [
        zstandard.ZstdCompressor(write_content_size=False).compress(b"q" * 1024),
        zstandard.ZstdCompressor().compress(b"q" * 1023),
        zstandard.ZstdCompressor().compress(b"q" * 1024) + b"more",
        zstandard.ZstdCompressor().compress(b"q" * 1024)[:-2],
        b"not zstd at all",
        b"\x50\x2a\x4d\x18\x04\x00\x00\x00skip",
    ],
    ids=["no size", "another size", "bytes behind it", "cut", "garbage", "skippable"],
)
def test_a_frame_that_does_not_unpack_to_its_pages_is_corrupt(stored: bytes) -> None:
    with pytest.raises(Corruption) as raised:
        unpack_frame(stored, frame_location(stored, 1024), "demo", page=9)
    assert raised.value.where["frame"] == 3
    assert raised.value.where["page"] == 9


def test_a_frame_is_compared_before_it_is_unpacked() -> None:
    stored = pack_frame(memoryview(some_pages(512, [0])[0]), None)
    location = frame_location(stored, 512)
    with pytest.raises(ChecksumMismatch):
        unpack_frame(stored[:-1] + bytes([stored[-1] ^ 1]), location, "x")
    with pytest.raises(ChecksumMismatch):
        unpack_frame(stored[:-1], location, "x")


def test_offsets_beyond_the_chunk_are_refused() -> None:
    reader = Blob(example()).reader()
    for offset in (-1, 131_072, 2**40):
        with pytest.raises(OutOfRange):
            reader.read_page(offset)
        with pytest.raises(OutOfRange):
            dict(reader.iter_pages([1, offset]))
