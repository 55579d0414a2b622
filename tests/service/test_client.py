"""A client behaves like a local store and returns the same values."""

from __future__ import annotations

import asyncio
import pickle
import threading
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

import quire
from quire.core.json_values import plain
from quire.durable.failpoints import armed
from quire.manifest.feed import Start
from quire.manifest.records import JobKind, JobState
from quire.service.client import Client, connect
from quire.store.store import Store
from tests.service.owners import reserve


def fill(store: Store, name: str, numbers: range, byte: bytes) -> None:
    opened = store.pages.open(name)
    with opened.begin() as transaction:
        for number in numbers:
            transaction.write_page(number, byte * opened.page_size)


@pytest.fixture
def shop(store: Store) -> None:
    store.create("shop", "pages", tags={"by": "ann"})
    fill(store, "shop", range(8), b"a")


def test_databases_are_created_listed_renamed_and_dropped(client: Client, store: Store) -> None:
    created = client.create("shop", "pages", tags={"by": "ann"})
    assert plain(created) == plain(store.database("shop"))
    assert plain(client.databases()) == plain(store.databases())
    assert client.rename("shop", "bazaar").name == "bazaar"
    assert client.drop("bazaar").db_id == created.db_id
    assert client.databases() == []


def test_errors_keep_their_class_and_fields(client: Client) -> None:
    client.create("shop", "pages")
    with pytest.raises(quire.NameTaken) as taken:
        client.create("shop", "pages")
    assert taken.value.where["name"] == "shop"
    assert taken.value.hint
    with pytest.raises(quire.UnknownDatabase):
        client.database("nothing")
    with pytest.raises(quire.InvalidInput, match="unknown kind"):
        client.create("x", "tape")
    with pytest.raises(quire.InvalidName):
        client.create("a/\n", "pages")


@pytest.mark.usefixtures("shop")
def test_snapshots_forks_and_views(client: Client, store: Store) -> None:
    monday = client.snapshot("shop", "monday", tags={"by": "bob"})
    assert monday == store.manifest.snapshots.get("shop", "monday")
    fill(store, "shop", range(4), b"b")
    fork = client.fork("shop", "copy", at="monday")
    assert (fork.parent, fork.name) == ("shop", "copy")
    assert client.snapshots("shop") == [monday]
    assert client.get_snapshot("shop", monday.snapshot_id) == monday
    view = client.view("shop", "monday")
    assert view == store.pages.view("shop", "monday")
    store.fork("shop", "bare")
    assert client.views(["shop", "bare"], "monday") == [view, None]
    with view.open(store.pages.sources) as reader:
        assert reader.read_page(0)[:1] == b"a"
    done = client.rollback("shop", to="monday")
    assert done.snapshot == f"before-rollback-{done.before_lsn}"
    with store.pages.open("shop").open_snapshot() as reader:
        assert (reader.lsn, reader.read_page(0)[:1]) == (done.lsn, b"a")
    client.rollback("shop", to=done.before_lsn)
    with store.pages.open("shop").open_snapshot() as reader:
        assert reader.read_page(0)[:1] == b"b"
    assert client.fork("shop", "then", at=datetime.now(UTC)).parent == "shop"
    assert client.drop_snapshot("shop", "monday") == monday
    with pytest.raises(quire.UnknownSnapshot):
        client.view("shop", "monday")


@pytest.mark.usefixtures("shop")
def test_a_leased_reader_reads_its_version_while_the_owner_writes_and_checkpoints(client: Client, store: Store) -> None:
    with client.reader("shop", tags={"who": "ann"}, ttl_seconds=10) as reader:
        assert store.pages.floor(reader.db_id) == reader.lsn
        fill(store, "shop", range(8), b"b")
        assert client.checkpoint("shop").state is JobState.SUCCEEDED
        assert {image[:1] for image in reader.read_pages(range(8)).values()} == {b"a"}
        assert reader.renew().lsn == reader.lsn
    assert store.pages.floor(reader.db_id) > reader.lsn
    with pytest.raises(quire.OutOfRange), client.reader("shop") as reader:
        reader.read_page(8)


@pytest.mark.usefixtures("shop")
def test_checkpoint_and_merge_run_at_the_owner(client: Client) -> None:
    job = client.checkpoint("shop", wait=False)
    assert job.kind is JobKind.CHECKPOINT
    assert client.checkpoint("shop").state is JobState.SUCCEEDED
    assert client.table("chunk_catalog").num_rows == 1
    assert client.merge("shop").state is JobState.SUCCEEDED


def test_a_checkpoint_of_a_stream_runs_at_the_owner(client: Client, store: Store) -> None:
    """The documentation promises the same behaviour, but a client got `WrongKind`."""
    clicks = store.stream("clicks", create=True)
    clicks.append([b"one", b"two"]).result()
    clicks.seal()
    assert client.checkpoint("clicks", timeout=60).state is JobState.SUCCEEDED
    assert client.table("chunk_catalog").num_rows == 1
    assert store.checkpoint("clicks").state is JobState.SUCCEEDED


@pytest.mark.usefixtures("shop")
def test_a_job_whose_attempt_failed_is_returned_as_pending(client: Client) -> None:
    with armed("jobs.worker.claimed", "1*raise:EIO"):
        job = client.checkpoint("shop", timeout=60)
    assert (job.state, job.record.attempt, job.record.failures) == (JobState.PENDING, 1, 1)
    repeated = client.checkpoint("shop", timeout=60)
    assert (repeated.job_id, repeated.state, repeated.record.attempt) == (job.job_id, JobState.SUCCEEDED, 2)


def test_batches_return_receipts_in_order(client: Client, store: Store) -> None:
    guards = [client.submit(reserve(number)) for number in range(1, 301)]
    receipts = [guard.result(60) for guard in guards]
    assert [receipt.sequence for receipt in receipts] == list(range(1, 301))
    assert receipts[-1].generations == {1: 300}
    assert store.feed.head() == 300


def test_an_invalid_batch_fails_alone(client: Client) -> None:
    good, bad, after = client.submit(reserve(1)), client.submit(reserve(-1)), client.submit(reserve(2))
    assert good.result(60).sequence == 1
    with pytest.raises(quire.InvalidInput, match="cannot be read"):
        bad.result(60)
    assert after.result(60).sequence == 2
    with pytest.raises(quire.InvalidInput):
        client.submit([])
    with pytest.raises(quire.InvalidInput):
        client.submit(reserve(1), key=b"short")


def test_the_same_key_is_applied_once(client: Client, store: Store) -> None:
    key = bytes(range(16))
    first = client.submit(reserve(5), key=key, result=b"answer").result(60)
    second = client.submit(reserve(5), key=key).result(60)
    assert (second.sequence, second.repeated, second.result) == (first.sequence, True, b"answer")
    assert store.feed.head() == first.sequence


def test_a_guard_can_be_awaited(client: Client) -> None:
    async def run() -> int:
        return (await client.submit(reserve(7))).sequence

    assert asyncio.run(run()) == 1


def test_ids_are_reserved_at_the_owner(client: Client, store: Store) -> None:
    store.create("shop", "pages")
    assert client.reserve_db_id() == 2
    assert client.reserve_job_id() == 1
    assert client.reserve_generation(1) + 1 == client.reserve_generation(1)
    with pytest.raises(quire.UnknownDatabase):
        client.reserve_generation(99)


def test_the_feed_is_read_acknowledged_and_followed(client: Client, store: Store) -> None:
    for name in ("a", "b", "c"):
        store.create(name, "stream")
    cursor = client.feed.register(name="app")
    assert cursor == store.feed.cursor("app")
    page = client.feed.fetch("app", 2)
    assert page == store.feed.fetch("app", 2)
    only = client.feed.fetch("app", databases=["b"], tables="db")
    assert ([change.sequence for change in only.changes], only.next_sequence) == ([2], 4)
    client.feed.acknowledge("app", 2)
    assert [change.sequence for change in client.feed.fetch("app").changes] == [3]
    assert client.feed.lag() == {"app": 1}
    assert [change.sequence for change in client.feed.follow("app", timeout=0)] == [3]
    assert client.feed.cursor("app").acked_sequence == 3
    assert client.feed.store_id() == store.feed.store_id() == client.server.store_id
    late = client.feed.register(Start.LATEST)
    assert late.acked_sequence == client.feed.head() == 3
    client.feed.drop(late.cursor_id)
    assert [cursor.name for cursor in client.feed.cursors()] == ["app"]
    with pytest.raises(quire.UnknownCursor):
        client.feed.fetch("nobody")


def test_waiting_for_a_change_wakes_at_once(client: Client, store: Store) -> None:
    with pytest.raises(quire.TimedOut):
        client.feed.wait(0, timeout=0.1)
    pauses: list[float] = []
    for number in range(10):
        committed: list[float] = []

        def commit(name: str = f"db{number}", committed: list[float] = committed) -> None:
            time.sleep(0.05)
            store.create(name, "stream")
            committed.append(time.monotonic())

        thread = threading.Thread(target=commit)
        thread.start()
        client.feed.wait(number, timeout=10)
        woken_at = time.monotonic()
        thread.join()
        pauses.append(woken_at - committed[0])
    # Not at the interval of a poll: most wake-ups come within a few ms of the commit, whatever the load of the machine.
    assert sorted(pauses)[2] < 0.1


def test_info_figures_and_hello(client: Client, store: Store) -> None:
    store.create("shop", "pages")
    # the writer counts a commit after it has answered, at the latest before the next one
    store.create("basket", "pages")
    assert client.info().databases == store.info().databases
    figures = client.figures()
    assert figures["manifest"]["commits"] >= 1
    assert figures["service"]["calls"] >= 2
    assert (client.server.path, client.server.role) == (store.path, "admin")
    assert client.objects_url == store.objects_url


def test_a_client_pickles_as_its_address(client: Client) -> None:
    client.create("shop", "pages")
    with pickle.loads(pickle.dumps(client)) as other:
        assert other.database("shop").name == "shop"
        assert other.uri == client.uri


def test_a_closed_client_raises(server: Any) -> None:
    client = connect(server.address)
    client.close()
    client.close()
    with pytest.raises(quire.StoreClosed):
        client.databases()
    with pytest.raises(quire.StoreClosed):
        client.submit(reserve(1))


def test_an_invalid_address_is_refused(tmp_path: Path) -> None:
    for uri in ("ftp://x:1", "grpc://", "grpc+unix://", "http://", "http://x:99999"):
        with pytest.raises(quire.InvalidInput, match="not the address"):
            quire.connect(uri)
    for uri in ("http://x:1/db/shop", "https://user:word@x:1"):
        with pytest.raises(quire.InvalidInput, match="a host and a port") as refused:
            quire.connect(uri)
        assert "://x:1 and name the database" in refused.value.hint
        assert "word" not in str(refused.value)
    with pytest.raises(quire.InvalidInput, match="no owner listens"):
        quire.connect(tmp_path)


def test_without_an_owner_connect_raises_unavailable_after_the_timeout(tmp_path: Path) -> None:
    started = time.monotonic()
    with pytest.raises(quire.Unavailable, match="cannot be reached"):
        quire.connect(f"grpc+unix://{tmp_path}/none.sock", timeout=0.5)
    assert time.monotonic() - started < 10
