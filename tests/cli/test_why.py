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


# ── files and objects as they lie there ───────────────────────────────────────────────────────────────────────────────
@pytest.fixture
def everything(run: Run, shop: Path) -> Path:
    """The store with a stream that has moved on, and a key-value database with a backup."""
    with quire.open(shop) as store:
        clicks = store.stream("clicks")
        for word in (b"a", b"b"):
            clicks.append(word).result()
            clicks.seal()
        clicks.upload()
        clicks.ledger.log.rotate()
    assert run("kv", "put", "cart", "ann", "apples", "--create").code == 0
    assert run("kv", "backup", "cart").code == 0
    with quire.open(shop) as store:  # an open segment, as a crash leaves one
        store.stream("clicks").append(b"c").result()
    return shop


def test_every_file_of_a_store_is_explained(run: Run, everything: Path) -> None:
    """Whatever a person finds in the directory: by its path there, and as the shell completes it."""
    files = [each for each in sorted(everything.rglob("*")) if each.is_file()]
    paths = [str(each.relative_to(everything)) for each in files]
    kinds = {}
    for path, file in zip(paths, files):
        if path.endswith((".lease", "/state.json")) or "/spare" in path:
            continue
        ended = run("why", path, "--json")
        assert ended.code == 0, (path, ended.err)
        kinds[path] = ended.data["kind"]
        assert ended.data["holders"], path
        assert run("why", str(file), "--json").out == ended.out
        assert run("why", f"./{path}", "--json").out == ended.out
    assert set(kinds.values()) >= {"base", "segment", "log", "backup", "file", "table"}
    assert [path for path in paths if path.startswith("objects/manifest/")]


def test_an_object_is_found_with_and_without_the_directory_before_it(run: Run, everything: Path) -> None:
    (first,) = objects(everything)
    assert answer(run, f"objects/{first}") == answer(run, first)
    assert run("why", f"{everything}/objects/{first}", "--json").data == answer(run, first)


def test_a_manifest_log_is_kept_by_its_stream(run: Run, everything: Path) -> None:
    with quire.open(everything, "r") as store:
        number = store.database("clicks").db_id
    for path in (f"manifest/{number}/0.mlog", f"objects/manifest/{number}/0.mlog", f"streams/{number}/manifest/0.mlog"):
        found = answer(run, path)
        assert (found["kind"], found["size_bytes"] > 0) == ("log", True)
        (holder,) = found["holders"]
        assert (holder["kind"], holder["name"]) == ("database", "clicks")
        assert holder["what"].startswith("has chunk 0 of its manifest log in it")
    assert "quire manifest bundle clicks" in answer(run, f"manifest/{number}/0.mlog")["holders"][0]["release"]
    assert run("drop", "clicks", "--yes").code == 0
    left = everything / f"streams/{number}/manifest/0.mlog"  # as an owner leaves it that was killed before it swept
    left.parent.mkdir(parents=True, exist_ok=True)
    left.write_bytes(b"left")
    (holder,) = answer(run, f"streams/{number}/manifest/0.mlog")["holders"]
    assert (holder["kind"], holder["what"]) == ("time", "clicks was dropped")


def test_a_segment_of_a_stream_is_kept_by_its_retention(run: Run, everything: Path) -> None:
    with quire.open(everything, "r") as store:
        number = store.database("clicks").db_id
    (holder,) = answer(run, f"streams/{number}/hot/{1:016x}.seg")["holders"]
    assert holder["what"] == "has its records 1 to 1 in it, until its retention lets them go"
    assert holder["release"] == "quire stream retention clicks --days N --apply"
    assert answer(run, f"{number:08x}/{1:08x}/wal:{0:08x}")["holders"] == [holder]


@pytest.mark.parametrize(
    "subject",
    [
        "manifest/2/77.mlog",
        "manifest/99/0.mlog",
        "streams/2/manifest/77.mlog",
        "streams/99/manifest/0.mlog",
        "manifest/18446744073709551615/0.mlog",
        "kv/cart/backups/0000000000000077.json",
        "streams/2/hot/00000000000000ff.seg",
        "lsm/00000009/sst/000001.sst",
    ],
)
def test_what_could_be_a_file_and_is_none(run: Run, everything: Path, subject: str) -> None:
    for asked in (subject, f"objects/{subject}"):
        ended = run("why", asked)
        assert ended.code in ((3,) if asked == subject else (2, 3)), asked
        assert ended.err.count("\n") == 2


def test_commands_that_release_quote_what_the_shell_would_split(run: Run, path: Path) -> None:
    run("create", "my shop")
    run("snapshot", "create", "my shop", "last monday")
    (holder,) = answer(run, "my shop")["holders"]
    assert holder["release"] == "quire snapshot drop 'my shop' 'last monday'"
