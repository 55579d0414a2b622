"""What help says, of every command and every group: asked for in either way, in words of people."""

from __future__ import annotations

import re

import pytest

from quire.cli.output import width_of
from tests.cli.commands import COMMANDS, GROUPS
from tests.cli.conftest import Run, quire_program

WORDS = [(), *((name,) for name in GROUPS), *COMMANDS]

RAW = re.compile(r"<[a-z ]+>|\b(INTEGER|TEXT|FLOAT|BOOLEAN|RANGE)\b|x[<>]=|\{|range")
"""How click calls kinds of values."""


@pytest.mark.parametrize("words", WORDS, ids=lambda words: " ".join(words) or "quire")
def test_help_is_asked_for_in_two_ways_and_speaks_of_no_types(run: Run, words: tuple[str, ...]) -> None:
    short, long = (run(*words, option, at=None) for option in ("-h", "--help"))
    assert (short.code, short.err) == (0, "")
    assert short == long
    assert "-h, --help" in short.out
    assert RAW.findall(short.out) == []
    assert max(map(width_of, short.out.splitlines())) <= 80


def test_help_is_asked_for_anywhere_on_the_line(run: Run) -> None:
    asked = run("snapshot", "create", "-h", at=None).out
    assert run("snapshot", "create", "shop", "monday", "-h", at=None).out == asked
    assert run("snapshot", "create", "--json", "-h", "shop", at=None).out == asked


def test_the_program_itself_understands_it() -> None:
    assert quire_program("-h").stdout == quire_program("--help").stdout != ""


@pytest.mark.parametrize("value", ["-1", "x", "1.5", ""])
def test_a_number_that_cannot_be_is_told_in_words(run: Run, value: str) -> None:
    ended = run("stream", "tail", "clicks", "-n", value, at=None)
    assert ended.code == 2
    assert "range" not in ended.err
    assert ended.err.splitlines()[1] == "next:  see `quire stream tail --help`"
