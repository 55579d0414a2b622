"""The documentation site: generated files are up to date, every page is reachable, and terms are defined.

`make docs` builds it with warnings as errors; here is what can be checked without Sphinx.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from bench import draw
from bench.__main__ import save
from docs import api
from tests.rules.tree import ROOT, modules

DOCS = ROOT / "docs"
TERMS = [
    "adopt",
    "anchor",
    "artifact",
    "attempt",
    "batch",
    "bundle",
    "chain",
    "checkpoint",
    "chunk",
    "component",
    "cursor",
    "database",
    "delta",
    "epoch",
    "evict",
    "failpoint",
    "fenced",
    "floor",
    "frame",
    "generation",
    "group",
    "guard",
    "holder",
    "hydrate",
    "job",
    "lease",
    "leaf",
    "load",
    "lsn",
    "manifest",
    "merge",
    "namespace",
    "operation",
    "orphan",
    "overlay",
    "owner",
    "pin",
    "plan",
    "projection",
    "publication",
    "publish",
    "quarantine",
    "residency",
    "runner",
    "segment",
    "slot",
    "store",
    "sweep",
    "tier",
    "tombstoned",
    "view",
    "witness",
    "zero",
]


def test_the_api_page_is_up_to_date() -> None:
    assert api.PAGE.read_text("utf-8") == api.page(), "run .venv/bin/python -m docs.api"


def test_pictures_and_tables_of_benchmarks_are_up_to_date() -> None:
    drawn = draw.drawn()
    assert len(drawn) > 1
    for path, text in drawn.items():
        assert path.read_text("utf-8") == text, "run .venv/bin/python -m bench.draw"


def test_every_missed_target_is_explained() -> None:
    """A missed target without an explanation is worse than the missed target."""
    text = (DOCS / "benchmarks.md").read_text("utf-8")
    missed = [
        f"{path.stem}: {name}"
        for path in sorted((DOCS / "results").glob("*.json"))
        for name, ratio in json.loads(path.read_text("utf-8"))["ratios"].items()
        if ratio["target"] is not None
        and draw.goodness(ratio["value"], ratio["target"], ratio["better"]) < 1
        and f"`{name}`" not in text
    ]
    assert not missed, "explain it in docs/benchmarks.md"


def test_a_partial_run_keeps_what_it_did_not_measure_with_its_date(tmp_path: Path) -> None:
    path = tmp_path / "many.json"
    first = {
        "run": {"date": "2026-01-01", "load": 1},
        "ratios": {"a": {"value": 1}, "b": {"value": 1}},
        "figures": {"x": 1},
    }
    second = {"run": {"date": "2026-01-02", "load": 2}, "ratios": {"b": {"value": 2}}, "figures": {"y": 2}}
    third = {"run": {"date": "2026-01-03", "load": 3}, "ratios": {"c": {"value": 3}}, "figures": {}}
    for result, is_partial in ((first, False), (second, True), (third, True)):
        save(result, path, is_partial=is_partial)
    saved = json.loads(path.read_text("utf-8"))
    assert saved["run"] == third["run"]
    assert [*saved["ratios"]] == ["a", "b", "c"]
    assert saved["ratios"]["a"] == {"run": first["run"], "value": 1}
    assert saved["ratios"]["b"] == {"run": second["run"], "value": 2}
    assert saved["ratios"]["c"] == {"value": 3}
    assert saved["figures"] == {"x": 1, "y": 2}


@pytest.mark.parametrize(
    ("value", "target", "better", "good"), [(2, 1, "higher", 2), (2, 1, "lower", 0.5), (0.5, 1, "lower", 2)]
)
def test_a_bar_is_longer_the_better_the_ratio_is(value: float, target: float, better: str, good: float) -> None:
    assert draw.goodness(value, target, better) == good


def test_every_page_is_in_the_table_of_contents() -> None:
    """Otherwise Sphinx warns, and readers do not find it."""
    index = (DOCS / "index.md").read_text("utf-8")
    listed = set(re.findall(r"^(?:\w+ <)?([\w./-]+?)>?$", index, re.MULTILINE))
    pages = {page.stem for page in DOCS.glob("*.md")} - {"index"}
    assert not pages - listed
    formats = (DOCS / "formats" / "README.md").read_text("utf-8")
    assert not [page.name for page in (DOCS / "formats").glob("[a-z]*.md") if f"]({page.name})" not in formats]


def test_every_picture_is_shown_on_a_page() -> None:
    text = "".join(page.read_text("utf-8") for page in [ROOT / "README.md", *DOCS.glob("*.md")])
    assert not [image.name for image in (DOCS / "images").iterdir() if f"images/{image.name})" not in text]


def test_the_glossary_defines_the_terms_of_the_project() -> None:
    terms = re.findall(r"^\*\*(.+)\*\*$", (DOCS / "glossary.md").read_text("utf-8"), re.MULTILINE)
    defined = {word for term in terms for word in re.findall(r"\w+", term.lower())}
    assert not set(TERMS) - defined


def test_code_speaks_of_packages_and_layers() -> None:
    """One term for one concept: a part of `src/quire` is a package."""
    pattern = re.compile(r"\b(?:this|per|other|new) rooms?\b|\brooms\b|\bhouse (?:rule|test)", re.IGNORECASE)
    assert not [
        f"{source.path}:{number}: {line.strip()}"
        for source in modules()
        for number, line in enumerate(source.text.splitlines(), 1)
        if pattern.search(line)
    ]
