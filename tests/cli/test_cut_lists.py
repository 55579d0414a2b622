"""Hazard: a list that stops at its default limit looks complete."""

from __future__ import annotations

from pathlib import Path

import pytest

import quire
from tests.cli.conftest import Run


@pytest.fixture
def filled(path: Path) -> Path:
    """A store with five keys and five records."""
    with quire.open(path) as store:
        cart = store.kv("cart", create=True)
        for letter in (b"a", b"b", b"c", b"d e", b"\xff"):
            cart.put(letter, b"1")
        for number in range(5):
            appended = store.stream("clicks").append(b"%d" % number)
        appended.result()
    return path


@pytest.mark.parametrize(
    ("options", "continues"),
    [
        (("-n", "3"), "`--from 'd e'` continues, `--limit 0` lists all"),
        (("-n", "3", "--hex"), "`--from 642065` continues"),
        (("-n", "4"), "there are more: `--limit 0` lists all"),
        (("-n", "2", "--reverse"), "`--to 'd e'` continues"),
        (("-n", "1", "--prefix", ""), "`--from b` continues"),
    ],
)
def test_a_scan_that_stops_says_how_to_continue(
    run: Run, filled: Path, options: tuple[str, ...], continues: str
) -> None:
    assert continues in run("kv", "scan", "cart", *options).out
    assert len(run("kv", "scan", "cart", *options, "--json").data) == int(options[1])


def test_a_complete_list_has_no_note(run: Run, filled: Path) -> None:
    assert "there are more" not in run("kv", "scan", "cart", "-n", "5").out
    assert "there are more" not in run("kv", "scan", "cart", "-n", "2", "--to", "c").out
    assert "there are more" not in run("stream", "read", "clicks", "-n", "5").out
    assert "there are more" not in run("stream", "read", "clicks", "-n", "2", "--to", "3").out


def test_a_stream_that_stops_says_how_to_continue(run: Run, filled: Path) -> None:
    shown = run("stream", "read", "clicks", "-n", "2").out
    assert "there are more: `--from 3` continues" in shown
    assert "there are more" not in run("stream", "read", "clicks", "--from", "3").out
