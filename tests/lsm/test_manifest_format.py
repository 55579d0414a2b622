"""The manifest's bytes: encoding round-trips, altered bytes are an error, and the page agrees with the code."""

from __future__ import annotations

import re
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.core.errors import Corruption, FormatTooNew, OutOfRange, QuireError, SnapshotChecksumMismatch
from quire.durable.checksums import crc32
from quire.lsm import manifest_format as fmt
from quire.lsm.manifest_data import (
    AddSst,
    AllocateSstId,
    Compaction,
    ErrorKind,
    ManifestData,
    ManifestEvent,
    ManifestSstEntry,
    SetActiveWal,
    kind_of,
)
from tests.lsm.manifests import EVENTS, entry
from tests.rules.tree import ROOT

PAGE = (ROOT / "docs" / "formats" / "lsm-manifest.md").read_text("utf-8")


@given(EVENTS)
def test_events_round_trip(event: ManifestEvent) -> None:
    assert fmt.decode_event(fmt.encode_event(event)) == event


@given(EVENTS, st.data())
def test_a_shortened_or_lengthened_event_is_an_encoding_error(event: ManifestEvent, data: st.DataObject) -> None:
    record = fmt.encode_event(event)
    altered = record[: data.draw(st.integers(0, len(record) - 1))] if data.draw(st.booleans()) else record + b"\0"
    with pytest.raises((Corruption, FormatTooNew)) as caught:
        fmt.decode_event(altered, "p", 9)
    assert kind_of(caught.value) is ErrorKind.ENCODING
    assert caught.value.where["offset"] == 9


@pytest.mark.parametrize("tag", [0, 10, 255])
def test_an_unknown_tag_is_reported_as_a_newer_version(tag: int) -> None:
    with pytest.raises(FormatTooNew, match="unknown kind") as caught:
        fmt.decode_event(bytes([tag]) + bytes(8))
    assert kind_of(caught.value) is ErrorKind.ENCODING


@pytest.mark.parametrize(
    "event", [AllocateSstId(2**64), SetActiveWal(-1), AddSst(ManifestSstEntry(1, "")), Compaction((), (2**64,))]
)
def test_values_that_do_not_fit_are_refused_before_they_are_written(event: ManifestEvent) -> None:
    with pytest.raises(OutOfRange) as caught:
        fmt.encode_event(event)
    assert kind_of(caught.value) is ErrorKind.ENCODING


@given(st.lists(EVENTS, max_size=20), st.integers(0, 2**64 - 1))
def test_snapshots_round_trip(events: list[ManifestEvent], salt: int) -> None:
    data = ManifestData().apply_all(e for e in events if not (isinstance(e, AllocateSstId) and e.id == 2**64 - 1))
    snapshot = fmt.decode_snapshot(fmt.encode_snapshot(data, salt))
    assert snapshot.manifest_data == data
    assert (snapshot.version, snapshot.snapshot_lsn, snapshot.covered_salt) == (data.version, data.last_lsn, salt)
    assert not snapshot.manifest_data.dirty


def sample() -> bytes:
    data = ManifestData(version=1, last_lsn=9, active_wal=3, frozen_wals=[2], tables={1: entry(1)}, next_sst_id=2)
    return fmt.encode_snapshot(data, 7)


def test_the_checksum_covers_the_file_with_its_own_field_zeroed() -> None:
    file = sample()
    (checksum,) = struct.unpack_from("<I", file, 12)
    assert checksum == crc32(file[:12] + bytes(4) + file[16:])


def test_every_flipped_bit_of_a_snapshot_is_detected() -> None:
    file = sample()
    for position in range(len(file) * 8):
        damaged = bytearray(file)
        damaged[position // 8] ^= 1 << position % 8
        with pytest.raises(SnapshotChecksumMismatch) as caught:
            fmt.decode_snapshot(bytes(damaged))
        assert kind_of(caught.value) is ErrorKind.SNAPSHOT_CHECKSUM_MISMATCH


def test_a_snapshot_cut_at_any_byte_is_detected() -> None:
    file = sample()
    for size in range(len(file)):
        with pytest.raises(SnapshotChecksumMismatch):
            fmt.decode_snapshot(file[:size])


def resigned(file: bytes) -> bytes:
    return file[:12] + crc32(file[:12] + bytes(4) + file[16:]).to_bytes(4, "little") + file[16:]


def test_a_newer_snapshot_is_reported_as_a_newer_version() -> None:
    file = sample()
    with pytest.raises(FormatTooNew):
        fmt.decode_snapshot(resigned(file[:8] + b"\2\0" + file[10:]))


def test_an_invalid_snapshot_with_a_valid_checksum_is_an_encoding_error() -> None:
    file = sample()
    with pytest.raises(Corruption) as caught:
        fmt.decode_snapshot(resigned(file + b"more"))
    assert kind_of(caught.value) is ErrorKind.ENCODING


def test_the_page_lists_every_tag_and_size() -> None:
    listed = dict(re.findall(r"^\| `(\w+)` \| (\d+) \|", PAGE, re.MULTILINE))
    assert listed == {event.__name__: str(tag) for event, tag in fmt.TAGS.items()}
    for struct_name, size in (("snapshot head", fmt.SNAPSHOT_BYTES), ("manifest data", fmt.DATA_BYTES)):
        assert f"{struct_name}: {size} bytes" in PAGE
    assert f"at offset {fmt.CHECKSUM_OFFSET}" in PAGE


def test_the_example_on_the_page_is_what_the_code_writes() -> None:
    dump = re.findall(r"^[0-9a-f]{4}  ((?:[0-9a-f]{2} ?)+)$", PAGE, re.MULTILINE)
    assert bytes.fromhex(" ".join(dump)) == sample()
    assert f"`{fmt.encode_event(Compaction((entry(3),), (1,))).hex()}`" in PAGE


def test_errors_name_the_next_command() -> None:
    with pytest.raises(QuireError) as caught:
        fmt.decode_snapshot(b"", "here")
    assert "quire kv repair" in caught.value.hint
    assert caught.value.where["path"] == "here"
