"""The example that ends each command's help is run: all of them, one after the other, in one store, as they are written there.

What is not run to the letter, and why: commands that stay are told to end (`ENDING`), and what works on Spark does so in a test
of its own, because that is where the session is.
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
from tests.cli.conftest import Ended
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
    "archive on", "archive status", "archive drill", "archive audit", "archive abandoned", "restore-db", "backup",
    "archive off",
    "restore-store",
    "namespace create", "namespace ls", "namespace drop", "token create",
    "mirror create", "mirror run", "mirror status", "mirror ls", "mirror drop",
    "snapshot drop", "snapshot undrop", "snapshot drop",
    "db set", "db set-status", "drop", "undrop", "rename", "serve", "tour", "completion",
)  # fmt: skip
"""What a person would do in a new store."""

ENDING = {
    "sqlite follow": " --once",  # else until Ctrl-C
    "standby": " --once",
    "serve": "",  # until SIGTERM
}
HERE = {
    "--runner spark": "--runner threads",
    "s3://my-bucket/shop": "./archive",
    "/mnt/backups/shop": "./backup",
    " --at 2h": "",  # it is younger
}
"""What an example names, and what stands for it in the test."""
EXPECTED: dict[str, str] = {
    "ls": "no database matches",
    "why": "has not checkpointed it yet",
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
"""A few words of what is shown; all of them show something."""

COLUMNS = 80


def example_of(words: str) -> str:
    """The example, taken out of the help."""
    ended = run(*words.split(), "--help")
    (found,) = re.findall(r"Example: (quire .*)", " ".join(ended.out.split()))
    assert isinstance(found, str)
    return found


def run(*arguments: str, typed: str = "") -> Ended:
    out, err = io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(err):
        patch.setattr(sys, "stdin", io.StringIO(typed))
        code = main.run(arguments)
    return Ended(code, out.getvalue(), err.getvalue())


@pytest.fixture
def place(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty directory with a short path, on a terminal of 80 columns; the store is ./data."""
    path = Path(tempfile.mkdtemp(prefix="q"))
    monkeypatch.chdir(path)
    monkeypatch.setenv("QUIRE_STORE", "./data")
    monkeypatch.setenv("COLUMNS", str(COLUMNS))
    monkeypatch.setattr(output.TerminalStyle, "of", lambda _: output.TerminalStyle(COLUMNS, False))
    for name in ("shop.db", "app.db"):
        with closing(sqlite3.connect(name)) as made:
            made.executescript("create table item(name); insert into item values('3 apples');")
    yield path
    shutil.rmtree(path)


def prepare(words: str) -> None:
    """What a person would have done in between."""
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
    """What `quire serve` says, as a process of its own, until it is told to end."""
    arguments = ["-m", "quire", *shlex.split(line.replace(":7448", ":0"))[1:]]
    env = {**os.environ, "PYTHONPATH": str(SRC)}
    with Program(arguments, stdout=subprocess.PIPE, env=env) as process:
        assert process.stdout is not None
        said = process.stdout.readline() + process.stdout.readline()
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
    return said


def test_every_example_runs(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert set(IN_ORDER) == {" ".join(words) for words in COMMANDS}
    for words in IN_ORDER:
        prepare(words)
        line = example_of(words)
        if words == "serve":
            assert "listening on" in served(line)
            continue
        typed = "select name from item;\n" if words == "sqlite shell" else ""
        asked = line + ENDING.get(words, "")
        for there, here in HERE.items():
            asked = asked.replace(there, here)
        monkeypatch.setenv("QUIRE_STORE", "./vault" if words.startswith("archive") else "./data")
        ended = run(*shlex.split(asked)[1:], typed=typed)
        assert (ended.code, ended.err) == (0, ""), line
        assert ended.out, line
        assert EXPECTED.get(words, "") in " ".join(ended.out.split()), line
        if "--json" not in line and words != "completion":
            wide = [each for each in ended.out.splitlines() if len(each) > COLUMNS and " " in each.strip()]
            assert wide == [], line
    with quire.open("data") as store:
        assert store.manifest.check() == []


def test_the_example_that_works_on_spark_runs(place: Path, lent_spark: SparkSession) -> None:
    assert run("init", "data").code == 0
    assert run("sqlite", "import", "shop.db").code == 0
    ended = run(*shlex.split(example_of("checkpoint"))[1:])
    assert (ended.code, ended.err) == (0, "")
    assert "1 database" in ended.out
