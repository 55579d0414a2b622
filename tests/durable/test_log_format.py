"""The page about the framed log agrees with the code, byte for byte and number for number."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.core.errors import Corruption, FormatTooNew, InvalidInput, OutOfRange, WrongKind
from quire.durable import log_format
from quire.durable.checksums import crc64
from quire.durable.log_format import (
    HEADER_BYTES,
    LINK,
    LogIdentity,
    decode_header,
    encode_frames,
    encode_header,
    encode_mark,
)
from quire.durable.log_reader import scan

PAGE = (Path(__file__).parents[2] / "docs/formats/framed-log.md").read_text("utf-8")


def fields(title: str) -> list[tuple[str, str, str]]:
    """The rows of a table of the page: (field, offset, bytes)."""
    table = PAGE.split(f"| {title} | offset | bytes | meaning |")[1].split("\n\n")[0]
    return re.findall(r"^\| (\w+) \| ([^|]+) \| ([^|]+) \|", table, re.MULTILINE)


def example() -> bytes:
    return bytes.fromhex("".join(re.findall(r"^[0-9a-f]{4}  ((?:[0-9a-f]{2} ?)+)$", PAGE, re.MULTILINE)))


def test_the_header_table_of_the_page_matches_the_struct() -> None:
    offset = 0
    for _, start, size in fields("header field"):
        assert int(start) == offset
        offset += int(size)
    assert offset == log_format.HEADER.size == HEADER_BYTES
    assert [name for name, _, _ in fields("header field")] == ["magic", "version", "reserved", "kind", "salt", "link"]


def test_the_name_table_of_the_page_matches_the_struct() -> None:
    offset = HEADER_BYTES
    for _, start, size in fields("name field"):
        assert int(start) == offset
        offset += int(size)
    assert offset == HEADER_BYTES + log_format.NAME.size == log_format.NAMED_HEADER_BYTES
    assert [name for name, _, _ in fields("name field")] == ["store", "database", "reserved", "number", "link"]


def test_the_frame_table_of_the_page_matches_the_struct() -> None:
    rows = {name: (start, size) for name, start, size in fields("frame field")}
    assert rows == {
        "length": ("0", "4"),
        "tag": (str(log_format.TAG_OFFSET), "4"),
        "synced": ("8", "8"),
        "payload": (str(log_format.HEAD_BYTES), "length"),
        "link": (f"{log_format.HEAD_BYTES} + length", str(log_format.LINK_BYTES)),
    }


def test_the_numbers_of_the_page_match_the_code() -> None:
    assert PAGE.count(str(log_format.PAYLOAD_BYTES_MAX)) == 2
    assert f"`{log_format.MAGIC.decode()}`" in PAGE
    assert f"The version is {log_format.VERSION}." in PAGE
    assert f"{log_format.OVERHEAD_BYTES} bytes per record" in PAGE
    assert f"{crc64(b'123456789'):x}" in PAGE


def test_the_example_of_the_page_is_what_the_code_writes_and_reads() -> None:
    header = encode_header(b"demo", 0x0123456789ABCDEF)
    decoded = decode_header(header, "example")
    frame, link = encode_frames([b"hello"], tag=decoded.tag, link=decoded.link, synced=HEADER_BYTES)
    mark, _ = encode_mark(tag=decoded.tag, link=link, synced=HEADER_BYTES + len(frame))
    assert example() == header + frame + mark
    assert (len(header), len(frame), len(mark), len(example())) == (32, 29, 24, 85)
    contents = scan(example(), "example", kind=b"demo")
    assert contents.payloads == [b"hello"]
    assert contents.ends_with_mark
    assert contents.proven == 0x3D


@given(kind=st.binary(min_size=4, max_size=4), salt=st.integers(0, 2**64 - 1))
def test_headers_round_trip(kind: bytes, salt: int) -> None:
    header = decode_header(encode_header(kind, salt), "x", kind)
    assert (header.kind, header.salt, header.tag) == (kind, salt, salt % 2**32)


IDENTITIES = st.builds(
    LogIdentity,
    store=st.binary(min_size=16, max_size=16),
    database=st.integers(0, 2**32 - 1),
    number=st.integers(0, 2**64 - 1),
)


@given(identity=IDENTITIES, salt=st.integers(0, 2**64 - 1))
def test_headers_identify_their_log(identity: LogIdentity, salt: int) -> None:
    data = encode_header(b"demo", salt, identity)
    header = decode_header(data, "x", b"demo")
    assert (header.identity, header.salt, header.size) == (identity, salt, len(data))
    assert decode_header(encode_header(b"demo", salt), "x").identity is None


@given(identity=IDENTITIES, position=st.integers(0, log_format.NAMED_HEADER_BYTES - 1), flip=st.integers(1, 255))
def test_any_changed_byte_of_a_named_header_is_detected(identity: LogIdentity, position: int, flip: int) -> None:
    header = bytearray(encode_header(b"demo", 99, identity))
    header[position] ^= flip
    with pytest.raises(Corruption):
        decode_header(bytes(header), "x")


@given(data=st.binary(max_size=100))
def test_arbitrary_bytes_are_rejected_as_a_header(data: bytes) -> None:
    with pytest.raises(Corruption):
        decode_header(data, "x")


@given(position=st.integers(0, HEADER_BYTES - 1), flip=st.integers(1, 255))
def test_any_changed_byte_of_a_header_is_detected(position: int, flip: int) -> None:
    header = bytearray(encode_header(b"demo", 99))
    header[position] ^= flip
    with pytest.raises(Corruption):
        decode_header(bytes(header), "x")


def test_a_newer_version_is_rejected_as_such() -> None:
    body = log_format.HEADER.pack(log_format.MAGIC, log_format.VERSION + 1, 0, b"demo", 1, 0)[:-8]
    with pytest.raises(FormatTooNew):
        decode_header(body + LINK.pack(crc64(body)), "x")


def test_a_log_of_another_kind_is_rejected_as_such() -> None:
    with pytest.raises(WrongKind):
        decode_header(encode_header(b"demo", 1), "x", b"data")


def test_records_that_cannot_be_framed_are_rejected() -> None:
    with pytest.raises(OutOfRange):
        encode_frames([b"fine", b""], tag=1, link=1, synced=32)
    with pytest.raises(OutOfRange):
        encode_frames([memoryview(bytes(1)).cast("B")[:0]], tag=1, link=1, synced=32)
    with pytest.raises(OutOfRange):
        encode_frames([bytes(log_format.PAYLOAD_BYTES_MAX + 1)], tag=1, link=1, synced=32)
    with pytest.raises(InvalidInput):
        encode_header(b"toolong", 1)
    with pytest.raises(InvalidInput):
        encode_header(b"demo", 1, LogIdentity(store=b"short", database=1, number=1))
