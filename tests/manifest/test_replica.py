"""Replicas: a copy that follows the feed has the same bytes at the end, and continues after being killed at any time.

This file is also the process that is killed: `python test_replica.py SOURCE REPLICA SEED` owns a source, writes to it and lets
a replica follow until it dies.
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
from tests.manifest.helpers import chunk, commit, eventually, finish, python, register
from tests.programs import Program

NAME = "replica"
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def copy(path: str) -> str:
    """The path of the test's replica."""
    return path.replace("manifest.lmdb", "replica.lmdb")


@pytest.fixture
def busy(manifest: ManifestStore) -> ManifestStore:
    """A manifest with a history of every kind of batch, and local rows."""
    write_batches(manifest, Random(5), 60)
    commit(manifest, register(50, "own"))
    commit(manifest, EnqueueJob(90, JobRecord(JobKind.VERIFY, 50, 1)), StartJob(90, "w", 99))
    commit(manifest, PutReader(50, 1, 5, 99), SetFloor(50, 1, 9), RecordMetric(1, 1, [1.0]))
    manifest.submit([RecordMetric(1, 1, [2.0])], key=b"k" * 16).result()
    manifest.feed.register(name="somebody")
    return manifest


def write_batches(manifest: ManifestStore, rng: Random, batches: int) -> None:
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
def test_a_copy_has_the_position_of_its_source_and_none_of_its_local_rows(busy: ManifestStore, copy: str) -> None:
    before = {table.name for table in CLEARED if _count(busy, table)}
    assert before >= {"change_cursors", "cursor_names", "snapshot_readers", "snapshot_floor", "metrics", "idempotency"}
    assert "job_leases" in before
    with Replica.from_copy(busy, copy) as replica:
        assert replica.position == busy.feed.head()
        assert replica.store_id == busy.feed.store_id() != ""
        replica.verify_against(busy)
        with replica.read() as txn:
            assert {table.name for table in CLEARED if txn.count(table)} == set()
            assert list(txn.changes()) == changes_of(busy), "the copied log can be replayed"
            assert txn.next_id(Counter.CURSOR) > 1, "the replica never reuses a cursor id of the source"
    assert not Path(copy + STAGING).exists()
    assert not Path(copy + STAGING + "-lock").exists()


def _count(manifest: ManifestStore, table: t.Table[Any]) -> int:
    with manifest.read() as txn:
        return txn.count(table)


def test_every_local_table_is_cleared_or_describes_the_file() -> None:
    local = {table.name for table in t.TABLES.values() if table.policy is t.Policy.LOCAL}
    assert local - {table.name for table in CLEARED} == {"change_log", "meta", "migrations"}


def test_a_copy_is_made_while_the_source_is_written(manifest: ManifestStore, copy: str) -> None:
    commit(manifest, register(1))
    stop = threading.Event()

    def produce() -> None:
        number = 0
        while not stop.is_set():
            number += 1
            commit(manifest, chunk(number))

    producer = threading.Thread(target=produce)
    producer.start()
    try:
        assert eventually(lambda: manifest.feed.head() > 20)
        replica = Replica.from_copy(manifest, copy, name=NAME)
        assert manifest.feed.cursor(NAME).acked_sequence <= replica.position, "changes after the copy are kept"
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


def test_an_interrupted_copy_does_not_prevent_another(busy: ManifestStore, copy: str) -> None:
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
def test_a_replica_follows_from_the_beginning_and_from_where_it_stopped(busy: ManifestStore, copy: str) -> None:
    with Replica.open(copy) as replica:
        assert replica.position == 0
        assert replica.catch_up(busy.feed, NAME, limit=7) == busy.feed.head()
        replica.verify_against(busy)
    write_batches(busy, Random(6), 20)
    with Replica.open(copy) as replica:
        assert replica.catch_up(busy.feed, NAME) == busy.feed.head()
        replica.verify_against(busy)
        assert busy.feed.cursor(NAME).lag == 0
        assert replica.catch_up(busy.feed, NAME) == busy.feed.head(), "catching up again has no effect"


def test_a_replica_acknowledges_after_its_own_commit(
    busy: ManifestStore, copy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    acknowledge, positions = busy.feed.acknowledge, list[tuple[int, int]]()
    with Replica.open(copy) as replica:

        def record_and_acknowledge(cursor: int | str, upto: int) -> None:
            positions.append((upto, replica.position))
            acknowledge(cursor, upto)

        monkeypatch.setattr(busy.feed, "acknowledge", record_and_acknowledge)
        replica.catch_up(busy.feed, NAME, limit=9)
    assert len(positions) > 3
    assert all(upto == position for upto, position in positions)


def test_a_replica_that_died_between_its_commit_and_the_acknowledgement_continues(
    busy: ManifestStore, copy: str
) -> None:
    busy.feed.register(name=NAME)
    with Replica.open(copy) as replica:
        replica.apply(busy.feed.fetch(NAME, 9).changes)
        assert (replica.position, busy.feed.cursor(NAME).acked_sequence) == (9, 0)
        replica.catch_up(busy.feed, NAME)
        replica.verify_against(busy)


def test_a_replica_in_a_read_only_process_follows_and_the_owner_acknowledges(busy: ManifestStore, copy: str) -> None:
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


# ── rejections ────────────────────────────────────────────────────────────────────────────────────────────────────────
def test_a_gap_is_rejected_with_a_hint_and_nothing_is_applied(busy: ManifestStore, copy: str) -> None:
    changes = changes_of(busy)
    with Replica.open(copy) as replica:
        replica.apply(changes[:3])
        with pytest.raises(InvalidInput, match=r"gap.*start from a copy"):
            replica.apply(changes[4:])
        assert replica.position == 3
        assert replica.apply(changes[1:]) == len(changes), "changes that were applied already are skipped"


def test_a_feed_that_was_trimmed_too_far_is_rejected(manifest: ManifestStore, copy: str) -> None:
    commit(manifest, register(1))
    for number in range(9):
        commit(manifest, chunk(number))
    assert len(list(manifest.feed.follow("app", timeout=0))) == 10
    with Replica.open(copy) as replica:
        with pytest.raises(CursorLost, match=r"does not connect.*from_copy"):
            replica.catch_up(manifest.feed, NAME)
        assert [cursor.name for cursor in manifest.feed.cursors()] == ["app"], "the rejected call has left no cursor"
        with pytest.raises(CursorLost, match="no longer kept"):
            replica.catch_up(manifest.feed, "app")


def test_a_lost_cursor_is_rejected(manifest: ManifestStore, copy: str) -> None:
    with Replica.from_copy(manifest, copy) as replica:
        manifest.feed.register(name=NAME, max_lag=1)
        commit(manifest, register(1))
        commit(manifest, chunk(1))
        manifest.feed.maintain()
        with pytest.raises(CursorLost, match="is lost"):
            replica.catch_up(manifest.feed, NAME)


def test_the_feed_of_another_store_is_rejected(busy: ManifestStore, copy: str, tmp_path: Path) -> None:
    with Replica.from_copy(busy, copy) as replica, ManifestStore.open(str(tmp_path / "other.lmdb")) as other:
        write_batches(other, Random(5), 60)
        with pytest.raises(StalePlan, match="another store"):
            replica.catch_up(other.feed, NAME)
        assert other.feed.cursors() == []


def test_a_replica_that_is_ahead_of_its_source_is_rejected(path: str, copy: str, tmp_path: Path) -> None:
    """The source was restored from a backup."""
    backup = str(tmp_path / "backup.lmdb")
    with ManifestStore.open(path) as manifest:
        commit(manifest, register(1))
        manifest.env.copy(backup)
        commit(manifest, chunk(1))
        Replica.from_copy(manifest, copy).close()
    with Replica.open(copy) as replica, ManifestStore.open(backup) as restored:
        with pytest.raises(CursorLost, match="does not connect"):
            replica.catch_up(restored.feed, NAME)
        assert restored.feed.cursors() == []


def test_a_replica_that_has_diverged_is_rejected(busy: ManifestStore, copy: str) -> None:
    Replica.from_copy(busy, copy, name=NAME).close()
    with ManifestStore.open(copy) as promoted:
        commit(promoted, register(60, "only-here"))
    commit(busy, register(61, "only-there"))
    with Replica.open(copy) as replica, pytest.raises(StalePlan, match=r"have diverged.*from_copy"):
        replica.catch_up(busy.feed, NAME)


def test_two_writers_of_one_replica_are_detected(
    busy: ManifestStore, copy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes = changes_of(busy)
    with Replica.open(copy) as replica:
        replica.apply(changes[:5])

        def changes_with_interruption() -> Iterator[ChangeRecord]:
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
            replica.apply(changes_with_interruption())
        assert replica.position == len(changes)
        replica.verify_against(busy)


# ── verifying ─────────────────────────────────────────────────────────────────────────────────────────────────────────
def test_verifying_requires_the_same_position(busy: ManifestStore, copy: str) -> None:
    with Replica.from_copy(busy, copy) as replica:
        commit(busy, register(70))
        with pytest.raises(StalePlan, match="catch up first"):
            replica.verify_against(busy)


@pytest.mark.parametrize("damage", ["missing", "another", "more"])
def test_verifying_names_the_first_difference(busy: ManifestStore, copy: str, damage: str) -> None:
    with Replica.from_copy(busy, copy) as replica:
        key = t.DB.key.pack(99 if damage == "more" else 50)
        with replica._env.begin_write() as txn:
            handle = replica._env.handles["db"]
            value = txn.get(t.DB.key.pack(50), db=handle)
            assert value is not None
            if damage == "missing":
                txn.delete(key, db=handle)
            else:
                txn.put(key, value if damage == "more" else bytes(value[:-1]) + b"\x81\xa1a\xa1b", db=handle)
        with pytest.raises(ManifestDamaged, match=r"row of db.*from_copy") as caught:
            replica.verify_against(busy)
        where = caught.value.where
        assert (where["table"], where["key"], where["position"]) == (
            "db",
            (99 if damage == "more" else 50,),
            replica.position,
        )
        assert (where["replica"] is None, where["source"] is None) == (damage == "missing", damage == "more")


# ── promotion ─────────────────────────────────────────────────────────────────────────────────────────────────────────
def test_a_replica_becomes_an_ordinary_manifest(busy: ManifestStore, copy: str) -> None:
    with Replica.from_copy(busy, copy, name=NAME) as replica:
        write_batches(busy, Random(7), 30)
        head = replica.catch_up(busy.feed, NAME)
        with pytest.raises(StoreLocked):
            ManifestStore.open(copy)
    with pytest.raises(StoreClosed):
        replica.apply([])
    with ManifestStore.open(copy) as promoted:
        assert_clean(promoted, leaks=True)
        assert promoted.feed.cursors() == []
        assert promoted.submit([register(80, "next")]).result().sequence == head + 1
        assert promoted.feed.register(name="anew").cursor_id not in [cursor.cursor_id for cursor in busy.feed.cursors()]
        assert_clean(promoted, leaks=True)


def test_the_log_of_a_replica_can_be_trimmed_without_losing_its_position(manifest: ManifestStore, copy: str) -> None:
    commit(manifest, register(1))
    for guard in [manifest.submit([chunk(n)]) for n in range(3_000)]:
        guard.result()
    with Replica.open(copy) as replica:
        replica.catch_up(manifest.feed, NAME)
        for keep in (5_000, 100, 100, 0):
            replica.trim(keep)
            assert (rows(replica, CHANGE_LOG), replica.position) == (min(keep, 3_001), 3_001)
        commit(manifest, chunk(9_000))
        assert replica.catch_up(manifest.feed, NAME) == 3_002
        replica.verify_against(manifest)
    with ManifestStore.open(copy) as promoted:
        assert_clean(promoted, leaks=True)


# ── kills ─────────────────────────────────────────────────────────────────────────────────────────────────────────────
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
            write_batches(manifest, rng, 100)
    except QuireError:
        return


def kill_while_following(source: str, copy: str, kills: int) -> None:
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
    """The position of the replica, read by another process."""
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


def test_a_replica_killed_at_any_time_ends_identical(path: str, copy: str) -> None:
    kill_while_following(path, copy, 6)
    check_identical(path, copy)


@pytest.mark.slow
def test_a_replica_killed_many_times_ends_identical(path: str, copy: str) -> None:
    for _ in range(5):
        kill_while_following(path, copy, 10)
        check_identical(path, copy)


def test_a_feed_has_what_a_replica_needs() -> None:
    """So that the feed of a client can be used instead."""
    assert {"store_id", "cursor", "register", "drop", "fetch", "acknowledge"} <= set(dir(ChangeFeed))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
