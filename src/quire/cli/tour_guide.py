"""How the tour talks to people, and who looks on meanwhile.

Importing it loads no rich: the guide does when it is made.
"""

from __future__ import annotations

import os
import shlex
import shutil
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from quire.cli.output import Look, Tree
from quire.cli.tree_drawing import tree_lines
from quire.manifest.tables import CHUNK_CATALOG

if TYPE_CHECKING:
    from rich.console import JustifyMethod

    from quire.cli.output import Node
    from quire.store.store import Store


NEXT = (
    "tree --sizes",
    "why shop",
    "snapshot diff shop before",
    "fork shop mine",
    "retention plan shop",
    "jobs ls",
    "gc --dry-run",
    "feed tail --limit 5",
    "doctor",
)
"""What to try next: real commands."""


class Onlooker:
    """Reads snapshots of the catalog in its own thread, and counts those that show half a batch."""

    def __init__(self, store: Store, batch_ops: int) -> None:
        self.snapshots = 0
        self.halves = 0
        self._store = store
        self._batch_ops = batch_ops
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._look, name="onlooker")

    def __enter__(self) -> Onlooker:
        self._before = self._rows()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._done.wait(0.002):
            self.halves += bool((self._rows() - self._before) % self._batch_ops)
            self.snapshots += 1

    def _rows(self) -> int:
        with self._store.manifest.read() as txn:
            return txn.count(CHUNK_CATALOG)


class Guide:
    """Tells people what happens; says nothing when a program listens."""

    def __init__(self, *, quiet: bool) -> None:
        from rich.console import Console

        self._console = Console(quiet=quiet, highlight=False, markup=False, emoji=False)

    def title(self, title: str, text: str) -> None:
        """A step begins."""
        from rich.text import Text

        self._console.print()
        self._console.print(Text.assemble((title, "bold cyan"), " · ", (text, "dim")))

    def say(self, text: str, style: str = "") -> None:
        """One line about the step."""
        from rich.padding import Padding
        from rich.text import Text

        self._console.print(Padding(Text(text, style=style), (0, 0, 0, 2), expand=False))

    def table(self, columns: list[str], rows: list[list[str]]) -> None:
        """Rows, the last column as wide as there is room; columns that begin with `>` are aligned to the right."""
        from rich.box import SIMPLE_HEAD
        from rich.padding import Padding
        from rich.table import Table
        from rich.text import Text

        table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold")
        for name in columns:
            justify: JustifyMethod = "right" if name.startswith(">") else "left"
            table.add_column(name.removeprefix(">"), justify=justify, no_wrap=name != columns[-1])
        for row in rows:
            table.add_row(*(Text(cell, overflow="ellipsis", no_wrap=True) for cell in row))
        self._console.print(Padding(table, (0, 0, 0, 2), expand=False))

    def tree(self, root: Node) -> None:
        """A lineage, as `quire tree` draws it."""
        from rich.text import Text

        look = Look(self._console.width - 2, self._console.is_terminal and not self._console.no_color)
        for line in tree_lines(Tree(roots=[root], data=None), look):
            self._console.print(Text.from_ansi(f"  {line}"), soft_wrap=True)

    @contextmanager
    def progress(self, text: str, total: int) -> Iterator[Callable[[int], None]]:
        """A bar with the rate and the time that is left; only on a terminal."""
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        columns = (TextColumn(f"  {text}"), BarColumn(bar_width=30), MofNCompleteColumn(), TimeRemainingColumn())
        with Progress(*columns, console=self._console, disable=not self._console.is_terminal) as progress:
            task = progress.add_task(text, total=total)
            yield lambda count: progress.advance(task, count)

    def farewell(self, path: str, seconds: float) -> None:
        """What to try next."""
        self.title("What next", f"that took {seconds:.1f} s; run it again, or try")
        where = f"--store {shlex.quote(path)}"
        if shutil.which("quire") is None:
            self.say(f"(quire is here: {os.path.relpath(sys.argv[0])})")
        for line in NEXT:
            self.say(f"quire {line} {where}", "bold")
        self._console.print()
