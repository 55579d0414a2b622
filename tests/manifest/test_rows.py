"""Rows with a checksum: any changed bit of a row or its key, and a row in the wrong table, is detected."""

from __future__ import annotations

from typing import Any
from zlib import crc32

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.core.errors import FormatTooNew, ManifestDamaged
from quire.core.settings import ManifestSettings
from quire.manifest import tables as t
from quire.manifest.change import CHANGE_LOG
from quire.manifest.codec import VERSION
from quire.manifest.env import ManifestEnv
from quire.manifest.migrations import MIGRATED_ROWS, SCHEMA
from quire.manifest.records import DbKind, MetaRecord, RefcountRecord, RetentionRecord
from quire.manifest.rows import RESIDUE, is_marked, sealed
from quire.manifest.store import ManifestStore
from quire.testing.manifest import assert_clean, assert_replays, dump
from tests.manifest.test_codec import TABLE_ROWS

CASES: list[tuple[t.Table[Any], tuple[Any, ...], Any]] = [
    (t.RETENTION, (7,), RetentionRecord(keep_last=6, schedules=["daily"])),
    (t.GC_REFCOUNTS, (1, 1, 300, 1, 0), RefcountRecord(3, 1, 0)),
    (t.META, ("oldest_sequence",), MetaRecord(number=9)),
]


def flips(raw: bytes) -> list[bytes]:
    """The bytes with each of their bits flipped in turn."""
    number = int.from_bytes(raw, "little")
    return [(number ^ 1 << bit).to_bytes(len(raw), "little") for bit in range(8 * len(raw))]


@given(TABLE_ROWS, st.binary(min_size=1, max_size=40))
def test_a_stored_row_decodes_to_its_record_under_its_key(case: tuple[t.Table[Any], Any], key: bytes) -> None:
    table, record = case
    raw = table.rows.encode(key, record)
    assert table.rows.decode(key, raw) == record
    assert table.rows.opened(key, raw) == table.codec.encode(record)
    assert table.rows.encode_all([(key, record)]) == [(key, raw)]
    assert raw == sealed(table.name, key, table.codec.encode(record))
    assert table.rows.are_intact([key], [raw])
    assert table.rows.opened_all([key], [raw]) == [table.codec.encode(record)]


@pytest.mark.parametrize(("table", "parts", "record"), CASES, ids=["retention", "gc_refcounts", "meta"])
def test_every_flipped_bit_of_a_row_and_of_its_key_is_detected(
    table: t.Table[Any], parts: tuple[Any, ...], record: Any
) -> None:
    key = table.key.pack(*parts)
    raw = table.rows.encode(key, record)
    for wrong in flips(raw):
        with pytest.raises(ManifestDamaged) as caught:
            table.rows.decode(key, wrong)
        assert (caught.value.where["table"], caught.value.where["key"]) == (table.name, parts)
        assert not table.rows.are_intact([key, key], [raw, wrong])
        with pytest.raises(ManifestDamaged):
            # a row without its mark is too long for a row without a checksum
            table.codec.decode(table.rows.opened_all([key, key], [raw, wrong])[1])
    for wrong in flips(key):
        with pytest.raises(ManifestDamaged):
            table.rows.decode(wrong, raw)


def test_a_row_of_another_table_or_key_is_detected() -> None:
    key = t.DB_NAMES.key.pack("shop")
    raw = t.DB_NAMES.rows.encode(key, t.DB_NAMES.codec.record_type(1))
    assert t.CURSOR_NAMES.codec.record_type is t.DB_NAMES.codec.record_type
    for rows, wrong_key in ((t.CURSOR_NAMES.rows, key), (t.DB_NAMES.rows, t.DB_NAMES.key.pack("blog"))):
        with pytest.raises(ManifestDamaged, match="checksum"):
            rows.decode(wrong_key, raw)


def test_a_row_of_a_newer_version_is_reported_as_newer_only_if_its_checksum_is_correct() -> None:
    key = t.META.key.pack("x")
    newer = sealed("meta", key, VERSION.pack(2) + t.META.codec.encode(MetaRecord(1))[2:])
    with pytest.raises(FormatTooNew):
        t.META.rows.decode(key, newer)
    with pytest.raises(ManifestDamaged):
        t.META.rows.decode(key, newer[:-1] + bytes([newer[-1] ^ 1]))


def test_packed_rows_are_checked_before_numpy_reads_them() -> None:
    keys = [t.GC_REFCOUNTS.key.pack(1, 1, number, 1, 0) for number in range(4)]
    raws = [t.GC_REFCOUNTS.rows.encode(key, RefcountRecord(5 + index)) for index, key in enumerate(keys)]
    assert t.GC_REFCOUNTS.rows.columns(keys, raws)["in_use"].tolist() == [5, 6, 7, 8]
    plain = [*raws[:2], t.GC_REFCOUNTS.codec.encode(RefcountRecord(9)), raws[3]]
    assert t.GC_REFCOUNTS.rows.columns(keys, plain)["in_use"].tolist() == [5, 6, 9, 8]
    with pytest.raises(ManifestDamaged):
        t.GC_REFCOUNTS.rows.columns(keys, [*raws[:3], raws[2]])


def test_the_residue_is_that_of_the_checksum() -> None:
    key = b"k"
    assert t.META.rows.salt == crc32(b"meta")
    raw = t.META.rows.encode(key, MetaRecord(1))
    assert crc32(raw, crc32(key, t.META.rows.salt)) == RESIDUE


# ── stores without checksums ──────────────────────────────────────────────────────────────────────────────────────────
def create_old_store(path: str, databases: int) -> dict[str, list[tuple[bytes, bytes]]]:
    """Create a store as it was before checksums: schema 1, an empty ledger, rows without checksums. Returns its
    rows."""
    with ManifestStore.open(path) as manifest:
        for number in range(databases):
            db_id = manifest.register_db(f"db-{number}", DbKind.PAGES)
        manifest.retention.set(db_id, RetentionRecord(keep_last=3))
    env = ManifestEnv(path, ManifestSettings(), write=True)
    with env.begin_write() as txn:
        txn.drop(env.handles["migrations"], delete=False)
        txn.put(SCHEMA, t.META.rows.encode(SCHEMA, MetaRecord(number=1)), db=env.handles["meta"])
    with env.begin_write() as txn:
        for table in (*t.TABLES.values(), CHANGE_LOG):
            with txn.cursor(db=env.handles[table.name]) as cursor:
                rows = [(bytes(key), table.rows.opened(bytes(key), bytes(raw))) for key, raw in cursor.iternext()]
                cursor.putmulti(rows)
    env.close()
    with ManifestStore.open(path, mode="r") as manifest:
        old_rows = dump(manifest)
    assert not any(is_marked(raw) for rows in old_rows.values() for _, raw in rows)
    return old_rows


def test_a_store_without_checksums_is_readable_and_gets_them_from_its_next_owner(path: str) -> None:
    """Old files stay readable."""
    old = create_old_store(path, 3)
    with ManifestStore.open(path, mode="r") as manifest:
        assert manifest.retention.get("db-2") == RetentionRecord(keep_last=3)
        assert manifest.check() == []
    with ManifestStore.open(path) as manifest:
        assert_clean(manifest)
        assert_replays(manifest)
        new = dump(manifest)
        for name, rows in new.items():
            assert all(is_marked(raw) for _, raw in rows), name
            if name not in ("migrations", "meta"):
                table = CHANGE_LOG if name == CHANGE_LOG.name else t.TABLES[name]
                assert [(key, table.rows.opened(key, raw)) for key, raw in rows] == old[name]


def test_an_interrupted_migration_continues(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed between two of its transactions: some rows have a checksum, and the ledger has no row of it."""
    from quire.manifest import migrations

    monkeypatch.setattr(migrations, "MIGRATED_ROWS", 4)
    assert MIGRATED_ROWS > 4
    create_old_store(path, 20)
    tables: list[str] = []

    def stop_after_five(
        env: Any, name: str, handle: Any, after: bytes, step: Any = migrations._add_some
    ) -> bytes | None:
        if len(tables) == 5:
            raise KeyboardInterrupt
        tables.append(name)
        next_key: bytes | None = step(env, name, handle, after)
        return next_key

    with monkeypatch.context() as patch:
        patch.setattr(migrations, "_add_some", stop_after_five)
        with pytest.raises(KeyboardInterrupt):
            ManifestStore.open(path)
    with ManifestStore.open(path, mode="r") as manifest:
        marks = {is_marked(raw) for rows in dump(manifest).values() for _, raw in rows}
        assert marks == {True, False}
        assert manifest.check() == []
    with ManifestStore.open(path) as manifest:
        assert all(is_marked(raw) for rows in dump(manifest).values() for _, raw in rows)
        assert_clean(manifest)
        assert_replays(manifest)
