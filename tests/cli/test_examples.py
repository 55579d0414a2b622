"""The example at the end of each command's help is run literally: all of them, in sequence, in one store.

Exceptions: commands that run until they are interrupted get an option that ends them (`ENDING_OPTIONS`), and the
example that uses Spark has its own test, because it needs the session.
"""

from __future__ import annotations

import io
import os
import re
import shlex
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import closing, redirect_stderr, redirect_stdout
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

import quire
from quire.archive.clones import CloneRegistration, register
from quire.cli import main, output
from quire.core.settings import ArchiveSettings, StoreSettings
from quire.durable import quarantine
from quire.durable.files import OsDisk
from quire.manifest.records import JobKind
from tests.cli.commands import COMMANDS
from tests.cli.conftest import CommandResult
from tests.programs import Program
from tests.rules.tree import SRC

IN_ORDER = (
    "init", "create", "jobs ls", "jobs show", "jobs cancel", "jobs retry", "jobs work",
    "sqlite import", "ls", "info", "why", "snapshot create", "snapshot ls", "snapshot show", "snapshot diff",
    "fork", "rollback", "tree", "sqlite export", "sqlite shell", "sqlite follow", "sqlite unfollow",
    "restore", "checkpoint", "merge", "evict", "hydrate", "retention set",
    "retention show", "retention plan", "retention apply", "retention clear", "stats", "metrics", "verify",
    "kv put", "kv get", "kv scan", "kv stats", "kv backup", "kv backups", "kv restore", "kv compact", "kv verify",
    "kv repair", "kv prune", "kv delete",
    "stream append", "stream read", "stream tail", "stream seal", "stream ls", "stream info", "stream tier",
    "stream checkpoint", "stream mirror", "stream verify", "stream repair", "stream retention",
    "manifest tables", "manifest dump", "manifest inspect", "manifest verify", "manifest bundle", "manifest mode",
    "manifest check",
    "feed tail", "feed cursors", "feed resume", "feed drop", "audit",
    "gc", "doctor", "quarantine ls", "quarantine restore", "quarantine rm", "objects moved",
    "standby", "promote", "clone", "clones ls", "clones release", "clones forget", "takeover",
    "archive on", "archive status", "archive drill", "archive base", "archive audit", "archive abandoned",
    "restore-db", "backup", "archive off",
    "restore-store",
    "namespace create", "namespace ls", "namespace drop", "token create",
    "mirror create", "mirror run", "mirror status", "mirror ls", "mirror drop",
    "snapshot drop", "snapshot undrop", "snapshot drop",
    "db set", "db set-status", "drop", "undrop", "rename", "serve", "tour", "completion",
)  # fmt: skip
"""The order in which a user would run them in a new store."""

ENDING_OPTIONS = {
    "sqlite follow": " --once",  # otherwise it runs until Ctrl-C
    "standby": " --once",
    "serve": "",  # runs until SIGTERM
}
REPLACEMENTS = {
    "--runner spark": "--runner threads",
    "s3://my-bucket/shop": "./archive",
    "/mnt/backups/shop": "./backup",
    " --at 2h": "",  # the only version is younger than that
}
"""Names in the examples, and their replacements in the test."""
EXPECTED: dict[str, str] = {
    "ls": "no database matches",
    "why": "nothing holds it",
    "snapshot diff": "both are the same version",
    "fork": "as shop was at snapshot monday",
    "rollback": "nothing to do: shop is already as it was at snapshot monday",
    "sqlite shell": "3 apples",
    "kv get": "3 apples",
    "stream read": "ann bought apples",
    "verify": "no damage found",
    "manifest check": "all rules of the manifest hold",
    "jobs show": "12",
    "quarantine ls": "nothing names it",
    "standby": "has the state of",
    "promote": "owner epoch 2",
    "clones ls": "/copy",
    "takeover": "epoch 1",
    "objects moved": "objects checked",
    "tour": "all rules hold",
}
"""A part of the expected output; every command prints something."""

COLUMNS = 80


def example_of(words: str) -> str:
    """The example from the help of a command."""
    result = run(*words.split(), "--help")
    (example,) = re.findall(r"Example: (quire .*)", " ".join(result.out.replace(" \\\n", " ").split()))
    assert isinstance(example, str)
    return example


def run(*arguments: str, typed: str = "") -> CommandResult:
    out, err = io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(err):
        patch.setattr(sys, "stdin", io.StringIO(typed))
        code = main.run(arguments)
    return CommandResult(code, out.getvalue(), err.getvalue())


@pytest.fixture
def directory(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty directory with a short path, on a terminal of 80 columns; the store is ./data."""
    path = Path(tempfile.mkdtemp(prefix="q"))
    monkeypatch.chdir(path)
    monkeypatch.setenv("QUIRE_STORE", "./data")
    monkeypatch.setenv("COLUMNS", str(COLUMNS))
    monkeypatch.setattr(output.TerminalStyle, "of", lambda _: output.TerminalStyle(COLUMNS, False))
    for name in ("shop.db", "app.db"):
        with closing(sqlite3.connect(name)) as connection:
            connection.executescript("create table item(name); insert into item values('3 apples');")
    yield path
    shutil.rmtree(path)


def prepare(words: str) -> None:
    """Create what an example expects to exist."""
    if words == "feed cursors":
        with quire.open("data") as store:
            store.feed.register(name="my-app")
    if words == "jobs ls":
        with quire.open("data") as store:
            for job_id in range(1, 13):
                db_id = store.create(f"later-{job_id}", "pages").db_id
                assert store.manifest.jobs.enqueue(JobKind.CHECKPOINT, db_id, delay_seconds=600) == job_id
    if words == "quarantine ls":
        for name in ("a", "b"):
            Path("data/lsm", name).write_bytes(b"?")
            quarantine.move(OsDisk(), "data", f"lsm/{name}", why="nothing names it", at_ms=1)
    if words == "standby":
        archived = StoreSettings(object_store="../bucket", archive=ArchiveSettings(mode="async"))
        with quire.open("origin", settings=archived) as store:
            store.create("shop", "pages")
    if words == "clones forget":
        with quire.open("standby") as store:
            moment = CloneRegistration(
                clone_id="1f0c0c1e-7d4e-4c5e-9f50-0d6d1c3b2a19", position="1.1", at_ms=1, registered_at_ms=1
            )
            register(store.objects, store.feed.store_id(), moment)
    if words == "takeover":
        with quire.open("restored", settings=StoreSettings(object_store="../bucket")) as store:
            store.create("shop", "pages")
    if words == "archive on":
        with quire.open("vault", settings=StoreSettings(object_store="../archive")) as store:
            store.create("orders", "lsm")
            store.kv("orders").put(b"1", b"3 apples")
    if words == "mirror create":
        with quire.open("data") as store, closing(store.sqlite("tenant-a", create=True)) as connection:
            connection.execute(
                "create table orders(id integer primary key, item text); insert into orders values (1, 'lamp')"
            )
    if words == "sqlite unfollow":
        with quire.open("data") as store:
            store.followers.follow("app.db", "app")


def served(line: str) -> str:
    """The first lines of `quire serve`, run in a separate process and then terminated."""
    arguments = ["-m", "quire", *shlex.split(line.replace(":7448", ":0"))[1:]]
    env = {**os.environ, "PYTHONPATH": str(SRC)}
    with Program(arguments, stdout=subprocess.PIPE, env=env) as process:
        assert process.stdout is not None
        output = process.stdout.readline() + process.stdout.readline()
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
    return output


def test_every_example_runs(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert set(IN_ORDER) == {" ".join(words) for words in COMMANDS}
    for words in IN_ORDER:
        prepare(words)
        line = example_of(words)
        if words == "serve":
            assert "listening on" in served(line)
            continue
        typed = "select name from item;\n" if words == "sqlite shell" else ""
        command_line = line + ENDING_OPTIONS.get(words, "")
        for placeholder, replacement in REPLACEMENTS.items():
            command_line = command_line.replace(placeholder, replacement)
        monkeypatch.setenv("QUIRE_STORE", "./vault" if words.startswith("archive") else "./data")
        result = run(*shlex.split(command_line)[1:], typed=typed)
        assert (result.code, result.err) == (0, ""), line
        assert result.out, line
        assert EXPECTED.get(words, "") in " ".join(result.out.split()), line
        if "--json" not in line and words != "completion":
            wide = [
                output_line
                for output_line in result.out.splitlines()
                if len(output_line) > COLUMNS and " " in output_line.strip()
            ]
            assert wide == [], line
    with quire.open("data") as store:
        assert store.manifest.check() == []


def test_the_example_for_spark_runs(directory: Path, shared_spark: SparkSession) -> None:
    assert run("init", "data").code == 0
    assert run("sqlite", "import", "shop.db").code == 0
    result = run(*shlex.split(example_of("checkpoint"))[1:])
    assert (result.code, result.err) == (0, "")
    assert "1 database" in result.out
