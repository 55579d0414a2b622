"""Python values of other than SQLite's types: adapters on the way in, converters on the way out, as in sqlite3.

apsw calls `adapt_parameter` for values that it cannot bind, so adapters cost nothing where none is needed. Adapters for a
type that can be bound, or for a subclass of one, are looked up only while such an adapter is registered (`overrides`).

Threads: any; registering is a single operation on a dict.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable, Mapping
from typing import Any

from quire.sqlite.pep249.errors import ProgrammingError


class PrepareProtocol:
    """The protocol passed to `__conform__`."""


Adapter = Callable[[Any], Any]
Converter = Callable[[bytes], Any]

adapters: dict[tuple[type, type], Adapter] = {}
converters: dict[str, Converter] = {}
overrides: list[type] = []
"""Types that have an adapter although SQLite or apsw can bind them."""
_BOUND = (int, float, str, bytes, bytearray, memoryview)
_EXACT = frozenset({int, float, str, bytearray, type(None)})
"""Types that are never adapted unless an adapter is registered for them, as in sqlite3."""


def register_adapter(type: type, adapter: Adapter, /) -> None:  # noqa: A002 - sqlite3's name
    """Register a function that converts values of a type to one that SQLite can bind."""
    adapters[(type, PrepareProtocol)] = adapter
    if issubclass(type, _BOUND):
        overrides.append(type)


def register_converter(typename: str, converter: Converter, /) -> None:
    """Register a function that converts the bytes of values in columns declared with this type, or named `name [type]`."""
    converters[typename.upper()] = converter


_MISSING = object()


def adapt(value: Any, proto: Any = PrepareProtocol, alternative: Any = _MISSING, /) -> Any:
    """Return what a value's adapter, the protocol's `__adapt__` or the value's own `__conform__` makes of it."""
    adapter = adapters.get((type(value), proto))
    if adapter is not None:
        return adapter(value)
    for one, other, method in ((proto, value, "__adapt__"), (value, proto, "__conform__")):
        ask = getattr(one, method, None)
        if ask is None:
            continue
        try:
            adapted = ask(other)
        except TypeError:  # it has another signature: sqlite3 ignores that too
            continue
        if adapted is not None:
            return adapted
    if alternative is not _MISSING:
        return alternative
    raise ProgrammingError("can't adapt")


def adapt_parameter(number: int, value: Any) -> Any:
    """Adapt a value that cannot be bound to one that can."""
    adapted = adapt(value, PrepareProtocol, value)
    if isinstance(adapted, _BOUND) or adapted is None:
        return adapted
    try:
        return memoryview(adapted)
    except TypeError:
        name = type(adapted).__name__
        raise ProgrammingError(f"Error binding parameter {number}: type '{name}' is not supported") from None


def as_bindings(parameters: Any) -> Any:
    """Return parameters other than a tuple or dict as apsw accepts them: a tuple, so that no adapter can change it."""
    if isinstance(parameters, list):
        return tuple(parameters)
    if isinstance(parameters, dict):
        return parameters
    if isinstance(parameters, Mapping):
        return dict(parameters)
    if not hasattr(parameters, "__getitem__"):
        raise ProgrammingError("parameters are of unsupported type")
    return tuple(parameters[number] for number in range(len(parameters)))


def adapt_all(parameters: Any) -> Any:
    """Adapt parameters of which some may have an adapter although they could be bound as they are."""
    if isinstance(parameters, Mapping):
        return {name: _adapt_bound(value) for name, value in parameters.items()}
    return tuple(_adapt_bound(value) for value in parameters)


def _adapt_bound(value: Any) -> Any:
    if type(value) in _EXACT and type(value) not in overrides:
        return value
    return adapt(value, PrepareProtocol, value)


def converter_of(name: str, declared: str | None, by_name: bool, by_type: bool) -> Converter | None:
    """Return the converter of a column, or None.

    >>> converter_of("at [timestamp]", None, True, False) is converters["TIMESTAMP"]
    True
    >>> converter_of("at", "date (iso)", False, True) is converters["DATE"]
    True
    """
    if by_name and "[" in name:
        key = name[name.rindex("[") + 1 :].partition("]")[0]
        if (converter := converters.get(key.upper())) is not None:
            return converter
    if by_type and declared:
        return converters.get(declared.partition("(")[0].partition(" ")[0].upper())
    return None


def convert(converter: Converter, value: Any) -> Any:
    """Return what a converter makes of a value. For an empty text or blob, as for NULL, SQLite has no bytes to convert."""
    return None if value in (None, "", b"") else converter(_as_bytes(value))


def _as_bytes(value: Any) -> bytes:
    """Return a value as SQLite casts it to a blob."""
    if isinstance(value, bytes):
        return value
    if isinstance(value, float):
        text = format(value, ".15g")
        return (text if any(sign in text for sign in ".en") else text + ".0").encode()
    return str(value).encode()


# ── default adapters and converters ───────────────────────────────────────────────────────────────────────────────────
def _convert_date(value: bytes) -> dt.date:
    return dt.date(*map(int, value.split(b"-")))


def _convert_timestamp(value: bytes) -> dt.datetime:
    day, time = value.split(b" ")
    clock, _, fraction = time.partition(b".")
    micro = int(f"{fraction.decode():0<6.6}") if fraction else 0
    return dt.datetime(*map(int, day.split(b"-")), *map(int, clock.split(b":")), micro)  # type: ignore[arg-type,call-arg]  # six


register_adapter(dt.date, dt.date.isoformat)
register_adapter(dt.datetime, lambda value: value.isoformat(" "))
register_converter("date", _convert_date)
register_converter("timestamp", _convert_timestamp)
