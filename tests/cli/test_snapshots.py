"""snapshot create, ls, show, drop, diff; fork."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

import pytest

import quire
from quire.cli.output import width_of
from quire.manifest.records import WINDOW_TAG, JobKind, WalState
from quire.manifest.tables import WAL_CATALOG
from tests.cli.conftest import Run, first_byte, on_a_terminal, write_pages
from tests.rules.tree import SRC


def test_create_with_and_without_a_name(run: Run, shop: Path) -> None:
    created = run("snapshot", "create", "shop", "tuesday", "--tag", "by=ann", "--tag", "why=a=b", "--json").data
    assert (created["database"], created["name"], created["kind"], created["snapshot_id"]) == (
        "shop",
        "tuesday",
        "named",
        2,
    )
    assert created["tags"] == {"by": "ann", "why": "a=b"}
    assert run("snapshot", "create", "shop").out == "created snapshot #3 of shop\n"
    assert run("snapshot", "create", "shop", "friday").out == "created snapshot friday (id 4) of shop\n"
    assert [row["name"] for row in run("snapshot", "ls", "shop", "--json").data] == [
        "monday",
        "tuesday",
        "",
        "friday",
    ]


@pytest.mark.parametrize(
    ("arguments", "code", "next_step"),
    [
        (["shop", "monday"], 4, "choose another name"),
        (["nothing", "x"], 3, "`quire ls` lists the databases"),
        (["shop", "a/b"], 2, "use '-' or '.' instead"),
        (["shop", "x", "--tag", "novalue"], 2, "use --tag key=value"),
        (["shop", "x", "--tag", "=v"], 2, "use --tag key=value"),
        (["shop", "x", "--tag", "a=1", "--tag", "a=2"], 2, "give each key once"),
        (["shop", "x", "--tag", "schedule=hourly"], 2, "use another"),
    ],
)
def test_create_refuses_and_changes_nothing(
    run: Run, shop: Path, arguments: list[str], code: int, next_step: str
) -> None:
    before = run("info", "--json").data["newest_change"]
    result = run("snapshot", "create", *arguments)
    assert (result.code, result.out) == (code, "")
    message, hint = result.err.splitlines()
    assert message.startswith("error: ")
    assert next_step in hint
    assert run("snapshot", "ls", "shop", "--json").data[-1]["name"] == "monday"
    assert run("info", "--json").data["newest_change"] == before


def test_ls(run: Run, shop: Path) -> None:
    lines = run("snapshot", "ls", "shop").out.splitlines()
    assert lines[0].split() == ["id", "name", "created", "size", "about"]
    assert lines[1].split()[:2] == ["1", "monday"]
    assert lines[1].split()[4:] == ["64.0", "KiB", "by=ann"]
    assert "`quire snapshot create clicks NAME` creates one" in run("snapshot", "ls", "clicks").out
    assert run("snapshot", "ls", "clicks", "--json").data == []
    assert run("snapshot", "ls", "nothing").code == 3


def test_show_lists_what_it_keeps_and_what_only_it_holds(run: Run, shop: Path) -> None:
    data = run("snapshot", "show", "shop", "monday", "--json").data
    assert (data["size_pages"], data["slots"], data["artifacts"], data["wal_bytes"], data["forks"]) == (16, 1, 1, 0, [])
    assert data["share"] == {"chunks": 0, "deltas": 0, "wal_segments": 0, "size_bytes": 0, "tables": 0, "artifacts": 0}
    with quire.open(shop) as store:
        write_pages(store, "shop", range(12), b"c")
        for _ in range(9):  # until the slot is rewritten and only the snapshot holds the old base
            write_pages(store, "shop", range(12), b"d")
            store.checkpoint("shop")
            store.manifest.jobs.enqueue(JobKind.MERGE, 1)
            store.maintain()
    run("fork", "shop", "copy")
    data = run("snapshot", "show", "shop", "1", "--json").data
    assert (data["share"]["chunks"], data["share"]["size_bytes"]) == (1, data["chunk_bytes"])
    text = run("snapshot", "show", "shop", "monday").out
    assert "snapshot   monday (id 1) of shop, named" in text
    assert "exclusive  1 chunk (" in text


def test_show_names_the_forks(run: Run, shop: Path) -> None:
    run("fork", "shop", "then", "--at", "monday")
    assert run("snapshot", "show", "shop", "monday", "--json").data["forks"] == ["then"]


@pytest.mark.parametrize("name", ["1", "12", "0", "007", "#3", "٣"])
def test_a_name_that_looks_like_an_id_is_refused(run: Run, shop: Path, name: str) -> None:
    result = run("snapshot", "create", "shop", name)
    assert (result.code, result.out) == (2, "")
    assert result.err.splitlines()[0].startswith("error: a snapshot name cannot be a number")
    assert len(run("snapshot", "ls", "shop", "--json").data) == 1


def test_a_numeric_name_created_by_a_program_can_be_dropped(run: Run, shop: Path) -> None:
    with quire.open(shop) as store:
        store.snapshot("shop", "1")
        store.snapshot("shop", "#1")
    assert run("snapshot", "drop", "shop", "1", "--yes").out.startswith("dropped snapshot 1 (id 2) of shop")
    assert run("snapshot", "drop", "shop", "#1", "--now", "--yes").out.startswith(
        "dropped snapshot monday (id 1) of shop"
    )
    assert run("snapshot", "drop", "shop", "#1", "--yes").out.startswith("dropped snapshot #1 (id 3) of shop")


def test_a_snapshot_is_found_by_name_first_then_by_id(run: Run, shop: Path) -> None:
    with quire.open(shop) as store:
        store.snapshot("shop", "1")
    assert run("snapshot", "show", "shop", "1", "--json").data["snapshot_id"] == 2, "it has that name"
    assert run("snapshot", "show", "shop", "#1", "--json").data["snapshot_id"] == 1
    assert run("snapshot", "show", "shop", "2", "--json").data["snapshot_id"] == 2
    for text in ("3", "#0", "#", "²", "99999999999999999999", "nope", ""):
        result = run("snapshot", "show", "shop", text)
        assert (result.code, result.err.splitlines()[1]) == (3, "next:  `quire snapshot ls shop` lists them")


@pytest.mark.parametrize(
    ("seconds", "says"), [(0, "it cannot be brought back"), (7200, "it can be brought back for 2 h")]
)
def test_drop_says_how_long_it_can_be_undone(run: Run, shop: Path, seconds: int, says: str) -> None:
    (shop / "quire.toml").write_text(f"[maintenance]\nundrop_seconds = {seconds}\n")
    refused = run("snapshot", "drop", "shop", "monday", answer="n\n")
    assert refused.err.endswith(f"({says})? [y/N] ")


def test_drop_asks_and_lists_what_is_freed(run: Run, shop: Path) -> None:
    refused = run("snapshot", "drop", "shop", "monday", answer="n\n")
    assert (refused.code, refused.out) == (1, "nothing was dropped\n")
    question = "drop snapshot monday (id 1) of shop, which shares all its chunks and segments"
    assert refused.err == f"{question} (it can be brought back for a day)? [y/N] "
    assert run("snapshot", "drop", "shop", "monday", "--now", answer="n\n").err == (
        f"{question} (it cannot be brought back)? [y/N] "
    )
    nothing = {"dropped": None, "until_ms": None, "share": None}
    assert run("snapshot", "drop", "shop", "monday", "--json", answer="\n").data == nothing
    unanswered = run("snapshot", "drop", "shop", "monday", answer="")
    assert (unanswered.code, unanswered.out) == (2, "")
    assert "use `--yes` to confirm" in unanswered.err
    assert len(run("snapshot", "ls", "shop", "--json").data) == 1
    assert (
        run("snapshot", "drop", "shop", "monday", "--now", answer="y\n").out
        == "dropped snapshot monday (id 1) of shop\n"
    )
    twice = run("snapshot", "drop", "shop", "monday", "--yes")
    assert (twice.code, "`quire snapshot ls shop`" in twice.err) == (3, True)


def test_drop_shows_the_bytes_that_only_it_holds(run: Run, shop: Path) -> None:
    """Only the snapshot holds a pinned WAL segment that the database has absorbed."""
    run("snapshot", "create", "shop", "pinned")
    assert run("checkpoint", "shop").code == 0
    prompt = run("snapshot", "drop", "shop", "pinned", "--now", answer="n\n").err
    assert "and delete 1 WAL segment (" in prompt
    assert "that only it holds (it cannot be brought back)? [y/N]" in prompt
    result = run("snapshot", "drop", "shop", "pinned", "--now", "--yes", "--json").data
    assert (result["dropped"]["name"], result["share"]["wal_segments"], result["share"]["artifacts"]) == (
        "pinned",
        1,
        1,
    )
    waiting = run("gc", "--dry-run", "--json").data["waiting"]
    assert (
        sum(artifact["size_bytes"] for artifact in waiting if artifact["artifact"]["kind"] == "wal")
        >= result["share"]["size_bytes"]
    )


def test_diff_to_now_to_another_and_to_itself(run: Run, shop: Path) -> None:
    data = run("snapshot", "diff", "shop", "monday", "--json").data
    assert (data["same"], data["slots"], len(data["pins_added"]), data["unsealed"]) == (False, [], 1, False)
    run("checkpoint", "shop")
    data = run("snapshot", "diff", "shop", "monday", "--json").data
    (slot,) = data["slots"]
    assert (slot["slot"], slot["pages"], data["pages"], data["pins_added"]) == (0, [0, 1, 2, 3], 4, [])
    assert [link["kind"] for link in slot["after"]] == ["base", "delta"]
    assert (data["added"][0]["kind"], data["removed"]) == ("delta", [])
    assert (data["before"]["snapshot"], data["after"]["snapshot_id"]) == ("monday", 0)
    text = run("snapshot", "diff", "shop", "monday", "now").out
    assert "after   shop as it is now" in text
    assert "pages   at most 4 pages\n" in text
    assert "base:1@16 + delta-1:2@20" in text
    assert "none: both are the same version" in run("snapshot", "diff", "shop", "monday", "1").out


def test_diff_with_a_fork(run: Run, shop: Path) -> None:
    run("fork", "shop", "then", "--at", "monday")
    assert run("snapshot", "diff", "shop", "monday", "--of", "then", "--json").data["same"] is True
    assert run("snapshot", "diff", "shop", "now", "now", "--of", "then", "--json").data["same"] is False


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["shop", "nope"], 3),
        (["shop", "monday", "nope"], 3),
        (["shop", "monday", "--of", "nothing"], 3),
        (["nothing", "now"], 3),
        (["shop"], 2),
        (["shop", "monday", "--limit", "-1"], 2),
    ],
)
def test_diff_refuses_invalid_versions(run: Run, shop: Path, arguments: list[str], code: int) -> None:
    result = run("snapshot", "diff", *arguments)
    assert (result.code, result.out) == (code, "")
    assert len(result.err.splitlines()) == 2


def test_fork_now_and_at_a_snapshot(run: Run, shop: Path) -> None:
    assert (
        run("fork", "shop", "then", "--at", "monday").out
        == "created then with id 3, as shop was at snapshot monday (id 1)\n"
    )
    fork = run("fork", "shop", "copy", "--json").data
    assert (fork["name"], fork["parent"], fork["kind"]) == ("copy", "shop", "pages")
    assert (first_byte(shop, "then"), first_byte(shop, "copy")) == (b"a", b"b")


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["shop", "clicks"], 4),
        (["shop", "a/b"], 2),
        (["nothing", "x"], 3),
        (["shop", "x", "--at", "nope"], 3),
        (["shop", "x", "--at", "2999-01-01"], 2),
        (["clicks", "x"], 2),
    ],
)
def test_fork_refuses_and_changes_nothing(run: Run, shop: Path, arguments: list[str], code: int) -> None:
    result = run("fork", *arguments)
    assert (result.code, result.out) == (code, "")
    assert [row["name"] for row in run("ls", "--json").data] == ["clicks", "shop"]


def crash_while_writing(path: Path) -> None:
    """An owner that dies right after a commit: its segment stays open."""
    program = f"""
import os, quire
store = quire.open({str(path)!r})
with store.pages.open("shop").begin() as transaction:
    transaction.write_page(0, b"z" * 4096)
os._exit(0)
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60, env={**os.environ, "PYTHONPATH": str(SRC)})


def test_a_snapshot_after_a_crash_includes_the_last_commit(run: Run, shop: Path) -> None:
    """The owner died with an open segment: durable commits count although recovery has not run yet."""
    crash_while_writing(shop)
    with quire.open(shop, "r") as store, store.manifest.read() as txn:
        assert any(row.state is WalState.OPEN for _, row in txn.scan(WAL_CATALOG, 1))
    diff = run("snapshot", "diff", "shop", "monday")
    assert "not included  the open WAL segment of shop" in diff.out
    run("snapshot", "create", "shop", "after")
    run("fork", "shop", "then", "--at", "after")
    assert first_byte(shop, "then") == b"z"


def test_snapshots_fit_a_terminal(run: Run, shop: Path) -> None:
    run("snapshot", "create", "shop", "before the sale", "--tag", "why=" + "words " * 20)
    run("checkpoint", "shop")
    for command in (["ls", "shop"], ["show", "shop", "2"], ["diff", "shop", "monday"]):
        lines = on_a_terminal("snapshot", *command, "--store", str(shop))
        assert len(lines) > 1
        assert max(map(width_of, lines)) <= 80


def test_bidirectional_overrides_in_names_are_escaped(run: Run, shop: Path) -> None:
    unsafe_name = "a\u202eb"
    outputs = [
        run("snapshot", "create", "shop", unsafe_name),
        run("snapshot", "ls", "shop"),
        run("snapshot", "show", "shop", unsafe_name),
        run("tree"),
        run("retention", "plan", "shop"),
        run("audit"),
        run("snapshot", "drop", "shop", unsafe_name, answer="n\n"),
        run("snapshot", "drop", "shop", unsafe_name, "--yes"),
    ]
    for result in outputs:
        assert "\u202e" not in result.out + result.err
        assert "\\u202e" in result.out + result.err


def test_errors_are_json_if_requested(run: Run, shop: Path) -> None:
    error = json.loads(run("snapshot", "show", "shop", "nope", "--json").err)["error"]
    assert (error["kind"], error["exit_code"], error["where"]) == (
        "UnknownSnapshot",
        3,
        {"database": "shop", "snapshot": "nope"},
    )


def test_a_key_value_database_is_forked_too(run: Run, path: Path) -> None:
    with quire.open(path) as store:
        store.kv("sessions", create=True).put(b"a", b"1")
    assert run("snapshot", "create", "sessions", "monday").code == 0
    assert run("fork", "sessions", "copy", "--at", "monday").code == 0
    with quire.open(path) as store:
        assert store.kv("copy").get(b"a") == b"1"
    assert run("fork", "clicks", "other").code == 2, "streams cannot be forked"


def test_a_fork_starts_at_any_version(run: Run, path: Path, tmp_path: Path) -> None:
    """`fork --at`, `sqlite export --at` and `sqlite shell --at` accept the same versions: there is one parser."""
    with quire.open(path) as store, store.sqlite("prices", create=True) as db:
        db.execute("create table item(price); insert into item values(1)")
    epoch = run("sqlite", "export", "prices", str(tmp_path / "one.db"), "--json").data["epoch"]
    first = f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%S.%f}"
    with quire.open(path) as store, store.sqlite("prices") as db:
        db.execute("update item set price = 2")
    assert "as prices was at epoch" in run("fork", "prices", "by-epoch", "--at", epoch).out
    assert "as prices was 20" in run("fork", "prices", "by-time", "--at", first).out
    assert run("checkpoint", "prices").code == 0
    assert run("fork", "prices", "newest", "--at", "0s").code == 0
    prices = {}
    with quire.open(path) as store:
        for name in ("by-epoch", "by-time", "newest"):
            with store.sqlite(name) as db:
                prices[name] = db.execute("select price from item").fetchall()
    assert prices == {"by-epoch": [(1,)], "by-time": [(1,)], "newest": [(2,)]}
    for text in ("1:99999999999", "2001-01-01", "9999999999:1"):
        result = run("fork", "prices", "nowhere", "--at", text)
        assert (result.code in (2, 3, 4), result.out) == (True, ""), result
        assert "Traceback" not in result.err
    assert "no such snapshot" in run("fork", "prices", "nowhere", "--at", "3:x").err


def test_a_rollback_explains_how_to_undo_it(run: Run, shop: Path) -> None:
    done = run("rollback", "shop", "--to", "monday")
    message, _, undo = done.out.splitlines()
    assert message == "shop is again as it was at snapshot monday (id 1): 4 pages changed"
    assert first_byte(shop, "shop") == b"a"
    assert run(*undo.split("`")[1].split()[1:]).code == 0
    assert first_byte(shop, "shop") == b"b"
    data = run("rollback", "shop", "--to", "0s", "--json").data
    assert (data["changed_pages"], data["snapshot"]) == (0, "")
    assert "also names a version" in run("rollback", "shop", "--to", "mundey").err
    assert run("rollback", "clicks", "--to", "1h").code == 2
    assert "rolled back; before it" in run("audit", "shop").out


def test_a_dropped_database_is_listed_undropped_and_freed(run: Run, shop: Path) -> None:
    data = run("drop", "shop", "--snapshots", "--yes", "--json").data
    assert data["until_ms"] > 0
    assert [info["name"] for info in run("ls", "--json").data] == ["clicks"]
    (dropped,) = run("ls", "--dropped", "--json").data
    assert (dropped["name"], dropped["snapshots"], dropped["size_bytes"] > 0) == ("shop", 1, True)
    assert "quire undrop NAME" in run("ls", "--dropped").out
    assert "can be restored for maintenance.undrop_seconds" in run("why", "shop").out
    assert "shop (dropped)" in run("stats").out
    assert run("undrop", "shop").out == "restored shop with 1 snapshot\n"
    assert first_byte(shop, "shop") == b"b"
    run("drop", "shop", "--snapshots", "--yes")
    run("create", "shop")
    assert run("undrop", "shop").code == 4
    assert run("undrop", "shop", "--as", "old").out.startswith("restored old")
    assert run("drop", "old", "--snapshots", "--yes").code == 0
    assert "can no longer be brought back" in run("drop", "old", "--now", "--yes").out
    assert "no dropped databases" in run("ls", "--dropped").out
    assert "quire ls --dropped" in run("undrop", "old").err
    assert run("drop", "shop", "--now", "--yes").out == "dropped shop\n"


def test_a_key_value_database_is_forked_at_snapshots_only(run: Run, path: Path) -> None:
    with quire.open(path) as store:
        store.create("sessions", "lsm")
    result = run("fork", "sessions", "copy", "--at", "1h")
    assert (result.code, "only page databases can be forked between snapshots" in result.err) == (2, True), result


def test_a_leased_snapshot_shows_its_reader_and_expiry(run: Run, shop: Path) -> None:
    """Like the one of a query on Spark."""
    until = 1_900_000_000_000
    with quire.open(shop) as store:
        lease = store.pages.snapshot("shop", tags={"by": "lend"}, expires_at_ms=until)
    *_, line = run("snapshot", "ls", "shop").out.splitlines()
    assert line.endswith("held by a query (Spark or another reader), expires 2030-03-17 17:46:40Z")
    shown = run("snapshot", "show", "shop", str(lease.snapshot_id)).out
    assert "purpose    held by a query" in shown
    assert "expires    2030-03-17 17:46:40Z" in shown
    holder = next(row for row in run("why", "shop", "--json").data["holders"] if row["name"] == f"#{lease.snapshot_id}")
    assert holder["what"] == "is held by a query (Spark or another reader) that keeps this version"
    assert holder["release"] == f"by itself 2030-03-17 17:46:40Z, or quire snapshot drop shop {lease.snapshot_id} --now"


def test_snapshots_kept_for_time_travel_are_marked(run: Run, shop: Path) -> None:
    with quire.open(shop) as store:
        store.pages.snapshot("shop", tags={WINDOW_TAG: "window"}, expires_at_ms=1_900_000_000_000)
    assert "for time travel, expires 2030-03-17 17:46:40Z" in run("snapshot", "ls", "shop").out


def test_a_key_value_set_is_rolled_back_to_a_snapshot(run: Run, path: Path) -> None:
    with quire.open(path) as store:
        store.kv("cart", create=True).put(b"ann", b"1")
        store.snapshot("cart", "monday")
        store.kv("cart").write({b"ann": b"2", b"bob": b"3"})
    result = run("rollback", "cart", "--to", "monday")
    assert "2 keys changed" in result.out
    assert "undo with `quire rollback cart --to before-rollback-" in result.out
    assert "nothing to do" in run("rollback", "cart", "--to", "monday").out
    assert "one of its snapshots" in run("rollback", "cart", "--to", "1h").err
    with quire.open(path, "r") as store:
        assert dict(store.kv("cart").scan()) == {b"ann": b"1"}


def test_a_dropped_snapshot_is_listed_undropped_and_freed(run: Run, shop: Path) -> None:
    (snapshot,) = run("snapshot", "ls", "shop", "--json").data
    dropped = run("snapshot", "drop", "shop", snapshot["name"], "--yes")
    assert f"`quire snapshot undrop shop {snapshot['name']}` brings it back until" in dropped.out
    assert f"dropped, was {snapshot['name']}, expires" in run("snapshot", "ls", "shop").out
    assert "brings it back" in run("why", f"shop@{snapshot['snapshot_id']}").out
    assert run("snapshot", "undrop", "shop", snapshot["name"], "--json").data == snapshot
    assert run("snapshot", "undrop", "shop", snapshot["name"]).code == 3
    data = run("snapshot", "drop", "shop", snapshot["name"], "--yes", "--json").data
    assert data["until_ms"] > 0
    repeated = run("snapshot", "drop", "shop", f"#{snapshot['snapshot_id']}", "--yes")
    assert (repeated.code, "--now" in repeated.err) == (3, True)
    data = run("snapshot", "drop", "shop", f"#{snapshot['snapshot_id']}", "--now", "--yes", "--json").data
    assert data["until_ms"] is None
    assert run("snapshot", "ls", "shop", "--json").data == []
    assert "snapshot undropped" in run("audit", "shop").out
