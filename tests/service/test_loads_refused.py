"""Loads that would write to quire's own records, or to columns that a table does not have, are refused with the remedy."""

from __future__ import annotations

from contextlib import closing

import pyarrow as pa
import pytest

from quire.core.errors import InvalidInput
from quire.service.client import Client
from quire.service.tickets import LOAD_PAIRS, LOAD_PUT, QUERY_KEYS, LoadPairs, PutPart
from quire.store.store import Store


def put(client: Client, load: int, **columns: list[object]) -> None:
    """Send one part."""
    batch = pa.RecordBatch.from_pydict(columns)
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch)
    client._channel.ask(LOAD_PUT, PutPart(load, "0-1", 0, sink.getvalue().to_pybytes()))


@pytest.mark.parametrize("table", ["quire_sinks", "QUIRE_LOADS", "quire_idempotency"])
def test_rows_are_not_written_to_tables_of_quire(client: Client, store: Store, table: str) -> None:
    put(client, 1, a=[1])
    with pytest.raises(InvalidInput, match="this table is reserved for quire's own records"):
        client.load_rows(1, "shop", table, ["0-1"], columns=[("a", "INTEGER")], create=True, create_database=True)
    with closing(store.sqlite("shop")) as connection:
        assert connection.execute("SELECT count(*) FROM sqlite_schema").get == 0


def test_a_missing_column_is_reported_with_those_that_exist(client: Client, store: Store) -> None:
    with closing(store.sqlite("shop", create=True)) as connection:
        connection.execute("CREATE TABLE t(id INTEGER PRIMARY KEY, Who TEXT)")
    put(client, 1, id=[1], who=["ada"], price=[2], gone=[False])
    columns = [("id", "INTEGER"), ("who", "TEXT"), ("price", "REAL"), ("gone", "BOOLEAN")]
    with pytest.raises(InvalidInput, match=r"no such column.*columns=\['price'\].*columns: id, Who"):
        client.load_rows(1, "shop", "t", ["0-1"], columns=columns, keys=("id",), delete="gone")
    put(client, 2, id=[1], who=["ada"])
    assert client.load_rows(2, "shop", "t", ["0-1"], columns=columns[:2]) == 1


def test_keys_of_quires_records_are_not_written(client: Client, store: Store) -> None:
    put(client, 1, key=[QUERY_KEYS + b"another"], value=[b"9"])
    with pytest.raises(InvalidInput, match="reserved for the set's own records"):
        client.take_parts(LOAD_PAIRS, LoadPairs(1, "cart", ("0-1",), ("key", "value"), "query", 0, create=True))
    assert list(store.kv("cart").scan()) == []
