"""Which packages may import which, checked on the syntax trees.

import-linter checks the same rules (pyproject.toml). They are intentionally repeated here: a contract can be loosened with one
line, and this check also finds imports through importlib.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from graphlib import CycleError, TopologicalSorter

import pytest

from tests.rules.tree import Source, imports, modules, parse

LAYERS = [
    {"core"},
    {"durable"},
    {"objects"},
    {"manifest"},
    {"pages", "stream", "lsm", "archive"},
    {"sqlite"},
    {"jobs"},
    {"service"},
    {"spark"},
    {"store"},
    {"cli", "testing", "django", "integrations"},
    {"__main__"},
]
RANK = {package: rank for rank, layer in enumerate(LAYERS) for package in layer}
EXCEPTIONS = {("quire.integrations.sqlite_utils", "click")}  # sqlite-utils registers commands of plugins with it
ONLY_IMPORTED_BY = {"lmdb": "manifest", "obstore": "objects", "apsw": "sqlite", "pyspark": "spark", "click": "cli"}


def package_of(module: str) -> str:
    """The package of a dotted name in quire; names of the root count as `store`, where they are defined."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 and parts[1] in RANK else "store"


def wrong_directions(source: Source) -> Iterator[str]:
    package = package_of(source.module)
    for imported in imports(source):
        target = package_of(imported.name)
        if imported.is_in("quire") and target != package and RANK[target] >= RANK[package]:
            yield f"{source.path}:{imported.line}: {package} may not import {imported.name}"


def restricted_imports(source: Source) -> Iterator[str]:
    for imported in imports(source):
        for library, package in ONLY_IMPORTED_BY.items():
            if (
                (source.module, library) not in EXCEPTIONS
                and imported.is_in(library)
                and package_of(source.module) != package
            ):
                yield f"{source.path}:{imported.line}: {library} belongs to {package}/"


def inside() -> list[Source]:
    """All modules except the root, whose lazy names are above every package."""
    return [source for source in modules() if source.module != "quire"]


def at_once(body: Iterable[ast.stmt]) -> Iterator[int]:
    """The lines of the imports that run when a module is imported: not those in functions, nor those for types only."""
    for node in body:
        match node:
            case ast.Import() | ast.ImportFrom():
                yield node.lineno
            case ast.If(test=ast.Name(id="TYPE_CHECKING")):
                yield from at_once(node.orelse)
            case ast.If() | ast.With() | ast.Try():
                below = [*node.body, *getattr(node, "orelse", []), *getattr(node, "finalbody", [])]
                handlers = [statement for handler in getattr(node, "handlers", []) for statement in handler.body]
                yield from at_once([*below, *handlers])


def for_types_only(source: Source) -> set[int]:
    """The lines of the imports under `if TYPE_CHECKING`, which never run."""
    guarded = [node for node in source.nodes if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"]
    inner = (below for node in guarded for statement in node.body for below in ast.walk(statement))
    return {node.lineno for node in inner if isinstance(node, ast.Import | ast.ImportFrom)}


def import_order(files: Iterable[Source]) -> list[str]:
    """The modules, each after those that it imports, also inside functions; raises `CycleError` if there is no such order."""
    files = list(files)
    names = {source.module for source in files}
    needs: dict[str, set[str]] = {}
    for source in files:
        unused = for_types_only(source)
        imported = [used.name for used in imports(source) if used.line not in unused]
        needs[source.module] = {
            name for name in (*imported, *(name.rpartition(".")[0] for name in imported)) if name in names
        }
        needs[source.module].discard(source.module)
    return list(TopologicalSorter(needs).static_order())


def test_imports_have_no_cycle() -> None:
    """With a cycle, whether a module can be imported depends on what the process has imported before; executors begin
    anywhere. An import inside a function hides a cycle and does not remove it: neither module can be understood alone."""
    assert len(import_order(modules())) == len(modules())
    first = parse("src/quire/a.py", "from quire.b import x")
    for second in ("import quire.a", "def f():\n    import quire.a", "def f():\n    from quire import a"):
        with pytest.raises(CycleError):
            import_order([first, parse("src/quire/b.py", second)])
    typed = parse("src/quire/b.py", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import quire.a\n")
    assert import_order([first, typed]) == ["quire.b", "quire.a"]


def test_every_package_has_a_layer() -> None:
    unranked = [source.path for source in inside() if source.module.split(".")[1] not in RANK]
    assert not unranked, f"give the package a layer here and in pyproject.toml: {unranked}"


IMPORTS_IN_FUNCTIONS_MAX = 80


def imports_in_functions(source: Source) -> list[int]:
    """The lines of the imports inside functions."""
    functions = [node for node in source.nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    inner = (node for function in functions for node in ast.walk(function))
    return sorted({node.lineno for node in inner if isinstance(node, ast.Import | ast.ImportFrom)})


def test_imports_inside_functions_are_few() -> None:
    """They are for heavy third-party packages on rare paths; all others are at the top, where readers expect them."""
    lines = [f"{source.path}:{line}" for source in modules() for line in imports_in_functions(source)]
    assert len(lines) <= IMPORTS_IN_FUNCTIONS_MAX, "\n".join(lines)
    nested = "import os\ndef f():\n    import a\n    async def g():\n        from b import c\n"
    assert imports_in_functions(parse("src/quire/a.py", nested)) == [3, 5]


def test_imports_follow_the_layers() -> None:
    assert not [problem for source in inside() for problem in wrong_directions(source)]


def test_third_party_packages_are_imported_only_by_their_package() -> None:
    assert not [problem for source in modules() for problem in restricted_imports(source)]


def test_package_inits_load_nothing() -> None:
    """Otherwise importing one executor-safe module runs code of its siblings. Public packages have lazy names
    (core/lazy.py)."""
    for source in inside():
        if source.is_package and source.text:
            lines = set(at_once(source.tree.body))
            assert {imported.name for imported in imports(source) if imported.line in lines} == {
                "typing.TYPE_CHECKING",
                "quire.core.lazy.lazy_names",
            }, source.path


def test_hidden_and_relative_imports_are_found() -> None:
    def problems(path: str, text: str) -> int:
        source = parse(path, text)
        return len([*wrong_directions(source), *restricted_imports(source)])

    assert problems("src/quire/core/a.py", "def f():\n    from quire.manifest import keys") == 1
    assert problems("src/quire/core/a.py", "if TYPE_CHECKING:\n    from ..durable import files") == 1
    assert problems("src/quire/objects/a.py", "importlib.import_module('quire.manifest.keys')") == 1
    assert problems("src/quire/manifest/a.py", "from quire import Store") == 1
    assert problems("src/quire/manifest/a.py", "import quire.testing.models") == 1
    assert problems("src/quire/pages/a.py", "import quire.stream.segment") == 1
    assert problems("src/quire/store/a.py", "def f():\n    import lmdb.tool") == 1
    assert problems("src/quire/manifest/a.py", "import lmdb\nfrom quire import core\nfrom . import keys") == 0
