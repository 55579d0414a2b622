"""Durations and points in time as users type them."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from quire.core.errors import InvalidInput, UnknownSnapshot
from quire.core.ids import Epoch
from quire.core.time_parsing import UNITS, duration, parse_duration, parse_moment, parse_version, parse_zone


@pytest.mark.parametrize(
    "text", ["", "s", "1", "-1s", "1.5h", "1 h", "1y", "1h 30m", "٣s", "1S", "1s\n", "1" * 30 + "s"]
)
def test_invalid_durations_are_rejected(text: str) -> None:
    with pytest.raises(InvalidInput, match="`--keep` takes a duration"):
        parse_duration(text, "--keep")


def test_every_unit_round_trips() -> None:
    for unit, seconds in UNITS.items():
        assert parse_duration(f"2{unit}", "--keep") == 2 * seconds
        assert parse_duration(duration(2 * seconds), "--keep") == 2 * seconds, "the displayed form can be parsed"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("1970-01-02", 86_400_000),
        ("1970-01-01T00:00:01", 1_000),
        ("1970-01-01 00:00:01Z", 1_000),
        ("1970-01-01T01:00:01+01:00", 1_000),
        ("0001-01-01", 0),
        ("1s", 4_000),
        ("1w", 0),
    ],
)
def test_times_are_parsed(text: str, expected: int) -> None:
    assert parse_moment(text, "--since", now_ms=5_000) == expected


@pytest.mark.parametrize(
    "text",
    ["tomorrow", "monday", "today", "12:00", "2026-13-01", "1", "", "3 months ago", "ago", "2 hours", "monday 25:00"],
)
def test_invalid_times_are_rejected(text: str) -> None:
    with pytest.raises(InvalidInput, match="`--since` takes a time"):
        parse_moment(text, "--since", now_ms=0)


@pytest.mark.parametrize("text", ["2026-05-01T14:30Z Europe/Zurich", "1" * 15 + " weeks ago", "x" * 5_000])
def test_texts_that_only_look_like_a_time_are_rejected(text: str) -> None:
    with pytest.raises(InvalidInput, match="`--since` takes a time"):
        parse_moment(text, "--since", now_ms=0)


NOON = 1_700_049_600_000
"""Wednesday, 2023-11-15, 12:00 UTC."""


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("now", "2023-11-15T12:00:00"),
        ("2 hours ago", "2023-11-15T10:00:00"),
        ("2h ago", "2023-11-15T10:00:00"),
        ("an hour ago", "2023-11-15T11:00:00"),
        ("1 day, 12 hours and 30 minutes ago", "2023-11-13T23:30:00"),
        ("  2   Hours  Ago ", "2023-11-15T10:00:00"),
        ("a week ago", "2023-11-08T12:00:00"),
        ("yesterday", "2023-11-14T12:00:00"),
        ("yesterday 18:00", "2023-11-14T18:00:00"),
        ("yesterday at 18:00", "2023-11-14T18:00:00"),
        ("yesterday 18:00 America/New_York", "2023-11-14T23:00:00"),
        ("today 09:30:15", "2023-11-15T09:30:15"),
        ("Monday 09:00", "2023-11-13T09:00:00"),
        ("last monday 09:00", "2023-11-13T09:00:00"),
        ("wednesday 09:00", "2023-11-15T09:00:00"),
        ("wednesday 13:00", "2023-11-08T13:00:00"),
        ("2023-11-01 14:30 Europe/Zurich", "2023-11-01T13:30:00"),
        ("2023-07-01 14:30 Europe/Zurich", "2023-07-01T12:30:00"),
        ("2023-11-01T14:30 UTC", "2023-11-01T14:30:00"),
    ],
)
def test_times_in_words_are_parsed(text: str, expected: str) -> None:
    assert parsed_time(text) == expected


def parsed_time(text: str, now_ms: int = NOON) -> str:
    return datetime.fromtimestamp(parse_moment(text, "--at", now_ms=now_ms) / 1000, UTC).isoformat()[:19]


def test_an_ambiguous_time_is_the_first_one_and_a_skipped_time_is_moved_forward() -> None:
    assert parsed_time("2023-10-29 02:30 Europe/Zurich") == "2023-10-29T00:30:00", "02:30 occurs again an hour later"
    assert parsed_time("2023-03-26 02:30 Europe/Zurich") == "2023-03-26T01:30:00", "shown as 03:30"
    monday = int(datetime(2023, 3, 27, 12, tzinfo=UTC).timestamp() * 1000)
    assert parsed_time("yesterday 12:00 Europe/Zurich", monday) == "2023-03-26T10:00:00", "the day has 23 hours"
    assert parsed_time("saturday 12:00 Europe/Zurich", monday) == "2023-03-25T11:00:00", "before the change"


def test_a_version_is_an_epoch_or_a_time_and_otherwise_an_unknown_snapshot() -> None:
    unknown = UnknownSnapshot("no such snapshot", hint="list them", snapshot="mundey")
    assert parse_version("3:4711", now_ms=NOON, unknown=unknown) == Epoch(4711, 3)
    assert parse_version("2h", now_ms=NOON, unknown=unknown) == datetime(2023, 11, 15, 10, tzinfo=UTC)
    # A `+` in a URL query is decoded as a space.
    assert parse_version("2023-11-15T12:00:00 01:00", now_ms=NOON, unknown=unknown) == datetime(
        2023, 11, 15, 11, tzinfo=UTC
    )
    with pytest.raises(UnknownSnapshot, match=r"list them; an epoch .* also names a version") as caught:
        parse_version("mundey", now_ms=NOON, unknown=unknown)
    assert caught.value.where == {"snapshot": "mundey"}


@pytest.mark.parametrize("name", ["Mars/Olympus", "../../etc/passwd", "/etc/passwd", "Europe", "\0", "x" * 300])
def test_unknown_zones_are_rejected(name: str) -> None:
    with pytest.raises(InvalidInput, match="unknown time zone"):
        parse_zone(name)
