"""The task that writes a part of a snapshot into a file of full length: writes each page at its offset, then syncs.

Repeated or concurrent tasks write the same bytes. Safe to run on an executor that sees the file's directory.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby

from quire.durable.failpoints import hit
from quire.jobs.runner import Tools
from quire.pages.view import SnapshotView

PAGES_AT_ONCE = 1_024


@dataclass(frozen=True, slots=True, kw_only=True)
class RestoreTask:
    """A range of pages of a view, and the file to write them to."""

    view: SnapshotView
    first: int
    stop: int
    path: str


def write_pages(task: RestoreTask, tools: Tools) -> int:
    """Write the pages, durable on return; return the number of bytes."""
    view, done = task.view, 0
    file = tools.disk.open(task.path)
    try:
        with view.open(tools.sources) as reader:
            pages = reader.scan(task.first, task.stop, cold=True)
            for _, run in groupby(pages, key=lambda item: item[0] // PAGES_AT_ONCE):
                batch = list(run)
                body = b"".join(image for _, image in batch)
                file.write_at(body, batch[0][0] * view.page_size)
                done += len(body)
        file.sync()
    finally:
        file.close()
    hit("jobs.restore.written")
    return done
