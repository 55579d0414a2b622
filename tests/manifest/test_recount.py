"""Opening checks what changed since the last clean close; everything else is recounted in the background (N3)."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from quire.core.errors import ManifestDamaged, StoreUnusable
from quire.manifest import check as check_module
from quire.manifest import ownership
from quire.manifest import tables as t
from quire.manifest.change import CHANGE_LOG
from quire.manifest.checked_point import SUFFIX, point_of, write_point
from quire.manifest.ops.cursors import RetainChanges
from quire.manifest.records import DbKind
from quire.manifest.store import ManifestStore
from quire.testing.manifest import assert_clean
from tests.manifest.helpers import chunk, commit


def create_filled(path: str, changes: int = 30) -> int:
    """Create a manifest with a database and some changes, closed cleanly; returns the database's id."""
    with ManifestStore.open(path) as manifest:
        db_id = manifest.register_db("shop", DbKind.PAGES)
        for number in range(changes):
            commit(manifest, chunk(number + 1, db_id=db_id))
    return db_id


def damage(path: str, change: Callable[[ManifestStore], None]) -> None:
    """Change rows without going through the manifest and update the checked point, so that opening does not notice
    it."""
    with ManifestStore.open(path, mode="rw") as manifest:
        change(manifest)
        point = point_of(manifest.env)
        manifest.env.refused["none", 0] = ("", "")  # closing must not write a checked point
    stored = json.loads(Path(path + SUFFIX).read_bytes().split(b"\n")[0])
    assert point.sequence == stored["sequence"]
    with ManifestStore.open(path, mode="r") as reader:
        write_point(reader.env, point_of(reader.env))


def with_digest(line: bytes) -> bytes:
    return line + b"\n" + sha256(line).hexdigest().encode() + b"\n"


def is_done(manifest: ManifestStore) -> bool:
    return manifest.recount.is_done


def delete_row(table: t.Table[Any], *key: object) -> Callable[[ManifestStore], None]:
    def change(manifest: ManifestStore) -> None:
        with manifest.env.begin_write() as txn:
            assert txn.delete(table.key.pack(*key), db=manifest.env.handles[table.name])

    return change


@pytest.fixture
def checks_run(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, object]]:
    """The checks that run: the name, and the point from which the log is read."""
    calls: list[tuple[str, object]] = []

    def recorded(name: str, function: Callable[..., object]) -> Callable[..., object]:
        def record_and_check(txn: object, *args: object) -> object:
            calls.append((name, args[0] if args else None))
            return function(txn, *args)

        record_and_check.__name__ = name
        return record_and_check

    checks = []
    for function, rules in check_module._CHECKS:
        replacement = recorded(function.__name__, function)
        if function.__name__ in ("_check_feed", "_check_holders"):
            monkeypatch.setattr(check_module, function.__name__, replacement)
        checks.append((replacement, rules))
    monkeypatch.setattr(check_module, "_CHECKS", tuple(checks))
    return calls


def test_an_open_after_a_clean_close_checks_only_the_rows_of_the_store_itself(
    path: str, checks_run: list[tuple[str, object]]
) -> None:
    create_filled(path)
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


def test_an_open_after_a_crash_also_checks_what_the_log_since_the_point_names(
    path: str, checks_run: list[tuple[str, object]]
) -> None:
    db_id = create_filled(path)
    with ManifestStore.open(path) as manifest:
        commit(manifest, chunk(100, db_id=db_id))
        manifest.env.refused["none", 0] = ("", "")  # as if it died: no checked point is written
    checks_run.clear()
    with ManifestStore.open(path) as manifest:
        names = {name for name, _ in checks_run}
        assert names == check_module.STORE_CHECK_NAMES | check_module.CHANGED_CHECK_NAMES
        ((_, since),) = [function for function in checks_run if function[0] == "_check_feed"]
        assert getattr(since, "sequence", None) == 31
        assert is_done(manifest) is False
        checks_run.clear()
        manifest.recount.finish()
        assert [name for name, _ in checks_run] == list(check_module.CHECK_NAMES)
        assert is_done(manifest)
        assert manifest.feed.head() == 32


@pytest.mark.parametrize(
    "damage", ["missing", "torn", "altered", "foreign", "ahead", "not text", "nested", "a directory"]
)
def test_an_invalid_checked_point_is_ignored(path: str, damage: str, checks_run: list[tuple[str, object]]) -> None:
    create_filled(path)
    file = Path(path + SUFFIX)
    content = file.read_bytes()
    match damage:
        case "missing":
            file.unlink()
        case "torn":
            file.write_bytes(content[:-10])
        case "altered":
            file.write_bytes(content.replace(b'"sequence":31', b'"sequence":30'))
        case "foreign":
            with ManifestStore.open(path + "2") as other:
                other.register_db("x", DbKind.PAGES)
            file.write_bytes(Path(path + "2" + SUFFIX).read_bytes())
        case "not text":
            file.write_bytes(with_digest(b'{"store_id":"\xff"}'))
        case "nested":
            file.write_bytes(with_digest(b'{"x":' + b"[" * 100_000 + b"]" * 100_000 + b"}"))
        case "a directory":
            file.unlink()
            file.mkdir()
        case "ahead":
            os.rename(path, path + ".old")
            create_filled(path + "3", 2)
            os.rename(path + "3", path)
    checks_run.clear()
    with ManifestStore.open(path) as manifest:
        assert {name for name, _ in checks_run} == set(check_module.CHECK_NAMES)
        assert [since for name, since in checks_run if name == "_check_feed"] == [None]
        assert manifest.recount.is_done


def test_a_recount_closes_only_the_database_that_breaks_a_rule(path: str) -> None:
    db_id = create_filled(path)
    with ManifestStore.open(path) as manifest:
        manifest.register_db("other", DbKind.PAGES)
    damage(path, delete_row(t.WAL_STATE, db_id, 0))
    with ManifestStore.open(path) as manifest:
        assert not manifest.recount.is_done
        commit(manifest, chunk(200, db_id=db_id))  # the damage is not known yet
        manifest.recount.finish()
        assert ("database", db_id) in manifest.env.refused
        with pytest.raises(ManifestDamaged, match="no WAL state"):
            commit(manifest, chunk(201, db_id=db_id))
        commit(manifest, chunk(1, db_id=db_id + 1))
    with ManifestStore.open(path) as manifest:  # a broken state is not recorded as checked
        assert ("database", db_id) in manifest.env.refused


def test_a_recount_that_finds_a_damaged_log_stops_the_writer(path: str) -> None:
    db_id = create_filled(path)
    damage(path, delete_row(CHANGE_LOG, 7))
    with ManifestStore.open(path) as manifest:
        with pytest.raises(ManifestDamaged, match="gap"):
            manifest.recount.finish()
        with pytest.raises(StoreUnusable):
            commit(manifest, chunk(200, db_id=db_id))
        assert manifest.feed.head() == 31
    with pytest.raises(ManifestDamaged, match="gap"):
        ManifestStore.open(path)


def test_generations_are_known_even_if_the_log_is_trimmed(path: str) -> None:
    """Each component's generation is stored with the point: its last change may have been trimmed from the log."""
    create_filled(path)
    with ManifestStore.open(path) as manifest:
        commit(manifest, RetainChanges(32))
        assert manifest.feed.head() == 31
    with ManifestStore.open(path) as manifest:
        assert not manifest.recount.is_done
        manifest.recount.finish()
        assert not manifest.env.refused


def test_rounds_recount_a_little_at_a_time(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    create_filled(path)
    monkeypatch.setattr("quire.manifest.recount.ROUND_SECONDS", 0.0)
    with ManifestStore.open(path) as manifest:
        rounds = 0
        while not manifest.recount.is_done:
            manifest.recount.round()
            rounds += 1
        assert rounds == len(check_module.CHECK_NAMES)


def test_nothing_is_deleted_while_a_recount_closes_what_it_found_broken(path: str) -> None:
    """Hazard: the recount counted as done as soon as it had found a problem. A delete job in another thread went on
    before the database was closed, by counts that were wrong."""
    db_id = create_filled(path)
    damage(path, delete_row(t.WAL_STATE, db_id, 0))
    with ManifestStore.open(path) as manifest:
        states: list[bool] = []
        close_broken = manifest.recount._close_broken

        def close_and_look() -> None:
            states.append(manifest.recount.is_done)
            close_broken()
            states.append(manifest.recount.is_done)

        manifest.recount._close_broken = close_and_look
        manifest.recount.finish()
        assert states == [False, False]
        assert manifest.recount.is_done
        assert ("database", db_id) in manifest.env.refused


def test_closed_databases_accept_no_write_while_a_recount_checks_everything_again(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hazard: the check emptied the list of what is closed, and filled it again when it had ended."""
    db_id = create_filled(path)
    damage(path, delete_row(t.WAL_STATE, db_id, 0))
    with ManifestStore.open(path) as manifest:
        manifest.recount.finish()
        refusals: list[str] = []

        def check_and_write(*args: Any, **options: Any) -> Iterator[check_module.Problem]:
            yield from check_module.check(*args, **options)
            with pytest.raises(ManifestDamaged) as refusal:
                commit(manifest, chunk(200, db_id=db_id))
            refusals.append(refusal.value.what)

        monkeypatch.setattr(ownership, "check", check_and_write)
        ownership.close_broken(manifest.env, manifest.writer)
        assert len(refusals) == 1
        assert "no WAL state" in refusals[0]
        assert ("database", db_id) in manifest.env.refused


def test_a_recount_that_found_the_store_broken_lets_nobody_delete(path: str) -> None:
    """Hazard: only the first caller got the error; one that waited for it meanwhile went on to delete."""
    create_filled(path)
    damage(path, delete_row(CHANGE_LOG, 7))
    with ManifestStore.open(path) as manifest:
        for _ in range(2):
            with pytest.raises(ManifestDamaged, match="gap"):
                manifest.recount.finish()
            assert not manifest.recount.is_done
