"""Changes as JSON: the documented form is that of the code, and encoding loses nothing."""

from __future__ import annotations

import json
import re
from enum import Enum
from types import NoneType, UnionType
from typing import Annotated, Any, Union, get_args, get_origin

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.core.errors import InvalidInput
from quire.manifest.change import ChangeRecord, change_from_json, change_json, change_text
from quire.manifest.ops.base import Component, Op
from quire.manifest.ops.databases import RenameDb
from quire.manifest.ops.registry import OPS
from quire.manifest.ops.wal import OpenSegment
from quire.manifest.records import DbKind, WalFormat
from quire.manifest.store import ManifestStore
from quire.testing.clock import ManualClock
from tests.manifest.helpers import chunk, commit
from tests.manifest.test_codec import FEWER_EXAMPLES
from tests.rules.tree import ROOT

NUMBERS = st.integers(0, 2**64 - 1)
TEXTS = st.text(st.characters(codec="utf-8"), max_size=8)
SIMPLE: dict[Any, st.SearchStrategy[Any]] = {
    int: NUMBERS,
    float: st.floats(allow_nan=False, allow_infinity=False),
    bool: st.booleans(),
    str: TEXTS,
    bytes: st.binary(max_size=8),
    NoneType: st.none(),
}


def values(kind: Any) -> st.SearchStrategy[Any]:
    """A strategy for any value of a field's type."""
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is Annotated:
        return values(arguments[0])
    if origin is Union or origin is UnionType:
        return st.one_of([values(argument) for argument in arguments])
    if origin is list or (origin is tuple and arguments[-1] is ...):
        items = st.lists(values(arguments[0]), max_size=3)
        return items if origin is list else items.map(tuple)
    if origin is tuple:
        return st.tuples(*map(values, arguments))
    if origin is dict:
        return st.dictionaries(values(arguments[0]), values(arguments[1]), max_size=2)
    if issubclass(kind, Enum):
        return st.sampled_from(list(kind))
    if issubclass(kind, msgspec.Struct):
        return st.builds(kind, **{field.name: values(field.type) for field in msgspec.structs.fields(kind)})
    return SIMPLE[kind]


GENERATIONS = st.dictionaries(st.sampled_from([*map(int, Component), 77]), NUMBERS).map(
    lambda generations: tuple(generations.items())
)


@pytest.mark.parametrize("op", OPS.values(), ids=lambda op: str(op.__name__))
@FEWER_EXAMPLES
@given(data=st.data())
def test_the_json_form_round_trips(op: type[Op], data: st.DataObject) -> None:
    operations = tuple(data.draw(st.lists(values(op), min_size=1, max_size=2)))
    record = ChangeRecord(data.draw(NUMBERS), data.draw(NUMBERS), operations, data.draw(GENERATIONS), data.draw(TEXTS))
    form = change_json(record)
    assert change_from_json(form) == record
    assert json.loads(change_text(record)) == form, "other libraries can read it as JSON"
    assert change_from_json(change_text(record)) == change_from_json(change_text(record).encode()) == record


def test_the_page_shows_the_json_form(path: str) -> None:
    page = (ROOT / "docs" / "feed.md").read_text("utf-8")
    block = re.search(r"```json\n(.*?)```", page, re.DOTALL)
    assert block, "docs/feed.md has no example of the form"
    with ManifestStore.open(path, clock=ManualClock(1_700_000_000_000)) as manifest:
        manifest.register_db("shop", DbKind.PAGES)
        manifest.feed.register(1, name="app")
        segment = OpenSegment(1, 1, WalFormat.PAGER, 262_144, b"\x0c\xa7\x51\x1e", 1)
        commit(manifest, RenameDb(1, "store"), segment)
        (change,) = manifest.feed.fetch("app").changes
    assert json.loads(block[1]) == change_json(change)
    assert change_from_json(block[1]) == change


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("{", "not JSON"),
        (b"\xff", "not JSON"),
        ("[]", "not a change"),
        ("{}", "not a change"),
        ('{"generations": {}}', "needs 'sequence'"),
        ('{"generations": {"nobody": 1}}', "no component has this name"),
    ],
)
def test_text_that_is_not_a_change_is_rejected(text: str | bytes, expected: str) -> None:
    with pytest.raises(InvalidInput, match=expected):
        change_from_json(text)


@pytest.mark.parametrize(
    ("field", "wrong", "expected"),
    [
        ("chunk_id", -1, ">= 0"),
        ("chunk_id", 2**64, "range|64"),
        ("chunk_id", "1", r"operations\[0\].chunk_id"),
        ("op", "PutNothing", "no operation is called 'PutNothing'"),
    ],
)
def test_an_invalid_operation_is_rejected_with_its_position(field: str, wrong: object, expected: str) -> None:
    form = change_json(ChangeRecord(1, 2, (chunk(1),), ((3, 1),)))
    form["operations"][0][field] = wrong
    with pytest.raises(InvalidInput, match=expected):
        change_from_json(form)


def test_newer_forms_with_more_fields_and_older_ones_with_fewer_are_read() -> None:
    form = change_json(ChangeRecord(1, 2, (chunk(1),), ((3, 1),)))
    form["weather"] = form["operations"][0]["weather"] = "fine"
    del form["trace_id"], form["operations"][0]["record"]["suffix"]
    assert change_from_json(form) == ChangeRecord(1, 2, (chunk(1),), ((3, 1),))
