"""A clone begins as its parent was, goes on by itself, and its parent keeps what it reads."""

from __future__ import annotations

import shutil
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

import quire
from quire.archive import clones
from quire.archive.clones import registrations, release
from quire.cli.main import run
from quire.core.errors import ConfigMismatch, InvalidInput, ObjectNotFound, StillReferenced
from quire.durable.failpoints import armed
from quire.objects.open import open_store
from quire.store.cloning import clone, release_clone
from quire.store.store import Store
from quire.testing.clock import ManualClock
from tests.archive.world import World, contents, fill, world

HOUR = 3_600.0


def work(store: Store, start: int) -> None:
    fill(store, start)
    store.kv("pairs").flush()
    store.snapshot("shop", f"at-{start}")
    store.checkpoint("shop")


def made(here: World, name: str, source: Path | None = None, **arguments: Any) -> Path:
    clone(source or here.root, here.home / name, **arguments)
    return here.home / name


def objects_below(here: World, store_id: str) -> dict[str, bytes]:
    root = here.bucket / store_id
    return {
        str(path.relative_to(root)): path.read_bytes()
        for path in root.rglob("*")
        if path.is_file() and "clones" not in path.parts
    }


def test_a_clone_begins_as_its_parent_was_and_both_go_on(tmp_path: Path) -> None:
    with world(tmp_path) as here:
        work(here.store, 0)
        here.archived()
        expected = contents(here.store)
        parent_id = here.store.feed.store_id()
        path = made(here, "clone")
        before = objects_below(here, parent_id)
        with here.open(path) as copy:
            assert copy.manifest.check() == []
            assert contents(copy) == expected
            assert copy.feed.store_id() != parent_id
            work(copy, 20)
            copy.maintain()
            own = contents(copy)
            assert set(own["shop"]) == set(range(40))
            copy.archive.wait(30)  # type: ignore[union-attr]
        assert objects_below(here, parent_id) == before, "a clone wrote or deleted below its parent's prefix"
        work(here.store, 100)
        assert set(contents(here.store)["shop"]) == {*range(20), *range(100, 120)}
        with here.open(path) as copy:
            assert contents(copy) == own


def test_a_clone_of_an_earlier_moment_and_from_a_url(tmp_path: Path) -> None:
    with world(tmp_path) as here:
        work(here.store, 0)
        here.archived()
        expected, at_ms = contents(here.store), here.headers()[-1].at_ms
        work(here.store, 20)
        here.archived()
        clone(str(here.bucket), tmp_path / "clone", at_ms=at_ms)
        with quire.open(tmp_path / "clone") as copy:
            assert contents(copy) == expected


def test_a_clone_is_restored_from_its_own_archive(tmp_path: Path) -> None:
    with world(tmp_path) as here:
        work(here.store, 0)
        here.archived()
        path = made(here, "clone")
        with here.open(path) as copy:
            work(copy, 20)
            clone_id, expected = copy.feed.store_id(), contents(copy)
        shutil.rmtree(path)
        quire.restore(str(here.bucket), path, store_id=clone_id, takeover=True)
        with here.open(path) as copy:
            assert copy.manifest.check() == []
            assert contents(copy) == expected


def test_a_clone_of_a_clone_reads_through_both(tmp_path: Path) -> None:
    with world(tmp_path) as here:
        work(here.store, 0)
        here.archived()
        first = made(here, "first")
        with here.open(first) as copy:
            work(copy, 20)
            copy.archive.wait(30)  # type: ignore[union-attr]
            expected, first_id = contents(copy), copy.feed.store_id()
        second = made(here, "second", first)
        with here.open(second) as copy:
            assert copy.manifest.check() == []
            assert contents(copy) == expected
            second_id = copy.feed.store_id()
            work(copy, 40)
            copy.maintain()
            expected = contents(copy)
        with closing(open_store(str(here.bucket))) as bucket:
            parents = [here.store.feed.store_id(), first_id]
            assert [[entry.clone_id for entry in registrations(bucket, parent)] for parent in parents] == [
                sorted([first_id, second_id], key=lambda name: (registered_at(here, parents[0], name), name)),
                [second_id],
            ]
        with here.open(second) as copy:
            assert contents(copy) == expected


def registered_at(here: World, parent_id: str, clone_id: str) -> int:
    with closing(open_store(str(here.bucket))) as bucket:
        return next(entry.at_ms for entry in registrations(bucket, parent_id) if entry.clone_id == clone_id)


def test_the_parent_keeps_what_a_clone_reads_until_it_lets_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clones, "LIST_SECONDS", 0.0)
    monkeypatch.setattr(clones, "CLOCK_MS", 1 << 60)  # objects have the machine's time, the store has another
    clock = ManualClock()
    with world(tmp_path, clock=clock, retain_seconds=2 * HOUR, base_seconds=0.001) as here:
        work(here.store, 0)
        here.archived()
        expected = contents(here.store)
        path = made(here, "clone", clock=clock)
        parent_id = here.store.feed.store_id()
        before = set(objects_below(here, parent_id))
        for name in ("shop", "pairs", "events"):
            here.store.drop(name, snapshots=True)
        collect(here, clock)
        with here.open(path) as copy:
            assert contents(copy) == expected
            clone_id = copy.feed.store_id()
        kept = set(objects_below(here, parent_id))
        with closing(open_store(str(here.bucket))) as bucket:
            release(bucket, parent_id, clone_id)
        collect(here, clock)
        gone = kept - set(objects_below(here, parent_id))
        assert {key for key in gone & before if key.startswith("e/")}, "no chunk was kept for the clone"
        assert {key for key in gone & before if "/file/" in key}, "no table was kept for the clone"


def collect(here: World, clock: ManualClock) -> None:
    """Time passes: jobs delete, bases come, and what the window does not need goes."""
    for number in range(4):
        clock.advance(24 * HOUR)
        here.store.maintain()
        here.archiver._needs_base = True
        here.store.kv("other", create=True).put(b"key", b"%d" % number)
        here.archived()
        here.store._parts.window.look(now=True)


def test_a_clone_lets_go_only_of_what_it_does_not_read(tmp_path: Path) -> None:
    with world(tmp_path) as here:
        work(here.store, 0)
        here.archived()
        path = made(here, "clone")
        with pytest.raises(StillReferenced, match="still reads"):
            release_clone(path)
    with pytest.raises(InvalidInput, match="not a clone"):
        release_clone(here.root)


@pytest.mark.parametrize("step", ["clone.registered", "clone.made"])
def test_a_clone_that_fails_leaves_no_registration(tmp_path: Path, step: str) -> None:
    with world(tmp_path) as here:
        fill(here.store, 0)
        here.archived()
        with armed(step, "1*raise:EIO"), pytest.raises(OSError, match="failpoint"):
            made(here, "clone")
        with closing(open_store(str(here.bucket))) as bucket:
            assert registrations(bucket, here.store.feed.store_id()) == []
        made(here, "again")


def test_a_clone_needs_a_directory_of_its_own(tmp_path: Path) -> None:
    with world(tmp_path) as here:
        fill(here.store, 0)
        here.archived()
        with pytest.raises(InvalidInput, match="not empty"):
            made(here, "bucket")


def test_a_backup_of_a_clone_is_whole_without_its_parent(tmp_path: Path) -> None:
    with world(tmp_path) as here:
        work(here.store, 0)
        here.store.stream("events").seal()
        here.store.stream("events").upload()
        here.store.evict("shop")
        here.archived()
        path = made(here, "clone")
    with here.open(path) as copy:
        work(copy, 20)
        expected = contents(copy)
        copy.backup(str(tmp_path / "backup"))
    shutil.rmtree(here.bucket)
    quire.restore(str(tmp_path / "backup"), tmp_path / "independent")
    with quire.open(tmp_path / "independent") as store:
        assert contents(store) == expected
        store.heavy.verify(runner="threads")
        assert store.heavy.damaged() == []


def test_a_clone_stays_in_its_parents_bucket(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Naming another one in quire.toml is refused; the way there is a backup, as the documentation says."""
    with world(tmp_path) as here:
        here.store.kv("pairs", create=True).put(
            b"key", b"value"
        )  # its table is in the bucket, and no row of the manifest names it
        here.store.kv("pairs").flush()
        here.archived()
        path = made(here, "clone")
    config, other = path / "quire.toml", tmp_path / "other"
    config.write_text(config.read_text().replace(str(here.bucket), str(other)))
    with pytest.raises(ConfigMismatch, match="objects are not at the location"):
        quire.open(path)
    assert run(["objects", "moved", "--yes", "--store", str(path)]) != 0
    assert "those of a clone's parents" in capsys.readouterr().err
    config.write_text(config.read_text().replace(str(other), str(here.bucket)))
    with here.open(path) as copy:
        assert copy.kv("pairs").get(b"key") == b"value"
        work(copy, 0)
        expected = contents(copy)
    backup, home = str(tmp_path / "copy.backup"), tmp_path / "independent"
    assert run(["backup", backup, "--store", str(path)]) == 0
    assert run(["restore-store", backup, str(home)]) == 0
    shutil.copytree(home / "objects", other)
    config = home / "quire.toml"
    config.write_text(config.read_text().replace('object_store = ""', f'object_store = "{other}"'))
    assert run(["objects", "moved", "--yes", "--store", str(home)]) == 0
    for gone in (here.bucket, home / "objects"):
        shutil.rmtree(gone)
    assert run(["archive", "on", "--store", str(home)]) == 0
    restored = quire.restore(str(other), tmp_path / "restored")
    with quire.open(restored.path, "r") as store:
        assert contents(store) == expected


def test_a_hole_in_the_log_of_a_replica_is_named(tmp_path: Path) -> None:
    with world(tmp_path) as here:
        for start in (0, 20, 40):
            fill(here.store, start)
            here.archived()
    here.log_path(here.headers()[-2].position).unlink()
    with pytest.raises(ObjectNotFound, match="missing in the middle") as caught:
        here.restore("holed")
    assert "--at" in caught.value.hint
