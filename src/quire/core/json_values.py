"""Conversion between values and JSON, for the output of the command line, for logs, and for subscribers in other languages.

Terms
  plain   made of dicts with string keys, lists, strings, numbers, booleans and `None`, which every JSON library accepts

Rules
  1. Bytes become lower-case hex, enumerations their lower-case names, tuples and sets lists; records and dataclasses become
     objects with every field, defaults included. A tagged record also has its type, as `op`.
  2. `from_plain(kind, plain(value)) == value` for records made of these types. Numbers stay numbers, up to 64 bits: a JSON
     library that reads every number as a double loses the low digits of hashes and lsns.
  3. `from_plain` is as lenient as the binary format (M1): unknown fields are ignored, missing ones get their defaults. A value
     that does not fit its field is refused, and the message gives its location.

Threads: any; pure functions, importable on executors. `from_plain` raises `InvalidInput`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import cache
from types import NoneType, UnionType
from typing import Annotated, Any, TypeVar, Union, get_args, get_origin

import msgspec

from quire.core.errors import InvalidInput

T = TypeVar("T")
Reader = Callable[[Any, str], Any]
"""(plain value, path to it) → the value."""


def plain(value: Any) -> Any:
    """Return `value` in its plain form.

    >>> class Colour(Enum):
    ...     RED = 1
    >>> class Dot(msgspec.Struct):
    ...     at: tuple[int, int]
    ...     colour: Colour = Colour.RED
    >>> plain([Dot((1, 2)), b"\\x01", {3: None}])
    [{'at': [1, 2], 'colour': 'red'}, '01', {'3': None}]
    """
    if isinstance(value, Enum):
        return value.name.lower()
    if isinstance(value, msgspec.Struct):
        tag = {"op": type(value).__name__} if value.__struct_config__.tag is not None else {}
        return tag | {name: plain(getattr(value, name)) for name in value.__struct_fields__}
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(item) for item in value]
    if isinstance(value, bytes):
        return value.hex()
    return value if isinstance(value, str | int | float | bool | None) else str(value)


def from_plain(kind: type[T], value: Any) -> T:
    """Return the `kind` from whose plain form `value` came.

    >>> class Dot(msgspec.Struct):
    ...     at: tuple[int, int]
    ...     label: bytes = b""
    >>> from_plain(Dot, {"at": [1, 2], "label": "ff"})
    Dot(at=(1, 2), label=b'\\xff')
    >>> from_plain(Dot, {"at": [1, "2"]})
    Traceback (most recent call last):
        ...
    quire.core.errors.InvalidInput: not a whole number: '2' (at='at[1]')
    """
    wanted: Any = kind
    result: T = _reader(wanted)(value, "")
    return result


@cache
def _reader(kind: Any) -> Reader:
    """Return the reader for values of a type. A type without a JSON form is a programming error: `TypeError`."""
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is Annotated:
        return _reader(arguments[0])
    if origin is Union or origin is UnionType:
        return _either(arguments)
    if origin in (list, set, frozenset) or (origin is tuple and arguments[-1:] == (...,)):
        return _many(origin, _reader(arguments[0]))
    if origin is tuple:
        return _fixed([_reader(argument) for argument in arguments])
    if origin is dict and arguments[0] is str:
        return _mapping(_reader(arguments[1]))
    if isinstance(kind, type) and issubclass(kind, Enum):
        return _named(kind)
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        return _record(kind)
    if kind in _SIMPLE:
        return _SIMPLE[kind]
    raise TypeError(f"{kind!r} has no JSON form")


def _refuse(what: str, where: str) -> InvalidInput:
    return InvalidInput(what, at=where or "the whole")


def _integer(value: Any, where: str) -> int:
    if type(value) is not int:
        raise _refuse(f"not a whole number: {value!r}", where)
    return value


def _number(value: Any, where: str) -> float:
    if type(value) is not int and type(value) is not float:
        raise _refuse(f"not a number: {value!r}", where)
    return float(value)


def _flag(value: Any, where: str) -> bool:
    if type(value) is not bool:
        raise _refuse(f"not true or false: {value!r}", where)
    return value


def _text(value: Any, where: str) -> str:
    if type(value) is not str:
        raise _refuse(f"not a text: {value!r}", where)
    return value


def _bytes(value: Any, where: str) -> bytes:
    try:
        return bytes.fromhex(_text(value, where))
    except ValueError:
        raise _refuse(f"not hexadecimal: {value!r}", where) from None


def _nothing(value: Any, where: str) -> None:
    if value is not None:
        raise _refuse(f"not null: {value!r}", where)


_SIMPLE: dict[Any, Reader] = {
    int: _integer,
    float: _number,
    bool: _flag,
    str: _text,
    bytes: _bytes,
    NoneType: _nothing,
    Any: lambda value, _: value,
}


def _list(value: Any, where: str) -> list[Any]:
    if type(value) is not list:
        raise _refuse(f"not a list: {value!r}", where)
    return value


def _object(value: Any, where: str) -> dict[str, Any]:
    if type(value) is not dict:
        raise _refuse(f"not an object: {value!r}", where)
    return value


def _many(container: Any, item: Reader) -> Reader:
    return lambda value, where: container(item(part, f"{where}[{n}]") for n, part in enumerate(_list(value, where)))


def _fixed(items: list[Reader]) -> Reader:
    def read(value: Any, where: str) -> tuple[Any, ...]:
        if len(_list(value, where)) != len(items):
            raise _refuse(f"expected {len(items)} values, got {len(value)}", where)
        return tuple(item(part, f"{where}[{n}]") for n, (item, part) in enumerate(zip(items, value)))

    return read


def _mapping(item: Reader) -> Reader:
    return lambda value, where: {
        _text(key, where): item(part, f"{where}.{key}") for key, part in _object(value, where).items()
    }


def _named(kind: type[Enum]) -> Reader:
    members = {member.name.lower(): member for member in kind}
    assert len(members) == len(kind), "two members differ only in case"

    def read(value: Any, where: str) -> Enum:
        member = members.get(_text(value, where))
        if member is None:
            raise _refuse(f"not a {kind.__name__}: {value!r}, but one of {', '.join(members)}", where)
        return member

    return read


def _record(kind: type[msgspec.Struct]) -> Reader:
    readers = {field.name: (_reader(field.type), field.required) for field in msgspec.structs.fields(kind)}

    def read(value: Any, where: str) -> msgspec.Struct:
        members, given = _object(value, where), {}
        for name, (reader, required) in readers.items():
            if name in members:
                given[name] = reader(members[name], f"{where}.{name}" if where else name)
            elif required:
                raise _refuse(f"a {kind.__name__} needs {name!r}", where)
        return kind(**given)

    return read


def _either(kinds: tuple[Any, ...]) -> Reader:
    """Return the reader for a union: an optional value, or several tagged records that `op` distinguishes."""
    rest = [kind for kind in kinds if kind is not NoneType]
    if len(rest) == 1:
        reader = _reader(rest[0])
        return lambda value, where: None if value is None else reader(value, where)
    if not all(isinstance(kind, type) and issubclass(kind, msgspec.Struct) for kind in rest) or len(rest) < len(kinds):
        raise TypeError(f"values of {kinds!r} cannot be distinguished in JSON")
    by_name = {kind.__name__: _reader(kind) for kind in rest}

    def read(value: Any, where: str) -> Any:
        name = _object(value, where).get("op")
        if name not in by_name:
            raise InvalidInput(
                f"no operation is called {name!r}",
                hint="upgrade quire if a newer version wrote this",
                at=where or "the whole",
            )
        return by_name[name](value, where)

    return read
