"""Rules of the code base that no linter checks. Each has a reason, a replacement, and an example that it detects.

Lengths are ratchets: a file or function that must be longer is listed with its size, which may shrink but never grow.
"""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest

from tests.rules.tree import ROOT, Source, parse, sources

MODULE_LINES_MAX = 600
FUNCTION_LINES_MAX = 70

LONGER_MODULES: dict[str, int] = {
    "src/quire/archive/archiver.py": 702,  # one state shared by three threads: cutting, uploading, bases
    "src/quire/store/standby.py": 678,  # following and promotion are steps of one state on disk
    "src/quire/store/store.py": 657,  # the class that is the product: it delegates
}
DECLARATIONS = {
    "src/quire/core/settings.py",  # one struct for each section of quire.toml, and the example of all of them
    "src/quire/manifest/records.py",  # one record for each table; splitting it would only add a second file to search
}
"""Modules without logic, which grow by a line with every setting or field: their length is not a reason to split them."""
LONGER_FUNCTIONS: dict[str, int] = {}

CODE = ("src/quire", "bench", "examples", "tests")
TEXT = (
    "*.md",
    "*.toml",
    "*.txt",
    "Makefile",
    ".ci/*",
    "docs/**/*.md",
    "examples/*.md",
    "Dockerfile",
    *(f"{folder}/**/*.py" for folder in CODE),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """`find` yields the lines of a file that break the rule; `where` lists the directories in which it applies, except
    `but`."""

    name: str
    reason: str
    instead: str
    find: Callable[[Source], Iterator[int]]
    example: str
    where: tuple[str, ...] = CODE
    but: tuple[str, ...] = ()


def calls(*names: str) -> Callable[[Source], Iterator[int]]:
    """Finds lines that use a dotted name (`os.fsync`), or import it directly (`from os import fsync`)."""
    pairs = [tuple(name.rpartition(".")[::2]) for name in names]

    def find(source: Source) -> Iterator[int]:
        for node in source.nodes:
            match node:
                case ast.Attribute(value=ast.Name(id=owner) | ast.Attribute(attr=owner), attr=name):
                    if (owner, name) in pairs:
                        yield node.lineno
                case ast.ImportFrom(module=owner, names=aliases):
                    if any((owner, alias.name) in pairs for alias in aliases):
                        yield node.lineno
                case ast.Call(func=ast.Name(id=name)):
                    if ("", name) in pairs:
                        yield node.lineno

    return find


def words(pattern: str) -> Callable[[Source], Iterator[int]]:
    expression = re.compile(pattern)
    return lambda source: (n for n, line in enumerate(source.text.splitlines(), 1) if expression.search(line))


def module_lines(source: Source) -> int:
    """Lines of a module without those of comments: a limit of length must not be a reason to leave out reasons."""
    return sum(not line.lstrip().startswith("#") for line in source.text.splitlines())


def function_lines(source: Source) -> Iterator[tuple[str, int, int]]:
    """Each function as (path:name, first line, number of lines)."""
    for node in source.nodes:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield f"{source.path}:{node.name}", node.lineno, (node.end_lineno or node.lineno) - node.lineno + 1


def long_module(source: Source) -> Iterator[int]:
    if source.path in DECLARATIONS:
        return
    if module_lines(source) > LONGER_MODULES.get(source.path, MODULE_LINES_MAX):
        yield module_lines(source)


def long_function(source: Source) -> Iterator[int]:
    for name, line, lines in function_lines(source):
        if lines > LONGER_FUNCTIONS.get(name, FUNCTION_LINES_MAX):
            yield line


def no_docstring(source: Source) -> Iterator[int]:
    if source.text and not ast.get_docstring(source.tree):
        yield 1


def bare_except(source: Source) -> Iterator[int]:
    for node in source.nodes:
        if isinstance(node, ast.ExceptHandler) and node.type is None:
            yield node.lineno


def swallowed(source: Source) -> Iterator[int]:
    for node in source.nodes:
        match node:
            case ast.ExceptHandler(type=ast.Name(id="Exception" | "BaseException"), body=[ast.Pass()]):
                yield node.lineno


def star_import(source: Source) -> Iterator[int]:
    for node in source.nodes:
        if isinstance(node, ast.ImportFrom) and any(alias.name == "*" for alias in node.names):
            yield node.lineno


def takes_filters(source: Source) -> Iterator[int]:
    for node in source.nodes:
        match node:
            case ast.FunctionDef(name="pushFilters"):
                yield node.lineno
            case ast.Constant(value=str(text)) if "filterPushdown" in text:
                yield node.lineno


def deletes_objects(source: Source) -> Iterator[int]:
    """Finds calls of `.delete` and `.delete_many` on anything but a collector."""
    for node in source.nodes:
        match node:
            case ast.Call(func=ast.Attribute(value=receiver, attr="delete" | "delete_many")):
                match receiver:
                    case ast.Name(id="collector") | ast.Attribute(attr="collector"):
                        continue
                    case ast.Call(func=ast.Name(id="Collector")):
                        continue
                yield node.lineno


def undescribed_type(source: Source) -> Iterator[int]:
    """Finds `decode(…, type=T)` and `msgspec.convert(…, T)` with a type that is not `described(T)`."""
    for node in source.nodes:
        match node:
            case ast.Call(func=ast.Attribute(attr="decode"), keywords=keywords):
                kinds = [keyword.value for keyword in keywords if keyword.arg == "type"]
            case ast.Call(func=ast.Attribute(value=ast.Name(id="msgspec"), attr="convert"), args=[_, kind, *_]):
                kinds = [kind]
            case _:
                continue
        for kind in kinds:
            if not (isinstance(kind, ast.Call) and isinstance(kind.func, ast.Name) and kind.func.id == "described"):
                yield node.lineno


RULES = [
    Rule(
        name="module length",
        reason=f"a module has one job; above {MODULE_LINES_MAX} lines it has two",
        instead="split it by verb, or list it in LONGER_MODULES with the reason in the change",
        find=long_module,
        example="x\n" * (MODULE_LINES_MAX + 1),
    ),
    Rule(
        name="function length",
        reason=f"a function is read on one screen: {FUNCTION_LINES_MAX} lines",
        instead="give its steps names",
        find=long_function,
        example="def f():\n" + "    f()\n" * FUNCTION_LINES_MAX,
    ),
    Rule(
        name="module docstring",
        reason="a reader needs the purpose of a module before its code",
        instead="state it in one sentence; then terms, rules, the thread that owns it, the page of the format",
        find=no_docstring,
        example="x = 1\n",
    ),
    Rule(
        name="print",
        reason="a library's output belongs to the program that uses it",
        instead="structlog, or a value that cli/ renders",
        find=calls("print"),
        example="print(1)\n",
        where=("src/quire",),
        but=("src/quire/cli/",),
    ),
    Rule(
        name="sync",
        reason="faults are injected in one layer; a sync elsewhere is never tested with a failure",
        instead="File.sync and Disk.sync_dir of quire.durable.files",
        find=calls("os.fsync", "os.fdatasync", "os.sync"),
        example="import os\nos.fdatasync(3)\n",
        where=("src/quire",),
        but=("src/quire/durable/files.py",),
    ),
    Rule(
        name="wall time",
        reason="tests must be able to control time, and one clock decides (M8)",
        instead="a Clock argument (quire.core.clock): now_ms() or monotonic()",
        find=calls("time.time", "time.time_ns", "datetime.now", "datetime.utcnow", "datetime.today", "date.today"),
        example="import datetime\ndatetime.datetime.now()\n",
        where=("src/quire",),
        but=("src/quire/core/clock.py",),
    ),
    Rule(
        name="leftover",
        reason="such notes are rarely acted on",
        instead="do it, or write it down in docs/ with an owner",
        find=words(r"\b(T[O]DO|F[I]XME|X[X]X)\b"),
        example="# T\x4fDO: later\n",
    ),
    Rule(
        name="bare except",
        reason="it catches KeyboardInterrupt and SystemExit as well",
        instead="the error that is expected; `except BaseException:` where everything is cleaned up and raised again",
        find=bare_except,
        example="try:\n    x\nexcept:\n    raise\n",
    ),
    Rule(
        name="swallowed error",
        reason="an error that is not reported becomes corruption without an explanation",
        instead="catch only the expected error, and explain why it can be ignored",
        find=swallowed,
        example="try:\n    x\nexcept Exception:\n    pass\n",
    ),
    Rule(
        name="Spark filters",
        reason="Spark answers later queries on a DataFrame with the filters of earlier ones (docs/decisions/013)",
        instead="an option of the source that selects what is read, like `where` of quire.sqlite",
        find=takes_filters,
        example="class Reader:\n    def pushFilters(self, filters):\n        return filters\n",
        where=("src/quire", "bench", "examples"),
    ),
    Rule(
        name="deleted objects",
        reason="two stores deleted each other's objects: the collector checks the owner of a name and of the store (A3)",
        instead="`delete` of the collector (quire.objects.collector), which is passed to jobs and engines",
        find=deletes_objects,
        example="store.delete_many(['00000001/x'])\n",
        where=("src/quire",),
        but=(
            "src/quire/objects/",
            "src/quire/manifest/",
            "src/quire/testing/faults.py",  # an implementation of a store
            "src/quire/jobs/mirror/parquet_target.py",  # files of the mirror's table, whose names only the mirror creates
        ),
    ),
    Rule(
        name="undescribed type",
        reason="two threads that decode a type for the first time together end the process with a segmentation fault",
        instead="`type=described(T)` (quire.core.decoding)",
        find=undescribed_type,
        example="import msgspec\nmsgspec.json.decode(b'1', type=int)\n",
        where=("src/quire",),
    ),
    Rule(
        name="star import",
        reason="the reader cannot tell where a name comes from",
        instead="the names themselves",
        find=star_import,
        example="from os import *\n",
    ),
]


def offences(rule: Rule) -> Iterator[str]:
    for folder in rule.where:
        for source in sources(folder):
            if not source.path.startswith(rule.but):
                yield from (f"{source.path}:{line}" for line in rule.find(source))


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_rule(rule: Rule) -> None:
    lines = list(offences(rule))
    assert not lines, f"{', '.join(lines)}: {rule.reason}. Instead: {rule.instead}"


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_rule_detects_its_example(rule: Rule) -> None:
    assert list(rule.find(parse("src/quire/example.py", rule.example)))


def test_class_names_are_unique() -> None:
    """A search for a name must find one class. Instead: one class for one concept, two names for two."""
    definitions: dict[str, list[str]] = {}
    for source in sources("src/quire"):
        for node in source.nodes:
            if isinstance(node, ast.ClassDef):
                definitions.setdefault(node.name, []).append(f"{source.path}:{node.lineno}")
    duplicates = {name: lines for name, lines in definitions.items() if len(lines) > 1}
    assert duplicates.keys() == {"InternalError"}, duplicates  # ours, and the one that PEP 249 requires


def test_ratchets_are_as_tight_as_possible() -> None:
    """A module that shrank has its allowance lowered; a removed one is removed from the list."""
    files = [source for folder in CODE for source in sources(folder)]
    modules = {source.path: module_lines(source) for source in files}
    functions = {name: lines for source in files for name, _, lines in function_lines(source)}
    assert {path: modules.get(path) for path in LONGER_MODULES} == LONGER_MODULES
    assert {name: functions.get(name) for name in LONGER_FUNCTIONS} == LONGER_FUNCTIONS


def test_no_file_contains_a_path_of_one_machine() -> None:
    """Such a path works on one machine only. Instead: a path relative to the repository, or `tmp_path`."""
    private = re.compile(r"(?<![\w.~-])/(?:work|root|home|Users)/\w")
    lines = [
        f"{file.relative_to(ROOT)}:{number}"
        for pattern in TEXT
        for file in ROOT.glob(pattern)
        for number, line in enumerate(file.read_text("utf-8").splitlines(), 1)
        if private.search(line)
    ]
    assert not lines
    assert private.search('open("/' + 'home/me/x")')


def test_constraints_are_names_and_versions_that_cover_the_dependencies() -> None:
    """No index, hash or path: they would tie the project to one mirror or one platform."""
    lines = (ROOT / "constraints.txt").read_text("utf-8").splitlines()
    assert [line for line in lines if not re.fullmatch(r"[a-z0-9-]+==[0-9][0-9A-Za-z.]*", line)] == []
    pinned = [line.partition("==")[0] for line in lines]
    assert pinned == sorted(set(pinned))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    required = [*project["dependencies"], *project["optional-dependencies"]["dev"]]
    names = {re.split(r"[^A-Za-z0-9_.-]", requirement)[0].lower().replace("_", "-") for requirement in required}
    assert not names - set(pinned)
