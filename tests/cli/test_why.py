"""why: what holds something, and which command releases it; the tests run that command."""

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


def holders_of(run: Run, subject: str) -> list[tuple[str, str]]:
    return [(holder["kind"], holder["name"]) for holder in explain(run, subject)["holders"]]


def explain(run: Run, subject: str) -> Any:
    return run("why", subject, "--json").data


def objects(path: Path, database: str = "shop") -> list[str]:
    """Keys of the base chunks of a database."""
    with quire.open(path, "r") as store, store.manifest.read() as txn:
        db_id = txn.database_id(database)
        below, rows = txn.object_prefixes()[0], txn.scan(t.CHUNK_CATALOG, db_id)
        return [f"{below}/{db:08x}/{slot:08x}/base:{generation:08x}" for (db, slot, generation), _ in rows]


def segments(path: Path) -> list[str]:
    """Paths of the WAL segments in the catalog."""
    with quire.open(path, "r") as store, store.manifest.read() as txn:
        return [f"pages/{row.origin_db_id:08x}/wal/{number:08x}.seg" for (_, number), row in txn.scan(t.WAL_CATALOG)]


def test_a_database_is_held_by_its_snapshots_and_forks(run: Run, shop: Path) -> None:
    with quire.open(shop) as store:
        store.fork("shop", "branch")
    *others, (kind, _) = holders_of(run, "shop")
    assert others == [("snapshot", "monday"), ("fork", "branch")]
    assert kind == "job", "a job truncates what the checkpoint absorbed"
    assert explain(run, "shop")["size_bytes"] > 0
    assert holders_of(run, "branch") == []
    assert run("why", "branch").out.splitlines()[-1] == "nothing holds it"


def test_a_running_query_is_shown_as_a_reader_not_as_a_snapshot(run: Run, shop: Path) -> None:
    """Versions leased to Spark were listed among the users' snapshots."""
    before = [run(*words).out for words in (("snapshot", "ls", "shop"), ("tree",), ("ls",))]
    with quire.open(shop) as store:
        lend(store.pages, ["shop"], 300)
    (reader,) = [holder for holder in explain(run, "shop")["holders"] if holder["kind"] == "reader"]
    assert reader["what"].startswith("is a query (Spark, for instance) that has read version ")
    assert "quire." not in reader["what"]
    assert before == [run(*words).out for words in (("snapshot", "ls", "shop"), ("tree",), ("ls",))]


def test_a_chunk_is_held_by_everything_that_has_its_slot(run: Run, shop: Path) -> None:
    (first,) = objects(shop)
    with quire.open(shop) as store:
        store.fork("shop", "branch", at="monday")
    assert holders_of(run, first) == [("database", "shop"), ("database", "branch"), ("snapshot", "shop@monday")]
    assert explain(run, first)["references"] == 1, "all of them share one leaf"


def test_the_suggested_command_releases_it(run: Run, shop: Path) -> None:
    (first,) = objects(shop)
    with quire.open(shop) as store:
        write = store.pages.open("shop").begin()
        write.write_pages(dict.fromkeys(range(16), b"c" * 4096))
        write.commit().result()
        store.checkpoint("shop")
    (holder,) = explain(run, first)["holders"]
    assert (holder["kind"], holder["name"]) == ("snapshot", "shop@monday")
    _, *command = holder["release"].split()
    assert run(*command, "--yes").code == 0
    assert [holder["kind"] for holder in explain(run, first)["holders"]] == ["time"]
    assert run("gc", "--now", "--yes").code == 0
    assert run("why", first).code == 3


def test_a_segment_waits_for_a_checkpoint(run: Run, shop: Path) -> None:
    (segment,) = [file for file in segments(shop) if explain(run, file)["state"].startswith("indexed")]
    (holder,) = explain(run, segment)["holders"]
    assert (holder["kind"], holder["name"], holder["release"]) == ("database", "shop", "quire checkpoint shop")
    assert run("checkpoint", "shop").code == 0
    assert not any(holder["release"] == "quire checkpoint shop" for holder in holders_or_none(run, segment))


def holders_or_none(run: Run, subject: str) -> list[dict[str, str]]:
    result = run("why", subject, "--json")
    return list(result.data["holders"]) if result.code == 0 else []


def test_a_fork_and_a_snapshot_pin_a_segment(run: Run, shop: Path) -> None:
    with quire.open(shop) as store:
        store.snapshot("shop", "tuesday")
        store.fork("shop", "branch", at="tuesday")
    pinned = [segment for segment in segments(shop) if ("snapshot", "shop@tuesday") in holders_of(run, segment)]
    assert pinned
    assert ("database", "branch") in holders_of(run, pinned[0])


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
def test_unknown_things_are_refused(run: Run, shop: Path, subject: str, code: int) -> None:
    result = run("why", subject)
    assert result.code == code
    assert result.err.count("\n") == 2


def test_why_fits_a_terminal(run: Run, shop: Path) -> None:
    lines = on_a_terminal("why", "shop", "--store", str(shop))
    assert max(map(width_of, lines)) <= 80
    assert lines[0].split() == ["what", "database", "shop"]


# ── files and objects by their path ───────────────────────────────────────────────────────────────────────────────────
@pytest.fixture
def full_store(run: Run, shop: Path) -> Path:
    """The store with a stream in several tiers, and a key-value set with a backup and a snapshot."""
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
    with quire.open(shop) as store:  # an open segment, as after a crash
        store.stream("clicks").append(b"c").result()
    return shop


def test_every_file_of_a_store_is_explained(run: Run, full_store: Path) -> None:
    """Every file in the directory, by its relative path and as a shell completes it."""
    files = [file for file in sorted(full_store.rglob("*")) if file.is_file()]
    paths = [str(file.relative_to(full_store)) for file in files]
    kinds = {}
    for path, file in zip(paths, files):
        result = run("why", path, "--json")
        assert result.code == 0, (path, result.err)
        kinds[path] = result.data["kind"]
        assert result.data["holders"], path
        assert run("why", str(file), "--json").out == result.out
        assert run("why", f"./{path}", "--json").out == result.out
    assert set(kinds.values()) >= {"base", "segment", "log", "backup", "file", "table"}
    assert [path for path in paths if path.startswith("objects/") and "/manifest/" in path]


def test_an_object_is_found_with_and_without_its_directory(run: Run, full_store: Path) -> None:
    (first,) = objects(full_store)
    assert explain(run, f"objects/{first}") == explain(run, first)
    assert run("why", f"{full_store}/objects/{first}", "--json").data == explain(run, first)


def test_a_manifest_log_is_held_by_its_stream(run: Run, full_store: Path) -> None:
    with quire.open(full_store, "r") as store:
        number = store.database("clicks").db_id
        with store.manifest.read() as txn:
            log = f"{txn.object_prefixes()[0]}/manifest/{number}/0.mlog"
    for path in (log, f"objects/{log}", f"streams/{number}/manifest/0.mlog"):
        explanation = explain(run, path)
        assert (explanation["kind"], explanation["size_bytes"] > 0) == ("log", True)
        (holder,) = explanation["holders"]
        assert (holder["kind"], holder["name"]) == ("database", "clicks")
        assert holder["what"].startswith("has chunk 0 of its manifest log in it")
    assert "quire manifest bundle clicks" in explain(run, log)["holders"][0]["release"]
    assert run("drop", "clicks", "--now", "--yes").code == 0
    leftover = full_store / f"streams/{number}/manifest/0.mlog"  # left by an owner that was killed before it swept
    leftover.parent.mkdir(parents=True, exist_ok=True)
    leftover.write_bytes(b"left")
    (holder,) = explain(run, f"streams/{number}/manifest/0.mlog")["holders"]
    assert (holder["kind"], holder["what"]) == ("time", "clicks was dropped")


def test_a_segment_of_a_stream_is_held_by_its_retention(run: Run, full_store: Path) -> None:
    with quire.open(full_store, "r") as store:
        number = store.database("clicks").db_id
    (holder,) = explain(run, f"streams/{number}/hot/{1:016x}.seg")["holders"]
    assert holder["what"] == "has its records 1 to 1 in it, until its retention drops them"
    retention = "quire stream retention clicks --days N --apply"
    assert holder["release"] == f"quire stream tier clicks evict, when it is in another tier too; or {retention}"
    (of_object,) = explain(run, f"{number:08x}/{1:08x}/wal:{0:08x}")["holders"]
    assert of_object == {**holder, "release": retention}, "evicting the local copy does not release the object"
    for tier, more in (("hot", ()), ("warm", ("--warm",))):  # the suggested command releases it
        path = f"streams/{number}/{tier}/{1:016x}.seg"
        (copy,) = explain(run, path)["holders"]
        command = " ".join(["quire", "stream", "tier", "clicks", "evict", *more])
        assert copy["release"].startswith(f"{command}, when it is in ")
        assert (full_store / path).exists()
        assert run(*command.split()[1:]).code == 0
        assert not (full_store / path).exists()


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
def test_a_path_of_a_file_that_does_not_exist(run: Run, full_store: Path, subject: str) -> None:
    for name in (subject, f"objects/{subject}"):
        result = run("why", name)
        assert result.code in ((3,) if name == subject else (2, 3)), name
        assert result.err.count("\n") == 2


def test_suggested_commands_quote_arguments(run: Run, path: Path) -> None:
    run("create", "my shop")
    run("snapshot", "create", "my shop", "last monday")
    (holder,) = explain(run, "my shop")["holders"]
    assert holder["release"] == "quire snapshot drop 'my shop' 'last monday' --now"


def test_every_file_of_a_store_in_use_is_explained(run: Run, full_store: Path, tmp_path: Path) -> None:
    """Files that a killed owner leaves, readers' leases and spare segments, and each kind of temporary file."""
    copy = tmp_path / "left"
    with quire.open(full_store) as store:
        store.stream("clicks").append(b"d").result()
        store.kv("cart")
        write_pages(store, "shop", range(2), b"d")
        shutil.copytree(full_store, copy)
        stream, kv = store.database("clicks").db_id, store.database("cart").db_id
    home = f"lsm/{kv:08x}"
    (table,) = [str(file.relative_to(copy)) for file in copy.glob(f"{home}/sst/*.sst")]
    created = {
        *(f"readers/{uuid.uuid4()}.lease{end}" for end in ("", ".tmp")),
        *("quire.toml.tmp", "manifest.lmdb.tmp", "manifest.lmdb.tmp-lock", "quire.sock.at.tmp", "quire.sock"),
        *("admin.token", "read.token", "scratch/12", "scratch/13/part-0.arrow", "objects/.tmp/1f.part"),
        *(f"pages/00000001/{name}" for name in ("follow.json", "follow.json.tmp", "wal/00000007.seg.tmp")),
        *(f"pages/00000001/cache/{objects(full_store)[0].partition('/e/00000001/')[2]}{end}" for end in ("", ".tmp")),
        *(f"streams/{stream}/{name}" for name in ("stream.json.tmp", "hot/spare-4.seg.tmp", f"warm/{1:016x}.seg.tmp")),
        *(f"streams/{stream}/manifest/{name}" for name in ("7.mlog.tmp", "snapshot_9.bin.tmp")),
        *(f"{home}/{name}" for name in (f"loads/{3:016x}.json", f"loads/{3:016x}.json.tmp", "wal/000009.log.tmp")),
        *(f"{home}/manifest/{name}.tmp" for name in ("000000.log", "MANIFEST-000001")),
        *(f"{table}.0a1b2c3d.tmp", f"{home}/snapshots/000099/wal/000001.log", f"objects/doctor/{'0' * 16}"),
    }
    for name in created:
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        (copy / name).write_bytes(b"some")
    existing = {str(file.relative_to(copy)) for file in copy.rglob("*") if file.is_file()}
    assert existing >= created | {f"streams/{stream}/stream.json"}
    assert any("/snapshots/" in name for name in existing - created), "there is a real snapshot too"
    for path in sorted(existing):
        result = run("why", path, "--json", at=copy)
        assert result.code == 0, (path, result.err)
        assert result.data["holders"], path


def test_stream_json_is_held_by_its_stream(run: Run, full_store: Path) -> None:
    with quire.open(full_store, "r") as store:
        path = f"streams/{store.database('clicks').db_id}/stream.json"
    explanation = explain(run, path)
    assert (explanation["kind"], explanation["size_bytes"]) == ("file", (full_store / path).stat().st_size)
    (holder,) = explanation["holders"]
    assert (holder["name"], holder["release"]) == ("clicks", "quire drop clicks")
    assert "its consumers" in holder["what"]


def test_files_of_a_key_value_snapshot_are_held_by_it(run: Run, full_store: Path) -> None:
    paths = [file for file in full_store.glob("lsm/*/snapshots/*/**/*") if file.is_file()]
    assert paths
    for path in paths:
        assert holders_of(run, str(path)) == [("snapshot", "cart@full")]
    assert run("snapshot", "drop", "cart", "full", "--now", "--yes").code == 0
    leftover = Path(str(paths[0]))  # left by an owner that was killed before it swept
    leftover.parent.mkdir(parents=True, exist_ok=True)
    leftover.write_bytes(b"left")
    (holder,) = explain(run, str(leftover))["holders"]
    assert "a dropped snapshot" in holder["what"]
    assert run("kv", "get", "cart", "ann").code == 0
    assert not leftover.exists(), "removed, as announced"


# ── snapshots ─────────────────────────────────────────────────────────────────────────────────────────────────────────
def test_a_snapshot_in_the_form_that_is_printed(run: Run, shop: Path) -> None:
    (first,) = objects(shop)
    names = [holder["name"] for holder in explain(run, first)["holders"] if holder["kind"] == "snapshot"]
    assert names == ["shop@monday"]
    explanation = explain(run, "shop@monday")
    assert (explanation["subject"], explanation["kind"], explanation["state"]) == ("shop@monday", "snapshot", "named")
    shown = run("snapshot", "show", "shop", "monday", "--json").data
    assert explanation["size_bytes"] == shown["chunk_bytes"] + shown["wal_bytes"] > 0
    assert explain(run, "shop@#1") == explain(run, "shop@1") == explanation
    (holder,) = explanation["holders"]
    assert holder["release"] == "quire snapshot drop shop monday --now"
    assert run(*holder["release"].split()[1:], "--yes").code == 0
    dropped = run("why", "shop@monday")
    assert (dropped.code, "quire snapshot ls shop" in dropped.err) == (3, True)


def test_an_unnamed_snapshot_and_names_that_contain_an_at(run: Run, shop: Path) -> None:
    with quire.open(shop) as store:
        store.create("a@b", "pages")
        store.snapshot("a@b", "c@d")
        store.snapshot("a@b", tags={"by": "lend"})
        store.snapshot("a@b", tags={"time-travel": "1"})
        store.snapshot("a@b", "hourly", tags={"schedule": "hour"})
    assert explain(run, "a@b")["kind"] == "database"
    assert explain(run, "a@b@c@d")["subject"] == "a@b@c@d"
    kinds = [explain(run, f"a@b@{version}")["holders"][0]["kind"] for version in ("#2", "#3", "hourly")]
    assert kinds == ["reader", "time", "database"]
    for name in ("a@b@", "a@b@never", "a@b@#99", "a@b@99999999999"):
        assert run("why", name).code == 3
    assert "no such snapshot" not in run("why", "@monday").err


# ── unreferenced files ────────────────────────────────────────────────────────────────────────────────────────────────
def test_why_says_what_removes_an_unreferenced_file(run: Run, full_store: Path) -> None:
    assert "quire verify --orphans" in run("why", "00000001/00000077/base:00000001").err
    with quire.open(full_store, "r") as store:
        stream = store.database("clicks").db_id
    stray = full_store / "pages/00000001/wal/000000f0.seg"
    stray.write_bytes(b"stray")
    result = run("why", str(stray))
    assert (result.code, "when it next opens the database" in result.err) == (3, True)
    assert "shop, id 1 (0x1)" in result.err
    with quire.open(full_store) as store:
        store.pages.open("shop")
    assert not stray.exists(), "removed, as announced"
    for path in ("pages/00000099/wal/00000001.seg", "lsm/00000099/sst/000001.sst"):
        (full_store / path).parent.mkdir(parents=True)
        (full_store / path).write_bytes(b"foreign")
        result = run("why", path)
        assert (result.code, "153 (0x99)" in result.err, "quire neither reads nor removes it" in result.err) == (
            3,
            True,
            True,
        )
    assert "gc --dry-run" not in run("why", f"streams/{stream}/hot/00000000000000ff.seg").err


def test_leftovers_of_a_dropped_stream_are_removed_with_the_next(run: Run, full_store: Path) -> None:
    with quire.open(full_store) as store:
        first = store.database("clicks").db_id
        store.create("next", "stream")
        store.stream("next")
    assert run("drop", "clicks", "--now", "--yes").code == 0
    leftover = full_store / f"streams/{first}/stream.json"
    leftover.parent.mkdir(parents=True, exist_ok=True)
    leftover.write_bytes(b"left")
    (holder,) = explain(run, str(leftover))["holders"]
    assert (holder["what"], holder["release"]) == (
        "clicks was dropped",
        "maintenance, or when the next stream is dropped",
    )
    assert run("drop", "next", "--now", "--yes").code == 0
    assert not leftover.exists(), "removed, as announced"


def test_a_namespace_is_held_by_its_databases_and_its_creator(run: Run, path: Path, tmp_path: Path) -> None:
    with quire.open(path) as store:
        store.namespaces.create("cold", str(tmp_path / "cold"))
        store.create("old", "pages", namespace="cold")
    assert explain(run, "cold")["kind"] == "namespace"
    assert holders_of(run, "cold") == [("database", "old"), ("store", "the store")]
    with quire.open(path) as store:
        store.drop("old")
        store.maintain()
        store.namespaces.drop("cold")
    assert holders_of(run, "cold") == [("time", "grace")]


def test_the_file_with_the_mode_of_manifest_logs_is_explained(run: Run, path: Path) -> None:
    with quire.open(path) as store:
        store.streams.switch("shadow")
    (holder,) = explain(run, "streams/manifest_log.json")["holders"]
    assert "quire manifest mode" in holder["release"]


def test_a_reader_known_only_to_the_running_server_is_named(run: Run, shop: Path) -> None:
    """It has no lease file: only the owner knows it."""
    with quire.open(shop) as store, store.serve():
        reader = store.pages.open("shop").open_snapshot(tags={"by": "report"})
        readers = [holder for holder in _beside(shop)["holders"] if holder["kind"] == "reader"]
        assert [holder for holder in readers if "by=report" in holder["what"]], readers
        reader.close()


def _beside(path: Path) -> Any:
    """The answer of another process."""
    command = ["-m", "quire", "why", "shop", "--json", "--store", str(path)]
    return json.loads(run_program(command, capture_output=True, check=True).stdout)


def test_the_versions_of_a_page_are_listed_with_their_holders(run: Run, shop: Path) -> None:
    changed, same = explain(run, "shop:0"), explain(run, "shop:9")
    assert (changed["kind"], changed["state"]) == ("page", "2 versions")
    now, monday = changed["holders"]
    assert (now["kind"], now["name"]) == ("database", "shop")
    assert now["what"].startswith("needs the version of lsn ")
    assert "in WAL segment " in now["what"]
    assert (monday["kind"], monday["name"]) == ("snapshot", "shop@monday")
    assert "in chunks, as of lsn " in monday["what"]
    assert same["state"] == "1 version"
    assert [holder["name"] for holder in same["holders"]] == ["shop", "shop@monday"], "both share the unchanged part"


def test_an_older_version_in_the_wal_waits_for_a_checkpoint_and_links_to_its_predecessor(run: Run, shop: Path) -> None:
    with quire.open(shop) as store:
        write_pages(store, "shop", range(1), b"c")
    newest, older, _ = explain(run, "shop:0")["holders"]
    assert ", follows lsn " in newest["what"]
    assert older["what"].endswith("until a checkpoint absorbs it")
    assert older["release"] == "quire checkpoint shop"


def test_a_snapshot_before_a_checkpoint_needs_the_segment_that_it_pins_not_the_chunk(run: Run, path: Path) -> None:
    with quire.open(path) as store:
        store.create("till", "pages")
        write_pages(store, "till", range(4), b"a")
        store.snapshot("till", "monday")
        write_pages(store, "till", range(2), b"b")
        store.checkpoint("till")
        store.maintain()
        write_pages(store, "till", range(1), b"c")
    page = explain(run, "till:0")
    whats = {holder["name"]: holder["what"] for holder in page["holders"]}
    assert page["state"] == "3 versions", "in the segment that monday pins, in the chunk, and in the open segment"
    assert "in pinned WAL segment 1" in whats["till@monday"] or "in WAL segment 1," in whats["till@monday"]
    assert "in WAL segment " in whats["till"]
    untouched = {holder["name"]: holder["what"] for holder in explain(run, "till:3")["holders"]}
    assert "in chunks, as of lsn " in untouched["till"]
    assert "WAL segment 1" in untouched["till@monday"]


def test_each_snapshot_needs_the_chunks_of_its_own_time(run: Run, path: Path) -> None:
    with quire.open(path) as store:
        store.create("till", "pages")
        for name, fill in (("monday", b"a"), ("tuesday", b"b")):
            write_pages(store, "till", range(4), fill)
            store.checkpoint("till")
            store.snapshot("till", name)
        write_pages(store, "till", range(4), b"c")
        store.checkpoint("till")
    page = explain(run, "till:0")
    needed = [(holder["name"], holder["what"].rpartition(" ")[2]) for holder in page["holders"]]
    assert page["state"] == "3 versions"
    assert [name for name, _ in needed] == ["till", "till@tuesday", "till@monday"], "newest first"
    assert len({lsn for _, lsn in needed}) == 3


def test_a_fork_needs_the_version_that_it_was_made_of_until_it_has_its_own(run: Run, path: Path) -> None:
    with quire.open(path) as store:
        store.create("till", "pages")
        write_pages(store, "till", range(4), b"a")
        store.checkpoint("till")
        store.fork("till", "trial")
        write_pages(store, "till", range(4), b"b")
        store.checkpoint("till")
        write_pages(store, "trial", range(1), b"c")
        store.pages.close_idle()
    forks = [
        [holder for holder in explain(run, f"till:{page}")["holders"] if holder["kind"] == "fork"] for page in (0, 1)
    ]
    assert forks[0] == [], "page 0 of the fork is its own"
    assert [holder["name"] for holder in forks[1]] == ["trial"]
    assert "in chunks, as of lsn " in forks[1][0]["what"]


@pytest.mark.parametrize("subject", ["shop:16", "shop:x", "nope:1"])
def test_an_invalid_page_is_refused(run: Run, shop: Path, subject: str) -> None:
    assert run("why", subject).code != 0


def test_the_first_forks_of_a_template_are_named_and_the_rest_counted(run: Run, shop: Path) -> None:
    with quire.open(shop) as store:
        store.fork_many("shop", [f"tenant-{number:02d}" for number in range(30)])
    forks = [holder for holder in explain(run, "shop")["holders"] if holder["kind"].startswith("fork")]
    assert [holder["name"] for holder in forks] == [*(f"tenant-{number:02d}" for number in range(20)), "10 more"]
    assert run("tree", "--all", "--limit", "0").out.count("tenant-") == 30, "the text of the last holder"
