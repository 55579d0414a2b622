"""Schedules with a time of day and a zone: one period for each day of the zone's calendar, also when its clocks
change."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.core.errors import InvalidInput
from quire.manifest.schedules import parse_schedule

ZONES = ("UTC", "Europe/Zurich", "America/New_York", "Asia/Kathmandu", "Australia/Lord_Howe", "Pacific/Apia")


def ms(text: str, zone: str = "UTC") -> int:
    return int(datetime.fromisoformat(text).replace(tzinfo=ZoneInfo(zone)).timestamp() * 1000)


def utc_text(at_ms: int) -> str:
    return datetime.fromtimestamp(at_ms / 1000, UTC).isoformat()[:16]


@pytest.mark.parametrize(
    ("text", "now", "begins", "name"),
    [
        ("daily", "2026-11-17T15:00", "2026-11-17T00:00", "daily-2026-11-17"),
        ("daily at 03:00", "2026-11-17T02:59", "2026-11-16T03:00", "daily-2026-11-16"),
        ("daily at 03:00", "2026-11-17T03:00", "2026-11-17T03:00", "daily-2026-11-17"),
        ("daily at 03:00 Europe/Zurich", "2026-11-17T01:59", "2026-11-16T02:00", "daily-2026-11-16"),
        ("daily at 03:00 Europe/Zurich", "2026-11-17T02:00", "2026-11-17T02:00", "daily-2026-11-17"),
        ("daily at 03:00 Europe/Zurich", "2026-07-17T01:00", "2026-07-17T01:00", "daily-2026-07-17"),
        ("daily at 22:00 America/New_York", "2026-11-17T03:30", "2026-11-17T03:00", "daily-2026-11-16"),
        ("weekly", "2026-11-17T15:00", "2026-11-16T00:00", "weekly-2026-W47"),
        ("weekly on sunday at 04:30", "2026-11-17T15:00", "2026-11-15T04:30", "weekly-2026-W46"),
        ("weekly on tuesday at 16:00", "2026-11-17T15:00", "2026-11-10T16:00", "weekly-2026-W46"),
        # 02:30 does not exist on 2026-03-29, and occurs twice on 2026-10-25.
        ("daily at 02:30 Europe/Zurich", "2026-03-29T12:00", "2026-03-29T01:30", "daily-2026-03-29"),
        ("daily at 02:30 Europe/Zurich", "2026-10-25T00:30", "2026-10-25T00:30", "daily-2026-10-25"),
        ("daily at 02:30 Europe/Zurich", "2026-10-25T01:45", "2026-10-25T00:30", "daily-2026-10-25"),
    ],
)
def test_the_period_of_a_point_in_time(text: str, now: str, begins: str, name: str) -> None:
    schedule = parse_schedule(text)
    assert (utc_text(schedule.begins_ms(ms(now))), schedule.name(ms(now))) == (begins, name)


@given(
    zone=st.sampled_from(ZONES),
    hour=st.integers(0, 23),
    minute=st.sampled_from([0, 15, 30, 45]),
    start=st.datetimes(datetime(2011, 1, 1), datetime(2030, 1, 1)),
)
def test_periods_are_consecutive_with_one_for_each_day(zone: str, hour: int, minute: int, start: datetime) -> None:
    schedule = parse_schedule(f"daily at {hour:02}:{minute:02} {zone}")
    now = int(start.replace(tzinfo=UTC).timestamp() * 1000)
    names: list[str] = []
    before = 0
    for step in range(5 * 48):
        at = now + step * 1_800_000
        begins = schedule.begins_ms(at)
        assert begins <= at
        assert begins >= before, "periods are in order"
        assert at - begins <= 49 * 3_600_000, "no day is skipped, except one that the zone skips"
        before = begins
        if not names or names[-1] != schedule.name(at):
            names.append(schedule.name(at))
    assert len(names) == len(set(names)), "each period has one name"
    assert names == sorted(names)
    assert 5 <= len(names) <= 7


def test_a_year_of_a_zone_that_changes_its_clocks_has_a_snapshot_for_each_day() -> None:
    schedule = parse_schedule("daily at 02:30 Europe/Zurich")
    first = datetime(2026, 1, 1, 12, tzinfo=UTC)
    names = [schedule.name(int((first + timedelta(days=day)).timestamp() * 1000)) for day in range(365)]
    assert len(set(names)) == 365


@pytest.mark.parametrize(
    "text",
    [
        *("", "monthly", "daily at", "daily at 24:00", "daily at 3", "daily at 03:60", "hourly at 03:00"),
        *("weekly on someday at 1:00", "daily at 03:00 Mars/Olympus", "daily at 03:00 ../../etc", "daily " * 50, 7),
    ],
)
def test_invalid_schedules_are_rejected(text: str) -> None:
    with pytest.raises(InvalidInput):
        parse_schedule(text)
