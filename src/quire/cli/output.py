"""What a command shows: a value, given to an `Output` that writes it as text for people or as JSON for programs.

Terms
  Listing   rows under columns           JSON: an array of objects, one row per line
  Facts     names and values             JSON: one object
  Note      one sentence about a deed    JSON: one object
  Report    facts and listings together  JSON: one object
  Tree      nodes below nodes            JSON: an array of the roots

Rules
  1. A command shows exactly one value; so stdout holds one JSON document, or nothing when an error is told on stderr. Only what
     has no end (`quire.cli.tailing`) is written row by row.
  2. Text fits the terminal (`quire.cli.tables`). Where there is no terminal nothing is wrapped or cut, so that `grep` and `awk`
     see whole lines.
  3. Colours only on a terminal, and not if NO_COLOR is set or TERM is dumb.
  4. Rows may be an iterator: they are written as they come, JSON in bounded memory, text in steps of `STEP_ROWS`.
  5. Text shows what would move the cursor or turn the line around instead of doing it (`plain.visible`), wherever it
     comes from; JSON has every character as it is.

Not thread-safe: one command, one output.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from shutil import get_terminal_size
from typing import Any, Protocol, TextIO

from quire.cli.error_text import for_people, for_programs, next_step
from quire.cli.formatting import plain, visible
from quire.cli.tables import lines_of, plan
from quire.cli.tables import width_of as width_of
from quire.cli.tables import wrapped as wrapped
from quire.core.errors import QuireError

STEP_ROWS = 1000
"""Rows whose widths are measured together: a listing of millions is written in steps."""
LABEL_COLUMNS_MIN = 40
"""Room that a label has at any depth (rule 2)."""

GUIDES = ("├── ", "└── ", "│   ", "    ")
GUIDES_ASCII = ("+-- ", "`-- ", "|   ", "    ")
"""Before a node, before the last one, and what stands below each of them."""


@dataclass(frozen=True)
class Row:
    """One row: its cells as text, and the object it is in JSON."""

    cells: Sequence[str]
    data: Any


@dataclass(frozen=True, kw_only=True)
class Listing:
    """Rows under columns. `columns` that begin with `>` are aligned to the right."""

    columns: Sequence[str]
    rows: Iterable[Row]
    empty: str = ""
    """What to say instead of an empty table."""
    closing: str = ""
    """Last lines, for people only."""


@dataclass(frozen=True, kw_only=True)
class Facts:
    """Names and values."""

    lines: Sequence[tuple[str, str]]
    data: Any


@dataclass(frozen=True, kw_only=True)
class Note:
    """What was done."""

    text: str
    data: Any


@dataclass(frozen=True, kw_only=True)
class Report:
    """Facts, listings and notes under each other. A part's own data is not written: `data` is all of it."""

    parts: Sequence[Facts | Listing | Note]
    data: Any


@dataclass(frozen=True)
class Node:
    """A node of a tree: its name, what is said of it, and the nodes below."""

    name: str
    text: str = ""
    below: Sequence[Node] = ()
    faded: bool = False
    """It is there only for what is below it."""


@dataclass(frozen=True, kw_only=True)
class Tree:
    """Nodes below nodes."""

    roots: Sequence[Node]
    data: Any
    empty: str = ""
    closing: str = ""


Shown = Listing | Facts | Note | Report | Tree


class Output(Protocol):
    """Where a command's value goes."""

    def show(self, value: Shown) -> None:
        """Write the value to stdout."""

    def fail(self, error: QuireError) -> None:
        """Say on stderr what went wrong and what to do next."""


class JsonOutput:
    """One JSON document on stdout; an error is one JSON object on stderr."""

    def show(self, value: Shown) -> None:
        for part in json_parts(value):
            sys.stdout.write(part)

    def fail(self, error: QuireError) -> None:
        sys.stderr.write(_json({"error": for_programs(error)}) + "\n")


class TextOutput:
    """Text for people."""

    def show(self, value: Shown) -> None:
        for part in text_parts(value, Look.of(sys.stdout)):
            sys.stdout.write(part)

    def fail(self, error: QuireError) -> None:
        look = Look.of(sys.stderr)
        for name, style, text in (("error", "1;31", for_people(error)), ("next", "1", visible(next_step(error)))):
            first, *others = wrapped(text, look.width - 7 if look.width else 0)
            lines = [look.styled(f"{name}:".ljust(7), style) + first, *(" " * 7 + other for other in others)]
            sys.stderr.write("\n".join(lines) + "\n")


@dataclass(frozen=True)
class Look:
    """What the stream can show: its width (0: no limit) and whether it has colours."""

    width: int
    colours: bool

    @classmethod
    def of(cls, stream: TextIO) -> Look:
        if not stream.isatty():
            return cls(0, False)

        plain_terminal = bool(os.environ.get("NO_COLOR")) or os.environ.get("TERM") == "dumb"
        return cls(get_terminal_size().columns, not plain_terminal)

    def styled(self, text: str, style: str) -> str:
        return f"\x1b[{style}m{text}\x1b[0m" if self.colours else text


def json_parts(value: Shown) -> Iterator[str]:
    """A value as one JSON document, in parts (rule 4)."""
    if not isinstance(value, Listing):
        yield _json(plain(value.data)) + "\n"
        return
    before = "["
    for row in value.rows:
        yield f"{before}\n{_json(plain(row.data))}"
        before = ","
    yield "[]\n" if before == "[" else "\n]\n"


def text_parts(value: Shown, look: Look) -> Iterator[str]:
    """A value as lines of text."""
    for line in _lines(value, look):
        yield line + "\n"


def _lines(value: Shown, look: Look) -> Iterator[str]:
    if isinstance(value, Listing):
        return _listing(value, look)
    if isinstance(value, Facts):
        return _facts(value, look)
    if isinstance(value, Report):
        return _report(value, look)
    if isinstance(value, Tree):
        return tree_lines(value, look)
    return iter(wrapped(visible(value.text), look.width))


def _report(report: Report, look: Look) -> Iterator[str]:
    for number, part in enumerate(report.parts):
        if number:
            yield ""
        yield from _lines(part, look)


def _listing(listing: Listing, look: Look) -> Iterator[str]:
    rows = iter(listing.rows)
    step = list(islice(rows, STEP_ROWS))
    if not step and listing.empty:
        yield visible(listing.empty)
        return
    titled = True
    while step:
        cells = [[visible(cell) for cell in row.cells] for row in step]
        layout = plan(listing.columns, cells, look.width, titled)
        if titled:
            yield look.styled(layout.header, "1")
            titled = False
        for each in cells:
            yield from lines_of(each, layout)
        step = list(islice(rows, STEP_ROWS))
    if listing.closing:
        yield ""
        for line in listing.closing.splitlines():
            yield from wrapped(visible(line), look.width)


def json_line(data: Any) -> str:
    """A value as one line of JSON."""
    return _json(plain(data)) + "\n"


def _facts(facts: Facts, look: Look) -> Iterator[str]:
    indent = max(width_of(name) for name, _ in facts.lines) + 2
    for name, text in facts.lines:
        first, *others = wrapped(visible(text), look.width - indent if look.width else 0)
        yield look.styled(name + " " * (indent - width_of(name)), "1") + first
        yield from (" " * indent + each for each in others)


def _json(value: Any) -> str:
    any_character = (sys.stdout.encoding or "utf-8").lower().startswith("utf")
    return json.dumps(value, ensure_ascii=not any_character, separators=(", ", ": "))


# ── trees ─────────────────────────────────────────────────────────────────────────────────────────────────────────────
def tree_lines(tree: Tree, look: Look) -> Iterator[str]:
    """The lines of a tree."""
    if not tree.roots:
        yield visible(tree.empty)
        return
    guides = GUIDES if _shows("├─└│") else GUIDES_ASCII
    for root in tree.roots:
        yield from _drawn(root, look, guides)
    if tree.closing:
        yield ""
        for line in tree.closing.splitlines():
            yield from wrapped(visible(line), look.width)


def _shows(text: str) -> bool:
    try:
        text.encode(sys.stdout.encoding or "utf-8")
    except UnicodeEncodeError:
        return False
    return True


def _drawn(root: Node, look: Look, guides: tuple[str, str, str, str]) -> Iterator[str]:
    """No recursion: forks of forks may be many deep."""
    node, last, below_node, below_last = guides
    todo: list[tuple[Node, str, str]] = [(root, "", "")]
    while todo:
        each, before, below = todo.pop()
        yield from _label(each, before, below + (below_node if each.below else ""), look)
        children = list(each.below)
        for child in reversed(children):
            is_last = child is children[-1]
            todo.append((child, below + (last if is_last else node), below + (below_last if is_last else below_node)))


def _label(each: Node, before: str, below: str, look: Look) -> Iterator[str]:
    name = visible(each.name)
    text = f"{name}  {visible(each.text)}" if each.text else name
    room = look.width - max(len(before), len(below))
    first, *others = wrapped(text, max(room, LABEL_COLUMNS_MIN) if look.width else 0)
    head = look.styled(before, "2") if before else ""
    if each.faded:
        yield head + look.styled(first, "2")
    else:
        yield head + look.styled(first[: len(name)], "1") + first[len(name) :]
    for other in others:
        yield look.styled(below, "2") + (look.styled(other, "2") if each.faded else other)
