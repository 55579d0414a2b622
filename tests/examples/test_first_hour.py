"""What people meet in their first hour: the pages of docs/ typed from top to bottom, and the mistakes that everybody makes."""

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
    """The blocks of a page, without those on Spark, which share a session elsewhere (tests/rules)."""
    parts = (ROOT / "docs" / f"{page}.md").read_text("utf-8").split("\n```python\n")[1:]
    return [each for part in parts if "quire.spark" not in (each := part.partition("\n```")[0])]


@pytest.mark.slow
@pytest.mark.timeout(200)
@pytest.mark.parametrize("page", PAGES)
def test_the_programs_of_a_page_run_one_after_the_other_in_one_directory(page: str, tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(SRC)}
    found = programs(page)
    assert len(found) > 1
    for number, code in enumerate(found):
        ended = run_program(["-c", code], cwd=tmp_path, env=environment, capture_output=True, timeout=100)
        assert ended.returncode == 0, f"block {number}: {ended.stderr}"


def test_the_doctor_finds_nothing_wrong_with_a_machine_that_has_no_store_yet(tmp_path: Path) -> None:
    ended = quire("doctor", at=tmp_path)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert "no store in this directory" in ended.stdout
    assert ended.stdout.splitlines()[-1].startswith("no problems found; 1 warning")
    assert list(tmp_path.iterdir()) == []
    named = quire("doctor", "--store", "nowhere", at=tmp_path)
    assert named.returncode == 1
    assert "no store found" in named.stdout


def test_a_number_that_is_none_is_called_so(tmp_path: Path) -> None:
    ended = quire("jobs", "show", "twelve", at=tmp_path)
    assert ended.returncode == 2
    assert "'twelve' is not a whole number" in ended.stderr


def test_the_shell_says_where_to_write_what_is_for_reading(tmp_path: Path) -> None:
    assert quire("init", "data", at=tmp_path).returncode == 0
    made = quire("sqlite", "shell", "shop", "create table t(a)", "--store", "data", at=tmp_path)
    assert made.returncode == 3, "it makes no database"
    assert quire("create", "shop", "--store", "data", at=tmp_path).returncode == 0
    for words in (("sqlite", "shell", "shop", "create table t(a)"), ("snapshot", "create", "shop", "monday")):
        assert quire(*words, "--store", "data", at=tmp_path).returncode == 0
    ended = quire("sqlite", "shell", "shop", "delete from t", "--at", "monday", "--store", "data", at=tmp_path)
    assert ended.returncode == 2
    assert "`quire fork shop NEW --at monday`" in ended.stderr


def test_who_has_seen_enough_of_the_tour_is_not_told_of_an_error(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(SRC)}
    with Program(["-m", "quire", "tour", "--store", "data"],
        cwd=tmp_path, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    ) as tour:  # fmt: skip
        assert tour.stdout is not None
        assert tour.stderr is not None
        assert tour.stdout.readline() == "\n"
        tour.stdout.close()
        assert tour.stderr.read() == ""
        assert tour.wait(100) == 141, "what a shell gives to what SIGPIPE ended"
