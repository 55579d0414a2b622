"""Forks: both sides share until they diverge, and go in any order; the lineage says who came from where."""

from __future__ import annotations

import itertools

import pytest

from quire.core.ids import ArtifactKey, ArtifactKind
from quire.manifest import tables as t
from quire.manifest.ops.databases import RemoveDb
from quire.manifest.ops.snapshots import ForkDb
from quire.manifest.records import DbKind, DbStatus, JobKind
from quire.manifest.store import ManifestStore
from quire.testing.manifest import assert_clean
from tests.manifest.helpers import collect, counts, does
from tests.manifest.test_snapshots import last_change, seal, shape, truncate, write

BASE, DELTA, LEAF, WAL = ArtifactKind.BASE, ArtifactKind.DELTA, ArtifactKind.LEAF, ArtifactKind.WAL
HISTORY = {
    "audit",
    "change_log",
    "generation_watermarks",
    "id_watermarks",
    "job_queue",
    "jobs_by_state",
    "meta",
    "migrations",
}


@pytest.fixture
def db(manifest: ManifestStore) -> int:
    return manifest.register_db("shop", DbKind.PAGES, page_size=4096)


def remove(manifest: ManifestStore, db_id: int) -> None:
    """What the delete job of a dropped database ends with, once `collect` has done the rest of its work."""
    manifest.jobs.cancel(manifest.jobs.outstanding(db_id, JobKind.DELETE))
    does(manifest, RemoveDb(db_id))


def test_a_fork_is_one_transaction_that_shares_everything(manifest: ManifestStore, db: int) -> None:
    generation = write(manifest, db, {0: None, 300: {1}})
    pin = seal(manifest, db)
    before, head = counts(manifest), manifest.writer.head
    fork = manifest.snapshots.fork("shop", "fork")
    assert fork > db
    assert (manifest.writer.head, last_change(manifest)) == (head + 1, [ForkDb])
    held = {ArtifactKey(db, LEAF, 0, generation), ArtifactKey(db, LEAF, 1, generation), ArtifactKey(db, WAL, 1, 0)}
    assert counts(manifest) == {key: (n + (key in held), 0) for key, (n, _) in before.items()}
    with manifest.read() as txn:
        record, inherited = txn.database(fork), txn.get(t.WAL_CATALOG, fork, pin.segment_id)
        assert {slot: txn.chain(fork, slot) for slot in (0, 300)} == {slot: txn.chain(db, slot) for slot in (0, 300)}
    assert record is not None
    assert inherited is not None
    assert (record.parent_db_id, record.parent_generation, record.parent_lsn) == (db, generation, pin.upto_lsn)
    assert (record.kind, record.status, record.page_size) == (DbKind.PAGES, DbStatus.ACTIVE, 4096)
    assert inherited.origin_db_id == db


def test_each_side_of_a_fork_goes_its_own_way(manifest: ManifestStore, db: int) -> None:
    first = write(manifest, db, {0: None, 1: None})
    fork = manifest.snapshots.fork(db, "fork")
    mine, theirs = write(manifest, db, {0: {1}}), write(manifest, fork, {1: None})
    with manifest.read() as txn:
        chains = {
            (each, slot): [link.artifact(slot) for link in txn.chain(each, slot)]
            for each in (db, fork)
            for slot in (0, 1)
        }
    shared = [ArtifactKey(db, BASE, slot, first) for slot in (0, 1)]
    assert chains == {
        (db, 0): [shared[0], ArtifactKey(db, DELTA, 0, mine, 1)],
        (db, 1): [shared[1]],
        (fork, 0): [shared[0]],
        (fork, 1): [ArtifactKey(fork, BASE, 1, theirs)],
    }
    assert counts(manifest)[shared[0]] == (2, 0), "in a leaf of each"


def test_a_fork_begins_where_a_snapshot_was(manifest: ManifestStore, db: int) -> None:
    write(manifest, db, {0: None})
    pin = seal(manifest, db)
    info = manifest.snapshots.publish(db, "then")
    write(manifest, db, {0: None, 1: None})
    truncate(manifest, db, pin.segment_id)
    collect(manifest)
    for at, name in (("then", "by-name"), (info.snapshot_id, "by-id")):
        fork = manifest.snapshots.fork(db, name, at=at)
        assert manifest.snapshots.diff(db, "then", None, other=fork).same
    manifest.snapshots.drop(db, "then")
    collect(manifest)
    with manifest.read() as txn:
        assert len(txn.chain(fork, 0)) == 1
        assert txn.get(t.WAL_CATALOG, db, pin.segment_id) is not None, "the forks need its bytes"


def test_numbering_goes_on_along_a_line(manifest: ManifestStore, db: int) -> None:
    """P12: one name never means two things, even where a fork inherits no segment."""
    for _ in range(3):
        pin = seal(manifest, db)
    generation = write(manifest, db, {0: None})
    fork = manifest.snapshots.fork(db, "fork")
    with manifest.read() as txn:
        wal, record = txn.wal_state(fork), txn.database(fork)
    assert wal is not None
    assert record is not None
    assert (wal.next_segment_id, wal.lsn_reserved, wal.checkpointed_lsn) == (pin.segment_id + 1, 10, 10)
    assert record.next_generation == generation + 1
    assert seal(manifest, fork).segment_id == pin.segment_id + 1


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))), ids=str)
@pytest.mark.parametrize("eager", [True, False], ids=["collecting", "at the end"])
def test_a_line_of_forks_dropped_in_any_order_leaks_and_loses_nothing(
    manifest: ManifestStore, db: int, order: tuple[int, ...], eager: bool
) -> None:
    line = [db]
    write(manifest, db, {0: None, 256: None})
    for number in range(2):
        seal(manifest, line[-1])
        manifest.snapshots.publish(line[-1], "s")
        line.append(manifest.snapshots.fork(line[-1], f"fork-{number}", at=["s", None][number % 2]))
        write(manifest, line[-1], {number: None, 256: {number}})
    with manifest.read() as txn:
        chains = {each: (txn.chain(each, 0), txn.chain(each, 256)) for each in line}
    for number in order:
        manifest.drop_db(line[number], snapshots=True).result()
        del chains[line[number]]
        assert_clean(manifest)
        if eager:
            collect(manifest)
        with manifest.read() as txn:
            assert {each: (txn.chain(each, 0), txn.chain(each, 256)) for each in chains} == chains
            for link in {link for pair in chains.values() for link in pair[1]}:
                key = link.artifact(256)
                assert txn.refcount(key) is not None
    collect(manifest)
    for each in line:
        remove(manifest, each)
    with manifest.read() as txn:
        left = {name for name, table in t.TABLES.items() if txn.count(table)}
    assert left <= HISTORY


# ── lineage ───────────────────────────────────────────────────────────────────────────────────────────────────────────
def test_the_lineage_is_a_tree_of_who_came_from_where(manifest: ManifestStore, db: int) -> None:
    manifest.register_db("other", DbKind.PAGES)
    generation = write(manifest, db, {0: None})
    kept = manifest.snapshots.publish(db, "s")
    left = manifest.snapshots.fork(db, "left", at="s")
    manifest.snapshots.fork(left, "left-left")
    write(manifest, db, {0: None})
    manifest.snapshots.fork(db, "right")
    assert shape(manifest.snapshots.lineage()) == [
        ("shop", [("left", [("left-left", [])]), ("right", [])]),
        ("other", []),
    ]
    node = manifest.snapshots.lineage()[0].forks[0]
    assert (node.parent_db_id, node.parent_snapshot_id) == (db, kept.snapshot_id)
    assert (node.parent_generation, node.parent_lsn) == (generation, kept.anchor_lsn)
    manifest.drop_db(left).result()
    assert manifest.snapshots.lineage()[0].forks[0].status is DbStatus.TOMBSTONED
    collect(manifest)
    remove(manifest, left)
    assert shape(manifest.snapshots.lineage()) == [
        ("shop", [("right", [])]),
        ("other", []),
        (f"gone {left}", [("left-left", [])]),
    ]


def test_a_line_of_many_forks_is_listed(manifest: ManifestStore, db: int) -> None:
    """Hazard: Python's stack is a thousand deep."""
    does(manifest, *(ForkDb(number, number - 1, f"f{number}") for number in range(db + 1, db + 1500)))
    (node,) = manifest.snapshots.lineage()
    depth = 1
    while node.forks:
        (node,), depth = node.forks, depth + 1
    assert depth == 1500
