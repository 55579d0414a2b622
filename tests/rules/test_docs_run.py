"""Every ```python block of the README and of the pages in docs/ runs unchanged in an empty directory, and so does the ```sh
block of the README.

The blocks of a page are separate programs, since a reader copies one of them. Those that use Spark share the session of the
test run. The pages about formats and decisions have no programs.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.programs import run_program
from tests.rules.tree import ROOT, SRC

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
COMMANDS = re.compile(r"(?:^|`)make ([a-z]+)", re.MULTILINE)
LINK = re.compile(r"\]\((?!https?:|#)([^)#]+)")


def programs(page: Path) -> list[tuple[int, str]]:
    """(line, code) of each block of a page."""
    text = page.read_text("utf-8")
    return [(text.count("\n", 0, block.start(1)) + 1, block[1]) for block in BLOCK.finditer(text)]


def uses_spark(code: str) -> bool:
    """Such blocks run in the process that has the session; their ids contain "Spark" (tests/conftest.py)."""
    return "quire.spark" in code


BLOCKS = [
    pytest.param(code, id=f"{page.relative_to(ROOT)}:{line}{' on Spark' * uses_spark(code)}")
    for page in PAGES
    for line, code in programs(page)
]


def run(code: str, directory: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(SRC), "PYTHONWARNINGS": "error"}
    return run_program(["-c", code], cwd=directory, env=environment, capture_output=True)


def run_here(code: str, directory: Path, request: pytest.FixtureRequest) -> str:
    """Run a block in this process, with the session of the test run; returns its standard error."""
    request.getfixturevalue("shared_spark")
    captured: pytest.CaptureFixture[str] = request.getfixturevalue("capsys")
    request.getfixturevalue("monkeypatch").chdir(directory)
    exec(compile(code, "block", "exec"), {"__name__": "__main__"})
    return captured.readouterr().err


@pytest.mark.timeout(300)
@pytest.mark.parametrize("code", BLOCKS)
def test_block_runs(code: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    if uses_spark(code):
        assert run_here(code, tmp_path, request) == "", "a program from the docs must not write to standard error"
        return
    result = run(code, tmp_path)
    assert result.returncode == 0, result.stderr
    assert not result.stderr, "a program from the docs must not write to standard error"


def run_shell(block: str, directory: Path) -> str:
    """Run commands as a new user does, and return their output."""
    programs = {"quire": '-m quire "$@"', "python": '"$@"'}
    (directory / "bin").mkdir()
    for name, arguments in programs.items():
        program = directory / "bin" / name
        program.write_text(f'#!/bin/sh\nexec "{sys.executable}" {arguments}\n')
        program.chmod(0o755)
    environment = {**os.environ, "PYTHONPATH": str(SRC), "PATH": f"{directory / 'bin'}:{os.environ['PATH']}"}
    result = subprocess.run(
        ["sh", "-e", "-c", block],
        cwd=directory,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_the_recovery_of_the_readme_runs_as_written(tmp_path: Path) -> None:
    """The disk is lost, and the value is read again: by the commands that a new user copies."""
    (block,) = re.findall(r"^```sh\n(.*?)^```", (ROOT / "README.md").read_text("utf-8"), re.MULTILINE | re.DOTALL)
    assert "rm -rf ./shop" in block
    assert run_shell(block, tmp_path).endswith("\n3 apples\n")


def test_the_commands_of_the_readme_run_one_block_after_the_other(tmp_path: Path) -> None:
    """Regression: the tour imported a database into a store of an earlier block, which had one of that name."""
    text = (ROOT / "README.md").read_text("utf-8")
    blocks = re.findall(r"^```(\w*)\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    serving, tour = (block for language, block in blocks if not language and "quire init" in block)
    tour = tour.replace(". .venv/bin/activate", ": no environment of its own")
    output = run_shell(f"{serving}\nkill $!; wait $!\n{tour}", tmp_path)
    assert "2|0.9\n" in output
    assert "exported shop-test as it is now to test.db" in output


def test_the_readme_has_a_tour_and_its_two_commands() -> None:
    text = (ROOT / "README.md").read_text("utf-8")
    assert programs(ROOT / "README.md")
    assert "make run" in text
    assert "make test" in text


def test_make_targets_that_pages_name_exist() -> None:
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE))
    pages = [*PAGES, ROOT / "CONTRIBUTING.md"]
    named = {(page.name, target) for page in pages for target in COMMANDS.findall(page.read_text("utf-8"))}
    assert named, "no page names a `make` target: is the pattern still correct?"
    assert not [pair for pair in named if pair[1] not in targets]


def test_links_between_pages_are_valid() -> None:
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").glob("*.md")]
    missing = [
        f"{page.relative_to(ROOT)}: {link}"
        for page in pages
        for link in LINK.findall(page.read_text("utf-8"))
        if not (page.parent / link).exists()
    ]
    assert not missing


def test_a_block_that_fails_is_detected(tmp_path: Path) -> None:
    assert run("raise SystemExit(3)", tmp_path).returncode == 3
    page = tmp_path / "page.md"
    page.write_text("words\n\n```python\nx = 1\n```\n\n```\nnot this\n```\n")
    assert programs(page) == [(4, "x = 1\n")]
