"""Durations and moments as people type them."""

from __future__ import annotations

import pytest

from quire.cli.formatting import UNITS, duration, moment_of, seconds_of
from quire.core.errors import InvalidInput


@pytest.mark.parametrize(
    "text", ["", "s", "1", "-1s", "1.5h", "1 h", "1y", "1h 30m", "٣s", "1S", "1s\n", "1" * 30 + "s"]
)
def test_what_is_no_duration(text: str) -> None:
    with pytest.raises(InvalidInput, match="`--keep` takes a duration"):
        seconds_of(text, "--keep")


def test_every_unit() -> None:
    for unit, seconds in UNITS.items():
        assert seconds_of(f"2{unit}", "--keep") == 2 * seconds
        assert seconds_of(duration(2 * seconds), "--keep") == 2 * seconds, "what is shown can be typed"


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
def test_moments(text: str, expected: int) -> None:
    assert moment_of(text, "--since", now_ms=5_000) == expected


@pytest.mark.parametrize("text", ["now", "yesterday", "12:00", "2026-13-01", "1", ""])
def test_what_is_no_moment(text: str) -> None:
    with pytest.raises(InvalidInput, match="`--since` takes a time"):
        moment_of(text, "--since", now_ms=0)
