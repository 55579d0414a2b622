"""An owner whose lock file was moved or removed stops: a second owner may already be running."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

import quire
from quire.core.clock import SystemClock
from quire.core.errors import StoreFenced
from quire.core.settings import MaintenanceSettings, ManifestLogSettings, StoreSettings
from quire.durable.files import OsDisk
from quire.store.store import Store
from quire.stream.files import LogFiles
from quire.stream.mlog_log import ManifestLog
from quire.stream.mlog_records import SegmentOpened
from tests.store.conftest import Script, assert_sound, line

SECOND_OWNER = """
import sys, quire
with quire.open(sys.argv[1]) as store:
    store.create("of-the-second", "pages")
    print([database.name for database in store.databases()], flush=True)
    sys.stdin.readline()
"""

QUIET = StoreSettings(maintenance=MaintenanceSettings(enabled=False))


def move(path: Path) -> None:
    os.rename(path / "store.lock", path / "store.lock.old")


def replace(path: Path) -> None:
    (path / "new.lock").touch()
    os.rename(path / "new.lock", path / "store.lock")


def remove(path: Path) -> None:
    os.remove(path / "store.lock")


EACH_LOSS = pytest.mark.parametrize("lose_lock_file", [move, replace, remove])


@EACH_LOSS
def test_an_owner_that_lost_its_lock_file_commits_nothing(
    path: Path, lose_lock_file: Callable[[Path], None], script: Script
) -> None:
    with quire.open(path, settings=QUIET) as first:
        first.create("before", "pages")
        lose_lock_file(path)
        second = script(SECOND_OWNER, str(path))
        assert line(second) == "['before', 'of-the-second']"
        with pytest.raises(StoreFenced, match="lock file") as caught:
            first.create("after", "pages")
        assert caught.value.where["path"] == str(path / "store.lock")
        assert caught.value.where["successor_pid"] == second.pid
        with pytest.raises(StoreFenced):  # nor the time after
            first.create("later", "pages")
        assert [database.name for database in first.databases()] == ["before", "of-the-second"], "reading still works"
        second.communicate("\n")
    assert_sound(path)
    with quire.open(path, "r") as reader:
        assert [database.name for database in reader.databases()] == ["before", "of-the-second"]


@pytest.fixture
def first(path: Path) -> Store:
    return quire.open(path, settings=QUIET)


def insert(store: Store) -> Callable[[], object]:
    db = store.sqlite("shop", create=True)
    db.execute("create table item(n)")
    return lambda: db.execute("insert into item values (1)")


def put(store: Store) -> Callable[[], object]:
    kv = store.kv("keys", create=True)
    kv.put(b"a", b"1")
    return lambda: kv.put(b"a", b"2")


def append(store: Store) -> Callable[[], object]:
    stream = store.stream("log", create=True)
    stream.append(b"one").result()
    return lambda: stream.append(b"two").result()


@EACH_LOSS
@pytest.mark.parametrize("write", [insert, put, append])
def test_no_engine_acknowledges_a_write_under_a_lost_lock(
    path: Path, first: Store, write: Callable[[Store], Callable[[], object]], lose_lock_file: Callable[[Path], None]
) -> None:
    """Engines sync their own logs, and consult the manifest only occasionally."""
    with first:
        second_write = write(first)
        lose_lock_file(path)
        for _ in range(2):
            with pytest.raises(Exception) as caught:  # noqa: PT011 - SQLite has its own errors
                second_write()
            assert "lock file" in str(caught.value) or isinstance(caught.value.__cause__, StoreFenced), caught.value
    assert_sound(path)


def test_a_manifest_log_whose_lock_file_was_moved_accepts_nothing(path: Path, first: Store) -> None:
    """The same for the lock of a stream's manifest log, which tools take while the store has no owner. Streams of an
    owner have no such lock: the store's lock covers them, and a descriptor for each would be too many."""
    with first:
        stream = first.stream("log", create=True)
        stream.append(b"one").result()
        stream.seal()
        stream_id = stream.stream_id
        assert not list(path.glob("streams/*/manifest/*.lock"))
    files = LogFiles(OsDisk(), str(path), stream_id)
    log = ManifestLog.open(files, clock=SystemClock(), settings=ManifestLogSettings())
    log.append(SegmentOpened(base_offset=1, epoch=0), 9)
    os.rename(files.lock, f"{files.lock}.old")
    with pytest.raises(StoreFenced, match="lock file") as caught:
        log.commit()
    assert caught.value.__cause__ is not caught.value, "the chain of causes is finite"
    log.abandon()
