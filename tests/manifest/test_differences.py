"""The differences between two versions: slots, chunks and pages, from keys and bitmaps alone."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyroaring import BitMap

from quire.core.errors import ManifestDamaged
from quire.core.ids import ArtifactKey, ArtifactKind
from quire.core.limits import CHUNK_BYTES, MIB
from quire.manifest import tables as t
from quire.manifest.ops.corrections import RestoreRow
from quire.manifest.ops.wal import AdvanceWal
from quire.manifest.records import DbKind, DeltaRecord, Residency
from quire.manifest.store import ManifestStore
from quire.testing.manifest import assert_clean
from tests.hostile import memory_limit
from tests.manifest.checkpoints import DeltaChunk, checkpoint_apply
from tests.manifest.helpers import commit
from tests.manifest.test_snapshots import Write, seal, write

BASE, DELTA = ArtifactKind.BASE, ArtifactKind.DELTA
PAGES = CHUNK_BYTES // 4096


@pytest.fixture
def db(manifest: ManifestStore) -> int:
    return manifest.register_db("shop", DbKind.PAGES, page_size=4096)


def test_a_difference_lists_slots_chunks_and_pages(manifest: ManifestStore, db: int) -> None:
    first = write(manifest, db, {0: None, 1: None, 2: None, 300: None})
    manifest.snapshots.publish(db, "a")
    second = write(manifest, db, {1: {3, 4}, 2: None, 700: None})
    third = write(manifest, db, {1: {4, 9}})
    pin = seal(manifest, db)
    manifest.snapshots.publish(db, "b")
    diff = manifest.snapshots.diff("shop", "a", "b")
    assert [(slot.slot, slot.pages) for slot in diff.slots] == [(1, (3, 4, 9)), (2, None), (700, None)]
    assert diff.pages == 3 + 2 * PAGES
    assert diff.removed == (ArtifactKey(db, BASE, 2, first),)
    assert diff.added == (
        ArtifactKey(db, BASE, 2, second),
        ArtifactKey(db, BASE, 700, second),
        ArtifactKey(db, DELTA, 1, second, 1),
        ArtifactKey(db, DELTA, 1, third, 2),
    )
    assert (diff.pins_removed, diff.pins_added, diff.same) == ((), (pin,), False)
    reverse = manifest.snapshots.diff("shop", "b", "a")
    assert (reverse.added, reverse.removed, reverse.pages) == (diff.removed, diff.added, diff.pages)
    assert (reverse.pins_added, reverse.pins_removed) == ((), (pin,))


def test_the_current_state_can_be_compared(manifest: ManifestStore, db: int) -> None:
    write(manifest, db, {0: None})
    manifest.snapshots.publish(db, "a")
    assert manifest.snapshots.diff(db, "a", None).same
    assert manifest.snapshots.diff(db, None).same
    write(manifest, db, {0: {1}})
    assert manifest.snapshots.diff(db, "a").pages == 1


def test_forks_are_compared_with_their_origin(manifest: ManifestStore, db: int) -> None:
    write(manifest, db, {0: None, 256: None})
    fork = manifest.snapshots.fork(db, "fork")
    assert manifest.snapshots.diff(db, None, other="fork").same
    write(manifest, db, {0: {1}})
    write(manifest, fork, {0: {2}})
    diff = manifest.snapshots.diff("shop", None, other=fork)
    assert [(slot.slot, slot.pages) for slot in diff.slots] == [(0, (1, 2))], "pages that either side has changed"
    manifest.drop_db(db).result()
    with manifest.read() as txn:
        assert len(txn.chain(fork, 0)) == 2, "the fork still uses its parent's base"


def test_a_delta_without_a_bitmap_may_have_changed_all_pages(manifest: ManifestStore, db: int) -> None:
    write(manifest, db, {0: None})
    manifest.snapshots.publish(db, "a")
    write(manifest, db, {0: set()})
    diff = manifest.snapshots.diff(db, "a")
    assert (diff.slots[0].pages, diff.pages) == ((), 0), "the bitmap is empty"
    with manifest.read() as txn:
        base = txn.chain(db, 0)[0].generation
        lsn = txn.wal_state(db).last_applied_lsn + 1  # type: ignore[union-attr]  # it was just written
    commit(manifest, AdvanceWal(db, 0, lsn, lsn, lsn))
    without_bitmap = DeltaChunk(slot=0, delta_id=9, record=DeltaRecord(base, Residency.LOCAL, 1, 0))
    checkpoint_apply(manifest, db, manifest.reserve_generation(db), [without_bitmap], covered_lsn=lsn).result()
    assert manifest.snapshots.diff(db, "a").slots[0].pages is None


@pytest.mark.parametrize(
    "bitmap", [b"no bitmap", BitMap([1, 2]).serialize()[:-1], BitMap.flip(BitMap(), 0, 1 << 31).serialize()]
)
def test_a_delta_with_an_impossible_bitmap_is_damage(manifest: ManifestStore, db: int, bitmap: bytes) -> None:
    """Hazard: any bytes were accepted as a bitmap, and any bitmap as one of a chunk; the last one has two billion
    pages."""
    write(manifest, db, {0: None})
    manifest.snapshots.publish(db, "a")
    with manifest.read() as txn:
        base = txn.chain(db, 0)[0].generation
        lsn = txn.wal_state(db).last_applied_lsn + 1  # type: ignore[union-attr]  # it was just written
    commit(manifest, AdvanceWal(db, 0, lsn, lsn, lsn))
    damaged = DeltaChunk(slot=0, delta_id=9, record=DeltaRecord(base, Residency.LOCAL, 1, 0, dirty_pages=bitmap))
    checkpoint_apply(manifest, db, manifest.reserve_generation(db), [damaged], covered_lsn=lsn).result()
    with memory_limit(256 * MIB), pytest.raises(ManifestDamaged, match="pages of a delta"):
        manifest.snapshots.diff(db, "a")


def test_a_missing_leaf_is_damage(manifest: ManifestStore, db: int) -> None:
    """Hazard: a row that the disk has lost was an `AssertionError`, or with `python -O` an error of another kind."""
    write(manifest, db, {0: None})
    manifest.snapshots.publish(db, "a")
    write(manifest, db, {0: None})
    with manifest.read() as txn:
        leaves = [(key, t.SLOT_LEAF.rows.opened(key, raw)) for key, raw in txn.raw_scan(t.SLOT_LEAF)]
    commit(manifest, *[RestoreRow(t.SLOT_LEAF.name, key, None) for key, _ in leaves])
    for call in (lambda: manifest.snapshots.diff(db, "a"), lambda: manifest.snapshots.describe(db, "a")):
        with pytest.raises(ManifestDamaged, match="leaf"):
            call()
    commit(manifest, *[RestoreRow(t.SLOT_LEAF.name, key, row) for key, row in leaves])


WRITES = st.lists(
    st.dictionaries(st.sampled_from((0, 1, 255, 256)), st.none() | st.sets(st.integers(0, 9), max_size=3), max_size=2),
    min_size=1,
    max_size=6,
)


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ManifestStore]:
    """One manifest for all examples; each uses a new database."""
    with ManifestStore.open(str(tmp_path_factory.mktemp("shared") / "manifest.lmdb")) as manifest:
        yield manifest
        assert_clean(manifest)


@given(writes=WRITES, rng=st.randoms(use_true_random=False))
def test_no_changed_page_is_missed(shared: ManifestStore, writes: list[Write], rng: Random) -> None:
    """Against a model that knows the last writer of each page. A diff is an upper bound, and exact if there were only
    deltas."""
    db_id = shared.register_db(f"db-{shared.writer.head}", DbKind.PAGES, page_size=4096)
    pages: dict[tuple[int, int], int] = {}
    bases: dict[int, int] = {}
    versions = []
    for changes in writes:
        if changes:
            generation = write(shared, db_id, changes)
            for slot, dirty in changes.items():
                is_base = dirty is None or slot not in bases
                bases[slot] = generation if is_base else bases[slot]
                pages |= dict.fromkeys(((slot, page) for page in (range(10) if is_base else dirty or ())), generation)
        versions.append((shared.snapshots.publish(db_id).snapshot_id, dict(pages), dict(bases)))
    (a, pages_a, bases_a), (b, pages_b, bases_b) = rng.choice(versions), rng.choice(versions)
    diff = shared.snapshots.diff(db_id, a, b)
    changed = {difference.slot: difference.pages for difference in diff.slots}
    for page in pages_a.keys() | pages_b.keys():
        if pages_a.get(page) != pages_b.get(page):
            assert page[0] in changed
            assert changed[page[0]] is None or page[1] in (changed[page[0]] or ())
    assert all((changed[slot] is None) == (bases_a.get(slot) != bases_b.get(slot)) for slot in changed)
