"""A store is read from its bucket alone, as of an archived moment: the owner's directory is not opened, and nothing is
written."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

import quire
from quire.core.errors import AccessDenied, QuireError, ReadOnly
from quire.core.settings import ArchiveSettings, MaintenanceSettings, StoreSettings


def make(tmp_path: Path) -> str:
    """Create a store in a bucket and remove its directory; returns the bucket's URL."""
    bucket = str(tmp_path / "bucket")
    settings = StoreSettings(
        object_store=bucket, maintenance=MaintenanceSettings(enabled=False), archive=ArchiveSettings(mode="async")
    )
    with quire.open(tmp_path / "store", settings=settings) as store:
        with store.sqlite("shop", create=True) as db:
            db.execute("create table item(n integer primary key)")
            db.executemany("insert into item values (?)", [(n,) for n in range(300)])
        store.checkpoint("shop")
        with store.sqlite("shop") as db:
            db.execute("insert into item values (300)")  # in the WAL only
        store.create("cart", "lsm")
        store.kv("cart").put(b"flushed", b"1")
        store.kv("cart").flush()
        store.kv("cart").put(b"logged", b"2")
        store.create("events", "stream")
        store.stream("events").append([b"a", b"b"]).result()
    os.rename(tmp_path / "store", tmp_path / "gone")
    return bucket


def names_in(bucket: str) -> list[str]:
    return sorted(str(path) for path in Path(bucket).rglob("*"))


def test_everything_is_read_and_nothing_is_left_behind(tmp_path: Path) -> None:
    bucket = make(tmp_path)
    before = names_in(bucket)
    with quire.open_archive(bucket) as store:
        scratch = store.path
        with store.sqlite("shop") as db:
            assert db.execute("select count(*) from item").fetchall() == [(301,)]
        assert dict(store.kv("cart").scan()) == {b"flushed": b"1", b"logged": b"2"}
        assert [bytes(record.payload) for record in store.stream("events").read()] == [b"a", b"b"]
    assert not os.path.exists(scratch)
    assert not (tmp_path / "store").exists()
    assert names_in(bucket) == before, "nothing was claimed or written"


def test_changes_are_refused(tmp_path: Path) -> None:
    with quire.open_archive(make(tmp_path)) as store:
        with pytest.raises(QuireError):
            store.kv("cart").put(b"k", b"v")
        changing: list[Callable[[], object]] = [
            lambda: store.create("new", "pages"),
            lambda: store.kv("new", create=True),
            lambda: store.stream("new", create=True),
            lambda: store.sqlite("new", create=True),
            lambda: store.drop("cart"),
            lambda: store.rename("cart", "new"),
            lambda: store.set_status("cart", "active"),
            lambda: store.set_options("cart", tags={"a": "b"}),
            lambda: store.snapshot("shop", "now"),
            lambda: store.fork("shop", "new"),
            lambda: store.checkpoint("shop"),
            lambda: store.maintain(),
        ]
        for change in changing:
            with pytest.raises(ReadOnly, match="copy of an archive"):
                change()
        assert [info.name for info in store.databases()] == ["cart", "events", "shop"]
        store.serve()
        with quire.connect(store.path) as client:
            with pytest.raises(AccessDenied, match="copy of an archive"):
                client.create("new", "pages")
            assert [info.name for info in client.databases()] == ["cart", "events", "shop"]


def test_jobs_that_only_read_run_on_the_copy(tmp_path: Path) -> None:
    bucket = make(tmp_path)
    before = names_in(bucket)
    with quire.open_archive(bucket) as store:
        assert sorted(usage.database for usage in store.heavy.stats()) == ["cart", "events", "shop"]
        verified = store.heavy.verify(runner="threads").result
        assert verified["verified"] > 0
        assert not verified["damaged"]
        assert store.heavy.audit(runner="threads").num_rows == 0
        assert not store.heavy.audit_archive(runner="threads").problems
        with pytest.raises(ReadOnly):
            store.heavy.checkpoint_all(runner="threads")
    assert names_in(bucket) == before, "nothing was claimed or written"


def test_an_archive_that_cannot_be_restored_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with pytest.raises(QuireError):
        quire.open_archive(str(tmp_path / "nothing"))
    assert not list(tmp_path.glob("quire-archive-*"))
