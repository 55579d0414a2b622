"""Objects of an archive: what is written is read back, and any change is detected."""

from __future__ import annotations

import re
import struct
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.archive import format as f
from quire.core.errors import Corruption, FormatTooNew
from quire.durable.checksums import crc64

STORE = "1f0c0c1e-7d4e-4c5e-9f50-0d6d1c3b2a19"
NUMBERS = st.integers(0, 2**64 - 1)
PATHS = st.text("abc/.0", min_size=1, max_size=20)
ROWS = st.lists(st.tuples(st.binary(max_size=9), st.binary(max_size=30)), max_size=3)
EVENTS: st.SearchStrategy[f.AnyEvent] = st.one_of(
    st.builds(f.CreateEvent, NUMBERS, PATHS),
    st.builds(f.WriteEvent, NUMBERS, NUMBERS, st.binary(max_size=60)),
    st.builds(f.ZeroEvent, NUMBERS, NUMBERS, NUMBERS),
    st.builds(f.TruncateEvent, NUMBERS, NUMBERS),
    st.builds(f.ReserveEvent, NUMBERS, NUMBERS),
    st.builds(f.RenameEvent, NUMBERS, PATHS, PATHS),
    st.builds(f.LinkEvent, NUMBERS, PATHS),
    st.builds(f.RemoveEvent, NUMBERS, PATHS),
    st.builds(f.ArtifactEvent, NUMBERS, PATHS, PATHS, NUMBERS, st.binary(min_size=32, max_size=32)),
    st.builds(f.CommitEvent, st.tuples(st.tuples(PATHS, ROWS, st.lists(st.binary(max_size=9), max_size=3)))),
    st.builds(f.BaseEvent, NUMBERS, st.tuples(st.tuples(PATHS, NUMBERS, st.binary(max_size=32)))),
    st.builds(f.DirectoryEvent, PATHS),
)
HEADERS = st.builds(
    f.Header,
    kind=st.sampled_from(f.Kind),
    position=st.builds(f.Position, st.integers(0, 2**32 - 1), NUMBERS),
    parent=st.builds(f.Position, st.integers(0, 2**32 - 1), NUMBERS),
    parent_digest=st.binary(min_size=32, max_size=32),
    at_ms=NUMBERS,
    restorable=NUMBERS,
    base=NUMBERS,
    successor=st.integers(0, 2**32 - 1),
)


@given(HEADERS, st.lists(EVENTS, max_size=8))
def test_objects_round_trip(header: f.Header, events: list[f.AnyEvent]) -> None:
    data = f.encode_object(header, events)
    decoded_header, decoded_events = f.decode_object(data, "key")
    assert decoded_events == events
    assert (decoded_header.kind, decoded_header.position, decoded_header.parent, decoded_header.parent_digest) == (
        header.kind,
        header.position,
        header.parent,
        header.parent_digest,
    )
    assert (decoded_header.at_ms, decoded_header.restorable, decoded_header.base, decoded_header.successor) == (
        header.at_ms,
        header.restorable,
        header.base,
        header.successor,
    )
    assert f.decode_header(data[: f.HEADER_BYTES], "key") == decoded_header


@given(st.data(), st.lists(EVENTS, min_size=1, max_size=4))
def test_a_changed_byte_is_detected(data: st.DataObject, events: list[f.AnyEvent]) -> None:
    header = f.Header(kind=f.Kind.LOG, position=f.Position(1, 2), parent=f.Position(1, 1), at_ms=3)
    encoded = bytearray(f.encode_object(header, events))
    offset = data.draw(st.integers(0, len(encoded) - 1))
    encoded[offset] ^= data.draw(st.integers(1, 255))
    with pytest.raises((Corruption, FormatTooNew)):
        f.decode_object(bytes(encoded), "key")


@given(st.data(), st.lists(EVENTS, min_size=1, max_size=4))
def test_a_truncated_object_is_detected(data: st.DataObject, events: list[f.AnyEvent]) -> None:
    header = f.Header(kind=f.Kind.LOG, position=f.Position(1, 2), parent=f.Position(1, 1), at_ms=3)
    encoded = f.encode_object(header, events)
    with pytest.raises(Corruption):
        f.decode_object(encoded[: data.draw(st.integers(0, len(encoded) - 1))], "key")


def test_a_size_beyond_the_bound_is_refused_before_anything_is_decompressed() -> None:
    header = f.Header(kind=f.Kind.LOG, position=f.Position(1, 2), parent=f.Position(1, 1), at_ms=3)
    data = bytearray(f.encode_object(header, [f.DirectoryEvent("pages")]))
    struct.pack_into("<Q", data, f.HEADER.size - 48, f.RAW_BYTES_MAX + 1)
    f.CHECKSUM.pack_into(data, f.HEADER.size, crc64(bytes(data[: f.HEADER.size])))
    with pytest.raises(Corruption, match="claims to hold"):
        f.decode_object(bytes(data), "key")


def test_a_newer_format_is_refused() -> None:
    header = f.Header(kind=f.Kind.LOG, position=f.Position(1, 2), parent=f.Position(1, 1), at_ms=3)
    data = bytearray(f.encode_object(header, []))
    struct.pack_into("<H", data, 8, f.FORMAT + 1)
    f.CHECKSUM.pack_into(data, f.HEADER.size, crc64(bytes(data[: f.HEADER.size])))
    with pytest.raises(FormatTooNew):
        f.decode_object(bytes(data), "key")


@given(st.integers(1, 2**32 - 1), NUMBERS)
def test_names_round_trip(epoch: int, number: int) -> None:
    position = f.Position(epoch, number)
    assert f.parse_log_key(f.log_key(STORE, position)) == position
    assert f.parse_archive_key(f.log_key(STORE, position)) == (position, "log")
    assert f.parse_archive_key(f.base_key(STORE, position, 3)) == (position, "base")
    assert f.parse_archive_key(f.file_key(STORE, position, "a-b")) == (position, "file")
    assert f.parse_log_key(f"{STORE}/e/00000001/x") is None


def test_the_format_page_matches_the_header() -> None:
    text = Path("docs/formats/archive.md").read_text("utf-8")
    assert f"{f.HEADER_BYTES} bytes" in text
    offsets = [int(row) for row in re.findall(r"^\| (\d+) \|", text, re.MULTILINE)]
    sizes = [struct.calcsize("<" + part) for part in re.findall(r"\d*[a-zA-Z]", f.HEADER.format.lstrip("<"))]
    assert offsets == [sum(sizes[:index]) for index in range(len(sizes) + 1)]
