"""After a crash an open checks the log since the checked point and what it names; the recount checks the rest (N3)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest

from quire.core.clock import SystemClock
from quire.core.errors import ManifestDamaged
from quire.manifest import changed_rows, overlay
from quire.manifest import tables as t
from quire.manifest.changed_rows import Changed, ChangedRows, changed_since, known_names
from quire.manifest.check import CHANGED_CHECK_NAMES, CONTAINED, check
from quire.manifest.checked_point import SUFFIX, point_of
from quire.manifest.migrations import STEPS, Step, migrate
from quire.manifest.ops.base import Op
from quire.manifest.ops.databases import RenameDb
from quire.manifest.ops.jobs import StartJob
from quire.manifest.ops.pageindex import ROW, PublishPages
from quire.manifest.records import DbKind, IndexRecord, JobKind, RefcountRecord
from quire.manifest.row_image import RowImage
from quire.manifest.store import ManifestStore
from quire.testing.manifest import Dump, assert_clean, dump
from tests.manifest.batches import BatchMaker, hold_feed, outcome
from tests.manifest.helpers import checkpoint, chunk, commit, register
from tests.manifest.rows_read import RowsRead

UNLOGGED = (t.SNAPSHOT_FLOOR, t.LSM_ENDS, t.FOLLOWED_FILES)
"""Tables of one row for a database that operations outside of the feed write."""

Damage = Callable[[ManifestStore, int], None]


def die(manifest: ManifestStore) -> None:
    """End an owner as a crash would: its changes are durable, and no checked point is written."""
    manifest.env.refused["none", 0] = ("", "")  # `close` records nothing while anything is refused
    manifest.close()


def create_databases(path: str, count: int) -> None:
    """Create databases 1 to `count`, each with a leaf, pages, a job and a name; closed cleanly."""
    with ManifestStore.open(path) as manifest:
        for db_id in range(1, count + 1):
            commit(manifest, register(db_id))
            checkpoint(manifest, db_id, 0)
            manifest.jobs.enqueue(JobKind.CHECKPOINT, db_id=db_id)
            commit(manifest, PublishPages(db_id, ROW.pack(1, 1, 5, 0, 0, 1, db_id, 0, 0)))


def delete_row(table: t.Table[Any], *rest: int) -> Damage:
    def change(manifest: ManifestStore, db_id: int) -> None:
        with manifest.env.begin_write() as txn:
            assert txn.delete(table.key.pack(db_id, *rest), db=manifest.env.handles[table.name])

    return change


def put_row(table: t.Table[Any], key: tuple[Any, ...], record: Any, manifest: ManifestStore) -> None:
    packed = table.key.pack(*key)
    with manifest.env.begin_write() as txn:
        txn.put(packed, table.rows.encode(packed, record), db=manifest.env.handles[table.name])


def delete_first(table: t.Table[Any]) -> Damage:
    """Delete the first row that a database has in a table."""

    def change(manifest: ManifestStore, db_id: int) -> None:
        with manifest.read() as txn:
            key, _ = next(txn.raw_scan(table, db_id))
        with manifest.env.begin_write() as txn:
            assert txn.delete(key, db=manifest.env.handles[table.name])

    return change


def flip_first(table: t.Table[Any]) -> Damage:
    """Flip a bit of the first row that a database has in a table."""

    def change(manifest: ManifestStore, db_id: int) -> None:
        with manifest.read() as txn:
            key, raw = next(txn.raw_scan(table, db_id))
        with manifest.env.begin_write() as txn:
            txn.put(key, raw[:3] + bytes([raw[3] ^ 1]) + raw[4:], db=manifest.env.handles[table.name])

    return change


def take_count(manifest: ManifestStore, db_id: int) -> None:
    """Set a count to zero although a leaf is held."""
    with manifest.read() as txn:
        key, _ = next(txn.scan(t.GC_REFCOUNTS, db_id))
    put_row(t.GC_REFCOUNTS, key, RefcountRecord(0, 0, 1), manifest)
    put_row(t.GC_ZERO, key, IndexRecord(1), manifest)


def take_name(manifest: ManifestStore, db_id: int) -> None:
    with manifest.env.begin_write() as txn:
        assert txn.delete(t.DB_NAMES.key.pack(f"db{db_id}"), db=manifest.env.handles[t.DB_NAMES.name])


DAMAGES: dict[str, Damage] = {
    "no WAL state": delete_row(t.WAL_STATE, 0),
    "a damaged row": flip_first(t.DB),
    "a missing leaf": delete_first(t.SLOT_LEAF),
    "a missing chunk": delete_first(t.CHUNK_CATALOG),
    "a missing head of a page": delete_first(t.PAGE_VERSION_HEAD),
    "a count below its holders": take_count,
    "a missing count": delete_first(t.GC_REFCOUNTS),
    "a missing name": take_name,
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_broken_rule_of_a_database_that_changed_is_found_at_the_open_after_a_crash(path: str, damage: Damage) -> None:
    create_databases(path, 3)
    manifest = ManifestStore.open(path)
    commit(manifest, chunk(9, db_id=2))
    damage(manifest, 2)
    die(manifest)
    with ManifestStore.open(path) as manifest:
        assert set(manifest.env.refused) == {("database", 2)}
        with pytest.raises(ManifestDamaged):
            commit(manifest, chunk(10, db_id=2))
        commit(manifest, chunk(10, db_id=1))


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_broken_rule_of_another_database_is_found_by_the_recount_which_closes_it(path: str, damage: Damage) -> None:
    create_databases(path, 3)
    manifest = ManifestStore.open(path)
    commit(manifest, chunk(9, db_id=2))
    damage(manifest, 3)
    die(manifest)
    with ManifestStore.open(path) as manifest:
        assert not manifest.env.refused
        assert not manifest.recount.is_done
        manifest.recount.finish()
        assert set(manifest.env.refused) == {("database", 3)}
        with pytest.raises(ManifestDamaged):
            commit(manifest, chunk(10, db_id=3))
        commit(manifest, chunk(10, db_id=2))


def test_a_broken_index_of_a_job_that_changed_is_found_at_the_open_after_a_crash(path: str) -> None:
    create_databases(path, 2)
    manifest = ManifestStore.open(path)
    (job, _) = manifest.jobs.jobs()
    commit(manifest, StartJob(job.job_id, "worker", 1))
    with manifest.env.begin_write() as txn, txn.cursor(db=manifest.env.handles[t.JOBS_BY_STATE.name]) as cursor:
        while cursor.next():
            if t.JOBS_BY_STATE.key.unpack(bytes(cursor.key()))[1] == job.job_id:
                cursor.delete()
    die(manifest)
    with pytest.raises(ManifestDamaged, match="jobs_by_state"):
        ManifestStore.open(path)
    ManifestStore.open(path, repair=True).close()


def test_an_open_after_a_crash_reads_the_same_number_of_rows_whatever_the_number_of_databases(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows, read = RowsRead(monkeypatch), []
    for count in (20, 200):
        path = str(tmp_path / f"{count}.lmdb")
        create_databases(path, count)
        manifest = ManifestStore.open(path)
        commit(manifest, chunk(9, db_id=7))
        die(manifest)
        rows.take()
        with ManifestStore.open(path) as manifest:
            read.append(rows.take())
            assert not manifest.recount.is_done
            manifest.recount.finish()
            assert rows.take() > 10 * count, "the recount reads all of them"
    assert read[0] == read[1] < 200


def test_an_open_after_a_crash_reads_no_older_part_of_the_log(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = RowsRead(monkeypatch)
    read: list[int] = []
    for _ in range(2):
        with ManifestStore.open(path) as manifest:
            if not read:
                manifest.register_db("shop", DbKind.PAGES)
            for _ in range(200):
                commit(manifest, chunk(1))
        manifest = ManifestStore.open(path)
        commit(manifest, chunk(1))
        die(manifest)
        rows.take()
        with ManifestStore.open(path):
            read.append(rows.take())
    assert read[0] == read[1]


def test_changes_after_the_point_stay_on_disk_although_the_feed_is_trimmed(path: str) -> None:
    create_databases(path, 2)
    manifest = ManifestStore.open(path)
    cursor = manifest.feed.register(name="app").cursor_id
    commit(manifest, chunk(9, db_id=2))
    manifest.feed.acknowledge(cursor, manifest.feed.head())
    assert not manifest.feed.tail_rows(), "nothing is left to be trimmed before the next point"
    die(manifest)
    with ManifestStore.open(path) as manifest:
        assert not manifest.recount.is_done
        with manifest.read() as txn:
            oldest, head = txn.feed_bounds()
            assert oldest == head + 1, "subscribers do not see what was trimmed"


def test_without_all_changes_since_the_point_everything_is_checked(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An owner without upkeep records no later point: the tail that it keeps is bounded."""
    monkeypatch.setattr(overlay, "KEPT_CHANGES", 3)
    create_databases(path, 2)
    manifest = ManifestStore.open(path)
    cursor = manifest.feed.register(name="app").cursor_id
    for number in range(9, 15):
        commit(manifest, chunk(number, db_id=2))
    manifest.feed.acknowledge(cursor, manifest.feed.head())
    delete_row(t.WAL_STATE, 0)(manifest, 1)
    die(manifest)
    with ManifestStore.open(path) as manifest:
        assert set(manifest.env.refused) == {("database", 1)}


def test_a_point_that_was_ahead_of_the_manifest_is_not_believed_later(path: str) -> None:
    """Hazard: an older manifest was put back and had damage, so its open recorded no point. The newer one stayed, and
    was believed once the manifest had grown up to it: the closed database was open again."""
    create_databases(path, 3)
    older = Path(path).read_bytes()
    with ManifestStore.open(path) as manifest:
        for number in range(9, 15):
            commit(manifest, chunk(number, db_id=2))
    newer = Path(path + SUFFIX).read_bytes()
    Path(path).write_bytes(older)
    Path(path + SUFFIX).unlink()
    manifest = ManifestStore.open(path)
    delete_row(t.WAL_STATE, 0)(manifest, 3)
    die(manifest)
    Path(path + SUFFIX).write_bytes(newer)
    manifest = ManifestStore.open(path)
    assert set(manifest.env.refused) == {("database", 3)}
    for number in range(9, 16):
        commit(manifest, chunk(number, db_id=2))
    die(manifest)
    with ManifestStore.open(path) as manifest:
        assert set(manifest.env.refused) == {("database", 3)}


def test_everything_is_checked_if_most_databases_changed(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A walk over all rows is faster then."""
    monkeypatch.setattr(changed_rows, "FEW_DATABASES", 2)
    create_databases(path, 6)
    for named, is_found in ((1, False), (5, True)):
        manifest = ManifestStore.open(path)
        for db_id in range(1, named + 1):
            commit(manifest, chunk(9, db_id=db_id))
        if not is_found:
            delete_row(t.WAL_STATE, 0)(manifest, 6)
        die(manifest)
        with ManifestStore.open(path) as manifest:
            assert (("database", 6) in manifest.env.refused) is is_found


def test_a_point_is_recorded_after_the_check_of_an_open(path: str) -> None:
    """A process that dies again and again does not check the same changes at every open."""
    create_databases(path, 2)
    manifest = ManifestStore.open(path)
    commit(manifest, chunk(9, db_id=2))
    die(manifest)
    manifest = ManifestStore.open(path)
    assert manifest.env.checked_sequence == manifest.feed.head()
    manifest.env.close()
    with ManifestStore.open(path, mode="r") as reader:
        assert Path(path + SUFFIX).read_bytes().startswith(b'{"format":1')
        assert reader.feed.head() == manifest.env.checked_sequence


def test_a_migration_and_an_image_of_rows_delete_the_point(path: str) -> None:
    """The change log does not name the rows that they write."""
    create_databases(path, 1)
    with ManifestStore.open(path) as manifest:
        seen: list[bool] = []
        step = Step("later", lambda _env, _txn: seen.append(Path(path + SUFFIX).exists()))
        assert Path(path + SUFFIX).exists()
        assert migrate(manifest.env, SystemClock(), [*STEPS, step]) == ["later"]
        assert seen == [False]
    create_databases(path + "2", 1)
    assert Path(path + "2" + SUFFIX).exists()
    RowImage(path + "2").close()
    assert not Path(path + "2" + SUFFIX).exists()


# ── every row that a batch writes is in the view ──────────────────────────────────────────────────────────────────────
def written(before: Dump, after: Dump) -> list[tuple[t.Table[Any], bytes]]:
    """Return (table, key) of the rows that were put or deleted."""
    keys = {(name, key) for name in before for key, _ in set(before[name]) ^ set(after[name])}
    return [(t.TABLES[name], key) for name, key in sorted(keys)]


STORE_TABLES = (t.META, t.ID_WATERMARKS, t.GENERATION_WATERMARKS, t.REMOTE_NAMESPACE, t.TIMELINE, t.CURSOR_NAMES)


def is_covered(table: t.Table[Any], key: bytes, changed: Changed, view: dict[str, set[bytes]]) -> bool:
    """Return whether the check of an open after a crash reads this row, or would find it if it were still there."""
    if table in STORE_TABLES or table in CONTAINED or table in UNLOGGED or key in view[table.name]:
        return True
    if table in t.OWNED:  # a deleted row
        return int.from_bytes(key[:4], "big") in changed.databases
    if table in (t.JOB_QUEUE, t.JOB_LEASES, t.JOBS_BY_STATE):
        return table.key.unpack(key)[-1] in changed.jobs
    return False


@pytest.mark.parametrize("seed", range(4))
def test_every_row_that_a_batch_writes_is_checked_at_the_open_after_a_crash(path: str, seed: int) -> None:
    with ManifestStore.open(path) as manifest:
        hold_feed(manifest)
        maker = BatchMaker(Random(seed))
        for _ in range(150):
            point, before = point_of(manifest.env), dump(manifest)
            batch: list[Op] = maker.batch(manifest)
            outcome(manifest.submit(batch))
            after = dump(manifest)
            with manifest.read() as txn:
                changed = changed_since(txn, point)
            assert changed is not None
            with ChangedRows(manifest.env, changed) as rows:
                view = {table.name: {key for key, _ in rows.raw_scan(table)} for table in t.TABLES.values()}
                names = {name.encode() for key in rows.every_database() for name in known_names(*key)}
                view[t.DB_NAMES.name] |= names  # a row that should have been deleted would be read
                assert not list(check(rows, checks=CHANGED_CHECK_NAMES)), "no rule is broken"
            is_renamed = any(isinstance(op, RenameDb) for op in batch)
            missed = [
                (table, key.hex())
                for table, key in written(before, after)
                if not is_covered(table, key, changed, view)
                and not (is_renamed and table is t.DB_NAMES)  # only the recount finds a name that was not freed
            ]
            assert not missed, f"{batch} writes rows that an open would not check: {missed}"
        assert_clean(manifest, leaks=True)
