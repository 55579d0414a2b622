"""Values as people read and type them: sizes, times, durations, counts, and records as short lists of fields.

Pure functions, except for the local time zone. Parsing raises `InvalidInput`.
"""

from __future__ import annotations

import json
import re
import time
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec.structs import fields

from quire.core.errors import InvalidInput
from quire.core.ids import ArtifactKey
from quire.core.json_values import plain
from quire.core.limits import GIB, KIB, MIB

if TYPE_CHECKING:
    from quire.manifest.slots import Chain

SHORT_CHARACTERS = 48
"""Longer values are cut in text; JSON has them whole."""

UNITS = {"s": 1, "m": 60, "h": 3_600, "d": 86_400, "w": 604_800}
SECONDS_MAX = 1_000 * 366 * 86_400
"""A thousand years: longer is a typing mistake."""

_DURATION = re.compile(r"(?:[0-9]{1,15}[smhdw])+")
_PART = re.compile(r"([0-9]+)([smhdw])")
HINT = "use 90s, 15m, 2h, 7d or 4w"


def telling(record: msgspec.Struct) -> dict[str, Any]:
    """The fields of a record that differ from their defaults."""
    defaults = {field.name: field.default for field in fields(type(record)) if not field.required}
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
    return short(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, separators=(",", ":")))


def short(text: str) -> str:
    """
    >>> short("a" * 49)
    'aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa…'
    """
    return text if len(text) <= SHORT_CHARACTERS else f"{text[: SHORT_CHARACTERS - 3]}…"


def in_words(value: Any) -> str:
    """A value from an error or a problem, without Python syntax.

    >>> from quire.core.ids import ArtifactKey, ArtifactKind
    >>> in_words(ArtifactKey(1, ArtifactKind.BASE, 5, 3)), in_words(("ghost",)), in_words((1, 2)), in_words(None)
    ('base 5 of database 1, generation 3', 'ghost', '1/2', 'nothing')
    >>> in_words(True), in_words([False])
    ('yes', 'no')
    """
    if value is None:
        return "nothing"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if type(value) in (str, int):
        return short(str(value))
    if isinstance(value, ArtifactKey):
        delta = f", delta {value.delta_id}" if value.delta_id else ""
        return f"{value.kind.name.lower()} {value.id} of database {value.origin_db_id}, generation {value.generation}{delta}"
    if isinstance(value, tuple | list):
        return ("/" if isinstance(value, tuple) else ", ").join(map(in_words, value))
    json_form = plain(value)
    return pairs(json_form) if isinstance(json_form, dict) else short(str(json_form))


def chain_text(chain: Chain, origin_db_id: int) -> str:
    """`base:1@60 + delta-1:2@100`: kind, generation and covered lsn of each artifact; another origin is named."""
    links = []
    for link in chain:
        name = link.kind.name.lower() + (f"-{link.delta_id}" if link.delta_id else "")
        origin = "" if link.origin_db_id == origin_db_id else f" of db {link.origin_db_id}"
        links.append(f"{name}:{link.generation}@{link.covered_lsn}{origin}")
    return " + ".join(links)


def visible(text: str) -> str:
    """Escape control and bidirectional characters: names come from people and must not move the cursor.

    >>> print(visible("a\\x1b[2Jb\\u202ec größe 数据"))
    a\\x1b[2Jb\\u202ec größe 数据
    """
    return text if text.isprintable() else "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text)


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
    return time.strftime("%Y-%m-%d %H:%M:%SZ", time.gmtime(at_ms / 1000)) if at_ms else "never"


def here(at_ms: int, now_ms: int) -> str:
    """A moment in local time, with its age."""
    return f"{time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(at_ms / 1000))} ({span(now_ms - at_ms)} ago)"


def span(milliseconds: int) -> str:
    """
    >>> span(400), span(90_000), span(150_000), span(7_200_000), span(200_000_000)
    ('0 s', '90 s', '2 min', '2 h', '2 days')
    """
    seconds = max(milliseconds, 0) // 1000
    for unit, seconds_of in (("days", 86_400), ("h", 3_600), ("min", 60)):
        if seconds >= 2 * seconds_of:
            return f"{seconds // seconds_of:,} {unit}"
    return f"{seconds} s"


def count_of(number: int, one: str, many: str = "") -> str:
    """
    >>> count_of(1, "database"), count_of(2000, "batch", "batches")
    ('1 database', '2,000 batches')
    """
    return f"{number:,} {one if number == 1 else many or one + 's'}"


def tags_text(tags: dict[str, str]) -> str:
    """`a=1, b=2`."""
    return ", ".join(f"{key}={value}" for key, value in sorted(tags.items()))


def article(word: str) -> str:
    """
    >>> article("pages"), article("lsm")
    ('a pages', 'an lsm')
    """
    return f"an {word}" if word == "lsm" or word[0] in "aeio" else f"a {word}"


# ── durations and times as people type them ───────────────────────────────────────────────────────────────────────────
def seconds_of(text: str, option: str) -> int:
    """The seconds of a duration: 90s, 15m, 2h, 1h30m, 7d, 4w; 0 needs no unit.

    >>> (
    ...     seconds_of("90s", "--keep"),
    ...     seconds_of("1h30m", "--keep"),
    ...     seconds_of("7d", "--keep"),
    ...     seconds_of("0", "--keep"),
    ... )
    (90, 5400, 604800, 0)
    >>> seconds_of("soon", "--keep")
    Traceback (most recent call last):
        ...
    quire.core.errors.InvalidInput: `--keep` takes a duration (given='soon'); use 90s, 15m, 2h, 7d or 4w
    """
    if text != "0" and not _DURATION.fullmatch(text):
        raise InvalidInput(f"`{option}` takes a duration", hint=HINT, given=text)
    seconds = sum(int(number) * UNITS[unit] for number, unit in _PART.findall(text))
    if seconds > SECONDS_MAX:
        raise InvalidInput(f"`{option}` takes a duration of at most a thousand years", hint=HINT, given=text)
    return seconds


def moment_of(text: str, option: str, *, now_ms: int) -> int:
    """The milliseconds of a moment: a duration before now, or a date with or without a time, in UTC unless it says otherwise.

    >>> moment_of("2h", "--since", now_ms=10_000_000), moment_of("1970-01-01T01:00", "--since", now_ms=0)
    (2800000, 3600000)
    """
    if _DURATION.fullmatch(text):
        return max(now_ms - seconds_of(text, option) * 1000, 0)
    try:
        at = datetime.fromisoformat(text)
        if at.tzinfo is None:
            at = at.replace(tzinfo=UTC)
        return max(int(at.timestamp() * 1000), 0)
    except (ValueError, OverflowError):
        hint = "use an age (90s, 15m, 2h, 7d) or a date in UTC (2026-05-01, 2026-05-01T14:30)"
        raise InvalidInput(f"`{option}` takes a time", hint=hint, given=text) from None


def duration(seconds: int) -> str:
    """The shortest way to type it.

    >>> duration(2_592_000), duration(5_400), duration(61), duration(0)
    ('30d', '90m', '61s', '0s')
    """
    for unit, seconds_per in (("d", 86_400), ("h", 3_600), ("m", 60)):
        if seconds and not seconds % seconds_per:
            return f"{seconds // seconds_per}{unit}"
    return f"{seconds}s"
