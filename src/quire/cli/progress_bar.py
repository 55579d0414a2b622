"""One bar for a run over many databases or artifacts: on stderr, only on a terminal, gone at the end."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from quire.cli.command import on_terminal

Told = Callable[[int, int], None]
"""`told(done, total)`; total 0 if it is not known."""


@contextmanager
def bar(title: str) -> Iterator[Told]:
    """Gives what is to be told how far the work is. An interrupt comes out of the work itself."""
    if not on_terminal():
        yield lambda _done, _total: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}", markup=False), BarColumn(bar_width=20), MofNCompleteColumn())
    with Progress(*columns, TimeElapsedColumn(), console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(title, total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total or None)
