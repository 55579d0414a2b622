"""Readers with other kinds of leases are also set aside at half of the WAL budget: those of SQLite, and clients of the
service."""

from __future__ import annotations

import pickle
import signal
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from msgspec.structs import force_setattr
from msgspec.structs import replace as with_fields

import quire
from quire.core.settings import MaintenanceSettings, PagesSettings, StoreSettings
from quire.durable.failpoints import arm_from
from quire.jobs.maintenance import Upkeep
from quire.manifest.records import JobKind
from quire.pages.view_build import reader_snapshots
from quire.store.store import Store
from quire.testing.clock import ManualClock
from tests.fork_server import Channel, ForkServer
from tests.jobs.checkpoint_child import RETRY_SECONDS, Owner
from tests.jobs.test_set_aside import FRAMES, checkpoint, fill, snapshots_for_readers, unabsorbed_segments
from tests.jobs.test_set_aside import owner as owner  # the fixture
from tests.pages.engine_harness import SETTINGS, Model, assert_reads, segment_bytes, small_segments

PAGE = 4096
RETRIES = 40
"""Steps in which time advances until a job is retried, each shorter than a lease."""


# ── SQLite ────────────────────────────────────────────────────────────────────────────────────────────────────────────
@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    small_segments(monkeypatch, FRAMES, PAGE)
    pages = with_fields(PagesSettings(page_size=PAGE))
    force_setattr(pages, "wal_bytes_max", 8 * segment_bytes(FRAMES, PAGE))  # the setting itself is at least 16 MiB
    settings = StoreSettings(maintenance=MaintenanceSettings(enabled=False), pages=pages)
    with quire.open(tmp_path / "store", settings=settings) as store:
        yield store


def grow(store: Store, rows: int) -> None:
    """Commit this many transactions of at least one page each."""
    with closing(store.sqlite("shop")) as connection:
        for _ in range(rows):
            connection.execute("insert into t values (randomblob(3000))")


def set_aside(store: Store) -> list[bool]:
    return [lease.set_aside for lease in store.pages.readers(store.database("shop").db_id)]


def test_a_sqlite_transaction_is_set_aside_and_continues_reading(store: Store) -> None:
    with closing(store.sqlite("shop", create=True)) as connection:
        connection.execute("create table t (x)")
        connection.execute("insert into t values (randomblob(3000))")
    reader = store.sqlite("shop")
    reader.execute("begin")
    assert reader.execute("select count(*) from t").fetchone() == (1,)
    digest = reader.execute("select hex(x) from t").fetchone()
    for _ in range(3):  # more than the budget: writers would end in QuotaExceeded
        grow(store, 12)
        store.checkpoint("shop")
    assert True in set_aside(store)
    assert reader.execute("select count(*) from t").fetchone() == (1,)
    assert reader.execute("select hex(x) from t").fetchone() == digest
    reader.execute("commit")
    assert reader.execute("select count(*) from t").fetchone() == (37,), "the next transaction takes a new pin"
    assert True not in set_aside(store)
    reader.close()
    store.maintain()
    with store.manifest.read() as txn:
        assert list(reader_snapshots(txn, store.database("shop").db_id)) == []


# ── clients of the service ────────────────────────────────────────────────────────────────────────────────────────────
def test_a_client_of_the_service_is_set_aside_and_continues_reading(store: Store) -> None:
    with closing(store.sqlite("shop", create=True)) as connection:
        connection.execute("create table t (x)")
        connection.execute("insert into t values (randomblob(3000))")
    with store.serve(), quire.connect(store.path) as client, client.reader("shop", tags={"who": "report"}) as reader:
        version = reader.read_pages(range(reader.size_pages))
        for _ in range(3):
            grow(store, 12)
            store.checkpoint("shop")
        assert [info.set_aside for info in client.readers("shop") if info.tags.get("who") == "report"] == [True]
        assert reader.read_pages(range(reader.size_pages)) == version
        reader.renew()
        assert reader.read_pages(range(reader.size_pages)) == version


@pytest.mark.parametrize("adopted", [True, False])
def test_the_row_of_a_client_is_set_aside_after_a_restart(owner: Owner, adopted: bool) -> None:
    """The next owner has only the row until the client renews its lease, before or after it was set aside."""
    model = Model()
    fill(owner, model, 1)
    owner.engine.flush(1)
    version = model.newest
    reader = owner.engine.lease_reader("shop", {"who": "report"})
    owner.reopen()
    owner.database()
    if adopted:
        owner.engine.renew_reader("shop", reader.reader_id)
    fill(owner, model, 7)
    assert checkpoint(owner)["slots"] > 0
    assert unabsorbed_segments(owner) == 0
    assert [lease.set_aside for lease in owner.engine.readers(1) if lease.tags.get("who") == "report"] == [True]
    assert len(snapshots_for_readers(owner)) == 1
    owner.engine.renew_reader("shop", reader.reader_id)
    assert_reads(owner.engine.read_leased("shop", reader.reader_id), version)
    Upkeep(owner.context(), owner.worker()).run_once()
    assert len(snapshots_for_readers(owner)) == 1, "it still has a reader"
    owner.engine.close_reader("shop", reader.reader_id)
    Upkeep(owner.context(), owner.worker()).run_once()
    assert snapshots_for_readers(owner) == []


# ── a process that is killed ──────────────────────────────────────────────────────────────────────────────────────────
def reopened(base: Path, now_ms: int) -> Owner:
    """The next owner of a store whose WAL budget is half used."""
    settings = with_fields(SETTINGS)
    force_setattr(settings, "wal_bytes_max", 8 * segment_bytes(FRAMES))
    owner = Owner(base, clock=ManualClock(now_ms), settings=settings)
    owner.manifest.jobs.recover()
    owner.database()
    return owner


def run_child(channel: Channel) -> None:
    """Entry point of the child process: an owner that runs the checkpoint, and dies at its failpoint."""
    message = channel.receive()
    assert message is not None
    base, now_ms, failpoints = pickle.loads(message)
    arm_from(failpoints)
    owner = reopened(Path(base), now_ms)
    owner.worker().drain()
    owner.stop()


@pytest.fixture(scope="module")
def fork_server() -> Iterator[ForkServer]:
    with ForkServer("tests.jobs.test_set_aside_clients:run_child") as fork_server:
        yield fork_server


@pytest.mark.parametrize("step", ["jobs.checkpoint.set_aside", "jobs.checkpoint.begun", "jobs.checkpoint.written"])
def test_after_a_kill_between_snapshot_and_checkpoint_the_reader_continues(
    owner: Owner, fork_server: ForkServer, step: str
) -> None:
    """The first commit keeps the version; the second begins the checkpoint that passes it."""
    model = Model()
    fill(owner, model, 1)
    owner.engine.flush(1)
    version = model.newest
    reader = owner.engine.lease_reader("shop")
    fill(owner, model, 7)
    owner.engine.flush(1)
    owner.manifest.jobs.enqueue(JobKind.CHECKPOINT, 1, None)
    base, now_ms = owner.base, owner.clock.now_ms()
    owner.stop()
    with fork_server.spawn() as child:
        child.channel.send(pickle.dumps((str(base), now_ms, f"{step}=kill")))
        assert child.channel.receive() is None
        assert child.wait() == -signal.SIGKILL, fork_server.errors()
    next_owner = reopened(base, now_ms)
    try:
        assert len(snapshots_for_readers(next_owner)) == 1, (
            "the snapshot is committed before a checkpoint passes the version"
        )
        next_owner.engine.renew_reader("shop", reader.reader_id)
        assert_reads(next_owner.engine.read_leased("shop", reader.reader_id), version)
        for _ in range(RETRIES):
            next_owner.clock.advance(RETRY_SECONDS / RETRIES)
            next_owner.engine.renew_reader("shop", reader.reader_id)
            next_owner.worker().drain()
        assert unabsorbed_segments(next_owner) == 0
        assert len(snapshots_for_readers(next_owner)) == 1, "the next attempt creates no second snapshot"
        assert_reads(next_owner.engine.read_leased("shop", reader.reader_id), version)
        next_owner.engine.close_reader("shop", reader.reader_id)
        Upkeep(next_owner.context(), next_owner.worker()).run_once()
        assert snapshots_for_readers(next_owner) == []
        next_owner.assert_newest(model)
    finally:
        next_owner.stop()
    owner.start()  # the fixture stops it
