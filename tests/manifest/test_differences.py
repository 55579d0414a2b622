"""What differs between two versions: slots, chunks and pages, from keys and bitmaps alone."""

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
from quire.manifest.ops.wal import AdvanceWal
from quire.manifest.records import DbKind, DeltaRecord, Residency
from quire.manifest.store import ManifestStore
from quire.testing.manifest import assert_clean
from tests.hostile import memory_of_at_most
from tests.manifest.checkpoints import DeltaChunk, checkpoint_apply
from tests.manifest.helpers import does
from tests.manifest.test_snapshots import Write, seal, write

BASE, DELTA = ArtifactKind.BASE, ArtifactKind.DELTA
PAGES = CHUNK_BYTES // 4096


@pytest.fixture
def db(manifest: ManifestStore) -> int:
    return manifest.register_db("shop", DbKind.PAGES, page_size=4096)


def test_what_differs_is_told_in_slots_chunks_and_pages(manifest: ManifestStore, db: int) -> None:
    first = write(manifest, db, {0: None, 1: None, 2: None, 300: None})
    manifest.snapshots.publish(db, "a")
    second = write(manifest, db, {1: {3, 4}, 2: None, 700: None})
    third = write(manifest, db, {1: {4, 9}})
    pin = seal(manifest, db)
    manifest.snapshots.publish(db, "b")
    diff = manifest.snapshots.diff("shop", "a", "b")
    assert [(each.slot, each.pages) for each in diff.slots] == [(1, (3, 4, 9)), (2, None), (700, None)]
    assert diff.pages == 3 + 2 * PAGES
    assert diff.removed == (ArtifactKey(db, BASE, 2, first),)
    assert diff.added == (
        ArtifactKey(db, BASE, 2, second),
        ArtifactKey(db, BASE, 700, second),
        ArtifactKey(db, DELTA, 1, second, 1),
        ArtifactKey(db, DELTA, 1, third, 2),
    )
    assert (diff.pins_removed, diff.pins_added, diff.same) == ((), (pin,), False)
    back = manifest.snapshots.diff("shop", "b", "a")
    assert (back.added, back.removed, back.pages) == (diff.removed, diff.added, diff.pages)
    assert (back.pins_added, back.pins_removed) == ((), (pin,))


def test_now_is_a_version_too(manifest: ManifestStore, db: int) -> None:
    write(manifest, db, {0: None})
    manifest.snapshots.publish(db, "a")
    assert manifest.snapshots.diff(db, "a", None).same
    assert manifest.snapshots.diff(db, None).same
    write(manifest, db, {0: {1}})
    assert manifest.snapshots.diff(db, "a").pages == 1


def test_forks_are_compared_with_what_they_came_from(manifest: ManifestStore, db: int) -> None:
    write(manifest, db, {0: None, 256: None})
    fork = manifest.snapshots.fork(db, "fork")
    assert manifest.snapshots.diff(db, None, other="fork").same
    write(manifest, db, {0: {1}})
    write(manifest, fork, {0: {2}})
    diff = manifest.snapshots.diff("shop", None, other=fork)
    assert [(each.slot, each.pages) for each in diff.slots] == [(0, (1, 2))], "what either has changed"
    manifest.drop_db(db).result()
    with manifest.read() as txn:
        assert len(txn.chain(fork, 0)) == 2, "the fork still stands on its parent's base"


def test_a_delta_that_does_not_say_which_pages_may_be_all_of_them(manifest: ManifestStore, db: int) -> None:
    write(manifest, db, {0: None})
    manifest.snapshots.publish(db, "a")
    write(manifest, db, {0: set()})
    diff = manifest.snapshots.diff(db, "a")
    assert (diff.slots[0].pages, diff.pages) == ((), 0), "it says: none"
    with manifest.read() as txn:
        base = txn.chain(db, 0)[0].generation
        lsn = txn.wal_state(db).last_applied_lsn + 1  # type: ignore[union-attr]  # it has just been written
    does(manifest, AdvanceWal(db, 0, lsn, lsn, lsn))
    silent = DeltaChunk(slot=0, delta_id=9, record=DeltaRecord(base, Residency.LOCAL, 1, 0))
    checkpoint_apply(manifest, db, manifest.reserve_generation(db), [silent], covered_lsn=lsn).result()
    assert manifest.snapshots.diff(db, "a").slots[0].pages is None


@pytest.mark.parametrize(
    "bitmap", [b"no bitmap", BitMap([1, 2]).serialize()[:-1], BitMap.flip(BitMap(), 0, 1 << 31).serialize()]
)
def test_a_delta_whose_pages_cannot_be_is_damage(manifest: ManifestStore, db: int, bitmap: bytes) -> None:
    """Bytes were believed to be a bitmap, and a bitmap to be one of a chunk; the last is two billion pages."""
    write(manifest, db, {0: None})
    manifest.snapshots.publish(db, "a")
    with manifest.read() as txn:
        base = txn.chain(db, 0)[0].generation
        lsn = txn.wal_state(db).last_applied_lsn + 1  # type: ignore[union-attr]  # it has just been written
    does(manifest, AdvanceWal(db, 0, lsn, lsn, lsn))
    lying = DeltaChunk(slot=0, delta_id=9, record=DeltaRecord(base, Residency.LOCAL, 1, 0, dirty_pages=bitmap))
    checkpoint_apply(manifest, db, manifest.reserve_generation(db), [lying], covered_lsn=lsn).result()
    with memory_of_at_most(256 * MIB), pytest.raises(ManifestDamaged, match="pages of a delta"):
        manifest.snapshots.diff(db, "a")


WRITES = st.lists(
    st.dictionaries(st.sampled_from((0, 1, 255, 256)), st.none() | st.sets(st.integers(0, 9), max_size=3), max_size=2),
    min_size=1,
    max_size=6,
)


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ManifestStore]:
    """One manifest for all examples, each in a database of its own."""
    with ManifestStore.open(str(tmp_path_factory.mktemp("shared") / "manifest.lmdb")) as manifest:
        yield manifest
        assert_clean(manifest)


@given(writes=WRITES, rng=st.randoms(use_true_random=False))
def test_no_page_that_differs_is_missed(shared: ManifestStore, writes: list[Write], rng: Random) -> None:
    """Against a model that knows who wrote each page last. A diff is an upper bound, and exact where only deltas came."""
    db_id = shared.register_db(f"db-{shared.writer.head}", DbKind.PAGES, page_size=4096)
    pages: dict[tuple[int, int], int] = {}
    bases: dict[int, int] = {}
    versions = []
    for changes in writes:
        if changes:
            generation = write(shared, db_id, changes)
            for slot, dirty in changes.items():
                whole = dirty is None or slot not in bases
                bases[slot] = generation if whole else bases[slot]
                pages |= dict.fromkeys(((slot, page) for page in (range(10) if whole else dirty or ())), generation)
        versions.append((shared.snapshots.publish(db_id).snapshot_id, dict(pages), dict(bases)))
    (a, pages_a, bases_a), (b, pages_b, bases_b) = rng.choice(versions), rng.choice(versions)
    diff = shared.snapshots.diff(db_id, a, b)
    told = {each.slot: each.pages for each in diff.slots}
    for page in pages_a.keys() | pages_b.keys():
        if pages_a.get(page) != pages_b.get(page):
            assert page[0] in told
            assert told[page[0]] is None or page[1] in (told[page[0]] or ())
    assert all((told[slot] is None) == (bases_a.get(slot) != bases_b.get(slot)) for slot in told)
