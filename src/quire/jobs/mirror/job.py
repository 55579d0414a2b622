"""The mirror job: keeps one lakehouse table in step with a table of many databases (L3).

    manifest ──► which databases changed ──► executors write files ──► batch recorded ──► one commit in the target ──► adopted

The target's own log has the number of the batch that it holds, and the manifest what each batch covers. A run begins by reading
that number:

  it is the last one that was adopted    both agree; the run continues from there
  it is of a batch that was recorded     a driver was killed between the two commits: the batch is adopted
  anything else                          the store was restored, or the target was: everything is written again

So each change is in the target once, wherever a driver was killed. A second driver, or a commit by another program, makes the
commit fail, and the run is planned again; each plan has its own number, and a target never accepts a lower number than it has.

Files contain whole databases. A database that changed is written again completely, and databases that share its file are copied
from there. If another program rewrites the target's files and keeps their rows (compaction), the mirror follows: it counts the
rows, and reads which databases the unknown files contain.

A database whose rows in the manifest are damaged keeps its rows in the target. While the mirror follows such a database, a run
that would have to write everything again fails, because it would remove them.

Threads: any. Raises what targets raise; `InvalidInput` for a table that another program, or another mirror, has made;
`ManifestDamaged` as above.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from msgspec.structs import replace

from quire.core.clock import Clock
from quire.core.errors import (
    DatabaseTombstoned,
    InternalError,
    InvalidConfig,
    InvalidInput,
    ManifestDamaged,
    NotFound,
    StalePlan,
)
from quire.core.events import emit
from quire.core.limits import MIB
from quire.durable.failpoints import hit
from quire.jobs.context import JobContext, PagesOfStore
from quire.jobs.handler import Completed, Outcome, Progress, commit_step, options
from quire.jobs.mirror.change_detection import (
    Differences,
    differences,
    find_mirror,
    held_databases,
    newest_versions,
    size_of,
)
from quire.jobs.mirror.plan import batch_rows, distribute_units, merged_columns, sources, units
from quire.jobs.mirror.run import (
    Column,
    ForeignFile,
    MirrorTask,
    Written,
    WrittenFile,
    databases_in,
    write_files,
)
from quire.jobs.mirror.target import DATA, Target, TargetState, open_target
from quire.jobs.runner import Runner, some_names
from quire.manifest import tables as t
from quire.manifest.jobqueue import Job
from quire.manifest.ops.mirrors import AdoptMirrorBatch, BeginMirrorBatch, MarkMirror
from quire.manifest.reads import ReadTxn
from quire.manifest.records import MirrorDatabaseRecord, MirrorRecord
from quire.pages.view import SnapshotView

PLANS_MAX = 5
"""How often a run is planned before a conflict with other commits is an error."""
SCHEMAS_MAX = 4
"""How often files are written while their columns disagree; with the columns merged after the first time they agree."""
LENT_AT_ONCE = 64
"""Databases that are lent in one call: each must be opened and sealed."""
LEASE_SECONDS = 3_600.0
"""How long the versions that are read are kept after the last renewal: threads renew with each task that ends."""
FILE_BYTES = 4 * MIB
"""Bytes of databases, before compression, in one file: the amount that is rewritten when one of them changes."""
ROWS_PER_OP = 1_000
OWN_OPTIONS = ("file_bytes", "misfits")
"""Options of the mirror itself, not of its target."""

Held = dict[int, MirrorDatabaseRecord]
Views = dict[int, tuple[str, SnapshotView]]


def mirror_job(ctx: JobContext, job: Job, progress: Progress) -> Outcome:
    """Bring a mirror's target up to date (payload `mirror`, its name)."""
    given = options(job, mirror="", runner="", full=False)
    with ctx.manifest.read() as txn:
        mirror_id, _ = find_mirror(txn, given["mirror"])
    # Before the run: schedules count from its start, so a run that fails is not due again at once.
    commit_step(ctx, job, [MarkMirror(mirror_id)])
    for plans_left in reversed(range(PLANS_MAX)):
        run = _PlannedRun(ctx, job, progress, mirror_id, given["runner"])
        try:
            return Completed(run.run(full=given["full"]))
        except StalePlan as error:
            if not plans_left:
                raise
            emit("warning", "mirror.conflict", mirror=given["mirror"], error=str(error))
        finally:
            run.release()
    raise AssertionError("the last plan has returned or raised")


def check_target(ctx: JobContext, mirror_id: int, mirror: MirrorRecord) -> None:
    """Raise `InvalidInput` if the target has data of another program or mirror."""
    with ctx.manifest.read() as txn:
        state = target_of(txn, mirror_id, mirror, ctx.clock).read()
    if state is not None and (state.files or state.batch_id):
        raise _foreign_target(mirror)


def _foreign_target(mirror: MirrorRecord) -> InvalidInput:
    hint = "name another target, or remove the table first"
    return InvalidInput("the target belongs to something else", hint=hint, target=mirror.target, mirror=mirror.name)


def target_of(txn: ReadTxn, mirror_id: int, mirror: MirrorRecord, clock: Clock) -> Target:
    """Return the target of a mirror. Its log identifies a mirror by store and number: that of a clone is a different one."""
    own = {name: value for name, value in mirror.options.items() if name not in OWN_OPTIONS}
    return open_target(mirror.target, f"quire-mirror/{txn.store_id()}/{mirror_id:016x}", own, clock)


@dataclass(slots=True)
class _Plan:
    """The plan of a run, and the files that it wrote."""

    runner: Runner
    differ: Differences
    held: Held
    views: Views
    replaced: set[str] = field(default_factory=set)
    copied: int = 0
    columns: tuple[Column, ...] = ()
    files: tuple[WrittenFile, ...] = ()


class _PlannedRun:
    """One planned attempt of a run, from reading the target to adopting the batch."""

    def __init__(self, ctx: JobContext, job: Job, progress: Progress, mirror_id: int, runner: str) -> None:
        self._ctx, self._job, self._progress = ctx, job, progress
        self._mirror_id = mirror_id
        self._runner_name = runner
        self._lease_id = 0
        with ctx.manifest.read() as txn:
            record = txn.get(t.MIRROR, mirror_id)
            if record is None:
                raise NotFound("the mirror was dropped", hint="`quire mirror ls` lists them", mirror_id=mirror_id)
            self._mirror = record
            self._target = target_of(txn, mirror_id, record, ctx.clock)

    def release(self) -> None:
        """Release the lease on the versions that were read."""
        if self._lease_id:
            self._ctx.manifest.leases.release(self._lease_id)
            self._lease_id = 0

    def run(self, *, full: bool) -> dict[str, Any]:
        """Execute the run; return the result of the job."""
        state = self._target.read()
        if state is None:
            self._target.create()
            hit("jobs.mirror.created")
            if (state := self._target.read()) is None:
                raise StalePlan(
                    "the target was removed in the meantime", hint="plan it again", target=self._mirror.target
                )
        held, is_full = self._agree(state, full=full)
        plan = self._plan_run(held)
        done = {
            "mirror": self._mirror.name,
            "full": is_full,
            "databases": plan.differ.followed,
            "changed": len(plan.views),
            "dropped": len(plan.differ.gone),
            "runner": plan.runner.name,
        }
        # A full load replaces all files, whoever wrote them, and records the databases that are gone.
        if is_full:
            if state.files and plan.differ.damaged:
                raise self._would_remove(plan.differ.damaged)
            with self._ctx.manifest.read() as txn:
                before = held_databases(txn, self._mirror_id)
            gone = {db_id: row for db_id, row in before.items() if db_id not in plan.views}
            plan.differ = dataclasses.replace(plan.differ, gone=gone)
        if not plan.views and not plan.differ.gone and not (is_full and state.files):
            commit_step(self._ctx, self._job, [MarkMirror(self._mirror_id, is_synced=True)])
            return {**done, "batch_id": self._mirror.batch_id, "copied": 0, **_sizes((), ())}
        # Above both: a target refuses a number that it has reached, and one that any run has recorded in the manifest
        # may already stand for other contents.
        batch_id = max(self._mirror.last_batch_id, state.batch_id) + 1
        self._write(plan, batch_id, state.columns)
        removed = set(state.files) if is_full else plan.replaced
        hit("jobs.mirror.written")
        self._evolve(state, plan.columns)
        # Before the target's commit: a run that finds the number there must know the batch
        self._record(batch_id, plan)
        hit("jobs.mirror.recorded")
        self._target.commit(batch_id, plan.files, sorted(removed))
        hit("jobs.mirror.committed")
        self._adopt(batch_id)
        return {**done, "batch_id": batch_id, "copied": plan.copied, **_sizes(plan.files, removed)}

    def _would_remove(self, damaged: Iterable[int]) -> ManifestDamaged:
        """Return the error of a full load that cannot read these databases: the target may have the last copy of their rows."""
        with self._ctx.manifest.read() as txn:
            names = [txn.indexed_name(db_id) or f"#{db_id}" for db_id in sorted(damaged)]
        return ManifestDamaged(
            "the target must be written again as a whole, which would remove the rows of databases that are damaged",
            hint="repair or drop these databases first; `quire manifest check` shows what to do",
            mirror=self._mirror.name,
            databases=some_names(names, len(names)),
        )

    # ── state of the target ───────────────────────────────────────────────────────────────────────────────────────────
    def _agree(self, state: TargetState, *, full: bool) -> tuple[Held, bool]:
        """Return (what the target holds, whether everything is written again)."""
        mirror = self._mirror
        if not (state.batch_id or state.files):
            return {}, True
        if not state.batch_id:
            raise _foreign_target(mirror)
        if state.batch_id != mirror.batch_id:
            with self._ctx.manifest.read() as txn:
                is_known = next(iter(txn.scan(t.MIRROR_BATCH, self._mirror_id, state.batch_id)), None) is not None
            if is_known:
                self._adopt(state.batch_id)
            else:
                emit("warning", "mirror.full_load", mirror=mirror.name, why="the target holds an unknown batch")
                return {}, True
        if full:
            return {}, True
        with self._ctx.manifest.read() as txn:
            held = held_databases(txn, self._mirror_id)
        return self._located(held, state)

    def _located(self, held: Held, state: TargetState) -> tuple[Held, bool]:
        """Return (`held` with its current files, whether everything is written again): files may have been compacted."""
        recorded_files = {path for row in held.values() for path in row.files}
        strange = [path for path in state.files if path not in recorded_files]
        # Compaction by another program keeps the rows. If their number differs, it has changed more than files.
        if sum(file.rows for file in state.files.values()) != sum(row.rows for row in held.values()):
            emit(
                "warning",
                "mirror.full_load",
                mirror=self._mirror.name,
                why="the target's rows are not those that were written",
            )
            return {}, True
        if not strange and recorded_files <= state.files.keys():
            return held, False
        by_name = {row.name: db_id for db_id, row in held.items()}
        files = {db_id: [path for path in row.files if path in state.files] for db_id, row in held.items()}
        runner = self._ctx.thread_runner("quire-mirror")
        tasks = [ForeignFile(location=self._target.location, path=path) for path in strange]
        for task, answer in ((tasks[answer.key], answer) for answer in runner.map(databases_in, tasks)):
            for name in answer.result():
                if name not in by_name:
                    emit(
                        "warning",
                        "mirror.full_load",
                        mirror=self._mirror.name,
                        why=f"the target has rows of {name!r}, which is not mirrored",
                    )
                    return {}, True
                files[by_name[name]].append(task.path)
        return {db_id: replace(row, files=files[db_id]) for db_id, row in held.items()}, False

    def _adopt(self, batch_id: int) -> None:
        """Record in the manifest that the target holds a batch."""
        while True:
            try:
                # An operation moves a bounded number of rows, and the last one advances the mirror. A run that dies
                # in between leaves a batch that the next run adopts again.
                commit_step(self._ctx, self._job, [AdoptMirrorBatch(self._mirror_id, batch_id)])
            except StalePlan:
                return  # another run has adopted a later batch
            hit("jobs.mirror.adopted")
            with self._ctx.manifest.read() as txn:
                record = txn.get(t.MIRROR, self._mirror_id)
            if record is None or record.batch_id >= batch_id:
                return

    # ── writing ───────────────────────────────────────────────────────────────────────────────────────────────────────
    def _plan_run(self, held: Held) -> _Plan:
        """Plan the run: find the changed databases, choose a runner for their size, and lend their versions."""
        pages = self._pages
        newest = newest_versions(pages.stores())
        with self._ctx.manifest.read() as txn:
            differ = differences(txn, self._mirror, held, newest)
            size = sum(size_of(txn, database.db_id) for database in differ.changed)
        runner = self._ctx.choose_runner(self._runner_name, size, label="quire-mirror")
        views: Views = {}
        for start in range(0, len(differ.changed), LENT_AT_ONCE):
            some = differ.changed[start : start + LENT_AT_ONCE]
            for database, view in zip(
                some, self._leased_views([database.db_id for database in some], runner), strict=True
            ):
                row = held.get(database.db_id)
                # A database whose version was unknown before it was opened may turn out to be unchanged.
                if row is None or (row.name, row.lsn) != (database.name, view.lsn):
                    views[database.db_id] = (database.name, view)
            self._progress(0, 0)
        return _Plan(runner, differ, held, views)

    def _leased_views(self, db_ids: list[int], runner: Runner) -> list[SnapshotView]:
        try:
            lease_id, views = self._pages.lend(
                db_ids, LEASE_SECONDS, lease_id=self._lease_id, upload=not runner.shares_disk
            )
        except (NotFound, DatabaseTombstoned) as error:
            raise StalePlan(f"a database was dropped in the meantime: {error}", hint="plan it again") from error
        self._lease_id = lease_id
        return views

    @property
    def _pages(self) -> PagesOfStore:
        if self._ctx.pages is None:
            raise InvalidConfig("this process has no page engine", hint="run it in the process that has the store open")
        return self._ctx.pages

    def _write(self, plan: _Plan, batch_id: int, columns: tuple[Column, ...]) -> None:
        """Write the files, and again if tasks disagree about a column's type."""
        written, plan.replaced = sources(plan.views, plan.differ.gone, plan.held)
        plan.copied = sum(source.view is None for source in written)
        cut = distribute_units(
            units(written, int(self._mirror.options.get("file_bytes", FILE_BYTES))), plan.runner.width
        )
        for _ in range(SCHEMAS_MAX):
            tasks = [
                MirrorTask(
                    location=self._target.location,
                    prefix=f"{DATA}/{batch_id:08d}-{number:05d}",
                    table=self._mirror.table,
                    columns=columns,
                    units=unit,
                    null_misfits=self._mirror.options.get("misfits") == "null",
                )
                for number, unit in enumerate(cut)
            ]
            names = some_names((name for name, _ in plan.views.values()), len(plan.views))
            what = f"quire mirror {self._mirror.name}, batch {batch_id} to {self._mirror.target}, write files"
            title = f"{what}: {names}" if names else what
            running = plan.runner.map(write_files, tasks, tick=self._tick, title=title)
            answers = [answer.result() for answer in running]
            merged, disagree = merged_columns(columns, answers)
            columns = tuple(merged)
            if not disagree:
                plan.columns, plan.files = columns, tuple(file for answer in answers for file in answer.files)
                _report_new_types(self._mirror.name, answers)
                return
        raise InternalError("files of a mirror disagree about their columns", mirror=self._mirror.name)

    def _tick(self, done: int, total: int) -> None:
        self._progress(done, total)
        if self._lease_id:
            self._ctx.manifest.leases.renew(self._lease_id)

    def _evolve(self, state: TargetState, columns: tuple[Column, ...]) -> None:
        """Add the columns that the files need and the target lacks."""
        added = [column for column in columns if column not in state.columns]
        if added:
            self._target.add_columns(added)
            emit("info", "mirror.columns_added", mirror=self._mirror.name, columns=[name for name, _ in added])
            hit("jobs.mirror.columns_added")

    def _record(self, batch_id: int, plan: _Plan) -> None:
        rows = batch_rows(plan.differ, plan.views, plan.held, plan.replaced, plan.files)
        for start in range(0, max(len(rows), 1), ROWS_PER_OP):
            some = rows[start : start + ROWS_PER_OP]
            commit_step(self._ctx, self._job, [BeginMirrorBatch(self._mirror_id, batch_id, some)])


def _report_new_types(mirror: str, answers: Iterable[Written]) -> None:
    """Emit an event for each type that changed: queries must use the new column."""
    for database, column, target in {new_type for answer in answers for new_type in answer.new_types}:
        emit("warning", "mirror.new_column_for_type", mirror=mirror, database=database, column=column, target=target)


def _sizes(files: Iterable[WrittenFile], removed: Iterable[str]) -> dict[str, int]:
    written = list(files)
    return {
        "files_added": len(written),
        "files_removed": len(list(removed)),
        "rows_written": sum(file.rows for file in written),
        "bytes_written": sum(file.size_bytes for file in written),
    }
