"""why: what keeps something, and what would release it — and that doing so does release it."""

from __future__ import annotations

import json
import shutil
import uuid
from pathlib import Path
from typing import Any

import pytest

import quire
from quire.cli.output import width_of
from quire.manifest import tables as t
from quire.pages.anchors import lend
from tests.cli.conftest import Run, on_a_terminal, write_pages
from tests.programs import run_program


def held(run: Run, subject: str) -> list[tuple[str, str]]:
    return [(each["kind"], each["name"]) for each in answer(run, subject)["holders"]]


def answer(run: Run, subject: str) -> Any:
    return run("why", subject, "--json").data


def objects(path: Path, database: str = "shop") -> list[str]:
    """Keys of the chunks a database has made."""
    with quire.open(path, "r") as store, store.manifest.read() as txn:
        db_id = txn.database_id(database)
        below, rows = txn.object_prefixes()[0], txn.scan(t.CHUNK_CATALOG, db_id)
        return [f"{below}/{db:08x}/{slot:08x}/base:{made:08x}" for (db, slot, made), _ in rows]


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


def test_a_query_that_reads_is_a_reader_and_no_snapshot(run: Run, shop: Path) -> None:
    """People saw what was lent to Spark as snapshots of theirs, in every list."""
    before = [run(*words).out for words in (("snapshot", "ls", "shop"), ("tree",), ("ls",))]
    with quire.open(shop) as store:
        lend(store.pages, ["shop"], 300)
    (reader,) = [holder for holder in answer(run, "shop")["holders"] if holder["kind"] == "reader"]
    assert reader["what"].startswith("is a query (Spark, for instance) that reads at lsn ")
    assert "quire." not in reader["what"]
    assert before == [run(*words).out for words in (("snapshot", "ls", "shop"), ("tree",), ("ls",))]


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
    """The store with a stream that has moved on, and a key-value database with a backup and a snapshot."""
    with quire.open(shop) as store:
        clicks = store.stream("clicks")
        for word in (b"a", b"b"):
            clicks.append(word).result()
            clicks.seal()
        clicks.compress()
        clicks.upload()
        clicks.ledger.log.rotate()
    assert run("kv", "put", "cart", "ann", "apples", "--create").code == 0
    assert run("kv", "backup", "cart").code == 0
    assert run("snapshot", "create", "cart", "full").code == 0
    assert run("stream", "retention", "clicks", "--days", "30").code == 0
    with quire.open(shop) as store:  # an open segment, as a crash leaves one
        store.stream("clicks").append(b"c").result()
    return shop


def test_every_file_of_a_store_is_explained(run: Run, everything: Path) -> None:
    """Whatever a person finds in the directory: by its path there, and as the shell completes it."""
    files = [each for each in sorted(everything.rglob("*")) if each.is_file()]
    paths = [str(each.relative_to(everything)) for each in files]
    kinds = {}
    for path, file in zip(paths, files):
        ended = run("why", path, "--json")
        assert ended.code == 0, (path, ended.err)
        kinds[path] = ended.data["kind"]
        assert ended.data["holders"], path
        assert run("why", str(file), "--json").out == ended.out
        assert run("why", f"./{path}", "--json").out == ended.out
    assert set(kinds.values()) >= {"base", "segment", "log", "backup", "file", "table"}
    assert [path for path in paths if path.startswith("objects/") and "/manifest/" in path]


def test_an_object_is_found_with_and_without_the_directory_before_it(run: Run, everything: Path) -> None:
    (first,) = objects(everything)
    assert answer(run, f"objects/{first}") == answer(run, first)
    assert run("why", f"{everything}/objects/{first}", "--json").data == answer(run, first)


def test_a_manifest_log_is_kept_by_its_stream(run: Run, everything: Path) -> None:
    with quire.open(everything, "r") as store:
        number = store.database("clicks").db_id
        with store.manifest.read() as txn:
            log = f"{txn.object_prefixes()[0]}/manifest/{number}/0.mlog"
    for path in (log, f"objects/{log}", f"streams/{number}/manifest/0.mlog"):
        found = answer(run, path)
        assert (found["kind"], found["size_bytes"] > 0) == ("log", True)
        (holder,) = found["holders"]
        assert (holder["kind"], holder["name"]) == ("database", "clicks")
        assert holder["what"].startswith("has chunk 0 of its manifest log in it")
    assert "quire manifest bundle clicks" in answer(run, log)["holders"][0]["release"]
    assert run("drop", "clicks", "--now", "--yes").code == 0
    left = everything / f"streams/{number}/manifest/0.mlog"  # as an owner leaves it that was killed before it swept
    left.parent.mkdir(parents=True, exist_ok=True)
    left.write_bytes(b"left")
    (holder,) = answer(run, f"streams/{number}/manifest/0.mlog")["holders"]
    assert (holder["kind"], holder["what"]) == ("time", "clicks was dropped")


def test_a_segment_of_a_stream_is_kept_by_its_retention(run: Run, everything: Path) -> None:
    with quire.open(everything, "r") as store:
        number = store.database("clicks").db_id
    (holder,) = answer(run, f"streams/{number}/hot/{1:016x}.seg")["holders"]
    assert holder["what"] == "has its records 1 to 1 in it, until its retention drops them"
    retention = "quire stream retention clicks --days N --apply"
    assert holder["release"] == f"quire stream tier clicks evict, when it is in another tier too; or {retention}"
    (of_object,) = answer(run, f"{number:08x}/{1:08x}/wal:{0:08x}")["holders"]
    assert of_object == {**holder, "release": retention}, "no copy of it is given up with the one here"
    for tier, more in (("hot", ()), ("warm", ("--warm",))):  # and doing what it says does release it
        path = f"streams/{number}/{tier}/{1:016x}.seg"
        (copy,) = answer(run, path)["holders"]
        command = " ".join(["quire", "stream", "tier", "clicks", "evict", *more])
        assert copy["release"].startswith(f"{command}, when it is in ")
        assert (everything / path).exists()
        assert run(*command.split()[1:]).code == 0
        assert not (everything / path).exists()


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
    assert holder["release"] == "quire snapshot drop 'my shop' 'last monday' --now"


def test_every_file_of_a_store_in_use_is_explained(run: Run, everything: Path, tmp_path: Path) -> None:
    """What a killed owner leaves, its readers' leases and spares, and each kind of file that is being written."""
    left = tmp_path / "left"
    with quire.open(everything) as store:
        store.stream("clicks").append(b"d").result()
        store.kv("cart")
        write_pages(store, "shop", range(2), b"d")
        shutil.copytree(everything, left)
        stream, kv = store.database("clicks").db_id, store.database("cart").db_id
    home = f"lsm/{kv:08x}"
    (table,) = [str(each.relative_to(left)) for each in left.glob(f"{home}/sst/*.sst")]
    made = {
        *(f"readers/{uuid.uuid4()}.lease{end}" for end in ("", ".tmp")),
        *("quire.toml.tmp", "manifest.lmdb.tmp", "manifest.lmdb.tmp-lock", "quire.sock.at.tmp", "quire.sock"),
        *("admin.token", "read.token", "scratch/12", "scratch/13/part-0.arrow", "objects/.tmp/1f.part"),
        *(f"pages/00000001/{each}" for each in ("follow.json", "follow.json.tmp", "wal/00000007.seg.tmp")),
        *(f"pages/00000001/cache/{objects(everything)[0].partition('/e/00000001/')[2]}{end}" for end in ("", ".tmp")),
        *(f"streams/{stream}/{each}" for each in ("stream.json.tmp", "hot/spare-4.seg.tmp", f"warm/{1:016x}.seg.tmp")),
        *(f"streams/{stream}/manifest/{each}" for each in ("7.mlog.tmp", "snapshot_9.bin.tmp")),
        *(f"{home}/{each}" for each in (f"loads/{3:016x}.json", f"loads/{3:016x}.json.tmp", "wal/000009.log.tmp")),
        *(f"{home}/manifest/{each}.tmp" for each in ("000000.log", "MANIFEST-000001")),
        *(f"{table}.0a1b2c3d.tmp", f"{home}/snapshots/000099/wal/000001.log", f"objects/doctor/{'0' * 16}"),
    }
    for each in made:
        (left / each).parent.mkdir(parents=True, exist_ok=True)
        (left / each).write_bytes(b"some")
    found = {str(each.relative_to(left)) for each in left.rglob("*") if each.is_file()}
    assert found >= made | {f"streams/{stream}/stream.json"}
    assert any("/snapshots/" in each for each in found - made), "a real one"
    for path in sorted(found):
        ended = run("why", path, "--json", at=left)
        assert ended.code == 0, (path, ended.err)
        assert ended.data["holders"], path


def test_a_stream_remembers_beside_its_log(run: Run, everything: Path) -> None:
    with quire.open(everything, "r") as store:
        path = f"streams/{store.database('clicks').db_id}/stream.json"
    found = answer(run, path)
    assert (found["kind"], found["size_bytes"]) == ("file", (everything / path).stat().st_size)
    (holder,) = found["holders"]
    assert (holder["name"], holder["release"]) == ("clicks", "quire drop clicks")
    assert "its consumers" in holder["what"]


def test_files_of_a_key_value_snapshot_are_kept_by_it(run: Run, everything: Path) -> None:
    paths = [each for each in everything.glob("lsm/*/snapshots/*/**/*") if each.is_file()]
    assert paths
    for path in paths:
        assert held(run, str(path)) == [("snapshot", "cart@full")]
    assert run("snapshot", "drop", "cart", "full", "--now", "--yes").code == 0
    left = Path(str(paths[0]))  # as an owner leaves it that was killed before it swept
    left.parent.mkdir(parents=True, exist_ok=True)
    left.write_bytes(b"left")
    (holder,) = answer(run, str(left))["holders"]
    assert "a dropped snapshot" in holder["what"]
    assert run("kv", "get", "cart", "ann").code == 0
    assert not left.exists(), "as it said"


# ── snapshots ─────────────────────────────────────────────────────────────────────────────────────────────────────────
def test_a_snapshot_as_it_is_printed(run: Run, shop: Path) -> None:
    (first,) = objects(shop)
    names = [each["name"] for each in answer(run, first)["holders"] if each["kind"] == "snapshot"]
    assert names == ["shop@monday"]
    found = answer(run, "shop@monday")
    assert (found["subject"], found["kind"], found["state"]) == ("shop@monday", "snapshot", "named")
    shown = run("snapshot", "show", "shop", "monday", "--json").data
    assert found["size_bytes"] == shown["chunk_bytes"] + shown["wal_bytes"] > 0
    assert answer(run, "shop@#1") == answer(run, "shop@1") == found
    (holder,) = found["holders"]
    assert holder["release"] == "quire snapshot drop shop monday --now"
    assert run(*holder["release"].split()[1:], "--yes").code == 0
    gone = run("why", "shop@monday")
    assert (gone.code, "quire snapshot ls shop" in gone.err) == (3, True)


def test_a_snapshot_that_nobody_has_made_and_names_with_an_at(run: Run, shop: Path) -> None:
    with quire.open(shop) as store:
        store.create("a@b", "pages")
        store.snapshot("a@b", "c@d")
        store.snapshot("a@b", tags={"by": "lend"})
        store.snapshot("a@b", tags={"time-travel": "1"})
        store.snapshot("a@b", "hourly", tags={"schedule": "hour"})
    assert answer(run, "a@b")["kind"] == "database"
    assert answer(run, "a@b@c@d")["subject"] == "a@b@c@d"
    kinds = [answer(run, f"a@b@{each}")["holders"][0]["kind"] for each in ("#2", "#3", "hourly")]
    assert kinds == ["reader", "time", "database"]
    for asked in ("a@b@", "a@b@never", "a@b@#99", "a@b@99999999999"):
        assert run("why", asked).code == 3
    assert "no such snapshot" not in run("why", "@monday").err


# ── what nothing speaks of ────────────────────────────────────────────────────────────────────────────────────────────
def test_who_finds_or_removes_what_nothing_names(run: Run, everything: Path) -> None:
    assert "quire verify --orphans" in run("why", "00000001/00000077/base:00000001").err
    with quire.open(everything, "r") as store:
        stream = store.database("clicks").db_id
    stray = everything / "pages/00000001/wal/000000f0.seg"
    stray.write_bytes(b"stray")
    ended = run("why", str(stray))
    assert (ended.code, "when it next opens the database" in ended.err) == (3, True)
    assert "shop, id 1 (0x1)" in ended.err
    with quire.open(everything) as store:
        store.pages.open("shop")
    assert not stray.exists(), "as it said"
    for path in ("pages/00000099/wal/00000001.seg", "lsm/00000099/sst/000001.sst"):
        (everything / path).parent.mkdir(parents=True)
        (everything / path).write_bytes(b"foreign")
        ended = run("why", path)
        assert (ended.code, "153 (0x99)" in ended.err, "quire neither reads nor removes it" in ended.err) == (
            3,
            True,
            True,
        )
    assert "gc --dry-run" not in run("why", f"streams/{stream}/hot/00000000000000ff.seg").err


def test_what_a_dropped_stream_left_goes_with_the_next(run: Run, everything: Path) -> None:
    with quire.open(everything) as store:
        first = store.database("clicks").db_id
        store.create("next", "stream")
        store.stream("next")
    assert run("drop", "clicks", "--now", "--yes").code == 0
    left = everything / f"streams/{first}/stream.json"
    left.parent.mkdir(parents=True, exist_ok=True)
    left.write_bytes(b"left")
    (holder,) = answer(run, str(left))["holders"]
    assert (holder["what"], holder["release"]) == (
        "clicks was dropped",
        "maintenance, or when the next stream is dropped",
    )
    assert run("drop", "next", "--now", "--yes").code == 0
    assert not left.exists(), "as it said"


def test_a_namespace_is_kept_by_its_databases_and_by_whoever_made_it(run: Run, path: Path, tmp_path: Path) -> None:
    with quire.open(path) as store:
        store.namespaces.create("cold", str(tmp_path / "cold"))
        store.create("old", "pages", namespace="cold")
    assert answer(run, "cold")["kind"] == "namespace"
    assert held(run, "cold") == [("database", "old"), ("store", "the store")]
    with quire.open(path) as store:
        store.drop("old")
        store.maintain()
        store.namespaces.drop("cold")
    assert held(run, "cold") == [("time", "grace")]


def test_the_mode_of_all_manifest_logs_is_a_file_that_is_explained(run: Run, path: Path) -> None:
    with quire.open(path) as store:
        store.streams.switch("shadow")
    (holder,) = answer(run, "streams/manifest_log.json")["holders"]
    assert "quire manifest mode" in holder["release"]


def test_a_reader_in_the_memory_of_a_running_server_is_named(run: Run, shop: Path) -> None:
    """It has no lease file: only the owner knows of it."""
    with quire.open(shop) as store, store.serve():
        reader = store.pages.open("shop").open_snapshot(tags={"by": "report"})
        found = [each for each in _beside(shop)["holders"] if each["kind"] == "reader"]
        assert [each for each in found if "by=report" in each["what"]], found
        reader.close()


def _beside(path: Path) -> Any:
    """What another process says."""
    command = ["-m", "quire", "why", "shop", "--json", "--store", str(path)]
    return json.loads(run_program(command, capture_output=True, check=True).stdout)


def test_the_versions_of_a_page_are_listed_with_who_needs_each(run: Run, shop: Path) -> None:
    changed, same = answer(run, "shop:0"), answer(run, "shop:9")
    assert (changed["kind"], changed["state"]) == ("page", "2 versions")
    now, monday = changed["holders"]
    assert (now["kind"], now["name"]) == ("database", "shop")
    assert now["what"].startswith("needs the version of lsn ")
    assert "in WAL segment " in now["what"]
    assert (monday["kind"], monday["name"]) == ("snapshot", "shop@monday")
    assert "in chunks, as of lsn " in monday["what"]
    assert same["state"] == "1 version"
    assert [holder["name"] for holder in same["holders"]] == ["shop", "shop@monday"], "both share what is unchanged"


def test_an_older_version_in_the_wal_waits_for_a_checkpoint_and_links_to_the_one_before(run: Run, shop: Path) -> None:
    with quire.open(shop) as store:
        write_pages(store, "shop", range(1), b"c")
    newest, older, _ = answer(run, "shop:0")["holders"]
    assert ", follows lsn " in newest["what"]
    assert older["what"].endswith("until a checkpoint absorbs it")
    assert older["release"] == "quire checkpoint shop"


@pytest.mark.parametrize("subject", ["shop:16", "shop:x", "nope:1"])
def test_what_is_no_page_is_refused(run: Run, shop: Path, subject: str) -> None:
    assert run("why", subject).code != 0


def test_the_first_forks_of_a_template_are_named_and_the_others_counted(run: Run, shop: Path) -> None:
    with quire.open(shop) as store:
        store.fork_many("shop", [f"tenant-{number:02d}" for number in range(30)])
    forks = [holder for holder in answer(run, "shop")["holders"] if holder["kind"].startswith("fork")]
    assert [holder["name"] for holder in forks] == [*(f"tenant-{number:02d}" for number in range(20)), "10 more"]
    assert run("tree", "--all", "--limit", "0").out.count("tenant-") == 30, "what the last one says"
