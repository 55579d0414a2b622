"""A read-only database refuses every write, whatever its kind; options and tags are kept."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import apsw
import pytest

import quire
from quire.core.errors import InvalidInput, ReadOnly
from quire.core.settings import MaintenanceSettings, StoreSettings
from quire.manifest.records import Compression, DbStatus, JobState


@pytest.fixture
def store(tmp_path: Path) -> Iterator[quire.Store]:
    settings = StoreSettings(maintenance=MaintenanceSettings(enabled=False))
    with quire.open(tmp_path / "store", settings=settings) as opened:
        yield opened
        assert opened.manifest.check() == []


def test_a_read_only_stream_accepts_no_records_and_is_maintained(store: quire.Store) -> None:
    """Hazard: only page databases checked the status; appends to a read-only stream were durable."""
    clicks = store.stream("clicks", create=True)
    clicks.append(b"one").result()
    assert store.set_status("clicks", "read_only").status is DbStatus.READ_ONLY
    for records in (b"two", [b"two", b"three"], b"x" * 100_000):
        with pytest.raises(ReadOnly, match="set-status clicks active"):
            clicks.append(records)
    assert clicks.end_record == 2
    clicks.seal()
    for _ in range(4):
        clicks.tick()  # compressed and uploaded nevertheless
    store.snapshot("clicks", "kept")
    assert [record.payload for record in clicks.read(1, 9)] == [b"one"]
    store.set_status("clicks", DbStatus.ACTIVE)
    assert clicks.append(b"two").result() is not None


def test_a_stream_is_still_read_only_after_it_is_reopened(store: quire.Store) -> None:
    store.stream("clicks", create=True).append(b"one").result()
    store.set_status("clicks", "read_only")
    store.streams.close_stream("clicks")
    with pytest.raises(ReadOnly):
        store.stream("clicks").append(b"two")


def test_a_read_only_key_value_set_accepts_no_writes_and_is_maintained(store: quire.Store) -> None:
    cart = store.kv("cart", create=True)
    cart.put(b"a", b"1")
    store.set_status("cart", "read_only")
    for write in (
        lambda: cart.put(b"a", b"2"),
        lambda: cart.delete(b"a"),
        lambda: cart.write({b"b": b"2"}),
        lambda: cart.begin_load(),
    ):
        with pytest.raises(ReadOnly, match="set-status cart active"):
            write()
    assert cart.get(b"a") == b"1"
    cart.flush()
    cart.compact()
    store.snapshot("cart", "kept")
    store.set_status("cart", "active")
    cart.put(b"a", b"2")
    assert cart.get(b"a") == b"2"


def test_a_read_only_sqlite_database_refuses_and_its_fork_does_not(store: quire.Store) -> None:
    db = store.sqlite("shop", create=True)
    db.execute("create table t(x)")
    store.set_status("shop", "read_only")
    with pytest.raises(apsw.ReadOnlyError, match="set-status shop active"):
        db.execute("insert into t values (1)")
    assert store.fork("shop", "copy").status is DbStatus.ACTIVE
    store.set_status("shop", "active")
    db.execute("insert into t values (1)")
    db.close()


def test_a_status_does_not_drop_a_database(store: quire.Store) -> None:
    store.create("shop", "pages")
    for status in ("tombstoned", "gone", DbStatus.TOMBSTONED):
        with pytest.raises(InvalidInput):
            store.set_status("shop", status)


@pytest.mark.parametrize("kind", ["pages", "lsm"])
def test_a_fork_inherits_tags_and_adds_its_own(store: quire.Store, kind: str) -> None:
    """Hazard: a fork lost the tags of its source, and there was no way to set any."""
    store.create("shop", kind, tags={"team": "sales", "stage": "live"})
    fork = store.fork("shop", "trial", tags={"stage": "trial"})
    assert fork.tags == {"team": "sales", "stage": "trial"}
    assert store.set_options("trial", tags={"owner": "ann"}).tags == {"owner": "ann"}
    assert store.database("shop").tags == {"team": "sales", "stage": "live"}


def test_a_database_is_used_on_after_a_change_of_its_compression(tmp_path: Path) -> None:
    """The hash of its shape contained the compression: the database, and a fork with another one, did not open any more."""
    with quire.open(tmp_path) as store:
        store.create("shop", "pages")
        for number, compression in enumerate(("none", "zstd", "none")):
            with store.sqlite("shop") as db:
                db.execute("create table if not exists item(id integer primary key, text)")
                db.execute("insert into item(text) values (?)", (str(number) * 20_000,))
            store.checkpoint("shop")
            store.set_options("shop", compression=compression)
        with store.sqlite("shop") as db:
            assert db.execute("select count(*) from item").fetchone() == (3,)
        store.fork("shop", "packed", compression="zstd")
    with quire.open(tmp_path) as store:
        for name in ("shop", "packed"):
            with store.sqlite(name) as db:
                db.execute("insert into item(text) values ('x')")
            assert store.checkpoint(name).state is JobState.SUCCEEDED
            assert store.heavy.merge_all([name]).failed == 0
            with store.sqlite(name) as db:
                texts = [text for (text,) in db.execute("select text from item order by id")]
                assert texts == [*(str(number) * 20_000 for number in range(3)), "x"]


def test_a_fork_can_have_its_own_compression(store: quire.Store) -> None:
    store.create("shop", "pages")
    fork = store.fork("shop", "plain", compression="none")
    with store.manifest.read() as txn:
        record = txn.database(fork.db_id)
    assert record is not None
    assert record.compression is Compression.NONE
    store.set_options("plain", compression="zstd")
    with store.manifest.read() as txn:
        record = txn.database(fork.db_id)
    assert record is not None
    assert record.compression is Compression.ZSTD
    with pytest.raises(InvalidInput, match="compression"):
        store.set_options("plain", compression="lzma")
