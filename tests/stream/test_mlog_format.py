"""The manifest log's page and its code agree, byte for byte; encoding round-trips; invalid values are refused."""

from __future__ import annotations

import re
import struct
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.core.errors import FormatTooNew, ManifestIntegrityError, OutOfRange
from quire.durable.checksums import crc64
from quire.stream import mlog_format as fmt
from quire.stream import mlog_records as records
from quire.stream import mlog_snapshot, mlog_states
from quire.stream.mlog_format import (
    CHUNK_BYTES,
    SEALED,
    ChunkFacts,
    Identity,
    encode_record,
    identity_of,
    new_header,
    settle,
)
from quire.stream.mlog_index import ManifestIndex
from quire.stream.mlog_reader import LogPosition, load_chunk
from tests.stream.logs import ONE_OF_EACH, U64, VALUES

PAGE = (Path(__file__).parents[2] / "docs/formats/manifest-log.md").read_text("utf-8")

# The vectors of the page, repeated here: neither the code nor the page can change alone.
PAYLOADS = [
    "00100000000000000300000000000000",
    "0000100000000000efcdab8967452301",
    "4d00000000000000",
    "e0930400000000000500000000000000",
    "0200000000000000",
    "0300732f31000000",
    "03000300732f3161626300000000" + "0000",
    "0300000009000000732f310000000000",
    "0300732f31000000",
    "0300732f31000000",
    "0200000000000000",
    "0000100000000000",
    "0400000000000000",
    "0000100000000000",
    "030000000000000040000000000000000800000000000000",
    "00040000050068656c6c6f0000000000",
]


IDENTITY = identity_of("12345678-9abc-4def-8123-456789abcdef", 7)
OLD_COPY = bytes.fromhex(
    "474f4c4d32464f41010000004000000002000000000000001f00000000000000"
    "a800000000000000a8000000000000001cff5b630751f3dd0100000000000000"
    "0200000000000000010000000000000000000000000000000000000000000000"
    "0000000000000000000000000000000000000000000000006042cda270ca3677"
)
"""The commit copy of the page's chunk, as written before chunks had identities."""


def example_chunk() -> bytes:
    """The chunk of the page: two records about segment 9, committed and sealed."""
    body = encode_record(
        0, 9, records.SegmentOpened(4096, 3).encode(), logical_offset=4096, timestamp_ms=1_700_000_000_000
    )
    body += encode_record(5, 9, records.UploadStarted("s/1").encode(), timestamp_ms=1_700_000_000_250)
    header = new_header(
        chunk_index=2,
        base_record=31,
        committed_len=CHUNK_BYTES + len(body),
        chunk_crc64=crc64(body),
        flags=SEALED,
    )
    return header.encode() + body + ChunkFacts(header, 2, 1, IDENTITY).encode()


def dump(title: str) -> bytes:
    block = re.search(rf"^### {title}$.*?```\n(.*?)```", PAGE, re.MULTILINE | re.DOTALL)
    assert block, title
    return b"".join(bytes.fromhex(line[6:]) for line in block[1].splitlines())


def table(title: str) -> list[tuple[str, int, int]]:
    start = PAGE.index(f"| {title} field | offset | bytes |")
    rows = re.findall(r"^\| (\w+) \| (\d+) \| (\d+) \|", PAGE[start:].split("\n\n")[0], re.MULTILINE)
    assert rows
    return [(name, int(offset), int(size)) for name, offset, size in rows]


@pytest.mark.parametrize(
    ("title", "layout"),
    [("record", fmt.RECORD), ("chunk", fmt.CHUNK), ("copy", fmt.COPY), ("snapshot", mlog_snapshot.HEADER)],
)
def test_the_tables_of_the_page_match_the_structs(title: str, layout: struct.Struct) -> None:
    rows = table(title)
    codes = re.findall(r"\d+s|[HIQ]", layout.format)
    assert [size for _, _, size in rows] == [struct.calcsize(f"<{code}") for code in codes]
    assert [offset for _, offset, _ in rows] == [sum(size for _, _, size in rows[:i]) for i in range(len(rows))]
    assert sum(size for _, _, size in rows) == layout.size


def test_header_fields_are_named_as_on_the_page() -> None:
    assert [name for name, _, _ in table("chunk")] == list(fmt.ChunkHeader._fields)


@pytest.mark.parametrize("number", range(16))
def test_every_payload_has_its_published_bytes(number: int) -> None:
    value = ONE_OF_EACH[number]
    assert int(value.TYPE) == number
    assert records.encode(value).hex() == PAYLOADS[number]
    assert records.decode(number, bytes.fromhex(PAYLOADS[number])) == value
    row = re.search(rf"^\| {number} \| `(\w+)` \|.*\| `([0-9a-f ]+)` \|$", PAGE, re.MULTILINE)
    assert row, f"type {number} has no vector on the page"
    assert row[1] == type(value).__name__
    assert row[2].replace(" ", "") == PAYLOADS[number]


def test_the_chunk_of_the_page_has_its_published_bytes() -> None:
    data = example_chunk()
    assert data == dump("The chunk")
    chunk = load_chunk(data, chunk_index=2)
    assert [view.value() for view in chunk.records()] == [records.SegmentOpened(4096, 3), records.UploadStarted("s/1")]
    assert chunk.facts == (chunk.header, 2, 1, IDENTITY)


def test_a_chunk_from_before_chunks_had_an_identity_is_read_by_any_log() -> None:
    data = example_chunk()[:-128] + OLD_COPY
    chunk = load_chunk(data, chunk_index=2, owner=IDENTITY)
    assert chunk.facts == (chunk.header, 2, 1, fmt.NO_IDENTITY)
    assert chunk.facts.encode() == OLD_COPY


def test_the_snapshot_of_the_page_has_its_published_bytes() -> None:
    records_: list[records.Payload] = [
        records.SegmentOpened(4096, 3),
        records.SealSegment(1 << 20, 0x0123456789ABCDEF),
        records.UploadStarted("s/1"),
        records.UnknownRecord(99, b"eightbyt"),
    ]
    index = ManifestIndex()
    for number, value in enumerate(records_):
        stamp = 1_700_000_000_000 + 250 * number
        index.fold_raw(encode_record(value.TYPE, 9, records.encode(value), timestamp_ms=stamp))
    data = mlog_snapshot.encode_snapshot(1, LogPosition(0, 272), index, 0)
    assert data == dump("The snapshot")
    # Decoded without the code that wrote it: offsets and numbers are those of the page's tables.
    at = {name: (offset, size) for name, offset, size in table("snapshot")}

    def field(name: str) -> int:
        offset, size = at[name]
        return int.from_bytes(data[offset : offset + size], "little")

    assert field("magic").to_bytes(8, "big") == b"AOF2MSNP"
    assert [field(name) for name in ("snapshot_id", "chunk_index", "chunk_offset", "records")] == [1, 0, 272, 4]
    assert [field(name) for name in ("entries", "waiting", "deletes", "tallies")] == [1, 0, 0, 1]
    assert field("size") == len(data)
    assert struct.unpack_from("<Q5BxH", data, 112) == (9, 2, 0, 1, 1, 0, 0b100011)
    assert struct.unpack_from("<QQ", data, len(data) - 24) == (99, 1)
    assert crc64(data[:-8]) == int.from_bytes(data[-8:], "little")
    again = mlog_snapshot.decode_snapshot(data, snapshot_id=1)
    assert (again.position, again.index.outstanding().uploads) == (LogPosition(0, 272), {9: "s/1"})
    assert again.index.unknown == {99: 1}


@pytest.mark.parametrize("facet", mlog_states.State._fields)
def test_the_facets_of_the_page_match_the_codes(facet: str) -> None:
    row = re.search(rf"^\| {facet} \| (.*) \|$", PAGE, re.MULTILINE)
    assert row, facet
    kind = type(getattr(mlog_states.NOTHING, facet))
    assert row[1] == ", ".join(f"{code.value} {code.name.lower()}" for code in kind)


def test_the_magic_is_that_of_the_design_document() -> None:
    assert fmt.MAGIC.to_bytes(8, "big") == b"AOF2MLOG"
    assert example_chunk()[:8] == b"GOLM2FOA"


@given(value=VALUES)
def test_records_round_trip(value: records.Payload) -> None:
    payload = records.encode(value)
    assert len(payload) % 8 == 0
    assert records.decode(value.TYPE, payload) == value


@given(record_type=st.integers(0, 15), payload=st.binary(max_size=80))
def test_only_canonical_bytes_decode(record_type: int, payload: bytes) -> None:
    try:
        value = records.decode(record_type, payload)
    except ManifestIntegrityError:
        return
    assert records.encode(value) == payload


def test_an_undecodable_payload_is_reported_with_its_location() -> None:
    with pytest.raises(ManifestIntegrityError) as caught:
        records.decode(0, b"\xff" * 16, chunk=1, segment=2, offset=3)
    location = caught.value.where
    assert (location["chunk"], location["segment"], location["offset"]) == (1, 2, 3)


@pytest.mark.parametrize("size", [0, 7, 9, records.PAYLOAD_BYTES_MAX + 8])
def test_empty_unaligned_and_outsized_payloads_are_refused(size: int) -> None:
    with pytest.raises(OutOfRange):
        records.encode(records.UnknownRecord(99, bytes(size)))


@pytest.mark.parametrize(
    "value",
    [
        records.SegmentOpened(2**64, 0),
        records.SegmentOpened(0, 2**32),
        records.SegmentOpened(-1, 0),
        records.UploadStarted("k" * 65_536),
        records.UnknownRecord(2**16, bytes(8)),
    ],
)
def test_values_that_do_not_fit_their_field_are_refused(value: records.Payload) -> None:
    with pytest.raises(OutOfRange):
        records.encode(value)


IDENTITIES = st.builds(Identity, st.sampled_from([bytes(16), b"s" * 16, b"t" * 16]), st.integers(0, 3))


@given(
    st.tuples(U64, U64, U64, U64),
    st.integers(0, 3),
    U64,
    U64,
    st.builds(Identity, st.binary(min_size=16, max_size=16), U64),
)
def test_commit_copies_round_trip(
    numbers: tuple[int, int, int, int], flags: int, record_count: int, snapshot_id: int, identity: Identity
) -> None:
    index, base, length, crc = numbers
    header = new_header(chunk_index=index, base_record=base, committed_len=length, chunk_crc64=crc, flags=flags)
    facts = ChunkFacts(header, record_count, snapshot_id, identity)
    assert fmt.decode_copy(bytes(64) + facts.encode()) == facts
    assert fmt.decode_chunk_header(header.encode()) == header


@given(IDENTITIES, IDENTITIES)
def test_a_chunk_with_a_wrong_identity_is_refused(recorded: Identity, owner: Identity) -> None:
    known = fmt.NO_IDENTITY not in (recorded, owner)
    stores_known = bytes(16) not in (recorded.store_id, owner.store_id)
    foreign = known and (
        recorded.stream_id != owner.stream_id or (stores_known and recorded.store_id != owner.store_id)
    )
    assert recorded.fits(owner) is owner.fits(recorded) is (not foreign)
    chunk_data = example_chunk()
    copy = fmt.decode_copy(chunk_data)
    assert copy is not None
    data = chunk_data[:-128] + copy._replace(identity=recorded).encode()
    # A torn header or an interrupted commit does not hide the chunk's identity.
    for header in (data[:64], bytes(64), copy.header._replace(committed_len=120).encode()):
        if foreign:
            with pytest.raises(ManifestIntegrityError, match="to another"):
                settle(header + data[64:], chunk_index=2, path="x", owner=owner)
        else:
            settle(header + data[64:], chunk_index=2, path="x", owner=owner)


def test_a_newer_version_is_reported_as_such() -> None:
    data = bytearray(example_chunk()[:-128])
    data[8] = 2
    with pytest.raises(FormatTooNew):
        settle(bytes(data), chunk_index=2, path="x")


def test_a_torn_header_is_taken_from_the_copy_and_a_torn_copy_from_the_header() -> None:
    chunk_data = example_chunk()
    expected = settle(chunk_data, chunk_index=2, path="")[0]
    assert settle(b"\xee" * 64 + chunk_data[64:], chunk_index=2, path="")[0] == expected
    assert settle(chunk_data[:-128] + b"\xee" * 128, chunk_index=2, path="") == (expected, None)
    with pytest.raises(ManifestIntegrityError):
        settle(b"\xee" * 64 + chunk_data[64:-128] + b"\xee" * 128, chunk_index=2, path="")
