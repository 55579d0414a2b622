"""The restore job: writes a snapshot of a page database to a file, in parallel. SQLite can open the file of a SQLite database.

The file gets its name when it is complete and synced; until then it is `<file>.<job>.tmp`, which the job's next attempt
overwrites: two jobs with the same target do not write into one file. An existing file is replaced only on request. A repeated
attempt may find the file of an earlier attempt that died before it completed the job: the file is adopted if it is the same,
byte for byte. Each task is one slot, so each chunk is read once.

Threads: any. Raises `AlreadyExists`, and what reading the snapshot raises.
"""

from __future__ import annotations

import os
from typing import Any

from quire.core.errors import AlreadyExists, InvalidConfig, InvalidInput
from quire.core.limits import CHUNK_BYTES, MIB
from quire.durable.files import Disk
from quire.durable.names import TEMPORARY
from quire.jobs.context import JobContext
from quire.jobs.handler import Completed, Outcome, Progress, options
from quire.jobs.restore.run import RestoreTask, write_pages
from quire.jobs.runner import Runner, Tick, no_tick, results_of
from quire.manifest.jobqueue import Job
from quire.pages.view import SnapshotView
from quire.pages.view_build import view_of


def restore_job(ctx: JobContext, job: Job, progress: Progress) -> Outcome:
    """Write a snapshot (payload `snapshot`, an id) to a file (payload `path`)."""
    given = options(job, snapshot=0, path="", replace=False, runner="")
    with ctx.manifest.read() as txn:
        snapshot_id, record = txn.require_snapshot(job.db_id, given["snapshot"])
        view = view_of(txn, job.db_id, snapshot_id, record, ctx.objects_url)
    size = view.size_pages * view.page_size
    runner = ctx.choose_runner(given["runner"], size, label="quire-restore")
    how = {"replace": given["replace"], "adopt": job.record.attempt > 1}
    try:
        return Completed(restore(view, given["path"], job.job_id, runner, ctx.disk, **how, tick=progress))
    except AlreadyExists as error:
        raise InvalidInput(error.what, hint=error.hint, path=given["path"]) from error  # a retry would not help


# ── writing the file ──────────────────────────────────────────────────────────────────────────────────────────────────
STEP_BYTES = 8 * MIB
"""Bytes per step when two files are compared."""


def restore(
    view: SnapshotView,
    target: str,
    job_id: int,
    runner: Runner,
    disk: Disk,
    *,
    replace: bool = False,
    adopt: bool = False,
    tick: Tick = no_tick,
) -> dict[str, Any]:
    """Write a snapshot to a file; return the result of the job."""
    target = os.path.abspath(target)
    if not runner.shares_disk:
        hint = "use `--runner threads`, or mount this directory on the executors"
        raise InvalidConfig("executors cannot access the file to be written", hint=hint, path=target)
    if not replace and not adopt:
        need_no_file(disk, target)
    draft, size = f"{target}.{job_id}{TEMPORARY}", view.size_pages * view.page_size
    file = disk.open(draft, create=True)
    try:
        file.truncate(0)
        file.truncate(size)
    finally:
        file.close()
    tasks = parts(view, draft)
    written = sum(size for _, size in results_of(runner.map(write_pages, tasks, tick=tick)))
    assert written == size, "every page is in one part"
    if not replace and disk.exists(target):
        is_own = adopt and _are_same(disk, draft, target)
        disk.remove(draft)
        if not is_own:
            raise _file_exists(target)
    else:
        # Each task has synced its part, so the name is given to a complete and durable file.
        disk.rename(draft, target)
    disk.sync_dir(os.path.dirname(target))
    return {"path": target, "pages": view.size_pages, "bytes": size, "parts": len(tasks), "lsn": view.lsn}


def need_no_file(disk: Disk, target: str) -> None:
    """Raise `AlreadyExists` if the file exists."""
    if disk.exists(target):
        raise _file_exists(target)


def _file_exists(target: str) -> AlreadyExists:
    return AlreadyExists(
        "the file already exists", hint="choose another name, or replace it with `--force`", path=target
    )


def _are_same(disk: Disk, one: str, two: str) -> bool:
    """Return whether two files have the same bytes."""
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
    """Return one task for each slot, so that each chunk is read by one task."""
    step = view.pages_per_chunk or max(CHUNK_BYTES // max(view.page_size, 1), 1)
    return [
        RestoreTask(view=view, first=first, stop=min(first + step, view.size_pages), path=path)
        for first in range(0, view.size_pages, step)
    ]
