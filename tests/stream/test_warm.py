"""The compressed segment's page and its code agree; slices are read without the rest; damage anywhere is detected."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import zstandard
from hypothesis import given

from quire.core.errors import Corruption, FormatTooNew
from quire.durable.checksums import crc64
from quire.stream import warm
from quire.stream.segment import records_of, scan
from quire.stream.warm import Dictionary, WarmReader, compress
from tests.stream.blocks import segment_of
from tests.stream.test_segment import agree, appends

PAGE = (Path(__file__).parents[2] / "docs/formats/stream-warm.md").read_text("utf-8")


def compressed(raw: bytes, dictionary: Dictionary = warm.NO_DICTIONARY) -> bytes:
    return b"".join(compress(raw, scan(raw), dictionary=dictionary))


def reader(body: bytes) -> WarmReader:
    return WarmReader(lambda offset, size: body[offset : offset + size], len(body))


def many(count: int, size: int = 1000) -> bytes:
    """A segment with many records in many blocks, some of them in several frames."""
    rng = random.Random(5)
    return segment_of([[[rng.randbytes(size // 4) * 4 for _ in range(10)]] for _ in range(count // 10)])


def test_the_tables_of_the_page_match_the_structs() -> None:
    header = "magic version flags reserved stream_id segment_id base_record raw_bytes dictionary_id frames crc64"
    agree(PAGE, "header field", warm.HEADER, header)
    agree(PAGE, "row field", warm.ROW, "raw_offset offset bytes raw_bytes first_record timestamp_ms crc64")
    footer = "magic table_offset dictionary_offset dictionary_bytes frames end_record table_crc64 raw_crc64 crc64"
    agree(PAGE, "footer field", warm.FOOTER, footer)
    assert warm.row_dtype().itemsize == warm.ROW_BYTES


@given(appends)
def test_compressed_segments_round_trip(given_appends: list[list[list[bytes]]]) -> None:
    raw = segment_of(given_appends)
    warm_reader = reader(compressed(raw))
    assert b"".join(warm_reader.raw(number) for number in range(warm_reader.frames)) == raw
    assert warm_reader.verify() == crc64(raw)
    assert (warm_reader.raw_bytes, warm_reader.end_record) == (len(raw), scan(raw).end_record)
    assert warm_reader.header() == scan(raw).header


def test_reading_a_record_fetches_the_tail_and_one_or_two_frames() -> None:
    raw = many(3000)
    body = compressed(raw)
    fetched: list[int] = []

    def read(offset: int, size: int) -> bytes:
        fetched.append(size)
        return body[offset : offset + size]

    warm_reader = WarmReader(read, len(body))
    assert warm_reader.frames > 8
    number = warm_reader.frame_with(1000 + 1777)
    records = [record for span in warm_reader.spans(number) for record in span.records()]
    (record,) = [record.payload for record in records if record.id == 2777]
    assert record == records_in(raw)[1777]
    assert len(fetched) == 3, "tail, first frame (with the header), the frame"
    assert sum(fetched) < len(body) / 2


def records_in(raw: bytes) -> list[bytes]:
    records = []
    for block in scan(raw).blocks:
        start = block.offset + 64
        records += records_of(block, raw[start : start + block.body_bytes]).to_pylist()
    return records


def test_every_frame_has_its_records_and_timestamps() -> None:
    raw = many(3000)
    warm_reader = reader(compressed(raw))
    following = 1000
    for number in range(warm_reader.frames):
        records = [record for span in warm_reader.spans(number) for record in span.records()]
        row = warm_reader.frame(number)
        assert (row.first_record, row.timestamp_ms) == (records[0].id, records[0].timestamp_ms)
        assert row.first_record == following
        following = records[-1].id + 1
        for record in (row.first_record, following - 1):
            assert warm_reader.frame_with(record) == number
        assert warm_reader.frame_at(row.timestamp_ms + 1) == number
        assert warm_reader.frame_at(row.timestamp_ms) == max(number - 1, 0), (
            "records with the same timestamp may begin in the frame before"
        )
    assert following == warm_reader.end_record


def test_a_dictionary_is_stored_in_the_file() -> None:
    rng = random.Random(1)
    words = [rng.randbytes(12) for _ in range(50)]
    samples = [b" ".join(rng.choices(words, k=12)) for _ in range(2000)]
    trained = zstandard.train_dictionary(8192, list[bytes | bytearray | memoryview](samples))
    raw = segment_of([[[sample]] for sample in samples[:50]])
    plain, learned = compressed(raw), compressed(raw, Dictionary(1, trained.as_bytes()))
    assert len(learned) - len(trained.as_bytes()) < len(plain)
    assert reader(learned).raw(0) == raw
    at = learned.index(trained.as_bytes()) + 500
    with pytest.raises(Corruption, match="dictionary"):
        reader(flipped(learned, at)).raw(0)


def flipped(body: bytes, offset: int) -> bytes:
    return body[:offset] + bytes([body[offset] ^ 1 << (offset % 8)]) + body[offset + 1 :]


def test_every_flipped_bit_is_detected() -> None:
    body = compressed(segment_of([[[b"first"], [b"append"]], [[b"second", b"2" * 300]]]))
    for offset in range(len(body)):
        with pytest.raises((Corruption, FormatTooNew)):
            reader(flipped(body, offset)).verify()


def test_a_truncated_file_is_damaged() -> None:
    body = compressed(segment_of([[[b"first"]], [[b"second", b"2" * 300]]]))
    for length in range(len(body)):
        with pytest.raises(Corruption):
            reader(body[:length])


def test_the_header_alone_identifies_the_segment() -> None:
    body = compressed(segment_of([[[b"first"]]]))
    assert warm.check_header(body) == (7, 3)
    with pytest.raises(Corruption, match="shorter"):
        warm.check_header(body[:63])
    newer = bytearray(body[:56])
    newer[8] = 2
    with pytest.raises(FormatTooNew):
        warm.check_header(newer + crc64(newer).to_bytes(8, "little"))
