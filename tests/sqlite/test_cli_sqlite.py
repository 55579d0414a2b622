"""`quire sqlite`: import, export, follow and shell, as people and scripts use them."""

from __future__ import annotations

import hashlib
import io
import json
import os
import random
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing, redirect_stderr, redirect_stdout
from pathlib import Path

import apsw
import pytest

import quire
from quire.cli import main
from quire.cli.sqlite import followed_text
from quire.core.errors import SnapshotGone
from quire.sqlite.exporting import export_file
from quire.sqlite.follow import Followed
from tests.cli.conftest import CommandResult, on_a_terminal, quire_program
from tests.programs import Program
from tests.rules.tree import SRC
from tests.service.owners import OWNER, end, line, process
from tests.sqlite.follow_helpers import SqlProgram, content, sqlite_content
from tests.sqlite.sqlite_files import dump, integrity, make

WAL = "PRAGMA journal_mode=wal; PRAGMA wal_autocheckpoint=20"
TABLE = "CREATE TABLE t (id INTEGER PRIMARY KEY, x)"
ROW = "INSERT INTO t (x) VALUES (randomblob(3000))"


@pytest.fixture
def root(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "store"
    quire.open(path).close()
    yield path
    with quire.open(path) as store:
        assert store.manifest.check() == []


def run(root: Path, *arguments: str, typed: str = "") -> CommandResult:
    """Run a command in this process: starting another one takes longer than most commands."""
    out, err = io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(err):
        patch.setattr(sys, "stdin", io.StringIO(typed))
        code = main.run(["sqlite", *arguments, "--store", str(root)])
    return CommandResult(code, out.getvalue(), err.getvalue())


def test_import_and_export(root: Path, tmp_path: Path) -> None:
    file, out = make(tmp_path / "shop.db"), tmp_path / "out.db"
    first = run(root, "import", str(file))
    assert (first.code, first.err) == (0, "")
    assert first.out.startswith(f"imported {file} as shop: ")
    with quire.open(root) as store:
        store.snapshot("shop", "monday")
    monday = file.read_bytes()
    with closing(sqlite3.connect(file)) as connection:
        connection.execute("UPDATE item SET name = 'changed' WHERE id = 7")
        connection.commit()
    second = run(root, "import", str(file), "shop", "--replace", "--json").data
    assert (second["created"], second["name"], second["note"]) == (False, "shop", "")
    assert 0 < second["changed_pages"] < second["size_pages"]
    assert "already matches" in run(root, "import", str(file), "--replace").out

    exported = run(root, "export", "shop", str(out), "--check", "--json").data
    assert dump(out) == dump(file)
    assert exported["sha256"] == hashlib.sha256(file.read_bytes()).hexdigest()
    existing = run(root, "export", "shop", str(out))
    assert (existing.code, existing.out) == (4, "")
    assert "--force" in existing.err
    for at in ("monday", "1"):
        dated = run(root, "export", "shop", str(out), "--at", at, "--force")
        assert "as of snapshot monday (id 1)" in dated.out
        assert out.read_bytes() == monday
    again = run(root, "export", "shop", str(out), "--at", exported["epoch"], "--force", "--json")
    assert again.data["lsn"] == exported["lsn"]
    later = run(root, "export", "shop", str(out), "--at", "0s", "--force", "--json")
    assert later.data["lsn"] == exported["lsn"]
    assert "in the future" in run(root, "export", "shop", str(out), "--at", "2999-01-01", "--force").err
    assert integrity(out) == "ok"


def test_failures_have_exit_codes(root: Path, tmp_path: Path) -> None:
    (tmp_path / "noise.db").write_bytes(os.urandom(5000))
    refused = run(root, "import", str(tmp_path / "noise.db"), "--json")
    assert refused.code == 2
    error = json.loads(refused.err)["error"]
    assert error["kind"] == "InvalidInput"
    assert "encrypted" in error["next"]
    assert run(root, "import", str(tmp_path / "missing.db")).code == 3
    file = make(tmp_path / "shop.db")
    os.truncate(file, 8192)
    assert run(root, "import", str(file)).code == 7
    file.unlink()
    run(root, "import", str(make(file)))
    assert run(root, "import", str(make(tmp_path / "small.db", page_size=512)), "shop", "--replace").code == 8
    assert run(root, "export", "nobody", str(tmp_path / "out.db")).code == 3
    unknown = run(root, "export", "shop", str(tmp_path / "out.db"), "--at", "never")
    assert unknown.code == 3
    assert "quire snapshot ls shop" in unknown.err
    assert run(root, "follow", str(file), "--once", "--interval", "0").code == 2


@pytest.mark.parametrize("point", ["pages.segment.frames", "pages.wal.synced"])
def test_a_killed_import_can_be_repeated(root: Path, tmp_path: Path, point: str) -> None:
    file = make(tmp_path / "shop.db")
    env = {"QUIRE_FAILPOINTS": f"{point}=kill"}
    killed = quire_program("sqlite", "import", str(file), "--store", str(root), env=env)
    assert killed.returncode == -signal.SIGKILL
    with quire.open(root) as store:
        assert content(store, "shop") in (b"", file.read_bytes()), "an import is atomic"
    assert run(root, "import", str(file), "--replace").code == 0
    with quire.open(root) as store:
        assert content(store, "shop") == file.read_bytes()


def test_progress_is_for_terminals(root: Path, tmp_path: Path) -> None:
    file = make(tmp_path / "shop.db")
    output = "\n".join(on_a_terminal("sqlite", "import", str(file), "--store", str(root)))
    assert "copying" in output
    assert "/s" in output, "the transfer rate"
    assert run(root, "import", str(file), "other").err == ""


def test_follow_once_copies_new_changes(root: Path, tmp_path: Path) -> None:
    with SqlProgram(tmp_path / "app.db") as app:
        app.run_sql(WAL, TABLE, ROW)
        first = run(root, "follow", str(app.path), "--once", "--json").data
        assert (first["name"], first["compares"], first["transactions"]) == ("app", 1, 0)
        app.run_sql(ROW, ROW)
        second = run(root, "follow", str(app.path), "--once")
        assert second.out == f"app matches {app.path}: 2 transactions; {second.out.split('; ')[1]}"
        assert run(root, "follow", str(app.path), "--once").out == f"app matches {app.path}: no changes\n"
        with quire.open(root) as store:
            assert content(store, "app") == sqlite_content(app.path)
    assert run(root, "follow", str(tmp_path / "missing.db"), "--once").code == 3


def start_following(root: Path, file: Path, **more: str) -> subprocess.Popen[str]:
    command = ["-m", "quire", "sqlite", "follow", str(file), "copy", "--interval", "0.02", "--json"]
    env = {**os.environ, "PYTHONPATH": str(SRC), **more}
    return Program([*command, "--store", str(root)], stdout=subprocess.PIPE, env=env)


def wait_for_position(root: Path) -> None:
    deadline = time.monotonic() + 120
    while not list(root.glob("pages/*/follow.json")):
        assert time.monotonic() < deadline, "the follower has not started"
        time.sleep(0.02)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_follow_ends_cleanly_on_a_signal(root: Path, tmp_path: Path, number: signal.Signals) -> None:
    with SqlProgram(tmp_path / "app.db") as app:
        app.run_sql(WAL, TABLE, ROW)
        process = start_following(root, app.path)
        wait_for_position(root)
        app.run_sql(*[ROW] * 50)
        time.sleep(0.3)
        process.send_signal(number)
        out, _ = process.communicate(timeout=120)
        assert process.returncode == 0
        assert json.loads(out)["lsn"] > 0
        run(root, "follow", str(app.path), "copy", "--once")
        with quire.open(root) as store:
            assert content(store) == sqlite_content(app.path)


@pytest.mark.parametrize("point", ["sqlite.follow.committed", "pages.wal.synced"])
def test_a_killed_follower_can_be_restarted(root: Path, tmp_path: Path, point: str) -> None:
    with SqlProgram(tmp_path / "app.db") as app:
        app.run_sql(WAL, TABLE, ROW)
        for hits in (0, 3):
            process = start_following(root, app.path, QUIRE_FAILPOINTS=f"{point}={hits}*off->kill")
            deadline = time.monotonic() + 120
            while (
                process.poll() is None and time.monotonic() < deadline
            ):  # it is killed at a commit, so there must be commits
                app.run_sql(ROW, "UPDATE t SET x = randomblob(500) WHERE id % 9 = 1")
                time.sleep(0.03)
            process.communicate(timeout=120)
            assert process.returncode == -signal.SIGKILL
        run(root, "follow", str(app.path), "copy", "--once")
        with quire.open(root) as store:
            assert content(store) == sqlite_content(app.path)


# ── the shell ─────────────────────────────────────────────────────────────────────────────────────────────────────────
def test_the_shell_opens_on_a_malformed_schema_and_repairs_it(root: Path, tmp_path: Path) -> None:
    """Neither a connection nor the shell could be opened."""
    run(root, "import", str(make(tmp_path / "shop.db")))
    spoil = "UPDATE sqlite_master SET sql = replace(sql, 'CREATE TABLE', 'CREATE TABEL') WHERE name = 'item'"
    mend = "UPDATE sqlite_master SET sql = replace(sql, 'CREATE TABEL', 'CREATE TABLE') WHERE name = 'item'"
    assert run(root, "shell", "shop", f"PRAGMA writable_schema=on; {spoil}").code == 0
    broken = run(root, "shell", "shop", "SELECT count(*) FROM item")
    assert broken.code == 2
    assert "malformed database schema" in broken.err
    assert run(root, "shell", "shop", f"PRAGMA writable_schema=on; {mend}").code == 0
    assert run(root, "shell", "shop", "SELECT count(*) FROM item", "PRAGMA integrity_check").out == "200\nok\n"


def test_the_shell_runs_statements(root: Path, tmp_path: Path) -> None:
    run(root, "import", str(make(tmp_path / "shop.db")))
    with quire.open(root) as store:
        store.snapshot("shop", "monday")
    assert run(root, "shell", "shop", "SELECT count(*) FROM item").out == "200\n"
    assert run(root, "shell", "shop", "DELETE FROM item WHERE id > 50").code == 0
    assert run(root, "shell", "shop", "SELECT count(*) FROM item", "PRAGMA integrity_check").out == "50\nok\n"
    assert run(root, "shell", "shop", "SELECT count(*) FROM item", "--at", "monday").out == "200\n"
    failed = run(root, "shell", "shop", "SELECT nonsense")
    assert failed.code == 2
    assert "no such column: nonsense" in failed.err
    read_only = run(root, "shell", "shop", "DELETE FROM item", "--at", "monday")
    assert read_only.code == 2
    assert "readonly" in read_only.err
    assert run(root, "shell", "nobody").code == 3


def test_the_shell_writes_beside_a_server(root: Path, tmp_path: Path) -> None:
    run(root, "import", str(make(tmp_path / "shop.db")))
    with quire.open(root) as store:
        store.snapshot("shop", "monday")
    owner = process(OWNER, str(root))
    line(owner)
    assert run(root, "shell", "shop", "DELETE FROM item WHERE id > 50; SELECT 'x;y', 1").out == "x;y|1\n"
    assert run(root, "shell", "shop", "SELECT count(*) FROM item").out == "50\n"
    assert run(root, "shell", "shop", "SELECT count(*) FROM item", "--at", "monday").out == "200\n"
    both = run(root, "shell", "shop", "BEGIN", "DELETE FROM item", "SELECT count(*) FROM item", "ROLLBACK")
    assert (both.code, both.out) == (0, "0\n")
    failed = run(root, "shell", "shop", "SELECT nonsense")
    assert (failed.code, failed.err.count("no such column: nonsense")) == (2, 1)
    script = "DELETE FROM item WHERE id = 1;\n.tables item%\nSELECT count(*) FROM item;\n"
    typed = run(root, "shell", "shop", typed=script)
    assert (typed.code, "item" in typed.out, typed.out.endswith("49\n")) == (0, True, True)
    end(owner)
    assert run(root, "shell", "shop", "SELECT count(*) FROM item").out == "49\n"


def test_an_error_in_a_statement_is_reported_once(root: Path, tmp_path: Path) -> None:
    run(root, "import", str(make(tmp_path / "shop.db")))
    failed = run(root, "shell", "shop", "SELEC 1")
    assert (failed.code, failed.out, failed.err.count("syntax error")) == (2, "", 1)
    for_programs = run(root, "shell", "shop", "SELEC 1", "--json")
    assert "syntax error" in str(json.loads(for_programs.err)["error"]), "stderr contains nothing else"
    timed = run(root, "shell", "shop", ".timer on", "SELECT 7")
    assert (timed.code, timed.out) == (0, "7\n")
    assert timed.err, "messages of the shell are shown"


def test_the_shell_has_no_colours_with_no_color(root: Path, tmp_path: Path) -> None:
    run(root, "import", str(make(tmp_path / "shop.db")))
    output = on_a_terminal("sqlite", "shell", "shop", "SELECT 7, 'seven', NULL", "--store", str(root))
    assert "seven" in "".join(output)
    assert "\x1b" not in "".join(output), "NO_COLOR"


@pytest.mark.parametrize(
    ("result", "text"),
    [
        (Followed(compares=1, pages=9), "1 comparison of all pages; 9 pages written"),
        (Followed(compares=3, pages=1), "3 comparisons of all pages; 1 page written"),
        (Followed(transactions=2, patches=2, pages=2),
         "2 transactions, 2 patches over restarted logs; 2 pages written"),
    ],
)  # fmt: skip
def test_the_summary_of_a_follower(result: Followed, text: str) -> None:
    assert followed_text(result, "app.db", "app") == f"app matches app.db: {text}"


def test_the_shell_reads_what_is_typed(root: Path, tmp_path: Path) -> None:
    run(root, "import", str(make(tmp_path / "shop.db")))
    typed = "SELECT 'hello ' || count(*) FROM item;\n.tables item%\n"
    result = run(root, "shell", "shop", typed=typed)
    assert (result.code, result.err) == (0, "")
    assert "hello 200" in result.out
    assert "item" in result.out.splitlines()[-1]
    assert run(root, "shell", "shop", typed=".exit 3\n").code == 3
    failed = run(root, "shell", "shop", typed="SELEC 1;\nSELECT 'goes' || ' on'")  # without a final semicolon
    assert failed.code == 1
    assert "goes on" in failed.out
    assert "syntax error" in failed.err
    as_a_program = quire_program("sqlite", "shell", "shop", "--store", str(root), input=typed)
    assert as_a_program.stdout == result.out


def test_changes_made_in_the_shell_are_exported(root: Path, tmp_path: Path) -> None:
    """Import, modify with SQLite on quire, export: the result is the same as with SQLite on a file."""
    file, out = make(tmp_path / "shop.db", page_size=1024, auto_vacuum=1), tmp_path / "out.db"
    run(root, "import", str(file))
    changes = (
        "DELETE FROM item WHERE id % 3 = 0",
        "UPDATE price SET cents = cents * 2 WHERE item > 20",
        "INSERT INTO words VALUES ('added in the shell')",
        "CREATE TABLE more AS SELECT name, length(picture) AS bytes FROM item",
    )
    assert run(root, "shell", "shop", *changes).code == 0
    assert run(root, "export", "shop", str(out), "--check").code == 0
    with closing(apsw.Connection(str(file))) as connection:
        for change in changes:
            connection.execute(change)
    assert dump(out) == dump(file)


# ── for long ──────────────────────────────────────────────────────────────────────────────────────────────────────────
BUSY = """
import os, random, sqlite3, sys, time
rng = random.Random(int(sys.argv[2]))
connection = sqlite3.connect(sys.argv[1], isolation_level=None, timeout=30)
connection.execute("PRAGMA journal_mode=wal")
connection.execute("PRAGMA synchronous=off")
connection.execute(f"PRAGMA wal_autocheckpoint={rng.choice((5, 50, 500))}")
connection.execute("CREATE TABLE IF NOT EXISTS t (id INTEGER PRIMARY KEY, x)")
connection.execute("CREATE TABLE IF NOT EXISTS pair (a, b)")
if not connection.execute("SELECT count(*) FROM pair").fetchone()[0]:
    connection.execute("INSERT INTO pair VALUES (0, 0)")
while True:
    connection.execute("BEGIN IMMEDIATE")
    connection.execute("UPDATE pair SET a = a + 1")
    for _ in range(rng.randrange(6)):
        connection.execute("INSERT OR REPLACE INTO t VALUES (?, randomblob(?))", (rng.randrange(300), rng.randrange(6000)))
    connection.execute("UPDATE pair SET b = a")
    connection.execute("COMMIT")
    if rng.random() < 0.01:
        connection.execute(f"PRAGMA wal_checkpoint({rng.choice(('PASSIVE', 'RESTART', 'TRUNCATE'))})")
    if rng.random() < 0.3:
        time.sleep(rng.random() * 0.01)
"""


def kill_both_repeatedly(root: Path, tmp_path: Path, seed: int, rounds: int) -> None:
    """A writing program and its follower are killed at any moment, independently; versions are complete, and the last
    one equals the file.
    """
    rng = random.Random(seed)
    file = tmp_path / "app.db"
    writer = Program(["-c", BUSY, str(file), str(seed)])
    process = start_following(root, file)
    try:
        for round_ in range(rounds):
            time.sleep(0.4 + rng.random() * 1.2)
            if rng.random() < 0.4:
                writer.kill()
                writer.wait()
                writer = Program(["-c", BUSY, str(file), str(seed * 100 + round_)])
            else:
                process.kill()
                process.communicate()
                process = start_following(root, file)
        time.sleep(1.5)
    finally:
        writer.kill()
        writer.wait()
        process.kill()
        process.communicate()
    run(root, "follow", str(file), "copy", "--once")
    with quire.open(root) as store:
        assert content(store) == sqlite_content(file)
        assert_versions_are_complete(store, tmp_path / "version.db")


def assert_versions_are_complete(store: quire.Store, out: Path) -> None:
    newest = store.pages.open("copy").durable_version()[0]
    checked = 0
    for lsn in range(newest, 0, -max(newest // 12, 1)):
        try:
            export_file(store.pages, "copy", out, at=lsn, force=True, check=True)
        except SnapshotGone:
            break  # a checkpoint has removed older versions
        with closing(apsw.Connection(str(out))) as connection:
            assert connection.execute("SELECT a = b FROM pair").fetchall() in ([], [(1,)])
        checked += 1
    assert checked


def test_a_follower_and_its_program_are_killed(root: Path, tmp_path: Path) -> None:
    kill_both_repeatedly(root, tmp_path, seed=1, rounds=3)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10, 20))
def test_long_a_follower_and_its_program_are_killed(root: Path, tmp_path: Path, seed: int) -> None:
    kill_both_repeatedly(root, tmp_path, seed, rounds=20)


def test_a_missing_chunk_is_reported_as_such_and_not_as_a_bug(root: Path) -> None:
    with quire.open(root) as store:
        store.create("shop", "pages")
        with closing(store.sqlite("shop")) as db:
            db.execute(f"{TABLE}; INSERT INTO t (x) VALUES (1)")
        store.checkpoint("shop")
        store.worker.drain()  # the pages in the chunk leave the page index
    for path in (root / "objects").rglob("base:*"):
        path.unlink()
    for result in (
        run(root, "shell", "shop", "SELECT * FROM t"),
        run(root, "shell", "shop", typed="SELECT * FROM t;\n"),
    ):
        assert result.code == 7
        assert "a chunk's object is missing" in result.err
        assert "a bug" not in result.err
