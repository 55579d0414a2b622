"""Values as people and JSON want them: records with field names, sizes, times.

Pure functions. JSON shapes are part of docs/cli.md: bytes are hex, enumerations their lower-case names, times stay
milliseconds, operations of the feed are objects whose `op` is their type.
"""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from datetime import UTC, datetime
from enum import Enum
from typing import Any

import msgspec

from quire.core.limits import GIB, KIB, MIB


def plain(value: Any) -> Any:
    """`value` as JSON has it.

    >>> from quire.manifest.records import LeafRef, WalState
    >>> plain((LeafRef(1, 2), WalState.OPEN, b"\\x01"))
    [{'origin_db_id': 1, 'generation': 2}, 'open', '01']
    """
    if isinstance(value, Enum):
        return value.name.lower()
    if isinstance(value, msgspec.Struct):
        told = {"op": type(value).__name__} if value.__struct_config__.tag is not None else {}
        return told | {name: plain(getattr(value, name)) for name in value.__struct_fields__}
    if is_dataclass(value) and not isinstance(value, type):
        return {each.name: plain(getattr(value, each.name)) for each in fields(value)}
    if isinstance(value, dict):
        return {str(key): plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(each) for each in value]
    if isinstance(value, bytes):
        return value.hex()
    return value if isinstance(value, str | int | float | bool | None) else str(value)


def telling(record: msgspec.Struct) -> dict[str, Any]:
    """The fields of a record that differ from their defaults: what a person wants to see of it."""
    defaults = {each.name: each.default for each in msgspec.structs.fields(type(record)) if not each.required}
    shown: dict[str, Any] = {}
    for name in record.__struct_fields__:
        value = getattr(record, name)
        if (name not in defaults or value != defaults[name]) and value not in (b"", [], {}, ()):
            shown[name] = plain(value)
    return shown


def pairs(values: dict[str, Any]) -> str:
    """`a=1 b=x` of a mapping."""
    return " ".join(f"{name}={_short(value)}" for name, value in values.items())


def _short(value: Any) -> str:
    text = value if isinstance(value, str) else msgspec.json.encode(value).decode()
    return text if len(text) <= 48 else f"{text[:45]}…"


def size(count: int) -> str:
    """
    >>> size(100), size(110_592), size(256 * GIB)
    ('100 B', '108.0 KiB', '256.0 GiB')
    """
    for unit, bytes_of in (("GiB", GIB), ("MiB", MIB), ("KiB", KIB)):
        if count >= bytes_of:
            return f"{count / bytes_of:,.1f} {unit}"
    return f"{count} B"


def moment(at_ms: int) -> str:
    """
    >>> moment(0), moment(1_700_000_000_000)
    ('never', '2023-11-14 22:13:20Z')
    """
    return datetime.fromtimestamp(at_ms / 1000, UTC).strftime("%Y-%m-%d %H:%M:%SZ") if at_ms else "never"


def count_of(number: int, one: str, many: str = "") -> str:
    """
    >>> count_of(1, "database"), count_of(2000, "batch", "batches")
    ('1 database', '2,000 batches')
    """
    return f"{number:,} {one if number == 1 else many or one + 's'}"
