"""Streams and key-value sets of a client behave like those of the store: the same tests run on both, over all
carriers."""

from __future__ import annotations

import inspect
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import quire
from quire.core.errors import CursorLost, InvalidInput, LeaseExpired, OutOfRange, UnknownCursor
from quire.lsm.kv import Kv
from quire.lsm.reading import KvSnapshot
from quire.service import client_holdings, data_actions, handlers_data
from quire.service.client import Client
from quire.service.remote_kv import RemoteKv, RemoteKvSnapshot
from quire.service.remote_stream import RemoteStream
from quire.store.store import Store
from quire.stream.state import Retention
from quire.stream.stream import Stream
from tests.service.owners import OWNER, end, line, losing_answers, process, served

CARRIERS = ("local", "frames", "flight", "http")


@pytest.fixture(params=CARRIERS)
def source(request: pytest.FixtureRequest, path: Path) -> Iterator[Store | Client]:
    """The object with `stream` and `kv`: the store, or a client of it."""
    if request.param == "local":
        with quire.open(path) as store:
            yield store
        return
    address = {"frames": None, "flight": "grpc://127.0.0.1:0", "http": "http://127.0.0.1:0"}[request.param]
    token = str(path / "admin.token") if address else ""
    with served(path, address) as (_, server), quire.connect(server.address, token_file=token) as client:
        yield client


# ── the same methods ──────────────────────────────────────────────────────────────────────────────────────────────────
OWNERS_STREAM = {
    "append_batch",
    "has_batch",
    "mark",
    "abandon",
    "compare",
    "compress",
    "evict",
    "failure",
    "figures",
    "forked",
    "gaps",
    "hydrate",
    "keep",
    "mode",
    "open",
    "pin",
    "segments",
    "store",
    "switch",
    "tick",
    "upload",
}
"""Methods for files, tiers and the owner's threads: `quire stream` has commands for them."""
OWNERS_KV = {
    "is_busy",
    "abandon",
    "begin_load",
    "end_load",
    "ends",
    "fail",
    "fold",
    "forked",
    "install",
    "loading",
    "notify",
    "open",
    "require",
    "require_open",
    "close",
}
"""Methods for loads, snapshots and the engine's threads, and `close`: only the store closes the owner's set."""


def methods(kind: type) -> dict[str, Any]:
    return {name: member for name, member in inspect.getmembers(kind) if not name.startswith("_")}


@pytest.mark.parametrize(
    ("local", "remote", "left_out", "added"),
    [
        (Stream, RemoteStream, OWNERS_STREAM, {"settle"}),  # what the result of an append waits with
        (Kv, RemoteKv, OWNERS_KV, set()),
        (KvSnapshot, RemoteKvSnapshot, {"batches_then_close", "pairs_then_close"}, set()),  # of `kv.batches` itself
    ],
)
def test_a_client_has_the_methods_of_the_store_with_the_same_signatures(
    local: type, remote: type, left_out: set[str], added: set[str]
) -> None:
    local_methods, remote_methods = methods(local), methods(remote)
    assert set(remote_methods) - set(local_methods) == added, "the owner has every method of the client"
    assert set(local_methods) - set(remote_methods) == left_out, (
        "add the new method to the client, or to the list of owner-only methods"
    )
    for name in set(local_methods) & set(remote_methods):
        if isinstance(local_methods[name], property):
            assert isinstance(remote_methods[name], property), name
        else:
            parameters = inspect.signature(local_methods[name]).parameters
            assert list(inspect.signature(remote_methods[name]).parameters.values()) == list(parameters.values()), name


# ── keys and values ───────────────────────────────────────────────────────────────────────────────────────────────────
def test_values_are_read_as_they_were_written(source: Any) -> None:
    kv = source.kv("k", create=True)
    assert kv.get(b"a") is None
    kv.put(b"a", b"1")
    kv.put(bytearray(b"b"), memoryview(b"2"), sync=False)
    lsn = kv.write({b"c": b"3", b"a": None})
    assert (kv.get(b"a"), kv.get(b"b"), kv.get(bytearray(b"c"))) == (None, b"2", b"3")
    assert kv.get_many([b"c", b"a", b"b", b"c"]) == [b"3", None, b"2", b"3"]
    assert kv.get_many([]) == []
    assert lsn == kv.last_lsn == kv.stats().last_lsn
    assert kv.write({}) == 0
    kv.delete(b"c")
    kv.delete(b"nothing")
    kv.sync()
    kv.flush()
    kv.compact()
    assert list(kv.scan()) == [(b"b", b"2")]


def test_scans_take_ranges_prefixes_and_both_directions(source: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data_actions, "PAGE_ROWS", 7)
    kv = source.kv("k", create=True)
    pairs = [(b"%03d" % number, b"v%d" % number) for number in range(100)]
    kv.write(dict(pairs))
    assert list(kv.scan()) == pairs
    assert list(kv.scan(reverse=True)) == pairs[::-1]
    assert list(kv.scan(low=b"010", high=b"030")) == pairs[10:30]
    assert list(kv.scan(low=b"010", high=b"030", reverse=True)) == pairs[10:30][::-1]
    assert list(kv.scan(prefix=b"09")) == pairs[90:]
    assert list(kv.scan(low=b"2", high=b"1")) == []
    table = pa.Table.from_batches(kv.scan_batches(low=b"050"))
    assert table.column_names == ["key", "value"]
    assert list(zip(table["key"].to_pylist(), table["value"].to_pylist())) == pairs[50:]
    with pytest.raises(InvalidInput, match="a prefix or a range"):
        kv.scan(prefix=b"0", low=b"1")


def test_a_scan_reads_the_state_at_its_start(source: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data_actions, "PAGE_ROWS", 3)
    kv = source.kv("k", create=True)
    kv.write({b"%d" % number: b"old" for number in range(9)})
    scan = kv.scan()
    first = next(scan)
    kv.write({b"%d" % number: b"new" for number in range(9)})
    assert {first[1], *(value for _, value in scan)} == {b"old"}


def test_a_snapshot_does_not_change(source: Any) -> None:
    kv = source.kv("k", create=True)
    kv.put(b"a", b"1")
    with kv.snapshot() as before:
        kv.write({b"a": b"2", b"b": b"3"})
        assert (before.get(b"a"), before.get(b"b"), list(before.scan())) == (b"1", None, [(b"a", b"1")])
        assert before.get_many([b"b", b"a"]) == [None, b"1"]
        assert before.lsn < kv.last_lsn
    before.close()
    with pytest.raises(quire.StoreClosed, match="snapshot is closed"):
        before.get(b"a")
    with kv.iterator() as cursor:
        assert list(cursor.seek(b"b")) == [(b"b", b"3")]
        assert next(cursor.seek_for_prev(b"az")) == (b"a", b"2")
        assert next(cursor.seek_to_last()) == (b"b", b"3")
        assert next(cursor.seek_to_first()) == (b"a", b"2")


@pytest.mark.parametrize(
    ("key", "value", "error"),
    [
        ("a", b"1", InvalidInput),
        (b"a", "1", InvalidInput),
        (b"a", None, InvalidInput),
        (b"x" * 70_000, b"", OutOfRange),
    ],
)
def test_an_invalid_key_or_value_is_refused(source: Any, key: Any, value: Any, error: type[Exception]) -> None:
    with pytest.raises(error):
        source.kv("k", create=True).put(key, value)


def test_a_batch_with_a_key_is_written_once(source: Any) -> None:
    kv, key = source.kv("k", create=True), bytes(range(16))
    lsn = kv.write({b"a": b"1"}, key=key)
    kv.put(b"a", b"2")
    assert kv.write({b"a": b"1"}, key=key) == lsn
    assert kv.get(b"a") == b"2", "the repeated call has changed nothing"
    with pytest.raises(InvalidInput, match="16 bytes"):
        kv.write({b"a": b"1"}, key=b"short")


# ── streams ───────────────────────────────────────────────────────────────────────────────────────────────────────────
def test_records_are_read_as_they_were_appended(source: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data_actions, "PAGE_ROWS", 4)
    stream = source.stream("s", create=True)
    one = stream.append(b"one")
    assert (one.record, one.count, one.result()) == (1, 1, 1)
    assert one.done
    more = [stream.append(record) for record in ([b"two", b""], pa.array([b"four"]), bytearray(b"five"))]
    assert [appended.result() for appended in more] == [2, 4, 5]
    assert stream.append([b"%d" % number for number in range(10)]).result() == 6
    assert (stream.first_record, stream.end_record, stream.info().records) == (1, 16, 15)
    records = list(stream.read())
    assert [record.id for record in records] == list(range(1, 16))
    assert [record.payload for record in records[:5]] == [b"one", b"two", b"", b"four", b"five"]
    assert [record.id for record in stream.read(3, 9)] == list(range(3, 9))
    assert list(stream.read(16)) == list(stream.read(5, 2)) == []
    table = pa.Table.from_batches(stream.read_batches(2))
    assert table.column_names == ["id", "timestamp", "payload"]
    assert table["id"].to_pylist() == list(range(2, 16))
    assert stream.seek(records[0].timestamp_ms) == 1
    assert stream.seek(records[-1].timestamp_ms + 1) == 16
    with pytest.raises(OutOfRange, match="does not exist yet"):
        list(stream.read(17))


def test_an_append_whose_result_is_not_awaited_is_durable_too(source: Any) -> None:
    stream = source.stream("s", create=True)
    for number in range(1_000):
        stream.append(b"%d" % number)
    assert stream.sync() == 1_001
    assert [record.payload for record in stream.read()] == [b"%d" % number for number in range(1_000)]


def test_a_tail_returns_new_records_and_ends_at_its_timeout(source: Any) -> None:
    stream = source.stream("s", create=True)
    stream.append([b"a", b"b"]).result()
    assert [record.payload for record in stream.tail(1, timeout=0.2)] == [b"a", b"b"]
    assert (stream.wait(2, 0), stream.wait(3, 0.05)) == (True, False)
    tail = stream.tail(timeout=60)
    payloads: list[bytes] = []
    reader = threading.Thread(target=lambda: payloads.append(next(tail).payload))
    reader.start()
    while reader.is_alive():  # a tail starts with the first record after the call
        stream.append(b"later").result()
        reader.join(0.05)
    assert payloads == [b"later"]


def test_consumers_keep_their_positions(source: Any) -> None:
    stream = source.stream("s", create=True)
    stream.append([b"a", b"b", b"c"]).result()
    assert stream.register("app") == 1
    stream.ack("app", 3)
    assert (stream.position("app"), stream.register("app", 2)) == (3, 3)
    assert stream.consumers["app"].position == 3
    with pytest.raises(OutOfRange):
        stream.ack("app", 9)
    stream.drop_consumer("app")
    with pytest.raises(UnknownCursor):
        stream.position("app")


def test_records_removed_by_retention_raise_instead_of_being_skipped(source: Any) -> None:
    stream = source.stream("s", create=True)
    stream.append([b"a", b"b"]).result()
    assert stream.seal()
    assert not stream.seal()
    stream.retain(Retention(bytes=1))
    assert stream.retention == Retention(bytes=1)
    assert stream.retire() == 1
    with pytest.raises(CursorLost):
        next(stream.read(1))


@pytest.mark.parametrize("records", ["text", [b"a", "b"], [1], None, pa.array([b"a", None])])
def test_an_invalid_record_is_refused(source: Any, records: Any) -> None:
    with pytest.raises(InvalidInput):
        source.stream("s", create=True).append(records)


def test_an_append_with_a_key_is_appended_once(source: Any) -> None:
    stream, key = source.stream("s", create=True), bytes(range(16))
    first = stream.append([b"a", b"b"], key=key).result()
    assert stream.append(b"c").result() == 3
    assert stream.append([b"a", b"b"], key=key).result() == first
    assert [record.payload for record in stream.read()] == [b"a", b"b", b"c"]


def test_a_missing_name_or_one_of_another_kind_is_refused(source: Any) -> None:
    source.stream("s", create=True)
    with pytest.raises(quire.WrongKind):
        source.kv("s", create=True)
    for open_one in (source.kv, source.stream):
        with pytest.raises(quire.UnknownDatabase):
            open_one("nothing")


# ── clients only ──────────────────────────────────────────────────────────────────────────────────────────────────────
def test_writes_whose_answers_are_lost_happen_once(client: Client) -> None:
    kv, stream = client.kv("k", create=True), client.stream("s", create=True)
    with losing_answers(3) as lost:
        lsn = kv.write({b"a": b"1"})
        assert stream.append([b"x", b"y"]).result() == 1
    assert len(lost) == 3
    assert kv.last_lsn == lsn
    assert [record.payload for record in stream.read()] == [b"x", b"y"]


def test_sync_waits_for_appends_that_another_thread_is_sending(
    client: Client, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hazard: `sync` returned while the background thread was sending an append, which was not durable yet."""
    stream, call, is_sending = client.stream("s", create=True), client._channel.call, threading.Event()

    def slow(name: str, *arguments: Any, **options: Any) -> Any:
        if name == "stream.append":
            is_sending.set()
            time.sleep(0.3)
        return call(name, *arguments, **options)

    monkeypatch.setattr(client._channel, "call", slow)
    stream.append(b"a")
    assert is_sending.wait(30)
    assert stream.sync() == 2
    assert store.stream("s").end_record == 2


@pytest.mark.parametrize("method", ["sync", "close"])
def test_an_append_that_fails_unnoticed_is_reported(
    client: Client, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    """Hazard: `sync` and `close` returned as if every append were durable, although one had failed."""
    stream, call = client.stream("s", create=True), client._channel.call

    def fail(name: str, *arguments: Any, **options: Any) -> Any:
        if name == "stream.append":
            raise quire.Unavailable("the owner cannot be reached")
        return call(name, *arguments, **options)

    monkeypatch.setattr(client._channel, "call", fail)
    with pytest.raises(quire.Unavailable):
        stream.append(b"a").result()
    assert stream.sync() == 1  # that one was reported by its result
    unnoticed = stream.append(b"b")
    stream.seal()
    monkeypatch.undo()
    with pytest.raises(quire.Unavailable, match="cannot be reached"):
        getattr(stream if method == "sync" else client, method)()
    assert unnoticed.is_settled
    getattr(stream if method == "sync" else client, method)()


@pytest.mark.parametrize("kind", ["set", "snapshot"])
def test_values_that_are_too_long_for_one_answer_are_refused(
    client: Client, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """Hazard: a small request that repeats the key of a long value made the owner build an answer of any size."""
    monkeypatch.setattr(handlers_data, "VALUES_BYTES_MAX", 1 << 20)
    kv = client.kv("k", create=True)
    kv.write({b"long": bytes(1 << 16), b"short": b"1"})
    source = kv.snapshot() if kind == "snapshot" else kv
    with pytest.raises(OutOfRange, match="too long for one answer"):
        source.get_many([b"long"] * 1_000)
    keys = [b"short", b"none", b"long"] * 5 + [b"short"] * 100
    assert source.get_many(keys) == [b"1", None, bytes(1 << 16)] * 5 + [b"1"] * 100


def test_an_append_that_is_too_large_is_refused_alone(client: Client, store: Store) -> None:
    stream = client.stream("s", create=True)
    limit = store.settings.stream.record_bytes_max
    with stream._sending:  # all three are sent together
        first, large, last = stream.append(b"a"), stream.append(bytes(limit + 1)), stream.append(b"b")
    assert (first.result(), last.result()) == (1, 2)
    with pytest.raises(OutOfRange, match="size limit"):
        large.result()
    with pytest.raises(OutOfRange, match="too long for one call"):
        stream.append(bytes(store.settings.service.body_bytes_max))


def test_resources_of_a_client_are_its_own_and_are_released_with_it(
    server: Any, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_holdings, "GRACE_SECONDS", 0.0)
    held = server._service.holdings
    with quire.connect(server.address) as one, quire.connect(server.address) as other:
        kv = one.kv("k", create=True)
        kv.put(b"a", b"1")
        snapshot = kv.snapshot()
        stolen = RemoteKvSnapshot(
            other._channel, "k", other._renewing, data_actions.HeldSnapshot(snapshot._snapshot, snapshot.lsn)
        )
        with pytest.raises(LeaseExpired):
            stolen.get(b"a")
        with pytest.raises(LeaseExpired):
            list(stolen.scan())
        assert snapshot.get(b"a") == b"1"
        held.sweep()
        assert len(held) == 1
    while server._frames.connections:
        time.sleep(0.01)
    held.sweep()
    assert len(held) == 0
    assert store.kv("k").snapshots.lsns() == ()


def test_a_client_imports_neither_a_web_server_nor_spark(server: Any) -> None:
    program = """
import sys, quire
client = quire.connect(sys.argv[1])
client.kv("k", create=True).put(b"a", b"1")
client.stream("s", create=True).append(b"x").result()
client.sqlite("shop", create=True).execute("select 1").fetchall()
print(sorted({"starlette", "uvicorn", "pyspark", "obstore", "jwt"} & set(sys.modules)))
"""
    command = [sys.executable, "-c", program, server.address]
    assert subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout == "[]\n"


def test_another_process_reads_beside_the_owner_what_a_client_wrote(path: Path) -> None:
    owner = process(OWNER, str(path))
    with quire.connect(line(owner)) as client:
        stream, kv = client.stream("s", create=True), client.kv("k", create=True)
        stream.append([b"a", b"b"]).result()
        kv.write({b"x": b"1", b"y": b"2"})
        with quire.open(path, "r") as reader:
            assert [record.payload for record in reader.stream("s").read()] == [b"a", b"b"]
            assert list(reader.kv("k").scan()) == [(b"x", b"1"), (b"y", b"2")]
            stream.append(b"c").result()
            kv.delete(b"x")
            assert [record.payload for record in reader.stream("s").read(3)] == [b"c"]
            assert reader.kv("k").get(b"x") is None
            with pytest.raises(quire.ReadOnly):
                reader.kv("k").put(b"x", b"1")
    end(owner)
