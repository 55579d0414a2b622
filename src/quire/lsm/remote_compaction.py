"""A major compaction that runs on executors; the owner plans and publishes it.

`run_task` reads immutable tables and writes new ones with ids reserved for the task, each renamed to its name when it is
complete. So it is safe to run a task twice, twice concurrently, or to kill it. Ids are reserved in the database's manifest
before a task leaves the process. While tasks run, no other compaction of the database begins; writes and flushes continue.

    with plan_major(kv, tasks=8) as plan:
        written = [sst_id for task in plan.tasks for sst_id in run_task(task)]    # anywhere, in any order
        plan.publish(written)

Threads: one for each plan. Raises the errors of reading and writing tables, `InvalidInput` for ids outside the plan."""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from quire.core.errors import InvalidInput
from quire.durable.files import Disk, OsDisk, sync_file
from quire.durable.names import TEMPORARY, LsmHome
from quire.lsm import compaction
from quire.lsm.compaction import VersionRetention
from quire.lsm.merge import merge_tables, parts
from quire.lsm.sst_reader import SSTable
from quire.lsm.table_options import TableOptions, table_options

if TYPE_CHECKING:
    from quire.lsm.kv import Kv

SPARE_IDS = 2
"""Ids reserved for a task beyond those that its share of the bytes needs: shares are estimates, and ids are free."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MergeRange:
    """A task: a range of keys to merge."""

    directory: str
    """The directory of the database."""
    inputs: tuple[int, ...]
    low: bytes
    high: bytes | None
    ids: tuple[int, ...]
    level: int
    retention: VersionRetention
    table_bytes: int
    options: TableOptions


def run_task(task: MergeRange, disk: Disk | None = None) -> list[int]:
    """Merge a range. Return the ids of the tables written."""
    disk, home, left = disk or OsDisk(), LsmHome(task.directory), iter(task.ids)
    tables = [SSTable.open(disk, home.sst(sst_id), sst_id) for sst_id in task.inputs]

    def new_table() -> tuple[int, str]:
        sst_id = next(left)
        return sst_id, home.sst(sst_id)

    try:
        written = merge_tables(
            disk,
            tables,
            task.retention,
            level=task.level,
            table_bytes=task.table_bytes,
            options=task.options,
            new_table=new_table,
            low=task.low,
            high=task.high,
            stage=f".{secrets.token_hex(4)}{TEMPORARY}",
        )
    finally:
        for table in tables:
            table.close()
    return [meta.sst_id for _, meta in written]


class MajorCompaction:
    """A major compaction in progress; made by `plan_major`."""

    def __init__(self, kv: Kv, job: compaction.MergeJob | None, tasks: tuple[MergeRange, ...]) -> None:
        self.tasks = tasks
        self._kv = kv
        self._job = job
        self._ids = {sst_id for task in tasks for sst_id in task.ids}

    def publish(self, written: Iterable[int]) -> None:
        """Replace the input tables by those written, atomically. Call it after every task is done."""
        chosen = sorted(set(written))
        if not self._ids.issuperset(chosen):
            raise InvalidInput("these tables do not belong to this compaction", ids=chosen)
        if self._job is not None:
            kv = self._kv
            for sst_id in chosen:  # for the archive's recorder: an executor may have written the file
                sync_file(kv.disk, kv.home.sst(sst_id))
            added = [SSTable.open(kv.disk, kv.home.sst(sst_id), sst_id, kv.cache) for sst_id in chosen]
            self._ids.difference_update(chosen)  # from here on an event may name them: `abandon` must not remove them
            try:
                kv.upkeep.publish(self._job, added)
            except BaseException:
                if not kv.upkeep.may_be_live(chosen):
                    self._ids.update(chosen)
                raise
            self._job = None

    def abandon(self) -> None:
        """Remove the tables that were written and not published."""
        self._kv.upkeep.abandon_tables(self._ids)


@contextmanager
def plan_major(kv: Kv, *, tasks: int) -> Iterator[MajorCompaction]:
    """Plan a merge of all tables into one level, in about `tasks` tasks; none if there is nothing to merge."""
    kv.flush()
    with kv.upkeep.compaction_lock():
        job = compaction.pick_all(kv.view.levels)
        plan = MajorCompaction(kv, job, tuple(_tasks(kv, job, tasks)) if job is not None else ())
        try:
            yield plan
        finally:
            plan.abandon()
            del job, plan  # they reference the input tables, whose files `collect` is to remove
        kv.upkeep.collect()


def _tasks(kv: Kv, job: compaction.MergeJob, count: int) -> Iterator[MergeRange]:
    total = sum(table.meta.raw_bytes for table in job.inputs)
    share = max(1, total // max(1, count))
    ranges = parts(job.inputs, b"", None, first_bytes=share, bytes_max=share)
    ids_each = 2 * share // kv.settings.table_bytes + SPARE_IDS
    # Durable before a task leaves the process: a task may still write a file after this process has died.
    ids = iter(kv.manifest.allocate_sst_ids(ids_each * len(ranges)))
    retention = kv.upkeep.retention(job)
    for low, high in ranges:
        yield MergeRange(
            directory=kv.home.path,
            inputs=tuple(table.meta.sst_id for table in job.inputs),
            low=low,
            high=high,
            ids=tuple(next(ids) for _ in range(ids_each)),
            level=job.level,
            retention=retention,
            table_bytes=kv.settings.table_bytes,
            options=table_options(kv.settings),
        )
