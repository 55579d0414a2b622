"""The checker finds every planted damage by its rule; open rejects and names it; repair corrects what can be
recomputed."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, get_args

import pytest
from msgspec.structs import replace

from quire.core.errors import ManifestDamaged
from quire.core.ids import ArtifactKey, ArtifactKind
from quire.core.settings import ManifestSettings
from quire.durable.failpoints import armed
from quire.manifest import check as checks
from quire.manifest import holders
from quire.manifest import records as r
from quire.manifest import tables as t
from quire.manifest.change import CHANGE_LOG
from quire.manifest.checked_point import forget_point
from quire.manifest.env import ManifestEnv
from quire.manifest.ops.base import Counter
from quire.manifest.ops.cursors import RegisterCursor
from quire.manifest.ops.databases import UpdateDbStatus
from quire.manifest.ops.jobs import CompleteJob, EnqueueJob, ForgetJob, StartJob
from quire.manifest.ops.pageindex import ROW, PublishPages
from quire.manifest.ops.refs import artifact_key
from quire.manifest.ops.snapshots import ForkDb, PublishSnapshot
from quire.manifest.ops.wal import AppendWalChunk
from quire.manifest.store import ManifestStore
from quire.testing.manifest import assert_clean, assert_replays
from tests.manifest.helpers import anchor, checkpoint, chunk, commit, register


def create_store(path: str) -> None:
    """Create a store in which every rule applies to at least one row."""
    with ManifestStore.open(path) as manifest:
        commit(manifest, register(1, "a"), register(2, "b"), AppendWalChunk(1, 0, 1, 1, 1, 5, 100))
        checkpoint(manifest, 1, 0)
        checkpoint(manifest, 1, 0, delta=True)
        lsn = anchor(manifest, 1)
        commit(manifest, PublishSnapshot(1, 1, r.SnapshotKind.NAMED, "s", lsn, pins=[r.Pin(1, 1, 5)]))
        commit(manifest, ForkDb(3, 1, "fork", snapshot_id=1))
        checkpoint(manifest, 1, 0)
        commit(manifest, EnqueueJob(1, r.JobRecord(r.JobKind.CHECKPOINT, 1, 0)), StartJob(1, "w", 9))
        commit(manifest, EnqueueJob(2, r.JobRecord(r.JobKind.UPLOAD, 1, 0, artifact=(1, 2, 1, 0, 0))))
        commit(manifest, PublishPages(1, ROW.pack(1, 0, 5, 0, 7, 1, 1, 0, 0)))
        commit(manifest, RegisterCursor(1, 0, "tail"))
        manifest.put_namespace("memory://")
        assert_clean(manifest)
        assert_replays(manifest)


Damage = Callable[["Vandal"], None]


class Vandal:
    """Writes raw rows without going through the manifest."""

    def __init__(self, path: str) -> None:
        self.env = ManifestEnv(path, ManifestSettings(), write=True)
        self.txn: Any = self.env.begin_write()

    def put(self, table: t.Table[Any], record: Any, *key: Any) -> None:
        packed = table.key.pack(*key)
        raw = record if isinstance(record, bytes) else table.rows.encode(packed, record)
        self.txn.put(packed, raw, db=self.env.handles[table.name])

    def get(self, table: t.Table[Any], *key: Any) -> Any:
        raw = self.txn.get(table.key.pack(*key), db=self.env.handles[table.name])
        assert raw is not None, (table, key)
        return table.rows.decode(table.key.pack(*key), raw)

    def change(self, table: t.Table[Any], *key: Any, **fields: Any) -> None:
        self.put(table, replace(self.get(table, *key), **fields), *key)

    def delete(self, table: t.Table[Any], *key: Any) -> None:
        assert self.txn.delete(table.key.pack(*key), db=self.env.handles[table.name]), (table, key)

    def delete_last(self, table: t.Table[Any]) -> None:
        with self.txn.cursor(db=self.env.handles[table.name]) as cursor:
            assert cursor.last()
            cursor.delete()

    def done(self) -> None:
        self.txn.commit()
        forget_point(self.env)  # so that the whole log is checked, too
        self.env.close()


BASE_COUNT = (1, ArtifactKind.BASE, 0, 1, 0)
INDEX = r.IndexRecord

REPAIRABLE: dict[str, tuple[str, Damage]] = {
    "a name of no database": ("D1", lambda v: v.put(t.DB_NAMES, INDEX(9), "ghost")),
    "a name that is missing": ("D1", lambda v: v.delete(t.DB_NAMES, "a")),
    "a name of another database": ("D1", lambda v: v.put(t.DB_NAMES, INDEX(2), "a")),
    "a snapshot's name is missing": ("S3", lambda v: v.delete(t.SNAPSHOT_NAMES, 1, "s")),
    "a count too high": ("R1", lambda v: v.change(t.GC_REFCOUNTS, *BASE_COUNT, in_use=9)),
    "a count too low": ("R1", lambda v: v.put(t.GC_REFCOUNTS, r.RefcountRecord(1), 1, 2, 1, 0, 0)),
    "a count that is missing": ("R1", lambda v: v.delete(t.GC_REFCOUNTS, *BASE_COUNT)),
    "a pending upload without a job": ("R2", lambda v: v.change(t.GC_REFCOUNTS, *BASE_COUNT, pending_upload=1)),
    "an upload job that is not counted": ("R2", lambda v: v.change(t.GC_REFCOUNTS, 1, 2, 1, 0, 0, pending_upload=0)),
    "a referenced artifact in the deletion queue": ("R3", lambda v: v.put(t.GC_ZERO, INDEX(5), *BASE_COUNT)),
    "a job missing from its state": ("J1", lambda v: v.delete(t.JOBS_BY_STATE, r.JobState.IN_FLIGHT, 1)),
    "a job in a state it is not in": ("J1", lambda v: v.put(t.JOBS_BY_STATE, INDEX(1), r.JobState.PENDING, 1)),
    "a count that does not decode": ("R1", lambda v: v.put(t.GC_REFCOUNTS, b"\x01\x00", *BASE_COUNT)),
    "a row that does not decode": ("K1", lambda v: v.put(t.DB, b"\x01\x00\xc1", 2)),
    "a chunk that does not decode": ("K1", lambda v: v.put(t.CHUNK_CATALOG, b"\x01\x00\xc1", 1, 0, 1)),
    "a leaf that does not decode": ("K1", lambda v: v.put(t.SLOT_LEAF, b"\x01\x00\xc1", 1, 9, 1)),
    "a head that does not decode": ("K1", lambda v: v.put(t.PAGE_VERSION_HEAD, b"\x01\x00", 1, 1)),
    "a database above its watermark": ("D3", lambda v: v.put(t.ID_WATERMARKS, r.WatermarkRecord(2), Counter.DB)),
    "a cursor above its watermark": ("D3", lambda v: v.put(t.META, r.MetaRecord(1), "next_cursor_id")),
    "a snapshot above its watermark": ("D3", lambda v: v.change(t.DB, 1, next_snapshot_id=1)),
    "a cursor beyond the head": ("F2", lambda v: v.change(t.CHANGE_CURSORS, 1, acked_sequence=999)),
    "a batch of no mirror": ("M1", lambda v: v.put(t.MIRROR_BATCH, r.MirrorDatabaseRecord("a", 1), 9, 1, 1)),
    "a cursor's name is missing": ("F2", lambda v: v.delete(t.CURSOR_NAMES, "tail")),
}

FATAL: dict[str, tuple[str, Damage]] = {
    "a change that does not decode": ("K1", lambda v: v.put(CHANGE_LOG, b"\x01\x00\xc1", 2)),
    "two databases of one name": ("D1", lambda v: v.change(t.DB, 2, name="a")),
    "rows of no database": ("D2", lambda v: v.put(t.CHUNK_CATALOG, r.ChunkRecord(r.Residency.LOCAL, 1, 0), 99, 1, 1)),
    "no WAL state": ("D2", lambda v: v.delete(t.WAL_STATE, 2, 0)),
    "a referenced leaf is missing": ("S1", lambda v: v.put(t.LIVE_LEAF, r.LeafRef(1, 77), 2, 0)),
    "a chain without a base": ("S4", lambda v: v.put(t.SLOT_LEAF, r.LeafRecord(b"\x00\x01" + b"\x01" * 18), 1, 0, 2)),
    "a referenced chunk is missing": ("S2", lambda v: v.delete(t.CHUNK_CATALOG, 1, 0, 1)),
    "an inherited segment's origin is missing": ("W1", lambda v: v.delete(t.WAL_CATALOG, 1, 1)),
    "a segment above the mark": ("W2", lambda v: v.change(t.WAL_STATE, 1, 0, next_segment_id=1)),
    "marks out of order": ("W2", lambda v: v.change(t.WAL_STATE, 1, 0, last_applied_lsn=10**6)),
    "a gate without a job": ("J1", lambda v: v.put(t.JOB_PENDING_INDEX, INDEX(9), 2, r.JobKind.MERGE)),
    "a lease of a job that does not run": ("J1", lambda v: v.put(t.JOB_LEASES, r.JobLeaseRecord("w", 1, 1), 2)),
    "a version that follows a newer one": ("P2", lambda v: v.change(t.PAGE_VERSION_INDEX, 1, 1, 5, prev_lsn=6)),
    "a head without a version": ("P1", lambda v: v.put(t.PAGE_VERSION_HEAD, r.PageHeadRecord(5, 1), 1, 9)),
    "a version without a head": ("P1", lambda v: v.delete(t.PAGE_VERSION_HEAD, 1, 1)),
    "a head that is not the newest": ("P1", lambda v: v.change(t.PAGE_VERSION_HEAD, 1, 1, lsn=4)),
    "a gap in the change log": ("F1", lambda v: v.delete(CHANGE_LOG, 3)),
    "a change log that ends too early": ("G1", lambda v: v.delete_last(CHANGE_LOG)),
    "a watermark below its log": ("G1", lambda v: v.change(t.GENERATION_WATERMARKS, 1, generation=0)),
}


EVERY = REPAIRABLE | FATAL

STORE_WIDE = (
    "a job missing from its state", "a job in a state it is not in", "a change that does not decode", "a gap in the change log",
    "a lease of a job that does not run", "a change log that ends too early",
)  # fmt: skip
"""Damage that concerns the store as a whole: it cannot be opened."""

CLOSES: dict[str, set[tuple[str, int]]] = {
    "a name of no database": {("database", 9)},
    "a name of another database": {("database", 1), ("database", 2)},
    "a row that does not decode": {("database", 2)},
    "two databases of one name": {("database", 1), ("database", 2)},
    "rows of no database": {("database", 99)},
    "no WAL state": {("database", 2)},
    "a database above its watermark": {("counter", Counter.DB)},
    "a cursor above its watermark": {("counter", Counter.CURSOR)},
    "a referenced leaf is missing": {("database", 1), ("database", 2)},
    "an inherited segment's origin is missing": {("database", 1), ("database", 3)},
    "a chain without a base": {("database", 1), ("database", 0x01010101)},
    "a gate without a job": {("database", 2)},
    "a batch of no mirror": set(),
    "a cursor's name is missing": set(),
    "a cursor beyond the head": set(),
    "a watermark below its log": set(),
    "a version that follows a newer one": set(),
}
"""The databases and counters that a damage closes; damage that is not listed closes database 1."""


def create_damaged_store(path: str, damage: Damage) -> None:
    create_store(path)
    vandal = Vandal(path)
    damage(vandal)
    vandal.done()


def set_read_only(manifest: ManifestStore, db_id: int) -> None:
    commit(manifest, UpdateDbStatus(db_id, r.DbStatus.READ_ONLY))


def broken_rules(path: str) -> set[str]:
    with ManifestStore.open(path, mode="r") as manifest:
        return {problem.rule for problem in manifest.check()}


@pytest.mark.parametrize(("rule", "damage"), [EVERY[name] for name in STORE_WIDE], ids=STORE_WIDE)
def test_damage_of_the_store_is_found_by_its_rule_and_prevents_opening(path: str, rule: str, damage: Damage) -> None:
    create_damaged_store(path, damage)
    with pytest.raises(ManifestDamaged) as caught:
        ManifestStore.open(path)
    assert f"{rule}:" in str(caught.value), caught.value
    assert caught.value.where["problems"] >= 1
    assert caught.value.hint


@pytest.mark.parametrize("name", [name for name in EVERY if name not in STORE_WIDE])
def test_damage_of_one_database_or_counter_is_found_by_its_rule_and_closes_only_that_one(path: str, name: str) -> None:
    """The store opens, and everything else can be read and written."""
    rule, damage = EVERY[name]
    create_damaged_store(path, damage)
    assert rule in broken_rules(path)
    expected = CLOSES.get(name, {("database", 1)})
    with ManifestStore.open(path) as manifest:
        assert set(manifest.env.refused) == expected
        for kind, number in expected:
            use = (
                partial(manifest.allocate, Counter(number))
                if kind == "counter"
                else partial(set_read_only, manifest, number)
            )
            with pytest.raises(ManifestDamaged, match=f"the {kind} is closed") as caught:
                use()
            assert "quire manifest check" in caught.value.hint
            assert "the rest of the store works" in caught.value.hint
        for db_id in {1, 2, 3} - {number for kind, number in expected if kind == "database"}:
            set_read_only(manifest, db_id)
            with manifest.read() as txn:
                assert txn.live(db_id, r.DbKind.PAGES)[1].status is r.DbStatus.READ_ONLY
        if ("counter", Counter.DB) not in expected:
            assert manifest.register_db("another", r.DbKind.PAGES) == 4
        with manifest.read() as txn:
            assert txn.refused_databases() == {number for kind, number in expected if kind == "database"}


@pytest.mark.parametrize("point", ["manifest.commit.applied", "manifest.commit.flushed", "manifest.commit.durable"])
def test_a_kill_while_a_cursor_is_clamped_leaves_it_for_the_next_open(path: str, point: str) -> None:
    create_damaged_store(path, EVERY["a cursor beyond the head"][1])
    child_pid = os.fork()
    if not child_pid:  # LMDB is not open in this process
        with armed(point, lambda _: os._exit(9)):
            ManifestStore.open(path)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child_pid, 0)[1]) == 9
    with ManifestStore.open(path) as manifest:
        with manifest.read() as txn:
            cursor = txn.get(t.CHANGE_CURSORS, 1)
            assert cursor is not None
            assert (cursor.state, cursor.acked_sequence) == (r.CursorState.LIVE, txn.feed_bounds()[1])
        assert_clean(manifest)


def test_a_generation_behind_its_log_continues_from_the_log(path: str) -> None:
    create_damaged_store(path, FATAL["a watermark below its log"][1])
    with ManifestStore.open(path) as manifest:
        with manifest.read() as txn:
            logged = max(dict(change.generation_updates).get(1, 0) for change in txn.changes(1))
        manifest.submit([register(7, "next")]).result()
        assert manifest.writer.generations[1] == logged + 1
        assert_clean(manifest)


COUNTED: frozenset[checks.Rule] = frozenset({"P1", "P2", "R1", "R4", "S2"})
"""Rules that the audit job checks separately."""


def fail_if_counted(*_: Any) -> Any:
    raise AssertionError("references were counted")


@pytest.mark.parametrize("name", [None, *EVERY])
def test_without_some_rules_the_others_find_the_same_problems_and_nothing_is_counted(
    path: str, name: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    create_store(path)
    if name is not None:
        vandal = Vandal(path)
        EVERY[name][1](vandal)
        vandal.done()
    with ManifestStore.open(path, mode="r") as manifest, manifest.read() as txn:
        all_problems = list(checks.check(txn))
        assert {str(problem) for problem in checks.check(txn, without=frozenset({"R1"}))} == {
            str(problem) for problem in all_problems if problem.rule != "R1"
        }
        for module, function in (
            (holders, "count_holders"), (holders, "_references"), (holders, "tally"),
            (checks, "_newest_versions"),
        ):  # fmt: skip
            monkeypatch.setattr(module, function, fail_if_counted)
        remaining = list(checks.check(txn, without=COUNTED))
    texts = [
        {str(problem) for problem in problems if "cannot be checked" not in problem.what}
        for problems in (all_problems, remaining)
    ]
    assert texts[1] == texts[0] - {str(problem) for problem in all_problems if problem.rule in COUNTED}
    # A row that does not decode is found by whatever reads its table; heads are read by the audit only.
    if name not in (None, "a head that does not decode") and EVERY[name][0] not in COUNTED:
        assert EVERY[name][0] in {problem.rule for problem in remaining}
    assert not COUNTED & {problem.rule for problem in remaining}


def test_without_counting_a_wrong_index_is_repaired_too(path: str) -> None:
    """R2 and R3 still have their fixes, and these work: also for artifacts at zero before, between and after others."""
    create_store(path)
    vandal = Vandal(path)
    for key in ((1, 2, 1, 0, 0), (2, ArtifactKind.BASE, 7, 1, 0), (1, ArtifactKind.BASE, 0, 9, 0)):
        vandal.put(t.GC_REFCOUNTS, r.RefcountRecord(0, 0, 77), *key)
    vandal.put(t.GC_ZERO, INDEX(5), 1, ArtifactKind.BASE, 0, 9, 0)  # correct
    for key in ((1, ArtifactKind.BASE, 0, 8, 0), (3, ArtifactKind.BASE, 0, 8, 0)):
        vandal.put(t.GC_ZERO, INDEX(5), *key)  # of an artifact that does not exist
    vandal.done()
    with ManifestStore.open(path, mode="r") as manifest, manifest.read() as txn:
        expected = [problem for problem in checks.check(txn) if problem.rule in ("R2", "R3")]
        problems = [problem for problem in checks.check(txn, without=COUNTED) if problem.rule in ("R2", "R3")]
    assert sorted(map(str, problems)) == sorted(map(str, expected))
    assert [problem.fix for problem in problems if problem.rule == "R3"] == [
        problem.fix for problem in expected if problem.rule == "R3"
    ]
    assert len([problem for problem in problems if problem.rule == "R3"]) == 4
    assert [problem.where["artifact"].kind for problem in problems if problem.rule == "R2"] == [ArtifactKind.WAL]
    assert all(problem.fix is not None for problem in problems)


@pytest.mark.parametrize(("rule", "damage"), REPAIRABLE.values(), ids=REPAIRABLE)
def test_repair_corrects_what_can_be_recomputed(path: str, rule: str, damage: Damage) -> None:
    create_store(path)
    vandal = Vandal(path)
    damage(vandal)
    vandal.done()
    with ManifestStore.open(path, repair=True) as manifest:
        assert not manifest.env.refused
        assert_clean(manifest)
    with ManifestStore.open(path) as manifest:
        assert_clean(manifest)


@pytest.mark.parametrize(("rule", "damage"), FATAL.values(), ids=FATAL)
def test_repair_does_not_open_what_it_cannot_correct(path: str, rule: str, damage: Damage) -> None:
    """Damage that cannot be recomputed stays closed, with or without repair."""
    create_damaged_store(path, damage)
    with suppress(ManifestDamaged):
        ManifestStore.open(path, repair=True).close()
    assert rule in broken_rules(path)


def test_every_damage_is_reported(path: str) -> None:
    create_store(path)
    vandal = Vandal(path)
    for _, damage in (REPAIRABLE["a job missing from its state"], FATAL["a gap in the change log"]):
        damage(vandal)
    vandal.done()
    with pytest.raises(ManifestDamaged) as caught:
        ManifestStore.open(path)
    for rule in ("J1", "F1"):
        assert f"{rule}:" in str(caught.value)
    assert "backup" in caught.value.hint


def test_a_leak_is_reported_and_closes_nothing(path: str) -> None:
    create_store(path)
    with ManifestStore.open(path) as manifest:
        commit(manifest, chunk(99))
        (leak,) = manifest.check()
        assert (leak.rule, leak.leak) == ("R4", True)
        assert str(leak.where["artifact"]) in str(leak)
    ManifestStore.open(path).close()


def test_a_read_only_process_opens_a_store_that_the_owner_would_reject(path: str) -> None:
    """Readers never check: it must be possible to inspect a damaged store."""
    create_store(path)
    vandal = Vandal(path)
    REPAIRABLE["a count too high"][1](vandal)
    vandal.done()
    with ManifestStore.open(path, mode="r") as manifest:
        assert {problem.rule for problem in manifest.check()} == {"R1"}


def test_ids_continue_where_they_ended(path: str) -> None:
    create_store(path)
    with ManifestStore.open(path) as manifest:
        job_ids = [manifest.jobs.enqueue(r.JobKind.VERIFY, db_id) for db_id in (1, 2)]
        commit(manifest, *(CompleteJob(job_id, r.JobState.CANCELLED) for job_id in job_ids), ForgetJob(job_ids[1]))
        manifest.drop_db(2).result()
    with ManifestStore.open(path) as manifest:
        assert manifest.first_db_id == 4
        assert [manifest.allocate(counter) for counter in (Counter.DB, Counter.JOB, Counter.CURSOR)] == [4, 6, 2]


def test_counts_are_recomputed_as_the_ops_count(path: str) -> None:
    create_store(path)
    with ManifestStore.open(path) as manifest, manifest.read() as txn:
        count = txn.refcount(ArtifactKey(1, ArtifactKind.WAL, 1, 0))
        assert count is not None
        assert (count.in_use, count.pending_upload) == (3, 1)
        assert len(artifact_key(ArtifactKey(1, ArtifactKind.WAL, 1, 0))) == t.GC_REFCOUNTS.key.width


def test_the_rules_are_those_that_the_module_describes_and_each_has_a_check() -> None:
    rules = set(get_args(checks.Rule))
    assert set(re.findall(r"^  ([A-Z][0-9])  ", checks.__doc__ or "", re.MULTILINE)) == rules
    assert set().union(*(reported for _, reported in checks._CHECKS)) == rules
