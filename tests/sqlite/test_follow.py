"""Follow: whatever the other program does between two polls, after a poll the database equals the file."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import quire
from quire.core.errors import ConfigMismatch, Corruption, DatabaseTombstoned, NotFound
from quire.durable.failpoints import armed
from quire.sqlite.follow import Follower
from quire.store.store import Store
from tests.sqlite.follow_helpers import SqlProgram, content, follower, sqlite_content
from tests.sqlite.sqlite_files import append_commit, make

WAL = "PRAGMA journal_mode=wal; PRAGMA wal_autocheckpoint=0"
TABLE = "CREATE TABLE t (id INTEGER PRIMARY KEY, x)"
ROW = "INSERT INTO t (x) VALUES (randomblob(3000))"


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with quire.open(tmp_path / "store") as store:
        yield store
        assert store.manifest.check() == []


@pytest.fixture
def path(tmp_path: Path) -> Path:
    (tmp_path / "live").mkdir()
    return tmp_path / "live" / "app.db"


@pytest.fixture
def app(path: Path) -> Iterator[SqlProgram]:
    with SqlProgram(path) as started:
        yield started


# ── transactions from the log ─────────────────────────────────────────────────────────────────────────────────────────
def test_each_transaction_becomes_one_commit(store: Store, app: SqlProgram) -> None:
    app.run_sql(WAL, TABLE)
    file_follower = follower(store, app.path)
    assert file_follower.look()
    assert file_follower.done.compares == 1, "the first poll copies everything"
    states, lsn = [], file_follower.done.lsn
    for _ in range(3):
        app.run_sql(ROW)
        states.append(sqlite_content(app.path))
    app.run_sql(f"BEGIN; {ROW}; {ROW}; COMMIT")
    assert file_follower.look()
    assert (file_follower.done.compares, file_follower.done.transactions) == (1, 4)
    assert content(store) == sqlite_content(app.path)
    database = store.pages.open("copy")
    contents = []
    for later_lsn in range(lsn + 1, file_follower.done.lsn):
        with database.open_snapshot(at=later_lsn) as reader:
            contents.append(b"".join(image for _, image in reader.scan()))
    assert [state for state in states if state not in contents] == [], "each version can be opened"


def test_polling_an_unchanged_file_opens_nothing(
    store: Store, app: SqlProgram, monkeypatch: pytest.MonkeyPatch
) -> None:
    app.run_sql(WAL, TABLE, ROW)
    file_follower = follower(store, app.path)
    assert file_follower.look()
    with monkeypatch.context() as patch:
        patch.setattr("quire.sqlite.follow.open_source", None)
        for _ in range(3):
            assert not file_follower.look()
    app.run_sql(ROW)
    assert file_follower.look()


def test_uncommitted_changes_are_not_copied(store: Store, app: SqlProgram) -> None:
    app.run_sql("PRAGMA cache_size=5", WAL, TABLE, ROW)
    file_follower = follower(store, app.path)
    file_follower.look()
    before = content(store)
    app.run_sql("BEGIN", *[ROW] * 40)
    assert Path(f"{app.path}-wal").stat().st_size > 100_000, "much of it is already in the log"
    assert not file_follower.look()
    assert content(store) == before
    app.run_sql("ROLLBACK", ROW)
    assert file_follower.look()
    assert content(store) == sqlite_content(app.path)
    assert file_follower.done.compares == 1


def test_a_commit_that_sqlite_does_not_count_is_not_copied(store: Store, app: SqlProgram) -> None:
    app.run_sql(WAL, TABLE, ROW)
    file_follower = follower(store, app.path)
    file_follower.look()
    before = content(store)
    append_commit(app.path, b"\xee" * 4096)
    assert not file_follower.look()
    assert content(store) == before
    app.run_sql(ROW)
    file_follower.look()
    assert content(store) == sqlite_content(app.path)


# ── restarted logs ────────────────────────────────────────────────────────────────────────────────────────────────────
@pytest.mark.parametrize("kind", ["PASSIVE", "FULL", "RESTART", "TRUNCATE"])
def test_following_continues_after_checkpoints_of_the_program(store: Store, app: SqlProgram, kind: str) -> None:
    app.run_sql(WAL, TABLE)
    file_follower = follower(store, app.path)
    for number in range(8):
        app.run_sql(*[ROW] * (1 + number % 3))
        if number % 2:
            file_follower.look()
            assert content(store) == sqlite_content(app.path)
        app.run_sql(f"PRAGMA wal_checkpoint({kind})", "UPDATE t SET x = 'short' WHERE id % 4 = 1")
        if number % 3:
            file_follower.look()
            assert content(store) == sqlite_content(app.path)


def test_a_log_restarted_once_needs_no_comparison(store: Store, app: SqlProgram) -> None:
    """The frames after our position from the log's previous use are still there, and name the pages to read (rule 3)."""
    app.run_sql(WAL, TABLE, *[ROW] * 40, "PRAGMA wal_checkpoint(RESTART)", *[ROW] * 10)
    file_follower = follower(store, app.path)
    file_follower.look()
    app.run_sql(ROW, "UPDATE t SET x = 'missed' WHERE id = 3", "PRAGMA wal_checkpoint(RESTART)", ROW)
    assert file_follower.look()
    assert (file_follower.done.compares, file_follower.done.patches) == (1, 1)
    assert content(store) == sqlite_content(app.path)
    app.run_sql(ROW)
    file_follower.look()
    assert (file_follower.done.compares, file_follower.done.transactions) == (1, 1)


def test_a_log_restarted_twice_is_a_gap(store: Store, app: SqlProgram) -> None:
    app.run_sql(WAL, TABLE, *[ROW] * 40, "PRAGMA wal_checkpoint(RESTART)", *[ROW] * 10)
    file_follower = follower(store, app.path)
    file_follower.look()
    for _ in range(2):
        app.run_sql("UPDATE t SET x = 'missed' WHERE id = 3", "PRAGMA wal_checkpoint(RESTART)", ROW)
    assert file_follower.look()
    assert (file_follower.done.compares, file_follower.done.patches) == (2, 0)
    assert content(store) == sqlite_content(app.path)


def test_a_program_that_ends_and_restarts_is_followed(
    store: Store, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quire.sqlite.follow.RACY_NS", -1)  # otherwise the test would have to wait
    file_follower = follower(store, path)
    for _ in range(3):
        with SqlProgram(path) as app:
            app.run_sql(WAL, "CREATE TABLE IF NOT EXISTS t (id INTEGER PRIMARY KEY, x)", ROW)
            file_follower.look()
            app.run_sql(ROW)
            assert content(store) != sqlite_content(path)
        assert not Path(f"{path}-wal").exists(), "the last connection removes the log"
        file_follower.look()
        assert content(store) == sqlite_content(path)
    with SqlProgram(path) as app:
        before = file_follower.done.compares
        app.run_sql(ROW, ROW)
        file_follower.look()
        assert file_follower.done.compares == before, "the file was unchanged: its new log is complete"
        assert content(store) == sqlite_content(path)


def test_a_program_that_ran_twice_between_two_polls_is_compared(
    store: Store, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The log is new but incomplete: the first log was checkpointed into the file."""
    monkeypatch.setattr("quire.sqlite.follow.RACY_NS", -1)
    with SqlProgram(path) as app:
        app.run_sql(WAL, TABLE, ROW, ROW)
    file_follower = follower(store, path)
    file_follower.look()
    with SqlProgram(path) as app:
        app.run_sql("UPDATE t SET x = 'first' WHERE id = 1")
    with SqlProgram(path) as app:
        app.run_sql("UPDATE t SET x = 'second' WHERE id = 2")
        file_follower.look()
        assert content(store) == sqlite_content(path)
        assert file_follower.done.compares == 2


def test_a_log_that_begins_with_rolled_back_frames_does_not_hide_later_commits(store: Store, app: SqlProgram) -> None:
    """SQLite spills a large transaction into a new log. After its rollback no frame of the log counts, and the next
    commit changes neither the file nor the log's header: the follower took all of it for unchanged.
    """
    log = Path(f"{app.path}-wal")
    app.run_sql("PRAGMA cache_size=10", WAL, TABLE, *[ROW] * 5, "PRAGMA wal_checkpoint(RESTART)")
    app.run_sql(f"BEGIN; {'; '.join([ROW] * 60)}; ROLLBACK")
    for file in (app.path, log):
        os.utime(file, (1_700_000_000, 1_700_000_000))  # long enough ago that later changes are detected
    file_follower = follower(store, app.path)
    assert file_follower.look()
    assert not file_follower.look()
    assert file_follower.done.compares == 1, "an unchanged file is not read again"
    begins = log.read_bytes()[:32]
    app.run_sql(ROW)
    assert log.read_bytes()[:32] == begins
    assert file_follower.look()
    assert content(store) == sqlite_content(app.path)


def test_a_vacuum_makes_the_copy_smaller(store: Store, app: SqlProgram) -> None:
    app.run_sql(WAL, TABLE, *[ROW] * 30)
    file_follower = follower(store, app.path)
    file_follower.look()
    size = len(content(store))
    app.run_sql("DELETE FROM t WHERE id > 5", "VACUUM")
    file_follower.look()
    assert len(content(store)) < size
    assert content(store) == sqlite_content(app.path)
    assert file_follower.done.compares == 1


@pytest.mark.parametrize("mode", ["delete", "truncate", "persist"])
def test_a_database_in_rollback_mode_is_compared(store: Store, app: SqlProgram, mode: str) -> None:
    app.run_sql(f"PRAGMA journal_mode={mode}", TABLE, ROW)
    file_follower = follower(store, app.path)
    for _ in range(3):
        app.run_sql("UPDATE t SET x = randomblob(3000)")
        assert file_follower.look()
        assert content(store) == sqlite_content(app.path)
    assert file_follower.done.transactions == 0
    app.run_sql(WAL, ROW)
    file_follower.look()
    app.run_sql(ROW, ROW)
    file_follower.look()
    assert file_follower.done.transactions >= 2, "in WAL mode now"
    app.run_sql("PRAGMA journal_mode=delete", ROW)
    file_follower.look()
    assert content(store) == sqlite_content(app.path)


# ── crashes ───────────────────────────────────────────────────────────────────────────────────────────────────────────
def test_a_follower_continues_where_the_previous_one_stopped(store: Store, app: SqlProgram) -> None:
    app.run_sql(WAL, TABLE, ROW)
    follower(store, app.path).look()
    app.run_sql(ROW, ROW)
    second = follower(store, app.path)
    second.look()
    assert (second.done.compares, second.done.transactions) == (0, 2)
    assert content(store) == sqlite_content(app.path)


def test_a_position_survives_the_store(tmp_path: Path, app: SqlProgram) -> None:
    app.run_sql(WAL, TABLE, ROW)
    with quire.open(tmp_path / "store") as store:
        follower(store, app.path).look()
    app.run_sql(ROW)
    with quire.open(tmp_path / "store") as store:
        file_follower = follower(store, app.path)
        file_follower.look()
        assert (file_follower.done.compares, file_follower.done.transactions) == (0, 1)
        store.checkpoint("copy")
        app.run_sql(ROW)
        file_follower.look()
        assert (file_follower.done.compares, file_follower.done.transactions) == (0, 2)
        assert content(store) == sqlite_content(app.path)


def test_a_crash_between_commit_and_position_causes_a_comparison(store: Store, app: SqlProgram) -> None:
    app.run_sql(WAL, TABLE, ROW)
    follower(store, app.path).look()
    app.run_sql(ROW)
    with armed("sqlite.follow.committed", "raise:EIO"), pytest.raises(OSError, match="failpoint"):
        follower(store, app.path).look()
    app.run_sql(ROW)
    file_follower = follower(store, app.path)
    file_follower.look()
    assert (file_follower.done.compares, file_follower.done.transactions) == (1, 0)
    assert content(store) == sqlite_content(app.path)


def test_an_unreadable_position_is_ignored(store: Store, app: SqlProgram, capsys: pytest.CaptureFixture[str]) -> None:
    app.run_sql(WAL, TABLE, ROW)
    follower(store, app.path).look()
    db_id = store.database("copy").db_id
    file = Path(store.path) / f"pages/{db_id:08x}/follow.json"
    assert json.loads(file.read_text())["path"] == str(app.path)
    file.write_text('{"path": 7')
    app.run_sql(ROW)
    file_follower = follower(store, app.path)
    file_follower.look()
    assert file_follower.done.compares == 1
    assert "position_unreadable" in capsys.readouterr().err
    assert content(store) == sqlite_content(app.path)


def test_writes_of_others_to_the_copy_are_reverted(store: Store, app: SqlProgram) -> None:
    app.run_sql(WAL, TABLE, ROW)
    file_follower = follower(store, app.path)
    file_follower.look()
    with store.pages.open("copy").begin() as txn:
        txn.write_page(1, b"x" * 4096)
    assert file_follower.look(), "the database is not at the lsn of the position"
    assert content(store) == sqlite_content(app.path)


@pytest.mark.parametrize("step", ["_start_of", "_commit", "_ship"])
def test_a_write_of_another_during_a_look_is_reverted(
    store: Store, app: SqlProgram, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    """Hazard: the position takes the lsn of another writer's commit, so its pages stay and later frames are laid over them."""
    app.run_sql(WAL, TABLE, "CREATE TABLE untouched (x)", ROW)
    file_follower = follower(store, app.path)
    file_follower.look()
    app.run_sql(ROW, ROW)
    write_of_another_after(monkeypatch, step, store)
    file_follower.look()
    file_follower.look()
    assert content(store) == sqlite_content(app.path)
    assert file_follower.done.compares == 2
    app.run_sql(ROW)
    file_follower.look()
    assert content(store) == sqlite_content(app.path)
    assert file_follower.done.compares == 2, "transactions are shipped again"


def test_a_write_of_another_before_a_patch_is_reverted(
    store: Store, app: SqlProgram, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hazard: only the pages of the log are compared, with a version that another writer has changed elsewhere."""
    app.run_sql(WAL, TABLE, "CREATE TABLE untouched (x)", *[ROW] * 40, "PRAGMA wal_checkpoint(RESTART)", *[ROW] * 10)
    file_follower = follower(store, app.path)
    file_follower.look()
    app.run_sql(ROW, "PRAGMA wal_checkpoint(RESTART)", ROW)
    write_of_another_after(monkeypatch, "_possibly_changed_pages", store)
    file_follower.look()
    assert (file_follower.done.compares, file_follower.done.patches) == (2, 0)
    assert content(store) == sqlite_content(app.path)


def write_of_another_after(monkeypatch: pytest.MonkeyPatch, step: str, store: Store) -> None:
    """Replace the root of the table `untouched` once, after a step of a follower."""
    method = getattr(Follower, step)

    def then_write(*args: Any) -> Any:
        result = method(*args)
        monkeypatch.undo()
        with store.pages.open("copy").begin() as txn:
            txn.write_page(2, b"x" * 4096)
        return result

    monkeypatch.setattr(Follower, step, then_write)


def test_a_program_killed_in_a_transaction_is_followed(store: Store, path: Path) -> None:
    file_follower = follower(store, path)
    with SqlProgram(path) as app:
        app.run_sql("PRAGMA cache_size=5", WAL, TABLE, ROW)
        file_follower.look()
        app.run_sql(ROW, "BEGIN", *[ROW] * 40)
        app.kill()
        assert app.process.returncode == -signal.SIGKILL
    file_follower.look()
    with SqlProgram(path) as app:
        app.run_sql(WAL, ROW)
        file_follower.look()
        assert content(store) == sqlite_content(path)


def test_a_log_that_lost_its_end_and_grew_again_is_compared(store: Store, path: Path) -> None:
    """As after a power failure with synchronous=NORMAL: the same salts, as many frames, other content."""
    file_follower = follower(store, path)
    with SqlProgram(path) as app:
        app.run_sql(WAL, TABLE, ROW)
        earlier = {suffix: Path(f"{path}{suffix}").read_bytes() for suffix in ("", "-wal")}
        app.run_sql("UPDATE t SET x = 'lost'")
        file_follower.look()
        lost = content(store)
        app.kill()
    Path(f"{path}-shm").unlink()
    for ending, body in earlier.items():
        Path(f"{path}{ending}").write_bytes(body)
    with SqlProgram(path) as app:
        app.run_sql("UPDATE t SET x = 'kept'")
        file_follower.look()
        assert content(store) == sqlite_content(path) != lost
        assert file_follower.done.compares == 2


def test_a_damaged_log_is_reported(store: Store, app: SqlProgram) -> None:
    app.run_sql(WAL, TABLE, ROW)
    file_follower = follower(store, app.path)
    file_follower.look()
    app.run_sql(ROW, ROW)
    with Path(f"{app.path}-wal").open("r+b") as log:
        log.seek(-3000, 2)
        log.write(b"damage")
    with pytest.raises(Corruption, match="a damaged frame"):
        file_follower.look()
    assert file_follower.done.transactions == 1, "transactions before the damage were copied"


# ── odd files ─────────────────────────────────────────────────────────────────────────────────────────────────────────
def test_another_file_under_the_name_is_compared(store: Store, path: Path) -> None:
    make(path, rows=20)
    file_follower = follower(store, path)
    file_follower.look()
    path.unlink()
    make(path, rows=50)
    assert file_follower.look()
    assert content(store) == path.read_bytes()


def test_a_changed_page_size_ends_following(store: Store, app: SqlProgram) -> None:
    app.run_sql(TABLE, ROW)
    file_follower = follower(store, app.path)
    file_follower.look()
    app.run_sql("PRAGMA page_size=1024", "VACUUM")
    with pytest.raises(ConfigMismatch, match="page size of the file differs"):
        file_follower.look()


def test_a_dropped_database_is_not_created_again(store: Store, app: SqlProgram) -> None:
    app.run_sql(WAL, TABLE)
    file_follower = follower(store, app.path)
    file_follower.look()
    store.rename("copy", "another")
    app.run_sql(ROW)
    assert file_follower.look(), "a new database can have the same name"
    store.pages.close_database("another")
    store.drop("another")
    app.run_sql(ROW)
    with pytest.raises(DatabaseTombstoned):
        file_follower.look()
    assert store.databases() == []


def test_polling_a_missing_file_raises(store: Store, path: Path) -> None:
    for _ in range(2):
        with pytest.raises(NotFound, match="does not exist yet"):
            follower(store, path).look()
        path.touch()


def test_run_waits_for_the_file_and_stops_on_request(store: Store, path: Path) -> None:
    file_follower, stop = follower(store, path), threading.Event()
    thread = threading.Thread(target=file_follower.run, args=(stop, 0.01))
    thread.start()
    try:
        with SqlProgram(path) as app:
            app.run_sql(WAL, TABLE, *[ROW] * 5)
            while not file_follower.done.lsn or content(store) != sqlite_content(path):
                time.sleep(0.02)
    finally:
        stop.set()
        thread.join(60)
    assert not thread.is_alive()
