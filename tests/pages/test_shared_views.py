"""Versions lent to readers in other processes: everything they need is kept while they read, and they have no other
effect."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from quire.core.errors import Corruption, InvalidInput, LeaseExpired, ManifestDamaged, NotFound, StorageFault
from quire.durable.failpoints import armed
from quire.manifest import tables as t
from quire.manifest.guard import ManifestGuard
from quire.manifest.leases import LentVersion
from quire.manifest.ops.base import Op
from quire.manifest.ops.local import DropReader
from quire.manifest.records import JobKind
from quire.pages import anchors
from quire.pages.anchors import lend
from quire.pages.cache import PageCache
from quire.pages.sources import Sources
from quire.pages.view import SnapshotView, ViewReader
from tests.pages.engine_harness import GRACE_SECONDS, Model, Pages, Version, assert_reads, image, small_segments, write

SECONDS = 300.0


@pytest.fixture
def pages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Pages]:
    small_segments(monkeypatch)
    pages = Pages(tmp_path)
    yield pages
    pages.stop()


def open_elsewhere(pages: Pages, view: SnapshotView) -> ViewReader:
    """Open the view as another process does: files and objects, no manifest, nothing cached."""
    sources = Sources(root=pages.root, disk=pages.disk, open_store=pages.stores, cache=PageCache(1 << 20))
    return view.open(sources)


def assert_view_reads(pages: Pages, view: SnapshotView, version: Version) -> None:
    assert_reads(open_elsewhere(pages, view), version)


def rewrite(pages: Pages, model: Model, name: str = "shop", numbers: range = range(20)) -> None:
    """Rewrite every page, checkpoint and merge it, and delete unreferenced artifacts whose grace has passed."""
    store = pages.database(name)
    for _ in range(2):
        write(store, model, {number: image() for number in numbers})
        pages.checkpoint(store)
    pages.run(JobKind.MERGE, store.db_id)
    pages.clock.advance(GRACE_SECONDS + 1)
    pages.run(JobKind.DELETE, store.db_id)


def test_a_version_is_not_stored_with_a_lease_that_has_ended(pages: Pages) -> None:
    """Hazard: the caller got `InvalidInput`, about an empty batch."""
    leases, store = pages.manifest.leases, pages.database("shop")
    with pytest.raises(LeaseExpired):
        leases.keep_views(99, {store.db_id: b"a view"})
    lease_id = leases.hold([LentVersion(store.db_id, 1)], SECONDS)
    leases.release(lease_id)
    with pytest.raises(LeaseExpired):
        leases.keep_views(lease_id, {store.db_id: b"a view"})


def _interrupt(_: str) -> None:
    raise KeyboardInterrupt


def zero_count(pages: Pages) -> int:
    with pages.manifest.read() as txn:
        return txn.count(t.GC_ZERO)


def lease_row_count(pages: Pages) -> int:
    with pages.manifest.read() as txn:
        return txn.count(t.SNAPSHOT_READERS)


def test_a_lent_version_can_be_read_until_its_lease_ends_and_is_deleted_then(pages: Pages) -> None:
    """In chunks and in the WAL, while everything is rewritten, absorbed and merged, and its files wait to be
    recycled."""
    model, store = Model(), pages.database()
    write(store, model, {number: image() for number in range(20)})
    pages.checkpoint(store)
    write(store, model, {3: image(), 17: image()})
    lease_id, (view,) = lend(pages.engine, ["shop"], SECONDS)
    version = model.newest
    for _ in range(4):
        rewrite(pages, model)
        pages.manifest.leases.renew(lease_id)
        assert_view_reads(pages, view, version)
    assert zero_count(pages) > 0, "artifacts of the lent version are kept"
    pages.clock.advance(SECONDS + 1)
    with pytest.raises(LeaseExpired):
        pages.manifest.leases.renew(lease_id)
    rewrite(pages, model)
    pages.clock.advance(GRACE_SECONDS + SECONDS)
    pages.worker().drain()
    assert (zero_count(pages), pages.manifest.leases.expire(), lease_row_count(pages)) == (0, 1, 0)
    with pytest.raises((Corruption, StorageFault, NotFound)):
        assert_view_reads(pages, view, version)


def test_lending_creates_no_snapshot_and_no_change(pages: Pages) -> None:
    """A few reads of 200 databases left 1,216 snapshots and 3,883 changes."""
    model, store = Model(), pages.database()
    write(store, model, {number: image() for number in range(20)})
    lend(pages.engine, ["shop"], SECONDS)
    head = pages.manifest.feed.head()
    for _ in range(50):
        lend(pages.engine, ["shop"], SECONDS)
    assert pages.manifest.feed.head() == head, "lending adds no change"
    assert pages.manifest.snapshots.of("shop") == []
    assert lease_row_count(pages) == pages.manifest.leases.count() == 51
    pages.clock.advance(SECONDS + 1)
    assert pages.manifest.leases.expire() == 51
    assert (lease_row_count(pages), pages.manifest.feed.head()) == (0, head)


def test_a_lease_does_not_block_checkpoints(pages: Pages) -> None:
    model, store = Model(), pages.database()
    write(store, model, {0: image()})
    lend(pages.engine, ["shop"], SECONDS)
    newer = write(store, model, {0: image()})
    assert pages.engine.floor(store.db_id) >= newer.lsn


def test_databases_of_one_lease_share_a_batch_and_a_renewal(pages: Pages, monkeypatch: pytest.MonkeyPatch) -> None:
    models = {name: Model() for name in ("a", "b", "c")}
    for name, model in models.items():
        write(pages.database(name), model, {number: image() for number in range(9)})
        pages.engine.flush(pages.database(name).db_id)
    submit, batches = pages.manifest.submit, list[int]()

    def count_ops(ops: Sequence[Op], **options: Any) -> ManifestGuard:
        batches.append(len(ops))
        return submit(ops, **options)

    with monkeypatch.context() as patched:
        patched.setattr(pages.manifest, "submit", count_ops)
        lease_id, views = lend(pages.engine, ["a", "b"], SECONDS)
    assert batches == [2]
    same_lease_id, more_views = lend(pages.engine, ["c"], SECONDS, lease_id=lease_id)
    assert same_lease_id == lease_id
    versions = {name: model.newest for name, model in models.items()}
    for name, model in models.items():
        rewrite(pages, model, name, range(9))
    for name, view in zip("abc", [*views, *more_views], strict=True):
        assert_view_reads(pages, view, versions[name])
    pages.manifest.leases.release(lease_id)
    pages.manifest.leases.release(lease_id)
    assert lease_row_count(pages) == 0


@pytest.mark.parametrize("is_killed", [False, True])
def test_a_lease_outlives_its_owner_for_one_duration(pages: Pages, is_killed: bool) -> None:
    """Readers that access files directly continue while the owner is down, however long that is."""
    model, store = Model(), pages.database()
    write(store, model, {number: image() for number in range(20)})
    lease_id, (view,) = lend(pages.engine, ["shop"], SECONDS)
    version = model.newest
    pages.die() if is_killed else pages.stop()
    pages.clock.advance(10 * SECONDS)
    pages.start()
    rewrite(pages, model)
    assert_view_reads(pages, view, version)
    pages.manifest.leases.renew(lease_id)
    pages.clock.advance(SECONDS - 1)
    rewrite(pages, model)
    pages.manifest.leases.expire()
    assert lease_row_count(pages) == 0, "rewriting advances the clock past the lease"
    pages.clock.advance(GRACE_SECONDS + SECONDS)
    pages.worker().drain()
    assert zero_count(pages) == 0


def test_a_crash_between_rows_and_response_leaves_a_lease_that_expires(pages: Pages) -> None:
    model, store = Model(), pages.database()
    write(store, model, {0: image()})
    with armed("manifest.lease.held", _interrupt), pytest.raises(KeyboardInterrupt):
        lend(pages.engine, ["shop"], SECONDS)
    pages.crash()
    assert (lease_row_count(pages), pages.manifest.leases.count()) == (1, 1)
    pages.clock.advance(SECONDS + 1)
    assert (pages.manifest.leases.expire(), lease_row_count(pages)) == (1, 0)


def test_a_closed_database_is_lent_without_opening_it(pages: Pages) -> None:
    model, store = Model(), pages.database()
    write(store, model, {number: image() for number in range(20)})
    pages.checkpoint(store)
    write(store, model, {3: image(), 17: image()})
    views_when_open = lend(pages.engine, ["shop"], SECONDS)[1]
    pages.stop()
    pages.start()
    lease_id, views = lend(pages.engine, ["shop"], SECONDS)
    assert list(pages.engine.stores()) == []
    assert views == views_when_open, "the same version as of an open database"
    version = model.newest
    for _ in range(2):
        rewrite(pages, model)
        pages.manifest.leases.renew(lease_id)
        assert_view_reads(pages, views[0], version)


def test_a_closed_database_with_an_open_log_is_opened_to_be_lent(pages: Pages) -> None:
    model, store = Model(), pages.database()
    write(store, model, {number: image() for number in range(20)})
    pages.die()
    pages.start()
    _, (view,) = lend(pages.engine, ["shop"], SECONDS)
    assert len(list(pages.engine.stores())) == 1
    assert_view_reads(pages, view, model.newest)


def test_a_database_opened_and_written_while_it_is_lent_is_lent_consistently(pages: Pages) -> None:
    """New leaves with an old log would not be a consistent version."""
    model, store = Model(), pages.database()
    write(store, model, {number: image() for number in range(20)})
    lend(pages.engine, ["shop"], SECONDS)
    pages.stop()
    pages.start()
    calls: list[str] = []

    def write_once(name: str) -> None:
        calls.append(name)
        if len(calls) == 1:
            write(again := pages.database(), model, {number: image() for number in range(0, 20, 2)})
            pages.checkpoint(again)
            write(again, model, {1: image()})

    with armed("manifest.lease.held", write_once):
        _, (view,) = lend(pages.engine, ["shop"], SECONDS)
    assert len(calls) == 2, "lent again as an open database"
    assert_view_reads(pages, view, model.newest)


def test_looking_up_what_a_lease_needs_is_as_fast_for_many_databases_as_for_few(pages: Pages) -> None:
    """Deletion checks this for each artifact."""
    leases, template = pages.manifest.leases, pages.database().db_id

    def measure(count: int) -> float:
        lease_id = leases.hold([LentVersion(template, 1)], SECONDS)
        for number in range(count):
            leases.record_origins(lease_id, template + number, {template, template + number})
        assert leases.kept_since(template + count - 1) is not None
        start = time.perf_counter()
        assert [leases.kept_since(template + count + number) for number in range(200)] == [None] * 200
        elapsed = time.perf_counter() - start
        leases.release(lease_id)
        return elapsed

    few = min(measure(10) for _ in range(3))
    assert min(measure(20_000) for _ in range(3)) < 30 * few


def test_artifacts_are_released_with_the_last_lent_version_that_needs_them(pages: Pages) -> None:
    leases, template = pages.manifest.leases, pages.database().db_id
    forks = [pages.engine.fork("shop", f"fork-{number}") for number in range(2)]
    lease_id = leases.hold([LentVersion(fork, 1) for fork in forks], SECONDS)
    for fork in forks:
        leases.record_origins(lease_id, fork, {fork, template})
    leases.release_versions([(lease_id, forks[0])])
    assert leases.kept_since(forks[0]) is None
    assert leases.kept_since(template) is not None, "the other version still needs it"
    leases.record_origins(lease_id, forks[1], {forks[1]})
    assert leases.kept_since(template) is None
    assert leases.kept_since(forks[1]) is not None


def test_artifacts_at_zero_before_a_lease_are_deleted_while_it_lives(pages: Pages) -> None:
    """A database that is always being read must not keep its garbage forever."""
    model, store = Model(), pages.database()
    write(store, model, {number: image() for number in range(20)})
    pages.checkpoint(store)
    for _ in range(6):
        pages.clock.advance(GRACE_SECONDS + 1)
        lend(pages.engine, ["shop"], SECONDS)
        rewrite(pages, model)
    waiting = zero_count(pages)
    for _ in range(12):
        lend(pages.engine, ["shop"], SECONDS)
        pages.clock.advance(2 * GRACE_SECONDS)
        rewrite(pages, model)
    assert zero_count(pages) <= 2 * waiting


def test_a_lent_fork_keeps_artifacts_of_its_origins(pages: Pages) -> None:
    model, store = Model(), pages.database()
    write(store, model, {number: image() for number in range(20)})
    pages.checkpoint(store)
    write(store, model, {2: image()})
    pages.engine.fork("shop", "branch")
    version = model.newest
    _, (view,) = lend(pages.engine, ["branch"], SECONDS)
    branch = model.copy(version.lsn)
    rewrite(pages, model)
    rewrite(pages, branch, "branch")
    assert_view_reads(pages, view, version)


def test_a_damaged_row_keeps_everything_for_a_while(pages: Pages) -> None:
    """Nothing is deleted because of an unreadable row, and a reader's row does not prevent opening a database."""
    model, store = Model(), pages.database()
    write(store, model, {number: image() for number in range(20)})
    pages.checkpoint(store)
    write(store, model, {1: image()})
    lease_id, (view,) = lend(pages.engine, ["shop"], SECONDS)
    version = model.newest
    key = t.SNAPSHOT_READERS.key.pack(store.db_id, lease_id)
    env = pages.manifest.env
    with env.begin_write() as txn:
        stored = txn.get(key, db=env.handles[t.SNAPSHOT_READERS.name])
        assert stored is not None
        raw = bytearray(stored)
        raw[8] ^= 1
        txn.put(key, bytes(raw), db=env.handles[t.SNAPSHOT_READERS.name])
    pages.stop(check=False)
    pages.start()
    assert pages.engine.floor(store.db_id) == 0
    rewrite(pages, model)
    pages.clock.advance(2 * SECONDS)
    rewrite(pages, model)
    assert_view_reads(pages, view, version)
    pages.manifest.submit([DropReader(store.db_id, lease_id)]).result()  # what a repair does


@pytest.mark.parametrize("seconds", [0, -1, 8 * 24 * 3_600])
def test_a_version_is_lent_for_seven_days_at_most(pages: Pages, seconds: float) -> None:
    write(pages.database(), Model(), {0: image()})
    with pytest.raises(InvalidInput):
        lend(pages.engine, ["shop"], seconds)
    assert lease_row_count(pages) == 0


@pytest.mark.parametrize("seed", range(8))
def test_a_live_lease_reads_its_version_after_any_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """Writes, checkpoints, merges, deletions, restarts and clock steps in any order, with several leases at once."""
    small_segments(monkeypatch)
    rng, pages = random.Random(seed), Pages(tmp_path)
    models = {"shop": Model(), "blog": Model()}
    lent: dict[int, tuple[str, SnapshotView, Version, float]] = {}
    for name, model in models.items():
        write(pages.database(name), model, {number: image() for number in range(12)})
    for _ in range(60):
        name = rng.choice([*models])
        store, model = pages.database(name), models[name]
        match rng.randrange(8):
            case 0 | 1:
                write(store, model, {rng.randrange(20): image() for _ in range(rng.randrange(1, 9))})
            case 2:
                pages.checkpoint(store)
            case 3:
                pages.run(JobKind.MERGE, store.db_id)
            case 4:
                seconds = rng.choice([70.0, 200.0])
                lease_id, (view,) = lend(pages.engine, [name], seconds)
                lent[lease_id] = (name, view, model.newest, pages.clock.monotonic() + seconds)
            case 5:
                pages.clock.advance(rng.choice([1, 61, 100]))
                pages.manifest.leases.expire()
                pages.worker().drain()
            case 6 if lent:
                lease_id = rng.choice([*lent])
                name, view, version, until = lent[lease_id]
                if until > pages.clock.monotonic():
                    pages.manifest.leases.renew(lease_id)
                    until = max(until, pages.clock.monotonic() + 70.0)
                lent[lease_id] = (name, view, version, until)
            case 7:
                pages.crash() if rng.random() < 0.5 else pages.reopen()
        for _, view, version, until in lent.values():
            if until > pages.clock.monotonic():
                assert_view_reads(pages, view, version)
    pages.clock.advance(1_000)
    pages.manifest.leases.expire()
    pages.clock.advance(GRACE_SECONDS + 1)
    pages.worker().drain()
    assert lease_row_count(pages) == 0
    pages.stop()


@pytest.mark.parametrize("step", ["_view", "origins_of"])
def test_a_lend_that_fails_holds_nothing(pages: Pages, monkeypatch: pytest.MonkeyPatch, step: str) -> None:
    """Hazard: if a view could not be read after its lease was taken, the lease kept artifacts for a reader that did not exist,
    until it expired."""
    store = pages.database()
    write(store, Model(), {0: image()})

    def fail(*_: object) -> None:
        raise ManifestDamaged("a row is damaged")

    with monkeypatch.context() as patch:
        patch.setattr(anchors, step, fail)
        with pytest.raises(ManifestDamaged):
            pages.engine.lend(["shop"], 600)
    assert pages.manifest.leases.kept_since(store.db_id) is None
    pages.engine.lend(["shop"], 600)
    assert pages.manifest.leases.kept_since(store.db_id) is not None
