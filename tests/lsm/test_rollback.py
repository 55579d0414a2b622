"""A key-value set is set back in place: as a new version, undoable, and whole wherever a process is killed."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

import quire
from quire.core.errors import InvalidInput, ReadOnly, UnknownSnapshot
from quire.durable.failpoints import armed
from quire.manifest.records import AuditAction
from quire.testing.manifest import assert_clean
from tests.nursery import Nursery
from tests.sqlite.killed import SETTINGS

DONE = "lsm.rollback.published"
POINTS = ("lsm.copy.linked", "manifest.commit.durable", "lsm.rollback.kept", DONE)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[quire.Store]:
    with quire.open(tmp_path / "store", settings=SETTINGS) as made:
        yield made
        assert_clean(made.manifest)


def content(store: quire.Store) -> dict[bytes, bytes]:
    return dict(store.kv("cart").scan())


def test_what_happened_since_is_undone_and_the_undoing_too(store: quire.Store) -> None:
    cart = store.kv("cart", create=True)
    cart.write({b"ann": b"1", b"bob": b"2", b"cyd": b"3"})
    store.snapshot("cart", "monday")
    monday = content(store)
    cart.write({b"ann": b"9", b"bob": None, b"dan": b"4"})
    later = content(store)
    done = store.rollback("cart", to="monday")
    assert content(store) == monday
    assert (done.changed_keys, done.changed_pages, done.lsn > done.before_lsn >= done.to_lsn) == (3, 0, True)
    again = store.rollback("cart", to="monday")
    assert (again.changed_keys, again.snapshot) == (0, "")
    assert [info.name for info in store.manifest.snapshots.of("cart")] == ["monday", done.snapshot]
    cart.put(b"eve", b"5")
    assert store.rollback("cart", to=done.snapshot).changed_keys == 4
    assert content(store) == later
    noted = [entry.action for entry in store.manifest.audit(done.db_id)]
    assert noted.count(AuditAction.ROLLED_BACK) == 2


@pytest.mark.parametrize("seed", range(5))
def test_any_history_is_set_back(store: quire.Store, seed: int) -> None:
    rng, cart = random.Random(seed), store.kv("cart", create=True)
    kept: dict[str, dict[bytes, bytes]] = {}
    for step in range(40):
        keys = [b"%03d" % rng.randrange(60) for _ in range(rng.randrange(1, 30))]
        cart.write({key: None if rng.random() < 0.3 else rng.randbytes(rng.choice((0, 5, 3_000))) for key in keys})
        match rng.randrange(8):
            case 0:
                store.snapshot("cart", f"at-{step}")
                kept[f"at-{step}"] = content(store)
            case 1:
                cart.flush()
            case 2:
                cart.compact()
            case 3 if kept:
                name, before = rng.choice(sorted(kept)), content(store)
                done = store.rollback("cart", to=name)
                assert content(store) == kept[name]
                if done.snapshot:
                    kept[done.snapshot] = before
    store.kvs.close_database("cart")
    for name in sorted(kept):
        store.rollback("cart", to=name)
        assert content(store) == kept[name]


def test_what_is_written_meanwhile_stays(store: quire.Store) -> None:
    cart = store.kv("cart", create=True)
    cart.write({b"ann": b"1", b"bob": b"2"})
    store.snapshot("cart", "monday")
    cart.write({b"ann": b"9", b"cyd": b"9"})

    def write(_: str) -> None:
        cart.write({b"ann": b"new", b"dan": b"new"})

    with armed("lsm.rollback.kept", write):
        store.rollback("cart", to="monday")
    assert content(store) == {b"ann": b"new", b"bob": b"2", b"dan": b"new"}


def test_an_attempt_that_fails_leaves_nothing(store: quire.Store) -> None:
    cart = store.kv("cart", create=True)
    cart.put(b"ann", b"1")
    store.snapshot("cart", "monday")
    cart.put(b"ann", b"2")
    store.set_status("cart", "read_only")
    with pytest.raises(ReadOnly):
        store.rollback("cart", to="monday")
    store.set_status("cart", "active")
    with pytest.raises(UnknownSnapshot):
        store.rollback("cart", to="mundey")
    with pytest.raises(InvalidInput, match="one of its snapshots"):
        store.rollback("cart", to="2 hours ago")
    assert content(store) == {b"ann": b"2"}
    assert [info.name for info in store.manifest.snapshots.of("cart")] == ["monday"]
    anonymous = store.snapshot("cart")
    cart.put(b"ann", b"3")
    store.rollback("cart", to=anonymous.anchor_lsn)
    assert content(store) == {b"ann": b"2"}


def test_killed_at_every_step(tmp_path: Path) -> None:
    root, killed = tmp_path / "store", set[str]()
    with quire.open(root, settings=SETTINGS) as store:
        cart = store.kv("cart", create=True)
        cart.write({b"ann": b"1", b"bob": b"2"})
        store.snapshot("cart", "monday")
        monday = content(store)
        cart.write({b"ann": b"9", b"bob": None, b"dan": b"4"})
        later = content(store)
    with Nursery("tests.lsm.killed_rollback:run", warm_up="tests.sqlite.killed:warm_up") as nursery:
        for point in POINTS:
            if nursery.is_killed({"root": str(root), "failpoints": f"{point}=kill"}):
                killed.add(point)
            with quire.open(root, settings=SETTINGS) as store:
                assert_clean(store.manifest)
                kept = [info.name for info in store.manifest.snapshots.of("cart") if info.name != "monday"]
                if content(store) == monday:  # as far as the publication came: what was before is kept, and comes back
                    store.rollback("cart", to=kept[-1])
                assert content(store) == later, point
                assert point != DONE or kept, "it was published"
                for info in store.manifest.snapshots.of("cart"):
                    if info.name != "monday":
                        store.manifest.snapshots.drop("cart", info.snapshot_id)
    assert killed >= {"lsm.rollback.kept", "lsm.copy.linked", DONE}
