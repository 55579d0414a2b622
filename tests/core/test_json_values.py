"""Conversion of values to JSON and back: nothing is lost and nothing is guessed."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, IntEnum
from typing import Annotated, Any

import msgspec
import pytest

from quire.core.errors import InvalidInput
from quire.core.json_values import from_plain, plain


class Colour(IntEnum):
    RED = 1
    DARK_BLUE = 2


class Inner(msgspec.Struct, array_like=True):
    number: Annotated[int, msgspec.Meta(ge=0)]
    data: bytes = b""


class Put(msgspec.Struct, array_like=True, tag=1):
    inner: Inner
    colour: Colour = Colour.RED
    maybe: bytes | None = None
    many: list[Inner] = []
    pairs: tuple[tuple[int, int], ...] = ()
    labels: dict[str, str] = {}
    ratio: float = 0.0
    flag: bool = False


class Drop(msgspec.Struct, array_like=True, tag=2):
    name: str


class Batch(msgspec.Struct):
    ops: tuple[Put | Drop, ...]


@dataclass
class Point:
    x: int
    at: Colour


FULL = Put(Inner(7, b"\x00\xff"), Colour.DARK_BLUE, b"\x01", [Inner(1), Inner(2)], ((1, 2),), {"a": "b"}, 1.5, True)


def test_every_kind_of_value_has_a_plain_form() -> None:
    assert plain(FULL) == {
        "op": "Put",
        "inner": {"number": 7, "data": "00ff"},
        "colour": "dark_blue",
        "maybe": "01",
        "many": [{"number": 1, "data": ""}, {"number": 2, "data": ""}],
        "pairs": [[1, 2]],
        "labels": {"a": "b"},
        "ratio": 1.5,
        "flag": True,
    }
    assert plain((Point(1, Colour.RED), {1: {2}}, None, Point)) == [{"x": 1, "at": "red"}, {"1": [2]}, None, str(Point)]


@pytest.mark.parametrize("value", [FULL, Put(Inner(0)), Put(Inner(2**64 - 1))])
def test_values_round_trip_through_their_plain_form(value: Put) -> None:
    assert from_plain(Put, plain(value)) == value
    assert from_plain(Put, msgspec.json.decode(msgspec.json.encode(plain(value)))) == value
    assert from_plain(Batch, plain(Batch((value, Drop("x"))))) == Batch((value, Drop("x")))


def test_missing_fields_get_defaults_and_unknown_ones_are_ignored() -> None:
    assert from_plain(Put, {"inner": {"number": 1}, "from_the_future": [1]}) == Put(Inner(1))


@pytest.mark.parametrize(
    ("value", "where"),
    [
        ({}, "the whole"),
        (3, "the whole"),
        ({"inner": {"number": "1"}}, "inner.number"),
        ({"inner": {"number": True}}, "inner.number"),
        ({"inner": {"number": 1, "data": "zz"}}, "inner.data"),
        ({"inner": {"number": 1}, "colour": "green"}, "colour"),
        ({"inner": {"number": 1}, "colour": 1}, "colour"),
        ({"inner": {"number": 1}, "many": [{"number": 1}, {}]}, "many[1]"),
        ({"inner": {"number": 1}, "many": "x"}, "many"),
        ({"inner": {"number": 1}, "pairs": [[1, 2, 3]]}, "pairs[0]"),
        ({"inner": {"number": 1}, "labels": {"a": 1}}, "labels.a"),
        ({"inner": {"number": 1}, "ratio": "1"}, "ratio"),
        ({"inner": {"number": 1}, "flag": 1}, "flag"),
    ],
)
def test_an_invalid_value_is_rejected_with_its_position(value: Any, where: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        from_plain(Put, value)
    assert caught.value.where["at"] == where


def test_an_unknown_operation_is_rejected_with_a_hint() -> None:
    with pytest.raises(InvalidInput, match=r"'Later'.*upgrade") as caught:
        from_plain(Batch, {"ops": [{"op": "Later"}]})
    assert caught.value.where["at"] == "ops[0]"


@pytest.mark.parametrize("kind", [complex, int | str, dict[int, str], object])
def test_a_type_without_a_plain_form_raises_a_type_error(kind: Any) -> None:
    with pytest.raises(TypeError):
        from_plain(kind, 1)


def test_a_union_of_plain_types_is_rejected_with_the_reason() -> None:
    kind: Any = int | str
    with pytest.raises(TypeError, match="cannot be distinguished in JSON"):
        from_plain(kind, 1)


def test_an_enum_with_names_that_differ_only_in_case_is_rejected() -> None:
    twins = Enum("twins", ["A", "a"])
    with pytest.raises(AssertionError):
        from_plain(twins, "a")
