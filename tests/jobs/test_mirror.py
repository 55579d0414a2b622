"""Mirrors: the target holds what `SELECT *` over all databases gives, after every run, whatever happened before it."""

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
from quire.jobs.mirror import job as mirror_job
from quire.manifest.records import JobKind, JobState
from quire.store.store import Store
from quire.testing.clock import ManualClock
from quire.testing.manifest import assert_clean
from tests.jobs.mirror_world import (
    FORMATS,
    POINTS,
    History,
    World,
    fill,
    quiet_settings,
    read_databases,
    read_target,
    sorted_rows,
    target_at,
)


@pytest.fixture(params=FORMATS)
def world(request: pytest.FixtureRequest, tmp_path: Path) -> World:
    return World(tmp_path, request.param)


@pytest.fixture
def plain(tmp_path: Path) -> World:
    """The format that is quickest."""
    return World(tmp_path, "parquet")


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with World(tmp_path, "parquet").open() as opened:
        yield opened
        assert_clean(opened.manifest)


def test_a_table_follows_its_databases(world: World, store: Store) -> None:
    for number in range(3):
        fill(store, f"tenant-{number}")
    fill(store, "other")
    store.create("tenant-clicks", "stream")
    world.define(store)
    first = world.run(store)
    assert (first.full, first.changed, first.rows_written) == (True, 3, 12)
    again = world.run(store)
    assert (again.full, again.changed, again.files_added, again.batch_id) == (False, 0, 0, first.batch_id)
    with closing(store.sqlite("tenant-1")) as connection:
        connection.execute("UPDATE orders SET price = 7 WHERE id = 1")
        connection.execute("DELETE FROM orders WHERE id = 2")
    store.drop("tenant-0")
    store.fork("tenant-2", "tenant-3")
    store.rename("tenant-2", "tenant-9")
    second = world.run(store)
    assert (second.full, second.changed, second.dropped) == (False, 3, 1)
    assert {dict(row)["_database"] for row in read_target(world.root, world.kind)} == {
        "tenant-1",
        "tenant-3",
        "tenant-9",
    }
    store.drop("tenant-1")
    store.drop("tenant-3")
    store.drop("tenant-9")
    assert world.run(store).dropped == 3
    assert read_target(world.root, world.kind) == []


def test_only_files_of_databases_that_changed_are_rewritten(plain: World, store: Store) -> None:
    plain.options = {"file_bytes": "65536"}
    for number in range(30):
        fill(store, f"tenant-{number:02}", 40)
    plain.define(store)
    first = plain.run(store)
    assert first.files_added > 3
    with closing(store.sqlite("tenant-07")) as connection:
        connection.execute("DELETE FROM orders WHERE id = 2")
    second = plain.run(store)
    assert (second.changed, second.files_removed) == (1, 1)
    assert 0 < second.copied < 15
    assert second.rows_written < first.rows_written // 2


@pytest.mark.parametrize("point", POINTS)
def test_a_driver_that_is_killed_at_any_step_is_not_noticed(plain: World, store: Store, point: str) -> None:
    for number in range(3):
        fill(store, f"tenant-{number}")
    plain.define(store)
    assert plain.killed_run(store, point)
    plain.run(store)
    with closing(store.sqlite("tenant-1")) as connection:
        connection.execute("ALTER TABLE orders ADD COLUMN note TEXT")
        connection.execute("UPDATE orders SET note = 'new'")
    assert plain.killed_run(store, point) == (point != "jobs.mirror.created")
    fill(store, "tenant-5")  # what the next run sees is not what the last one saw
    plain.run(store)


@pytest.mark.parametrize("point", ["jobs.mirror.recorded", "jobs.mirror.committed"])
@pytest.mark.parametrize("kind", ["delta", "iceberg"])
def test_between_the_two_commits_the_target_decides(tmp_path: Path, store: Store, kind: str, point: str) -> None:
    world = World(tmp_path, kind)
    fill(store, "tenant-1")
    world.define(store)
    world.run(store)
    fill(store, "tenant-2")
    assert world.killed_run(store, point)
    ended = world.run(store)
    assert not ended.full
    assert ended.changed == (1 if point.endswith("recorded") else 0)


def _random_history(world: World, seed: int, steps: int, every: int) -> None:
    rng = random.Random(seed)
    with world.open() as store:
        world.define(store)
        history = History(store, rng)
        for number in range(1, steps + 1):
            history.step()
            if rng.random() < 0.25:
                world.killed_run(store, rng.choice(POINTS))
            if number % every == 0:
                world.run(store)
        world.run(store)
        assert_clean(store.manifest)


@pytest.mark.parametrize("seed", range(2))
def test_after_every_run_of_a_random_history_with_kills_the_target_is_right(plain: World, seed: int) -> None:
    _random_history(plain, seed, steps=25, every=4)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_the_same_for_200_steps_and_every_format(world: World, seed: int) -> None:
    _random_history(world, seed, steps=200, every=1)


# ── others at the target ──────────────────────────────────────────────────────────────────────────────────────────────
def _overtaken(world: World, store: Store, point: str, meanwhile: Callable[[], None]) -> tuple[quire.MirrorRun, int]:
    """(a run that sleeps at a point while another one commits, how often the point was passed)."""
    fill(store, "tenant-1")
    world.define(store)
    world.run(store)
    fill(store, "tenant-2")
    passed: list[str] = []

    def sleep(point: str) -> None:
        passed.append(point)
        if len(passed) == 1:
            meanwhile()
            store.mirrors.run("lake", runner="threads")

    with armed(point, sleep):
        ended = store.mirrors.run("lake", runner="threads")
    return ended, len(passed)


def test_a_stale_driver_commits_nothing(world: World, store: Store) -> None:
    """One that has planned, and sleeps until another one has committed."""
    ended, slept = _overtaken(world, store, "jobs.mirror.written", lambda: None)
    assert slept == 2, "the other one's run, and ours; planned anew there is nothing left to write"
    assert (ended.changed, ended.files_added) == (0, 0)
    world.check(store)


def test_a_driver_that_was_overtaken_between_its_commits_takes_nothing_back(world: World, store: Store) -> None:
    _overtaken(world, store, "jobs.mirror.recorded", lambda: fill(store, "tenant-3"))
    world.run(store)


def test_somebody_elses_commit_is_a_reason_to_plan_again(tmp_path: Path, store: Store) -> None:
    from deltalake import DeltaTable

    world = World(tmp_path, "delta")
    fill(store, "tenant-1")
    world.define(store)
    world.run(store)
    fill(store, "tenant-2")
    done: list[str] = []

    def meddle(point: str) -> None:
        if not done:
            DeltaTable(f"{tmp_path}/lake").alter.set_table_properties({"delta.logRetentionDuration": "interval 9 days"})
        done.append(point)

    with armed("jobs.mirror.recorded", meddle):
        assert world.run(store).changed == 1
    assert len(done) == 2


def test_conflicts_without_end_are_an_error(plain: World, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(store, "tenant-1")
    plain.define(store)

    def refuse(*_: Any) -> None:
        raise StalePlan("another commit came first", hint="plan it again")

    monkeypatch.setattr("quire.jobs.mirror.parquet_target.ParquetTarget.commit", refuse)
    with pytest.raises(StalePlan, match="another commit came first"):
        store.mirrors.run("lake")


def test_a_target_that_was_compacted_is_followed(tmp_path: Path, store: Store) -> None:
    from deltalake import DeltaTable

    world = World(tmp_path, "delta", {"file_bytes": "65536"})
    for number in range(12):
        fill(store, f"tenant-{number:02}", 40)
    world.define(store)
    world.run(store)
    table = DeltaTable(f"{tmp_path}/lake")
    assert table.optimize.compact()["numFilesRemoved"] > 1
    with closing(store.sqlite("tenant-03")) as connection:
        connection.execute("DELETE FROM orders WHERE id < 9")
    ended = world.run(store)
    assert not ended.full
    assert ended.copied == 11, "all rows were in one file"
    world.run(store)


def test_a_target_that_somebody_changed_is_written_again(tmp_path: Path, store: Store) -> None:
    from deltalake import DeltaTable

    world = World(tmp_path, "delta")
    fill(store, "tenant-1")
    fill(store, "tenant-2")
    world.define(store)
    world.run(store)
    DeltaTable(f"{tmp_path}/lake").delete("id = 2")
    assert world.run(store).full


def test_a_table_that_is_not_the_mirrors_is_left_alone(world: World, store: Store) -> None:
    fill(store, "tenant-1")
    world.define(store)
    world.run(store)
    target, options = target_at(world.root, world.kind)
    with pytest.raises(InvalidInput, match="belongs to something else"):
        store.mirrors.create("second", "tenant-*", "orders", target, options=options)
    store.mirrors.drop("lake")
    with pytest.raises(InvalidInput, match="belongs to something else"):
        world.define(store)
    assert read_target(world.root, world.kind) == read_databases(store)


def test_a_target_that_was_removed_is_made_again(plain: World, store: Store) -> None:
    fill(store, "tenant-1")
    plain.define(store)
    plain.run(store)
    shutil.rmtree(plain.root / "lake")
    ended = plain.run(store)
    assert (ended.full, ended.rows_written) == (True, 4)


def test_a_store_that_was_set_back_writes_everything_again(plain: World) -> None:
    """A restored store knows an older batch than its target holds."""
    with plain.open() as store:
        fill(store, "tenant-1")
        plain.define(store)
        plain.run(store)
    shutil.copytree(plain.root / "store", plain.root / "before")
    with plain.open() as store:
        fill(store, "tenant-2")
        plain.run(store)
    shutil.rmtree(plain.root / "store")
    shutil.move(plain.root / "before", plain.root / "store")
    with plain.open() as store:
        ended = plain.run(store)
        assert (ended.full, ended.databases) == (True, 1)
        assert not plain.run(store).full


def test_replaced_files_and_those_of_killed_runs_go_after_a_while_and_nothing_else_does(
    plain: World, store: Store
) -> None:
    plain.options = {"keep_seconds": "3600"}
    fill(store, "tenant-1")
    plain.define(store)
    plain.run(store)
    data = plain.root / "lake" / "data"
    (data / "mine.parquet").write_bytes(b"of somebody else")
    fill(store, "tenant-2")
    assert plain.killed_run(store, "jobs.mirror.written")
    assert len(list(data.iterdir())) == 3
    for file in data.iterdir():
        os.utime(file, (1, 1))
    fill(store, "tenant-3")
    plain.run(store)  # which removes what the killed run has left
    live = {file["path"] for file in json.loads((plain.root / "lake" / "manifest.json").read_text())["files"]}
    assert {f"data/{file.name}" for file in data.iterdir()} == {*live, "data/mine.parquet"}


# ── columns and types ─────────────────────────────────────────────────────────────────────────────────────────────────
def test_added_columns_appear(world: World, store: Store) -> None:
    fill(store, "tenant-1")
    fill(store, "tenant-2")
    world.define(store)
    world.run(store)
    with closing(store.sqlite("tenant-2")) as connection:
        connection.execute("ALTER TABLE orders ADD COLUMN note TEXT")
        connection.execute("ALTER TABLE orders ADD COLUMN paid BOOLEAN")
        connection.execute("UPDATE orders SET note = 'yes' WHERE id = 1")
    assert not world.run(store).full


def _table(store: Store, name: str, columns: str, *rows: tuple[Any, ...]) -> None:
    with closing(store.sqlite(name, create=True)) as connection:
        connection.execute(f"CREATE TABLE orders ({columns})")
        marks = ", ".join("?" * (columns.count(",") + 1))
        connection.executemany(f"INSERT INTO orders VALUES ({marks})", rows)


def test_a_type_that_changed_goes_to_a_column_of_its_own_and_is_told(
    world: World, store: Store, capfd: pytest.CaptureFixture[str]
) -> None:
    _table(store, "tenant-1", "id INTEGER PRIMARY KEY, size INTEGER", (1, 10))
    world.define(store)
    world.run(store)
    _table(store, "tenant-2", "id INTEGER PRIMARY KEY, size REAL", (1, 2.5))
    store.mirrors.run("lake")
    assert read_target(world.root, world.kind) == sorted_rows(
        [
            {"_database": "tenant-1", "id": 1, "size": 10},
            {"_database": "tenant-2", "id": 1, "size_double": 2.5},
        ]
    )
    assert "mirror.new_column_for_type" in capfd.readouterr().err


def test_a_wider_column_takes_narrower_values(plain: World, store: Store) -> None:
    _table(store, "tenant-1", "id INTEGER PRIMARY KEY, size REAL, code TEXT", (1, 2.5, "a"))
    plain.define(store)
    store.mirrors.run("lake")
    _table(store, "tenant-2", "id INTEGER PRIMARY KEY, size INTEGER, code INTEGER", (1, 7, 12))
    store.mirrors.run("lake")
    assert read_target(plain.root, plain.kind)[1] == (
        ("_database", "tenant-2"),
        ("code", "12"),
        ("id", 1),
        ("size", 7.0),
    )
    _table(store, "tenant-3", "id INTEGER PRIMARY KEY, size INTEGER", (1, 2**53 + 1))
    with pytest.raises(InvalidInput, match="does not fit the target's column"):
        store.mirrors.run("lake")


def test_databases_that_disagree_about_a_new_column_in_one_run_get_the_wider_one(plain: World, store: Store) -> None:
    plain.options = {"file_bytes": "65536"}
    for number in range(12):
        kind = "REAL" if number % 2 else "INTEGER"
        _table(store, f"tenant-{number:02}", f"id INTEGER PRIMARY KEY, size {kind}", (1, 3), (2, None))
    plain.define(store)
    store.mirrors.run("lake")
    rows = [dict(row) for row in read_target(plain.root, plain.kind)]
    assert len(rows) == 24
    assert {name for row in rows for name in row} == {"_database", "id", "size"}
    assert {row.get("size") for row in rows} == {3.0, None}


def test_columns_without_a_type_get_one_by_their_values(plain: World, store: Store) -> None:
    _table(store, "tenant-0", "id INTEGER PRIMARY KEY, price, note, late", (1, None, None, None))
    _table(store, "tenant-1", "id INTEGER PRIMARY KEY, price, note, late", (1, 3, "a", None))
    _table(store, "tenant-2", "id INTEGER PRIMARY KEY, price, note, late", (1, 2.5, 7, None))
    plain.define(store)
    store.mirrors.run("lake")
    columns = json.loads((plain.root / "lake" / "manifest.json").read_text())["columns"]
    assert sorted(map(tuple, columns)) == [("id", "bigint"), ("note", "string"), ("price", "double")]
    assert [dict(row).get("price") for row in read_target(plain.root, plain.kind)] == [None, 3.0, 2.5]
    with closing(store.sqlite("tenant-1")) as connection:
        connection.execute("UPDATE orders SET late = x'00ff'")
    store.mirrors.run("lake")
    assert [dict(row).get("late") for row in read_target(plain.root, plain.kind)] == [None, b"\0\xff", None]


def test_a_lone_value_among_many_rows_is_found(plain: World, store: Store) -> None:
    """A sample does not show it; a column that is left out would lose it."""
    _table(store, "tenant-1", "id INTEGER PRIMARY KEY, rare", *((number, None) for number in range(9_000)))
    with closing(store.sqlite("tenant-1")) as connection:
        connection.execute("UPDATE orders SET rare = 5 WHERE id = 4321")
    plain.define(store)
    plain.run(store)


def test_a_value_that_is_not_of_its_columns_type_is_an_error_or_null(plain: World, store: Store) -> None:
    _table(store, "tenant-1", "id INTEGER PRIMARY KEY, size INTEGER", (1, "many"))
    plain.define(store)
    with pytest.raises(InvalidInput, match="tenant-1"):
        store.mirrors.run("lake")
    store.mirrors.drop("lake")
    plain.options = {"misfits": "null"}
    plain.define(store)
    store.mirrors.run("lake")
    assert read_target(plain.root, plain.kind) == [(("_database", "tenant-1"), ("id", 1))]


def test_all_values_of_sqlite_arrive(world: World, store: Store) -> None:
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
    world.define(store)
    store.mirrors.run("lake")
    expected = [{**row, "f": bool(row["f"]) if "f" in row else None} for row in map(dict, read_databases(store))]
    assert read_target(world.root, world.kind) == sorted_rows(expected)


def test_files_are_sorted_by_database_and_key(plain: World, store: Store) -> None:
    for name in ("tenant-b", "tenant-a"):
        _table(store, name, "id INTEGER PRIMARY KEY, item TEXT", (3, "a"), (1, "c"), (2, "b"))
        with closing(store.sqlite(name)) as connection:
            connection.execute("CREATE INDEX by_item ON orders (item, id)")
    plain.define(store)
    store.mirrors.run("lake")
    (file,) = json.loads((plain.root / "lake" / "manifest.json").read_text())["files"]
    rows = pq.read_table(plain.root / "lake" / file["path"]).to_pylist()
    keys = [(row["_database"], row["id"]) for row in rows]
    assert keys == sorted(keys)
    assert len(keys) == 6


def test_a_table_with_a_column_named_like_the_mirrors_is_refused(plain: World, store: Store) -> None:
    _table(store, "tenant-1", "id INTEGER PRIMARY KEY, _database TEXT", (1, "x"))
    plain.define(store)
    with pytest.raises(InvalidInput, match="rename the column"):
        store.mirrors.run("lake")


# ── definitions ───────────────────────────────────────────────────────────────────────────────────────────────────────
def test_mirrors_are_listed_and_dropped(plain: World, store: Store) -> None:
    plain.define(store)
    assert [status.name for status in store.mirrors.list()] == ["lake"]
    with pytest.raises(NameTaken):
        store.mirrors.create("lake", "a*", "orders", f"parquet:{plain.root}/other")
    assert store.mirrors.drop("lake").table == "orders"
    assert store.mirrors.list() == []
    for call in (store.mirrors.status, store.mirrors.run, store.mirrors.drop):
        with pytest.raises(NotFound, match="no mirror has this name"):
            call("lake")


@pytest.mark.parametrize(
    ("target", "options", "what"),
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
def test_what_cannot_work_is_refused_when_it_is_defined(
    store: Store, target: str, options: dict[str, str], what: str
) -> None:
    with pytest.raises(InvalidInput, match=what):
        store.mirrors.create("lake", "tenant-*", "orders", target, options=options)


def test_a_database_without_the_table_has_no_rows_until_it_has_one(plain: World, store: Store) -> None:
    fill(store, "tenant-1")
    store.create("tenant-2", "pages")
    plain.define(store)
    assert plain.run(store).changed == 2
    with closing(store.sqlite("tenant-2")) as connection:
        connection.execute("CREATE TABLE orders (id INTEGER PRIMARY KEY)")
        connection.execute("INSERT INTO orders VALUES (7)")
    assert plain.run(store).rows_written == 1


def test_a_mirror_without_databases_waits_for_them(plain: World, store: Store) -> None:
    plain.define(store)
    assert plain.run(store).batch_id == 0
    fill(store, "tenant-1")
    assert plain.run(store).rows_written == 4


def test_a_run_is_a_job_with_a_result(plain: World, store: Store) -> None:
    fill(store, "tenant-1")
    plain.define(store)
    told: list[tuple[int, int]] = []
    ended = store.mirrors.run("lake", progress=lambda done, total: told.append((done, total)))
    (job,) = [job for job in store.manifest.jobs.jobs() if job.kind is JobKind.MIRROR]
    assert (job.state, job.result["batch_id"]) == (JobState.SUCCEEDED, ended.batch_id)
    assert told[-1][0] == told[-1][1]
    assert mirror_job.FILE_BYTES > 0


def test_mirrors_survive_a_restart(plain: World) -> None:
    with plain.open() as store:
        fill(store, "tenant-1")
        plain.define(store)
        plain.run(store)
    with plain.open() as store:
        assert plain.run(store).changed == 0
    with quire.open(plain.root / "store", mode="r") as reader:
        assert [status.rows for status in reader.mirrors.list()] == [4]


def test_a_status_says_for_how_long_a_target_lacks_something_and_why(plain: World, tmp_path: Path) -> None:
    clock = ManualClock(1_750_000_000_000)
    with quire.open(tmp_path / "store", settings=quiet_settings(), clock=clock) as store:
        fill(store, "tenant-1")
        target = tmp_path / "lake"
        made = store.mirrors.create("lake", "tenant-*", "orders", f"parquet:{target}", every_seconds=60)
        assert (made.lag_seconds, made.failures, made.is_late) == (0, 0, False)
        clock.advance(10)
        assert store.mirrors.status("lake").lag_seconds == 10
        plain.run(store)
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
        plain.run(store)
        mended = store.mirrors.status("lake")
        assert (mended.failures, mended.error, mended.is_late) == (0, "", False)


def test_the_owner_runs_mirrors_on_their_schedules(plain: World, tmp_path: Path) -> None:
    clock = ManualClock(1_750_000_000_000)
    with quire.open(tmp_path / "scheduled", settings=quiet_settings(), clock=clock) as store:
        fill(store, "tenant-1")
        store.mirrors.create("lake", "tenant-*", "orders", f"parquet:{tmp_path}/lake", every_seconds=600)
        store.mirrors.create("by hand", "tenant-*", "orders", f"parquet:{tmp_path}/other")
        assert store.upkeep.round().mirrors == 1
        assert store.upkeep.round().mirrors == 0, "its job is waiting"
        store.maintain()
        plain.check(store)
        fill(store, "tenant-2")
        clock.advance(599)
        assert store.upkeep.round().mirrors == 0
        clock.advance(1)
        assert store.maintain().mirrors == 1
        plain.check(store)
        assert not (tmp_path / "other").exists()
