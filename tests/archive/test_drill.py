"""Drills: they pass while the store is written, claim nothing, and find every difference."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

import quire
from quire.archive.status import read_drill
from quire.durable.files import OsDisk
from quire.store import restoring
from quire.store.store import Store
from tests.archive.archived_store import ArchivedStore, archived_store, fill


def test_a_drill_passes_during_writes(tmp_path: Path) -> None:
    with archived_store(tmp_path) as archived:
        fill(archived.store, 0)
        archived.store.snapshot("shop", "monday")
        stop = threading.Event()

        def write() -> None:
            start = 1_000
            while not stop.is_set():
                fill(archived.store, start, 5)
                start += 5

        writer = threading.Thread(target=write)
        writer.start()
        try:
            drill = archived.archiver.drill()
        finally:
            stop.set()
            writer.join()
        assert drill.problems == ()
        assert drill.databases == len(archived.store.databases()) >= 3
        assert drill.bytes > 0
        assert 0 < drill.restore_seconds < drill.seconds
        assert read_drill(OsDisk(), str(archived.root)) == drill == archived.archiver.status().last_drill
        assert list((archived.root / "scratch").iterdir()) == []
        fill(archived.store, 5_000)  # no owner was deposed
        archived.wait_archived()


def drill_problems(archived: ArchivedStore, monkeypatch: pytest.MonkeyPatch, damage: object) -> tuple[str, ...]:
    """The problems that a drill finds in a copy that was damaged after its restore."""
    original = restoring.restore

    def restore(*arguments: object, **options: object) -> object:
        restored = original(*arguments, **options)  # type: ignore[arg-type]
        (Path(restored.path) / "owner.json").unlink()
        quiet = restoring.quiet_settings(OsDisk(), restored.path)
        with quire.open(restored.path, create=False, settings=quiet) as copy:
            copy.rights.refuse("a test")
            damage(copy)  # type: ignore[operator]
        (Path(restored.path) / "owner.json").write_bytes(b"")
        return restored

    monkeypatch.setattr(restoring, "restore", restore)
    return archived.archiver.drill().problems


def damage_pages(copy: Store) -> None:
    copy.sqlite("shop").execute("create table spoiled(a)")


def damage_kv(copy: Store) -> None:
    key, _ = next(iter(copy.kv("pairs").scan()))
    copy.kv("pairs").put(key, b"other")


def damage_stream(copy: Store) -> None:
    copy.stream("events").append([b"a record too many"]).result()


def damage_catalog(copy: Store) -> None:
    copy.manifest.snapshots.drop("shop", "monday")


def drop_kv(copy: Store) -> None:
    copy.drop("pairs")


@pytest.mark.parametrize("damage", [damage_pages, damage_kv, damage_stream, damage_catalog, drop_kv])
def test_a_drill_finds_a_difference(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: object) -> None:
    with archived_store(tmp_path) as archived:
        fill(archived.store, 0)
        archived.store.snapshot("shop", "monday")
        assert drill_problems(archived, monkeypatch, damage) != ()
        last = archived.archiver.status().last_drill
        assert last is not None
        assert not last.is_good
        assert list((archived.root / "scratch").iterdir()) == []
