"""Opening checks what changed since the last clean close; the rest is recounted beside the work (N3)."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from quire.core.errors import ManifestDamaged, StoreUnusable
from quire.manifest import check as check_module
from quire.manifest import tables as t
from quire.manifest.change import CHANGE_LOG
from quire.manifest.checked_point import SUFFIX, point_of, write_point
from quire.manifest.ops.cursors import RetainChanges
from quire.manifest.records import DbKind
from quire.manifest.store import ManifestStore
from quire.testing.manifest import assert_clean
from tests.manifest.helpers import chunk, does


def filled(path: str, changes: int = 30) -> int:
    """A manifest with a database and some changes, closed well; the database's id."""
    with ManifestStore.open(path) as manifest:
        db_id = manifest.register_db("shop", DbKind.PAGES)
        for number in range(changes):
            does(manifest, chunk(number + 1, db_id=db_id))
    return db_id


def damage(path: str, change: Callable[[ManifestStore], None]) -> None:
    """Change rows behind the manifest's back, so that it does not show: the remembered transaction is moved along."""
    with ManifestStore.open(path, mode="rw") as manifest:
        change(manifest)
        point = point_of(manifest.env)
        manifest.env.refused["none", 0] = ("", "")  # closing must not remember this
    was = json.loads(Path(path + SUFFIX).read_bytes().split(b"\n")[0])
    assert point.sequence == was["sequence"]
    with ManifestStore.open(path, mode="r") as reader:
        write_point(reader.env, point_of(reader.env))


def is_done(manifest: ManifestStore) -> bool:
    return manifest.recount.is_done


def delete_row(table: t.Table[Any], *key: object) -> Callable[[ManifestStore], None]:
    def change(manifest: ManifestStore) -> None:
        with manifest.env.begin_write() as txn:
            assert txn.delete(table.key.pack(*key), db=manifest.env.handles[table.name])

    return change


@pytest.fixture
def checks_run(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, object]]:
    """What is looked at: the name, and from where the log is read."""
    seen: list[tuple[str, object]] = []

    def watched(name: str, function: Callable[..., object]) -> Callable[..., object]:
        def watching(txn: object, *args: object) -> object:
            seen.append((name, args[0] if args else None))
            return function(txn, *args)

        watching.__name__ = name
        return watching

    changed = []
    for function, rules in check_module._CHECKS:
        replaced = watched(function.__name__, function)
        if function.__name__ in ("_check_feed", "_check_holders"):
            monkeypatch.setattr(check_module, function.__name__, replaced)
        changed.append((replaced, rules))
    monkeypatch.setattr(check_module, "_CHECKS", tuple(changed))
    return seen


def test_an_open_after_a_clean_close_looks_at_the_store_s_own_rows(
    path: str, checks_run: list[tuple[str, object]]
) -> None:
    filled(path)
    checks_run.clear()
    with ManifestStore.open(path) as manifest:
        assert {name for name, _ in checks_run} == check_module.STORE_CHECK_NAMES
        ((_, since),) = [function for function in checks_run if function[0] == "_check_feed"]
        assert getattr(since, "sequence", None) == manifest.feed.head() == 31
        assert is_done(manifest) is False
        checks_run.clear()
        manifest.recount.finish()
        assert [name for name, _ in checks_run] == list(check_module.CHECK_NAMES)
        assert is_done(manifest)
        assert_clean(manifest, leaks=True)


def test_after_a_crash_the_log_is_read_from_the_last_point_on(path: str, checks_run: list[tuple[str, object]]) -> None:
    db_id = filled(path)
    with ManifestStore.open(path) as manifest:
        does(manifest, chunk(100, db_id=db_id))
        manifest.env.refused["none", 0] = ("", "")  # it dies: nothing is remembered
    checks_run.clear()
    with ManifestStore.open(path) as manifest:
        assert {name for name, _ in checks_run} == set(check_module.CHECK_NAMES)
        ((_, since),) = [function for function in checks_run if function[0] == "_check_feed"]
        assert getattr(since, "sequence", None) == 31
        assert is_done(manifest) is False  # the older part of the log
        checks_run.clear()
        manifest.recount.finish()
        assert checks_run == [("_check_feed", None)]
        assert is_done(manifest)
        assert manifest.feed.head() == 32


@pytest.mark.parametrize("how", ["missing", "torn", "altered", "foreign", "ahead"])
def test_a_point_that_cannot_be_believed_is_not(path: str, how: str, checks_run: list[tuple[str, object]]) -> None:
    filled(path)
    file = Path(path + SUFFIX)
    whole = file.read_bytes()
    match how:
        case "missing":
            file.unlink()
        case "torn":
            file.write_bytes(whole[:-10])
        case "altered":
            file.write_bytes(whole.replace(b'"sequence":31', b'"sequence":30'))
        case "foreign":
            with ManifestStore.open(path + "2") as other:
                other.register_db("x", DbKind.PAGES)
            file.write_bytes(Path(path + "2" + SUFFIX).read_bytes())
        case "ahead":
            os.rename(path, path + ".old")
            filled(path + "3", 2)
            os.rename(path + "3", path)
    checks_run.clear()
    with ManifestStore.open(path) as manifest:
        assert {name for name, _ in checks_run} == set(check_module.CHECK_NAMES)
        assert [since for name, since in checks_run if name == "_check_feed"] == [None]
        assert manifest.recount.is_done


def test_a_recount_closes_the_database_that_breaks_a_rule_and_no_other(path: str) -> None:
    db_id = filled(path)
    with ManifestStore.open(path) as manifest:
        manifest.register_db("other", DbKind.PAGES)
    damage(path, delete_row(t.WAL_STATE, db_id, 0))
    with ManifestStore.open(path) as manifest:
        assert not manifest.recount.is_done
        does(manifest, chunk(200, db_id=db_id))  # not known yet
        manifest.recount.finish()
        assert ("database", db_id) in manifest.env.refused
        with pytest.raises(ManifestDamaged, match="no WAL state"):
            does(manifest, chunk(201, db_id=db_id))
        does(manifest, chunk(1, db_id=db_id + 1))
    with ManifestStore.open(path) as manifest:  # what is broken is not remembered as checked
        assert ("database", db_id) in manifest.env.refused


def test_a_recount_that_finds_the_log_broken_stops_the_writer(path: str) -> None:
    db_id = filled(path)
    damage(path, delete_row(CHANGE_LOG, 7))
    with ManifestStore.open(path) as manifest:
        with pytest.raises(ManifestDamaged, match="gap"):
            manifest.recount.finish()
        with pytest.raises(StoreUnusable):
            does(manifest, chunk(200, db_id=db_id))
        assert manifest.feed.head() == 31
    with pytest.raises(ManifestDamaged, match="gap"):
        ManifestStore.open(path)


def test_generations_are_known_where_the_log_is_trimmed(path: str) -> None:
    """Each component's generation is remembered with the point: its last change may be gone from the log."""
    filled(path)
    with ManifestStore.open(path) as manifest:
        does(manifest, RetainChanges(32))
        assert manifest.feed.head() == 31
    with ManifestStore.open(path) as manifest:
        assert not manifest.recount.is_done
        manifest.recount.finish()
        assert not manifest.env.refused


def test_rounds_recount_a_little_at_a_time(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    filled(path)
    monkeypatch.setattr("quire.manifest.recount.ROUND_SECONDS", 0.0)
    with ManifestStore.open(path) as manifest:
        rounds = 0
        while not manifest.recount.is_done:
            manifest.recount.round()
            rounds += 1
        assert rounds == len(check_module.CHECK_NAMES)
