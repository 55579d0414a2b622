"""The checker finds every planted damage by its rule; open refuses and names it; repair mends what can be recomputed."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

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
from tests.manifest.helpers import anchor, checkpoint, chunk, does, register


def furnish(path: str) -> None:
    """A store in which every rule has something to hold."""
    with ManifestStore.open(path) as manifest:
        does(manifest, register(1, "a"), register(2, "b"), AppendWalChunk(1, 0, 1, 1, 1, 5, 100))
        checkpoint(manifest, 1, 0)
        checkpoint(manifest, 1, 0, delta=True)
        at = anchor(manifest, 1)
        does(manifest, PublishSnapshot(1, 1, r.SnapshotKind.NAMED, "s", at, pins=[r.Pin(1, 1, 5)]))
        does(manifest, ForkDb(3, 1, "fork", snapshot_id=1))
        checkpoint(manifest, 1, 0)
        does(manifest, EnqueueJob(1, r.JobRecord(r.JobKind.CHECKPOINT, 1, 0)), StartJob(1, "w", 9))
        does(manifest, EnqueueJob(2, r.JobRecord(r.JobKind.UPLOAD, 1, 0, artifact=(1, 2, 1, 0, 0))))
        does(manifest, PublishPages(1, ROW.pack(1, 0, 5, 0, 7, 1, 1, 0, 0)))
        does(manifest, RegisterCursor(1, 0, "tail"))
        manifest.put_namespace("memory://")
        assert_clean(manifest)
        assert_replays(manifest)


Damage = Callable[["Vandal"], None]


class Vandal:
    """Writes raw rows behind the manifest's back."""

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
        forget_point(self.env)  # so that the whole log is looked at, too
        self.env.close()


BASE_COUNT = (1, ArtifactKind.BASE, 0, 1, 0)
INDEX = r.IndexRecord

MENDABLE: dict[str, tuple[str, Damage]] = {
    "a name that leads nowhere": ("D1", lambda v: v.put(t.DB_NAMES, INDEX(9), "ghost")),
    "a name that is missing": ("D1", lambda v: v.delete(t.DB_NAMES, "a")),
    "a name that leads astray": ("D1", lambda v: v.put(t.DB_NAMES, INDEX(2), "a")),
    "a snapshot's name is missing": ("S3", lambda v: v.delete(t.SNAPSHOT_NAMES, 1, "s")),
    "a count too high": ("R1", lambda v: v.change(t.GC_REFCOUNTS, *BASE_COUNT, in_use=9)),
    "a count too low": ("R1", lambda v: v.put(t.GC_REFCOUNTS, r.RefcountRecord(1), 1, 2, 1, 0, 0)),
    "a count that is missing": ("R1", lambda v: v.delete(t.GC_REFCOUNTS, *BASE_COUNT)),
    "an upload nobody makes": ("R2", lambda v: v.change(t.GC_REFCOUNTS, *BASE_COUNT, pending_upload=1)),
    "an upload nobody counted": ("R2", lambda v: v.change(t.GC_REFCOUNTS, 1, 2, 1, 0, 0, pending_upload=0)),
    "a living artifact in the queue of the doomed": ("R3", lambda v: v.put(t.GC_ZERO, INDEX(5), *BASE_COUNT)),
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
    "a held leaf is gone": ("S1", lambda v: v.put(t.LIVE_LEAF, r.LeafRef(1, 77), 2, 0)),
    "a chain without a base": ("S4", lambda v: v.put(t.SLOT_LEAF, r.LeafRecord(b"\x00\x01" + b"\x01" * 18), 1, 0, 2)),
    "a referenced chunk is gone": ("S2", lambda v: v.delete(t.CHUNK_CATALOG, 1, 0, 1)),
    "an inherited segment's origin is gone": ("W1", lambda v: v.delete(t.WAL_CATALOG, 1, 1)),
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


EVERY = MENDABLE | FATAL

SHUT = (
    "a job missing from its state", "a job in a state it is not in", "a change that does not decode", "a gap in the change log",
    "a lease of a job that does not run", "a change log that ends too early",
)  # fmt: skip
"""What is about the store as a whole keeps it shut."""

CLOSES: dict[str, set[tuple[str, int]]] = {
    "a name that leads nowhere": {("database", 9)},
    "a name that leads astray": {("database", 1), ("database", 2)},
    "a row that does not decode": {("database", 2)},
    "two databases of one name": {("database", 1), ("database", 2)},
    "rows of no database": {("database", 99)},
    "no WAL state": {("database", 2)},
    "a database above its watermark": {("counter", Counter.DB)},
    "a cursor above its watermark": {("counter", Counter.CURSOR)},
    "a held leaf is gone": {("database", 1), ("database", 2)},
    "an inherited segment's origin is gone": {("database", 1), ("database", 3)},
    "a chain without a base": {("database", 1), ("database", 0x01010101)},
    "a gate without a job": {("database", 2)},
    "a batch of no mirror": set(),
    "a cursor's name is missing": set(),
    "a cursor beyond the head": set(),
    "a watermark below its log": set(),
    "a version that follows a newer one": set(),
}
"""What a damage closes; the others are about database 1."""


def damaged(path: str, damage: Damage) -> None:
    furnish(path)
    vandal = Vandal(path)
    damage(vandal)
    vandal.done()


def read_only(manifest: ManifestStore, db_id: int) -> None:
    does(manifest, UpdateDbStatus(db_id, r.DbStatus.READ_ONLY))


def found_rules(path: str) -> set[str]:
    with ManifestStore.open(path, mode="r") as manifest:
        return {problem.rule for problem in manifest.check()}


@pytest.mark.parametrize(("rule", "damage"), [EVERY[name] for name in SHUT], ids=SHUT)
def test_damage_of_the_store_is_found_by_its_rule_and_keeps_it_shut(path: str, rule: str, damage: Damage) -> None:
    damaged(path, damage)
    with pytest.raises(ManifestDamaged) as caught:
        ManifestStore.open(path)
    assert f"{rule}:" in str(caught.value), caught.value
    assert caught.value.where["problems"] >= 1
    assert caught.value.hint


@pytest.mark.parametrize("name", [name for name in EVERY if name not in SHUT])
def test_damage_about_one_database_or_counter_is_found_by_its_rule_and_closes_that_one(path: str, name: str) -> None:
    """The store opens, and whatever is sound can be read and written."""
    rule, damage = EVERY[name]
    damaged(path, damage)
    assert rule in found_rules(path)
    expected = CLOSES.get(name, {("database", 1)})
    with ManifestStore.open(path) as manifest:
        assert set(manifest.env.refused) == expected
        for kind, number in expected:
            use = (
                partial(manifest.allocate, Counter(number))
                if kind == "counter"
                else partial(read_only, manifest, number)
            )
            with pytest.raises(ManifestDamaged, match=f"the {kind} is closed") as caught:
                use()
            assert "quire manifest check" in caught.value.hint
            assert "the rest of the store works" in caught.value.hint
        for db_id in {1, 2, 3} - {number for kind, number in expected if kind == "database"}:
            read_only(manifest, db_id)
            with manifest.read() as txn:
                assert txn.live(db_id, r.DbKind.PAGES)[1].status is r.DbStatus.READ_ONLY
        if ("counter", Counter.DB) not in expected:
            assert manifest.register_db("another", r.DbKind.PAGES) == 4
        with manifest.read() as txn:
            assert txn.refused_databases() == {number for kind, number in expected if kind == "database"}


@pytest.mark.parametrize("point", ["manifest.commit.applied", "manifest.commit.flushed", "manifest.commit.durable"])
def test_a_kill_while_a_cursor_is_clamped_leaves_it_for_the_next_open(path: str, point: str) -> None:
    damaged(path, EVERY["a cursor beyond the head"][1])
    killed = os.fork()
    if not killed:  # nothing of LMDB is open here
        with armed(point, lambda _: os._exit(9)):
            ManifestStore.open(path)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(killed, 0)[1]) == 9
    with ManifestStore.open(path) as manifest:
        with manifest.read() as txn:
            cursor = txn.get(t.CHANGE_CURSORS, 1)
            assert cursor is not None
            assert (cursor.state, cursor.acked_sequence) == (r.CursorState.LIVE, txn.feed_bounds()[1])
        assert_clean(manifest)


def test_a_generation_that_is_behind_its_log_goes_on_from_the_log(path: str) -> None:
    damaged(path, FATAL["a watermark below its log"][1])
    with ManifestStore.open(path) as manifest:
        with manifest.read() as txn:
            reached = max(dict(change.generation_updates).get(1, 0) for change in txn.changes(1))
        manifest.submit([register(7, "next")]).result()
        assert manifest.writer.generations[1] == reached + 1
        assert_clean(manifest)


COUNTED = frozenset({"P1", "P2", "R1", "R4", "S2"})
"""Rules that the audit job looks at by itself."""


def counting(*_: Any) -> Any:
    raise AssertionError("somebody counts")


@pytest.mark.parametrize("name", [None, *EVERY])
def test_without_some_rules_the_others_find_the_same_and_nothing_is_counted(
    path: str, name: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    furnish(path)
    if name is not None:
        vandal = Vandal(path)
        EVERY[name][1](vandal)
        vandal.done()
    with ManifestStore.open(path, mode="r") as manifest, manifest.read() as txn:
        whole = list(checks.check(txn))
        assert {str(each) for each in checks.check(txn, without=frozenset({"R1"}))} == {
            str(each) for each in whole if each.rule != "R1"
        }
        for module, looking in (
            (holders, "count_holders"), (holders, "_references"), (holders, "tally"),
            (checks, "_newest_versions"),
        ):  # fmt: skip
            monkeypatch.setattr(module, looking, counting)
        rest = list(checks.check(txn, without=COUNTED))
    named = [{str(each) for each in some if "cannot be checked" not in each.what} for some in (whole, rest)]
    assert named[1] == named[0] - {str(each) for each in whole if each.rule in COUNTED}
    # Who reads a table of numbers finds what does not decode in it: of heads it is the audit, then.
    if name not in (None, "a head that does not decode") and EVERY[name][0] not in COUNTED:
        assert EVERY[name][0] in {each.rule for each in rest}
    assert not COUNTED & {each.rule for each in rest}


def test_without_counting_a_wrong_index_is_mended_just_so(path: str) -> None:
    """R2 and R3 have their fixes still, and they mend: artifacts at zero among them, before, between and behind others."""
    furnish(path)
    vandal = Vandal(path)
    for key in ((1, 2, 1, 0, 0), (2, ArtifactKind.BASE, 7, 1, 0), (1, ArtifactKind.BASE, 0, 9, 0)):
        vandal.put(t.GC_REFCOUNTS, r.RefcountRecord(0, 0, 77), *key)
    vandal.put(t.GC_ZERO, INDEX(5), 1, ArtifactKind.BASE, 0, 9, 0)  # right
    for key in ((1, ArtifactKind.BASE, 0, 8, 0), (3, ArtifactKind.BASE, 0, 8, 0)):
        vandal.put(t.GC_ZERO, INDEX(5), *key)  # of nothing
    vandal.done()
    with ManifestStore.open(path, mode="r") as manifest, manifest.read() as txn:
        whole = [each for each in checks.check(txn) if each.rule in ("R2", "R3")]
        rest = [each for each in checks.check(txn, without=COUNTED) if each.rule in ("R2", "R3")]
    assert sorted(map(str, rest)) == sorted(map(str, whole))
    assert [each.fix for each in rest if each.rule == "R3"] == [each.fix for each in whole if each.rule == "R3"]
    assert len([each for each in rest if each.rule == "R3"]) == 4
    assert [each.where["artifact"].kind for each in rest if each.rule == "R2"] == [ArtifactKind.WAL]
    assert all(each.fix is not None for each in rest)


@pytest.mark.parametrize(("rule", "damage"), MENDABLE.values(), ids=MENDABLE)
def test_repair_mends_what_can_be_recomputed(path: str, rule: str, damage: Damage) -> None:
    furnish(path)
    vandal = Vandal(path)
    damage(vandal)
    vandal.done()
    with ManifestStore.open(path, repair=True) as manifest:
        assert not manifest.env.refused
        assert_clean(manifest)
    with ManifestStore.open(path) as manifest:
        assert_clean(manifest)


@pytest.mark.parametrize(("rule", "damage"), FATAL.values(), ids=FATAL)
def test_repair_does_not_pretend(path: str, rule: str, damage: Damage) -> None:
    """What cannot be recomputed stays closed, repair or not."""
    damaged(path, damage)
    with suppress(ManifestDamaged):
        ManifestStore.open(path, repair=True).close()
    assert rule in found_rules(path)


def test_several_damages_are_all_named(path: str) -> None:
    furnish(path)
    vandal = Vandal(path)
    for _, damage in (MENDABLE["a job missing from its state"], FATAL["a gap in the change log"]):
        damage(vandal)
    vandal.done()
    with pytest.raises(ManifestDamaged) as caught:
        ManifestStore.open(path)
    for rule in ("J1", "F1"):
        assert f"{rule}:" in str(caught.value)
    assert "backup" in caught.value.hint


def test_a_leak_is_reported_and_keeps_nothing_shut(path: str) -> None:
    furnish(path)
    with ManifestStore.open(path) as manifest:
        does(manifest, chunk(99))
        (leak,) = manifest.check()
        assert (leak.rule, leak.leak) == ("R4", True)
        assert str(leak.where["artifact"]) in str(leak)
    ManifestStore.open(path).close()


def test_a_read_only_process_opens_what_the_owner_would_refuse(path: str) -> None:
    """Readers never check: looking at a damaged store must be possible."""
    furnish(path)
    vandal = Vandal(path)
    MENDABLE["a count too high"][1](vandal)
    vandal.done()
    with ManifestStore.open(path, mode="r") as manifest:
        assert {problem.rule for problem in manifest.check()} == {"R1"}


def test_ids_continue_where_they_ended(path: str) -> None:
    furnish(path)
    with ManifestStore.open(path) as manifest:
        ended = [manifest.jobs.enqueue(r.JobKind.VERIFY, db_id) for db_id in (1, 2)]
        does(manifest, *(CompleteJob(job_id, r.JobState.CANCELLED) for job_id in ended), ForgetJob(ended[1]))
        manifest.drop_db(2).result()
    with ManifestStore.open(path) as manifest:
        assert manifest.first_db_id == 4
        assert [manifest.allocate(counter) for counter in (Counter.DB, Counter.JOB, Counter.CURSOR)] == [4, 6, 2]


def test_counts_are_recomputed_as_the_ops_count(path: str) -> None:
    furnish(path)
    with ManifestStore.open(path) as manifest, manifest.read() as txn:
        count = txn.refcount(ArtifactKey(1, ArtifactKind.WAL, 1, 0))
        assert count is not None
        assert (count.in_use, count.pending_upload) == (3, 1)
        assert len(artifact_key(ArtifactKey(1, ArtifactKind.WAL, 1, 0))) == t.GC_REFCOUNTS.key.width
