"""Drills: they pass beside a store that is written, claim nothing, and find every difference."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from quire.archive.status import read_drill
from quire.durable.files import OsDisk
from quire.store import opening, restoring
from quire.store.store import Store
from tests.archive.world import World, fill, world


def test_a_drill_passes_while_everything_is_written(tmp_path: Path) -> None:
    with world(tmp_path) as w:
        fill(w.store, 0)
        w.store.snapshot("shop", "monday")
        stop = threading.Event()

        def write() -> None:
            start = 1_000
            while not stop.is_set():
                fill(w.store, start, 5)
                start += 5

        writer = threading.Thread(target=write)
        writer.start()
        try:
            drill = w.archiver.drill()
        finally:
            stop.set()
            writer.join()
        assert drill.problems == ()
        assert drill.databases == len(w.store.databases()) >= 3
        assert drill.bytes > 0
        assert 0 < drill.restore_seconds < drill.seconds
        assert read_drill(OsDisk(), str(w.root)) == drill == w.archiver.status().last_drill
        assert list((w.root / "scratch").iterdir()) == []
        fill(w.store, 5_000)  # nobody was deposed
        w.archived()


def damaged(w: World, monkeypatch: pytest.MonkeyPatch, spoil: object) -> tuple[str, ...]:
    """The problems that a drill finds in a copy that was spoiled after its restore."""
    real = restoring.restore

    def restore(*arguments: object, **options: object) -> object:
        restored = real(*arguments, **options)  # type: ignore[arg-type]
        (Path(restored.path) / "owner.json").unlink()
        quiet = restoring.quiet_settings(OsDisk(), restored.path)
        with opening.open(restored.path, create=False, settings=quiet) as copy:
            copy.rights.refuse("a test")
            spoil(copy)  # type: ignore[operator]
        (Path(restored.path) / "owner.json").write_bytes(b"")
        return restored

    monkeypatch.setattr(restoring, "restore", restore)
    return w.archiver.drill().problems


def spoil_pages(copy: Store) -> None:
    copy.sqlite("shop").execute("create table spoiled(a)")


def spoil_set(copy: Store) -> None:
    key, _ = next(iter(copy.kv("pairs").scan()))
    copy.kv("pairs").put(key, b"other")


def spoil_stream(copy: Store) -> None:
    copy.stream("events").append([b"a record too many"]).result()


def spoil_catalog(copy: Store) -> None:
    copy.manifest.snapshots.drop("shop", "monday")


def drop_set(copy: Store) -> None:
    copy.drop("pairs")


@pytest.mark.parametrize("spoil", [spoil_pages, spoil_set, spoil_stream, spoil_catalog, drop_set])
def test_a_drill_finds_a_difference(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spoil: object) -> None:
    with world(tmp_path) as w:
        fill(w.store, 0)
        w.store.snapshot("shop", "monday")
        assert damaged(w, monkeypatch, spoil) != ()
        last = w.archiver.status().last_drill
        assert last is not None
        assert not last.is_good
        assert list((w.root / "scratch").iterdir()) == []
