"""Man pages are generated from the declarations of commands."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from quire.cli.man import main, pages
from tests.cli.commands import COMMANDS
from tests.cli.conftest import Run


def test_every_command_has_a_page_with_its_options_and_example(run: Run) -> None:
    man_pages = pages()
    assert {f"quire-{'-'.join(words)}.1" for words in COMMANDS} <= man_pages.keys()
    page = man_pages["quire-rollback.1"]
    assert r"quire\-rollback \- Undo everything since a version, in place" in page
    assert r".B \-\-to VERSION" in page
    assert r".B \-h, \-\-help" in page
    # Click keeps the help option that a command was first asked for: the pages must not take -h from it.
    assert run("rollback", "-h", at=None).code == 0
    assert r"quire rollback shop \-\-to monday" in page
    assert ".SH COMMANDS" in man_pages["quire-snapshot.1"]
    assert man_pages == pages(), "the output is reproducible"


def test_pages_are_written_where_man_looks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path / "man1")]) == 0
    assert "pages to" in capsys.readouterr().out
    assert (tmp_path / "man1" / "quire.1").read_text("utf-8").startswith('.TH "QUIRE" 1')


@pytest.mark.skipif(shutil.which("groff") is None, reason="groff reads the pages")
def test_groff_accepts_the_pages(tmp_path: Path) -> None:
    main([str(tmp_path)])
    files = [str(file) for file in sorted(tmp_path.iterdir())]
    result = subprocess.run(
        ["groff", "-man", "-ww", "-z", "-Kutf8", *files], capture_output=True, text=True, timeout=60
    )
    assert (result.returncode, result.stderr) == (0, "")
