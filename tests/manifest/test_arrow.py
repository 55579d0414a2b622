"""Arrow export: every table, every value, and rows of older versions."""

from __future__ import annotations

import enum
import json
from random import Random
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.core.settings import ManifestSettings
from quire.manifest import tables as t
from quire.manifest.arrow import schema
from quire.manifest.change import CHANGE_LOG
from quire.manifest.codec import VERSION
from quire.manifest.env import ManifestEnv
from quire.manifest.reads import ReadTxn
from quire.manifest.store import ManifestStore
from tests.manifest.batches import BatchMaker, outcome
from tests.manifest.helpers import chunk, commit, register
from tests.manifest.test_codec import FEWER_EXAMPLES, rows
from tests.manifest.test_keys import tuples


def as_exported(value: Any) -> Any:
    """A record's field as Arrow shows it: enumerations as numbers, nested values as JSON."""
    if isinstance(value, enum.IntEnum):
        return int(value)
    if isinstance(value, (list, tuple, dict, msgspec.Struct)):
        return json.loads(msgspec.json.encode(value))
    return value


def expected(key: tuple[Any, ...], record: Any) -> list[Any]:
    return [*key, *(as_exported(value) for value in msgspec.structs.astuple(record))]


def exported(table: Any, nested: set[str]) -> list[list[Any]]:
    rows = [list(row.values()) for row in table.to_pylist()]
    names = table.column_names
    return [[json.loads(v) if n in nested and v is not None else v for n, v in zip(names, row)] for row in rows]


def nested_fields(table: t.Table[Any]) -> set[str]:
    hints = msgspec.inspect.type_info(table.codec.record_type).fields  # type: ignore[attr-defined]  # a StructType
    plain = (msgspec.inspect.IntType, msgspec.inspect.FloatType, msgspec.inspect.StrType, msgspec.inspect.BytesType)
    nested = {field.name for field in hints if not isinstance(field.type, (*plain, msgspec.inspect.EnumType))}
    assert nested <= set(schema(table).names)
    return nested


TABLES = [table for table in t.TABLES.values() if table is not CHANGE_LOG]


@pytest.mark.parametrize("table", TABLES, ids=lambda table: table.name)
def test_every_table_exports_every_value(path: str, table: t.Table[Any]) -> None:
    """Rows are written raw, including rows that no operation would write, and shorter ones of an older version."""
    env = ManifestEnv(path, ManifestSettings(), write=True)

    @FEWER_EXAMPLES
    @given(st.lists(st.tuples(tuples(table.key), rows(table), st.integers(0, 30)), max_size=6))
    def export(cases: list[tuple[tuple[Any, ...], Any, int]]) -> None:
        stored: dict[tuple[Any, ...], bytes] = {}
        kind = table.codec.record_type
        required = len(kind.__struct_fields__) - len(kind.__struct_defaults__)
        for key, record, cut in cases:
            raw = table.codec.encode(record)
            if table.codec.packed is None:
                array = msgspec.msgpack.decode(raw[2:])
                raw = VERSION.pack(1) + msgspec.msgpack.encode(array[: max(required, len(array) - cut)])
            stored[key] = raw
        with env.begin_write() as txn:
            txn.drop(env.handles[table.name], delete=False)
            for key, raw in stored.items():
                txn.put(table.key.pack(*key), raw, db=env.handles[table.name])
        with ReadTxn(env) as read_txn:
            actual = exported(read_txn.to_arrow(table), nested_fields(table))
            want = [expected(key, record) for key, record in read_txn.scan(table)]
        assert actual == want

    try:
        export()
    finally:
        env.close()


def test_the_change_log_exports_with_its_operations(path: str) -> None:
    with ManifestStore.open(path) as manifest:
        maker = BatchMaker(Random(3))
        for _ in range(60):
            outcome(manifest.submit(maker.batch(manifest)))
        with manifest.read() as txn:
            table = txn.to_arrow("change_log")
            changes = list(txn.changes())
            for name in t.TABLES:
                assert txn.to_arrow(name).num_rows == txn.count(t.TABLES[name])
    assert table.column("key_sequence").to_pylist() == [change.sequence for change in changes]
    assert table.column("committed_at_ms").to_pylist() == [change.committed_at_ms for change in changes]
    operations = [json.loads(text) for text in table.column("operations").to_pylist()]
    assert [len(ops) for ops in operations] == [len(change.operations) for change in changes]


def test_an_empty_table_has_all_columns(path: str) -> None:
    with ManifestStore.open(path) as manifest, manifest.read() as txn:
        table = txn.to_arrow("chunk_catalog")
        assert table.num_rows == 0
        assert table.column_names[:4] == ["origin_db_id", "chunk_id", "generation", "residency"]


def test_more_rows_than_one_step_are_exported_in_order(path: str) -> None:
    with ManifestStore.open(path) as manifest:
        commit(manifest, register(1))
        commit(manifest, *[chunk(n, size=n) for n in range(1, 60_000)])
        commit(manifest, *[chunk(n, size=n) for n in range(60_000, 70_000)])
        with manifest.read() as txn:
            table = txn.to_arrow("chunk_catalog")
    assert table.column("chunk_id").to_pylist() == list(range(1, 70_000))
    assert table.column("size_bytes").to_pylist() == list(range(1, 70_000))
