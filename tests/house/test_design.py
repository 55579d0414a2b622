"""Codes such as M7 that code, tests and pages cite are defined in docs/design.md; what docs/design/seeds.md names exists."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from tests.house.tree import ROOT, modules

DESIGN = ROOT / "docs/design.md"
CODE = re.compile(r"""(?<![-\w./%'"=])[A-Z][0-9]{1,2}(?![\w%'"=/-]|\.\w)""")
"""Not a code: part of a date or a version (2020-W53), of a path, of a quoted value."""
DEFINED = re.compile(r"^\*\*([A-Z][0-9]{1,2}) — ", re.MULTILINE)
RULE = re.compile(r"^  ([A-Z][0-9]{1,2})  \S", re.MULTILINE)
"""A checker's rule, in the list at the top of its module."""
CHECKERS = (
    "src/quire/manifest/check.py",
    "src/quire/stream/mlog_verify.py",
    "src/quire/stream/verify.py",
    "src/quire/lsm/verify.py",
    "src/quire/pages/chunk_verify.py",
)
FOLDERS = ("src", "tests", "docs", "bench", "examples", "deploy")
KINDS = {".py", ".md", ".toml", ".yml", ".yaml"}


def prose(file: Path) -> Iterator[str]:
    """What people read in a file: comments and docstrings of a program, all of a page."""
    text = file.read_text("utf-8")
    if file.suffix != ".py":
        yield text
        return
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    yield from (token.string for token in tokens if token.type == tokenize.COMMENT)
    for node in ast.walk(ast.parse(text)):
        match node:
            case ast.Expr(value=ast.Constant(value=str(docstring))):
                yield docstring


@cache
def defined() -> frozenset[str]:
    rules = {rule for source in modules() if source.path in CHECKERS for rule in RULE.findall(source.docstring)}
    return frozenset(DEFINED.findall(DESIGN.read_text("utf-8"))) | rules


def undefined(file: Path) -> list[str]:
    if not set(CODE.findall(file.read_text("utf-8"))) - defined():
        return []  # parsing every program of the repository takes seconds
    return sorted({code for text in prose(file) for code in CODE.findall(text)} - defined())


def test_every_code_that_is_cited_is_defined() -> None:
    files = [file for folder in FOLDERS for file in (ROOT / folder).rglob("*") if file.suffix in KINDS]
    files += [*ROOT.glob("*.md"), *ROOT.glob("*.toml")]
    missing = {str(file.relative_to(ROOT)): codes for file in files if (codes := undefined(file))}
    assert not missing, "define these in docs/design.md, or say in words what is meant"


def test_a_code_is_defined_once() -> None:
    counts = Counter(DEFINED.findall(DESIGN.read_text("utf-8")))
    assert len(counts) > 50, "is the pattern right?"
    assert not [code for code, count in counts.items() if count > 1]


def test_checkers_list_their_rules() -> None:
    assert all(RULE.search(source.docstring) for source in modules() if source.path in CHECKERS)
    assert {source.path for source in modules()} >= set(CHECKERS)


def test_an_undefined_code_is_noticed(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text('"""Says (X9) and P8."""\nname = "X7"\nwhen = 1  # the week 2020-W53, X8\n')
    assert undefined(program) == ["X8", "X9"]
