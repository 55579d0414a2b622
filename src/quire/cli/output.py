"""The values that commands return, and their output as text for users or JSON for programs.

  Listing   rows under columns           JSON: an array of objects, one row per line
  Facts     names and values             JSON: one object
  Note      one sentence about a result  JSON: one object
  Report    facts and listings together  JSON: one object
  Tree      nodes below nodes            JSON: an array of the roots

A command shows exactly one value, so stdout has one JSON document, or nothing if an error goes to stderr. Only endless rows
(`follow`) are written one by one, as JSON lines. Rows of a listing may be an iterator: JSON is written in bounded memory, text
in steps of `STEP_ROWS`.

Text is fitted to the terminal (`quire.cli.tables`); without a terminal nothing is wrapped or cut, so that `grep` and `awk` see
whole lines. Colours require a terminal, no NO_COLOR, and a TERM that is not dumb. Text escapes control and bidirectional
characters (`formatting.visible`); JSON contains every character unchanged.

Threads: one. One output per command.
"""

from __future__ import annotations

import json
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import Any, Protocol, TextIO

import msgspec

from quire.cli.errors import PIPE_CLOSED, exit_of, for_people, for_programs, next_step
from quire.cli.formatting import visible
from quire.cli.tables import RunningTable, lines_of, plan
from quire.cli.tables import width_of as width_of
from quire.cli.tables import wrapped as wrapped
from quire.core.errors import QuireError, StorageFault
from quire.core.json_values import plain

STEP_ROWS = 1000
"""Rows whose column widths are computed together: a listing of millions is written in steps."""
COLUMNS_UNKNOWN = 80
"""Assumed width of a terminal that does not report one."""
LABEL_COLUMNS_MIN = 40
"""Minimum width of a label in a tree, at any depth."""

GUIDES = ("├── ", "└── ", "│   ", "    ")
GUIDES_ASCII = ("+-- ", "`-- ", "|   ", "    ")
"""The prefix of a node, of the last node, and of the lines below each of these."""


class ListingRow(msgspec.Struct, frozen=True):
    """One row: its cells as text, and its object in JSON."""

    cells: Sequence[str]
    data: Any


class Listing(msgspec.Struct, frozen=True, kw_only=True):
    """Rows under columns. Columns whose title begins with `>` are right-aligned."""

    columns: Sequence[str]
    rows: Iterable[ListingRow]
    empty: str = ""
    """Text to show instead of an empty table."""
    closing: str | Callable[[], str] = ""
    """Lines after the table, or what returns them once all rows were read; not in JSON."""


class Facts(msgspec.Struct, frozen=True, kw_only=True):
    """Names and values."""

    lines: Sequence[tuple[str, str]]
    data: Any


class Note(msgspec.Struct, frozen=True, kw_only=True):
    """One sentence about a result."""

    text: str
    data: Any


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """Facts, listings and notes, one below the other. In JSON only `data` is written, not the data of the parts."""

    parts: Sequence[Facts | Listing | Note]
    data: Any


class Node(msgspec.Struct, frozen=True):
    """A node of a tree: its name, a description, and the nodes below it."""

    name: str
    text: str = ""
    below: Sequence[Node] = ()
    faded: bool = False
    """Whether the node is shown only because of the nodes below it."""


class Tree(msgspec.Struct, frozen=True, kw_only=True):
    """Nodes below nodes."""

    roots: Sequence[Node]
    data: Any
    empty: str = ""
    closing: str = ""


Shown = Listing | Facts | Note | Report | Tree


class CliResult(msgspec.Struct, frozen=True):
    """A value to show, if any, and the exit code to end with."""

    shown: Shown | None
    code: int


class Output(Protocol):
    """Writes the value or the error of a command."""

    def show(self, value: Shown) -> None:
        """Write the value to stdout."""

    def fail(self, error: QuireError) -> None:
        """Write to stderr what went wrong and what to do next."""


class JsonOutput:
    """One JSON document on stdout; an error is one JSON object on stderr."""

    def show(self, value: Shown) -> None:
        write_out(json_parts(value))

    def fail(self, error: QuireError) -> None:
        sys.stderr.write(_json({"error": for_programs(error)}) + "\n")


class TextOutput:
    """Text for users, on stdout; an error is text on stderr."""

    def show(self, value: Shown) -> None:
        write_out(text_parts(value, TerminalStyle.of(sys.stdout)))

    def fail(self, error: QuireError) -> None:
        style = TerminalStyle.of(sys.stderr)
        for name, codes, text in (("error", "1;31", for_people(error)), ("next", "1", visible(next_step(error)))):
            first, *others = wrapped(text, style.width - 7 if style.width else 0)
            lines = [style.styled(f"{name}:".ljust(7), codes) + first, *(" " * 7 + other for other in others)]
            sys.stderr.write("\n".join(lines) + "\n")


def output_for(as_json: bool) -> Output:
    """Return the output for JSON or for text."""
    return JsonOutput() if as_json else TextOutput()


def report_error(output: Output, error: QuireError) -> int:
    """Report an error and return the exit code."""
    try:
        output.fail(error)
        sys.stderr.flush()
    except BrokenPipeError:
        return pipe_closed()
    return exit_of(error).code


class TerminalStyle(msgspec.Struct, frozen=True):
    """What a stream can display: its width in columns (0: no limit) and whether it has colours."""

    width: int
    colours: bool

    @classmethod
    def of(cls, stream: TextIO) -> TerminalStyle:
        if not stream.isatty():
            return cls(0, False)

        plain_terminal = bool(os.environ.get("NO_COLOR")) or os.environ.get("TERM") == "dumb"
        return cls(_terminal_columns(stream), not plain_terminal)

    def styled(self, text: str, style: str) -> str:
        return f"\x1b[{style}m{text}\x1b[0m" if self.colours else text


def _terminal_columns(stream: TextIO) -> int:
    """Return the width of a terminal: COLUMNS if it is set, else the width that the terminal reports."""
    # `shutil.get_terminal_size` does the same, but its module loads three compressors, which would slow down every command
    given = os.environ.get("COLUMNS", "")
    if given.isdecimal() and int(given):
        return int(given)
    try:
        return os.get_terminal_size(stream.fileno()).columns or COLUMNS_UNKNOWN
    except OSError:
        return COLUMNS_UNKNOWN


def json_parts(value: Shown, *, ascii_only: bool | None = None) -> Iterator[str]:
    """Yield a value as one JSON document, in parts. By default stdout determines whether it is ASCII."""
    if not isinstance(value, Listing):
        yield _json(plain(value.data), ascii_only) + "\n"
        return
    before = "["
    for row in value.rows:
        yield f"{before}\n{_json(plain(row.data), ascii_only)}"
        before = ","
    yield "[]\n" if before == "[" else "\n]\n"


def text_parts(value: Shown, style: TerminalStyle) -> Iterator[str]:
    """Yield a value as lines of text."""
    for line in _lines(value, style):
        yield line + "\n"


def _lines(value: Shown, style: TerminalStyle) -> Iterator[str]:
    if isinstance(value, Listing):
        return _listing(value, style)
    if isinstance(value, Facts):
        return _facts(value, style)
    if isinstance(value, Report):
        return _report(value, style)
    if isinstance(value, Tree):
        return tree_lines(value, style)
    return iter(wrapped(visible(value.text), style.width))


def _report(report: Report, style: TerminalStyle) -> Iterator[str]:
    for number, part in enumerate(report.parts):
        if number:
            yield ""
        yield from _lines(part, style)


def _listing(listing: Listing, style: TerminalStyle) -> Iterator[str]:
    columns = [visible(column) for column in listing.columns]  # a title may be the name of a table in a user's database
    rows = iter(listing.rows)
    step = list(islice(rows, STEP_ROWS))
    if not step and listing.empty:
        yield visible(listing.empty)
        return
    titled = True
    while step:
        cells = [[visible(cell) for cell in row.cells] for row in step]
        layout = plan(columns, cells, style.width, titled)
        if titled:
            yield style.styled(layout.header, "1")
            titled = False
        for row in cells:
            yield from lines_of(row, layout)
        step = list(islice(rows, STEP_ROWS))
    if closing := listing.closing if isinstance(listing.closing, str) else listing.closing():
        yield ""
        for line in closing.splitlines():
            yield from wrapped(visible(line), style.width)


def json_line(data: Any) -> str:
    """Return a value as one line of JSON."""
    return _json(plain(data)) + "\n"


def _facts(facts: Facts, style: TerminalStyle) -> Iterator[str]:
    indent = max(width_of(name) for name, _ in facts.lines) + 2
    for name, text in facts.lines:
        first, *others = wrapped(visible(text), style.width - indent if style.width else 0)
        yield style.styled(name + " " * (indent - width_of(name)), "1") + first
        yield from (" " * indent + line for line in others)


def is_ascii_only() -> bool:
    """Return whether JSON on stdout must be ASCII, because its encoding has not every character."""
    return not (sys.stdout.encoding or "utf-8").lower().startswith("utf")


def _json(value: Any, ascii_only: bool | None = None) -> str:
    escaped = is_ascii_only() if ascii_only is None else ascii_only
    return json.dumps(value, ensure_ascii=escaped, separators=(", ", ": "))


# ── trees ─────────────────────────────────────────────────────────────────────────────────────────────────────────────
def tree_lines(tree: Tree, style: TerminalStyle) -> Iterator[str]:
    """Yield the lines of a tree."""
    if not tree.roots:
        yield visible(tree.empty)
        return
    guides = GUIDES if _shows("├─└│") else GUIDES_ASCII
    for root in tree.roots:
        yield from _drawn(root, style, guides)
    if tree.closing:
        yield ""
        for line in tree.closing.splitlines():
            yield from wrapped(visible(line), style.width)


def _shows(text: str) -> bool:
    try:
        text.encode(sys.stdout.encoding or "utf-8")
    except UnicodeEncodeError:
        return False
    return True


def _drawn(root: Node, style: TerminalStyle, guides: tuple[str, str, str, str]) -> Iterator[str]:
    """Yield the lines of one root. Not recursive: forks of forks may be nested deeply."""
    node, last, below_node, below_last = guides
    todo: list[tuple[Node, str, str]] = [(root, "", "")]
    while todo:
        current, before, below = todo.pop()
        yield from _label(current, before, below + (below_node if current.below else ""), style)
        children = list(current.below)
        for child in reversed(children):
            is_last = child is children[-1]
            todo.append((child, below + (last if is_last else node), below + (below_last if is_last else below_node)))


def _label(node: Node, before: str, below: str, style: TerminalStyle) -> Iterator[str]:
    name = visible(node.name)
    text = f"{name}  {visible(node.text)}" if node.text else name
    room = style.width - max(len(before), len(below))
    first, *others = wrapped(text, max(room, LABEL_COLUMNS_MIN) if style.width else 0)
    head = style.styled(before, "2") if before else ""
    if node.faded:
        yield head + style.styled(first, "2")
    else:
        yield head + style.styled(first[: len(name)], "1") + first[len(name) :]
    for other in others:
        yield style.styled(below, "2") + (style.styled(other, "2") if node.faded else other)


# ── endless rows ──────────────────────────────────────────────────────────────────────────────────────────────────────
POLL_SECONDS = 0.1
"""How often `follow` polls for new rows."""


def follow(columns: Sequence[str], new: Callable[[], Iterable[ListingRow]], *, as_json: bool) -> None:
    """Write and flush the rows that `new` returns, repeatedly, until Ctrl-C or SIGTERM. Each call of `new` returns the rows
    since the previous call."""
    table = None if as_json else RunningTable(columns, TerminalStyle.of(sys.stdout))
    with until_interrupted() as ending:
        while not ending.is_set():  # not `wait`: the signal handler that sets it runs in this thread
            for row in new():
                write_out([json_line(row.data) if table is None else table.lines(row.cells)])
                if ending.is_set():
                    break
            _check_reader()
            time.sleep(POLL_SECONDS)


def _check_reader() -> None:
    """Raise `BrokenPipeError` if the reader of the pipe has closed it, even if there are no rows to write: `| head -1` must not
    wait for a second row."""
    try:
        number = sys.stdout.fileno()
    except OSError:
        return  # not a file: a test captures the output
    poll = select.poll()
    poll.register(number, 0)
    if any(event & select.POLLERR for _, event in poll.poll(0)):
        raise BrokenPipeError


@contextmanager
def until_interrupted() -> Iterator[threading.Event]:
    """Yield an event that Ctrl-C and SIGTERM set instead of their usual effect. A second signal has its usual effect.

    An ignored signal stays ignored: a command started with `nohup … &` must not be interrupted together with others.
    """
    stop = threading.Event()

    def note(number: int, _: object) -> None:
        stop.set()
        signal.signal(number, before[signal.Signals(number)])

    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    before = {number: handler for number, handler in handlers.items() if handler is not signal.SIG_IGN}
    for number in before:
        signal.signal(number, note)
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


# ── writing to stdout ─────────────────────────────────────────────────────────────────────────────────────────────────
def write_out(parts: Iterable[str]) -> None:
    """Write to stdout and flush. A closed pipe raises `BrokenPipeError`, any other error `StorageFault`."""
    try:
        for part in parts:
            sys.stdout.write(part)
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        raise unwritable(error) from error


def pipe_closed() -> int:
    """Discard buffered output silently and return the exit code."""
    _abandon_streams()
    return PIPE_CLOSED


def unwritable(error: OSError) -> StorageFault:
    """Return the error for output that cannot be written, for example because the disk is full."""
    _abandon_streams()
    return StorageFault(f"the output cannot be written: {error.strerror}", hint="check where the output goes")


def _abandon_streams() -> None:
    """Redirect streams that cannot be written to /dev/null; otherwise the interpreter flushes them at exit and reports it."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            os.dup2(nowhere, stream.fileno())
    os.close(nowhere)
