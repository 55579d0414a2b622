"""Tables through a client: ranges, columns, sizes, and clients that are slow or lose their connection."""

from __future__ import annotations

import signal
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import quire
from quire.core.limits import SCAN_ROWS_MAX
from quire.core.settings import ManifestSettings
from quire.manifest.ops.jobs import EnqueueJob
from quire.manifest.records import DbKind, JobKind
from quire.manifest.store import ManifestStore
from quire.service import tables
from quire.service.client import Client, connect
from quire.service.tables import TableStream
from quire.service.tickets import TableTicket
from quire.store.store import Store
from tests.service.conftest import Start
from tests.service.owners import Relay, end, line, process, reserve, served

SLOW = """
import sys, quire
client = quire.connect(sys.argv[1])
rows = 0
for batch in client.scan("job_queue"):
    rows += batch.num_rows
    if rows == batch.num_rows:
        print("first", flush=True)
        sys.stdin.readline()
print(rows, flush=True)
"""
"""Reads one batch, and the rest when stdin says so."""


def grow(store: Store, jobs: int) -> None:
    """Add jobs whose rows have 64 KiB each."""
    record = store.manifest.jobs.record(JobKind.VERIFY, 0, b"x" * 65_536)
    store.manifest.submit([EnqueueJob(number, record) for number in range(1, jobs + 1)]).result()


def test_a_table_is_what_a_local_reader_sees(client: Client, store: Store) -> None:
    for number in range(5):
        store.create(f"db{number}", "stream", tags={"n": str(number)})
    with store.manifest.read() as txn:
        for name in ("db", "db_names", "change_log", "job_queue", "wal_state"):
            assert client.table(name).equals(txn.to_arrow(name))
    assert client.table("db", columns=["name", "db_id"], limit=2).to_pydict() == {
        "name": ["db0", "db1"],
        "db_id": [1, 2],
    }
    assert client.table("db", start=(2,), stop=(4,), columns=["db_id"])["db_id"].to_pylist() == [2, 3]
    assert client.table("db_names", prefix=("db3",))["name"].to_pylist() == ["db3"]
    assert client.table("job_queue", columns=["job_id"]).schema.names == ["job_id"]


def test_invalid_queries_are_refused_with_a_reason(client: Client) -> None:
    for wrong in (
        {"table": "nothing"},
        {"table": "db", "columns": ["name", "nothing"]},
        {"table": "db", "start": (1, 2, 3)},
        {"table": "db", "start": ("text",)},
        {"table": "db", "prefix": (-1,)},
        {"table": "db", "prefix": (1, 2)},
        {"table": "db_names", "start": (7,)},
        {"table": "db", "limit": -1},
    ):
        with pytest.raises(quire.InvalidInput):
            client.table(**wrong)


@pytest.fixture(scope="module")
def manifest(tmp_path_factory: pytest.TempPathFactory) -> Any:
    path = tmp_path_factory.mktemp("tables") / "manifest.lmdb"
    with ManifestStore.open(str(path), settings=ManifestSettings()) as opened:
        for number in range(120):
            opened.register_db(f"{'x' * (number % 90)}{number}", DbKind.LSM, tags={"t": "y" * (number * 37 % 900)})
        yield opened


KEYS = st.none() | st.tuples(st.integers(0, 130))


@given(start=KEYS, stop=KEYS, limit=st.integers(0, 130), size=st.integers(1, 20_000), cut=st.integers(0, 5))
def test_ranges_of_any_size_give_the_same_rows(
    manifest: Any, start: Any, stop: Any, limit: int, size: int, cut: int
) -> None:
    first, last = (start or (0,))[0], (stop or (1_000,))[0]
    wanted = [number for number in range(1, 121) if first <= number < last]
    wanted = wanted[:limit] if limit else wanted
    db_ids: list[int] = []
    after = b""
    # A client that stops after `cut` batches and continues with another stream gets no row twice and misses none.
    while True:
        ticket = TableTicket("db", (), start, stop, ("db_id",), limit - len(db_ids) if limit else 0, after)
        reader = TableStream(manifest, ticket, size)
        for number, (batch, mark) in enumerate(reader.batches()):
            db_ids += batch["db_id"].to_pylist()
            after = mark
            if cut and number + 1 == cut:
                break
        else:
            break
        if limit and len(db_ids) >= limit:
            break
    assert db_ids == wanted


def test_batches_are_bounded_in_bytes(manifest: Any) -> None:
    sizes = [batch.num_rows for batch, _ in TableStream(manifest, TableTicket("db"), 4_096).batches()]
    assert sum(sizes) == 120
    assert len(sizes) > 8


def test_batches_are_bounded_in_rows(manifest: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert SCAN_ROWS_MAX == 65_536
    monkeypatch.setattr(tables, "SCAN_ROWS_MAX", 50)
    sizes = [batch.num_rows for batch, _ in TableStream(manifest, TableTicket("db"), 1 << 30).batches()]
    assert sizes == [50, 50, 20]


def until_blocked(server: Any) -> int:
    """The number of batches that were sent when the buffers of the transport are full."""
    sent = -1
    while sent != (now := server.figures().batches_sent):
        sent = now
        time.sleep(0.4)
    return sent


def test_a_client_that_stops_reading_holds_no_resources_and_stalls_nobody(path: Path) -> None:
    with served(path, batch_bytes=64 * 1024) as (store, server):
        grow(store, jobs=400)
        slow = process(SLOW, server.address)
        try:
            assert line(slow) == "first"
            slow.send_signal(signal.SIGSTOP)
            sent = until_blocked(server)
            started = time.monotonic()
            for number in range(1_000):
                guard = store.manifest.submit(reserve(10**8 + number))
                assert store.manifest.env.gate.visitors() == []
            guard.result(60)
            elapsed = time.monotonic() - started
            figures = server.figures()
            assert (figures.streams_now, figures.batches_sent) == (1, sent), "the stream is blocked by its client"
            assert elapsed < 30
            with connect(server.address) as other:
                assert other.feed.head() == 1_001
            slow.send_signal(signal.SIGCONT)
            out, _ = slow.communicate("\n", timeout=60)
            assert int(out) == 400
            assert store.manifest.env.gate.visitors() == []
        finally:
            end(slow)


def test_closing_disconnects_a_client_that_neither_reads_nor_leaves(path: Path) -> None:
    with served(path, batch_bytes=64 * 1024, stop_seconds=0.3) as (store, server):
        grow(store, jobs=400)
        slow = process(SLOW, server.address)
        try:
            assert line(slow) == "first"
            slow.send_signal(signal.SIGSTOP)
            until_blocked(server)
            assert server.figures().streams_now == 1
            started = time.monotonic()
            server.close()
            assert time.monotonic() - started < 20
        finally:
            end(slow)


def test_a_stream_continues_after_the_last_row_when_its_connection_breaks(path: Path, tmp_path: Path) -> None:
    with served(path, batch_bytes=64 * 1024) as (store, server):
        grow(store, jobs=300)
        relay = Relay(tmp_path / "relay.sock", server.address.removeprefix("grpc+unix://"))
        pieces = [0]

        def drop_once() -> str:
            pieces[0] += 1
            return "drop" if pieces[0] % 60 == 0 else ""

        relay.fault = drop_once
        try:
            with connect(relay.uri) as client:
                sequences = [n for batch in client.scan("job_queue") for n in batch["job_id"].to_pylist()]
            assert sequences == list(range(1, 301))
            assert pieces[0] > 60
            with connect(relay.uri) as client:
                some = client.table("job_queue", start=(10,), limit=250)
            assert some["job_id"].to_pylist() == list(range(10, 260))
        finally:
            relay.close()


def test_a_stream_survives_its_owner(path: Path, owner: Start) -> None:
    with quire.open(path) as store:
        grow(store, jobs=400)
    first, address = owner()
    with quire.connect(address, timeout=60) as client:
        batches = client.scan("job_queue")
        job_ids = next(batches)["job_id"].to_pylist()
        first.kill()
        first.wait()
        owner()
        for batch in batches:
            job_ids += batch["job_id"].to_pylist()
    assert job_ids == list(range(1, 401))
