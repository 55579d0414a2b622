"""A key-value set is rolled back in place: as a new version, undoable, and atomic wherever the process is killed."""

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
from tests.fork_server import ForkServer
from tests.sqlite.killed import SETTINGS

DONE = "lsm.rollback.published"
POINTS = ("lsm.copy.linked", "manifest.commit.durable", "lsm.rollback.kept", DONE)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[quire.Store]:
    with quire.open(tmp_path / "store", settings=SETTINGS) as store:
        yield store
        assert_clean(store.manifest)


def content(store: quire.Store) -> dict[bytes, bytes]:
    return dict(store.kv("cart").scan())


def test_a_rollback_undoes_later_writes_and_can_be_undone(store: quire.Store) -> None:
    cart = store.kv("cart", create=True)
    cart.write({b"ann": b"1", b"bob": b"2", b"cyd": b"3"})
    store.snapshot("cart", "monday")
    monday = content(store)
    cart.write({b"ann": b"9", b"bob": None, b"dan": b"4"})
    later = content(store)
    result = store.rollback("cart", to="monday")
    assert content(store) == monday
    assert (result.changed_keys, result.changed_pages, result.lsn > result.before_lsn >= result.to_lsn) == (3, 0, True)
    again = store.rollback("cart", to="monday")
    assert (again.changed_keys, again.snapshot) == (0, "")
    assert [info.name for info in store.manifest.snapshots.of("cart")] == ["monday", result.snapshot]
    cart.put(b"eve", b"5")
    assert store.rollback("cart", to=result.snapshot).changed_keys == 4
    assert content(store) == later
    actions = [entry.action for entry in store.manifest.audit(result.db_id)]
    assert actions.count(AuditAction.ROLLED_BACK) == 2


@pytest.mark.parametrize("seed", range(5))
def test_any_history_is_rolled_back(store: quire.Store, seed: int) -> None:
    rng, cart = random.Random(seed), store.kv("cart", create=True)
    contents: dict[str, dict[bytes, bytes]] = {}
    for step in range(40):
        keys = [b"%03d" % rng.randrange(60) for _ in range(rng.randrange(1, 30))]
        cart.write({key: None if rng.random() < 0.3 else rng.randbytes(rng.choice((0, 5, 3_000))) for key in keys})
        match rng.randrange(8):
            case 0:
                store.snapshot("cart", f"at-{step}")
                contents[f"at-{step}"] = content(store)
            case 1:
                cart.flush()
            case 2:
                cart.compact()
            case 3 if contents:
                name, before = rng.choice(sorted(contents)), content(store)
                result = store.rollback("cart", to=name)
                assert content(store) == contents[name]
                if result.snapshot:
                    contents[result.snapshot] = before
    store.kvs.close_database("cart")
    for name in sorted(contents):
        store.rollback("cart", to=name)
        assert content(store) == contents[name]


def test_writes_during_a_rollback_are_kept(store: quire.Store) -> None:
    cart = store.kv("cart", create=True)
    cart.write({b"ann": b"1", b"bob": b"2"})
    store.snapshot("cart", "monday")
    cart.write({b"ann": b"9", b"cyd": b"9"})

    def write(_: str) -> None:
        cart.write({b"ann": b"new", b"dan": b"new"})

    with armed("lsm.rollback.kept", write):
        store.rollback("cart", to="monday")
    assert content(store) == {b"ann": b"new", b"bob": b"2", b"dan": b"new"}


def test_a_failed_rollback_leaves_nothing(store: quire.Store) -> None:
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


def test_a_rollback_that_is_interrupted_after_its_event_can_be_undone(tmp_path: Path) -> None:
    """Hazard: the interruption dropped the snapshot although the rollback was durable, and the former values were lost."""

    def interrupt(_: str) -> None:
        raise KeyboardInterrupt

    with quire.open(tmp_path / "store", settings=SETTINGS) as store:
        cart = store.kv("cart", create=True)
        cart.put(b"ann", b"1")
        store.snapshot("cart", "monday")
        cart.put(b"ann", b"2")
        with armed("lsm.load.recorded", interrupt), pytest.raises(KeyboardInterrupt):
            store.rollback("cart", to="monday")
    with quire.open(tmp_path / "store", settings=SETTINGS) as store:
        assert content(store) == {b"ann": b"1"}
        (kept,) = (info.name for info in store.manifest.snapshots.of("cart") if info.name != "monday")
        store.rollback("cart", to=kept)
        assert content(store) == {b"ann": b"2"}
        assert_clean(store.manifest)


def test_a_rollback_that_fails_before_its_event_leaves_no_snapshot(store: quire.Store) -> None:
    cart = store.kv("cart", create=True)
    cart.put(b"ann", b"1")
    store.snapshot("cart", "monday")
    cart.put(b"ann", b"2")
    with armed("lsm.load.flushed", "raise:EIO"), pytest.raises(OSError, match="failpoint"):
        store.rollback("cart", to="monday")
    assert content(store) == {b"ann": b"2"}
    assert [info.name for info in store.manifest.snapshots.of("cart")] == ["monday"]


def test_killed_at_every_step(tmp_path: Path) -> None:
    root, killed = tmp_path / "store", set[str]()
    with quire.open(root, settings=SETTINGS) as store:
        cart = store.kv("cart", create=True)
        cart.write({b"ann": b"1", b"bob": b"2"})
        store.snapshot("cart", "monday")
        monday = content(store)
        cart.write({b"ann": b"9", b"bob": None, b"dan": b"4"})
        later = content(store)
    with ForkServer("tests.lsm.killed_rollback:run", warm_up="tests.sqlite.killed:warm_up") as fork_server:
        for point in POINTS:
            if fork_server.is_killed({"root": str(root), "failpoints": f"{point}=kill"}):
                killed.add(point)
            with quire.open(root, settings=SETTINGS) as store:
                assert_clean(store.manifest)
                snapshots = [info.name for info in store.manifest.snapshots.of("cart") if info.name != "monday"]
                if (
                    content(store) == monday
                ):  # the rollback was published: the former content is kept as a snapshot and can be restored
                    store.rollback("cart", to=snapshots[-1])
                assert content(store) == later, point
                assert point != DONE or snapshots, "a published rollback keeps a snapshot"
                for info in store.manifest.snapshots.of("cart"):
                    if info.name != "monday":
                        store.manifest.snapshots.drop("cart", info.snapshot_id)
    assert killed >= {"lsm.rollback.kept", "lsm.copy.linked", DONE}
