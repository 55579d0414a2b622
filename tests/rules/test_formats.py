"""Each on-disk format has one module that owns its bytes and one page that describes them, and each names the other.
Every page that the code cites exists.

Tests beside each format compare the numbers on a page with the structs; here, no page is orphaned or incomplete.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.rules.tree import ROOT, modules

PAGES = sorted(file for file in (ROOT / "docs" / "formats").glob("*.md") if file.name != "README.md")

# The sections of a page, in this order; CONTRIBUTING.md explains each.
SECTIONS = ["Layout", "Example", "Reading", "Evolution", "Downsides"]

OWNER = re.compile(r"^Owner: `(quire(?:\.\w+)+)`", re.MULTILINE)


def sections(text: str) -> list[str]:
    return re.findall(r"^## (.+)$", text, re.MULTILINE)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_page_has_all_sections(page: Path) -> None:
    headings = sections(page.read_text("utf-8"))
    assert [heading for heading in headings if heading in SECTIONS] == SECTIONS, f"{page.name} needs {SECTIONS}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_page_and_owner_name_each_other(page: Path) -> None:
    owner = OWNER.search(page.read_text("utf-8"))
    assert owner, f"{page.name} needs a line: Owner: `quire.<package>.<module>`"
    docstrings = {source.module: source.docstring for source in modules()}
    assert owner[1] in docstrings, f"{page.name}: there is no module {owner[1]}"
    assert f"docs/formats/{page.name}" in docstrings[owner[1]], f"the docstring of {owner[1]} must name its page"


def test_pages_that_modules_cite_exist() -> None:
    cited = [(source.path, page) for source in modules() for page in re.findall(r"docs/[\w/-]+\.md", source.text)]
    assert not [f"{path} cites {page}" for path, page in cited if not (ROOT / page).exists()]


def test_every_decision_is_listed() -> None:
    folder = ROOT / "docs" / "decisions"
    index = (folder / "README.md").read_text("utf-8")
    assert not [page.name for page in folder.glob("[0-9]*.md") if f"]({page.name})" not in index]
