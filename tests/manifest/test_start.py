"""What every process pays before it reads its first row."""

from __future__ import annotations

import inspect
from collections.abc import Iterator

import msgspec

from quire.manifest.ops import registry
from quire.manifest.ops.base import Op
from quire.manifest.records import Record


def below(kind: type[msgspec.Struct]) -> Iterator[type[msgspec.Struct]]:
    for each in kind.__subclasses__():
        yield each
        yield from below(each)


def test_the_types_of_fields_are_types() -> None:
    """As text msgspec evaluates each of them, in each process: 600 fields are an eighth of a short command."""
    assert registry
    told = [
        f"{each.__name__}.{name}"
        for kind in (Op, Record)
        for each in below(kind)
        if each.__module__.startswith(("quire.manifest.ops", "quire.manifest.records", "quire.manifest.records"))
        for name, declared in inspect.get_annotations(each).items()
        if isinstance(declared, str)
    ]
    assert not told, "leave out `from __future__ import annotations`, as `ops/base.py` says"
