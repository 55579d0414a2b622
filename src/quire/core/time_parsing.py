"""Parser for times and durations as users type them, in commands, addresses, URLs, settings and the Python API.

    duration   90s, 15m, 2h, 1h30m, 7d, 4w; 0 needs no unit
    moment     now
               2h; 2h ago; 2 hours ago; an hour ago; 1 day 12 hours ago
               yesterday                                (24 hours ago)
               yesterday 18:00; today 09:30; monday 09:00 (the last one)
               2026-05-01; 2026-05-01T14:30; 2026-05-01 14:30:00+02:00
    zone       a moment that names a day or a date may end with one: yesterday 18:00 Europe/Zurich; without it, UTC

A local time that occurs twice, because the clock is set back, means the first occurrence. A local time that is skipped,
because the clock is set forward, is shifted by the same amount: 02:30 then means 03:30.

A version of a database is named by its snapshot. Any other text is an epoch (3:4711) or a moment (`parse_version`).

Pure functions. Raises `InvalidInput`, `UnknownSnapshot`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import UTC, datetime, time, timedelta, tzinfo

from quire.core.errors import InvalidInput, UnknownSnapshot
from quire.core.ids import Epoch

UNITS = {"s": 1, "m": 60, "h": 3_600, "d": 86_400, "w": 604_800}
SECONDS_MAX = 1_000 * 366 * 86_400
"""A thousand years: a longer duration is a typing error."""
TEXT_MAX = 100
"""Characters of a moment: longer texts are refused unparsed."""

WEEKDAYS = ("monday", "tuesday", "wednesday", "thursday", "friday", "saturday", "sunday")

_DURATION = re.compile(r"(?:[0-9]{1,15}[smhdw])+")
_PART = re.compile(r"([0-9]+)([smhdw])")
_WORDS = re.compile(
    r"(?:(?:[0-9]{1,15}|an?) ?(?:s|secs?|seconds?|m|mins?|minutes?|h|hours?|d|days?|w|weeks?)(?:,? )?)+"
)
_WORD = re.compile(r"([0-9]+|an?) ?([smhdw])[a-z]*")
_DAY = re.compile(
    rf"(today|yesterday|(?:last )?(?:{'|'.join(WEEKDAYS)}))(?: at)? ([0-9]{{1,2}}):([0-9]{{2}})(?::([0-9]{{2}}))?"
)
_EPOCH = re.compile(r"([0-9]{1,10}):([0-9]{1,20})")
_PLUS_LOST = re.compile(r"(.*T\S*) ([0-9]{2}:?[0-9]{2})")
"""2026-01-31T12:00:00 01:00: a `+` that form decoding has turned into a space."""
_ZONE = re.compile(r"(.*\S) (UTC|Z|[A-Z][A-Za-z_]+(?:/[A-Za-z0-9_+-]+)+)")
_DURATION_HINT = "use 90s, 15m, 2h, 7d or 4w"
MOMENT_HINT = "use an age (15m, 2 hours ago, yesterday), a day (yesterday 18:00) or a date in UTC (2026-05-01T14:30)"


def parse_duration(text: str, what: str) -> int:
    """Return a duration in seconds; `what` names the option or setting, for the error.

    >>> [parse_duration(text, "--keep") for text in ("90s", "1h30m", "7d", "0")]
    [90, 5400, 604800, 0]
    >>> parse_duration("soon", "--keep")
    Traceback (most recent call last):
        ...
    quire.core.errors.InvalidInput: `--keep` takes a duration (given='soon'); use 90s, 15m, 2h, 7d or 4w
    """
    if text != "0" and not _DURATION.fullmatch(text):
        raise InvalidInput(f"`{what}` takes a duration", hint=_DURATION_HINT, given=text)
    seconds = sum(int(number) * UNITS[unit] for number, unit in _PART.findall(text))
    if seconds > SECONDS_MAX:
        raise InvalidInput(f"`{what}` takes a duration of at most a thousand years", hint=_DURATION_HINT, given=text)
    return seconds


def duration(seconds: int) -> str:
    """Format seconds as a duration in the largest unit that divides them.

    >>> duration(2_592_000), duration(5_400), duration(61), duration(0)
    ('30d', '90m', '61s', '0s')
    """
    for unit, seconds_per in (("d", 86_400), ("h", 3_600), ("m", 60)):
        if seconds and not seconds % seconds_per:
            return f"{seconds // seconds_per}{unit}"
    return f"{seconds}s"


def parse_moment(text: str, what: str, *, now_ms: int) -> int:
    """Return a moment in milliseconds since the Unix epoch; `what` names the option or setting, for the error.

    >>> noon = 1_700_049_600_000  # Wednesday, 2023-11-15, 12:00 UTC
    >>> from datetime import UTC, datetime
    >>> def shown(text):
    ...     return datetime.fromtimestamp(parse_moment(text, "--at", now_ms=noon) / 1000, UTC).isoformat()
    >>> shown("2 hours ago"), shown("yesterday")
    ('2023-11-15T10:00:00+00:00', '2023-11-14T12:00:00+00:00')
    >>> shown("monday 09:00 Europe/Zurich"), shown("2023-11-01")
    ('2023-11-13T08:00:00+00:00', '2023-11-01T00:00:00+00:00')
    """
    words = " ".join(text[: TEXT_MAX + 1].split())
    try:
        if len(words) > TEXT_MAX:
            raise ValueError("too long")
        moment = _ago(words, what, now_ms)
        return max(_of_calendar(words, now_ms) if moment is None else moment, 0)
    except (ValueError, OverflowError, OSError):
        raise InvalidInput(f"`{what}` takes a time", hint=MOMENT_HINT, given=text[:TEXT_MAX]) from None


def requested_moment(
    at: datetime | str | int | None, at_ms: int | None = None, *, now_ms: int, what: str = "at"
) -> int | None:
    """Return the moment that a caller names, in milliseconds since the Unix epoch; `None` if none is named.

    `at` is a time (without a zone: UTC), a text as `parse_moment` takes, or milliseconds; `at_ms` is the latter alone.

    >>> requested_moment("2h", now_ms=7_200_000), requested_moment(datetime(1970, 1, 1, 0, 1), now_ms=90_000)
    (0, 60000)
    """
    if at is None:
        return at_ms
    if at_ms is not None:
        raise InvalidInput("`at` and `at_ms` both name a moment", hint="give one of them")
    if isinstance(at, str):
        moment_ms = parse_moment(at, what, now_ms=now_ms)
    elif isinstance(at, datetime):
        moment_ms = int((at if at.tzinfo is not None else at.replace(tzinfo=UTC)).timestamp() * 1000)
    else:
        moment_ms = at
    if moment_ms > now_ms:
        raise InvalidInput("the time is in the future", hint=f"leave `{what}` out for the newest state", given=str(at))
    return moment_ms


def parse_version(text: str, *, now_ms: int, unknown: UnknownSnapshot) -> Epoch | datetime:
    """Return the version for a text that is not the name of a snapshot; raise `unknown`, with a better hint, if it is not one.

    >>> parse_version("3:4711", now_ms=0, unknown=UnknownSnapshot("no snapshot"))
    Epoch(lsn=4711, segment_id=3)
    >>> parse_version("2 hours ago", now_ms=7_200_000, unknown=UnknownSnapshot("no snapshot"))
    datetime.datetime(1970, 1, 1, 0, 0, tzinfo=datetime.timezone.utc)
    """
    if (epoch := _EPOCH.fullmatch(text)) is not None:
        return Epoch(int(epoch[2]), int(epoch[1]))
    try:
        at_ms = parse_moment(_PLUS_LOST.sub(r"\1+\2", text), "at", now_ms=now_ms)
    except InvalidInput:
        also = "an epoch (3:4711) or a time (15m, 2 hours ago, 2026-05-01T14:30) also names a version"
        hint = f"{unknown.hint}; {also}" if unknown.hint else also
        raise UnknownSnapshot(unknown.what, hint=hint, **unknown.where) from None
    return datetime.fromtimestamp(at_ms / 1000, UTC)


def version_parameter(at: object) -> tuple[str, str]:
    """Return a version as a parameter of a URL: a snapshot's name, an lsn or `Epoch`, or a time.

    >>> version_parameter("monday"), version_parameter(4711)
    (('at', 'monday'), ('epoch', '4711'))
    """
    if isinstance(at, str):
        return "at", at
    if isinstance(at, datetime):
        if at.tzinfo is None:  # a text without a zone is UTC; a naive datetime is ambiguous
            raise InvalidInput("a time needs a time zone", hint="use datetime(…, tzinfo=UTC)", at=str(at))
        return "time", at.isoformat()
    if isinstance(at, bool) or not isinstance(at, int | Epoch):
        hint = "a snapshot's name, an lsn, an Epoch, or a datetime"
        raise InvalidInput("unknown way to name a version", hint=hint, at=repr(at))
    return "epoch", str(at.lsn if isinstance(at, Epoch) else at)


def requested_version(parameters: Mapping[str, str]) -> tuple[str, str] | None:
    """Return the parameter of a URL that names a version, if there is one."""
    requested = [(kind, parameters[kind]) for kind in ("at", "epoch", "time") if kind in parameters]
    if len(requested) > 1:
        asked = ", ".join(kind for kind, _ in requested)
        raise InvalidInput("a URL can name only one version", hint="use one of at, epoch and time", asked=asked)
    return requested[0] if requested else None


def parse_epoch_or_time(kind: str, text: str, *, now_ms: int) -> int | datetime:
    """Return the lsn or the time of a URL's parameter `epoch` or `time`."""
    if kind == "time":
        return datetime.fromtimestamp(parse_moment(text, kind, now_ms=now_ms) / 1000, UTC)
    try:
        return int(text)
    except ValueError:
        raise InvalidInput(f"the URL's {kind} cannot be read", hint="use an lsn", given=text) from None


def parse_zone(name: str) -> tzinfo:
    """Return a time zone by its name in the IANA database, such as Europe/Zurich.

    >>> parse_zone("UTC") is UTC, str(parse_zone("Europe/Zurich"))
    (True, 'Europe/Zurich')
    """
    if name in ("UTC", "Z", ""):
        return UTC
    from zoneinfo import ZoneInfo  # slow to import, and few commands name a zone

    try:
        return ZoneInfo(name)
    except (ValueError, OSError, KeyError):  # a name that is a path, a directory, or unknown
        hint = "as in Europe/Zurich or America/New_York"
        raise InvalidInput("unknown time zone", hint=hint, zone=name[:TEXT_MAX]) from None


def _ago(words: str, what: str, now_ms: int) -> int | None:
    """Return the moment of an age before now; `None` if the text is not an age."""
    lower = words.lower()
    if lower == "now":
        return now_ms
    if lower == "yesterday":
        return now_ms - 86_400_000
    age = lower.removesuffix(" ago").replace(" and ", " ")
    if _DURATION.fullmatch(age):
        return now_ms - parse_duration(age, what) * 1000
    if age != lower and _WORDS.fullmatch(age):
        parts = _WORD.findall(age)
        seconds = sum((1 if number in ("a", "an") else int(number)) * UNITS[unit] for number, unit in parts)
        if seconds > SECONDS_MAX:
            raise ValueError("too long ago")
        return now_ms - seconds * 1000
    return None


def _of_calendar(words: str, now_ms: int) -> int:
    """Return the moment of a day with a time, or of a date."""
    zone: tzinfo = UTC
    if (zoned := _ZONE.fullmatch(words)) is not None:
        words, zone = zoned[1], parse_zone(zoned[2])
    if (match := _DAY.fullmatch(words.lower())) is None:
        at = datetime.fromisoformat(words)
        if zoned is not None and at.tzinfo is not None:
            raise ValueError("two zones")
        return _ms(at if at.tzinfo is not None else at.replace(tzinfo=zone))
    day, hour, minute, second = match.groups()
    now = datetime.fromtimestamp(now_ms / 1000, zone)
    clock = time(int(hour), int(minute), int(second or 0))
    if day in ("today", "yesterday"):
        return _ms(datetime.combine(now.date() - timedelta(days=day == "yesterday"), clock, zone))
    back = (now.weekday() - WEEKDAYS.index(day.removeprefix("last "))) % 7
    at_ms = _ms(datetime.combine(now.date() - timedelta(days=back), clock, zone))
    return at_ms if at_ms <= now_ms else _ms(datetime.combine(now.date() - timedelta(days=back + 7), clock, zone))


def _ms(at: datetime) -> int:
    return int(at.timestamp() * 1000)
