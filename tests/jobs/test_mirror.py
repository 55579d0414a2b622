"""Mirrors: after every run the target holds what `SELECT *` over all databases returns, whatever happened before."""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

import quire
from quire.core.errors import InvalidInput, NameTaken, NotFound, StalePlan
from quire.durable.failpoints import armed
from quire.manifest.records import JobKind, JobState
from quire.store.store import Store
from quire.testing.clock import ManualClock
from quire.testing.manifest import assert_clean
from tests.jobs.mirrored_store import (
    FORMATS,
    POINTS,
    History,
    MirroredStore,
    fill,
    quiet_settings,
    read_databases,
    read_target,
    sorted_rows,
    target_at,
)


@pytest.fixture(params=FORMATS)
def mirror(request: pytest.FixtureRequest, tmp_path: Path) -> MirroredStore:
    return MirroredStore(tmp_path, request.param)


@pytest.fixture
def parquet_mirror(tmp_path: Path) -> MirroredStore:
    """The fastest format."""
    return MirroredStore(tmp_path, "parquet")


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with MirroredStore(tmp_path, "parquet").open() as store:
        yield store
        assert_clean(store.manifest)


def test_a_table_follows_its_databases(mirror: MirroredStore, store: Store) -> None:
    for number in range(3):
        fill(store, f"tenant-{number}")
    fill(store, "other")
    store.create("tenant-clicks", "stream")
    mirror.define(store)
    first = mirror.run(store)
    assert (first.full, first.changed, first.rows_written) == (True, 3, 12)
    again = mirror.run(store)
    assert (again.full, again.changed, again.files_added, again.batch_id) == (False, 0, 0, first.batch_id)
    with closing(store.sqlite("tenant-1")) as connection:
        connection.execute("UPDATE orders SET price = 7 WHERE id = 1")
        connection.execute("DELETE FROM orders WHERE id = 2")
    store.drop("tenant-0")
    store.fork("tenant-2", "tenant-3")
    store.rename("tenant-2", "tenant-9")
    second = mirror.run(store)
    assert (second.full, second.changed, second.dropped) == (False, 3, 1)
    assert {dict(row)["_database"] for row in read_target(mirror.root, mirror.kind)} == {
        "tenant-1",
        "tenant-3",
        "tenant-9",
    }
    store.drop("tenant-1")
    store.drop("tenant-3")
    store.drop("tenant-9")
    assert mirror.run(store).dropped == 3
    assert read_target(mirror.root, mirror.kind) == []


def test_only_files_of_databases_that_changed_are_rewritten(parquet_mirror: MirroredStore, store: Store) -> None:
    parquet_mirror.options = {"file_bytes": "65536"}
    for number in range(30):
        fill(store, f"tenant-{number:02}", 40)
    parquet_mirror.define(store)
    first = parquet_mirror.run(store)
    assert first.files_added > 3
    with closing(store.sqlite("tenant-07")) as connection:
        connection.execute("DELETE FROM orders WHERE id = 2")
    second = parquet_mirror.run(store)
    assert (second.changed, second.files_removed) == (1, 1)
    assert 0 < second.copied < 15
    assert second.rows_written < first.rows_written // 2


@pytest.mark.parametrize("point", POINTS)
def test_a_driver_killed_at_any_step_has_no_effect_on_the_target(
    parquet_mirror: MirroredStore, store: Store, point: str
) -> None:
    for number in range(3):
        fill(store, f"tenant-{number}")
    parquet_mirror.define(store)
    assert parquet_mirror.killed_run(store, point)
    parquet_mirror.run(store)
    with closing(store.sqlite("tenant-1")) as connection:
        connection.execute("ALTER TABLE orders ADD COLUMN note TEXT")
        connection.execute("UPDATE orders SET note = 'new'")
    assert parquet_mirror.killed_run(store, point) == (point != "jobs.mirror.created")
    fill(store, "tenant-5")  # so that the next run sees another state than the killed one
    parquet_mirror.run(store)


@pytest.mark.parametrize("point", ["jobs.mirror.recorded", "jobs.mirror.committed"])
@pytest.mark.parametrize("kind", ["delta", "iceberg"])
def test_between_the_two_commits_the_target_decides(tmp_path: Path, store: Store, kind: str, point: str) -> None:
    mirror = MirroredStore(tmp_path, kind)
    fill(store, "tenant-1")
    mirror.define(store)
    mirror.run(store)
    fill(store, "tenant-2")
    assert mirror.killed_run(store, point)
    result = mirror.run(store)
    assert not result.full
    assert result.changed == (1 if point.endswith("recorded") else 0)


def _random_history(mirror: MirroredStore, seed: int, steps: int, every: int) -> None:
    rng = random.Random(seed)
    with mirror.open() as store:
        mirror.define(store)
        history = History(store, rng)
        for number in range(1, steps + 1):
            history.step()
            if rng.random() < 0.25:
                mirror.killed_run(store, rng.choice(POINTS))
            if number % every == 0:
                mirror.run(store)
        mirror.run(store)
        assert_clean(store.manifest)


@pytest.mark.parametrize("seed", range(2))
def test_after_every_run_of_a_random_history_with_kills_the_target_is_right(
    parquet_mirror: MirroredStore, seed: int
) -> None:
    _random_history(parquet_mirror, seed, steps=25, every=4)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_long_after_every_run_of_200_random_steps_the_target_is_right(mirror: MirroredStore, seed: int) -> None:
    _random_history(mirror, seed, steps=200, every=1)


# ── concurrent writers of the target ──────────────────────────────────────────────────────────────────────────────────
def _run_overtaken(
    mirror: MirroredStore, store: Store, point: str, change_meanwhile: Callable[[], None]
) -> tuple[quire.MirrorRun, int]:
    """Run a mirror that pauses at a failpoint while another run commits; returns its result and the hits of the
    failpoint."""
    fill(store, "tenant-1")
    mirror.define(store)
    mirror.run(store)
    fill(store, "tenant-2")
    hits: list[str] = []

    def sleep(point: str) -> None:
        hits.append(point)
        if len(hits) == 1:
            change_meanwhile()
            store.mirrors.run("lake", runner="threads")

    with armed(point, sleep):
        result = store.mirrors.run("lake", runner="threads")
    return result, len(hits)


def test_a_stale_driver_commits_nothing(mirror: MirroredStore, store: Store) -> None:
    """A driver that has planned, and pauses until another one has committed."""
    result, hits = _run_overtaken(mirror, store, "jobs.mirror.written", lambda: None)
    assert hits == 2, "one hit of each run; after replanning nothing is left to write"
    assert (result.changed, result.files_added) == (0, 0)
    mirror.check(store)


def test_a_driver_overtaken_between_its_commits_reverts_nothing(mirror: MirroredStore, store: Store) -> None:
    _run_overtaken(mirror, store, "jobs.mirror.recorded", lambda: fill(store, "tenant-3"))
    mirror.run(store)


def test_a_foreign_commit_causes_a_new_plan(tmp_path: Path, store: Store) -> None:
    from deltalake import DeltaTable

    mirror = MirroredStore(tmp_path, "delta")
    fill(store, "tenant-1")
    mirror.define(store)
    mirror.run(store)
    fill(store, "tenant-2")
    hits: list[str] = []

    def alter_table(point: str) -> None:
        if not hits:
            DeltaTable(f"{tmp_path}/lake").alter.set_table_properties({"delta.logRetentionDuration": "interval 9 days"})
        hits.append(point)

    with armed("jobs.mirror.recorded", alter_table):
        assert mirror.run(store).changed == 1
    assert len(hits) == 2


def test_endless_conflicts_are_an_error(
    parquet_mirror: MirroredStore, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(store, "tenant-1")
    parquet_mirror.define(store)

    def refuse(*_: Any) -> None:
        raise StalePlan("another commit came first", hint="plan it again")

    monkeypatch.setattr("quire.jobs.mirror.parquet_target.ParquetTarget.commit", refuse)
    with pytest.raises(StalePlan, match="another commit came first"):
        store.mirrors.run("lake")


def test_a_compacted_target_is_updated_incrementally(tmp_path: Path, store: Store) -> None:
    from deltalake import DeltaTable

    mirror = MirroredStore(tmp_path, "delta", {"file_bytes": "65536"})
    for number in range(12):
        fill(store, f"tenant-{number:02}", 40)
    mirror.define(store)
    mirror.run(store)
    table = DeltaTable(f"{tmp_path}/lake")
    assert table.optimize.compact()["numFilesRemoved"] > 1
    with closing(store.sqlite("tenant-03")) as connection:
        connection.execute("DELETE FROM orders WHERE id < 9")
    result = mirror.run(store)
    assert not result.full
    assert result.copied == 11, "all rows were in one file"
    mirror.run(store)


def test_a_target_that_was_changed_is_rewritten(tmp_path: Path, store: Store) -> None:
    from deltalake import DeltaTable

    mirror = MirroredStore(tmp_path, "delta")
    fill(store, "tenant-1")
    fill(store, "tenant-2")
    mirror.define(store)
    mirror.run(store)
    DeltaTable(f"{tmp_path}/lake").delete("id = 2")
    assert mirror.run(store).full


def test_a_table_of_another_mirror_is_not_changed(mirror: MirroredStore, store: Store) -> None:
    fill(store, "tenant-1")
    mirror.define(store)
    mirror.run(store)
    target, options = target_at(mirror.root, mirror.kind)
    with pytest.raises(InvalidInput, match="belongs to something else"):
        store.mirrors.create("second", "tenant-*", "orders", target, options=options)
    store.mirrors.drop("lake")
    with pytest.raises(InvalidInput, match="belongs to something else"):
        mirror.define(store)
    assert read_target(mirror.root, mirror.kind) == read_databases(store)


def test_a_removed_target_is_created_again(parquet_mirror: MirroredStore, store: Store) -> None:
    fill(store, "tenant-1")
    parquet_mirror.define(store)
    parquet_mirror.run(store)
    shutil.rmtree(parquet_mirror.root / "lake")
    result = parquet_mirror.run(store)
    assert (result.full, result.rows_written) == (True, 4)


def test_a_store_restored_to_an_older_state_rewrites_everything(parquet_mirror: MirroredStore) -> None:
    """A restored store has an older batch than its target."""
    with parquet_mirror.open() as store:
        fill(store, "tenant-1")
        parquet_mirror.define(store)
        parquet_mirror.run(store)
    shutil.copytree(parquet_mirror.root / "store", parquet_mirror.root / "before")
    with parquet_mirror.open() as store:
        fill(store, "tenant-2")
        parquet_mirror.run(store)
    shutil.rmtree(parquet_mirror.root / "store")
    shutil.move(parquet_mirror.root / "before", parquet_mirror.root / "store")
    with parquet_mirror.open() as store:
        result = parquet_mirror.run(store)
        assert (result.full, result.databases) == (True, 1)
        assert not parquet_mirror.run(store).full


def test_replaced_files_and_those_of_killed_runs_are_removed_after_a_while_and_no_others(
    parquet_mirror: MirroredStore, store: Store
) -> None:
    parquet_mirror.options = {"keep_seconds": "3600"}
    fill(store, "tenant-1")
    parquet_mirror.define(store)
    parquet_mirror.run(store)
    data = parquet_mirror.root / "lake" / "data"
    (data / "mine.parquet").write_bytes(b"of somebody else")
    fill(store, "tenant-2")
    assert parquet_mirror.killed_run(store, "jobs.mirror.written")
    assert len(list(data.iterdir())) == 3
    for file in data.iterdir():
        os.utime(file, (1, 1))
    fill(store, "tenant-3")
    parquet_mirror.run(store)  # removes what the killed run has left
    live = {file["path"] for file in json.loads((parquet_mirror.root / "lake" / "manifest.json").read_text())["files"]}
    assert {f"data/{file.name}" for file in data.iterdir()} == {*live, "data/mine.parquet"}


# ── columns and types ─────────────────────────────────────────────────────────────────────────────────────────────────
def test_added_columns_appear(mirror: MirroredStore, store: Store) -> None:
    fill(store, "tenant-1")
    fill(store, "tenant-2")
    mirror.define(store)
    mirror.run(store)
    with closing(store.sqlite("tenant-2")) as connection:
        connection.execute("ALTER TABLE orders ADD COLUMN note TEXT")
        connection.execute("ALTER TABLE orders ADD COLUMN paid BOOLEAN")
        connection.execute("UPDATE orders SET note = 'yes' WHERE id = 1")
    assert not mirror.run(store).full


def _table(store: Store, name: str, columns: str, *rows: tuple[Any, ...]) -> None:
    with closing(store.sqlite(name, create=True)) as connection:
        connection.execute(f"CREATE TABLE orders ({columns})")
        placeholders = ", ".join("?" * (columns.count(",") + 1))
        connection.executemany(f"INSERT INTO orders VALUES ({placeholders})", rows)


def test_a_changed_type_gets_its_own_column_and_is_logged(
    mirror: MirroredStore, store: Store, capfd: pytest.CaptureFixture[str]
) -> None:
    _table(store, "tenant-1", "id INTEGER PRIMARY KEY, size INTEGER", (1, 10))
    mirror.define(store)
    mirror.run(store)
    _table(store, "tenant-2", "id INTEGER PRIMARY KEY, size REAL", (1, 2.5))
    store.mirrors.run("lake")
    assert read_target(mirror.root, mirror.kind) == sorted_rows(
        [
            {"_database": "tenant-1", "id": 1, "size": 10},
            {"_database": "tenant-2", "id": 1, "size_double": 2.5},
        ]
    )
    assert "mirror.new_column_for_type" in capfd.readouterr().err


def test_a_wider_column_takes_narrower_values(parquet_mirror: MirroredStore, store: Store) -> None:
    _table(store, "tenant-1", "id INTEGER PRIMARY KEY, size REAL, code TEXT", (1, 2.5, "a"))
    parquet_mirror.define(store)
    store.mirrors.run("lake")
    _table(store, "tenant-2", "id INTEGER PRIMARY KEY, size INTEGER, code INTEGER", (1, 7, 12))
    store.mirrors.run("lake")
    assert read_target(parquet_mirror.root, parquet_mirror.kind)[1] == (
        ("_database", "tenant-2"),
        ("code", "12"),
        ("id", 1),
        ("size", 7.0),
    )
    _table(store, "tenant-3", "id INTEGER PRIMARY KEY, size INTEGER", (1, 2**53 + 1))
    with pytest.raises(InvalidInput, match="does not fit the target's column"):
        store.mirrors.run("lake")


def test_databases_that_disagree_about_a_new_column_in_one_run_get_the_wider_one(
    parquet_mirror: MirroredStore, store: Store
) -> None:
    parquet_mirror.options = {"file_bytes": "65536"}
    for number in range(12):
        kind = "REAL" if number % 2 else "INTEGER"
        _table(store, f"tenant-{number:02}", f"id INTEGER PRIMARY KEY, size {kind}", (1, 3), (2, None))
    parquet_mirror.define(store)
    store.mirrors.run("lake")
    rows = [dict(row) for row in read_target(parquet_mirror.root, parquet_mirror.kind)]
    assert len(rows) == 24
    assert {name for row in rows for name in row} == {"_database", "id", "size"}
    assert {row.get("size") for row in rows} == {3.0, None}


def test_columns_without_a_type_get_one_by_their_values(parquet_mirror: MirroredStore, store: Store) -> None:
    _table(store, "tenant-0", "id INTEGER PRIMARY KEY, price, note, late", (1, None, None, None))
    _table(store, "tenant-1", "id INTEGER PRIMARY KEY, price, note, late", (1, 3, "a", None))
    _table(store, "tenant-2", "id INTEGER PRIMARY KEY, price, note, late", (1, 2.5, 7, None))
    parquet_mirror.define(store)
    store.mirrors.run("lake")
    columns = json.loads((parquet_mirror.root / "lake" / "manifest.json").read_text())["columns"]
    assert sorted(map(tuple, columns)) == [("id", "bigint"), ("note", "string"), ("price", "double")]
    assert [dict(row).get("price") for row in read_target(parquet_mirror.root, parquet_mirror.kind)] == [None, 3.0, 2.5]
    with closing(store.sqlite("tenant-1")) as connection:
        connection.execute("UPDATE orders SET late = x'00ff'")
    store.mirrors.run("lake")
    assert [dict(row).get("late") for row in read_target(parquet_mirror.root, parquet_mirror.kind)] == [
        None,
        b"\0\xff",
        None,
    ]


def test_a_single_value_among_many_rows_is_found(parquet_mirror: MirroredStore, store: Store) -> None:
    """A sample of the rows does not contain it; omitting its column would lose it."""
    _table(store, "tenant-1", "id INTEGER PRIMARY KEY, rare", *((number, None) for number in range(9_000)))
    with closing(store.sqlite("tenant-1")) as connection:
        connection.execute("UPDATE orders SET rare = 5 WHERE id = 4321")
    parquet_mirror.define(store)
    parquet_mirror.run(store)


def test_a_value_that_does_not_match_its_column_type_is_an_error_or_null(
    parquet_mirror: MirroredStore, store: Store
) -> None:
    _table(store, "tenant-1", "id INTEGER PRIMARY KEY, size INTEGER", (1, "many"))
    parquet_mirror.define(store)
    with pytest.raises(InvalidInput, match="tenant-1"):
        store.mirrors.run("lake")
    store.mirrors.drop("lake")
    parquet_mirror.options = {"misfits": "null"}
    parquet_mirror.define(store)
    store.mirrors.run("lake")
    assert read_target(parquet_mirror.root, parquet_mirror.kind) == [(("_database", "tenant-1"), ("id", 1))]


def test_all_values_of_sqlite_arrive(mirror: MirroredStore, store: Store) -> None:
    columns = "k TEXT PRIMARY KEY, i INTEGER, r REAL, t TEXT, b BLOB, f BOOLEAN, g INTEGER AS (i % 7)"
    with closing(store.sqlite("tenant-1", create=True)) as connection:
        connection.execute(f"CREATE TABLE orders ({columns}) WITHOUT ROWID")
        connection.executemany(
            "INSERT INTO orders VALUES (?, ?, ?, ?, ?, ?)",
            [
                ("b", 2**63 - 1, 1e300, "a\0b", b"\0\xff", 1),
                ("a", -(2**63), -0.5, "ü€😀", b"", 0),
                ("c", None, None, None, None, None),
            ],
        )
    mirror.define(store)
    store.mirrors.run("lake")
    expected = [{**row, "f": bool(row["f"]) if "f" in row else None} for row in map(dict, read_databases(store))]
    assert read_target(mirror.root, mirror.kind) == sorted_rows(expected)


def test_files_are_sorted_by_database_and_key(parquet_mirror: MirroredStore, store: Store) -> None:
    for name in ("tenant-b", "tenant-a"):
        _table(store, name, "id INTEGER PRIMARY KEY, item TEXT", (3, "a"), (1, "c"), (2, "b"))
        with closing(store.sqlite(name)) as connection:
            connection.execute("CREATE INDEX by_item ON orders (item, id)")
    parquet_mirror.define(store)
    store.mirrors.run("lake")
    (file,) = json.loads((parquet_mirror.root / "lake" / "manifest.json").read_text())["files"]
    rows = pq.read_table(parquet_mirror.root / "lake" / file["path"]).to_pylist()
    keys = [(row["_database"], row["id"]) for row in rows]
    assert keys == sorted(keys)
    assert len(keys) == 6


def test_a_table_with_a_column_named_like_the_mirrors_is_refused(parquet_mirror: MirroredStore, store: Store) -> None:
    _table(store, "tenant-1", "id INTEGER PRIMARY KEY, _database TEXT", (1, "x"))
    parquet_mirror.define(store)
    with pytest.raises(InvalidInput, match="rename the column"):
        store.mirrors.run("lake")


# ── definitions ───────────────────────────────────────────────────────────────────────────────────────────────────────
def test_mirrors_are_listed_and_dropped(parquet_mirror: MirroredStore, store: Store) -> None:
    parquet_mirror.define(store)
    assert [status.name for status in store.mirrors.list()] == ["lake"]
    with pytest.raises(NameTaken):
        store.mirrors.create("lake", "a*", "orders", f"parquet:{parquet_mirror.root}/other")
    assert store.mirrors.drop("lake").table == "orders"
    assert store.mirrors.list() == []
    for call in (store.mirrors.status, store.mirrors.run, store.mirrors.drop):
        with pytest.raises(NotFound, match="no mirror has this name"):
            call("lake")


@pytest.mark.parametrize(
    ("target", "options", "message"),
    [
        ("s3://bucket/lake", {}, "not a mirror target"),
        ("parquet:", {}, "not a mirror target"),
        ("iceberg:lake", {}, "a catalog and a namespace"),
        ("parquet:/srv/lake", {"keep_seconds": "1"}, "keep_seconds"),
        ("parquet:/srv/lake", {"file_bytes": "1"}, "file_bytes"),
        ("parquet:/srv/lake", {"misfits": "guess"}, "misfits"),
        ("parquet:/srv/lake", {"colour": "red"}, "no such option"),
    ],
)
def test_an_invalid_definition_is_refused(store: Store, target: str, options: dict[str, str], message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        store.mirrors.create("lake", "tenant-*", "orders", target, options=options)


def test_a_database_without_the_table_has_no_rows_until_it_has_one(parquet_mirror: MirroredStore, store: Store) -> None:
    fill(store, "tenant-1")
    store.create("tenant-2", "pages")
    parquet_mirror.define(store)
    assert parquet_mirror.run(store).changed == 2
    with closing(store.sqlite("tenant-2")) as connection:
        connection.execute("CREATE TABLE orders (id INTEGER PRIMARY KEY)")
        connection.execute("INSERT INTO orders VALUES (7)")
    assert parquet_mirror.run(store).rows_written == 1


def test_a_mirror_without_databases_waits_for_them(parquet_mirror: MirroredStore, store: Store) -> None:
    parquet_mirror.define(store)
    assert parquet_mirror.run(store).batch_id == 0
    fill(store, "tenant-1")
    assert parquet_mirror.run(store).rows_written == 4


def test_a_run_is_a_job_with_a_result(parquet_mirror: MirroredStore, store: Store) -> None:
    fill(store, "tenant-1")
    parquet_mirror.define(store)
    progress: list[tuple[int, int]] = []
    result = store.mirrors.run("lake", progress=lambda done, total: progress.append((done, total)))
    (job,) = [job for job in store.manifest.jobs.jobs() if job.kind is JobKind.MIRROR]
    assert (job.state, job.result["batch_id"]) == (JobState.SUCCEEDED, result.batch_id)
    assert progress[-1][0] == progress[-1][1]


def test_mirrors_survive_a_restart(parquet_mirror: MirroredStore) -> None:
    with parquet_mirror.open() as store:
        fill(store, "tenant-1")
        parquet_mirror.define(store)
        parquet_mirror.run(store)
    with parquet_mirror.open() as store:
        assert parquet_mirror.run(store).changed == 0
    with quire.open(parquet_mirror.root / "store", mode="r") as reader:
        assert [status.rows for status in reader.mirrors.list()] == [4]


def test_a_status_has_the_lag_of_a_target_and_the_last_error(parquet_mirror: MirroredStore, tmp_path: Path) -> None:
    clock = ManualClock(1_750_000_000_000)
    with quire.open(tmp_path / "store", settings=quiet_settings(), clock=clock) as store:
        fill(store, "tenant-1")
        target = tmp_path / "lake"
        status = store.mirrors.create("lake", "tenant-*", "orders", f"parquet:{target}", every_seconds=60)
        assert (status.lag_seconds, status.failures, status.is_late) == (0, 0, False)
        clock.advance(10)
        assert store.mirrors.status("lake").lag_seconds == 10
        parquet_mirror.run(store)
        clock.advance(10)
        synced = store.mirrors.status("lake")
        assert (synced.lag_seconds, synced.lag_frames, synced.failures) == (0, 0, 0)
        frames = store.pages.open("tenant-1").wal.written.lsn
        with closing(store.sqlite("tenant-1")) as connection:
            connection.execute("DELETE FROM orders WHERE id = 1")
        behind = store.mirrors.status("lake")
        assert (behind.lag_seconds, behind.lag_frames) == (10, store.pages.open("tenant-1").wal.written.lsn - frames)
        shutil.move(target, tmp_path / "away")
        target.write_text("no directory")
        for number in (1, 2):
            clock.advance(100)
            with pytest.raises(Exception, match="lake"):
                store.mirrors.run("lake", runner="threads")
            failed = store.mirrors.status("lake")
            assert failed.failures == number
            assert "lake" in failed.error
        assert failed.is_late
        assert store.info().mirrors == (failed,)
        target.unlink()
        shutil.move(tmp_path / "away", target)
        parquet_mirror.run(store)
        recovered = store.mirrors.status("lake")
        assert (recovered.failures, recovered.error, recovered.is_late) == (0, "", False)


def test_the_owner_runs_mirrors_on_their_schedules(parquet_mirror: MirroredStore, tmp_path: Path) -> None:
    clock = ManualClock(1_750_000_000_000)
    with quire.open(tmp_path / "scheduled", settings=quiet_settings(), clock=clock) as store:
        fill(store, "tenant-1")
        store.mirrors.create("lake", "tenant-*", "orders", f"parquet:{tmp_path}/lake", every_seconds=600)
        store.mirrors.create("by hand", "tenant-*", "orders", f"parquet:{tmp_path}/other")
        assert store.upkeep.round().mirrors == 1
        assert store.upkeep.round().mirrors == 0, "its job is pending"
        store.maintain()
        parquet_mirror.check(store)
        fill(store, "tenant-2")
        clock.advance(599)
        assert store.upkeep.round().mirrors == 0
        clock.advance(1)
        assert store.maintain().mirrors == 1
        parquet_mirror.check(store)
        assert not (tmp_path / "other").exists()
