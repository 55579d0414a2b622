"""owner.json and owner objects: they round-trip, damage is detected, and the format page matches the bytes."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.core.errors import Corruption, FormatTooNew
from quire.core.ids import U32_MAX
from quire.durable.checksums import crc64
from quire.durable.files import OsDisk
from quire.durable.object_names import OWNER_FILE, owner_key, parse_owner_key
from quire.objects.ownership import (
    FILE_BYTES_MAX,
    FORMAT,
    OBJECT_BYTES_MAX,
    OwnerFile,
    OwnerObject,
    decode_file,
    decode_object,
    encode_file,
    encode_object,
    read_file,
    write_file,
)
from tests.rules.tree import ROOT

PAGE = (ROOT / "docs/formats/owner.md").read_text("utf-8")
NUMBERS = st.integers(0, U32_MAX)
FILES = st.builds(
    lambda store_id, epoch, numbers, nonce, successor: OwnerFile(
        store_id=store_id,
        epoch=epoch,
        session=max(numbers),
        confirmed=min(numbers),
        nonce=nonce,
        successor=successor,
        successor_text=successor,
    ),
    st.uuids().map(str),
    NUMBERS,
    st.tuples(NUMBERS, NUMBERS),
    st.binary(min_size=16, max_size=16).map(bytes.hex),
    st.text(max_size=60),
)
EXAMPLE = OwnerFile(
    store_id="1f0c0c1e-7d4e-4c5e-9f50-0d6d1c3b2a19",
    epoch=1,
    session=2,
    nonce="4ee2c17e7a09715d0b79f436395d7081",
    confirmed=2,
)
EXAMPLE_OBJECT = OwnerObject(
    store_id=EXAMPLE.store_id, nonce=EXAMPLE.nonce, host="db1", pid=812, created_at_ms=1_763_000_000_000
)


@given(FILES)
def test_what_is_encoded_is_decoded(record: OwnerFile) -> None:
    assert decode_file(encode_file(record), "owner.json") == record


@given(FILES, st.data())
def test_a_changed_or_missing_byte_is_detected(record: OwnerFile, data: st.DataObject) -> None:
    encoded = encode_file(record)
    offset = data.draw(st.integers(0, len(encoded) - 1))
    altered = bytearray(encoded)
    altered[offset] ^= 1 << data.draw(st.integers(0, 7))
    for damaged in (bytes(altered), encoded[:offset]):
        with pytest.raises(Corruption, match=r"owner\.json is damaged"):
            decode_file(damaged, "owner.json")


@given(st.binary(max_size=200))
def test_an_invalid_object_has_no_owner(data: bytes) -> None:
    owner_object = decode_object(data)
    assert owner_object is None or isinstance(owner_object, OwnerObject)


def test_an_object_is_bounded_before_it_is_decoded() -> None:
    assert decode_object(encode_object(EXAMPLE_OBJECT)) == EXAMPLE_OBJECT
    assert decode_object(encode_object(EXAMPLE_OBJECT) + b" " * OBJECT_BYTES_MAX) is None
    assert decode_object(b"[" * 4000) is None


def _sealed(text: bytes) -> bytes:
    return text + b"\n" + f"{crc64(text):016x}\n".encode()


def test_a_file_of_a_newer_quire_is_refused_and_its_new_fields_are_not() -> None:
    line = encode_file(EXAMPLE).partition(b"\n")[0]
    newer = _sealed(line.replace(b'"format":1', b'"format":2'))
    with pytest.raises(FormatTooNew):
        decode_file(newer, "owner.json")
    longer = _sealed(line[:-1] + b',"colour":"red"}')
    assert decode_file(longer, "owner.json") == EXAMPLE
    shorter = _sealed(b'{"store_id":"s","epoch":1,"session":3,"nonce":"n"}')
    assert decode_file(shorter, "owner.json") == OwnerFile(store_id="s", epoch=1, session=3, nonce="n")


@pytest.mark.parametrize("change", [b'"confirmed":3', b'"confirmed":-1', b'"confirmed":4294967296'])
def test_invalid_numbers_are_damage(change: bytes) -> None:
    line = encode_file(EXAMPLE).partition(b"\n")[0].replace(b'"confirmed":2', change)
    with pytest.raises(Corruption):
        decode_file(_sealed(line), "owner.json")


def test_the_file_is_replaced_atomically_and_bounded(tmp_path: Path) -> None:
    disk = OsDisk()
    assert read_file(disk, str(tmp_path)) is None
    write_file(disk, str(tmp_path), EXAMPLE)
    assert read_file(disk, str(tmp_path)) == EXAMPLE
    (tmp_path / OWNER_FILE).write_bytes(b"x" * (FILE_BYTES_MAX + 1))
    with pytest.raises(Corruption):
        read_file(disk, str(tmp_path))


@given(st.uuids().map(str), st.integers(1, U32_MAX), st.integers(1, U32_MAX))
def test_owner_names_round_trip(store_id: str, epoch: int, session: int) -> None:
    assert parse_owner_key(owner_key(store_id, epoch, session)) == (store_id, epoch, session)


@pytest.mark.parametrize("name", ["s/owner/1.1", "s/owner/0000000A.00000001", "s/owner/00000000.00000001", "s/owner/x"])
def test_foreign_names_are_not_parsed(name: str) -> None:
    assert parse_owner_key(name) is None


def test_the_format_page_shows_these_bytes() -> None:
    assert encode_file(EXAMPLE).decode() in PAGE
    assert encode_object(EXAMPLE_OBJECT).decode() in PAGE
    assert f"`format` is {FORMAT}" in PAGE
    assert f"at most {FILE_BYTES_MAX:,} bytes" in PAGE
    for field in (*OwnerFile.__struct_fields__, *OwnerObject.__struct_fields__):
        assert f"| `{field}` |" in PAGE, field
