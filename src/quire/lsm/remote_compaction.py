"""A major compaction whose work is done elsewhere: plan here, run on executors, publish here.

`run_task` reads immutable tables and writes new ones under ids that only this task has, each named when it is whole: run
twice, two at a time even, or killed, it does no harm. Ids are reserved in the database's manifest before a task leaves the
process. While the work is out no other compaction of the database begins; writes and flushes go on.

    with plan_major(kv, tasks=8) as plan:
        written = [sst_id for task in plan.tasks for sst_id in run_task(task)]    # anywhere, in any order
        plan.publish(written)

Threads: one for each plan. Raises what reading and writing tables raise, `InvalidInput` for ids that are not of the plan."""

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
from quire.lsm.compaction import TableOptions, VersionRetention
from quire.lsm.merge import merge_tables, parts
from quire.lsm.sst_reader import SSTable

if TYPE_CHECKING:
    from quire.lsm.kv import Kv

SPARE_IDS = 2
"""Beyond what a task's share of the bytes asks for: cuts are rough. Ids cost nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MergeRange:
    """A range of keys to merge."""

    directory: str
    """The database's."""
    inputs: tuple[int, ...]
    low: bytes
    high: bytes | None
    ids: tuple[int, ...]
    level: int
    retention: VersionRetention
    table_bytes: int
    options: TableOptions


def run_task(task: MergeRange, disk: Disk | None = None) -> list[int]:
    """Merge a range; the ids of the tables that were written."""
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
    """A major compaction that is under way; made by `plan_major`."""

    def __init__(self, kv: Kv, job: compaction.MergeJob | None, tasks: tuple[MergeRange, ...]) -> None:
        self.tasks = tasks
        self._kv = kv
        self._job = job
        self._ids = {sst_id for task in tasks for sst_id in task.ids}

    def publish(self, written: Iterable[int]) -> None:
        """Every task is done: have its tables live and the old ones not."""
        chosen = sorted(set(written))
        if not self._ids.issuperset(chosen):
            raise InvalidInput("these tables do not belong to this compaction", ids=chosen)
        if self._job is not None:
            kv = self._kv
            for sst_id in chosen:  # an executor may have written it: the archive has to learn of it
                sync_file(kv.disk, kv.home.sst(sst_id))
            added = [SSTable.open(kv.disk, kv.home.sst(sst_id), sst_id, kv.cache) for sst_id in chosen]
            self._ids.difference_update(chosen)  # from here on an event may name them: they are not to be removed
            try:
                kv.upkeep.publish(self._job, added)
            except BaseException:
                if kv.failure is None and kv.manifest.state().tables.keys().isdisjoint(chosen):
                    self._ids.update(chosen)
                raise
            self._job = None

    def abandon(self) -> None:
        """Remove what was written and not published."""
        self._kv.upkeep.forsake(self._ids)


@contextmanager
def plan_major(kv: Kv, *, tasks: int) -> Iterator[MajorCompaction]:
    """Everything into one level, cut into about so many tasks; without any if there is nothing to do."""
    kv.flush()
    with kv.upkeep.compacting():
        job = compaction.pick_all(kv.view.levels)
        plan = MajorCompaction(kv, job, tuple(_tasks(kv, job, tasks)) if job is not None else ())
        try:
            yield plan
        finally:
            plan.abandon()
            del job, plan  # they hold the tables that are to go
        kv.upkeep.collect()


def _tasks(kv: Kv, job: compaction.MergeJob, count: int) -> Iterator[MergeRange]:
    total = sum(table.meta.raw_bytes for table in job.inputs)
    share = max(1, total // max(1, count))
    ranges = parts(job.inputs, b"", None, first_bytes=share, bytes_max=share)
    ids_each = 2 * share // kv.settings.table_bytes + SPARE_IDS
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
            options=compaction.table_options(kv.settings),
        )
