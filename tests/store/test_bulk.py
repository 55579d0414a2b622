"""Thousands of databases: created, forked and dropped in shared commits."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

import quire
from quire.core.errors import InvalidName, NameTaken, UnknownDatabase, WrongKind
from quire.core.settings import MaintenanceSettings, StoreSettings
from quire.manifest.records import RetentionRecord
from quire.store import bulk
from quire.store.why import why
from quire.testing.clock import ManualClock
from tests.manifest.helpers import eventually, held


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> quire.Store:
    monkeypatch.setattr(bulk, "OUTSTANDING", 20)
    return quire.open(tmp_path / "store")


def names(count: int, prefix: str = "tenant") -> list[str]:
    return [f"{prefix}-{number:04d}" for number in range(count)]


def test_many_databases_are_created_forked_and_dropped(store: quire.Store) -> None:
    with store:
        created = store.create_many(names(70), "pages", tags={"plan": "free"})
        assert created == sorted(set(created))
        assert [store.database(name).db_id for name in names(70)] == created
        assert store.database("tenant-0069").tags == {"plan": "free"}
        with store.sqlite("tenant-0000") as connection:
            connection.execute("CREATE TABLE t(x)")
            connection.execute("INSERT INTO t VALUES (42)")
        forked = store.fork_many("tenant-0000", names(50, "fork"), tags={"made": "together"})
        assert len(forked) == 50
        assert store.database("tenant-0000").snapshots == 0
        assert store.database("fork-0049").tags == {"plan": "free", "made": "together"}
        for name in ("fork-0000", "fork-0049"):
            with store.sqlite(name) as connection:
                assert connection.execute("SELECT x FROM t").fetchone() == (42,)
                connection.execute("UPDATE t SET x = 43")
        with store.sqlite("tenant-0000") as connection:
            assert connection.execute("SELECT x FROM t").fetchone() == (42,)
        assert store.drop_many(names(50, "fork")) == forked
        assert [info.name for info in store.databases()] == names(70)
        store.maintain()
        assert [problem for problem in store.manifest.check() if not problem.leak] == []


def test_the_snapshot_that_many_forks_are_made_from_is_nobodys(tmp_path: Path) -> None:
    """Hazard: retention counted it as the last snapshot, and dropped the user's instead; a killed process left it for good."""
    clock = ManualClock()
    settings = StoreSettings(maintenance=MaintenanceSettings(enabled=False))
    with quire.open(tmp_path, settings=settings, clock=clock) as store:
        with store.sqlite("template", create=True) as connection:
            connection.execute("CREATE TABLE t(x)")
        store.manifest.retention.set("template", RetentionRecord(keep_last=1))
        kept = store.snapshot("template")

        def names_while_time_passes() -> Iterator[str]:
            yield "first"
            store.maintain()
            ours = [info for info in store.manifest.snapshots.of("template") if info.snapshot_id != kept.snapshot_id]
            with store.manifest.read() as txn:
                explained = why(txn, f"template@#{ours[0].snapshot_id}").holders
            assert [holder.what for holder in explained] == ["makes forks from it"]
            yield "second"
            raise KeyboardInterrupt  # as if the process had died: `drop` is not reached

        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(type(store.manifest.snapshots), "drop", lambda *_: None)
            with pytest.raises(KeyboardInterrupt):
                store.fork_many("template", names_while_time_passes())
        assert {info.name for info in store.databases()} == {"template", "first", "second"}
        clock.advance(2 * 86_400)
        store.maintain()
        assert [info.snapshot_id for info in store.manifest.snapshots.of("template")] == [kept.snapshot_id]


def test_commits_are_shared(store: quire.Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bulk, "OUTSTANDING", 1_000)
    with store:
        store.create("first", "pages")
        stats = store.manifest.writer.stats
        before = stats.commits
        creator = threading.Thread(target=store.create_many, args=(names(200), "pages"))
        with held(store.manifest):
            creator.start()
            assert eventually(lambda: len(store.manifest.writer._queue._batches) >= 200)
        creator.join()
        assert store.database("tenant-0199")
        assert stats.commits - before <= 3


def test_a_refused_name_ends_the_call_and_reports_how_many_were_created(store: quire.Store) -> None:
    with store:
        store.create("tenant-0030", "pages")
        with pytest.raises(NameTaken) as taken:
            store.create_many(names(100), "pages")
        count = len(list(store.databases())) - 1
        assert taken.value.where["done"] == count >= 30
        with pytest.raises(InvalidName):
            store.create_many(["fine", "not/fine"], "pages")
        assert store.database("fine")
        with pytest.raises(UnknownDatabase) as unknown:
            store.drop_many(["fine", "nobody"])
        assert unknown.value.where["done"] == 1


def test_forks_of_a_snapshot_and_of_other_kinds(store: quire.Store) -> None:
    with store:
        store.create("template", "pages")
        store.snapshot("template", "first")
        assert len(store.fork_many("template", names(3), at="first")) == 3
        assert store.database("tenant-0001").parent == "template"
        assert store.database("template").snapshots == 1
        store.create("cart", "lsm")
        with pytest.raises(WrongKind, match="page databases"):
            store.fork_many("cart", names(3, "c"))
        store.create_many(names(3, "kv"), "lsm")
        store.kv("kv-0001").put(b"a", b"1")
        assert len(store.drop_many(names(3, "kv"))) == 3
