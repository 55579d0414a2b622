"""Loading rows into SQLite through a client: parts in order, one transaction, exactly once; and leased versions."""

from __future__ import annotations

from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import closing
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from quire.core.errors import (
    AlreadyExists,
    Conflict,
    DiskFull,
    InvalidInput,
    LeaseExpired,
    NotFound,
    OutOfRange,
    UnknownDatabase,
)
from quire.service import loads, tables
from quire.service.client import Client
from quire.service.loads import Loads, values_of
from quire.service.tickets import (
    LOAD_PAIRS,
    LOAD_PUT,
    LOAD_RECORDS,
    QUERY_KEYS,
    LoadPairs,
    LoadRecords,
    PutPart,
    TableTicket,
)
from quire.store.store import Store
from tests.service.owners import losing_answers, reserve
from tests.syncs import HeldSyncs

COLUMNS = [("a", "INTEGER"), ("b", "TEXT")]
LOAD = 4711


def arrow(*rows: tuple[Any, ...]) -> bytes:
    """Rows as the bytes of an Arrow stream."""
    sink = pa.BufferOutputStream()
    batch = pa.RecordBatch.from_pylist([{"a": a, "b": b} for a, b in rows])
    with pa.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch)
    return bytes(sink.getvalue())


def put(client: Client, part: str, data: bytes, load: int = LOAD, step: int = 100) -> None:
    for offset in range(0, len(data), step):
        client._channel.ask(LOAD_PUT, PutPart(load, part, offset, data[offset : offset + step]))


def rows_of(store: Store, sql: str = "SELECT a, b FROM t ORDER BY a") -> list[tuple[Any, ...]]:
    with closing(store.sqlite("shop")) as connection:
        return list(connection.execute(sql))


@pytest.fixture
def shop(store: Store) -> Store:
    with closing(store.sqlite("shop", create=True)) as connection:
        connection.execute("CREATE TABLE t(a INTEGER PRIMARY KEY, b TEXT)")
    return store


def staged(store: Store) -> list[str]:
    return [path.name for path in Path(store.path, "scratch").glob("*")]


def test_exactly_the_named_parts_are_inserted(client: Client, shop: Store) -> None:
    put(client, "0-1", arrow((1, "x"), (2, None)))
    put(client, "1-2", arrow((3, "of an attempt that failed")))
    put(client, "1-3", arrow((3, "y")))
    assert client.load_rows(LOAD, "shop", "t", ["0-1", "1-3"], columns=COLUMNS) == 3
    assert rows_of(shop) == [(1, "x"), (2, None), (3, "y")]
    assert staged(shop) == []


def test_tasks_may_all_begin_at_once(client: Client, shop: Store) -> None:
    with ThreadPoolExecutor(8) as pool:
        for load in range(5):
            parts = [f"{load}-{number}" for number in range(8)]
            tuple(pool.map(lambda part, load=load: put(client, part, arrow((load, part)), load=load), parts))
    assert client.load_rows(4, "shop", "t", ["4-7"], columns=COLUMNS) == 1


def test_a_load_is_inserted_once_however_often_it_is_requested(client: Client, shop: Store) -> None:
    put(client, "0-1", arrow((1, "x")))
    with losing_answers() as lost:
        assert client.load_rows(LOAD, "shop", "t", ["0-1"], columns=COLUMNS) == 1
    assert lost
    assert client.load_rows(LOAD, "shop", "t", ["0-1"], columns=COLUMNS, overwrite=True) == 1
    assert rows_of(shop) == [(1, "x")]
    assert rows_of(shop, "SELECT load, rows FROM quire_loads") == [(LOAD, 1)]


@pytest.mark.parametrize("query", ["", "q"])
def test_a_repeated_load_is_answered_when_the_first_call_is_durable(client: Client, shop: Store, query: str) -> None:
    """Hazard: the first call waits for the disk. The repeat finds it recorded, writes nothing and has nothing to wait for."""
    put(client, "0-1", arrow((1, "x")))
    once: dict[str, Any] = {"query": query, "batch": 7} if query else {}

    def load() -> int:
        return client.load_rows(LOAD, "shop", "t", ["0-1"], columns=COLUMNS, **once)

    with ThreadPoolExecutor(3) as pool:
        with HeldSyncs(shop.pages.open("shop").wal) as syncs:
            first = pool.submit(load)
            syncs.wait_for_one()
            repeat = pool.submit(load)
            either: list[Future[Any]] = [repeat, pool.submit(syncs.wait_for_one)]
            wait(either, return_when=FIRST_COMPLETED)
            assert not repeat.done()
        assert (first.result(), repeat.result()) == (1, 1)


def test_repeated_bytes_change_nothing_and_a_gap_is_refused(client: Client, shop: Store) -> None:
    data = arrow((1, "x"))
    put(client, "0-1", data)
    put(client, "0-1", data, step=64)
    with pytest.raises(InvalidInput, match="gap"):
        client._channel.ask(LOAD_PUT, PutPart(LOAD, "0-1", len(data) + 1, b"x"))
    for name in ("../x", "0", "a-b", ""):
        with pytest.raises(InvalidInput, match="invalid name of a part"):
            client._channel.ask(LOAD_PUT, PutPart(LOAD, name, 0, b"x"))
    assert client.load_rows(LOAD, "shop", "t", ["0-1"], columns=COLUMNS) == 1


def test_a_row_that_the_table_refuses_rolls_back_the_whole_load(client: Client, shop: Store) -> None:
    put(client, "0-1", arrow((1, "x"), (2, "y"), (1, "again")))
    with pytest.raises(Conflict, match="UNIQUE"):
        client.load_rows(LOAD, "shop", "t", ["0-1"], columns=COLUMNS)
    assert rows_of(shop) == []
    assert rows_of(shop, "SELECT count(*) FROM sqlite_schema WHERE name = 'quire_loads'") == [(0,)]
    client.drop_load(LOAD)
    client.drop_load(LOAD)
    assert staged(shop) == []


def test_overwriting_is_part_of_the_transaction(client: Client, shop: Store) -> None:
    put(client, "0-1", arrow((1, "old"), (2, "old")))
    client.load_rows(LOAD, "shop", "t", ["0-1"], columns=COLUMNS)
    put(client, "0-1", arrow((1, "new")), load=LOAD + 1)
    client.load_rows(LOAD + 1, "shop", "t", ["0-1"], columns=COLUMNS, overwrite=True)
    assert rows_of(shop) == [(1, "new")]


def test_missing_or_mismatched_targets_and_parts_are_refused(client: Client, shop: Store) -> None:
    put(client, "0-1", arrow((1, "x")))
    with pytest.raises(UnknownDatabase):
        client.load_rows(LOAD, "nope", "t", ["0-1"], columns=COLUMNS)
    with pytest.raises(NotFound, match="no such table"):
        client.load_rows(LOAD, "shop", "u", ["0-1"], columns=COLUMNS)
    with pytest.raises(NotFound, match="is missing"):
        client.load_rows(LOAD, "shop", "t", ["0-2"], columns=COLUMNS)
    with pytest.raises(InvalidInput, match="columns of a part differ"):
        client.load_rows(LOAD, "shop", "t", ["0-1"], columns=COLUMNS[:1])
    with pytest.raises(InvalidInput, match="no such column"):
        client.load_rows(LOAD, "shop", "t", ["0-1"], columns=[("a", ""), ("c", "")])
    assert client.load_rows(LOAD, "shop", "u", ["0-1"], columns=COLUMNS, create=True) == 1
    assert rows_of(shop, "SELECT sql FROM sqlite_schema WHERE name = 'u'") == [
        ('CREATE TABLE "u"("a" INTEGER, "b" TEXT)',)
    ]


def test_an_abandoned_load_expires(shop: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire.service.loads.IDLE_SECONDS", 0.0)
    loads = Loads(shop)
    loads.put(PutPart(1, "0-1", 0, b"x"))
    loads.put(PutPart(2, "0-1", 0, b"x"))
    assert staged(shop) == ["2"]


def test_values_are_what_sqlite_can_store() -> None:
    import datetime as dt
    from decimal import Decimal

    moment = dt.datetime(2024, 2, 29, 12, 30, tzinfo=dt.UTC)
    assert values_of(pa.array([True, None, False])) == [1, None, 0]
    assert values_of(pa.array([moment], pa.timestamp("us", "UTC"))) == ["2024-02-29 12:30:00.000000"]
    assert values_of(pa.array([moment.date()])) == ["2024-02-29"]
    assert values_of(pa.array([Decimal("1.50")])) == ["1.50"]
    assert values_of(pa.array([b"x", None])) == [b"x", None]


def test_a_leased_version_is_not_a_snapshot_and_expires(client: Client, shop: Store) -> None:
    """Versions leased to Spark were listed among the users' snapshots."""
    lease = client.lend(["shop"], 60)
    (view,) = lease.views
    assert (view.snapshot_id, view.name, view.size_pages > 0) == (0, "", True)
    with shop.pages.open_view("shop", shop.snapshot("shop", "now").snapshot_id) as now:
        assert dict(view.open(shop.pages.sources).scan()) == dict(now.scan())
    with losing_answers() as lost:
        client.lend(["shop"], 60)
    assert lost, "a lease whose answer was lost is requested again, and the first one expires"
    assert [snapshot.name for snapshot in client.snapshots("shop")] == ["now"]
    client.renew_lease(lease.lease_id)
    assert client.lend(["shop"], 60, lease_id=lease.lease_id).lease_id == lease.lease_id
    client.release_lease(lease.lease_id)
    client.release_lease(lease.lease_id)
    with pytest.raises(LeaseExpired):
        client.renew_lease(lease.lease_id)
    with pytest.raises(LeaseExpired):
        client.lend(["shop"], 60, lease_id=lease.lease_id)
    for seconds in (0, -1, 1e9):
        with pytest.raises(InvalidInput):
            client.lend(["shop"], seconds)


def test_cuts_are_keys_of_the_table_in_order(client: Client, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "CUT_ROWS_MIN", 10)
    for number in range(50):
        store.manifest.submit(reserve(1_000 + number)).result()
    cuts = client.table_cuts("change_log", 4)
    assert len(cuts) == 3
    assert cuts == sorted(cuts)
    ends = [None, *cuts, None]
    parts = [client.table("change_log", start=a, stop=b)["sequence"].to_pylist() for a, b in pairwise(ends)]
    assert all(parts)
    assert list(chain.from_iterable(parts)) == list(range(1, 51))
    assert client.table_cuts("change_log", 1) == []
    assert client.table_cuts("db", 4) == [], "a few rows are one part"
    assert all((20,) < cut < (40,) for cut in client.table_cuts("change_log", 4, start=(20,), stop=(40,)))


def test_a_call_cannot_ask_for_any_number_of_parts(
    client: Client, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hazard: a call with a billion parts kept a thread and a read transaction for hours."""
    monkeypatch.setattr(tables, "CUT_ROWS_MIN", 10)
    monkeypatch.setattr(tables, "CUT_PARTS_MAX", 1_000)
    for number in range(50):
        store.manifest.submit(reserve(1_000 + number)).result()
    assert len(client.table_cuts("change_log", 1_000)) < 50
    with pytest.raises(InvalidInput, match="so many parts"):
        client.table_cuts("change_log", 1_001)


def test_raw_rows_are_the_bytes_on_disk_without_their_checksums(client: Client, store: Store) -> None:
    for number in range(5):
        store.create(f"db{number}", "stream")
    (batch,) = client._channel.stream(TableTicket("change_log", (), (2,), (5,), raw=True))
    with store.manifest.read() as txn:
        from quire.manifest.change import CHANGE_LOG

        local = [(key, CHANGE_LOG.rows.opened(key, raw)) for key, raw in txn.raw_scan(CHANGE_LOG, start=(2,))][:3]
    assert list(zip(batch["key"].to_pylist(), batch["value"].to_pylist())) == local


# ── batches of streaming queries ──────────────────────────────────────────────────────────────────────────────────────
QUERY = "cc73cb48-e9fa-4786-9855-08d03e9b0f31"


def test_a_batch_is_written_once_whichever_load_contains_it(client: Client, shop: Store) -> None:
    for load, batch, key in ((1, 0, 1), (2, 0, 2), (3, 1, 3), (4, 0, 4)):
        put(client, "0-1", arrow((key, "x")), load)
        rows = client.load_rows(load, "shop", "t", ["0-1"], columns=COLUMNS, query=QUERY, batch=batch)
        assert rows == (0 if load == 4 else 1), "a batch older than the last is not counted"
    assert rows_of(shop) == [(1, "x"), (3, "x")]
    put(client, "0-1", arrow((5, "x")), 5)
    client.load_rows(5, "shop", "t", ["0-1"], columns=COLUMNS, query="another", batch=0)
    assert rows_of(shop) == [(1, "x"), (3, "x"), (5, "x")]
    assert rows_of(shop, "SELECT query, batch, rows FROM quire_sinks ORDER BY batch") == [
        ("another", 0, 1),
        (QUERY, 1, 1),
    ]
    assert staged(shop) == []


def test_a_batch_that_fails_is_not_recorded(client: Client, shop: Store) -> None:
    put(client, "0-1", arrow((1, "x"), (1, "y")))
    with pytest.raises(Conflict):
        client.load_rows(LOAD, "shop", "t", ["0-1"], columns=COLUMNS, query=QUERY, batch=0)
    put(client, "0-1", arrow((1, "y")), LOAD + 1)
    assert client.load_rows(LOAD + 1, "shop", "t", ["0-1"], columns=COLUMNS, query=QUERY, batch=0) == 1
    assert rows_of(shop) == [(1, "y")]


def test_a_drop_after_the_commit_undoes_nothing(client: Client, shop: Store) -> None:
    put(client, "0-1", arrow((1, "x")))
    client.load_rows(LOAD, "shop", "t", ["0-1"], columns=COLUMNS, query=QUERY, batch=0)
    client.drop_load(LOAD)
    assert rows_of(shop) == [(1, "x")]


def test_rows_with_a_key_replace_and_flagged_ones_are_deleted(client: Client, shop: Store) -> None:
    flagged = [("a", "INTEGER"), ("b", "TEXT"), ("gone", "BOOLEAN")]
    put(client, "0-1", flags((1, "x", False), (2, "y", None), (1, "z", False), (2, None, True), (3, "w", True)))
    client.load_rows(LOAD, "shop", "t", ["0-1"], columns=flagged, keys=("a",), delete="gone")
    assert rows_of(shop) == [(1, "z")]
    put(client, "0-1", flags((2, None, True), (2, "back", False)), LOAD + 1)
    client.load_rows(LOAD + 1, "shop", "t", ["0-1"], columns=flagged, keys=("a",), delete="gone")
    assert rows_of(shop) == [(1, "z"), (2, "back")]
    put(client, "0-1", arrow((1, "p"), (1, "q")), LOAD + 2)
    client.load_rows(LOAD + 2, "shop", "u", ["0-1"], columns=COLUMNS, keys=("a", "b"), create=True)
    assert rows_of(shop, "SELECT a, b FROM u") == [(1, "p"), (1, "q")], (
        "all columns are keys: there is nothing to update"
    )
    assert rows_of(shop, "SELECT name FROM pragma_table_info('u') WHERE pk") == [("a",), ("b",)]


def flags(*rows: tuple[Any, ...]) -> bytes:
    sink = pa.BufferOutputStream()
    schema = pa.schema([("a", pa.int64()), ("b", pa.string()), ("gone", pa.bool_())])
    batch = pa.RecordBatch.from_pylist([dict(zip(schema.names, row)) for row in rows], schema=schema)
    with pa.ipc.new_stream(sink, schema) as writer:
        writer.write_batch(batch)
    return bytes(sink.getvalue())


def test_unusable_keys_are_refused(client: Client, shop: Store) -> None:
    put(client, "0-1", arrow((None, "x")))
    with pytest.raises(InvalidInput, match="a row has no key"):
        client.load_rows(LOAD, "shop", "t", ["0-1"], columns=COLUMNS, keys=("a",))
    with pytest.raises(InvalidInput, match="ON CONFLICT") as refused:
        client.load_rows(LOAD, "shop", "t", ["0-1"], columns=COLUMNS, keys=("b",))
    assert "CREATE UNIQUE INDEX" in str(refused.value)
    assert rows_of(shop) == []


def test_a_table_that_exists_is_refused_or_left_alone(client: Client, shop: Store) -> None:
    put(client, "0-1", arrow((1, "x")))
    with pytest.raises(AlreadyExists):
        client.load_rows(LOAD, "shop", "t", ["0-1"], columns=COLUMNS, create=True, exists="error")
    assert client.load_rows(LOAD, "shop", "t", ["0-1"], columns=COLUMNS, create=True, exists="ignore") == 0
    put(client, "0-1", arrow((1, "x")), LOAD + 1)
    new: dict[str, Any] = {"create": True, "create_database": True, "exists": "error"}
    assert client.load_rows(LOAD + 1, "new", "t", ["0-1"], columns=COLUMNS, **new) == 1
    assert rows_of(shop) == []
    with closing(shop.sqlite("new")) as connection:
        assert list(connection.execute("SELECT a, b FROM t")) == [(1, "x")]


def columns(**values: list[Any]) -> bytes:
    """Columns as the bytes of an Arrow stream."""
    sink = pa.BufferOutputStream()
    batch = pa.RecordBatch.from_pydict(values)
    with pa.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch)
    return bytes(sink.getvalue())


def pairs(client: Client, load: int, batch: int, **more: Any) -> int:
    names = ("key", "value", *([more["delete"]] if "delete" in more else []))
    return client.take_parts(LOAD_PAIRS, LoadPairs(load, "cart", ("0-1",), names, QUERY, batch, create=True, **more))


def test_a_batch_is_written_to_a_set_once_in_one_batch(client: Client, store: Store) -> None:
    for load, batch, value in ((1, 0, "first"), (2, 0, "again"), (3, 1, None)):
        put(client, "0-1", columns(key=["a", "b"], value=[value, "x"]), load)
        assert pairs(client, load, batch) == (0 if load == 2 else 2)
        if load == 2:
            assert store.kv("cart").get(b"a") == b"first"
    assert [key for key, _ in store.kv("cart").scan()] == [QUERY_KEYS + QUERY.encode(), b"b"]
    put(client, "0-1", columns(key=[b"b", b"c", b"c"], value=[b"", b"1", b"2"], gone=[True, None, False]), 4)
    pairs(client, 4, 2, delete="gone")
    assert list(store.kv("cart").scan(low=b"a")) == [(b"c", b"2")]
    put(client, "0-1", columns(key=["d"], value=["new"]), 5)
    pairs(client, 5, 3, overwrite=True)
    assert list(store.kv("cart").scan(low=b"a")) == [(b"d", b"new")]
    put(client, "0-1", columns(key=[None], value=["x"]), 6)
    with pytest.raises(InvalidInput, match="no key"):
        pairs(client, 6, 4)
    client.drop_load(6)
    assert store.kv("cart").get(QUERY_KEYS + QUERY.encode()) == b"3"
    assert staged(store) == []


def records(client: Client, load: int, batch: int, query: str = QUERY) -> int:
    return client.take_parts(LOAD_RECORDS, LoadRecords(load, "log", ("0-1",), query, batch, True))


def test_a_load_whose_append_a_full_disk_refuses_is_appended_by_the_repeat(client: Client, store: Store) -> None:
    """Hazard: the repeat found the pending append of the first call, dropped the parts and reported success; then the disk was
    full, and the records were in no stream."""
    stream = store.stream("log", create=True)
    put(client, "0-1", columns(payload=["a", "b"]), LOAD)
    key = LOAD.to_bytes(16, "little")
    pending = stream.append([b"a", b"b"], key=key)  # as by the first call, which has not waited for the disk yet

    def full(*_: Any, **__: Any) -> None:
        raise DiskFull("no space left")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stream.hot, "_write_out", full)
        with pytest.raises(DiskFull):
            records(client, LOAD, 0, "")
    with pytest.raises(DiskFull):
        pending.result()
    assert records(client, LOAD, 0, "") == 2
    assert [record.payload for record in stream.read()] == [b"a", b"b"]


def test_a_batch_is_appended_to_a_stream_once(client: Client, store: Store) -> None:
    for load, batch, query in ((1, 0, QUERY), (2, 0, QUERY), (3, 1, QUERY), (4, 0, QUERY), (5, 0, "other"), (6, 0, "")):
        put(client, "0-1", columns(payload=[f"{load}", f"{load}!"]), load)
        records(client, load, batch, query)
    assert records(client, 6, 0, "") == 0, "a repeated load has no parts"
    payloads = [record.payload.decode() for record in store.stream("log").read()]
    assert payloads == ["1", "1!", "3", "3!", "5", "5!", "6", "6!"]
    put(client, "0-1", columns(payload=[None]), 7)
    with pytest.raises(InvalidInput, match="no payload"):
        records(client, 7, 2)


def test_a_batch_that_would_fill_the_memory_is_refused(
    client: Client, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loads, "BATCH_BYTES_MAX", 10)
    put(client, "0-1", columns(payload=["much too long"]))
    with pytest.raises(OutOfRange, match="too large"):
        records(client, LOAD, 0)


def test_an_overwrite_that_would_fill_the_memory_with_keys_to_delete_is_refused(
    client: Client, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hazard: all keys of the set were gathered, however many it has."""
    kept, old = b"k" * 150, [b"%0100d" % number for number in range(3)]
    store.kv("cart", create=True).write({kept: b"1", **dict.fromkeys(old, b"1")})
    monkeypatch.setattr(loads, "BATCH_BYTES_MAX", 299)
    put(client, "0-1", columns(key=[kept], value=[b"2"]), 1)
    with pytest.raises(OutOfRange, match="drop the set first"):
        pairs(client, 1, 0, overwrite=True)
    assert store.kv("cart").get(kept) == b"1"
    monkeypatch.setattr(loads, "BATCH_BYTES_MAX", 300)
    pairs(client, 1, 0, overwrite=True)
    assert list(store.kv("cart").scan(low=b"0")) == [(kept, b"2")], "keys that stay do not count"
