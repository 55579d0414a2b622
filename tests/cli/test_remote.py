"""Commands on a store that `quire serve` has: done there, told here (K8)."""

from __future__ import annotations

import io
import json
import os
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import pytest

import quire
from quire.cli import main, remote
from quire.cli.command import Cli
from quire.core.errors import AccessDenied, InvalidInput, Unavailable
from quire.service.commands import RemoteCommand
from tests.cli.conftest import Ended, quire_program
from tests.manifest.helpers import eventually
from tests.programs import Program
from tests.rules.tree import SRC
from tests.service.world import served


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A store that another process serves."""
    path = tmp_path_factory.mktemp("away") / "store"
    with quire.open(path) as store:
        store.create("shop", "pages")
        with store.sqlite("shop") as db:
            db.execute("create table item(name)")
        store.snapshot("shop", "monday")
        store.snapshot("shop", "tuesday")
        store.feed.register(name="my-app")
    env = {**os.environ, "PYTHONPATH": str(SRC)}
    command = ["-m", "quire", "serve", "--store", str(path)]
    with Program(command, stdout=subprocess.PIPE, env=env) as serving:
        assert serving.stdout is not None
        assert serving.stdout.readline().startswith("listening on")
        yield path
        serving.send_signal(signal.SIGTERM)
        assert serving.wait(30) == 0


def run(path: Path, *arguments: str, code: int | None = 0) -> Ended:
    """`code=None`: any."""
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        found = main.run([*arguments, "--store", str(path)])
    ended = Ended(found, out.getvalue(), err.getvalue())
    assert code is None or ended.code == code, ended
    return ended


def test_versions_are_made_and_dropped(root: Path) -> None:
    run(root, "snapshot", "create", "shop", "wednesday")
    dropped = json.loads(run(root, "snapshot", "drop", "shop", "wednesday", "--yes", "--json").out)
    assert (dropped["dropped"]["name"], dropped["dropped"]["database"]) == ("wednesday", "shop")
    run(root, "snapshot", "drop", "shop", "wednesday", "--yes", code=3)
    run(root, "retention", "set", "shop", "--keep-last", "5")
    assert json.loads(run(root, "retention", "show", "shop", "--json").out)["policy"]["keep_last"] == 5
    assert json.loads(run(root, "retention", "apply", "shop", "--yes", "--json").out)["dropped"] == []
    run(root, "retention", "clear", "shop")


@pytest.mark.parametrize(("answer", "code", "left"), [("n\n", 1, True), ("", 2, True), ("y\n", 0, False)])
def test_questions_are_asked_here(
    root: Path, monkeypatch: pytest.MonkeyPatch, answer: str, code: int, left: bool
) -> None:
    names = {each["name"] for each in json.loads(run(root, "snapshot", "ls", "shop", "--json").out)}
    if "asked" not in names:
        run(root, "snapshot", "create", "shop", "asked")
    monkeypatch.setattr(sys, "stdin", io.StringIO(answer))
    ended = run(root, "snapshot", "drop", "shop", "asked", code=code)
    assert "drop snapshot asked" in ended.err
    names = {each["name"] for each in json.loads(run(root, "snapshot", "ls", "shop", "--json").out)}
    assert ("asked" in names) is left


def test_upkeep_is_done_at_the_owner(root: Path) -> None:
    told = json.loads(run(root, "checkpoint", "shop", "--runner", "threads", "--json").out)
    assert (told["state"], told["database"]) == ("succeeded", "shop")
    assert "needs no merge" in run(root, "merge", "shop", "--runner", "threads").out
    assert json.loads(run(root, "gc", "--json").out)["dry_run"] is False
    assert "grace" in run(root, "gc", "--now", "--yes", code=4).err
    assert "no damage found" in run(root, "verify", "--runner", "threads").out
    run(root, "jobs", "retry", str(told["job_id"]), code=4)
    run(root, "jobs", "cancel", "4711", code=3)
    assert "dropped cursor my-app" in run(root, "feed", "drop", "my-app", "--yes").out


def test_key_value_databases(root: Path) -> None:
    run(root, "kv", "put", "cart", "ann", "3 äpfel", "--create")
    assert run(root, "kv", "get", "cart", "ann").out == "3 äpfel\n"
    assert json.loads(run(root, "kv", "scan", "cart", "--json").out)[0]["key"] == b"ann".hex()
    assert "ann" in run(root, "kv", "scan", "cart").out
    run(root, "kv", "get", "cart", "bob", code=3)
    run(root, "kv", "delete", "cart", "ann")
    for command in ("stats", "compact", "verify", "backup", "backups"):
        run(root, "kv", command, "cart")


def test_streams_take_arguments_and_lines(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run(root, "stream", "append", "clicks", "one", "two", "--create")
    monkeypatch.setattr(remote, "LINES_BYTES_MAX", 8)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"three\nfo\xffr\nfive\n")))
    appended = run(root, "stream", "append", "clicks")
    assert "appended 3 records to clicks" in appended.out
    found = json.loads(run(root, "stream", "tail", "clicks", "-n", "3", "--json").out)
    assert [bytes.fromhex(each["payload"]) for each in found] == [b"three", b"fo\xffr", b"five"]
    for command in ("info", "ls", "seal", "verify", "retention"):
        run(root, "stream", command, "clicks")


def test_files_are_those_of_who_asks(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with closing(sqlite3.connect(tmp_path / "app.db")) as made:
        made.executescript("create table t(x); insert into t values(7);")
    monkeypatch.chdir(tmp_path)
    run(root, "sqlite", "import", "app.db")
    run(root, "sqlite", "export", "app", "copy.db", "--check")
    with closing(sqlite3.connect("copy.db")) as copy:
        assert copy.execute("select x from t").fetchall() == [(7,)]
    run(root, "snapshot", "create", "app", "now")
    run(root, "restore", "app", "now", "restored.db", "--runner", "threads")
    assert (tmp_path / "restored.db").stat().st_size


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["jobs", "work", "--once"], "runs its jobs itself"),
        (["serve"], "has one owner"),
    ],
)
def test_what_cannot_be_done_there_says_what_to_do(root: Path, arguments: list[str], said: str) -> None:
    ended = run(root, *arguments, code=5)
    assert said in ended.err
    assert "Traceback" not in ended.err


def test_following_beside_a_server_is_done_by_it(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file was followed by a process that owned the store, so nobody could make a snapshot meanwhile."""
    monkeypatch.chdir(tmp_path)
    with closing(sqlite3.connect("live.db")) as app:
        app.executescript("PRAGMA journal_mode=wal; create table t(x); insert into t values(1);")
        said = run(root, "sqlite", "follow", "live.db", "live", "--interval", "0.01").out
        assert "the server follows" in said
        assert "quire sqlite unfollow live" in said
        app.execute("insert into t values(2)")
        app.commit()
        count = ("sqlite", "shell", "live", "select count(*) from t")  # of what the server has published by then
        assert eventually(lambda: run(root, *count, code=None).out.strip() == "2")
        run(root, "snapshot", "create", "live", "meanwhile")
        assert json.loads(run(root, "sqlite", "follow", "live.db", "live", "--once", "--json").out)["lsn"] >= 2
        (row,) = [row for row in json.loads(run(root, "ls", "--json").out) if row["name"] == "live"]
        assert row["follows"] == str(tmp_path / "live.db")
        assert str(tmp_path / "live.db") in run(root, "ls").out.replace("\n", "")
        assert "1 SQLite file" in run(root, "info").out
        assert "no longer" in run(root, "sqlite", "unfollow", "live").out
        assert json.loads(run(root, "info", "--json").out)["followed_files"] == 0
        assert "follows no file" in run(root, "sqlite", "unfollow", "live", code=3).err


def test_a_shell_beside_the_owner_reads_and_writes(root: Path) -> None:
    """A process of its own: LMDB is opened once in each."""
    where = ["--store", str(root)]
    shown = quire_program("sqlite", "shell", "shop", "select count(*), name from sqlite_master", *where)
    assert (shown.returncode, shown.stdout) == (0, "1|item\n"), shown.stderr
    assert quire_program("sqlite", "shell", "shop", "select 7", "--at", "monday", *where).stdout == "7\n"
    written = quire_program("sqlite", "shell", "shop", "create table note(text); insert into note values('x')", *where)
    assert written.returncode == 0, written.stderr
    assert quire_program("sqlite", "shell", "shop", "select * from note", *where).stdout == "x\n"
    talked = quire_program("sqlite", "shell", "shop", *where, input="select 1;\n")
    assert talked.returncode == 0


def test_a_fork_between_snapshots_is_made_at_the_owner(root: Path) -> None:
    """Its socket knows snapshots only, so the whole command is done there."""
    assert "as shop was at snapshot monday (id 1)" in run(root, "fork", "shop", "at-monday", "--at", "monday").out
    made = run(root, "fork", "shop", "at-a-moment", "--at", "0s").out
    assert "created at-a-moment" in made
    assert "as shop was 2" in made
    assert "no such snapshot" in run(root, "fork", "shop", "nowhere", "--at", "someday", code=3).err
    for name in ("at-monday", "at-a-moment"):
        run(root, "drop", name, "--yes")


def test_an_owner_that_runs_no_commands(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire.service.commands._installed", [])
    with served(path) as (store, _):
        store.create("cart", "lsm")
        ended = run(path, "kv", "put", "cart", "ann", "1", code=5)
        assert "another owner has this open" in ended.err


def command(function: str, key: bytes = b"k" * 16, pid: int = 0, **given: Any) -> RemoteCommand:
    return RemoteCommand(function, json.dumps(given).encode(), key, pid or os.getpid(), True)


def test_a_command_is_done_once(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its answer may be lost: the same key gives the same answer, and another process refuses."""
    monkeypatch.setattr("quire.service.commands._installed", [remote.run_for_client])
    with served(path) as (store, _), quire.connect(path) as client:
        store.stream("clicks", create=True)
        append = command("stream.append", database="clicks", record=["one"])
        first = client.run_command(append)
        assert client.run_command(append) == first
        assert store.stream("clicks").end_record == json.loads(first.out)["first"] + 1
        with pytest.raises(Unavailable, match="another process has taken the store over"):
            client.run_command(command("stream.append", b"l" * 16, 1, database="clicks", record=["two"]))
        for other in ("tour.tour", "jobs.work", "check.check", "away.run_for_client", "os.system"):
            with pytest.raises(InvalidInput):
                client.run_command(command(other, b"m" * 16))


def test_commands_are_for_the_owners_own_machine(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire.service.commands._installed", [remote.run_for_client])
    with served(path, "grpc://127.0.0.1:0") as (_, server):
        token = str(path / "admin.token")
        with quire.connect(server.address, token_file=token) as client, pytest.raises(AccessDenied):
            client.run_command(command("stores.create", name="x"))


def test_every_command_is_done_there_or_says_why_not() -> None:
    """A command that owns the store is in one of the two lists."""
    known = {f"{module}.{name}" for module, names in remote.FUNCTIONS.items() for name in names} | set(remote.INSTEAD)
    for module in {module for module, _ in main.COMMANDS.values()} | {"manifest_log"}:
        text = (SRC / "quire" / "cli" / f"{module}.py").read_text("utf-8")
        if "cli.owner(" in text:
            assert any(each.startswith(f"{module}.") for each in known), module
    for module, names in remote.FUNCTIONS.items():
        imported = __import__(f"quire.cli.{module}", fromlist=names)
        assert all(callable(getattr(imported, name)) for name in names)


def test_what_is_lent_is_not_closed(path: Path) -> None:
    with quire.open(path) as store:
        cli: Cli = remote.OwnerCli(str(path), False, store)
        with cli.owner() as lent, cli.owner_or_client() as kept:
            assert (lent, kept) == (store, store)
        with cli.reader() as manifest:
            assert manifest is store.manifest
        assert [each.name for each in store.databases()] == ["clicks", "shop"]
