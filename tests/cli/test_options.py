"""Options: each is documented, and those in messages exist. The commands of `quire --help` have a heading each."""

from __future__ import annotations

import re
from collections.abc import Iterator

import click
import pytest

from quire.cli.main import COMMANDS as LINES
from quire.cli.main import SECTIONS
from tests.cli.commands import COMMANDS
from tests.rules.tree import ROOT, SRC

SHARED = {"store", "as_json", "debug"}
PAGE = re.split(r"^(?=#{2,3} )", (ROOT / "docs" / "cli.md").read_text("utf-8"), flags=re.MULTILINE)


def section_of(words: tuple[str, ...]) -> str:
    """Return the part of docs/cli.md about a command."""
    heading = re.compile(rf"### .*`quire {' '.join(words)}(?![\w-]| [a-z])")
    return next(part for part in PAGE if heading.match(part.splitlines()[0]))


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_every_option_is_documented(words: tuple[str, ...]) -> None:
    text = section_of(words)
    options = [each for each in COMMANDS[words].params if isinstance(each, click.Option) and each.name not in SHARED]
    spellings = [(*option.opts, *option.secondary_opts) for option in options]
    assert [names for names in spellings if not any(re.search(rf"{name}(?![\w-])", text) for name in names)] == []


def quoted() -> Iterator[tuple[tuple[str, ...], str]]:
    """Yield (words of the command, option) for each option in a command that a message or docstring quotes."""
    for path in (SRC / "quire").rglob("*.py"):
        for line in re.findall(r"`quire ([a-z][^`\n]*)`", path.read_text("utf-8")):
            given = re.match(r"[a-z-]+(?: [a-z-]+)*", line)
            assert given is not None
            words = tuple(given[0].split())
            command = next((words[:count] for count in (3, 2, 1) if words[:count] in COMMANDS), None)
            if command is not None:
                yield from ((command, option) for option in re.findall(r"(?<= )--[a-z-]+", line))


def test_messages_name_only_existing_options() -> None:
    named = set(quoted())
    assert len(named) > 20
    known = {
        words: {name for each in command.params for name in (*each.opts, *each.secondary_opts)} | {"--help"}
        for words, command in COMMANDS.items()
    }
    assert [(words, option) for words, option in sorted(named) if option not in known[words]] == []


def test_names_and_paths_in_quoted_commands_are_quoted_for_the_shell() -> None:
    """A hint for the database `it's`, or a directory with a space, must be usable as it stands."""
    bare = re.compile(r"`quire [^`\n]*\{(?:\w+\.)*(?:\w*name|database|stream|snapshot|path|root|directory|url|label)\}")
    found = [
        f"{path.relative_to(SRC)}: {line.strip()}"
        for path in (SRC / "quire").rglob("*.py")
        for line in path.read_text("utf-8").splitlines()
        if bare.search(line)
    ]
    assert found == []


def test_every_command_has_one_heading() -> None:
    listed = " ".join(SECTIONS.values()).split()
    assert sorted(listed) == sorted(LINES)
