"""Durations and moments as people type them.

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
    quire.core.errors.InvalidInput: `--keep` takes a duration (given='soon'); say 90s, 15m, 2h, 7d or 4w
    >>> moment_of("2h", "--since", now_ms=10_000_000), moment_of("1970-01-01T01:00", "--since", now_ms=0)
    (2800000, 3600000)

Pure functions; who calls knows what time it is. Raises `InvalidInput`.
"""

from __future__ import annotations

import re
from datetime import UTC, datetime

from quire.core.errors import InvalidInput

UNITS = {"s": 1, "m": 60, "h": 3_600, "d": 86_400, "w": 604_800}
SECONDS_MAX = 1_000 * 366 * 86_400
"""A thousand years: longer is a slip of the finger."""

_DURATION = re.compile(r"(?:[0-9]{1,15}[smhdw])+")
_PART = re.compile(r"([0-9]+)([smhdw])")
HINT = "say 90s, 15m, 2h, 7d or 4w"


def seconds_of(text: str, option: str) -> int:
    """The seconds of a duration: 90s, 15m, 2h, 1h30m, 7d, 4w; 0 needs no unit."""
    if text != "0" and not _DURATION.fullmatch(text):
        raise InvalidInput(f"`{option}` takes a duration", hint=HINT, given=text)
    seconds = sum(int(number) * UNITS[unit] for number, unit in _PART.findall(text))
    if seconds > SECONDS_MAX:
        raise InvalidInput(f"`{option}` takes a duration of at most a thousand years", hint=HINT, given=text)
    return seconds


def moment_of(text: str, option: str, *, now_ms: int) -> int:
    """The milliseconds of a moment: a duration before now, or a date, with a time or without; UTC unless it says otherwise."""
    if _DURATION.fullmatch(text):
        return max(now_ms - seconds_of(text, option) * 1000, 0)

    try:
        moment = datetime.fromisoformat(text)
        if moment.tzinfo is None:
            moment = moment.replace(tzinfo=UTC)
        return max(int(moment.timestamp() * 1000), 0)
    except (ValueError, OverflowError):
        hint = "say how long ago (90s, 15m, 2h, 7d), or a date: 2026-05-01, 2026-05-01T14:30, in UTC"
        raise InvalidInput(f"`{option}` takes a moment", hint=hint, given=text) from None


def duration(seconds: int) -> str:
    """The shortest way to type it.

    >>> duration(2_592_000), duration(5_400), duration(61), duration(0)
    ('30d', '90m', '61s', '0s')
    """
    for unit, seconds_per in (("d", 86_400), ("h", 3_600), ("m", 60)):
        if seconds and not seconds % seconds_per:
            return f"{seconds // seconds_per}{unit}"
    return f"{seconds}s"
