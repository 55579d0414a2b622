"""From a command line to an exit code: invalid usage, closed pipes, full disks, missing streams."""

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
from tests.cli.conftest import CommandResult, Run, quire_program
from tests.rules.tree import SRC

QUIRE = f"{shlex.quote(sys.executable)} -m quire"


def shell(command: str, *, buffered: bool = True) -> CommandResult:
    """Run a line of bash. `$Q` is quire; the exit code is that of the first command of a pipe."""
    env = {**os.environ, "PYTHONPATH": str(SRC), "Q": QUIRE}
    env.pop("PYTHONUNBUFFERED", None)
    if not buffered:
        env["PYTHONUNBUFFERED"] = "1"
    line = f"{command}; exit ${{PIPESTATUS[0]}}"
    result = subprocess.run(["bash", "-c", line], capture_output=True, text=True, timeout=60, env=env)
    return CommandResult(result.returncode, result.stdout, result.stderr)


@pytest.mark.parametrize(
    ("arguments", "message", "command"),
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
def test_invalid_usage_is_reported_like_any_error(run: Run, arguments: list[str], message: str, command: str) -> None:
    result = run(*arguments, at=None)
    assert (result.code, result.out) == (2, "")
    error_line, hint = result.err.splitlines()
    assert error_line.startswith(f"error: {message}")
    assert hint == f"next:  see `{command} --help`"
    program = run(arguments[0], "--json", *arguments[1:], at=None)
    assert (program.code, program.out) == (2, "")
    error = json.loads(program.err)["error"]
    assert (error["kind"], error["where"], error["exit_code"]) == ("InvalidInput", {}, 2)
    if arguments[0] not in ("feed", "manifest", "stream"):  # a group has no --json, which is the error then
        assert error["what"].startswith(message)


def test_a_group_without_a_command_shows_its_help(run: Run) -> None:
    for arguments in ([], ["feed"], ["manifest"]):
        result = run(*arguments, at=None)
        assert (result.code, result.out) == (2, "")
        assert result.err.startswith("Usage: quire")


@pytest.mark.parametrize("buffered", [True, False])
@pytest.mark.parametrize(
    "arguments", ["ls", "ls --json", "manifest dump metrics --limit 0", "--help", "info", "doctor"]
)
def test_a_closed_pipe_is_not_an_error(path: Path, arguments: str, buffered: bool) -> None:
    """`quire ls | head -1` is silent, with the exit code of a program that SIGPIPE ended."""
    store_option = "" if arguments == "--help" else f"--store {path}"
    with quire.open(path) as store:
        store.manifest.record_metric(1, 1, 1.0).result()
    result = shell(f"$Q {arguments} {store_option} | exec 0<&-", buffered=buffered)
    assert (result.code, result.err) == (141, "")


def test_the_head_of_a_long_output(path: Path) -> None:
    with quire.open(path) as store:
        for number in range(3_000):
            store.manifest.record_metric(number, 1, 1.0)
    for options, first in (("", ["key", "record"]), (" --json", ["["])):
        result = shell(f"$Q manifest dump metrics --limit 0{options} --store {path} | head -1")
        assert (result.code, result.out.split(), result.err) == (141, first, "")


def test_an_error_whose_reader_is_gone_is_silent(path: Path) -> None:
    for arguments in (f"ls --store {path}/nothing", "ls --nonsense", f"drop shop --store {path}"):
        assert shell(f"$Q {arguments} 2>&1 | exec 0<&-").code == 141


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize("buffered", [True, False])
@pytest.mark.parametrize("arguments", ["ls", "manifest tables --json", "--help"])
def test_a_full_disk_is_reported_once(path: Path, arguments: str, buffered: bool) -> None:
    store_option = "" if arguments == "--help" else f"--store {path}"
    result = shell(f"$Q {arguments} {store_option} >/dev/full", buffered=buffered)
    assert result.code == 6
    assert result.err.count("the output cannot be written") == 1
    assert "Traceback" not in result.err


def test_missing_standard_streams(path: Path) -> None:
    """Hazard: a file opened instead of a closed stream gets its descriptor, and our output."""
    before = (path / "quire.toml").read_bytes()
    for streams in ("<&-", ">&-", "2>&-", "<&- >&- 2>&-"):
        assert shell(f"$Q ls --store {path} {streams}").code == 0
        assert shell(f"$Q ls --store {path}/nothing {streams}").code == 3
    assert (path / "quire.toml").read_bytes() == before


def test_a_path_that_is_not_utf8_is_reported_and_refused(tmp_path: Path) -> None:
    undecodable = "$'" + str(tmp_path) + r"/\xff'"
    for command in ("init", "ls --store", "doctor --no-objects --store"):
        result = shell(f"$Q {command} {undecodable}")
        assert r"\udcff" in result.out + result.err
        assert "bug" not in result.out + result.err
    error = json.loads(shell(f"$Q ls --json --store {undecodable}").err)["error"]
    assert (error["exit_code"], os.fsencode(error["where"]["path"])[-2:]) == (2, b"/\xff")


def test_json_works_on_a_terminal_without_unicode(run: Run, path: Path) -> None:
    run("create", "größe")
    result = shell(f"PYTHONIOENCODING=ascii $Q ls --json --store {path}")
    assert "größe" in {row["name"] for row in json.loads(result.out)}
    assert shell(f"PYTHONIOENCODING=ascii $Q ls --store {path}").code == 0


def test_an_interrupt_ends_with_130_and_no_traceback(path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "quire", "drop", "shop", "--store", str(path)],
        stdin=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(SRC), "PYTHONUNBUFFERED": "1"},
    )
    assert process.stderr is not None
    prompt = b""
    while b"[y/N]" not in prompt:
        character = process.stderr.read(1)
        assert character, f"the command ended without asking: {prompt.decode()}"
        prompt += character
    time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    _, rest = process.communicate(timeout=30)
    assert (process.returncode, b"Traceback" in rest) == (130, False)


@pytest.mark.parametrize(
    ("typed", "completions"),
    [
        ("quire jo", ["jobs"]),
        ("quire jobs ", ["ls", "show", "retry", "cancel", "work"]),
        ("quire fork shop new --a", ["--at"]),
        ("quire retention set shop --no", ["--no-keep-named"]),
    ],
)
def test_a_shell_completes_commands_and_options(typed: str, completions: list[str]) -> None:
    """Like bash: the words are in the environment."""
    environment = {
        "_QUIRE_COMPLETE": "bash_complete",
        "COMP_WORDS": typed,
        "COMP_CWORD": str(len(typed.split(" ")) - 1),
    }
    result = quire_program(env=environment)
    assert (result.returncode, result.stdout.split()) == (0, completions)


@pytest.mark.parametrize(
    "arguments", [["--store", "x", "ls"], ["--json", "ls"], ["feed", "--json", "tail"], ["-s", "x", "ls"]]
)
def test_a_misplaced_option_is_reported_with_its_place(run: Run, arguments: list[str]) -> None:
    result = run(*arguments, at=None)
    assert result.code == 2
    assert "go after the command" in result.err
