"""What a command shows: a value, which an `Output` writes as text for people or as JSON for programs.

  Listing   rows under columns           JSON: an array of objects, one row per line
  Facts     names and values             JSON: one object
  Note      one sentence about a result  JSON: one object
  Report    facts and listings together  JSON: one object
  Tree      nodes below nodes            JSON: an array of the roots

A command shows exactly one value, so stdout holds one JSON document, or nothing when an error goes to stderr. Only endless rows
(`follow`) are written one by one, as JSON lines. Rows of a listing may be an iterator: JSON is written in bounded memory, text
in steps of `STEP_ROWS`.

Text fits the terminal (`quire.cli.tables`); without a terminal nothing is wrapped or cut, so that `grep` and `awk` see whole
lines. Colours need a terminal, no NO_COLOR, and a TERM that is not dumb. Text escapes control and bidirectional characters
(`formatting.visible`); JSON has every character as it is.

Not thread-safe: one command, one output.
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
"""Rows whose widths are measured together: a listing of millions is written in steps."""
COLUMNS_UNKNOWN = 80
"""Width of a terminal that does not say how wide it is."""
LABEL_COLUMNS_MIN = 40
"""Width of a label at any depth."""

GUIDES = ("├── ", "└── ", "│   ", "    ")
GUIDES_ASCII = ("+-- ", "`-- ", "|   ", "    ")
"""Before a node, before the last node, and below each of these."""


class ListingRow(msgspec.Struct, frozen=True):
    """One row: its cells as text, and the object it is in JSON."""

    cells: Sequence[str]
    data: Any


class Listing(msgspec.Struct, frozen=True, kw_only=True):
    """Rows under columns. `columns` that begin with `>` are aligned to the right."""

    columns: Sequence[str]
    rows: Iterable[ListingRow]
    empty: str = ""
    """What to say instead of an empty table."""
    closing: str = ""
    """Last lines, for people only."""


class Facts(msgspec.Struct, frozen=True, kw_only=True):
    """Names and values."""

    lines: Sequence[tuple[str, str]]
    data: Any


class Note(msgspec.Struct, frozen=True, kw_only=True):
    """What was done."""

    text: str
    data: Any


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """Facts, listings and notes under each other. A part's own data is not written: `data` is all of it."""

    parts: Sequence[Facts | Listing | Note]
    data: Any


class Node(msgspec.Struct, frozen=True):
    """A node of a tree: its name, what is said of it, and the nodes below."""

    name: str
    text: str = ""
    below: Sequence[Node] = ()
    faded: bool = False
    """It is shown only for the nodes below it."""


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
    """Where a command's value goes."""

    def show(self, value: Shown) -> None:
        """Write the value to stdout."""

    def fail(self, error: QuireError) -> None:
        """Say on stderr what went wrong and what to do next."""


class JsonOutput:
    """One JSON document on stdout; an error is one JSON object on stderr."""

    def show(self, value: Shown) -> None:
        write_out(json_parts(value))

    def fail(self, error: QuireError) -> None:
        sys.stderr.write(_json({"error": for_programs(error)}) + "\n")


class TextOutput:
    """Text for people."""

    def show(self, value: Shown) -> None:
        write_out(text_parts(value, Look.of(sys.stdout)))

    def fail(self, error: QuireError) -> None:
        look = Look.of(sys.stderr)
        for name, style, text in (("error", "1;31", for_people(error)), ("next", "1", visible(next_step(error)))):
            first, *others = wrapped(text, look.width - 7 if look.width else 0)
            lines = [look.styled(f"{name}:".ljust(7), style) + first, *(" " * 7 + other for other in others)]
            sys.stderr.write("\n".join(lines) + "\n")


def output_for(as_json: bool) -> Output:
    """JSON for programs, text for people."""
    return JsonOutput() if as_json else TextOutput()


def report_error(output: Output, error: QuireError) -> int:
    """Write what went wrong; the exit code."""
    try:
        output.fail(error)
        sys.stderr.flush()
    except BrokenPipeError:
        return pipe_closed()
    return exit_of(error).code


class Look(msgspec.Struct, frozen=True):
    """What the stream can show: its width (0: no limit) and whether it has colours."""

    width: int
    colours: bool

    @classmethod
    def of(cls, stream: TextIO) -> Look:
        if not stream.isatty():
            return cls(0, False)

        plain_terminal = bool(os.environ.get("NO_COLOR")) or os.environ.get("TERM") == "dumb"
        return cls(_terminal_columns(stream), not plain_terminal)

    def styled(self, text: str, style: str) -> str:
        return f"\x1b[{style}m{text}\x1b[0m" if self.colours else text


def _terminal_columns(stream: TextIO) -> int:
    """The width of a terminal: COLUMNS if it is set, else what the terminal says."""
    # `shutil.get_terminal_size` does the same; its module loads three compressors, which every command would wait for
    given = os.environ.get("COLUMNS", "")
    if given.isdecimal() and int(given):
        return int(given)
    try:
        return os.get_terminal_size(stream.fileno()).columns or COLUMNS_UNKNOWN
    except OSError:
        return COLUMNS_UNKNOWN


def json_parts(value: Shown) -> Iterator[str]:
    """A value as one JSON document, in parts."""
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
        for row in cells:
            yield from lines_of(row, layout)
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
        yield from (" " * indent + line for line in others)


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
        current, before, below = todo.pop()
        yield from _label(current, before, below + (below_node if current.below else ""), look)
        children = list(current.below)
        for child in reversed(children):
            is_last = child is children[-1]
            todo.append((child, below + (last if is_last else node), below + (below_last if is_last else below_node)))


def _label(node: Node, before: str, below: str, look: Look) -> Iterator[str]:
    name = visible(node.name)
    text = f"{name}  {visible(node.text)}" if node.text else name
    room = look.width - max(len(before), len(below))
    first, *others = wrapped(text, max(room, LABEL_COLUMNS_MIN) if look.width else 0)
    head = look.styled(before, "2") if before else ""
    if node.faded:
        yield head + look.styled(first, "2")
    else:
        yield head + look.styled(first[: len(name)], "1") + first[len(name) :]
    for other in others:
        yield look.styled(below, "2") + (look.styled(other, "2") if node.faded else other)


# ── endless rows ──────────────────────────────────────────────────────────────────────────────────────────────────────
POLL_SECONDS = 0.1
"""How often `follow` looks for new rows."""


def follow(columns: Sequence[str], new: Callable[[], Iterable[ListingRow]], *, as_json: bool) -> None:
    """Write and flush the rows that `new` returns, again and again, until Ctrl-C or SIGTERM; each call has the rows since the
    last one."""
    table = None if as_json else RunningTable(columns, Look.of(sys.stdout))
    with until_interrupted() as ending:
        while not ending.is_set():  # not `wait`: the handler that sets it runs in this very thread
            for row in new():
                write_out([json_line(row.data) if table is None else table.lines(row.cells)])
                if ending.is_set():
                    break
            _check_reader()
            time.sleep(POLL_SECONDS)


def _check_reader() -> None:
    """End the command when the reader of the pipe has gone, also while there are no rows: `| head -1` must not wait for a
    second row."""
    try:
        number = sys.stdout.fileno()
    except OSError:
        return  # no file: a test reads it
    poll = select.poll()
    poll.register(number, 0)
    if any(event & select.POLLERR for _, event in poll.poll(0)):
        raise BrokenPipeError


@contextmanager
def until_interrupted() -> Iterator[threading.Event]:
    """An event that Ctrl-C and SIGTERM set, instead of their usual effect; a second signal has that effect.

    An ignored signal stays ignored: a command started with `nohup … &` must survive when others are interrupted.
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


# ── stdout that cannot be written ─────────────────────────────────────────────────────────────────────────────────────
def write_out(parts: Iterable[str]) -> None:
    """Write to stdout and flush. A closed pipe stays a `BrokenPipeError`; anything else is a `StorageFault`."""
    try:
        for part in parts:
            sys.stdout.write(part)
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        raise unwritable(error) from error


def pipe_closed() -> int:
    """Discard what is still buffered, silently; the exit code."""
    _abandon_streams()
    return PIPE_CLOSED


def unwritable(error: OSError) -> StorageFault:
    """The error of an output that cannot be written, because a disk is full for instance."""
    _abandon_streams()
    return StorageFault(f"the output cannot be written: {error.strerror}", hint="check where the output goes")


def _abandon_streams() -> None:
    """Point streams that cannot be written at /dev/null: the interpreter would try again when it exits, and complain."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            os.dup2(nowhere, stream.fileno())
    os.close(nowhere)
