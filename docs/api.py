"""`python -m docs.api` writes docs/api.md: every public name with its signature and docstring.

The names are those of `__all__` in the public packages; tests/rules/test_site.py fails when the page is out of date.
"""

from __future__ import annotations

import ast
import inspect
import re
import sys
import textwrap
from dataclasses import is_dataclass
from enum import Enum
from importlib import import_module
from itertools import zip_longest
from pathlib import Path
from types import ModuleType
from typing import Any

PAGE = Path(__file__).with_name("api.md")
PACKAGES = ("quire", "quire.sqlite", "quire.lsm", "quire.spark", "quire.objects", "quire.testing", "quire.integrations")

HEAD = """\
# API

Generated from the docstrings by `python -m docs.api`; do not edit. What is not listed here is private and may change
without notice.
"""


REACHED = {
    "quire.connect(…)": "quire.service.client.Client",
    "store.heavy": "quire.store.heavy.Heavy",
    "store.heavy.checkpoint_all()": "quire.jobs.job_results.JobResults",
    "store.mirrors": "quire.store.mirrors.Mirrors",
    "store.feed": "quire.manifest.feed.ChangeFeed",
    "store.manifest": "quire.manifest.store.ManifestStore",
    "store.manifest.jobs": "quire.manifest.jobqueue.JobQueue",
    "store.pages": "quire.pages.engine.PageEngine",
    "store.kvs": "quire.lsm.engine.KvEngine",
    "store.streams": "quire.stream.engine.StreamEngine",
}
"""Objects that people get from public ones, and their classes, which have no public name."""

INTERNAL = frozenset({"backup_recorder", "context", "cover", "disk", "rights"})
"""Members that the store's own parts use."""


def page() -> str:
    """The page as it should be."""
    return "\n".join([HEAD, *(_package(import_module(name)) for name in PACKAGES), _reached()])


def _reached() -> str:
    """The objects that a store or a client gives."""
    entries = []
    for name, path in REACHED.items():
        module, _, class_name = path.rpartition(".")
        entries.append(_entry(name, getattr(import_module(module), class_name)))
    return "\n".join(["## Objects of a store or client\n", *entries])


def _package(package: ModuleType) -> str:
    values = {name: getattr(package, name) for name in sorted(package.__all__, key=str.lower)}
    errors = {name: value for name, value in values.items() if _is_error(value)}
    parts = [f"## {package.__name__}\n", _prose(package.__doc__) + "\n"]
    for name, value in values.items():
        if name not in errors and name != "__version__":
            parts.append(_entry(f"{package.__name__}.{name}", value))
    if errors and package.__name__ == "quire":
        parts.append("### Errors\n\nAll derive from `quire.QuireError`; a subclass is caught with its parent.\n")
        parts.append("| error | parent | meaning |\n|---|---|---|")
        parts += [f"| `{name}` | `{value.__base__.__name__}` | {_first(value)} |" for name, value in errors.items()]
        parts.append("")
    else:
        parts += [_entry(f"{package.__name__}.{name}", value) for name, value in errors.items()]
    return "\n".join(parts)


def _is_error(value: Any) -> bool:
    return isinstance(value, type) and issubclass(value, BaseException)


def _entry(name: str, value: Any) -> str:
    heading = f"### {name}\n"
    if isinstance(value, ModuleType) or not (inspect.isclass(value) or callable(value)):
        return f"{heading}\n{_prose(value.__doc__)}\n"
    if not inspect.isclass(value):
        return f"{heading}\n```text\n{_wrapped(name + _signature(value))}\n```\n\n{_prose(value.__doc__)}\n"
    methods = [f"- **`{method}`** {text}" for method, text in _members(value)]
    return "\n".join([heading, _prose(value.__doc__), "", *methods, ""])


def _members(value: type) -> list[tuple[str, str]]:
    """Public methods, properties and fields that the class or one of quire's own parents defines."""
    found: dict[str, str] = {}
    for parent in value.__mro__:
        if not parent.__module__.startswith("quire"):
            continue
        for name, member in vars(parent).items():
            if name.startswith("_") or name in found or name in INTERNAL:
                continue
            function = member.__func__ if isinstance(member, classmethod | staticmethod) else member
            if inspect.isfunction(function):
                found[name] = f"`{_signature(function, method=True)}` {_first(function)}"
            elif isinstance(member, property):
                found[name] = _first(member)
            elif isinstance(member, Enum) and isinstance(member, value):
                found[name] = f"= {member.value!r}"
    return [*((name, text) for name, text in fields(value) if name not in found), *found.items()]


def fields(value: type) -> list[tuple[str, str]]:
    """Fields of a struct or dataclass: type, default, and the string that stands below each."""
    if not (hasattr(value, "__struct_fields__") or is_dataclass(value)):
        return []
    (definition,) = ast.parse(textwrap.dedent(inspect.getsource(value))).body
    assert isinstance(definition, ast.ClassDef)
    described: list[tuple[str, str]] = []
    for node, after in zip_longest(definition.body, definition.body[1:]):
        if (
            not isinstance(node, ast.AnnAssign)
            or not isinstance(node.target, ast.Name)
            or node.target.id.startswith("_")
        ):
            continue
        default = f" = {ast.unparse(node.value)}" if node.value is not None else ""
        note = after.value.value if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant) else ""
        note = re.sub(r"\s+", " ", str(note))
        described.append((node.target.id, f"`{ast.unparse(node.annotation)}{default}` {note}".rstrip()))
    return described


def _signature(function: Any, *, method: bool = False) -> str:
    try:
        text = str(inspect.signature(function))
    except (TypeError, ValueError):
        return "(…)"
    text = re.sub(r"<function (?:\w+\.)*(?:<lambda>|(\w+)) at 0x\w+>", lambda match: match[1] or "…", text)
    text = re.sub(r"(: |-> )'([^']*)'", r"\1\2", text)
    text = re.sub(r"<([\w.]+) object at 0x\w+>", r"\1()", text)
    return re.sub(r"^\((self|cls)(, )?", "(", text) if method else text


def _wrapped(signature: str) -> str:
    """A long signature with one argument on each line."""
    match = re.fullmatch(r"([\w.]+)\((.*)\)(.*)", signature)
    if len(signature) <= 90 or match is None:
        return signature
    arguments = re.split(r", (?![^\[(]*[\])])", match[2])
    return f"{match[1]}(\n" + "".join(f"    {argument},\n" for argument in arguments) + f"){match[3]}"


def _first(value: Any) -> str:
    """The first sentence of a docstring, on one line."""
    text = re.sub(r"\s+", " ", inspect.cleandoc(value.__doc__ or "").partition("\n\n")[0])
    return text.replace("|", "\\|")


def _prose(docstring: str | None) -> str:
    """A docstring as Markdown: examples become code, and so does what is indented."""
    blocks = inspect.cleandoc(docstring or "").split("\n\n")
    return "\n\n".join(_code(block) if _is_code(block) else block for block in blocks)


def _is_code(block: str) -> bool:
    return block.lstrip().startswith(">>>") or block.startswith("    ") or "\n  " in block


def _code(block: str) -> str:
    return f"```text\n{inspect.cleandoc(block) if block.startswith(' ') else block}\n```"


def main() -> int:
    PAGE.write_text(page(), "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
