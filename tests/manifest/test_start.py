"""The start-up cost of every process before it reads its first row."""

from __future__ import annotations

import inspect
from collections.abc import Iterator

import msgspec

from quire.manifest.ops import registry
from quire.manifest.ops.base import Op
from quire.manifest.records import Record


def subclasses(kind: type[msgspec.Struct]) -> Iterator[type[msgspec.Struct]]:
    for subclass in kind.__subclasses__():
        yield subclass
        yield from subclasses(subclass)


def test_the_annotations_of_fields_are_types() -> None:
    """Annotations that are strings are evaluated by msgspec in every process: 600 fields take an eighth of a short
    command."""
    assert registry
    problems = [
        f"{subclass.__name__}.{name}"
        for kind in (Op, Record)
        for subclass in subclasses(kind)
        if subclass.__module__.startswith(("quire.manifest.ops", "quire.manifest.records"))
        for name, declared in inspect.get_annotations(subclass).items()
        if isinstance(declared, str)
    ]
    assert not problems, "omit `from __future__ import annotations`; `ops/base.py` explains why"
