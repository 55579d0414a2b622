"""Follow: whatever the other program does between two looks, after a look our database is what its file is."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import quire
from quire.core.errors import ConfigMismatch, Corruption, DatabaseTombstoned, NotFound
from quire.durable.failpoints import armed
from quire.store.store import Store
from tests.sqlite.followed import Obedient, content, follower, truth
from tests.sqlite.ordinary import append_commit, make

WAL = "PRAGMA journal_mode=wal; PRAGMA wal_autocheckpoint=0"
TABLE = "CREATE TABLE t (id INTEGER PRIMARY KEY, x)"
ROW = "INSERT INTO t (x) VALUES (randomblob(3000))"


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with quire.open(tmp_path / "store") as opened:
        yield opened
        assert opened.manifest.check() == []


@pytest.fixture
def path(tmp_path: Path) -> Path:
    (tmp_path / "live").mkdir()
    return tmp_path / "live" / "app.db"


@pytest.fixture
def app(path: Path) -> Iterator[Obedient]:
    with Obedient(path) as started:
        yield started


# ── what comes from the log ───────────────────────────────────────────────────────────────────────────────────────────
def test_each_transaction_becomes_one_commit(store: Store, app: Obedient) -> None:
    app.do(WAL, TABLE)
    ours = follower(store, app.path)
    assert ours.look()
    assert ours.done.compares == 1, "the first look takes all of it"
    states, lsn = [], ours.done.lsn
    for _ in range(3):
        app.do(ROW)
        states.append(truth(app.path))
    app.do(f"BEGIN; {ROW}; {ROW}; COMMIT")
    assert ours.look()
    assert (ours.done.compares, ours.done.transactions) == (1, 4)
    assert content(store) == truth(app.path)
    database = store.pages.open("copy")
    seen = []
    for each in range(lsn + 1, ours.done.lsn):
        with database.open_snapshot(at=each) as reader:
            seen.append(b"".join(image for _, image in reader.scan()))
    assert [state for state in states if state not in seen] == [], "each version can be opened"


def test_a_look_at_an_unchanged_file_opens_nothing(
    store: Store, app: Obedient, monkeypatch: pytest.MonkeyPatch
) -> None:
    app.do(WAL, TABLE, ROW)
    ours = follower(store, app.path)
    assert ours.look()
    with monkeypatch.context() as patch:
        patch.setattr("quire.sqlite.follow.open_source", None)
        for _ in range(3):
            assert not ours.look()
    app.do(ROW)
    assert ours.look()


def test_what_is_not_committed_is_not_shipped(store: Store, app: Obedient) -> None:
    app.do("PRAGMA cache_size=5", WAL, TABLE, ROW)
    ours = follower(store, app.path)
    ours.look()
    before = content(store)
    app.do("BEGIN", *[ROW] * 40)
    assert Path(f"{app.path}-wal").stat().st_size > 100_000, "much of it stands in the log already"
    assert not ours.look()
    assert content(store) == before
    app.do("ROLLBACK", ROW)
    assert ours.look()
    assert content(store) == truth(app.path)
    assert ours.done.compares == 1


def test_a_commit_that_sqlite_does_not_know_is_not_shipped(store: Store, app: Obedient) -> None:
    app.do(WAL, TABLE, ROW)
    ours = follower(store, app.path)
    ours.look()
    before = content(store)
    append_commit(app.path, b"\xee" * 4096)
    assert not ours.look()
    assert content(store) == before
    app.do(ROW)
    ours.look()
    assert content(store) == truth(app.path)


# ── logs that begin anew ──────────────────────────────────────────────────────────────────────────────────────────────
@pytest.mark.parametrize("kind", ["PASSIVE", "FULL", "RESTART", "TRUNCATE"])
def test_checkpoints_of_the_program_are_survived(store: Store, app: Obedient, kind: str) -> None:
    app.do(WAL, TABLE)
    ours = follower(store, app.path)
    for number in range(8):
        app.do(*[ROW] * (1 + number % 3))
        if number % 2:
            ours.look()
            assert content(store) == truth(app.path)
        app.do(f"PRAGMA wal_checkpoint({kind})", "UPDATE t SET x = 'short' WHERE id % 4 = 1")
        if number % 3:
            ours.look()
            assert content(store) == truth(app.path)


def test_a_log_begun_anew_once_costs_no_compare(store: Store, app: Obedient) -> None:
    """What stood behind our place in the log's former life is still there, and says which pages to look at (rule 3)."""
    app.do(WAL, TABLE, *[ROW] * 40, "PRAGMA wal_checkpoint(RESTART)", *[ROW] * 10)
    ours = follower(store, app.path)
    ours.look()
    app.do(ROW, "UPDATE t SET x = 'missed' WHERE id = 3", "PRAGMA wal_checkpoint(RESTART)", ROW)
    assert ours.look()
    assert (ours.done.compares, ours.done.patches) == (1, 1)
    assert content(store) == truth(app.path)
    app.do(ROW)
    ours.look()
    assert (ours.done.compares, ours.done.transactions) == (1, 1)


def test_a_log_begun_anew_twice_is_a_gap(store: Store, app: Obedient) -> None:
    app.do(WAL, TABLE, *[ROW] * 40, "PRAGMA wal_checkpoint(RESTART)", *[ROW] * 10)
    ours = follower(store, app.path)
    ours.look()
    for _ in range(2):
        app.do("UPDATE t SET x = 'missed' WHERE id = 3", "PRAGMA wal_checkpoint(RESTART)", ROW)
    assert ours.look()
    assert (ours.done.compares, ours.done.patches) == (2, 0)
    assert content(store) == truth(app.path)


def test_a_program_that_ends_and_comes_back(store: Store, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire.sqlite.follow.RACY_NS", -1)  # else we would have to wait a little
    ours = follower(store, path)
    for _ in range(3):
        with Obedient(path) as app:
            app.do(WAL, "CREATE TABLE IF NOT EXISTS t (id INTEGER PRIMARY KEY, x)", ROW)
            ours.look()
            app.do(ROW)
            assert content(store) != truth(path)
        assert not Path(f"{path}-wal").exists(), "the last one out removes the log"
        ours.look()
        assert content(store) == truth(path)
    with Obedient(path) as app:
        before = ours.done.compares
        app.do(ROW, ROW)
        ours.look()
        assert ours.done.compares == before, "the file was as we knew it: its new log tells everything"
        assert content(store) == truth(path)


def test_a_program_that_was_there_twice_between_two_looks(
    store: Store, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its log is new, but not all that is new is in it: the first log went into the file."""
    monkeypatch.setattr("quire.sqlite.follow.RACY_NS", -1)
    with Obedient(path) as app:
        app.do(WAL, TABLE, ROW, ROW)
    ours = follower(store, path)
    ours.look()
    with Obedient(path) as app:
        app.do("UPDATE t SET x = 'first' WHERE id = 1")
    with Obedient(path) as app:
        app.do("UPDATE t SET x = 'second' WHERE id = 2")
        ours.look()
        assert content(store) == truth(path)
        assert ours.done.compares == 2


def test_a_log_that_begins_with_what_was_rolled_back_does_not_hide_what_is_committed_behind_it(
    store: Store, app: Obedient
) -> None:
    """SQLite spills a large transaction into a new log. After its rollback no frame of the log counts, and what is
    committed next changes neither the file nor the log's header: the follower took it all for unchanged."""
    log = Path(f"{app.path}-wal")
    app.do("PRAGMA cache_size=10", WAL, TABLE, *[ROW] * 5, "PRAGMA wal_checkpoint(RESTART)")
    app.do(f"BEGIN; {'; '.join([ROW] * 60)}; ROLLBACK")
    for file in (app.path, log):
        os.utime(file, (1_700_000_000, 1_700_000_000))  # long enough ago to tell later changes
    ours = follower(store, app.path)
    assert ours.look()
    assert not ours.look()
    assert ours.done.compares == 1, "an idle file is not read again"
    begins = log.read_bytes()[:32]
    app.do(ROW)
    assert log.read_bytes()[:32] == begins
    assert ours.look()
    assert content(store) == truth(app.path)


def test_a_vacuum_makes_the_copy_smaller(store: Store, app: Obedient) -> None:
    app.do(WAL, TABLE, *[ROW] * 30)
    ours = follower(store, app.path)
    ours.look()
    size = len(content(store))
    app.do("DELETE FROM t WHERE id > 5", "VACUUM")
    ours.look()
    assert len(content(store)) < size
    assert content(store) == truth(app.path)
    assert ours.done.compares == 1


@pytest.mark.parametrize("mode", ["delete", "truncate", "persist"])
def test_a_database_in_rollback_mode_is_compared(store: Store, app: Obedient, mode: str) -> None:
    app.do(f"PRAGMA journal_mode={mode}", TABLE, ROW)
    ours = follower(store, app.path)
    for _ in range(3):
        app.do("UPDATE t SET x = randomblob(3000)")
        assert ours.look()
        assert content(store) == truth(app.path)
    assert ours.done.transactions == 0
    app.do(WAL, ROW)
    ours.look()
    app.do(ROW, ROW)
    ours.look()
    assert ours.done.transactions >= 2, "in WAL mode now"
    app.do("PRAGMA journal_mode=delete", ROW)
    ours.look()
    assert content(store) == truth(app.path)


# ── deaths ────────────────────────────────────────────────────────────────────────────────────────────────────────────
def test_a_follower_goes_on_where_the_last_one_was(store: Store, app: Obedient) -> None:
    app.do(WAL, TABLE, ROW)
    follower(store, app.path).look()
    app.do(ROW, ROW)
    second = follower(store, app.path)
    second.look()
    assert (second.done.compares, second.done.transactions) == (0, 2)
    assert content(store) == truth(app.path)


def test_a_position_survives_the_store(tmp_path: Path, app: Obedient) -> None:
    app.do(WAL, TABLE, ROW)
    with quire.open(tmp_path / "store") as store:
        follower(store, app.path).look()
    app.do(ROW)
    with quire.open(tmp_path / "store") as store:
        ours = follower(store, app.path)
        ours.look()
        assert (ours.done.compares, ours.done.transactions) == (0, 1)
        store.checkpoint("copy")
        app.do(ROW)
        ours.look()
        assert (ours.done.compares, ours.done.transactions) == (0, 2)
        assert content(store) == truth(app.path)


def test_a_death_between_commit_and_position_is_a_compare(store: Store, app: Obedient) -> None:
    app.do(WAL, TABLE, ROW)
    follower(store, app.path).look()
    app.do(ROW)
    with armed("sqlite.follow.committed", "raise:EIO"), pytest.raises(OSError, match="failpoint"):
        follower(store, app.path).look()
    app.do(ROW)
    ours = follower(store, app.path)
    ours.look()
    assert (ours.done.compares, ours.done.transactions) == (1, 0)
    assert content(store) == truth(app.path)


def test_a_position_that_cannot_be_read_is_none(
    store: Store, app: Obedient, capsys: pytest.CaptureFixture[str]
) -> None:
    app.do(WAL, TABLE, ROW)
    follower(store, app.path).look()
    db_id = store.database("copy").db_id
    file = Path(store.path) / f"pages/{db_id:08x}/follow.json"
    assert json.loads(file.read_text())["path"] == str(app.path)
    file.write_text('{"path": 7')
    app.do(ROW)
    ours = follower(store, app.path)
    ours.look()
    assert ours.done.compares == 1
    assert "position_unreadable" in capsys.readouterr().err
    assert content(store) == truth(app.path)


def test_what_somebody_else_wrote_is_set_right(store: Store, app: Obedient) -> None:
    app.do(WAL, TABLE, ROW)
    ours = follower(store, app.path)
    ours.look()
    with store.pages.open("copy").begin() as txn:
        txn.write_page(1, b"x" * 4096)
    assert ours.look(), "our database is not at the lsn of the position"
    assert content(store) == truth(app.path)


def test_a_program_killed_in_a_transaction(store: Store, path: Path) -> None:
    ours = follower(store, path)
    with Obedient(path) as app:
        app.do("PRAGMA cache_size=5", WAL, TABLE, ROW)
        ours.look()
        app.do(ROW, "BEGIN", *[ROW] * 40)
        app.kill()
        assert app.process.returncode == -signal.SIGKILL
    ours.look()
    with Obedient(path) as app:
        app.do(WAL, ROW)
        ours.look()
        assert content(store) == truth(path)


def test_a_log_that_lost_its_end_and_grew_again_is_compared(store: Store, path: Path) -> None:
    """As after a power failure with synchronous=NORMAL: same salts, as many frames, other contents."""
    ours = follower(store, path)
    with Obedient(path) as app:
        app.do(WAL, TABLE, ROW)
        earlier = {each: Path(f"{path}{each}").read_bytes() for each in ("", "-wal")}
        app.do("UPDATE t SET x = 'lost'")
        ours.look()
        lost = content(store)
        app.kill()
    Path(f"{path}-shm").unlink()
    for ending, body in earlier.items():
        Path(f"{path}{ending}").write_bytes(body)
    with Obedient(path) as app:
        app.do("UPDATE t SET x = 'kept'")
        ours.look()
        assert content(store) == truth(path) != lost
        assert ours.done.compares == 2


def test_a_damaged_log_is_told(store: Store, app: Obedient) -> None:
    app.do(WAL, TABLE, ROW)
    ours = follower(store, app.path)
    ours.look()
    app.do(ROW, ROW)
    with Path(f"{app.path}-wal").open("r+b") as log:
        log.seek(-3000, 2)
        log.write(b"damage")
    with pytest.raises(Corruption, match="a damaged frame"):
        ours.look()
    assert ours.done.transactions == 1, "what came before it was shipped"


# ── odd files ─────────────────────────────────────────────────────────────────────────────────────────────────────────
def test_another_file_under_the_name_is_compared(store: Store, path: Path) -> None:
    make(path, rows=20)
    ours = follower(store, path)
    ours.look()
    path.unlink()
    make(path, rows=50)
    assert ours.look()
    assert content(store) == path.read_bytes()


def test_a_page_size_that_changes_ends_it(store: Store, app: Obedient) -> None:
    app.do(TABLE, ROW)
    ours = follower(store, app.path)
    ours.look()
    app.do("PRAGMA page_size=1024", "VACUUM")
    with pytest.raises(ConfigMismatch, match="page size of the file differs"):
        ours.look()


def test_a_database_that_is_dropped_is_not_made_again(store: Store, app: Obedient) -> None:
    app.do(WAL, TABLE)
    ours = follower(store, app.path)
    ours.look()
    store.rename("copy", "another")
    app.do(ROW)
    assert ours.look(), "a name is only a name"
    store.pages.close_database("another")
    store.drop("another")
    app.do(ROW)
    with pytest.raises(DatabaseTombstoned):
        ours.look()
    assert store.databases() == []


def test_a_look_at_a_file_that_is_not_there_says_so(store: Store, path: Path) -> None:
    for _ in range(2):
        with pytest.raises(NotFound, match="does not exist yet"):
            follower(store, path).look()
        path.touch()


def test_running_waits_for_the_file_and_stops_when_told(store: Store, path: Path) -> None:
    ours, stop = follower(store, path), threading.Event()
    thread = threading.Thread(target=ours.run, args=(stop, 0.01))
    thread.start()
    try:
        with Obedient(path) as app:
            app.do(WAL, TABLE, *[ROW] * 5)
            while not ours.done.lsn or content(store) != truth(path):
                time.sleep(0.02)
    finally:
        stop.set()
        thread.join(60)
    assert not thread.is_alive()
