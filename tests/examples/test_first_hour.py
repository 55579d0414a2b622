"""The first hour of a new user: the pages of docs/ from top to bottom, and common mistakes."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.programs import Program, run_program
from tests.rules.tree import ROOT, SRC

PAGES = ("operations", "snapshots", "jobs", "service", "feed", "sqlite", "streams", "key-value", "pages")


def quire(*arguments: str, at: Path, stdin: str = "") -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(SRC)}
    environment.pop("QUIRE_STORE", None)
    return run_program(["-m", "quire", *arguments],
        cwd=at, env=environment, input=stdin, capture_output=True, timeout=100,
    )  # fmt: skip


def programs(page: str) -> list[str]:
    """The code blocks of a page, without those on Spark, which share a session (tests/rules)."""
    parts = (ROOT / "docs" / f"{page}.md").read_text("utf-8").split("\n```python\n")[1:]
    return [program for part in parts if "quire.spark" not in (program := part.partition("\n```")[0])]


@pytest.mark.slow
@pytest.mark.timeout(200)
@pytest.mark.parametrize("page", PAGES)
def test_the_programs_of_a_page_run_in_sequence_in_one_directory(page: str, tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(SRC)}
    page_programs = programs(page)
    assert len(page_programs) > 1
    for number, code in enumerate(page_programs):
        result = run_program(["-c", code], cwd=tmp_path, env=environment, capture_output=True, timeout=100)
        assert result.returncode == 0, f"block {number}: {result.stderr}"


def test_doctor_finds_no_problem_on_a_machine_without_a_store(tmp_path: Path) -> None:
    result = quire("doctor", at=tmp_path)
    assert (result.returncode, result.stderr) == (0, "")
    assert "no store in this directory" in result.stdout
    assert result.stdout.splitlines()[-1].startswith("no problems found; 1 warning")
    assert list(tmp_path.iterdir()) == []
    named = quire("doctor", "--store", "nowhere", at=tmp_path)
    assert named.returncode == 1
    assert "no store found" in named.stdout


def test_an_invalid_number_is_explained_with_a_hint(tmp_path: Path) -> None:
    result = quire("jobs", "show", "twelve", at=tmp_path)
    assert result.returncode == 2
    assert "'twelve' is not a whole number" in result.stderr


def test_the_shell_of_a_read_only_database_explains_how_to_write(tmp_path: Path) -> None:
    assert quire("init", "data", at=tmp_path).returncode == 0
    shell = quire("sqlite", "shell", "shop", "create table t(a)", "--store", "data", at=tmp_path)
    assert shell.returncode == 3, "the shell creates no database"
    assert quire("create", "shop", "--store", "data", at=tmp_path).returncode == 0
    for words in (("sqlite", "shell", "shop", "create table t(a)"), ("snapshot", "create", "shop", "monday")):
        assert quire(*words, "--store", "data", at=tmp_path).returncode == 0
    result = quire("sqlite", "shell", "shop", "delete from t", "--at", "monday", "--store", "data", at=tmp_path)
    assert result.returncode == 2
    assert "`quire fork shop NEW --at monday`" in result.stderr


def test_closing_the_pipe_of_the_tour_is_not_an_error(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(SRC)}
    with Program(["-m", "quire", "tour", "--store", "data"],
        cwd=tmp_path, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    ) as tour:  # fmt: skip
        assert tour.stdout is not None
        assert tour.stderr is not None
        assert tour.stdout.readline() == "\n"
        tour.stdout.close()
        assert tour.stderr.read() == ""
        assert tour.wait(100) == 141, "the exit code of a program that SIGPIPE ended"
