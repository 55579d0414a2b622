"""Common mistakes with every kind of command: one sentence, the next command to try, an exit code, and no effect."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
from pathlib import Path

import pytest

import quire
from tests.cli.conftest import Run
from tests.programs import Program
from tests.rules.tree import SRC

MISTAKES: list[tuple[str, int, str]] = [
    # missing things
    ("snapshot ls nope", 3, "`quire ls`"),
    ("stream tail nope", 3, "`quire ls`"),
    ("stream ls nope", 3, "`quire ls`"),
    ("kv get nope x", 3, "`quire ls`"),
    ("sqlite export nope x.db", 3, "`quire ls`"),
    ("sqlite import /nowhere.db", 3, "name the database file"),
    ("fork nope x", 3, "`quire ls`"),
    ("fork shop x --at nope", 3, "`quire snapshot ls shop`"),
    ("snapshot drop shop nope --yes", 3, "`quire snapshot ls shop`"),
    ("restore shop nope x.db", 3, "`quire snapshot ls shop`"),
    ("jobs show 999", 3, "`quire jobs ls`"),
    ("feed drop nope --yes", 3, "`quire feed cursors`"),
    ("manifest inspect nope", 3, "`quire ls`"),
    ("manifest dump nope", 2, "`quire manifest tables`"),
    ("checkpoint nope", 3, "`quire ls`"),
    ("audit nope", 3, "`quire ls`"),
    ("why nope", 3, "`quire ls`"),
    # another kind of database
    ("stream tail shop", 2, "`quire ls`"),
    ("stream ls shop", 2, "`quire ls`"),
    ("stream append shop x", 2, "`quire ls`"),
    ("kv get clicks x", 2, "`quire ls`"),
    ("kv scan shop", 2, "`quire ls`"),
    ("sqlite shell clicks .tables", 2, "`quire ls`"),
    ("sqlite export clicks x.db", 2, "`quire ls`"),
    ("fork clicks x", 2, "`quire ls`"),
    ("manifest verify shop", 2, "`quire ls`"),
    # invalid names
    ("create ''", 2, "200 bytes"),
    ("create ' x'", 2, "remove the space"),
    ("create a/b", 2, "'-' or '.'"),
    ("create $'a\\nb'", 2, "line breaks"),
    ("create .", 2, "another name"),
    ("create shop", 4, "another name"),
    ("create -x", 2, "`quire create --help`"),
    ("rename shop ''", 2, "200 bytes"),
    ("snapshot ls ''", 2, "`quire ls`"),
    ("stream tail ''", 2, "`quire ls`"),
    ("kv put '' a b --create", 2, "`quire ls`"),
    ("manifest inspect ''", 2, "`quire ls`"),
    ("why ''", 2, "`quire ls`"),
    ("snapshot create shop a/b", 2, "'-' or '.'"),
    # invalid option values
    ("create x --kind foo", 2, "pages"),
    ("jobs ls --state foo", 2, "pending"),
    ("checkpoint shop --runner foo", 2, "threads"),
    ("stream tier clicks fly", 2, "compress"),
    ("retention set shop --keep soon", 2, "90s"),
    ("audit --since x", 2, "2026-05-01"),
    ("serve --listen foo", 2, "grpc://"),
    ("verify --report /nowhere/report.parquet", 2, "create the directory first"),
    ("verify --report .", 2, "name a file"),
    ("archive audit ./bucket --report /nowhere/report.parquet", 2, "create the directory first"),
    ("sqlite shell shop 'selct 1'", 2, "`.schema`"),
    ("sqlite shell shop .nope", 2, "`.help`"),
    ("serve --http https://127.0.0.1:0 --tls-cert nope.pem --tls-key nope.key", 2, "PEM files"),
    # options that exclude each other
    ("gc --keep 00000001/00000000/base:00000001 --until 7d --dry-run", 2, "nothing else"),
    ("stream retention clicks --reset --days 5", 2, "omit `--reset`"),
    ("stream tier clicks upload --warm", 2, "omit it"),
]


@pytest.mark.parametrize(("line", "code", "hint"), MISTAKES, ids=[line for line, _, _ in MISTAKES])
def test_a_mistake_is_one_sentence_and_the_next_step(run: Run, path: Path, line: str, code: int, hint: str) -> None:
    before = run("feed", "tail", "-n", "0", "--json").out
    words = [word.replace("$a\\nb", "a\nb") for word in shlex.split(line)]
    result = run(*words)
    assert (result.code, result.out) == (code, "")
    message, hint_line = result.err.splitlines()
    assert message.startswith("error: ")
    assert hint_line.startswith("next:  ")
    assert hint in hint_line
    program = run(*words, "--json")
    error = json.loads(program.err)["error"]
    assert (program.code, program.out, error["exit_code"]) == (code, "", code)
    assert hint in error["next"]
    assert run("feed", "tail", "-n", "0", "--json").out == before, "nothing was changed"


@pytest.mark.parametrize("name", ["größe 数据", "a b c", "my $HOME", "it's", "--json", "c:d", "#7"])
def test_a_name_may_contain_whatever_a_shell_can_pass(run: Run, name: str) -> None:
    assert run("create", "--kind", "pages", "--", name, at=None, QUIRE_STORE=store_of(run)).code == 0
    assert name in [row["name"] for row in run("ls", "--json").data]
    assert run("snapshot", "create", "--", name, "monday", at=None, QUIRE_STORE=store_of(run)).code == 0
    assert run("drop", "--yes", "--snapshots", "--", name, at=None, QUIRE_STORE=store_of(run)).code == 0


@pytest.mark.parametrize(
    "line",
    [
        ("create", "BAD"),
        ("ls", "BAD"),
        ("drop", "BAD", "--yes"),
        ("snapshot", "create", "shop", "BAD"),
        ("kv", "get", "BAD", "x"),
    ],
)
def test_a_name_that_is_not_unicode_is_a_mistake(run: Run, line: tuple[str, ...]) -> None:
    """A shell passes any bytes; it ended as a bug in quire."""
    result = run(*(word.replace("BAD", "x\udcff") for word in line))
    assert (result.code, result.out) == (2, "")


def store_of(run: Run) -> str:
    return str(run("info", "--json").data["path"])


OWNER = """
import sys, quire
with quire.open(sys.argv[1]) as store:
    print(flush=True)
    sys.stdin.read()
"""


def test_a_store_owned_by_another_process(run: Run, path: Path) -> None:
    """The owner does not serve: reading commands work, the others name the owner."""
    with quire.open(path) as store:
        store.stream("clicks").append(b"hello").result()
    env = {**os.environ, "PYTHONPATH": str(SRC)}
    streams = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with Program(["-c", OWNER, str(path)], env=env, **streams) as owner:
        assert owner.stdin is not None
        assert owner.stdout is not None
        owner.stdout.readline()
        assert "hello" in run("stream", "tail", "clicks").out
        assert run("why", "shop").code == 0
        for line in ("create x", "stream ls clicks", "checkpoint --all", "gc", "serve", "jobs work"):
            result = run(*line.split())
            assert (result.code, result.out) == (5, ""), line
            assert f"pid={owner.pid}" in result.err, line
            assert result.err.splitlines()[1].startswith("next:  "), line
        owner.stdin.close()


def test_missing_permission_is_not_reported_as_damage(run: Run, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The directory is read-only, but LMDB's readers write to it."""
    refused = quire.NotWritable("this user may not write the manifest's lock file", hint="`chmod +rw` it")
    monkeypatch.setattr("quire.cli.manifest.probe", lambda _: "the manifest cannot be read: Permission denied")
    monkeypatch.setattr("quire.cli.manifest.access_error", lambda _, **__: refused)
    result = run("manifest", "check")
    assert (result.code, result.out) == (6, "")
    assert result.err.splitlines()[1] == "next:  `chmod +rw` it"
