"""Schedules of automatic snapshots: `hourly`, `daily`, `weekly`, the last two also at a time of day, in a time zone.

    hourly
    daily                                daily at 03:00               daily at 03:00 Europe/Zurich
    weekly                               weekly on sunday at 04:30 America/New_York

Without a time it is the beginning of the hour, the day or the ISO week; without a zone, UTC. A *period* lasts from one
such moment to the next, and its snapshot is named after the day or week in which it begins. There is one period for
each day or week of the zone's calendar, however long that is: on a day on which clocks skip the time it begins later by
as much as they were put forward; on a day on which they show it twice, it begins with the first.

Threads: pure functions. Raises `InvalidInput`.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import UTC, date, datetime, time, timedelta, tzinfo

import msgspec

from quire.core.errors import InvalidInput
from quire.core.time_parsing import WEEKDAYS, parse_zone

BUCKETS: dict[str, Callable[[datetime | date], str]] = {
    "hourly": lambda moment: moment.strftime("%Y-%m-%dT%H"),
    "daily": lambda moment: moment.strftime("%Y-%m-%d"),
    "weekly": lambda moment: "{}-W{:02}".format(*moment.isocalendar()),
}
"""Schedule → function that returns the name of the bucket of a moment."""

TEXT_MAX = 100
_HOUR_MS = 3_600_000
_TIMED = re.compile(
    rf"(?:(daily)|(weekly)(?: on ({'|'.join(WEEKDAYS)}))?) at ([0-9]{{1,2}}):([0-9]{{2}})(?: ([A-Za-z][A-Za-z0-9_+/-]*))?",
    re.IGNORECASE,
)
HINT = "hourly, daily, weekly, `daily at 03:00 Europe/Zurich` or `weekly on sunday at 04:30`"


class Schedule(msgspec.Struct, frozen=True):
    """One schedule."""

    every: str
    """hourly, daily or weekly."""
    at: time = time(0)
    weekday: int = 0
    """0 is Monday."""
    zone: tzinfo = UTC

    def begins_ms(self, now_ms: int) -> int:
        """Return when the period of `now_ms` began."""
        if self.every == "hourly":
            return now_ms - now_ms % _HOUR_MS
        day = datetime.fromtimestamp(now_ms / 1000, self.zone).date()
        if self.every == "weekly":
            day -= timedelta(days=(day.weekday() - self.weekday) % 7)
        if (begins := self._at_ms(day)) > now_ms:
            begins = self._at_ms(day - timedelta(days=7 if self.every == "weekly" else 1))
        return begins

    def name(self, now_ms: int) -> str:
        """Return the name of the snapshot of the period of `now_ms`."""
        return f"{self.every}-{bucket(self.every, self.begins_ms(now_ms), self.zone)}"

    def _at_ms(self, day: date) -> int:
        return int(datetime.combine(day, self.at, self.zone).timestamp() * 1000)


def parse_schedule(text: str) -> Schedule:
    """Parse a schedule.

    >>> parse_schedule("daily at 03:00 Europe/Zurich").at, parse_schedule("weekly on Sunday at 4:30").weekday
    (datetime.time(3, 0), 6)
    """
    if not isinstance(text, str) or len(text) > TEXT_MAX:
        raise InvalidInput("unknown schedule", hint=HINT, schedule=repr(text)[:TEXT_MAX])
    words = " ".join(text.split())
    if words in BUCKETS:
        return Schedule(words)
    if (match := _TIMED.fullmatch(words)) is None or int(match[4]) > 23 or int(match[5]) > 59:
        raise InvalidInput("unknown schedule", hint=HINT, schedule=text)
    weekday = WEEKDAYS.index(match[3].lower()) if match[3] else 0
    every = "daily" if match[1] else "weekly"
    return Schedule(every, time(int(match[4]), int(match[5])), weekday, parse_zone(match[6] or "UTC"))


def bucket(schedule: str, at_ms: int, zone: tzinfo = UTC) -> str:
    """Return the name of the bucket of a moment.

    >>> [bucket(schedule, 1_700_000_000_000) for schedule in BUCKETS]
    ['2023-11-14T22', '2023-11-14', '2023-W46']
    """
    return BUCKETS[schedule](datetime.fromtimestamp(at_ms / 1000, zone))
