"""What a command shows: a value, given to an `Output` that writes it as text for people or as JSON for programs.

Terms
  Listing   rows under columns           JSON: an array of objects, one row per line
  Facts     names and values             JSON: one object
  Note      one sentence about a deed    JSON: one object

Rules
  1. A command shows exactly one value; so stdout holds one JSON document, or nothing when an error is told on stderr.
  2. Text fits the terminal: the last column of a listing wraps, others are as wide as they must be. Where there is no
     terminal nothing is wrapped or cut, so that `grep` and `awk` see whole lines.
  3. Colours only on a terminal, and not if NO_COLOR is set or TERM is dumb.
  4. Rows may be an iterator: they are written as they come, JSON in bounded memory, text in steps of `STEP_ROWS`.

Not thread-safe: one command, one output.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import textwrap
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Protocol, TextIO

from quire.cli.exits import exit_of
from quire.cli.plain import plain
from quire.core.errors import QuireError

STEP_ROWS = 1000
"""Rows whose widths are measured together: a listing of millions is written in steps."""
COLUMN_WIDTH_MIN = 16
"""A last column narrower than this is not worth wrapping into."""


@dataclass(frozen=True, slots=True)
class Row:
    """One row: its cells as text, and the object it is in JSON."""

    cells: Sequence[str]
    data: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Listing:
    """Rows under columns. `columns` that begin with `>` are aligned to the right."""

    columns: Sequence[str]
    rows: Iterable[Row]
    empty: str = ""
    """What to say instead of an empty table."""
    closing: str = ""
    """A last line, for people only."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """Names and values."""

    lines: Sequence[tuple[str, str]]
    data: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Note:
    """What was done."""

    text: str
    data: Any = field(default_factory=dict)


Shown = Listing | Facts | Note


class Output(Protocol):
    """Where a command's value goes."""

    def show(self, value: Shown) -> None:
        """Write the value to stdout."""

    def fail(self, error: QuireError) -> None:
        """Say on stderr what went wrong and what to do next."""


class JsonOutput:
    """One JSON document on stdout; an error is one JSON object on stderr."""

    def show(self, value: Shown) -> None:
        out = sys.stdout
        if not isinstance(value, Listing):
            out.write(_json(plain(value.data)) + "\n")
            return
        before = "["
        for row in value.rows:
            out.write(f"{before}\n{_json(plain(row.data))}")
            before = ","
        out.write("[]\n" if before == "[" else "\n]\n")

    def fail(self, error: QuireError) -> None:
        way_out = exit_of(error)
        told = {
            "kind": type(error).__name__,
            "what": error.what,
            "next": error.hint or way_out.next_step,
            "where": plain(error.where),
            "exit_code": way_out.code,
        }
        sys.stderr.write(_json({"error": told}) + "\n")


class TextOutput:
    """Text for people."""

    def show(self, value: Shown) -> None:
        look = Look.of(sys.stdout)
        if isinstance(value, Listing):
            lines = _listing(value, look)
        elif isinstance(value, Facts):
            lines = _facts(value, look)
        else:
            lines = iter((value.text,))
        for line in lines:
            sys.stdout.write(line + "\n")

    def fail(self, error: QuireError) -> None:
        look = Look.of(sys.stderr)
        place = ", ".join(f"{name}={value!r}" for name, value in error.where.items())
        told = f"{error.what} ({place})" if place else error.what
        for name, style, text in (
            ("error", "1;31", told),
            ("next", "1", error.hint or exit_of(error).next_step),
        ):
            first, *others = _wrapped(text, look.width - 7 if look.width else 0)
            sys.stderr.write(
                "\n".join([look.styled(f"{name}:".ljust(7), style) + first, *(" " * 7 + o for o in others)])
            )
            sys.stderr.write("\n")


@dataclass(frozen=True, slots=True)
class Look:
    """What the stream can show: its width (0: no limit) and whether it has colours."""

    width: int
    colours: bool

    @classmethod
    def of(cls, stream: TextIO) -> Look:
        if not stream.isatty():
            return cls(0, False)
        plain_terminal = bool(os.environ.get("NO_COLOR")) or os.environ.get("TERM") == "dumb"
        return cls(shutil.get_terminal_size().columns, not plain_terminal)

    def styled(self, text: str, style: str) -> str:
        return f"\x1b[{style}m{text}\x1b[0m" if self.colours else text


def width_of(text: str) -> int:
    """Columns that a text takes on a terminal: East Asian wide characters two, combining ones none.

    >>> width_of("größe"), width_of("数据")
    (5, 4)
    """
    if text.isascii():
        return len(text)
    return sum(0 if unicodedata.combining(each) else 1 + (unicodedata.east_asian_width(each) in "WF") for each in text)


def _listing(listing: Listing, look: Look) -> Iterator[str]:
    rows = iter(listing.rows)
    step = list(islice(rows, STEP_ROWS))
    if not step and listing.empty:
        yield listing.empty
        return
    titles = [title.removeprefix(">") for title in listing.columns]
    right = [title.startswith(">") for title in listing.columns]
    header: list[Sequence[str]] = [titles]
    while step:
        cells = [[_one_line(cell) for cell in row.cells] for row in step]
        widths = [max(map(width_of, column)) for column in zip(*header, *cells)]
        if header:
            yield look.styled(_line(titles, widths, right), "1")
            header = []
        for each in cells:
            yield from _row(each, widths, right, look)
        step = list(islice(rows, STEP_ROWS))
    if listing.closing:
        yield ""
        yield listing.closing


def _row(cells: list[str], widths: list[int], right: list[bool], look: Look) -> Iterator[str]:
    indent = sum(widths[:-1]) + 2 * (len(widths) - 1)
    room = look.width - indent
    if not look.width or width_of(cells[-1]) <= room:
        yield _line(cells, widths, right)
        return
    if room < COLUMN_WIDTH_MIN:  # no room beside the other columns: continue below them
        indent, room = 4, look.width - 4
        yield _line(cells[:-1], widths, right)
        yield from (" " * indent + part for part in _wrapped(cells[-1], room))
        return
    first, *others = _wrapped(cells[-1], room)
    yield _line([*cells[:-1], first], widths, right)
    yield from (" " * indent + part for part in others)


def _line(cells: Sequence[str], widths: list[int], right: list[bool]) -> str:
    parts = []
    for cell, width, to_the_right in zip(cells, widths, right):
        space = " " * (width - width_of(cell))
        parts.append(space + cell if to_the_right else cell + space)
    return "  ".join(parts).rstrip()


def _facts(facts: Facts, look: Look) -> Iterator[str]:
    indent = max(width_of(name) for name, _ in facts.lines) + 2
    for name, text in facts.lines:
        first, *others = _wrapped(_one_line(text), look.width - indent if look.width else 0)
        yield look.styled(name + " " * (indent - width_of(name)), "1") + first
        yield from (" " * indent + each for each in others)


def _wrapped(text: str, width: int) -> list[str]:
    """The text in lines of at most `width` columns; paths and other long words stay whole."""
    if width <= 0:
        return [text]
    return textwrap.wrap(text, width, break_long_words=False, break_on_hyphens=False) or [""]


def _one_line(text: str) -> str:
    """Names come from people: what would move the cursor is shown, not done."""
    return text if text.isprintable() else "".join(each if each.isprintable() else repr(each)[1:-1] for each in text)


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(", ", ": "))
