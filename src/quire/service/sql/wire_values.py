"""SQLite's values in the JSON of Hrana.

Integers are sent as text, because JavaScript's numbers end at 2^53; blobs as base64 without padding (clients may send it); a
float that is not finite as null, because JSON has none (W3).

Threads: any; pure functions.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Sequence
from typing import Any

import msgspec

from quire.sqlite.statements import ARGS_INVALID, SqlValue, StatementFailed

INTEGER_MIN, INTEGER_MAX = -(1 << 63), (1 << 63) - 1


class WireNull(msgspec.Struct, frozen=True, tag_field="type", tag="null", gc=False):
    """NULL."""


class WireInteger(msgspec.Struct, frozen=True, tag_field="type", tag="integer", gc=False):
    """A 64-bit integer."""

    value: str | int


class WireFloat(msgspec.Struct, frozen=True, tag_field="type", tag="float", gc=False):
    """A float."""

    value: float


class WireText(msgspec.Struct, frozen=True, tag_field="type", tag="text", gc=False):
    """Text."""

    value: str


class WireBlob(msgspec.Struct, frozen=True, tag_field="type", tag="blob", gc=False):
    """Bytes."""

    base64: str


WireValue = WireNull | WireInteger | WireFloat | WireText | WireBlob
NULL = WireNull()


def decode_value(value: WireValue) -> SqlValue:
    """Return a client's value as a value of SQLite.

    >>> decode_value(WireInteger("-5")), decode_value(WireBlob("AAE")), decode_value(WireBlob("AAE="))
    (-5, b'\\x00\\x01', b'\\x00\\x01')
    """
    match value:
        case WireNull():
            return None
        case WireInteger(value=text):
            return _integer(text)
        case WireFloat(value=number) | WireText(value=number):
            return number
        case WireBlob(base64=text):
            return _blob(text)


def _integer(text: str | int) -> int:
    try:
        number = int(text) if len(str(text)) <= 20 else INTEGER_MAX + 1  # -2**63 has 20 characters
    except ValueError:
        raise StatementFailed(f"{text!r} is not an integer", ARGS_INVALID) from None
    if not INTEGER_MIN <= number <= INTEGER_MAX:
        raise StatementFailed("an integer must fit 64 bits", ARGS_INVALID)
    return number


def _blob(text: str) -> bytes:
    try:
        return base64.b64decode(text + "=" * (-len(text) % 4), validate=True)
    except (binascii.Error, ValueError):
        raise StatementFailed("a blob must be sent as base64", ARGS_INVALID) from None


def _integers(column: Sequence[Any]) -> list[WireValue]:
    return [*map(WireInteger, map(str, column))]


def _floats(column: Sequence[Any]) -> list[WireValue]:
    return [*map(WireFloat, column)]  # msgspec writes a float that is not finite as null


def _blobs(column: Sequence[Any]) -> list[WireValue]:
    return [WireBlob(base64.b64encode(value).rstrip(b"=").decode("ascii")) for value in column]


def _texts(column: Sequence[Any]) -> list[WireValue]:
    return [*map(WireText, column)]


def _nulls(column: Sequence[Any]) -> list[WireValue]:
    return [NULL] * len(column)


_ENCODERS = {int: _integers, float: _floats, str: _texts, bytes: _blobs, type(None): _nulls}


def encode_rows(rows: Sequence[Sequence[SqlValue]]) -> list[tuple[WireValue, ...]]:
    """Return rows as clients read them. By column: most have one type, and then no Python code runs per value (W9)."""
    columns: list[list[WireValue]] = []
    for column in zip(*rows):
        kinds = {*map(type, column)}
        if len(kinds) == 1:
            columns.append(_ENCODERS[kinds.pop()](column))
        else:
            columns.append([_ENCODERS[type(value)]((value,))[0] for value in column])
    return [*zip(*columns)]
