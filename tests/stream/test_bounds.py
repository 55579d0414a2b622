"""Crafted bytes with valid checksums: no decoder of a stream's files and objects allocates more than is declared,
crashes, or raises an undocumented error.
"""

from __future__ import annotations

import struct
import tracemalloc
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path

import pytest
import zstandard
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from quire.core.errors import Corruption, FormatTooNew
from quire.durable.checksums import crc64
from quire.durable.names import Tier
from quire.stream import segment as segment_format
from quire.stream import warm
from quire.stream.mlog_format import RECORD, ChunkFacts, new_header
from quire.stream.mlog_index import ManifestIndex
from quire.stream.mlog_reader import LogPosition, load_chunk
from quire.stream.mlog_snapshot import CHECKSUM_BYTES, HEADER_BYTES, decode_snapshot, encode_snapshot
from quire.stream.mlog_tier2 import LogObjects
from quire.stream.segment import (
    BLOCK,
    BLOCK_HEAD_BYTES,
    NextBlock,
    RecordBlock,
    StreamSegmentHeader,
    body_of,
    encode_into,
    is_body_good,
    scan,
)
from quire.stream.spans import spans_of
from quire.stream.warm import CHECKED_BYTES, FOOTER, FOOTER_BYTES, ROW, ROW_BYTES, compress, reader_of
from tests.stream.streams import StreamHarness

MIB = 1 << 20
HEADER_OF = StreamSegmentHeader.decode(StreamSegmentHeader(7, 3, 1000, 5, 99).encode())
EDGES = [0, 1, 7, 8, 63, 64, 2**31 - 1, 2**31, 2**32 - 1, 2**40, 2**63, 2**64 - 1]
U64 = st.one_of(st.sampled_from(EDGES), st.integers(0, 2**64 - 1))
U32 = st.one_of(st.sampled_from([each for each in EDGES if each < 2**32]), st.integers(0, 2**32 - 1))
I32 = st.one_of(st.sampled_from([-(2**31), -1, 0, 1, 2**31 - 1]), st.integers(-(2**31), 2**31 - 1))


def segment(blocks: int = 6, records: int = 3) -> bytes:
    raw, first = bytearray(HEADER_OF.encode()), 1000
    for _ in range(blocks):
        body = body_of([bytes([number]) * 50 for number in range(records)])
        out = memoryview(bytearray(body.block_bytes))
        encode_into(out, HEADER_OF.crc64, NextBlock(len(raw), first, 5, first), body, is_commit=True, running=0)
        raw += out
        first += records
    return bytes(raw)


RAW = segment()
SOUND = b"".join(compress(RAW, scan(RAW)))


def signed(raw: bytes) -> bytes:
    return raw[:CHECKED_BYTES] + crc64(raw[:CHECKED_BYTES]).to_bytes(8, "little")


def crafted(*, rows: Sequence[tuple[int, ...]], footer: dict[int, int], body: bytes = b"") -> bytes:
    """A compressed segment with valid checksums and any rows and footer."""
    table = b"".join(ROW.pack(*row) for row in rows)
    fields = list(FOOTER.unpack(SOUND[-FOOTER_BYTES:]))
    frames = SOUND[: warm.WARM_HEADER_BYTES] + body
    fields[1], fields[2], fields[3], fields[4], fields[6] = len(frames), len(frames), 0, len(rows), crc64(table)
    for index, value in footer.items():
        fields[index] = value
    return frames + table + signed(FOOTER.pack(*fields))


def read_all_of(data: bytes, raw_bytes: int | None = None) -> None:
    """Perform every operation of a reader."""
    try:
        reader = reader_of(data, "crafted", raw_bytes)
        reader.header()
        reader.dictionary()
        for number in range(reader.frames):
            reader.spans(number)
        reader.verify()
    except (Corruption, FormatTooNew):
        pass


def peak_of(work: Callable[[], None]) -> int:
    tracemalloc.start()
    try:
        work()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_the_crafted_baseline_is_valid() -> None:
    assert reader_of(SOUND, "sound", len(RAW)).verify() == crc64(RAW)


def test_a_small_object_does_not_inflate_to_gigabytes() -> None:
    """An object of 252 KB that declared 3 GiB, with valid checksums, was decompressed to that size."""
    bomb = zstandard.ZstdCompressor(level=1).compress(bytes(256 * MIB))
    small = [(0, 64, len(bomb), len(RAW), 1000, 5, crc64(bomb))]
    honest = [(0, 64, len(bomb), 256 * MIB, 1000, 5, crc64(bomb))]
    for rows in (small, honest):
        data = crafted(rows=rows, footer={}, body=bomb)

        def read(data: bytes = data) -> None:
            with pytest.raises(Corruption):
                reader_of(data, "bomb", len(RAW)).verify()
            with pytest.raises(Corruption):
                reader_of(data, "bomb").verify()

        assert peak_of(read) < 16 * MIB


def test_a_decompression_bomb_in_tier_2_is_an_error(tmp_path: Path) -> None:
    harness = StreamHarness(tmp_path)
    harness.fill(1)
    harness.stream.upload()
    harness.stream.compress()
    harness.stream.evict(warm=True)
    (sealed,) = harness.segments()
    bomb = zstandard.ZstdCompressor(level=1).compress(bytes(64 * MIB))
    row = (0, 64, len(bomb), 64 * MIB, 1, 5, crc64(bomb))
    harness.objects.put(sealed.key, crafted(rows=[row], footer={7: sealed.crc64, 5: sealed.end_record}, body=bomb))

    def read() -> None:
        with pytest.raises(Corruption):
            harness.payloads()
        with pytest.raises(Corruption):
            harness.stream.hydrate()

    assert peak_of(read) < 16 * MIB
    assert harness.on_disk(Tier.HOT) == []
    harness.stream.abandon()
    harness.manifest.close()
    harness.objects.close()


@settings(suppress_health_check=[HealthCheck.too_slow])
@given(
    rows=st.lists(st.tuples(U64, U64, U32, U32, U64, U64, U64), max_size=4),
    footer=st.dictionaries(st.sampled_from([1, 2, 3, 4, 5, 7]), U32, max_size=3),
    body=st.binary(max_size=64),
)
def test_no_table_or_footer_crashes_a_reader(rows: list[tuple[int, ...]], footer: dict[int, int], body: bytes) -> None:
    read_all_of(crafted(rows=rows, footer=footer, body=body))


@given(st.data())
def test_no_change_of_a_valid_row_crashes_a_reader(data: st.DataObject) -> None:
    row = list(ROW.unpack(SOUND[-FOOTER_BYTES - ROW_BYTES : -FOOTER_BYTES]))
    index = data.draw(st.integers(0, len(row) - 1))
    row[index] = data.draw(U32 if index in (2, 3) else U64)
    body = SOUND[warm.WARM_HEADER_BYTES : -FOOTER_BYTES - ROW_BYTES]
    read_all_of(crafted(rows=[tuple(row)], footer={}, body=body), len(RAW))


@given(st.binary(max_size=400), st.integers(0, 8))
def test_no_dictionary_crashes_a_reader(body: bytes, cut: int) -> None:
    appendix = (body + crc64(body).to_bytes(8, "little"))[cut:]
    frame = SOUND[warm.WARM_HEADER_BYTES : -FOOTER_BYTES - ROW_BYTES]
    row = (0, 64, len(frame), len(RAW), 1000, 5, crc64(frame))
    at = 64 + len(frame)
    footer = {1: at + len(appendix), 2: at, 3: len(appendix)}
    read_all_of(crafted(rows=[row], footer=footer, body=frame + appendix))


# ── blocks ────────────────────────────────────────────────────────────────────────────────────────────────────────────
def block_with(offsets: list[int], payload: bytes, count: int | None = None) -> tuple[bytes, RecordBlock]:
    """A block with valid checksums and any offsets."""
    table = struct.pack(f"<{len(offsets)}i", *offsets)
    body = table + bytes(-len(table) % 8) + payload
    records = len(offsets) - 1 if count is None else count
    head = BLOCK.pack(0x4B4C4251, 1, len(body), records, 1000, 5, 1000, crc64(body), 0, 0)[:56]
    head += crc64(head, HEADER_OF.crc64 ^ 64).to_bytes(8, "little")
    raw = head + body
    return raw + bytes(-len(raw) % 64), RecordBlock(64, 1, len(body), records, 1000, 5, 1000, crc64(body))


@given(st.lists(I32, min_size=2, max_size=200), st.binary(max_size=64))
def test_invalid_offsets_are_damage_and_never_followed(offsets: list[int], payload: bytes) -> None:
    """Arrow follows the offsets that it is given: invalid ones crashed the interpreter."""
    table = [*offsets[:-1], len(payload)]
    raw, block = block_with(table, payload)
    is_sound = table[0] == 0 and all(low <= high for low, high in pairwise(table))
    assert is_body_good(block, raw[BLOCK_HEAD_BYTES : BLOCK_HEAD_BYTES + block.body_bytes]) == is_sound
    result = spans_of(memoryview(raw), 64, HEADER_OF.crc64)
    assert (result.bad_at is None) == is_sound
    for span in result.spans:
        span.column.to_pylist()


@pytest.mark.parametrize("few", [0, 4096], ids=["with numpy", "without"])
@pytest.mark.parametrize("count", [1, 64, 65, 200])
def test_offsets_are_checked_alike_with_and_without_numpy(
    monkeypatch: pytest.MonkeyPatch, count: int, few: int
) -> None:
    """A short command that reads a block of some hundred records does not load numpy for it."""
    monkeypatch.setattr(segment_format, "FEW_OFFSETS", few)

    def is_good(offsets: list[int]) -> bool:
        raw, block = block_with(offsets, bytes(2 * count))
        return is_body_good(block, raw[BLOCK_HEAD_BYTES : BLOCK_HEAD_BYTES + block.body_bytes])

    rising = [2 * number for number in range(count + 1)]
    assert is_good(rising)
    assert not is_good([1, *rising[1:]])
    assert not any(is_good([*rising[:at], 2 * count + 1, *rising[at + 1 :]]) for at in range(1, count))


@pytest.mark.parametrize("bad", range(12))
def test_one_bad_table_among_many_small_blocks_is_found(bad: int) -> None:
    """Many small blocks, which are joined into one column."""
    raw = bytearray(segment(blocks=600, records=4))
    size = (len(raw) - 64) // 600
    at = 64 + size * (bad * 50) + BLOCK_HEAD_BYTES
    struct.pack_into("<i", raw, at + 4, 2**31 - 1)
    body = bytes(raw[at : at + struct.unpack_from("<I", raw, at - BLOCK_HEAD_BYTES + 8)[0]])
    struct.pack_into("<Q", raw, at - BLOCK_HEAD_BYTES + 40, crc64(body))
    start = at - BLOCK_HEAD_BYTES
    struct.pack_into("<Q", raw, start + 56, crc64(bytes(raw[start : start + 56]), HEADER_OF.crc64 ^ start))
    result = spans_of(memoryview(raw)[64:], 64, HEADER_OF.crc64)
    assert result.bad_at == start - 64
    assert sum(len(span.column.to_pylist()) for span in result.spans) == bad * 50 * 4


@given(st.integers(0, 2**32 - 1), st.integers(0, 2**32 - 1))
def test_no_block_head_makes_a_scan_read_beyond_the_file(body_bytes: int, count: int) -> None:
    head = BLOCK.pack(0x4B4C4251, 1, body_bytes, count, 1000, 5, 1000, 0, 0, 0)[:56]
    head += crc64(head, HEADER_OF.crc64 ^ 64).to_bytes(8, "little")
    result = scan(HEADER_OF.encode() + head + bytes(256))
    assert result.blocks == ()
    spans_of(memoryview(head + bytes(256)), 64, HEADER_OF.crc64)


# ── the manifest log ──────────────────────────────────────────────────────────────────────────────────────────────────
@settings(suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.tuples(st.integers(0, 2**16 - 1), U32, U64, st.binary(max_size=48)), min_size=1, max_size=6))
def test_no_records_crash_a_reader_of_chunks(records: list[tuple[int, int, int, bytes]]) -> None:
    body = b"".join(
        RECORD.pack(kind, 0, length % 200, segment, 0, 5, crc64(payload)) + payload
        for kind, length, segment, payload in records
    )
    body += bytes(-len(body) % 8)
    header = new_header(chunk_index=0, base_record=0, committed_len=64 + len(body), chunk_crc64=crc64(body), flags=1)
    data = header.encode() + body + ChunkFacts(header, len(records), 0).encode()
    try:
        chunk = load_chunk(data, chunk_index=0)
        ManifestIndex().fold_chunk(chunk)
        for view in chunk.records():
            view.value()
    except Corruption:
        pass


@given(st.data())
def test_no_snapshot_with_a_valid_checksum_crashes_its_decoder(data: st.DataObject) -> None:
    sound = bytearray(encode_snapshot(3, LogPosition(0, 64), ManifestIndex()))
    body = data.draw(st.binary(max_size=200))
    sound[HEADER_BYTES:-CHECKSUM_BYTES] = body
    offset = data.draw(st.integers(4, 15))
    width, at = (4, 80 + 4 * (offset - 11)) if 11 <= offset <= 14 else (8, 16)
    sound[at : at + width] = data.draw(U32).to_bytes(width, "little")
    sound[104:112] = len(sound).to_bytes(8, "little")
    sound[-CHECKSUM_BYTES:] = crc64(bytes(sound[:-CHECKSUM_BYTES])).to_bytes(8, "little")
    snapshot_id = int.from_bytes(sound[16:24], "little")
    try:
        decode_snapshot(bytes(sound), snapshot_id=snapshot_id)
    except Corruption:
        pass


def test_an_object_of_the_log_that_is_too_large_is_not_fetched(tmp_path: Path) -> None:
    harness = StreamHarness(tmp_path)
    harness.fill(1)
    harness.stream.upload()
    objects = LogObjects(harness.objects, harness.stream_id)
    harness.objects.put(objects.chunk_key(0), bytes(8 * MIB))
    with pytest.raises(Corruption, match="exceeds its maximum size"):
        objects.get_chunk(0)
    harness.stream.abandon()
    harness.manifest.close()
    harness.objects.close()
