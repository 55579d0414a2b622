"""why: what keeps something, and what would release it — and that doing so does release it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import quire
from quire.cli.output import width_of
from quire.manifest import tables as t
from tests.cli.conftest import Run, on_a_terminal


def held(run: Run, subject: str) -> list[tuple[str, str]]:
    return [(each["kind"], each["name"]) for each in answer(run, subject)["holders"]]


def answer(run: Run, subject: str) -> Any:
    return run("why", subject, "--json").data


def objects(path: Path, database: str = "shop") -> list[str]:
    """Keys of the chunks a database has made."""
    with quire.open(path, "r") as store, store.manifest.read() as txn:
        db_id = txn.database_id(database)
        return [f"{db:08x}/{slot:08x}/base:{made:08x}" for (db, slot, made), _ in txn.scan(t.CHUNK_CATALOG, db_id)]


def segments(path: Path) -> list[str]:
    """Paths of the segments that the databases track."""
    with quire.open(path, "r") as store, store.manifest.read() as txn:
        return [f"pages/{row.origin_db_id:08x}/wal/{number:08x}.seg" for (_, number), row in txn.scan(t.WAL_CATALOG)]


def test_a_database_is_kept_by_its_snapshots_and_forks(run: Run, shop: Path) -> None:
    with quire.open(shop) as store:
        store.fork("shop", "branch")
    *others, (kind, _) = held(run, "shop")
    assert others == [("snapshot", "monday"), ("fork", "branch")]
    assert kind == "job", "what the checkpoint has absorbed is to be truncated"
    assert answer(run, "shop")["size_bytes"] > 0
    assert held(run, "branch") == []
    assert run("why", "branch").out.splitlines()[-1] == "nothing holds it"


def test_a_chunk_is_kept_by_whoever_has_its_slot(run: Run, shop: Path) -> None:
    (first,) = objects(shop)
    with quire.open(shop) as store:
        store.fork("shop", "branch", at="monday")
    assert held(run, first) == [("database", "shop"), ("database", "branch"), ("snapshot", "shop@monday")]
    assert answer(run, first)["references"] == 1, "all of them share one leaf"


def test_what_it_says_to_do_releases_it(run: Run, shop: Path) -> None:
    (first,) = objects(shop)
    with quire.open(shop) as store:
        write = store.pages.open("shop").begin()
        write.write_pages(dict.fromkeys(range(16), b"c" * 4096))
        write.commit().result()
        store.checkpoint("shop")
    (holder,) = answer(run, first)["holders"]
    assert (holder["kind"], holder["name"]) == ("snapshot", "shop@monday")
    _, *command = holder["release"].split()
    assert run(*command, "--yes").code == 0
    assert [each["kind"] for each in answer(run, first)["holders"]] == ["time"]
    assert run("gc", "--now", "--yes").code == 0
    assert run("why", first).code == 3


def test_a_segment_waits_for_a_checkpoint(run: Run, shop: Path) -> None:
    (segment,) = [each for each in segments(shop) if answer(run, each)["state"].startswith("indexed")]
    (holder,) = answer(run, segment)["holders"]
    assert (holder["kind"], holder["name"], holder["release"]) == ("database", "shop", "quire checkpoint shop")
    assert run("checkpoint", "shop").code == 0
    assert not any(each["release"] == "quire checkpoint shop" for each in answer_or_none(run, segment))


def answer_or_none(run: Run, subject: str) -> list[dict[str, str]]:
    ended = run("why", subject, "--json")
    return list(ended.data["holders"]) if ended.code == 0 else []


def test_a_fork_and_a_snapshot_pin_a_segment(run: Run, shop: Path) -> None:
    with quire.open(shop) as store:
        store.snapshot("shop", "tuesday")
        store.fork("shop", "branch", at="tuesday")
    pinned = [each for each in segments(shop) if ("snapshot", "shop@tuesday") in held(run, each)]
    assert pinned
    assert ("database", "branch") in held(run, pinned[0])


@pytest.mark.parametrize(
    ("subject", "code"),
    [
        ("nothing", 3),
        ("00000001/00000077/base:00000001", 3),
        ("pages/00000009/wal/00000001.seg", 3),
        ("pages/1/wal/1.seg", 2),
        ("/etc/passwd", 2),
    ],
)
def test_what_is_not_there(run: Run, shop: Path, subject: str, code: int) -> None:
    ended = run("why", subject)
    assert ended.code == code
    assert ended.err.count("\n") == 2


def test_it_fits_a_terminal(run: Run, shop: Path) -> None:
    lines = on_a_terminal("why", "shop", "--store", str(shop))
    assert max(map(width_of, lines)) <= 80
    assert lines[0].split() == ["what", "database", "shop"]
