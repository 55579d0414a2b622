"""Who may import whom, held by a walk of the syntax trees.

import-linter holds the same rules (pyproject.toml). They are said a second time on purpose: a contract is loosened with
one line, and this walk also sees imports through importlib.
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
GATES = {("quire.integrations.sqlite_utils", "click")}  # sqlite-utils gives its plugins the commands
FENCES = {"lmdb": "manifest", "obstore": "objects", "apsw": "sqlite", "pyspark": "spark", "click": "cli"}


def package_of(module: str) -> str:
    """The package of a dotted name in quire; the root counts as `store`, because its names lead there."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 and parts[1] in RANK else "store"


def wrong_ways(source: Source) -> Iterator[str]:
    here = package_of(source.module)
    for each in imports(source):
        there = package_of(each.name)
        if each.is_in("quire") and there != here and RANK[there] >= RANK[here]:
            yield f"{source.path}:{each.line}: {here} may not import {each.name}"


def climbed_fences(source: Source) -> Iterator[str]:
    for each in imports(source):
        for library, package in FENCES.items():
            if (source.module, library) not in GATES and each.is_in(library) and package_of(source.module) != package:
                yield f"{source.path}:{each.line}: {library} belongs to {package}/"


def inside() -> list[Source]:
    """All modules but the root's lazy names, which are above every package."""
    return [source for source in modules() if source.module != "quire"]


def at_once(body: Iterable[ast.stmt]) -> Iterator[int]:
    """The lines of the imports that are done when a module is imported: not those of functions, nor for types only."""
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


def import_order(files: Iterable[Source]) -> list[str]:
    """The modules, each behind those that it imports at once; `CycleError` if there is no such order."""
    files = list(files)
    names = {source.module for source in files}
    needs: dict[str, set[str]] = {}
    for source in files:
        lines = set(at_once(source.tree.body))
        named = [found.name for found in imports(source) if found.line in lines]
        needs[source.module] = {
            name for name in (*named, *(name.rpartition(".")[0] for name in named)) if name in names
        }
        needs[source.module].discard(source.module)
    return list(TopologicalSorter(needs).static_order())


def test_imports_go_in_no_circle() -> None:
    """Else the module that a process happens to import first decides whether it can be imported: executors begin anywhere."""
    assert len(import_order(modules())) == len(modules())
    circle = [parse("src/quire/a.py", "from quire.b import x"), parse("src/quire/b.py", "import quire.a")]
    with pytest.raises(CycleError):
        import_order(circle)
    late = parse("src/quire/b.py", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import quire.a\n")
    assert import_order([circle[0], late]) == ["quire.b", "quire.a"]


def test_every_package_has_a_place_in_the_order() -> None:
    homeless = [source.path for source in inside() if source.module.split(".")[1] not in RANK]
    assert not homeless, f"give the package a layer here and in pyproject.toml: {homeless}"


LATE_IMPORTS_MAX = 80


def late(source: Source) -> list[int]:
    """The lines of the imports inside functions."""
    functions = [node for node in source.nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    inner = (node for function in functions for node in ast.walk(function))
    return sorted({node.lineno for node in inner if isinstance(node, ast.Import | ast.ImportFrom)})


def test_imports_inside_functions_are_few() -> None:
    """They are for heavy third-party packages on rare paths; all others stand at the top, where readers look for them."""
    places = [f"{source.path}:{line}" for source in modules() for line in late(source)]
    assert len(places) <= LATE_IMPORTS_MAX, "\n".join(places)
    nested = "import os\ndef f():\n    import a\n    async def g():\n        from b import c\n"
    assert late(parse("src/quire/a.py", nested)) == [3, 5]


def test_imports_point_one_way() -> None:
    assert not [problem for source in inside() for problem in wrong_ways(source)]


def test_third_party_packages_stay_behind_their_fences() -> None:
    assert not [problem for source in modules() for problem in climbed_fences(source)]


def test_package_inits_load_nothing() -> None:
    """Else importing one executor-safe module runs code of its neighbours. Public packages have lazy names (core/lazy.py)."""
    for source in inside():
        if source.is_package and source.text:
            lines = set(at_once(source.tree.body))
            assert {each.name for each in imports(source) if each.line in lines} == {
                "typing.TYPE_CHECKING",
                "quire.core.lazy.lazy_names",
            }, source.path


def test_the_walk_sees_hidden_and_sideways_imports() -> None:
    def problems(path: str, text: str) -> int:
        source = parse(path, text)
        return len([*wrong_ways(source), *climbed_fences(source)])

    assert problems("src/quire/core/a.py", "def f():\n    from quire.manifest import keys") == 1
    assert problems("src/quire/core/a.py", "if TYPE_CHECKING:\n    from ..durable import files") == 1
    assert problems("src/quire/objects/a.py", "importlib.import_module('quire.manifest.keys')") == 1
    assert problems("src/quire/manifest/a.py", "from quire import Store") == 1
    assert problems("src/quire/manifest/a.py", "import quire.testing.models") == 1
    assert problems("src/quire/pages/a.py", "import quire.stream.segment") == 1
    assert problems("src/quire/store/a.py", "def f():\n    import lmdb.tool") == 1
    assert problems("src/quire/manifest/a.py", "import lmdb\nfrom quire import core\nfrom . import keys") == 0
