"""A look at the manifest without msgspec: the same fields, the same bytes, and everything else is declined."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

import quire
from quire.core.settings import ManifestSettings
from quire.manifest import env, glance, kinds, migrations, records, rows
from quire.manifest import tables as t
from quire.manifest.glance import Glance, Unfamiliar, record, unpacked

RECORDS = [(glance.DB, t.DB), (glance.SNAPSHOT, t.SNAPSHOT_INDEX), (glance.META, t.META)]

PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers(0, 2**64 - 1) | st.text(max_size=300) | st.binary(max_size=300),
    lambda each: st.lists(each, max_size=20) | st.dictionaries(st.text(max_size=40), each, max_size=20),
    max_leaves=30,
)


@pytest.mark.parametrize(("fields", "table"), RECORDS, ids=["db", "snapshot", "meta"])
def test_the_fields_are_those_of_the_records(fields: dict[str, Any], table: t.Table[Any]) -> None:
    """Rule 2: names, order and defaults."""
    known = msgspec.structs.fields(table.codec.record_type)
    assert list(fields) == [each.name for each in known]
    for each in known:
        if each.required:
            assert fields[each.name] is glance._REQUIRED
        else:
            default = each.default if each.default is not msgspec.NODEFAULT else each.default_factory()
            assert fields[each.name] == default
    assert table.rows.marked == glance._HEAD
    assert glance._RESIDUE == rows.RESIDUE


def test_the_constants_are_those_of_the_usual_way() -> None:
    settings = ManifestSettings()
    assert (settings.map_bytes, settings.readers_max) == (glance.MAP_BYTES, glance.READERS_MAX)
    assert env.TABLES_MAX == glance.TABLES_MAX
    assert migrations.BASE_SCHEMA + len(migrations.STEPS) == glance.SCHEMA, "a migrated store needs a new look"
    assert tuple(sorted(step.name.encode() for step in migrations.STEPS)) == glance.STEPS
    assert records.DbKind is kinds.DbKind


@given(PLAIN)
def test_msgpack_is_read_as_msgspec_reads_it(value: Any) -> None:
    packed = msgspec.msgpack.encode(value)
    assert unpacked(packed, 0) == (value, len(packed))


def stored(plain: bytes, fields: Any) -> Any:
    return record("meta", b"k", rows.sealed("meta", b"k", plain), fields)


@given(st.binary(max_size=60))
def test_other_bytes_are_declined_or_read_as_msgspec_does(raw: bytes) -> None:
    try:
        found = stored(b"\x01\x00" + raw, glance.META)
    except (Unfamiliar, IndexError, UnicodeDecodeError, TypeError):
        return
    assert found.number == (msgspec.msgpack.decode(raw) or [0])[0]


def test_older_rows_get_defaults_and_newer_ones_are_declined() -> None:
    body = msgspec.msgpack.encode(["shop", 1, 7])
    assert stored(b"\x01\x00" + body, glance.DB).tags == {}
    assert stored(b"\x01\x00" + msgspec.msgpack.encode([1, "x", "from the future"]), glance.META).text == "x"
    with pytest.raises(Unfamiliar):
        stored(b"\x02\x00" + body, glance.DB)
    with pytest.raises(Unfamiliar):
        stored(b"\x01\x00" + msgspec.msgpack.encode(["shop"]), glance.DB)
    with pytest.raises(Unfamiliar):
        stored(b"\x01\x00" + body + b"\x00", glance.DB)
    with pytest.raises(Unfamiliar):
        record("meta", b"k", b"\x01\x00" + msgspec.msgpack.encode([1]), glance.META)  # a row without a checksum
    whole = rows.sealed("meta", b"k", b"\x01\x00" + msgspec.msgpack.encode([1]))
    for bit in range(8 * len(whole)):
        flipped = (int.from_bytes(whole, "little") ^ (1 << bit)).to_bytes(len(whole), "little")
        with pytest.raises(Unfamiliar):
            record("meta", b"k", flipped, glance.META)


def test_a_newer_schema_and_a_short_file_are_declined(tmp_path: Path) -> None:
    path = tmp_path / "store"
    quire.open(path).close()
    manifest = path / "manifest.lmdb"
    with Glance(str(manifest)) as look:
        assert look.databases() == {}
    whole = manifest.read_bytes()
    manifest.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(Unfamiliar):
        Glance(str(manifest))
    manifest.write_bytes(whole)
    with quire.open(path) as store:
        writer = store.manifest.env.begin_write()
        writer.put(b"schema", t.META.codec.encode(records.MetaRecord(number=99)), db=store.manifest.env.handles["meta"])
        writer.commit()
    with pytest.raises(Unfamiliar):
        Glance(str(manifest))
