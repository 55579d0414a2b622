"""Lost answers: whatever a call changes, it changes once (M11)."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.flight as flight
import pytest

import quire
from quire.manifest import tables as t
from quire.manifest.jobqueue import Job
from quire.manifest.ops.databases import RegisterDb
from quire.manifest.records import DbKind, DbRecord, JobKind, JobState
from quire.service import channel
from quire.service import messages as m
from quire.service.client import Client, connect
from quire.service.idempotency import run_once
from quire.service.wire import read_answer, write_call
from quire.store.store import Store
from tests.service.conftest import Start
from tests.service.owners import HEADERS, Relay, losing_answers, reserve


@pytest.fixture
def populated(store: Store) -> Store:
    """A store with one of each kind of thing that a call can change."""
    store.create("shop", "pages")
    opened = store.pages.open("shop")
    with opened.begin() as transaction:
        transaction.write_page(0, b"a" * opened.page_size)
    store.snapshot("shop", "kept")
    store.feed.register(name="old")
    return store


def _claim(client: Client) -> Any:
    job = client.jobs.claim("w1", [JobKind.VERIFY])
    assert job is not None
    return job.job_id, job.record.attempt


def _held(client: Client) -> Job:
    job = client.jobs.claim("w1", [JobKind.VERIFY])
    assert job is not None
    return job


CALLS: dict[str, Callable[[Client], Any]] = {
    "create": lambda c: c.create("new", "lsm").db_id,
    "rename": lambda c: c.rename("shop", "bazaar").db_id,
    "drop": lambda c: c.drop("shop", snapshots=True).db_id,
    "snapshot": lambda c: c.snapshot("shop", "monday").snapshot_id,
    "anonymous snapshot": lambda c: c.snapshot("shop").snapshot_id,
    "drop snapshot": lambda c: c.drop_snapshot("shop", "kept").snapshot_id,
    "fork": lambda c: c.fork("shop", "copy").db_id,
    "fork of a snapshot": lambda c: c.fork("shop", "copy", at="kept").db_id,
    "register": lambda c: c.feed.register(name="app").cursor_id,
    "register without a name": lambda c: c.feed.register().cursor_id,
    "drop cursor": lambda c: c.feed.drop("old"),
    "acknowledge": lambda c: c.feed.acknowledge("old", 2),
    "enqueue": lambda c: c.jobs.enqueue(JobKind.VERIFY),
    "claim": _claim,
    "complete": lambda c: c.jobs.complete(_held(c), {"n": 1}),
    "fail": lambda c: c.jobs.fail(_held(c), "no").name,
    "fail for good": lambda c: c.jobs.fail(_held(c), "no", permanent=True).name,
    "defer": lambda c: c.jobs.defer(_held(c), 0),
    "submit": lambda c: c.submit(reserve(9)).result(60).sequence,
    "lease": lambda c: c.reader("shop").close(),
    "start": lambda c: c.checkpoint("shop", wait=False).job_id,
}
NEEDS_A_JOB = {"claim", "complete", "fail", "fail for good", "defer"}


def rows(store: Store) -> dict[str, int]:
    with store.manifest.read() as txn:
        tables = (t.DB, t.DB_NAMES, t.SNAPSHOT_INDEX, t.JOB_QUEUE, t.CHANGE_CURSORS, t.SNAPSHOT_READERS)
        return {table.name: txn.count(table) for table in tables}


@pytest.mark.parametrize("name", CALLS)
def test_a_call_whose_answers_are_lost_is_executed_once(
    name: str, populated: Store, client: Client, tmp_path: Path
) -> None:
    """The same call on a second store, without lost answers, gives the expected state."""
    with quire.open(tmp_path / "other") as other, other.serve() as server, connect(server.address) as undisturbed:
        other.create("shop", "pages")
        opened = other.pages.open("shop")
        with opened.begin() as transaction:
            transaction.write_page(0, b"a" * opened.page_size)
        other.snapshot("shop", "kept")
        other.feed.register(name="old")
        for target in (populated, other):
            if name in NEEDS_A_JOB:
                target.manifest.jobs.enqueue(JobKind.VERIFY)
        expected = CALLS[name](undisturbed)
        with losing_answers(3) as lost:
            assert CALLS[name](client) == expected
        assert len(lost) == 3
        assert rows(populated) == rows(other)
        if name != "start":  # its job continues by itself
            assert populated.feed.head() == other.feed.head()


@pytest.mark.parametrize(
    ("point", "is_there"),
    [("manifest.commit.flushed", False), ("manifest.commit.durable", True), ("service.answer", True)],
)
def test_a_call_whose_owner_is_killed_is_executed_once(path: Path, owner: Start, point: str, is_there: bool) -> None:
    """The owner is killed before the commit, after it, and before the answer is sent: the client repeats the call to
    the next owner."""
    quire.open(path).close()
    script = "1*off->kill" if point == "service.answer" else "kill"  # the first answer is that to `hello`
    first, address = owner(QUIRE_FAILPOINTS=f"{point}={script}")
    with quire.connect(address, timeout=60) as client:
        created: list[Any] = []
        thread = threading.Thread(target=lambda: created.append(client.create("shop", "pages")))
        thread.start()
        assert first.wait(30) == -9
        with quire.open(path, "r") as reader:
            assert [database.name for database in reader.databases()] == (["shop"] if is_there else [])
        owner()
        thread.join(60)
        assert [database.db_id for database in created] == [1]
        assert [database.name for database in client.databases()] == ["shop"]
        assert client.feed.head() == 1


@pytest.mark.parametrize("fault", ["drop", "swallow"])
def test_a_connection_that_breaks_or_goes_silent_under_an_answer(
    fault: str, store: Store, server: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`swallow`: the owner's answer is discarded and the connection stays open; only the timeout of the attempt ends
    it."""
    monkeypatch.setattr(channel, "ATTEMPT_SECONDS", 0.5)
    relay = Relay(tmp_path / "relay.sock", server.address.removeprefix("grpc+unix://"))
    try:
        with connect(relay.uri) as client:
            head = store.feed.head()
            relay.fault = lambda: fault if store.feed.head() > head and store.feed.head() < head + 2 else ""
            done: list[int] = []

            def call() -> None:
                done.append(client._channel.call("create", m.Create("shop", "pages"), attempt_seconds=0.5).db_id)

            thread = threading.Thread(target=call)
            thread.start()
            while store.feed.head() == head:
                time.sleep(0.01)
            time.sleep(0.7)
            store.create("other", "stream")  # from here on the relay forwards everything
            thread.join(30)
            assert done == [store.database("shop").db_id]
            assert store.feed.head() == head + 2
    finally:
        relay.close()


def test_two_identical_concurrent_calls_take_effect_once(store: Store, server: Any) -> None:
    body = write_call(b"k" * 16, m.MakeSnapshot("shop"))
    store.create("shop", "pages")
    answers: list[int] = []

    def call() -> None:
        raw = flight.FlightClient(server.address)
        parts = raw.do_action(flight.Action("snapshot.create", body), flight.FlightCallOptions(headers=HEADERS))
        whole = b"".join(bytes(part.body) for part in parts)
        answers.append(read_answer(whole, m.ACTIONS["snapshot.create"].answer).snapshot_id)
        raw.close()

    threads = [threading.Thread(target=call) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == [1] * 8
    assert len(store.manifest.snapshots.of("shop")) == 1


# ── `run_once` itself ─────────────────────────────────────────────────────────────────────────────────────────────────
@pytest.fixture
def keyed(store: Store) -> Callable[..., Any]:
    manifest = store.manifest

    def run(key: bytes, do: Callable[[], Any], action: str = "make") -> Any:
        return run_once(manifest, key, action, (RegisterDb,), lambda op: op.db_id, do, lambda db_id: ("again", db_id))

    return run


def register(store: Store, name: str) -> int:
    return store.manifest.register_db(name, DbKind.LSM)


def test_a_failed_call_leaves_no_key(store: Store, keyed: Callable[..., Any]) -> None:
    def fail() -> None:
        raise quire.Overloaded("full")

    with pytest.raises(quire.Overloaded):
        keyed(b"a" * 16, fail)
    assert keyed(b"a" * 16, lambda: register(store, "x")) == 1
    assert keyed(b"a" * 16, lambda: register(store, "y")) == ("again", 1)


def test_a_call_that_fails_after_its_effect_counts_as_done(store: Store, keyed: Callable[..., Any]) -> None:
    def half() -> None:
        register(store, "x")
        raise quire.TimedOut("reading what was made took too long")

    assert keyed(b"a" * 16, half) == ("again", 1)


def test_a_key_belongs_to_one_action(store: Store, keyed: Callable[..., Any]) -> None:
    keyed(b"a" * 16, lambda: register(store, "x"))
    with pytest.raises(quire.InvalidInput, match="another call"):
        keyed(b"a" * 16, lambda: register(store, "y"), action="other")


def test_a_key_applies_to_its_thread_only(store: Store, keyed: Callable[..., Any]) -> None:
    def do() -> int:
        other = threading.Thread(target=lambda: register(store, "elsewhere"))
        other.start()
        other.join()
        return register(store, "here")

    assert keyed(b"a" * 16, do) == 2
    assert keyed(b"a" * 16, do) == ("again", 2)
    store.manifest.submit([RegisterDb(7, DbRecord("third", DbKind.LSM, 0))]).result()
    assert [database.name for database in store.databases()] == ["elsewhere", "here", "third"]


def test_a_job_claimed_twice_with_one_key_is_one_claim(populated: Store, client: Client) -> None:
    job_id = client.jobs.enqueue(JobKind.VERIFY)
    other = client.jobs.enqueue(JobKind.VERIFY)
    with losing_answers():
        job = client.jobs.claim("w1", [JobKind.VERIFY])
    assert job is not None
    assert job.job_id == job_id
    assert client.jobs.get(other).state is JobState.PENDING
