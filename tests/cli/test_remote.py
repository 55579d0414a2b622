"""Commands on a store that `quire serve` serves: executed there, displayed here (K8)."""

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
from quire.cli import main, remote, stream
from quire.cli.command import Cli
from quire.core.errors import AccessDenied, InvalidInput, Unavailable
from quire.service.commands import RemoteCommand
from tests.cli.conftest import CommandResult, quire_program
from tests.manifest.helpers import eventually
from tests.programs import Program
from tests.rules.tree import SRC
from tests.service.owners import served


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


def run(path: Path, *arguments: str, code: int | None = 0) -> CommandResult:
    """`code=None` accepts any exit code."""
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        exit_code = main.run([*arguments, "--store", str(path)])
    result = CommandResult(exit_code, out.getvalue(), err.getvalue())
    assert code is None or result.code == code, result
    return result


def test_json_of_the_owner_is_valid_on_a_stdout_without_unicode(root: Path) -> None:
    """The owner wrote characters that the client's stdout escaped as Python does: \\xfc is not JSON."""
    run(root, "kv", "put", "größen", "a", "b", "--create")
    env = {"PYTHONIOENCODING": "ascii"}
    shown = quire_program("stats", "größen", "--runner", "threads", "--json", "--store", str(root), env=env)
    assert shown.stdout.isascii()
    assert [row["database"] for row in json.loads(shown.stdout)] == ["größen"]
    as_text = quire_program("stats", "größen", "--runner", "threads", "--json", "--store", str(root))
    assert "größen" in as_text.stdout
    run(root, "drop", "größen", "--yes")


def test_a_name_that_is_not_unicode_is_a_mistake(root: Path) -> None:
    for line in (["create", "x\udcff"], ["kv", "get", "x\udcff", "a"], ["stats", "x\udcff", "--runner", "threads"]):
        assert "owner closed the connection" not in run(root, *line, code=2).err


def test_a_relative_url_of_a_namespace_is_relative_to_the_client(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    created = json.loads(run(root, "namespace", "create", "cold", "./cold", "--json").out)
    assert created["url"] == str(tmp_path / "cold")
    run(root, "namespace", "drop", "cold", "--yes")


def test_versions_are_created_and_dropped(root: Path) -> None:
    run(root, "snapshot", "create", "shop", "wednesday")
    dropped = json.loads(run(root, "snapshot", "drop", "shop", "wednesday", "--yes", "--json").out)
    assert (dropped["dropped"]["name"], dropped["dropped"]["database"]) == ("wednesday", "shop")
    run(root, "snapshot", "drop", "shop", "wednesday", "--yes", code=3)
    run(root, "retention", "set", "shop", "--keep-last", "5")
    assert json.loads(run(root, "retention", "show", "shop", "--json").out)["policy"]["keep_last"] == 5
    assert json.loads(run(root, "retention", "apply", "shop", "--yes", "--json").out)["dropped"] == []
    run(root, "retention", "clear", "shop")


@pytest.mark.parametrize(("answer", "code", "remains"), [("n\n", 1, True), ("", 2, True), ("y\n", 0, False)])
def test_confirmations_are_asked_locally(
    root: Path, monkeypatch: pytest.MonkeyPatch, answer: str, code: int, remains: bool
) -> None:
    names = {row["name"] for row in json.loads(run(root, "snapshot", "ls", "shop", "--json").out)}
    if "asked" not in names:
        run(root, "snapshot", "create", "shop", "asked")
    monkeypatch.setattr(sys, "stdin", io.StringIO(answer))
    result = run(root, "snapshot", "drop", "shop", "asked", code=code)
    assert "drop snapshot asked" in result.err
    names = {row["name"] for row in json.loads(run(root, "snapshot", "ls", "shop", "--json").out)}
    assert ("asked" in names) is remains


def test_maintenance_runs_at_the_owner(root: Path) -> None:
    job = json.loads(run(root, "checkpoint", "shop", "--runner", "threads", "--json").out)
    assert (job["state"], job["database"]) == ("succeeded", "shop")
    assert "needs no merge" in run(root, "merge", "shop", "--runner", "threads").out
    assert json.loads(run(root, "gc", "--json").out)["dry_run"] is False
    assert "grace" in run(root, "gc", "--now", "--yes", code=4).err
    assert "no damage found" in run(root, "verify", "--runner", "threads").out
    run(root, "jobs", "retry", str(job["job_id"]), code=4)
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


def test_streams_take_arguments_and_stdin(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run(root, "stream", "append", "clicks", "one", "two", "--create")
    monkeypatch.setattr(stream, "LINES_BYTES_MAX", 8)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"three\nfo\xffr\nfive\n")))
    appended = run(root, "stream", "append", "clicks")
    assert "appended 3 records to clicks" in appended.out
    records = json.loads(run(root, "stream", "tail", "clicks", "-n", "3", "--json").out)
    assert [bytes.fromhex(record["payload"]) for record in records] == [b"three", b"fo\xffr", b"five"]
    for command in ("info", "ls", "seal", "verify", "retention"):
        run(root, "stream", command, "clicks")


def test_paths_are_relative_to_the_caller(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with closing(sqlite3.connect(tmp_path / "app.db")) as connection:
        connection.executescript("create table t(x); insert into t values(7);")
    monkeypatch.chdir(tmp_path)
    run(root, "sqlite", "import", "app.db")
    run(root, "sqlite", "export", "app", "copy.db", "--check")
    with closing(sqlite3.connect("copy.db")) as copy:
        assert copy.execute("select x from t").fetchall() == [(7,)]
    run(root, "snapshot", "create", "app", "now")
    run(root, "restore", "app", "now", "restored.db", "--runner", "threads")
    assert (tmp_path / "restored.db").stat().st_size


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["jobs", "work", "--once"], "runs its jobs itself"),
        (["serve"], "has one owner"),
    ],
)
def test_commands_that_cannot_run_remotely_give_a_hint(root: Path, arguments: list[str], message: str) -> None:
    result = run(root, *arguments, code=5)
    assert message in result.err
    assert "Traceback" not in result.err


def test_a_file_is_followed_by_the_server(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file was followed by a process that owned the store, so no snapshot could be created meanwhile."""
    monkeypatch.chdir(tmp_path)
    with closing(sqlite3.connect("live.db")) as app:
        app.executescript("PRAGMA journal_mode=wal; create table t(x); insert into t values(1);")
        output = run(root, "sqlite", "follow", "live.db", "live", "--interval", "0.01").out
        assert "the server follows" in output
        assert "quire sqlite unfollow live" in output
        app.execute("insert into t values(2)")
        app.commit()
        count = ("sqlite", "shell", "live", "select count(*) from t")  # of what the server has published so far
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
    """In a separate process: LMDB can be opened only once per process."""
    store_option = ["--store", str(root)]
    shown = quire_program("sqlite", "shell", "shop", "select count(*), name from sqlite_master", *store_option)
    assert (shown.returncode, shown.stdout) == (0, "1|item\n"), shown.stderr
    assert quire_program("sqlite", "shell", "shop", "select 7", "--at", "monday", *store_option).stdout == "7\n"
    written = quire_program(
        "sqlite", "shell", "shop", "create table note(text); insert into note values('x')", *store_option
    )
    assert written.returncode == 0, written.stderr
    assert quire_program("sqlite", "shell", "shop", "select * from note", *store_option).stdout == "x\n"
    shell = quire_program("sqlite", "shell", "shop", *store_option, input="select 1;\n")
    assert shell.returncode == 0


def test_a_fork_between_snapshots_is_created_at_the_owner(root: Path) -> None:
    """The socket's fork call accepts snapshots only, so the whole command runs there."""
    assert "as shop was at snapshot monday (id 1)" in run(root, "fork", "shop", "at-monday", "--at", "monday").out
    output = run(root, "fork", "shop", "at-a-moment", "--at", "0s").out
    assert "created at-a-moment" in output
    assert "as shop was 2" in output
    assert "no such snapshot" in run(root, "fork", "shop", "nowhere", "--at", "someday", code=3).err
    for name in ("at-monday", "at-a-moment"):
        run(root, "drop", name, "--yes")


def test_an_owner_that_executes_no_commands(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire.service.commands._installed", [])
    with served(path) as (store, _):
        store.create("cart", "lsm")
        result = run(path, "kv", "put", "cart", "ann", "1", code=5)
        assert "another owner has this open" in result.err


def command(function: str, key: bytes = b"k" * 16, pid: int = 0, **arguments: Any) -> RemoteCommand:
    return RemoteCommand(function, json.dumps(arguments).encode(), key, pid or os.getpid(), True)


def test_a_command_is_executed_once(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its answer may be lost: the same key returns the same answer, and another process is refused."""
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


def test_every_command_runs_remotely_or_explains_why_not() -> None:
    """Every command that needs the owner is in one of the two lists."""
    known = {f"{module}.{name}" for module, names in remote.FUNCTIONS.items() for name in names} | set(remote.INSTEAD)
    for module in {module for module, _ in main.COMMANDS.values()} | {"manifest_log"}:
        text = (SRC / "quire" / "cli" / f"{module}.py").read_text("utf-8")
        if "cli.owner(" in text:
            assert any(name.startswith(f"{module}.") for name in known), module
    for module, names in remote.FUNCTIONS.items():
        imported = __import__(f"quire.cli.{module}", fromlist=names)
        assert all(callable(getattr(imported, name)) for name in names)


def test_a_borrowed_store_is_not_closed(path: Path) -> None:
    with quire.open(path) as store:
        cli: Cli = remote.OwnerCli(str(path), False, store)
        with cli.owner() as owner, cli.owner_or_client() as client:
            assert (owner, client) == (store, store)
        with cli.reader() as manifest:
            assert manifest is store.manifest
        assert [database.name for database in store.databases()] == ["clicks", "shop"]


def test_append_reports_its_own_records_while_others_append(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hazard: the first id and the number of records included those that other clients appended meanwhile."""
    with quire.open(tmp_path / "s") as store:
        stream = store.stream("clicks", create=True)
        append = stream.append

        def append_among_others(*records: Any, **options: Any) -> Any:
            append(b"other")
            appended = append(*records, **options)
            append(b"other")
            return appended

        monkeypatch.setattr(stream, "append", append_among_others)
        arguments = command("stream.append", database="clicks", record=["a", "b"])
        assert json.loads(remote.run_for_client(store, arguments).out) == {"first": 2, "count": 2}
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"c\nd\n")))
        lines = command("stream.append", database="clicks")
        assert json.loads(remote.run_for_client(store, lines).out) == {"first": 6, "count": 2}
