"""Lays out rows as lines of text, fitted to the width of the terminal.

Terms
  natural   the width of a column in which nothing is wrapped
  below     cells for which the terminal has no room, written under their row, indented and with their column's title

Rules
  1. Without a terminal every row is one line: `grep` and `awk` see whole lines.
  2. On a terminal, a table that is too wide is fitted by the first of these that suffices: wrap its last column; wrap its long
     texts; move its last columns below.
  3. Words are not broken, nor is a number separated from its unit or a date from its time. Only a word that is wider than the
     terminal makes a line too wide.

Pure functions; a `RunningTable` belongs to one command. On a pipe, no further modules are loaded.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from re import findall, sub
from typing import TYPE_CHECKING
from unicodedata import combining, east_asian_width

import msgspec

from quire.cli.formatting import visible

if TYPE_CHECKING:
    from quire.cli.output import TerminalStyle

COLUMN_WIDTH_MIN = 16
"""Minimum width of a column that is wrapped."""
LONG_TEXT = 24
"""Columns wider than this may be wrapped; a timestamp is narrower."""
BETWEEN = 2
INDENT = 4
"""Indentation of cells that are below."""
GLUED = r"(?<=\d) (?=(?:[KMGT]i)?B\b|s\b|min\b|h\b|days?\b)|(?<=\d{4}-\d\d-\d\d) (?=\d\d:)"
"""Spaces at which lines are not broken (rule 3)."""
GLUE = "\0"


class Plan(msgspec.Struct, frozen=True):
    """The layout of a table: the widths of its columns, and how many of them are side by side."""

    titles: Sequence[str]
    right: Sequence[bool]
    widths: list[int]
    beside: int
    width: int

    @property
    def header(self) -> str:
        """The line of titles."""
        return _line(self.titles[: self.beside], self.widths, self.right)


def plan(columns: Sequence[str], rows: Sequence[Sequence[str]], width: int, titled: bool = True) -> Plan:
    """Compute the layout of rows (rule 2). `width` 0 means no terminal. A title that begins with `>` is right-aligned."""
    titles = [title.removeprefix(">") for title in columns]
    right = [title.startswith(">") for title in columns]
    cells = [*([titles] if titled else []), *rows]
    natural = [max(map(width_of, column)) for column in zip(*cells)]
    if not width or _total(natural) <= width:
        return Plan(titles, right, natural, len(titles), width)
    room = width - _total(natural[:-1]) - BETWEEN
    if room >= max(COLUMN_WIDTH_MIN, width_of(titles[-1])):
        return Plan(titles, right, [*natural[:-1], room], len(titles), width)
    narrowed = _narrowed(cells, natural, right, width)
    if narrowed is not None:
        return Plan(titles, right, narrowed, len(titles), width)
    beside = len(titles) - 1
    while beside > 1 and _total(natural[:beside]) > width:
        beside -= 1
    return Plan(titles, right, [min(natural[0], width), *natural[1:]], beside, width)


def _narrowed(cells: Sequence[Sequence[str]], natural: list[int], right: list[bool], width: int) -> list[int] | None:
    """Return widths at which long texts are wrapped, the widest the most; `None` if that is not sufficient."""
    low = [
        most if to_the_right or most <= LONG_TEXT else max(COLUMN_WIDTH_MIN, *map(_longest_word, column))
        for most, to_the_right, column in zip(natural, right, zip(*cells))
    ]
    if _total(low) > width:
        return None
    widths = list(natural)
    while (excess := _total(widths) - width) > 0:
        most = max(range(len(widths)), key=lambda place: widths[place] - low[place])
        widths[most] -= min(excess, max((widths[most] - low[most] + 1) // 2, 1))
    return widths


def lines_of(cells: Sequence[str], plan: Plan) -> Iterator[str]:
    """Yield the lines of one row."""
    if plan.width:
        yield from _fitted(cells, plan)
    else:
        yield _line(cells, plan.widths, plan.right)


def _fitted(cells: Sequence[str], plan: Plan) -> Iterator[str]:
    columns = [wrapped(cell, width) for cell, width in zip(cells[: plan.beside], plan.widths)]
    below = list(zip(plan.titles, cells))[plan.beside :]
    if plan.beside == len(cells) and max(map(width_of, columns[-1])) > max(plan.widths[-1], 1):
        below = [(plan.titles[-1], cells[-1])]  # it has a word that is wider than the last column
        columns[-1] = [""]
    for number in range(max(map(len, columns))):
        yield _line([column[number] if number < len(column) else "" for column in columns], plan.widths, plan.right)
    texts = [f"{title}: {cell}" for title, cell in below if cell not in ("", "-")]
    joined = "; ".join(texts)
    for part in [joined] if texts and width_of(joined) <= plan.width - INDENT else texts:
        first, *others = wrapped(part, plan.width - INDENT - BETWEEN)
        yield " " * INDENT + first
        yield from (" " * (INDENT + BETWEEN) + line for line in others)


class RunningTable:
    """A table whose rows arrive one by one: the first determines the layout, later ones may widen it."""

    def __init__(self, columns: Sequence[str], style: TerminalStyle) -> None:
        self._columns = columns
        self._style = style
        self._plan: Plan | None = None

    def lines(self, cells: Sequence[str]) -> str:
        """Return the lines of the next row, with the titles before the first."""
        shown = [visible(cell) for cell in cells]
        rows, lines = [shown], []
        if self._plan is None:
            lines.append(self._style.styled(plan(self._columns, rows, self._style.width).header, "1"))
        else:
            rows.append([" " * width for width in self._plan.widths])  # no narrower than before
        self._plan = plan(self._columns, rows, self._style.width)
        return "".join(f"{line}\n" for line in (*lines, *lines_of(shown, self._plan)))


# ── words ─────────────────────────────────────────────────────────────────────────────────────────────────────────────
def width_of(text: str) -> int:
    """Return the columns that a text takes on a terminal: East Asian wide characters take two, combining ones none.

    >>> width_of("größe"), width_of("数据")
    (5, 4)
    """
    if text.isascii():
        return len(text)

    return sum(0 if combining(character) else 1 + (east_asian_width(character) in "WF") for character in text)


def wrapped(text: str, width: int) -> list[str]:
    """Wrap a text into lines of at most `width` columns (rule 3).

    >>> wrapped("has 2 chunks, 64.0 MiB since 2026-05-01 14:30:00Z", 22)
    ['has 2 chunks, 64.0 MiB', 'since', '2026-05-01 14:30:00Z']
    """
    if width <= 0 or width_of(text) <= width:
        return [text]

    lines, line = [], ""
    for word in findall(r" *[^ ]+", sub(GLUED, GLUE, text)):
        if line and width_of(line + word) > width:
            lines.append(line)
            line = word.lstrip(" ")
        else:
            line += word
    return [text.replace(GLUE, " ") for text in (*lines, line)]


def _longest_word(text: str) -> int:
    return max(map(width_of, sub(GLUED, GLUE, text).split(" ")))


def _total(widths: Sequence[int]) -> int:
    return sum(widths) + BETWEEN * (len(widths) - 1)


def _line(cells: Sequence[str], widths: Sequence[int], right: Sequence[bool]) -> str:
    parts = []
    for cell, width, to_the_right in zip(cells, widths, right):
        space = " " * (width - width_of(cell))
        parts.append(space + cell if to_the_right else cell + space)
    return (" " * BETWEEN).join(parts).rstrip()
