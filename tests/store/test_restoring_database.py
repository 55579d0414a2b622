"""One database of an archived moment is restored into a store in use: equal to its state then, completely or not at
all."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path

import msgspec
import pytest

import quire
from quire.core.errors import Conflict
from quire.core.limits import MIB
from quire.core.settings import ArchiveSettings, MaintenanceSettings, StoreSettings
from quire.durable.failpoints import armed
from quire.manifest.guard import ManifestGuard
from quire.manifest.ops.base import Op
from quire.manifest.ops.databases import RenameDb, SetDbOptions
from quire.store import restoring_database
from quire.store.store import Store
from tests.programs import run_program
from tests.rules.tree import SRC

NO_MAINTENANCE = MaintenanceSettings(enabled=False)


def settings(tmp_path: Path) -> StoreSettings:
    archive = ArchiveSettings(mode="async", interval_seconds=0.05)
    return StoreSettings(object_store=str(tmp_path / "bucket"), maintenance=NO_MAINTENANCE, archive=archive)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with quire.open(tmp_path / "store", settings=settings(tmp_path)) as opened:
        with opened.sqlite("shop", create=True) as db:
            db.execute("create table item(n integer primary key, text)")
            db.executemany("insert into item values (?, ?)", [(n, "x" * 100) for n in range(500)])
        opened.checkpoint("shop")
        opened.set_options("shop", tags={"team": "sales"})
        opened.create("cart", "lsm")
        for n in range(500):
            opened.kv("cart").put(b"%05d" % n, b"v%d" % n, sync=False)
        opened.kv("cart").flush()
        opened.kv("cart").put(b"last", b"in the log")
        opened.create("events", "stream")
        opened.stream("events").append([b"r%d" % n for n in range(5000)]).result()
        yield opened
    with quire.open(tmp_path / "store", settings=settings(tmp_path)) as opened:
        assert opened.manifest.check() == []
        assert not list((tmp_path / "store" / "scratch").glob("*")), "scratch is removed"


def archived_moment(store: Store) -> int:
    """A moment of the archive; everything is changed after it."""
    assert store.archive is not None
    store.archive.wait(60)
    moment = store.manifest.clock.now_ms()
    while store.manifest.clock.now_ms() <= moment + 5:
        pass
    with store.sqlite("shop") as db:
        db.execute("delete from item where n >= 100")
    store.kv("cart").delete(b"last")
    store.stream("events").append(b"later").result()
    store.archive.wait(60)
    return moment


def test_each_kind_is_restored_beside_its_current_state(store: Store) -> None:
    at_ms = archived_moment(store)
    for name in ("shop", "cart", "events"):
        done = store.restore_db("", name, new=f"{name}-then", at_ms=at_ms)
        assert (done.name, done.source, len(done.sha256)) == (f"{name}-then", name, 64)
        assert done.at_ms <= at_ms
    with store.sqlite("shop-then") as db:
        assert db.execute("select count(*) from item").fetchall() == [(500,)]
        assert db.execute("pragma integrity_check").fetchall() == [("ok",)]
    with store.sqlite("shop") as db:
        assert db.execute("select count(*) from item").fetchall() == [(100,)]
    assert store.database("shop-then").tags == {"team": "sales"}
    pairs = dict(store.kv("cart-then").scan())
    assert pairs == {**{b"%05d" % n: b"v%d" % n for n in range(500)}, b"last": b"in the log"}
    assert store.kv("cart").get(b"last") is None
    records = [bytes(record.payload) for record in store.stream("events-then").read()]
    assert records == [b"r%d" % n for n in range(5000)]
    assert len(store.databases()) == 6


def test_a_dropped_database_is_restored_from_a_backup_under_its_name(store: Store, tmp_path: Path) -> None:
    store.backup(str(tmp_path / "b.tar"))
    store.drop("shop")
    store.restore_db(str(tmp_path / "b.tar"), "shop")
    with store.sqlite("shop") as db:
        assert db.execute("select count(*) from item").fetchall() == [(500,)]
        db.execute("insert into item values (500, 'new')")


def test_invalid_restores_are_refused_and_leave_nothing(store: Store) -> None:
    with pytest.raises(quire.NameTaken):
        store.restore_db("", "shop")
    with pytest.raises(quire.UnknownDatabase, match="the archive has no such database at that moment"):
        store.restore_db("", "nothing")
    for name in ("shop", "cart", "events"):
        with armed("restore_db.copied", "raise:EIO"), pytest.raises(OSError, match=r"restore_db\.copied"):
            store.restore_db("", name, new="again")
    assert [info.name for info in store.databases()] == ["cart", "events", "shop"]
    assert not list(Path(store.path, "scratch").glob("*")), "scratch is removed"


def test_two_restores_under_one_name_do_not_drop_each_others_copies(store: Store) -> None:
    """Hazard: the second took the copy of the first for that of a killed attempt; both failed."""

    def again(_: str) -> None:
        with pytest.raises(Conflict, match="already being restored"):
            store.restore_db("", "shop", new="again")

    with armed("restore_db.copied", again):
        store.restore_db("", "shop", new="again")
    with store.sqlite("again") as db:
        assert db.execute("select count(*) from item").fetchall() == [(500,)]


def test_records_are_copied_in_appends_of_bounded_size() -> None:
    """Hazard: four thousand records of any size were one append, which is in memory."""
    large, small = bytes(MIB), bytes(10)
    blocks = [len(block) for block in restoring_database._blocks([*[large] * 20, *[small] * 5000])]
    assert blocks == [8, 8, 4096, 4 + 5000 - 4096]


CHILD = """
import sys, quire
from quire.core.settings import ArchiveSettings, MaintenanceSettings, StoreSettings
settings = StoreSettings(maintenance=MaintenanceSettings(enabled=False), archive=ArchiveSettings(mode="async"))
with quire.open(sys.argv[1], settings=settings) as store:
    store.restore_db("", sys.argv[2], new="again")
"""


@pytest.mark.parametrize(
    ("name", "point"), [("shop", "restored"), ("shop", "copied"), ("cart", "copied"), ("events", "copied")]
)
def test_a_killed_restore_leaves_no_partial_database(store: Store, tmp_path: Path, name: str, point: str) -> None:
    store.close()
    child = run_program(
        ["-c", CHILD, str(tmp_path / "store"), name],
        env={**os.environ, "PYTHONPATH": str(SRC), "QUIRE_FAILPOINTS": f"restore_db.{point}=kill"},
    )
    assert child.returncode == -signal.SIGKILL
    with quire.open(tmp_path / "store", settings=settings(tmp_path)) as reopened:
        assert "again" not in {info.name for info in reopened.databases()}
        reopened.restore_db("", name, new="again")
        assert {info.name for info in reopened.databases()} == {"cart", "events", "shop", "again"}
        assert reopened.manifest.check() == []


def test_in_mode_sync_a_restored_database_is_kept_if_the_bucket_does_not_answer(tmp_path: Path) -> None:
    """Hazard: the call dropped the temporary name, which was gone, and raised `UnknownDatabase`."""
    archive = ArchiveSettings(mode="sync", interval_seconds=0.05)
    sync = StoreSettings(object_store=str(tmp_path / "bucket"), maintenance=NO_MAINTENANCE, archive=archive)
    with quire.open(tmp_path / "store", settings=sync) as store:
        store.kv("cart", create=True).put(b"alice", b"3 apples")
        archiver, resume = store.archive, threading.Event()
        assert archiver is not None

        def hold(_: str) -> None:
            resume.wait(60)

        def hold_the_bucket(_: str) -> None:
            archiver.settings = msgspec.structs.replace(archive, sync_seconds=0.5)
            arming.enter_context(armed("archive.log.before", hold))

        with ExitStack() as arming, armed("restore_db.copied", hold_the_bucket):
            with pytest.raises(quire.NotArchived):
                store.restore_db("", "cart", new="again")
            resume.set()
        assert store.kv("again").get(b"alice") == b"3 apples"


class Killed(BaseException):
    """The process ends."""


@pytest.mark.parametrize("commits", [0, 1])
def test_a_restore_that_is_killed_while_its_copy_is_renamed_can_be_repeated(
    store: Store, monkeypatch: pytest.MonkeyPatch, commits: int
) -> None:
    """Hazard: the copy lost its tag before its temporary name. A kill in between left a database under that name which the next
    attempt did not recognise, and refused to replace."""
    submit, left = store.manifest.submit, iter(range(commits))

    def submit_or_die(ops: Sequence[Op]) -> ManifestGuard:
        if any(isinstance(op, RenameDb | SetDbOptions) for op in ops) and next(left, None) is None:
            raise Killed
        return submit(ops)

    with monkeypatch.context() as killed, suppress(Killed):
        killed.setattr(store.manifest, "submit", submit_or_die)
        killed.setattr(store, "drop", lambda *_, **__: None)  # a killed process cleans nothing up
        store.restore_db("", "shop", new="again")
    if "again" not in {info.name for info in store.databases()}:
        store.restore_db("", "shop", new="again")
    assert store.database("again").tags == store.database("shop").tags
    assert {info.name for info in store.databases()} == {"cart", "events", "shop", "again"}
