"""Restoring a snapshot to a file, in parallel: for a SQLite database, the file is one that SQLite opens.

Rules
  1. The file gets its name when it is whole and synced; until then it is `<file>.tmp`, which the next restore overwrites.
  2. An existing file is not replaced unless that was asked for. A repeated attempt may find the file of an earlier one, which
     died before it could say so: it is adopted if it is the same, byte for byte.
  3. Parts are slots: each chunk is read by one task.

Threads: any. Raises `AlreadyExists`, and what reading the snapshot raises.
"""

from __future__ import annotations

import os
from typing import Any

from quire.core.errors import AlreadyExists, InvalidConfig
from quire.core.limits import CHUNK_BYTES, MIB
from quire.durable.files import Disk
from quire.durable.names import TEMPORARY
from quire.jobs.restore.run import RestoreTask, write_pages
from quire.jobs.runner import Runner, Tick, no_tick
from quire.pages.view import SnapshotView

STEP_BYTES = 8 * MIB
"""Two files are compared this much at a time."""


def restore(
    view: SnapshotView,
    target: str,
    runner: Runner,
    disk: Disk,
    *,
    replace: bool = False,
    adopt: bool = False,
    tick: Tick = no_tick,
) -> dict[str, Any]:
    """Write a snapshot to a file; what was done."""
    target = os.path.abspath(target)
    if not runner.shares_disk:
        hint = "use `--runner threads`, or executors that see this directory"
        raise InvalidConfig("executors do not see the file that is to be written", hint=hint, path=target)
    if not replace and not adopt:
        need_no_file(disk, target)
    draft, size = target + TEMPORARY, view.size_pages * view.page_size
    file = disk.open(draft, create=True)
    try:
        file.truncate(0)
        file.truncate(size)
    finally:
        file.close()
    tasks = parts(view, draft)
    written = sum(answer.result() for answer in runner.map(write_pages, tasks, tick=tick))
    assert written == size, "every page is in one part"
    if adopt and not replace and disk.exists(target):
        if not _are_same(disk, draft, target):
            need_no_file(disk, target)
        disk.remove(draft)
    else:
        disk.rename(draft, target)
    disk.sync_dir(os.path.dirname(target))
    return {"path": target, "pages": view.size_pages, "bytes": size, "parts": len(tasks), "lsn": view.lsn}


def need_no_file(disk: Disk, target: str) -> None:
    """Refuse to replace an existing file (rule 2)."""
    if disk.exists(target):
        raise AlreadyExists("there is a file of this name already", hint="name another, or replace it", path=target)


def _are_same(disk: Disk, one: str, two: str) -> bool:
    """Whether two files have the same bytes."""
    first, second = disk.open(one, write=False), disk.open(two, write=False)
    try:
        if first.size() != second.size():
            return False
        steps = range(0, first.size(), STEP_BYTES)
        return all(first.read_at(STEP_BYTES, at) == second.read_at(STEP_BYTES, at) for at in steps)
    finally:
        first.close()
        second.close()


def parts(view: SnapshotView, path: str) -> list[RestoreTask]:
    """One task for each slot, so that each chunk is read by one task (rule 3)."""
    step = view.pages_per_chunk or max(CHUNK_BYTES // max(view.page_size, 1), 1)
    return [
        RestoreTask(view=view, first=first, stop=min(first + step, view.size_pages), path=path)
        for first in range(0, view.size_pages, step)
    ]
