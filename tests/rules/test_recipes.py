"""The recipes of CONTRIBUTING: a forgotten step is reported here.

Records, operations and enumerations are compared with their page by test_manifest_doc.py, commands by cli/test_program.py,
metrics by tests/service/web/test_metrics.py.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from docs.api import fields
from quire.core import settings
from quire.jobs.registry import HANDLERS
from quire.manifest.records import JobKind
from quire.objects.urls import ALLOWED, REMOTE_SCHEMES
from quire.spark.sources.registry import SOURCES
from tests.rules.tree import ROOT

RECIPES = [
    "A job kind",
    "A record field",
    "An object-store backend",
    "A command",
    "A threshold",
    "A Spark source",
    "A metric",
    "A pragma",
]
SOURCE_FILES_MAX = 4


def page(name: str) -> str:
    return (ROOT / "docs" / name).read_text("utf-8")


def recipe(title: str) -> str:
    text = (ROOT / "CONTRIBUTING.md").read_text("utf-8")
    section = re.search(rf"^### {title}\n(.*?)(?=^##)", text, re.MULTILINE | re.DOTALL)
    assert section, f"CONTRIBUTING has no recipe {title!r}"
    return section[1]


@pytest.mark.parametrize("title", RECIPES)
def test_a_recipe_has_few_steps_and_names_files_that_exist(title: str) -> None:
    steps, _, after = recipe(title).partition("Docs:")
    assert after, "a recipe states what to document and what to test"
    assert len(re.findall(r"^\d\. ", steps, re.MULTILINE)) <= SOURCE_FILES_MAX
    named = re.findall(r"`((?:src|docs|tests|deploy)/[^`]*?)`", recipe(title))
    assert named
    assert not [path for path in named if "<" not in path and not (ROOT / path).exists()]


def test_every_kind_of_job_has_a_handler_and_a_row() -> None:
    assert set(HANDLERS) == set(JobKind)
    rows = page("jobs.md")
    assert not [kind.name for kind in JobKind if f"`{kind.name}`" not in rows]


def test_every_scheme_of_object_stores_is_documented() -> None:
    assert not [scheme for scheme in REMOTE_SCHEMES if f"{scheme}://" not in ALLOWED]
    assert not [scheme for scheme in REMOTE_SCHEMES if f"`{scheme}://" not in page("objects.md")]


def test_every_spark_source_is_documented() -> None:
    assert not [source.name() for source in SOURCES if f"`{source.name()}`" not in page("spark.md")]


def test_every_threshold_has_a_sentence() -> None:
    """One sentence may follow two fields that belong together."""
    for name, struct in vars(settings).items():
        if name.endswith("Settings") and name != "StoreSettings":  # its fields are the other classes
            notes = [(field, text.partition("` ")[2]) for field, text in fields(struct)]
            for (field, note), (_, below) in zip(notes, [*notes[1:], ("", "")]):
                assert note or below, f"{name}.{field} needs a sentence below it"


def test_every_pragma_that_is_handled_is_documented() -> None:
    source = ast.parse(Path(ROOT / "src/quire/sqlite/pragmas.py").read_text("utf-8"))
    handled = {
        str(node.value.value)
        for node in ast.walk(source)
        if isinstance(node, ast.MatchValue) and isinstance(node.value, ast.Constant)
    }
    assert "mmap_size" in handled, "the pattern no longer matches `answer_pragma`"
    assert not [name for name in handled if f"| `{name}`" not in page("sqlite.md")]
