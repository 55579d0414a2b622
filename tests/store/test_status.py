"""A database that is read-only refuses every write, of whatever kind it is; options and tags are kept."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import apsw
import pytest

import quire
from quire.core.errors import InvalidInput, ReadOnly
from quire.core.settings import MaintenanceSettings, StoreSettings
from quire.manifest.records import Compression, DbStatus


@pytest.fixture
def store(tmp_path: Path) -> Iterator[quire.Store]:
    settings = StoreSettings(maintenance=MaintenanceSettings(enabled=False))
    with quire.open(tmp_path / "store", settings=settings) as opened:
        yield opened
        assert opened.manifest.check() == []


def test_a_read_only_stream_takes_no_records_and_is_looked_after(store: quire.Store) -> None:
    """Hazard: only pages asked; appends to a read-only stream were durable."""
    clicks = store.stream("clicks", create=True)
    clicks.append(b"one").result()
    assert store.set_status("clicks", "read_only").status is DbStatus.READ_ONLY
    for records in (b"two", [b"two", b"three"], b"x" * 100_000):
        with pytest.raises(ReadOnly, match="set-status clicks active"):
            clicks.append(records)
    assert clicks.end_record == 2
    clicks.seal()
    for _ in range(4):
        clicks.tick()  # compressed and uploaded all the same
    store.snapshot("clicks", "kept")
    assert [record.payload for record in clicks.read(1, 9)] == [b"one"]
    store.set_status("clicks", DbStatus.ACTIVE)
    assert clicks.append(b"two").result() is not None


def test_a_read_only_stream_stays_so_when_it_is_opened_again(store: quire.Store) -> None:
    store.stream("clicks", create=True).append(b"one").result()
    store.set_status("clicks", "read_only")
    store.streams.close_stream("clicks")
    with pytest.raises(ReadOnly):
        store.stream("clicks").append(b"two")


def test_a_read_only_key_value_database_takes_no_writes_and_is_looked_after(store: quire.Store) -> None:
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


def test_a_database_is_not_dropped_by_its_status(store: quire.Store) -> None:
    store.create("shop", "pages")
    for status in ("tombstoned", "gone", DbStatus.TOMBSTONED):
        with pytest.raises(InvalidInput):
            store.set_status("shop", status)


@pytest.mark.parametrize("kind", ["pages", "lsm"])
def test_a_fork_keeps_tags_and_has_its_own_beside_them(store: quire.Store, kind: str) -> None:
    """Hazard: a fork forgot the tags of its source, and had no way to get any."""
    store.create("shop", kind, tags={"team": "sales", "stage": "live"})
    made = store.fork("shop", "trial", tags={"stage": "trial"})
    assert made.tags == {"team": "sales", "stage": "trial"}
    assert store.set_options("trial", tags={"owner": "ann"}).tags == {"owner": "ann"}
    assert store.database("shop").tags == {"team": "sales", "stage": "live"}


def test_a_fork_may_be_compressed_otherwise_and_keeps_that(store: quire.Store) -> None:
    store.create("shop", "pages")
    made = store.fork("shop", "plain", compression="none")
    with store.manifest.read() as txn:
        record = txn.database(made.db_id)
    assert record is not None
    assert record.compression is Compression.NONE
    store.set_options("plain", compression="zstd")
    with store.manifest.read() as txn:
        record = txn.database(made.db_id)
    assert record is not None
    assert record.compression is Compression.ZSTD
    with pytest.raises(InvalidInput, match="compression"):
        store.set_options("plain", compression="lzma")
