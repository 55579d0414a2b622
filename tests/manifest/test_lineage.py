"""Forks: both sides share artifacts until they diverge, and can be dropped in any order; the lineage shows their
origins."""

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
from tests.manifest.helpers import collect, commit, counts
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
    """The last step of the delete job of a dropped database, after `collect` has done the rest of its work."""
    manifest.jobs.cancel(manifest.jobs.outstanding(db_id, JobKind.DELETE))
    commit(manifest, RemoveDb(db_id))


def test_a_fork_is_one_transaction_that_shares_everything(manifest: ManifestStore, db: int) -> None:
    generation = write(manifest, db, {0: None, 300: {1}})
    pin = seal(manifest, db)
    before, head = counts(manifest), manifest.writer.head
    fork = manifest.snapshots.fork("shop", "fork")
    assert fork > db
    assert (manifest.writer.head, last_change(manifest)) == (head + 1, [ForkDb])
    shared = {ArtifactKey(db, LEAF, 0, generation), ArtifactKey(db, LEAF, 1, generation), ArtifactKey(db, WAL, 1, 0)}
    assert counts(manifest) == {key: (n + (key in shared), 0) for key, (n, _) in before.items()}
    with manifest.read() as txn:
        record, inherited = txn.database(fork), txn.get(t.WAL_CATALOG, fork, pin.segment_id)
        assert {slot: txn.chain(fork, slot) for slot in (0, 300)} == {slot: txn.chain(db, slot) for slot in (0, 300)}
    assert record is not None
    assert inherited is not None
    assert (record.parent_db_id, record.parent_generation, record.parent_lsn) == (db, generation, pin.upto_lsn)
    assert (record.kind, record.status, record.page_size) == (DbKind.PAGES, DbStatus.ACTIVE, 4096)
    assert inherited.origin_db_id == db


def test_each_side_of_a_fork_diverges_independently(manifest: ManifestStore, db: int) -> None:
    first = write(manifest, db, {0: None, 1: None})
    fork = manifest.snapshots.fork(db, "fork")
    own_generation, fork_generation = write(manifest, db, {0: {1}}), write(manifest, fork, {1: None})
    with manifest.read() as txn:
        chains = {
            (db_id, slot): [link.artifact(slot) for link in txn.chain(db_id, slot)]
            for db_id in (db, fork)
            for slot in (0, 1)
        }
    shared = [ArtifactKey(db, BASE, slot, first) for slot in (0, 1)]
    assert chains == {
        (db, 0): [shared[0], ArtifactKey(db, DELTA, 0, own_generation, 1)],
        (db, 1): [shared[1]],
        (fork, 0): [shared[0]],
        (fork, 1): [ArtifactKey(fork, BASE, 1, fork_generation)],
    }
    assert counts(manifest)[shared[0]] == (2, 0), "in a leaf of each side"


def test_a_fork_of_a_snapshot_begins_with_its_version(manifest: ManifestStore, db: int) -> None:
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
        assert txn.get(t.WAL_CATALOG, db, pin.segment_id) is not None, "the forks need the bytes of the segment"


def test_numbering_continues_from_a_database_to_its_fork(manifest: ManifestStore, db: int) -> None:
    """P12: a name never has two contents, even if a fork inherits no segment."""
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
@pytest.mark.parametrize("collect_each_time", [True, False], ids=["collecting", "at the end"])
def test_a_chain_of_forks_dropped_in_any_order_leaks_and_loses_nothing(
    manifest: ManifestStore, db: int, order: tuple[int, ...], collect_each_time: bool
) -> None:
    databases = [db]
    write(manifest, db, {0: None, 256: None})
    for number in range(2):
        seal(manifest, databases[-1])
        manifest.snapshots.publish(databases[-1], "s")
        databases.append(manifest.snapshots.fork(databases[-1], f"fork-{number}", at=["s", None][number % 2]))
        write(manifest, databases[-1], {number: None, 256: {number}})
    with manifest.read() as txn:
        chains = {db_id: (txn.chain(db_id, 0), txn.chain(db_id, 256)) for db_id in databases}
    for number in order:
        manifest.drop_db(databases[number], snapshots=True).result()
        del chains[databases[number]]
        assert_clean(manifest)
        if collect_each_time:
            collect(manifest)
        with manifest.read() as txn:
            assert {db_id: (txn.chain(db_id, 0), txn.chain(db_id, 256)) for db_id in chains} == chains
            for link in {link for pair in chains.values() for link in pair[1]}:
                key = link.artifact(256)
                assert txn.refcount(key) is not None
    collect(manifest)
    for db_id in databases:
        remove(manifest, db_id)
    with manifest.read() as txn:
        nonempty = {name for name, table in t.TABLES.items() if txn.count(table)}
    assert nonempty <= HISTORY


# ── lineage ───────────────────────────────────────────────────────────────────────────────────────────────────────────
def test_the_lineage_is_a_tree_of_origins(manifest: ManifestStore, db: int) -> None:
    manifest.register_db("other", DbKind.PAGES)
    generation = write(manifest, db, {0: None})
    snapshot = manifest.snapshots.publish(db, "s")
    left_fork = manifest.snapshots.fork(db, "left", at="s")
    manifest.snapshots.fork(left_fork, "left-left")
    write(manifest, db, {0: None})
    manifest.snapshots.fork(db, "right")
    assert shape(manifest.snapshots.lineage()) == [
        ("shop", [("left", [("left-left", [])]), ("right", [])]),
        ("other", []),
    ]
    node = manifest.snapshots.lineage()[0].forks[0]
    assert (node.parent_db_id, node.parent_snapshot_id) == (db, snapshot.snapshot_id)
    assert (node.parent_generation, node.parent_lsn) == (generation, snapshot.anchor_lsn)
    manifest.drop_db(left_fork).result()
    assert manifest.snapshots.lineage()[0].forks[0].status is DbStatus.TOMBSTONED
    collect(manifest)
    remove(manifest, left_fork)
    assert shape(manifest.snapshots.lineage()) == [
        ("shop", [("right", [])]),
        ("other", []),
        (f"gone {left_fork}", [("left-left", [])]),
    ]


def test_a_long_chain_of_forks_is_listed(manifest: ManifestStore, db: int) -> None:
    """Hazard: a recursive listing exceeds Python's recursion limit of a thousand."""
    commit(manifest, *(ForkDb(number, number - 1, f"f{number}") for number in range(db + 1, db + 1500)))
    (node,) = manifest.snapshots.lineage()
    depth = 1
    while node.forks:
        (node,), depth = node.forks, depth + 1
    assert depth == 1500
