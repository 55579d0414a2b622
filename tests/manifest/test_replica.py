"""Replicas: a copy, the feed, and at the end the same bytes; killed at any moment they go on.

This file is also the process that is killed: `python test_replica.py SOURCE REPLICA SEED` owns a source, writes to it and
lets a replica follow, until it dies.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest

from quire.core.errors import (
    AlreadyExists,
    CursorLost,
    InvalidInput,
    ManifestDamaged,
    QuireError,
    StalePlan,
    StorageFault,
    StoreClosed,
    StoreLocked,
)
from quire.manifest import tables as t
from quire.manifest.change import CHANGE_LOG, ChangeRecord
from quire.manifest.env import ManifestEnv
from quire.manifest.feed import ChangeFeed
from quire.manifest.ops.base import Counter
from quire.manifest.ops.jobs import EnqueueJob, StartJob
from quire.manifest.ops.local import PutReader, RecordMetric, SetFloor
from quire.manifest.records import JobKind, JobRecord
from quire.manifest.replica import CLEARED, STAGING, Replica
from quire.manifest.store import ManifestStore
from quire.testing.manifest import assert_clean
from tests.manifest.batches import BatchMaker, outcome
from tests.manifest.helpers import chunk, does, eventually, finish, python, register
from tests.programs import Program

NAME = "replica"
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def copy(path: str) -> str:
    """Where a test's replica is."""
    return path.replace("manifest.lmdb", "replica.lmdb")


@pytest.fixture
def busy(manifest: ManifestStore) -> ManifestStore:
    """A manifest with a past of every kind of batch, and local rows."""
    live(manifest, Random(5), 60)
    does(manifest, register(50, "own"))
    does(manifest, EnqueueJob(90, JobRecord(JobKind.VERIFY, 50, 1)), StartJob(90, "w", 99))
    does(manifest, PutReader(50, 1, 5, 99), SetFloor(50, 1, 9), RecordMetric(1, 1, [1.0]))
    manifest.submit([RecordMetric(1, 1, [2.0])], key=b"k" * 16).result()
    manifest.feed.register(name="somebody")
    return manifest


def live(manifest: ManifestStore, rng: Random, batches: int) -> None:
    maker = BatchMaker(rng)
    for _ in range(batches):
        outcome(manifest.submit([op for op in maker.batch(manifest) if op.logged] or [chunk(1)]))


def changes_of(manifest: ManifestStore) -> list[ChangeRecord]:
    with manifest.read() as txn:
        return list(txn.changes())


def rows(replica: Replica, table: t.Table[Any]) -> int:
    with replica.read() as txn:
        return txn.count(table)


# ── copying ───────────────────────────────────────────────────────────────────────────────────────────────────────────
def test_a_copy_stands_where_its_source_stood_and_has_none_of_its_local_rows(busy: ManifestStore, copy: str) -> None:
    before = {table.name for table in CLEARED if _count(busy, table)}
    assert before >= {"change_cursors", "cursor_names", "snapshot_readers", "snapshot_floor", "metrics", "idempotency"}
    assert "job_leases" in before
    with Replica.from_copy(busy, copy) as replica:
        assert replica.position == busy.feed.head()
        assert replica.store_id == busy.feed.store_id() != ""
        replica.verify_against(busy)
        with replica.read() as txn:
            assert {table.name for table in CLEARED if txn.count(table)} == set()
            assert list(txn.changes()) == changes_of(busy), "what was copied can be replayed from"
            assert txn.next_id(Counter.CURSOR) > 1, "no cursor of the source is ever mistaken for one of the replica"
    assert not Path(copy + STAGING).exists()
    assert not Path(copy + STAGING + "-lock").exists()


def _count(manifest: ManifestStore, table: t.Table[Any]) -> int:
    with manifest.read() as txn:
        return txn.count(table)


def test_every_local_table_is_cleared_or_about_the_file() -> None:
    local = {table.name for table in t.TABLES.values() if table.policy is t.Policy.LOCAL}
    assert local - {table.name for table in CLEARED} == {"change_log", "meta", "migrations"}


def test_a_copy_is_made_while_the_source_is_written(manifest: ManifestStore, copy: str) -> None:
    does(manifest, register(1))
    stop = threading.Event()

    def produce() -> None:
        number = 0
        while not stop.is_set():
            number += 1
            does(manifest, chunk(number))

    producer = threading.Thread(target=produce)
    producer.start()
    try:
        assert eventually(lambda: manifest.feed.head() > 20)
        replica = Replica.from_copy(manifest, copy, name=NAME)
        assert manifest.feed.cursor(NAME).acked_sequence <= replica.position, "what follows the copy is held"
        assert eventually(lambda: manifest.feed.head() > replica.position + 20)
    finally:
        stop.set()
        producer.join(30)
    replica.catch_up(manifest.feed, NAME)
    replica.verify_against(manifest)
    replica.close()


def test_a_copy_never_overwrites(manifest: ManifestStore, copy: str) -> None:
    Path(copy).write_bytes(b"something precious")
    with pytest.raises(AlreadyExists):
        Replica.from_copy(manifest, copy, name=NAME)
    assert Path(copy).read_bytes() == b"something precious"
    assert manifest.feed.cursors() == []


def test_a_copy_that_was_cut_short_is_no_obstacle(busy: ManifestStore, copy: str) -> None:
    Path(copy + STAGING).write_bytes(b"half a copy")
    Path(copy + STAGING + "-lock").write_bytes(b"")
    with Replica.from_copy(busy, copy) as replica:
        replica.verify_against(busy)


def test_a_copy_that_fails_leaves_no_cursor(
    manifest: ManifestStore, copy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise StorageFault("no space")

    monkeypatch.setattr(ManifestEnv, "copy", fail)
    with pytest.raises(StorageFault):
        Replica.from_copy(manifest, copy, name=NAME)
    assert manifest.feed.cursors() == []
    assert not Path(copy).exists()


# ── following ─────────────────────────────────────────────────────────────────────────────────────────────────────────
def test_a_replica_follows_from_nothing_and_from_where_it_stopped(busy: ManifestStore, copy: str) -> None:
    with Replica.open(copy) as replica:
        assert replica.position == 0
        assert replica.catch_up(busy.feed, NAME, limit=7) == busy.feed.head()
        replica.verify_against(busy)
    live(busy, Random(6), 20)
    with Replica.open(copy) as replica:
        assert replica.catch_up(busy.feed, NAME) == busy.feed.head()
        replica.verify_against(busy)
        assert busy.feed.cursor(NAME).lag == 0
        assert replica.catch_up(busy.feed, NAME) == busy.feed.head(), "nothing to do is fine"


def test_it_acknowledges_after_its_own_commit(busy: ManifestStore, copy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    acknowledge, positions = busy.feed.acknowledge, list[tuple[int, int]]()
    with Replica.open(copy) as replica:

        def spy(cursor: int | str, upto: int) -> None:
            positions.append((upto, replica.position))
            acknowledge(cursor, upto)

        monkeypatch.setattr(busy.feed, "acknowledge", spy)
        replica.catch_up(busy.feed, NAME, limit=9)
    assert len(positions) > 3
    assert all(upto == position for upto, position in positions)


def test_one_that_died_between_its_commit_and_the_acknowledgement_goes_on(busy: ManifestStore, copy: str) -> None:
    busy.feed.register(name=NAME)
    with Replica.open(copy) as replica:
        replica.apply(busy.feed.fetch(NAME, 9).changes)
        assert (replica.position, busy.feed.cursor(NAME).acked_sequence) == (9, 0)
        replica.catch_up(busy.feed, NAME)
        replica.verify_against(busy)


def test_in_a_process_that_only_reads_it_follows_and_the_owner_acknowledges(busy: ManifestStore, copy: str) -> None:
    busy.feed.register(name=NAME)
    code = """
        import sys
        from quire.manifest.replica import Replica
        from quire.manifest.store import ManifestStore
        with ManifestStore.open(sys.argv[1], mode="r") as source, Replica.open(sys.argv[2]) as replica:
            print(replica.catch_up(source.feed, "replica", limit=20))
            replica.verify_against(source)
    """
    position = int(finish(python(code, busy.env.path, copy)))
    assert position == busy.feed.head()
    assert busy.feed.cursor(NAME).acked_sequence == 0
    busy.feed.acknowledge(NAME, position)


# ── refusing ──────────────────────────────────────────────────────────────────────────────────────────────────────────
def test_a_gap_is_refused_with_a_hint_and_nothing_of_it_kept(busy: ManifestStore, copy: str) -> None:
    changes = changes_of(busy)
    with Replica.open(copy) as replica:
        replica.apply(changes[:3])
        with pytest.raises(InvalidInput, match=r"gap.*start from a copy"):
            replica.apply(changes[4:])
        assert replica.position == 3
        assert replica.apply(changes[1:]) == len(changes), "what it has is skipped"


def test_a_feed_that_has_forgotten_too_much_is_refused(manifest: ManifestStore, copy: str) -> None:
    does(manifest, register(1))
    for number in range(9):
        does(manifest, chunk(number))
    assert len(list(manifest.feed.follow("app", timeout=0))) == 10
    with Replica.open(copy) as replica:
        with pytest.raises(CursorLost, match=r"does not connect.*from_copy"):
            replica.catch_up(manifest.feed, NAME)
        assert [cursor.name for cursor in manifest.feed.cursors()] == ["app"], "the refused one has left no cursor"
        with pytest.raises(CursorLost, match="no longer kept"):
            replica.catch_up(manifest.feed, "app")


def test_a_cursor_that_was_given_up_is_refused(manifest: ManifestStore, copy: str) -> None:
    with Replica.from_copy(manifest, copy) as replica:
        manifest.feed.register(name=NAME, max_lag=1)
        does(manifest, register(1))
        does(manifest, chunk(1))
        manifest.feed.maintain()
        with pytest.raises(CursorLost, match="is lost"):
            replica.catch_up(manifest.feed, NAME)


def test_the_feed_of_another_store_is_refused(busy: ManifestStore, copy: str, tmp_path: Path) -> None:
    with Replica.from_copy(busy, copy) as replica, ManifestStore.open(str(tmp_path / "other.lmdb")) as other:
        live(other, Random(5), 60)
        with pytest.raises(StalePlan, match="another store"):
            replica.catch_up(other.feed, NAME)
        assert other.feed.cursors() == []


def test_a_replica_that_is_ahead_of_its_source_is_refused(path: str, copy: str, tmp_path: Path) -> None:
    """The source came from a backup."""
    backup = str(tmp_path / "backup.lmdb")
    with ManifestStore.open(path) as manifest:
        does(manifest, register(1))
        manifest.env.copy(backup)
        does(manifest, chunk(1))
        Replica.from_copy(manifest, copy).close()
    with Replica.open(copy) as replica, ManifestStore.open(backup) as restored:
        with pytest.raises(CursorLost, match="does not connect"):
            replica.catch_up(restored.feed, NAME)
        assert restored.feed.cursors() == []


def test_a_replica_that_went_its_own_way_is_refused(busy: ManifestStore, copy: str) -> None:
    Replica.from_copy(busy, copy, name=NAME).close()
    with ManifestStore.open(copy) as promoted:
        does(promoted, register(60, "only-here"))
    does(busy, register(61, "only-there"))
    with Replica.open(copy) as replica, pytest.raises(StalePlan, match=r"have diverged.*from_copy"):
        replica.catch_up(busy.feed, NAME)


def test_two_writers_of_one_replica_are_noticed(
    busy: ManifestStore, copy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes = changes_of(busy)
    with Replica.open(copy) as replica:
        replica.apply(changes[:5])

        def slow() -> Iterator[ChangeRecord]:
            yield changes[5]
            code = """
                import sys
                from quire.manifest.replica import Replica
                from quire.manifest.store import ManifestStore
                with ManifestStore.open(sys.argv[1], mode="r") as source, Replica.open(sys.argv[2]) as replica:
                    with source.read() as txn:
                        replica.apply(txn.changes())
            """
            finish(python(code, busy.env.path, copy))
            yield changes[6]

        with pytest.raises(StalePlan, match="another process"):
            replica.apply(slow())
        assert replica.position == len(changes)
        replica.verify_against(busy)


# ── verifying ─────────────────────────────────────────────────────────────────────────────────────────────────────────
def test_verifying_asks_for_the_same_position(busy: ManifestStore, copy: str) -> None:
    with Replica.from_copy(busy, copy) as replica:
        does(busy, register(70))
        with pytest.raises(StalePlan, match="catch up first"):
            replica.verify_against(busy)


@pytest.mark.parametrize("how", ["missing", "another", "more"])
def test_verifying_names_the_first_difference(busy: ManifestStore, copy: str, how: str) -> None:
    with Replica.from_copy(busy, copy) as replica:
        key = t.DB.key.pack(99 if how == "more" else 50)
        with replica._env.begin_write() as txn:
            handle = replica._env.handles["db"]
            value = txn.get(t.DB.key.pack(50), db=handle)
            assert value is not None
            if how == "missing":
                txn.delete(key, db=handle)
            else:
                txn.put(key, value if how == "more" else bytes(value[:-1]) + b"\x81\xa1a\xa1b", db=handle)
        with pytest.raises(ManifestDamaged, match=r"row of db.*from_copy") as caught:
            replica.verify_against(busy)
        where = caught.value.where
        assert (where["table"], where["key"], where["position"]) == (
            "db",
            (99 if how == "more" else 50,),
            replica.position,
        )
        assert (where["replica"] is None, where["source"] is None) == (how == "missing", how == "more")


# ── becoming the manifest ─────────────────────────────────────────────────────────────────────────────────────────────
def test_a_replica_becomes_an_ordinary_manifest(busy: ManifestStore, copy: str) -> None:
    with Replica.from_copy(busy, copy, name=NAME) as replica:
        live(busy, Random(7), 30)
        head = replica.catch_up(busy.feed, NAME)
        with pytest.raises(StoreLocked):
            ManifestStore.open(copy)
    with pytest.raises(StoreClosed):
        replica.apply([])
    with ManifestStore.open(copy) as promoted:
        assert_clean(promoted, leaks=True)
        assert promoted.feed.cursors() == []
        assert promoted.submit([register(80, "next")]).result().sequence == head + 1
        assert promoted.feed.register(name="anew").cursor_id not in [each.cursor_id for each in busy.feed.cursors()]
        assert_clean(promoted, leaks=True)


def test_its_own_log_can_be_trimmed_and_it_still_knows_where_it_stands(manifest: ManifestStore, copy: str) -> None:
    does(manifest, register(1))
    for guard in [manifest.submit([chunk(n)]) for n in range(3_000)]:
        guard.result()
    with Replica.open(copy) as replica:
        replica.catch_up(manifest.feed, NAME)
        for keep in (5_000, 100, 100, 0):
            replica.trim(keep)
            assert (rows(replica, CHANGE_LOG), replica.position) == (min(keep, 3_001), 3_001)
        does(manifest, chunk(9_000))
        assert replica.catch_up(manifest.feed, NAME) == 3_002
        replica.verify_against(manifest)
    with ManifestStore.open(copy) as promoted:
        assert_clean(promoted, leaks=True)


# ── killed ────────────────────────────────────────────────────────────────────────────────────────────────────────────
def main(source: str, copy: str, seed: int) -> None:
    """Own the source, write to it, and let the replica follow for ever."""
    rng = Random(seed)
    with ManifestStore.open(source) as manifest, Replica.open(copy) as replica:
        threading.Thread(target=_write_for_ever, args=(manifest, Random(seed)), daemon=True).start()
        while True:
            replica.catch_up(manifest.feed, NAME, limit=rng.randint(1, 20))


def _write_for_ever(manifest: ManifestStore, rng: Random) -> None:
    try:
        while True:
            live(manifest, rng, 100)
    except QuireError:
        return


def die_while_following(source: str, copy: str, kills: int) -> None:
    rng = Random(kills)
    for seed in range(1, kills + 1):
        before = _position(copy)
        child = Program(
            [__file__, source, copy, str(seed)],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
            cwd=ROOT,
            stderr=subprocess.PIPE,
        )
        deadline = time.monotonic() + 120
        while _position(copy) < before + rng.randint(5, 60):
            assert child.poll() is None, child.communicate()[1]
            assert time.monotonic() < deadline, "the replica makes no progress"
            time.sleep(0.01)
        time.sleep(rng.random() / 50)
        child.kill()
        _, stderr = child.communicate(timeout=60)
        assert child.returncode == -signal.SIGKILL, stderr


def _position(copy: str) -> int:
    """How far the replica is, seen from outside."""
    if not Path(copy).exists():
        return 0
    with ManifestStore.open(copy, mode="r") as reader:
        return reader.feed.head()


def check_identical(source: str, copy: str) -> None:
    with ManifestStore.open(source) as manifest, Replica.open(copy) as replica:
        replica.catch_up(manifest.feed, NAME)
        replica.verify_against(manifest)
        assert manifest.feed.cursor(NAME).lag == 0
    with ManifestStore.open(copy) as promoted:
        assert_clean(promoted, leaks=True)


def test_killed_at_any_moment_it_ends_identical(path: str, copy: str) -> None:
    die_while_following(path, copy, 6)
    check_identical(path, copy)


@pytest.mark.slow
def test_long_killed_at_any_moment_it_ends_identical(path: str, copy: str) -> None:
    for _ in range(5):
        die_while_following(path, copy, 10)
        check_identical(path, copy)


def test_a_feed_has_what_a_replica_needs() -> None:
    """So that a client's feed can stand in for it."""
    assert {"store_id", "cursor", "register", "drop", "fetch", "acknowledge"} <= set(dir(ChangeFeed))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
