"""Codes such as M7 in code, tests and pages are defined in docs/design.md; everything that docs/design/seeds.md names
exists."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from tests.rules.tree import ROOT, modules

DESIGN = ROOT / "docs/design.md"
CODE = re.compile(r"""(?<![-\w./%'"=])[A-Z][0-9]{1,2}(?![\w%'"=/-]|\.\w)""")
"""Not a code: part of a date or a version (2020-W53), of a path, of a quoted value."""
DEFINED = re.compile(r"^\*\*([A-Z][0-9]{1,2}) — ", re.MULTILINE)
POINT = re.compile(r"\b[Ii]ssues? [0-9]+,?(?: (?:and )?[A-Z][0-9]{1,2},?)+")
"""A point of an issue, cited with its issue."""
RULE = re.compile(r"^  ([A-Z][0-9]{1,2})  \S", re.MULTILINE)
"""A rule of a checker, in the list at the top of its module."""
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
    """The text for readers in a file: comments and docstrings of a program, all of a page."""
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
    return sorted({code for text in prose(file) for code in CODE.findall(POINT.sub("", text))} - defined())


def test_every_code_that_is_cited_is_defined() -> None:
    files = [file for folder in FOLDERS for file in (ROOT / folder).rglob("*") if file.suffix in KINDS]
    files += [*ROOT.glob("*.md"), *ROOT.glob("*.toml")]
    missing = {str(file.relative_to(ROOT)): codes for file in files if (codes := undefined(file))}
    assert not missing, "define these in docs/design.md, or state in words what is meant"


CITED = re.compile(r"\(([A-Z][0-9]{1,2}(?:, [A-Z][0-9]{1,2})*)\)")


def test_a_code_in_parentheses_is_not_a_checkers_rule_of_another_package() -> None:
    """Hazard: L4 counted as defined, because the checker of manifest logs has a rule with that name."""
    paragraphs = set(DEFINED.findall(DESIGN.read_text("utf-8")))
    rules: dict[str, set[str]] = {}
    for source in modules():
        if source.path in CHECKERS:
            rules.setdefault(source.path.rpartition("/")[0], set()).update(RULE.findall(source.docstring))
    missing: dict[str, list[str]] = {}
    for source in modules():
        known = paragraphs | rules.get(source.path.rpartition("/")[0], set())
        file = ROOT / source.path
        if {code for cited in CITED.findall(file.read_text("utf-8")) for code in cited.split(", ")} - known:
            cited = {code for text in prose(file) for group in CITED.findall(text) for code in group.split(", ")}
            if cited - known:
                missing[source.path] = sorted(cited - known)
    assert not missing, "define these in docs/design.md"


def test_a_code_is_defined_once() -> None:
    counts = Counter(DEFINED.findall(DESIGN.read_text("utf-8")))
    assert len(counts) > 50, "is the pattern still correct?"
    assert not [code for code, count in counts.items() if count > 1]


def test_checkers_list_their_rules() -> None:
    assert all(RULE.search(source.docstring) for source in modules() if source.path in CHECKERS)
    assert {source.path for source in modules()} >= set(CHECKERS)


def test_an_undefined_code_is_detected(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text('"""Says (X9) and P8; issue 19 B10."""\nname = "X7"\nwhen = 1  # the week 2020-W53, X8\n')
    assert undefined(program) == ["X8", "X9"]


# ── docs/design/seeds.md ──────────────────────────────────────────────────────────────────────────────────────────────
CLAIMS = ROOT / "docs/design/seeds.md"
NAMED = re.compile(r"`([\w/]+\.(?:py|md))(?:::(\w+))?`")


def missing(text: str) -> list[str]:
    """The names on a page that the repository does not have: modules below src/quire, pages, tests below tests/."""
    absent = []
    for path, test in NAMED.findall(text):
        name = path.rpartition("/")[2]
        folders = ("tests",) if test or name.startswith("test_") else ("src/quire", ".")
        files = [ROOT / folder / path for folder in folders if (ROOT / folder / path).exists()]
        if not files or (test and not re.search(rf"def {test}\b", files[0].read_text("utf-8"))):
            absent.append(f"{path}::{test}" if test else path)
    return absent


def test_everything_that_the_page_of_claims_names_exists() -> None:
    text = CLAIMS.read_text("utf-8")
    assert len(NAMED.findall(text)) > 600, "is the pattern still correct?"
    assert not missing(text)


def test_every_claim_has_a_location_or_a_reason() -> None:
    rows = [line.split(" | ") for line in CLAIMS.read_text("utf-8").splitlines() if line.startswith("| ")]
    rows = [row for row in rows if row[0] != "| claim"]
    assert len(rows) > 350
    assert not [row for row in rows if len(row) not in (3, 4) or not row[2].strip(" |")]


def test_a_name_of_nothing_is_detected() -> None:
    text = "`lsm/kv.py` `lsm/nothing.py` `lsm/test_kv.py::test_nothing` `docs/pages.md`"
    assert missing(text) == ["lsm/nothing.py", "lsm/test_kv.py::test_nothing"]


# ── docstrings ────────────────────────────────────────────────────────────────────────────────────────────────────────
BARE_RULE = re.compile(r'"""(?:Rules? )?[A-Z]?[0-9]{1,2}(?:(?:, | and )[A-Z]?[0-9]{1,2})*[.;]?"""')


def test_a_docstring_states_its_rule_and_not_only_the_number() -> None:
    assert all(map(BARE_RULE.search, ('"""Rules 1 and 2."""', '"""R1, R2."""')))
    files = [*(ROOT / "src").rglob("*.py"), *(ROOT / "tests").rglob("*.py")]
    bare = [str(file.relative_to(ROOT)) for file in files if BARE_RULE.search(file.read_text("utf-8"))]
    assert bare == ["tests/rules/test_design.py"], (
        "state it in a sentence; the number of the rule can follow at its end"
    )


def test_the_design_documents_are_named_by_subject_and_not_by_number() -> None:
    numbered = re.compile(r"\b[Ss]eeds? 00[0-9]\b|shared/(?:seeds|DESIGN)")
    assert numbered.search("as seed 001 says")
    files = [file for folder in FOLDERS for file in (ROOT / folder).rglob("*") if file.suffix in KINDS]
    cited = [str(file.relative_to(ROOT)) for file in files if numbered.search(file.read_text("utf-8"))]
    assert cited == ["tests/rules/test_design.py"], "docs/design/seeds.md has their names"
