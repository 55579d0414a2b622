"""The source tree as the rules use it: each file is parsed once, with every import that it contains."""

from __future__ import annotations

import ast
import gc
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SRC = ROOT / "src"


@dataclass(frozen=True, slots=True)
class Source:
    """One Python file. `path` is relative to the repository, `module` its dotted name."""

    path: str
    text: str
    tree: ast.Module
    nodes: tuple[ast.AST, ...]
    """Every node of the tree: a dozen rules read all of them, and walking takes as long as parsing."""

    @property
    def module(self) -> str:
        return self.path.removeprefix("src/").removesuffix(".py").removesuffix("/__init__").replace("/", ".")

    @property
    def docstring(self) -> str:
        return ast.get_docstring(self.tree) or ""

    @property
    def is_package(self) -> bool:
        return self.path.endswith("__init__.py")


@dataclass(frozen=True, slots=True)
class Import:
    """One imported name: `from quire.core import errors` is `quire.core.errors`, whether that is a module or not."""

    name: str
    line: int

    def is_in(self, package: str) -> bool:
        return self.name == package or self.name.startswith(package + ".")


def parse(path: str, text: str) -> Source:
    tree = ast.parse(text, path)
    return Source(path, text, tree, tuple(ast.walk(tree)))


@cache
def sources(folder: str) -> tuple[Source, ...]:
    """The Python files under a folder of the repository; none if there is no such folder."""
    files = sorted((ROOT / folder).rglob("*.py"))
    # Millions of objects that stay: without `freeze`, every later garbage collection in this process would visit them all.
    gc.collect()  # current garbage would be frozen, too, and never be freed
    gc.disable()
    try:
        return tuple(parse(file.relative_to(ROOT).as_posix(), file.read_text("utf-8")) for file in files)
    finally:
        gc.freeze()
        gc.enable()


def modules() -> tuple[Source, ...]:
    return sources("src/quire")


def imports(source: Source) -> Iterator[Import]:
    """Every import of a file, at any depth: in functions, under TYPE_CHECKING, by literal name through importlib."""
    for node in source.nodes:
        match node:
            case ast.Import(names=names):
                yield from (Import(alias.name, node.lineno) for alias in names)
            case ast.ImportFrom(names=names):
                base = _base(source, node)
                yield from (Import(f"{base}.{alias.name}", node.lineno) for alias in names)
            case ast.Call(
                func=ast.Name(id="import_module" | "__import__") | ast.Attribute(attr="import_module"),
                args=[ast.Constant(value=str(name)), *_],
            ):
                yield Import(name, node.lineno)


def _base(source: Source, node: ast.ImportFrom) -> str:
    if not node.level:
        return node.module or ""
    package = source.module.split(".")
    levels = node.level - source.is_package
    parents = package[: len(package) - levels]
    return ".".join([*parents, node.module] if node.module else parents)
