"""The program as a process: what it loads, its help, the tour."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

import quire
from quire.cli.main import app
from tests.cli.conftest import Run, quire_program
from tests.house.tree import ROOT, SRC

HEAVY = ("numpy", "pyarrow", "obstore", "awscrt", "structlog", "prometheus_client", "rich", "asyncio")


def commands() -> Iterator[tuple[str, Any]]:
    """Every command by its full name, groups left out."""

    def walk(name: str, found: Any) -> Iterator[tuple[str, Any]]:
        below = getattr(found, "commands", None)
        if below is None:
            yield name, found
        else:
            for each in below:
                yield from walk(f"{name} {each}".strip(), below[each])

    yield from walk("", typer.main.get_command(app))


NAMES = [name for name, _ in commands()]


def test_the_commands_are_these() -> None:
    assert NAMES == [
        "init", "ls", "info", "create", "drop", "rename", "doctor", "tour",
        "manifest check", "manifest tables", "manifest dump", "feed tail",
    ]  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_every_command_has_help_with_an_example_of_itself(run: Run, name: str) -> None:
    ended = run(*name.split(), "--help", at=None)
    assert ended.code == 0
    assert f"Example: quire {name}" in ended.out
    assert "--json" in ended.out
    assert "--store" in ended.out
    assert max(map(len, ended.out.splitlines())) <= 80


def test_every_command_is_documented() -> None:
    page = (ROOT / "docs" / "cli.md").read_text("utf-8")
    assert [name for name in NAMES if f"### `quire {name}" not in page] == []


@pytest.mark.parametrize("arguments", [["--help"], ["ls"], ["info"], ["feed", "tail"], ["manifest", "tables"]])
def test_light_commands_load_nothing_heavy(path: Path, arguments: list[str]) -> None:
    """Start-up is a promise: what these import is most of it."""
    program = f"""
import sys
sys.argv = ["quire", *{arguments!r}]
try:
    from quire.cli.main import main
    main()
except SystemExit as end:
    assert not end.code, end.code
print([each for each in {HEAVY!r} if each in sys.modules], file=sys.stderr)
"""
    env = {**os.environ, "PYTHONPATH": str(SRC), "QUIRE_STORE": str(path)}
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, env=env)
    assert ended.returncode == 0, ended.stderr
    assert ended.stderr.strip().splitlines()[-1] == "[]"


def test_the_program_runs_as_a_module(path: Path) -> None:
    ended = quire_program("ls", "--json", "--store", str(path))
    assert [each["name"] for each in json.loads(ended.stdout)] == ["clicks", "shop"]
    assert quire_program("ls", "--store", str(path / "nothing")).returncode == 3
    assert quire_program("--version").stdout.startswith("quire ")


def test_a_reader_that_closes_the_pipe_is_no_error(path: Path) -> None:
    command = f"{sys.executable} -m quire manifest dump change_log --limit 0 --json --store {path} | head -c 1"
    env = {**os.environ, "PYTHONPATH": str(SRC)}
    ended = subprocess.run(command, shell=True, capture_output=True, text=True, timeout=60, env=env)
    assert "Traceback" not in ended.stderr


def test_the_tour_runs_again_and_again(tmp_path: Path) -> None:
    """As `make run` does, at 80 columns: three times, sound each time, and the catalog does not grow."""
    root = tmp_path / "quire-data"
    rows = []
    for _ in range(3):
        ended = quire_program("tour", cwd=tmp_path, env={"COLUMNS": "80"})
        assert ended.returncode == 0, ended.stderr
        assert ended.stderr == ""
        assert max(map(len, ended.stdout.splitlines())) <= 80
        assert "all rules hold" in ended.stdout
        assert "NameTaken" in ended.stdout
        with quire.open(root) as store:
            assert store.manifest.check() == []
            rows.append(store.info().chunks)
    assert rows[1] == rows[2]
    data = json.loads(quire_program("tour", "--json", "--store", str(root)).stdout)
    assert (data["problems"], data["refused"], data["burst"]["operations"]) == ([], "NameTaken", 20_000)


def test_what_the_tour_suggests_works(tmp_path: Path) -> None:
    text = quire_program("tour", cwd=tmp_path).stdout
    suggested = [line.split()[1:] for line in text.splitlines() if line.startswith("  quire ")]
    assert len(suggested) == 5
    for arguments in suggested:
        ended = quire_program(*arguments, cwd=tmp_path)
        assert (ended.returncode, bool(ended.stdout)) == (0, True), ended.stderr


def test_the_tour_leaves_databases_of_others_alone(run: Run, path: Path) -> None:
    before = run("ls", "--json").data
    ended = run("tour")
    assert ended.code == 4
    assert "not the tour's" in ended.err
    assert run("ls", "--json").data == before
