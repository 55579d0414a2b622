"""Errors: one root, groups by what the caller does, and every error can be pickled with all its fields."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from pathlib import Path

import pytest

from quire.core import errors
from quire.core.errors import QuireError
from quire.core.ids import ArtifactKey, ArtifactKind


def subclasses(root: type[QuireError]) -> Iterator[type[QuireError]]:
    yield root
    for child in root.__subclasses__():
        yield from subclasses(child)


ALL = sorted(
    {error for error in subclasses(QuireError) if error.__module__ == errors.__name__}, key=lambda e: e.__name__
)


@pytest.mark.parametrize("kind", ALL, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_every_error_pickles_with_its_fields(kind: type[QuireError], protocol: int) -> None:
    where = {"path": Path("x"), "offset": 7, "artifact": ArtifactKey(1, ArtifactKind.WAL, 2, 0)}
    error = kind("it broke", hint="mend it", **where)
    unpickled = pickle.loads(pickle.dumps(error, protocol))
    assert type(unpickled) is kind
    assert (unpickled.what, unpickled.hint, unpickled.where) == (error.what, error.hint, error.where)
    assert str(unpickled) == str(error)
    assert unpickled.args == error.args


@pytest.mark.parametrize("kind", ALL, ids=lambda kind: kind.__name__)
def test_every_error_has_a_docstring(kind: type[QuireError]) -> None:
    assert kind.__doc__


def test_the_text_consists_of_what_where_and_hint() -> None:
    assert str(QuireError("it broke")) == "it broke"
    assert str(QuireError("it broke", offset=7)) == "it broke (offset=7)"
    assert str(QuireError("it broke", hint="mend it")) == "it broke; mend it"
    assert str(QuireError("it broke", hint="mend it", a=1, b="x")) == "it broke (a=1, b='x'); mend it"


def test_groups_are_direct_children_of_the_root() -> None:
    groups = {kind.__name__ for kind in ALL if kind.__bases__ == (QuireError,)}
    assert {
        "InvalidInput",
        "NotFound",
        "Conflict",
        "Unavailable",
        "StorageFault",
        "Corruption",
        "Incompatible",
    } <= groups
    assert all(len(kind.__mro__) <= 6 for kind in ALL), "no deeper than leaf, group, root"
