"""From a command line to an exit code: wrong usage, closed pipes, full disks, streams that are not there."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import quire
from tests.cli.conftest import Ended, Run, quire_program
from tests.rules.tree import SRC

QUIRE = f"{shlex.quote(sys.executable)} -m quire"


def shell(command: str, *, buffered: bool = True) -> Ended:
    """Run a line of bash; `$Q` is quire, and the exit code that of the first command of a pipe."""
    env = {**os.environ, "PYTHONPATH": str(SRC), "Q": QUIRE}
    env.pop("PYTHONUNBUFFERED", None)
    if not buffered:
        env["PYTHONUNBUFFERED"] = "1"
    line = f"{command}; exit ${{PIPESTATUS[0]}}"
    ended = subprocess.run(["bash", "-c", line], capture_output=True, text=True, timeout=60, env=env)
    return Ended(ended.returncode, ended.stdout, ended.stderr)


@pytest.mark.parametrize(
    ("arguments", "what", "command"),
    [
        (["ls", "--nonsense"], "no such option '--nonsense'", "quire ls"),
        (["rename", "x"], "missing argument 'NEW'", "quire rename"),
        (["manifest", "dump"], "missing argument 'TABLE'", "quire manifest dump"),
        (["nonsense"], "no such command 'nonsense'", "quire"),
        (["feed", "nonsense"], "no such command 'nonsense'", "quire feed"),
        (
            ["feed", "tail", "--limit", "-1"],
            "invalid value for '--limit' / '-n': -1 is less than 0",
            "quire feed tail",
        ),
        (
            ["stream", "tail", "x", "-n", "-1"],
            "invalid value for '--limit' / '-n': -1 is less than 0",
            "quire stream tail",
        ),
        (["feed", "tail", "--limit", "x"], "invalid value for '--limit'", "quire feed tail"),
        (["ls", "a", "word"], "got unexpected extra argument (word)", "quire ls"),
        (["ls", "--store"], "option '--store' requires an argument", "quire ls"),
    ],
)
def test_wrong_usage_is_told_as_any_error(run: Run, arguments: list[str], what: str, command: str) -> None:
    ended = run(*arguments, at=None)
    assert (ended.code, ended.out) == (2, "")
    told, then = ended.err.splitlines()
    assert told.startswith(f"error: {what}")
    assert then == f"next:  see `{command} --help`"
    program = run(arguments[0], "--json", *arguments[1:], at=None)
    assert (program.code, program.out) == (2, "")
    error = json.loads(program.err)["error"]
    assert (error["kind"], error["where"], error["exit_code"]) == ("InvalidInput", {}, 2)
    if arguments[0] not in ("feed", "manifest", "stream"):  # a group has no --json: that is then the complaint
        assert error["what"].startswith(what)


def test_a_bare_group_shows_its_help(run: Run) -> None:
    for arguments in ([], ["feed"], ["manifest"]):
        ended = run(*arguments, at=None)
        assert (ended.code, ended.out) == (2, "")
        assert ended.err.startswith("Usage: quire")


@pytest.mark.parametrize("buffered", [True, False])
@pytest.mark.parametrize(
    "arguments", ["ls", "ls --json", "manifest dump metrics --limit 0", "--help", "info", "doctor"]
)
def test_a_reader_that_closes_the_pipe_is_no_error(path: Path, arguments: str, buffered: bool) -> None:
    """`quire ls | head -1`: quiet, and the code of a program that SIGPIPE ended."""
    where = "" if arguments == "--help" else f"--store {path}"
    with quire.open(path) as store:
        store.manifest.record_metric(1, 1, 1.0).result()
    ended = shell(f"$Q {arguments} {where} | exec 0<&-", buffered=buffered)
    assert (ended.code, ended.err) == (141, "")


def test_the_head_of_a_long_output(path: Path) -> None:
    with quire.open(path) as store:
        for number in range(3_000):
            store.manifest.record_metric(number, 1, 1.0)
    for how, first in (("", ["key", "record"]), (" --json", ["["])):
        ended = shell(f"$Q manifest dump metrics --limit 0{how} --store {path} | head -1")
        assert (ended.code, ended.out.split(), ended.err) == (141, first, "")


def test_an_error_nobody_reads_is_quiet(path: Path) -> None:
    for arguments in (f"ls --store {path}/nothing", "ls --nonsense", f"drop shop --store {path}"):
        assert shell(f"$Q {arguments} 2>&1 | exec 0<&-").code == 141


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize("buffered", [True, False])
@pytest.mark.parametrize("arguments", ["ls", "manifest tables --json", "--help"])
def test_a_full_disk_is_told_once(path: Path, arguments: str, buffered: bool) -> None:
    where = "" if arguments == "--help" else f"--store {path}"
    ended = shell(f"$Q {arguments} {where} >/dev/full", buffered=buffered)
    assert ended.code == 6
    assert ended.err.count("the output cannot be written") == 1
    assert "Traceback" not in ended.err


def test_streams_that_are_not_there(path: Path) -> None:
    """A file opened instead of a closed stream would get its number, and our words."""
    before = (path / "quire.toml").read_bytes()
    for streams in ("<&-", ">&-", "2>&-", "<&- >&- 2>&-"):
        assert shell(f"$Q ls --store {path} {streams}").code == 0
        assert shell(f"$Q ls --store {path}/nothing {streams}").code == 3
    assert (path / "quire.toml").read_bytes() == before


def test_a_path_that_is_no_text_is_told_and_refused(tmp_path: Path) -> None:
    odd = "$'" + str(tmp_path) + r"/\xff'"
    for command in ("init", "ls --store", "doctor --no-objects --store"):
        ended = shell(f"$Q {command} {odd}")
        assert r"\udcff" in ended.out + ended.err
        assert "bug" not in ended.out + ended.err
    told = json.loads(shell(f"$Q ls --json --store {odd}").err)["error"]
    assert (told["exit_code"], os.fsencode(told["where"]["path"])[-2:]) == (2, b"/\xff")


def test_a_terminal_without_unicode_gets_json_all_the_same(run: Run, path: Path) -> None:
    run("create", "größe")
    ended = shell(f"PYTHONIOENCODING=ascii $Q ls --json --store {path}")
    assert "größe" in {each["name"] for each in json.loads(ended.out)}
    assert shell(f"PYTHONIOENCODING=ascii $Q ls --store {path}").code == 0


def test_an_interrupt_ends_with_130_and_no_traceback(path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "quire", "drop", "shop", "--store", str(path)],
        stdin=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(SRC), "PYTHONUNBUFFERED": "1"},
    )
    assert process.stderr is not None
    asked = b""
    while b"[y/N]" not in asked:
        asked += process.stderr.read(1)
    time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    _, rest = process.communicate(timeout=30)
    assert (process.returncode, b"Traceback" in rest) == (130, False)


@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        ("quire jo", ["jobs"]),
        ("quire jobs ", ["ls", "show", "retry", "cancel", "work"]),
        ("quire fork shop new --a", ["--at"]),
        ("quire retention set shop --no", ["--no-keep-named"]),
    ],
)
def test_a_shell_completes_commands_and_options(typed: str, offered: list[str]) -> None:
    """As bash asks for it: with the words in the environment."""
    asked = {"_QUIRE_COMPLETE": "bash_complete", "COMP_WORDS": typed, "COMP_CWORD": str(len(typed.split(" ")) - 1)}
    ended = quire_program(env=asked)
    assert (ended.returncode, ended.stdout.split()) == (0, offered)


@pytest.mark.parametrize(
    "arguments", [["--store", "x", "ls"], ["--json", "ls"], ["feed", "--json", "tail"], ["-s", "x", "ls"]]
)
def test_an_option_before_its_command_is_told_where_it_belongs(run: Run, arguments: list[str]) -> None:
    ended = run(*arguments, at=None)
    assert ended.code == 2
    assert "go after the command" in ended.err
