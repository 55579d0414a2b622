"""Reading the store from another process, or as if from one: only what the owner has published."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import apsw
import pytest

import quire
from quire.core.errors import OutOfRange, ReadOnly, UnknownSnapshot
from quire.sqlite.files import ReadOnlyFile, open_reader
from quire.sqlite.vfs import QuireVfs
from quire.store.store import Store
from tests.programs import Program
from tests.rules.tree import SRC
from tests.sqlite.conftest import SETTINGS, count

PROGRAM = """
import sys, apsw, quire
with quire.open(sys.argv[1], "r") as store:
    connection = store.sqlite("shop")
    print("ready", flush=True)
    for line in sys.stdin:
        try:
            print(connection.execute(line).get, flush=True)
        except apsw.SQLError as error:  # the table may not be published yet
            print(error, flush=True)
    connection.close()
"""


def eventually(read: Callable[[], object], expected: object) -> None:
    """Wait for publication, which is at most a second behind."""
    deadline = time.monotonic() + 60
    while (value := read()) != expected and time.monotonic() < deadline:
        time.sleep(0.05)
    assert value == expected


def test_another_process_follows_the_owner_and_does_not_write(store: Store, shop: apsw.Connection) -> None:
    child = Program(
        ["-c", PROGRAM, store.path],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(SRC)},
    )

    def ask(statement: str) -> str:
        assert child.stdin is not None
        assert child.stdout is not None
        child.stdin.write(statement + "\n")
        child.stdin.flush()
        return child.stdout.readline().strip()

    try:
        assert child.stdout is not None
        assert child.stdout.readline().strip() == "ready"
        eventually(lambda: ask("select count(*) from t"), "10")
        shop.execute("delete from t where id < 3")
        eventually(lambda: ask("select count(*) from t"), "7")
        assert ask("pragma integrity_check") == "ok"
    finally:
        child.communicate(timeout=60)
    assert child.returncode == 0


@pytest.fixture
def closed_store(root: Path) -> Path:
    """A closed store with a snapshot: everything is published."""
    with quire.open(root, settings=SETTINGS) as store:
        connection = store.sqlite("shop", create=True)
        connection.execute("create table t(a); insert into t values (1), (2), (3)")
        store.snapshot("shop", "monday")
        connection.execute("delete from t where a = 1")
        connection.close()
    return root


def test_a_read_only_store_gives_read_only_connections(closed_store: Path) -> None:
    with quire.open(closed_store, "r") as store:
        connection, old = store.sqlite("shop"), store.sqlite("shop", at="monday")
        assert (count(connection), count(old)) == (2, 3)
        assert count(connection) == 2, "from SQLite's own cache"
        with pytest.raises(apsw.ReadOnlyError):
            connection.execute("delete from t")
        connection.execute("attach 'file:shop?at=monday' as old")
        assert count(connection, "old.t") == 3
        epoch = int(str(connection.pragma("quire_epoch")))
        past_versions = [store.sqlite("shop", at=epoch), store.sqlite("shop", at=datetime.now(UTC))]
        assert [count(db) for db in past_versions] == [2, 2]
        with pytest.raises(UnknownSnapshot):
            store.sqlite("shop", at="tuesday")
        with pytest.raises(ReadOnly):
            store.sqlite("shop", create=True)
        with pytest.raises(ReadOnly):
            store.sqlite("branch", fork_of="shop")
        for db in (connection, old, *past_versions):
            db.close()


class Versions:
    """A database that changes, with its pages in memory."""

    def __init__(self) -> None:
        self.connection = apsw.Connection(":memory:")
        self.connection.execute("create table t(a); insert into t values (1)")
        self.lsn = 1
        self.opened: list[Version] = []

    def newest(self) -> Version:
        self.opened.append(Version(self.connection.serialize("main"), self.lsn))
        return self.opened[-1]


class Version:
    page_size = 4096

    def __init__(self, image: bytes, lsn: int) -> None:
        self.image, self.lsn = image, lsn
        self.size_pages = len(image) // self.page_size
        self.is_open = True

    def read_page(self, page: int) -> bytes:
        if page >= self.size_pages:
            raise OutOfRange("no such page", page=page)
        return self.image[page * self.page_size : (page + 1) * self.page_size]

    def close(self) -> None:
        self.is_open = False


def test_each_transaction_reads_the_newest_version_and_releases_it() -> None:
    versions, files = Versions(), []

    def opener(*_: object) -> tuple[ReadOnlyFile, bool]:
        files.append(ReadOnlyFile.published(versions.newest, lambda: versions.lsn))
        return files[-1], True

    vfs = QuireVfs("test-published", opener)
    connection = apsw.Connection("shop", flags=apsw.SQLITE_OPEN_READONLY, vfs=vfs.name)
    connection.execute("begin")
    assert count(connection) == 1
    versions.connection.execute("insert into t values (2)")
    versions.lsn += 1
    assert count(connection) == 1, "one transaction, one version"
    connection.execute("commit")
    assert count(connection) == 2
    assert [version.is_open for version in versions.opened] == [False, True]
    opened_count = len(versions.opened)
    assert count(connection) == 2
    assert len(versions.opened) == opened_count, "the version was reused"
    files[0].release_idle()
    assert not any(version.is_open for version in versions.opened)
    assert count(connection) == 2
    connection.close()
    assert not any(version.is_open for version in versions.opened)


def test_a_new_version_with_an_unchanged_change_counter_is_read_again() -> None:
    versions = Versions()
    vfs = QuireVfs("test-published", lambda *_: (ReadOnlyFile.published(versions.newest, lambda: versions.lsn), True))
    connection = apsw.Connection("shop", flags=apsw.SQLITE_OPEN_READONLY, vfs=vfs.name)
    assert count(connection) == 1
    header = versions.connection.serialize("main")[:4096]
    versions.connection.execute("update t set a = 77")
    image = versions.connection.serialize("main")
    versions.newest = lambda: Version(header + image[4096:], 2)  # type: ignore[method-assign]
    versions.lsn = 2
    assert connection.execute("select a from t").get == 77
    connection.close()


# ── one version, anywhere ─────────────────────────────────────────────────────────────────────────────────────────────
def test_a_view_is_read_without_a_store(store: Store, shop: apsw.Connection, tmp_path: Path) -> None:
    store.snapshot("shop", "monday")
    shop.execute("delete from t")
    reader = open_reader(store.pages.open_view("shop", "monday"))
    assert count(reader) == 10
    with pytest.raises(apsw.ReadOnlyError):
        reader.execute("delete from t")
    with pytest.raises(apsw.CantOpenError, match="cannot attach other databases"):
        reader.execute("attach 'shop' as s")
    plain = apsw.Connection(str(tmp_path / "plain.db"))
    plain.execute("create table u(a)")
    plain.close()
    reader.execute("attach ? as f", (str(tmp_path / "plain.db"),))
    assert count(reader, "f.u") == 0
    reader.close()


def test_a_file_in_wal_mode_opens_and_keeps_its_header(store: Store, tmp_path: Path) -> None:
    """Bytes 18 and 19 of its header are 2 (Q3)."""
    plain = apsw.Connection(str(tmp_path / "wal.db"))
    plain.execute("pragma page_size=1024; create table t(a); insert into t values (1)")
    plain.pragma("journal_mode", "wal")
    plain.close()
    image = (tmp_path / "wal.db").read_bytes()
    assert image[18:20] == b"\x02\x02"
    store.create("shop", "pages")
    pages = store.pages.open("shop", page_size=1024)
    with pages.begin() as txn:
        for page in range(len(image) // 1024):
            txn.write_page(page, image[page * 1024 : (page + 1) * 1024])
    connection = store.sqlite("shop")
    assert count(connection) == 1
    assert pages.open_snapshot().read_page(0)[18:20] == b"\x02\x02", "the stored bytes are unchanged"
    connection.execute("insert into t values (2)")
    assert pages.open_snapshot().read_page(0)[18:20] == b"\x01\x01"
    connection.close()
