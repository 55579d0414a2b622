"""What a shell offers: its script is run, with the words a person has typed so far."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import quire
from quire.cli import typed
from quire.cli.app import app
from quire.cli.completing import WORDS, completer
from quire.cli.stream import MOVES
from quire.manifest.kinds import DbKind
from tests.cli.conftest import Run, quire_program
from tests.cli.test_lane import COMMANDS
from tests.house.tree import SRC

SCRIPT = """
eval "$(quire --show-completion)"
while IFS= read -r line; do
    eval "COMP_WORDS=($line)"; COMP_CWORD=$(( ${#COMP_WORDS[@]} - 1 )); COMPREPLY=()
    _quire_completion quire
    printf '%s|' "${COMPREPLY[@]}"; echo
done
"""

LINES = {
    "quire snap": ["snapshot"],
    "quire snapshot ''": ["create", "ls", "show", "drop", "diff"],
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
    "quire create new --kind ''": ["pages", "stream", "lsm"],
    "quire jobs ls --state f": ["failed"],
    "quire manifest dump wal_": ["wal_catalog", "wal_manifest", "wal_state"],
    "quire stream tier clicks e": ["evict"],
    "quire feed drop ''": ["billing"],
    "quire drop --store /nowhere ''": [],
    "quire ls --j": ["--json"],
}


@pytest.fixture
def program(tmp_path: Path) -> dict[str, str]:
    """An environment in which `quire` is a program, as it is once it is installed."""
    folder = tmp_path / "bin"
    folder.mkdir()
    file = folder / "quire"
    file.write_text(f'#!/bin/sh\nexec {sys.executable} -m quire "$@"\n', "utf-8")
    file.chmod(0o755)
    return {**os.environ, "PYTHONPATH": str(SRC), "PATH": f"{folder}:{os.environ['PATH']}", "HOME": str(tmp_path)}


@pytest.fixture
def named(shop: Path) -> Path:
    with quire.open(shop) as store:
        store.create("my shop", "pages")
        store.create("gone", "pages")
        store.drop("gone")
        store.feed.register(name="billing")
    return shop


def test_bash_offers_commands_options_and_names(named: Path, program: dict[str, str]) -> None:
    ended = subprocess.run(
        [shutil.which("bash") or "bash", "--norc", "-c", SCRIPT],
        input="\n".join(LINES) + "\n",
        capture_output=True,
        text=True,
        timeout=120,
        env={**program, "QUIRE_STORE": str(named)},
    )
    assert ended.stderr == ""
    offered = [[each for each in line.split("|") if each] for line in ended.stdout.splitlines()]
    assert dict(zip(LINES, offered, strict=True)) == LINES


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_other_shells_are_offered_the_same(named: Path, shell: str) -> None:
    env = {
        "_QUIRE_COMPLETE": f"complete_{shell}", "_TYPER_COMPLETE_ARGS": "quire snapshot ls ",
        "_TYPER_COMPLETE_FISH_ACTION": "get-args", "QUIRE_STORE": str(named),
    }  # fmt: skip
    offered = quire_program(env=env).stdout
    assert [name for name in ("clicks", "my shop", "shop") if name not in offered] == []
    assert "gone" not in offered


def test_completion_is_installed_for_the_shell_that_asks(program: dict[str, str], tmp_path: Path) -> None:
    bash = shutil.which("bash") or "bash"
    ended = subprocess.run(
        [bash, "--norc", "-c", "quire --install-completion; true"],
        capture_output=True,
        text=True,
        timeout=60,
        env=program,
    )
    assert "bash completion installed" in ended.stdout, ended.stderr
    assert "complete -o default -F _quire_completion quire" in (tmp_path / ".bash_completions" / "quire.sh").read_text()


def test_every_metavar_of_a_name_is_offered_something() -> None:
    """A new command whose arguments are called as those of the others completes by itself."""
    words = {each.declared.said.get("metavar", "") for command in COMMANDS.values() for each in command.parameters()}
    mute = {word.strip("[].") for word in words if word and completer(word) is None}
    assert mute <= {
        "N", "FILE", "KEY", "ID", "NEW", "WHEN", "ADDRESS", "hourly,daily", "SQL", "RECORD", "PATH", "VALUE", "URL", "TIME",
        "SECONDS", "OUT", "KEY=VALUE", "CHUNK", "AGE", "30d", "NUMBER",
    }  # fmt: skip
    assert {each.name.lower() for each in DbKind} == set(WORDS["KIND"])
    assert WORDS["MOVE"] == MOVES


def test_who_does_not_ask_loads_nothing_for_it(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "quire.cli.completing", raising=False)
    typed.program(app)
    assert "quire.cli.completing" not in sys.modules
