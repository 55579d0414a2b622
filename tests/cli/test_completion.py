"""Shell completion: the completion script is run with the words typed so far."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import quire
from quire.cli.candidates import DATABASES, SNAPSHOTS, WORDS
from quire.cli.formatting import kind_text
from quire.cli.stream import MOVES
from quire.manifest.records import DbKind
from tests.cli.commands import COMMANDS
from tests.cli.conftest import Run, quire_program
from tests.rules.tree import SRC

SCRIPT = """
eval "$(quire completion bash)"
while IFS= read -r line; do
    eval "COMP_WORDS=($line)"; COMP_CWORD=$(( ${#COMP_WORDS[@]} - 1 )); COMPREPLY=()
    _quire_completion quire
    printf '%s|' "${COMPREPLY[@]}"; echo
done
"""

LINES = {
    "quire snap": ["snapshot"],
    "quire snapshot ''": ["create", "ls", "show", "drop", "undrop", "diff"],
    "quire snapshot ls ''": ["clicks", r"my\ shop", "shop"],
    "quire snapshot show shop ''": ["monday"],
    "quire snapshot diff shop mon": ["monday"],
    "quire fork shop new --at ''": ["monday"],
    "quire stream tail ''": ["clicks"],
    "quire sqlite export ''": [r"my\ shop", "shop"],
    "quire kv get ''": [],
    "quire drop my": [r"my\ shop"],
    "quire rename sh": ["shop"],
    "quire create sh": [],
    "quire create new --kind ''": ["pages", "stream", "kv"],
    "quire jobs ls --state f": ["failed"],
    "quire manifest dump wal_": ["wal_catalog", "wal_manifest", "wal_state"],
    "quire stream tier clicks e": ["evict"],
    "quire feed drop ''": ["billing"],
    "quire drop --store /nowhere ''": [],
    "quire ls --j": ["--json"],
}


@pytest.fixture
def program(tmp_path: Path) -> dict[str, str]:
    """An environment in which `quire` is an installed program."""
    folder = tmp_path / "bin"
    folder.mkdir()
    file = folder / "quire"
    file.write_text(f'#!/bin/sh\nexec {sys.executable} -m quire "$@"\n', "utf-8")
    file.chmod(0o755)
    return {**os.environ, "PYTHONPATH": str(SRC), "PATH": f"{folder}:{os.environ['PATH']}", "HOME": str(tmp_path)}


@pytest.fixture
def store_with_names(shop: Path) -> Path:
    with quire.open(shop) as store:
        store.create("my shop", "pages")
        store.create("gone", "pages")
        store.drop("gone")
        store.feed.register(name="billing")
    return shop


def test_bash_completes_commands_options_and_names(store_with_names: Path, program: dict[str, str]) -> None:
    result = subprocess.run(
        [shutil.which("bash") or "bash", "--norc", "-c", SCRIPT],
        input="\n".join(LINES) + "\n",
        capture_output=True,
        text=True,
        timeout=120,
        env={**program, "QUIRE_STORE": str(store_with_names)},
    )
    assert result.stderr == ""
    completions = [[completion for completion in line.split("|") if completion] for line in result.stdout.splitlines()]
    assert dict(zip(LINES, completions, strict=True)) == LINES


@pytest.mark.parametrize(
    ("shell", "words"), [("zsh", "quire snapshot ls "), ("fish", "quire snapshot ls ")], ids=["zsh", "fish"]
)
def test_other_shells_complete_the_same(store_with_names: Path, shell: str, words: str) -> None:
    env = {
        "_QUIRE_COMPLETE": f"{shell}_complete", "COMP_WORDS": words, "COMP_CWORD": "3" if shell == "zsh" else "",
        "QUIRE_STORE": str(store_with_names),
    }  # fmt: skip
    output = quire_program(env=env).stdout
    assert [name for name in ("clicks", "my shop", "shop") if name not in output] == []
    assert "gone" not in output


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_script_of_a_shell_is_printed(run: Run, shell: str) -> None:
    printed = run("completion", shell, at=None)
    assert (printed.code, printed.err) == (0, "")
    assert "_QUIRE_COMPLETE" in printed.out
    assert run("completion", shell, "--json", at=None).data == {"shell": shell, "script": printed.out}


def test_another_shell_is_refused(run: Run) -> None:
    refused = run("completion", "csh", at=None)
    assert (refused.code, "bash, zsh or fish" in refused.err) == (2, True)


def test_every_metavar_of_a_name_is_completed() -> None:
    """A new command whose arguments are named like those of others is completed without further code."""
    parameters = [parameter for command in COMMANDS.values() for parameter in command.params]
    words = {parameter.metavar.strip("[].") for parameter in parameters if parameter.metavar}
    uncompleted = words - {*WORDS, *DATABASES, *SNAPSHOTS, "NAME", "CURSOR", "TABLE"}
    assert uncompleted <= {
        "N", "FILE", "KEY", "ID", "NEW", "WHEN", "ADDRESS", "hourly,daily", "SQL", "RECORD", "PATH", "VALUE", "URL", "TIME",
        "SECONDS", "OUT", "KEY=VALUE", "CHUNK", "AGE", "30d", "NUMBER", "DIR", "DIRECTORY", "FOR", "OBJECT",
        "TARGET", "SOURCE", "PREVIOUS", "EPOCH", "PATTERN", "PREFIX", "TAG[=VALUE", "15m",
    }  # fmt: skip
    assert {kind_text(kind) for kind in DbKind} == set(WORDS["KIND"])
    assert WORDS["MOVE"] == MOVES


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_is_installed_by_one_command_and_only_once(
    run: Run, shell: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = {"HOME": str(tmp_path), "SHELL": f"/bin/{shell}", "XDG_CONFIG_HOME": ""}
    startup = tmp_path / f".{shell}rc"
    if shell != "fish":
        startup.write_text("alias ll='ls -l'", "utf-8")
    for _ in range(2):
        result = run("completion", "--install", "--json", **home)
        assert result.code == 0, result.err
    assert Path(result.data["file"]).read_text("utf-8") == run("completion", shell).out
    if shell == "fish":
        assert result.data["startup"] is None
        return
    alias, line = startup.read_text("utf-8").splitlines()
    assert (alias, result.data["file"] in line) == ("alias ll='ls -l'", True)
    if shutil.which(shell):
        ended_shell = subprocess.run([shell, "-c", f". {startup} && true"], capture_output=True, text=True, timeout=30)
        assert (ended_shell.returncode, ended_shell.stderr) == (0, "")
