"""A clone starts with its parent's state, continues independently, and its parent keeps the objects that the clone
reads."""

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
from quire.durable.files import OsDisk
from quire.objects.open import open_store
from quire.store.cloning import clone, release_clone
from quire.store.config_edit import change_config
from quire.store.store import Store
from quire.testing.clock import ManualClock
from tests.archive.archived_store import ArchivedStore, archived_store, contents, fill

HOUR = 3_600.0


def work(store: Store, start: int) -> None:
    fill(store, start)
    store.kv("pairs").flush()
    store.snapshot("shop", f"at-{start}")
    store.checkpoint("shop")


def create_clone(archived: ArchivedStore, name: str, source: Path | None = None, **arguments: Any) -> Path:
    clone(source or archived.root, archived.home / name, **arguments)
    return archived.home / name


def objects_below(archived: ArchivedStore, store_id: str) -> dict[str, bytes]:
    root = archived.bucket / store_id
    return {
        str(path.relative_to(root)): path.read_bytes()
        for path in root.rglob("*")
        if path.is_file() and "clones" not in path.parts
    }


def test_a_clone_starts_with_its_parents_state_and_both_continue(tmp_path: Path) -> None:
    with archived_store(tmp_path) as archived:
        work(archived.store, 0)
        archived.wait_archived()
        expected = contents(archived.store)
        parent_id = archived.store.feed.store_id()
        path = create_clone(archived, "clone")
        before = objects_below(archived, parent_id)
        with archived.open(path) as copy:
            assert copy.manifest.check() == []
            assert contents(copy) == expected
            assert copy.feed.store_id() != parent_id
            work(copy, 20)
            copy.maintain()
            original = contents(copy)
            assert set(original["shop"]) == set(range(40))
            copy.archive.wait(30)  # type: ignore[union-attr]
        assert objects_below(archived, parent_id) == before, "a clone wrote or deleted below its parent's prefix"
        work(archived.store, 100)
        assert set(contents(archived.store)["shop"]) == {*range(20), *range(100, 120)}
        with archived.open(path) as copy:
            assert contents(copy) == original


def test_a_clone_of_an_earlier_moment_and_from_a_url(tmp_path: Path) -> None:
    with archived_store(tmp_path) as archived:
        work(archived.store, 0)
        archived.wait_archived()
        expected, at_ms = contents(archived.store), archived.headers()[-1].at_ms
        work(archived.store, 20)
        archived.wait_archived()
        clone(str(archived.bucket), tmp_path / "clone", at_ms=at_ms)
        with quire.open(tmp_path / "clone") as copy:
            assert contents(copy) == expected


def test_a_clone_is_restored_from_its_own_archive(tmp_path: Path) -> None:
    with archived_store(tmp_path) as archived:
        work(archived.store, 0)
        archived.wait_archived()
        path = create_clone(archived, "clone")
        with archived.open(path) as copy:
            work(copy, 20)
            clone_id, expected = copy.feed.store_id(), contents(copy)
        shutil.rmtree(path)
        quire.restore(str(archived.bucket), path, store_id=clone_id, takeover=True)
        with archived.open(path) as copy:
            assert copy.manifest.check() == []
            assert contents(copy) == expected


def test_a_clone_of_a_clone_reads_through_both(tmp_path: Path) -> None:
    with archived_store(tmp_path) as archived:
        work(archived.store, 0)
        archived.wait_archived()
        first = create_clone(archived, "first")
        with archived.open(first) as copy:
            work(copy, 20)
            copy.archive.wait(30)  # type: ignore[union-attr]
            expected, first_id = contents(copy), copy.feed.store_id()
        second = create_clone(archived, "second", first)
        with archived.open(second) as copy:
            assert copy.manifest.check() == []
            assert contents(copy) == expected
            second_id = copy.feed.store_id()
            work(copy, 40)
            copy.maintain()
            expected = contents(copy)
        with closing(open_store(str(archived.bucket))) as bucket:
            parents = [archived.store.feed.store_id(), first_id]
            assert [[entry.clone_id for entry in registrations(bucket, parent)] for parent in parents] == [
                sorted([first_id, second_id], key=lambda name: (registered_at(archived, parents[0], name), name)),
                [second_id],
            ]
        with archived.open(second) as copy:
            assert contents(copy) == expected


def registered_at(archived: ArchivedStore, parent_id: str, clone_id: str) -> int:
    with closing(open_store(str(archived.bucket))) as bucket:
        return next(entry.at_ms for entry in registrations(bucket, parent_id) if entry.clone_id == clone_id)


def test_the_parent_keeps_what_a_clone_reads_until_it_is_released(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(clones, "CLOCK_MS", 1 << 60)  # objects carry the machine's time, the store uses another clock
    clock = ManualClock()
    with archived_store(tmp_path, clock=clock, retain_seconds=2 * HOUR, base_seconds=0.001) as archived:
        work(archived.store, 0)
        archived.wait_archived()
        expected = contents(archived.store)
        path = create_clone(archived, "clone", clock=clock)
        parent_id = archived.store.feed.store_id()
        before = set(objects_below(archived, parent_id))
        for name in ("shop", "pairs", "events"):
            archived.store.drop(name, snapshots=True)
        collect(archived, clock)
        with archived.open(path) as copy:
            assert contents(copy) == expected
            clone_id = copy.feed.store_id()
        objects_before = set(objects_below(archived, parent_id))
        with closing(open_store(str(archived.bucket))) as bucket:
            release(bucket, parent_id, clone_id)
        collect(archived, clock)
        deleted = objects_before - set(objects_below(archived, parent_id))
        assert {key for key in deleted & before if key.startswith("e/")}, "no chunk was kept for the clone"
        assert {key for key in deleted & before if "/file/" in key}, "no table was kept for the clone"


def collect(archived: ArchivedStore, clock: ManualClock) -> None:
    """Advance time: jobs delete, bases are written, and objects outside the window are removed."""
    for number in range(4):
        clock.advance(24 * HOUR)
        archived.store.maintain()
        archived.archiver._needs_base = True
        archived.store.kv("other", create=True).put(b"key", b"%d" % number)
        archived.wait_archived()
        archived.store._parts.window.look(now=True)


def test_a_clone_releases_only_what_it_does_not_read(tmp_path: Path) -> None:
    with archived_store(tmp_path) as archived:
        work(archived.store, 0)
        archived.wait_archived()
        path = create_clone(archived, "clone")
        with pytest.raises(StillReferenced, match="still reads"):
            release_clone(path)
    with pytest.raises(InvalidInput, match="not a clone"):
        release_clone(archived.root)


def test_a_failed_clone_leaves_no_registration(tmp_path: Path) -> None:
    with archived_store(tmp_path) as archived:
        fill(archived.store, 0)
        archived.wait_archived()
        with armed("clone.registered", "1*raise:EIO"), pytest.raises(OSError, match="failpoint"):
            create_clone(archived, "clone")
        with closing(open_store(str(archived.bucket))) as bucket:
            assert registrations(bucket, archived.store.feed.store_id()) == []
        create_clone(archived, "again")


def test_a_clone_that_fails_before_its_own_epoch_writes_nothing_below_its_parents_prefix(tmp_path: Path) -> None:
    """Hazard: the directory opened as a store in its parent's owner epoch, without a registration. Its chunks got names that
    the parent gives to other chunks, and the parent deleted objects that it reads."""
    with archived_store(tmp_path) as archived:
        work(archived.store, 0)
        archived.wait_archived()
        expected, parent_id = contents(archived.store), archived.store.feed.store_id()
        before = objects_below(archived, parent_id)
        with armed("clone.made", "1*raise:EIO"), pytest.raises(OSError, match="failpoint"):
            create_clone(archived, "clone")
        path = archived.home / "clone"
        with closing(open_store(str(archived.bucket))) as bucket:
            assert [clone.path for clone in registrations(bucket, parent_id)] == [str(path)]
        with pytest.raises(InvalidInput, match="incomplete"):
            archived.open(path)
        with archived.open(path, takeover=True) as copy:
            work(copy, 20)
            assert set(contents(copy)["shop"]) == {*expected["shop"], *range(20, 40)}
        assert objects_below(archived, parent_id) == before


def test_a_clone_needs_its_own_directory(tmp_path: Path) -> None:
    with archived_store(tmp_path) as archived:
        fill(archived.store, 0)
        archived.wait_archived()
        with pytest.raises(InvalidInput, match="not empty"):
            create_clone(archived, "bucket")


def test_a_backup_of_a_clone_is_complete_without_its_parent(tmp_path: Path) -> None:
    with archived_store(tmp_path) as archived:
        work(archived.store, 0)
        archived.store.stream("events").seal()
        archived.store.stream("events").upload()
        archived.store.evict("shop")
        archived.wait_archived()
        path = create_clone(archived, "clone")
    with archived.open(path) as copy:
        work(copy, 20)
        expected = contents(copy)
        copy.backup(str(tmp_path / "backup"))
    shutil.rmtree(archived.bucket)
    quire.restore(str(tmp_path / "backup"), tmp_path / "independent")
    with quire.open(tmp_path / "independent") as store:
        assert contents(store) == expected
        store.heavy.verify(runner="threads")
        assert store.heavy.damaged() == []


def test_a_clone_stays_in_its_parents_bucket(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Another bucket in quire.toml is refused; a backup is the way to move, as the documentation says."""
    with archived_store(tmp_path) as archived:
        archived.store.kv("pairs", create=True).put(
            b"key", b"value"
        )  # its table is in the bucket, and no manifest row refers to it
        archived.store.kv("pairs").flush()
        archived.wait_archived()
        path = create_clone(archived, "clone")
    config, other = path / "quire.toml", tmp_path / "other"
    config.write_text(config.read_text().replace(str(archived.bucket), str(other)))
    with pytest.raises(ConfigMismatch, match="objects are not at the location"):
        quire.open(path)
    assert run(["objects", "moved", "--yes", "--store", str(path)]) != 0
    assert "those of a clone's parents" in capsys.readouterr().err
    config.write_text(config.read_text().replace(str(other), str(archived.bucket)))
    with archived.open(path) as copy:
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
    for directory in (archived.bucket, home / "objects"):
        shutil.rmtree(directory)
    assert run(["archive", "on", "--store", str(home)]) == 0
    restored = quire.restore(str(other), tmp_path / "restored")
    with quire.open(restored.path, "r") as store:
        assert contents(store) == expected


def test_a_gap_in_the_log_of_a_replica_is_reported(tmp_path: Path) -> None:
    with archived_store(tmp_path) as archived:
        for start in (0, 20, 40):
            fill(archived.store, start)
            archived.wait_archived()
    archived.log_path(archived.headers()[-2].position).unlink()
    with pytest.raises(ObjectNotFound, match="missing in the middle") as caught:
        archived.restore("holed")
    assert "--at" in caught.value.hint


def test_a_clone_is_not_released_while_its_archived_moments_read_its_parents_objects(tmp_path: Path) -> None:
    """Hazard: only its newest state was looked at. The parent deleted what earlier moments of the clone's archive need."""
    clock = ManualClock()
    with archived_store(tmp_path, clock=clock, retain_seconds=2 * HOUR, base_seconds=0.001) as archived:
        work(archived.store, 0)
        archived.wait_archived()
        expected = contents(archived.store)
        path = create_clone(archived, "clone", clock=clock)
        with archived.open(path) as copy:
            assert copy.archive is not None
            copy.archive.wait(30)
            clone_id, at_ms = copy.feed.store_id(), clock.now_ms()
            clock.advance(60)
            for name in ("shop", "pairs", "events"):
                copy.drop(name, snapshots=True)
            for _round in range(4):
                clock.advance(HOUR / 4)
                copy.maintain()
            copy.archive.wait(30)
        change_config(OsDisk(), str(path), {("archive", "mode"): "async"})
        with pytest.raises(StillReferenced, match="archived moments of the clone"):
            release_clone(path)
        restored = archived.restore("then", at_ms=at_ms, store_id=clone_id)
        with archived.open(restored, takeover=True, discard=True) as then:
            assert then.archive is not None
            assert contents(then) == expected
            for name in ("shop", "pairs", "events"):
                then.drop(name, snapshots=True)
            for number in range(4):
                clock.advance(24 * HOUR)
                then.maintain()
                then.archive._needs_base = True
                then.kv("other", create=True).put(b"key", b"%d" % number)
                then.archive.wait(30)
                then._parts.window.look(now=True)
        change_config(OsDisk(), str(restored), {("archive", "mode"): "async"})
        release_clone(restored)
