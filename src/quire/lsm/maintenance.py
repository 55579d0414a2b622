"""Background work of a key-value database: flushes, compactions, checkpoints of the manifest, removal of obsolete files.

What is on disk after each step, and what a crash leaves
  a flush writes its table        a file that no event names: swept at the next open
  AddSst, RemoveFrozenWal         the table is live; after a crash between the two recovery skips the WAL's batches
  LMDB records it                 from here on a manifest without these events is known to be damaged
  the WAL's file is removed       a file that no event names
  a compaction writes tables      files that no event names
  one Compaction event            the new tables are live and the old ones dead, atomically
  the old files are removed       when they have no reader left; otherwise at the next open

A file is removed only after the event that makes it dead is durable and recorded in LMDB, so damage to the manifest alone
cannot lose the file's contents. A flush or compaction that fails leaves everything as it was and is retried; writers get the
error.

Threads: those of the store's background, of which at most one flushes and one compacts a database; `flush_all` and
`compact_all` do the same work in the caller's thread. The flush lock and the compaction lock are never taken with the write
lock held; the compaction lock is taken before the flush lock."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from quire.core.background import Background, Task
from quire.core.errors import InternalError, Overloaded, QuireError, StorageFault, StoreClosed
from quire.core.events import emit
from quire.durable.failpoints import hit
from quire.durable.files import sync_file
from quire.durable.names import sst_entry_path
from quire.lsm import compaction
from quire.lsm.load_records import LoadRecord, remove_load_record, write_load_record
from quire.lsm.manifest_data import ManifestSstEntry
from quire.lsm.memtable import Memtable
from quire.lsm.table_options import table_options
from quire.lsm.view import open_table

if TYPE_CHECKING:
    from quire.lsm.kv import Kv
    from quire.lsm.projection import CompactionJobs
    from quire.lsm.sst_reader import SSTable


class Stalls:
    """Stalls writers while too many memtables wait to be flushed, or too many tables of level 0 to be compacted.

    A writer waits without the write lock, so that it does not block flushes, reads and snapshots. It waits for at most
    `stall_seconds`, and not for a background that has stopped or failed. Raises `Overloaded`, `StoreClosed`, and the error
    that stopped the background.
    """

    def __init__(self, kv: Kv) -> None:
        self._kv = kv
        # guarded by the condition that is given to `wait`
        self.waiting = 0
        """Writers that are waiting."""
        self.count = 0
        self.seconds = 0.0

    @property
    def is_due(self) -> bool:
        """Whether a writer that needs a new memtable has to wait."""
        return self._kv.upkeep.is_running and self._is_full()

    def _is_full(self) -> bool:
        view, settings = self._kv.view, self._kv.settings
        return len(view.frozen) >= settings.frozen_max or len(view.levels.level0) >= settings.level0_stop

    def wait(self, changed: threading.Condition) -> None:
        """Block until there is room. `changed` is notified at every change of the view."""
        kv = self._kv
        began = kv.clock.monotonic()
        deadline = began + kv.settings.stall_seconds
        with changed:
            if not self.is_due:
                return
            self.waiting += 1
            self.count += 1
            try:
                while self._is_full():
                    left = deadline - kv.clock.monotonic()
                    self._require_progress(left)
                    changed.wait(min(left, 1.0))
            finally:
                self.waiting -= 1
                self.seconds += kv.clock.monotonic() - began

    def _require_progress(self, seconds_left: float) -> None:
        kv = self._kv
        kv.require()
        kv.upkeep.raise_background_error()
        if not kv.upkeep.is_running:
            raise StoreClosed("the database is being closed", hint="open it again")
        if seconds_left <= 0:
            raise Overloaded(
                "flushes and compactions cannot keep up with writes",
                hint="write more slowly, or check the disk",
                frozen=len(kv.view.frozen),
                level0=len(kv.view.levels.level0),
            )


RETRY_SECONDS = 1.0
"""Pause before a failed flush or compaction is retried."""


ABANDONED_MAX = 10_000
"""Most files of ended loads that are tracked for removal. Beyond it the set is cleared; the next open sweeps the files."""


class KvBackground:
    """The background threads shared by all databases of a store. Flushes have their own, so as not to wait for compactions."""

    def __init__(self, threads: int) -> None:
        self.flushing = Background("lsm-flush", threads_max=threads)
        self.compacting = Background("lsm-compact", threads_max=threads)

    def stop(self) -> None:
        """Wait for running tasks, and start no more."""
        self.flushing.stop()
        self.compacting.stop()

    def forked(self) -> None:
        """Reset in the child of a fork(): the threads exist in the parent only."""
        self.flushing.forked()
        self.compacting.forked()


class KvMaintenance:
    """The background work of one database."""

    def __init__(self, kv: Kv, jobs: CompactionJobs | None, background: KvBackground | None) -> None:
        self._kv = kv
        self._jobs = jobs
        self._options = table_options(kv.settings)
        self._flushing = threading.Lock()
        self._compacting = threading.Lock()
        self._stopping = threading.Event()
        self._turn = 0
        self._garbage: deque[str] = deque()
        """Files of dead tables without readers, to be removed; filled by finalizers, in any thread."""
        self._dead: set[str] = set()
        """Files of dead tables that are not removed yet: a view or scan may still read them."""
        self._abandoned_paths: set[str] = set()
        """Files of loads that ended without publishing them; a leftover task may still write one."""
        self._background_error: QuireError | None = None
        self.flushes = 0
        self.compactions = 0
        self._tasks: list[Task] = []
        if background is not None:
            self._tasks = [
                background.flushing.task(partial(self._work, self.flush_one)),
                background.compacting.task(partial(self._work, self.compact_due)),
            ]
        self.wake()

    # ── lifecycle ─────────────────────────────────────────────────────────────────────────────────────────────────────
    @property
    def is_running(self) -> bool:
        """Whether there is a background and it has not been stopped."""
        return bool(self._tasks) and not self._stopping.is_set()

    @property
    def is_busy(self) -> bool:
        """Whether a flush or compaction is running or requested."""
        return not all(task.is_idle for task in self._tasks)

    def wake(self) -> None:
        """Ask the background to look for work."""
        for task in self._tasks:
            task.ask()

    def stop(self) -> None:
        """Stop the background after the work in progress has finished."""
        self._stopping.set()
        for task in self._tasks:
            task.stop()
        if self._jobs is not None:
            self._jobs.close()
        self.collect()

    def raise_background_error(self) -> None:
        """Raise the error, if any, that keeps the background from making progress."""
        if (why := self._background_error) is not None:
            raise why.copied() from why

    def _work(self, step: Callable[[], bool]) -> float | None:
        """Run `step` until nothing is due. Return the seconds until the next attempt if it failed, else `None`."""
        try:
            while not self._stopping.is_set() and self._kv.failure is None and step():
                self._background_error = None
        except Exception as error:
            self._record_background_error(error)
            if self._kv.failure is None and not self._stopping.is_set():
                return RETRY_SECONDS
        return None

    def _record_background_error(self, error: Exception) -> None:
        if isinstance(error, StoreClosed) or self._kv.failure is not None:
            return
        if not isinstance(error, QuireError):
            error = InternalError(f"the background failed: {error!r}", path=self._kv.home.path)
        self._background_error = error
        if not isinstance(error, StorageFault):  # corruption or a bug: a retry will not help
            self._kv.fail(error)
        emit("error", "lsm.background_failed", path=self._kv.home.path, error=str(error))
        self._kv.notify()

    # ── flush ─────────────────────────────────────────────────────────────────────────────────────────────────────────
    def flush_all(self) -> None:
        """Flush every frozen memtable, in the caller's thread."""
        while self.flush_one():
            pass

    def flush_one(self) -> bool:
        """Flush the oldest frozen memtable. Return whether there was one.

        Memtables are flushed one at a time, in the order of their writes, so a table's lsns are above those of every table
        flushed before it.
        """
        kv = self._kv
        with self._flushing:
            kv.require()
            if not kv.view.frozen:
                return False
            kv.fold()  # record the WAL rotation, or a manifest that has lost it would pass for one from before it
            # No other thread removes it: only flushes do, and they hold the flush lock.
            oldest = kv.view.frozen[-1]
            added = [self._write_memtable(oldest.memtable)] if oldest.memtable.entries else []
            hit("lsm.flush.written")
            with self._discard_unless_logged(added):
                kv.manifest.flushed(_entry(added[0].meta.sst_id) if added else None, oldest.wal)
                hit("lsm.flush.recorded")
                # One new view: a reader finds the rows in the memtable or in the table, never in neither.
                kv.install(flushed=oldest, added=added)
            self.flushes += 1
            kv.fold()
            hit("lsm.flush.folded")
            if kv.is_fold_committed:  # otherwise the next open removes the file
                with suppress(StorageFault, FileNotFoundError):
                    kv.disk.remove(kv.home.wal(oldest.wal))
            hit("lsm.flush.done")
            self._checkpoint_manifest()
        self.wake()
        return True

    def _write_memtable(self, memtable: Memtable) -> SSTable:
        from quire.lsm.sst_writer import TableWriter  # loads Arrow, which is not needed before the first flush

        kv = self._kv
        # Logged before the file exists: a table whose id was never allocated proves a manifest outdated (recovery.py).
        sst_id = kv.manifest.allocate_sst_id()
        writer = TableWriter(sst_id, 0, self._options)
        for batch in memtable.rows_between(b"", None):
            writer.add(batch)
        hit("lsm.flush.begun")
        path = kv.home.sst(sst_id)
        writer.write(kv.disk, path)
        return open_table(kv.disk, path, sst_id, kv.cache)

    @contextmanager
    def _discard_unless_logged(self, added: Sequence[SSTable]) -> Iterator[None]:
        """Guard an event that names new tables, from its logging to the new view.

        If the event was certainly not logged, remove the tables' files. After any other failure refuse writes: the event may be
        on disk without being in the view, so its tables stay."""
        kv = self._kv
        try:
            yield
        except StorageFault:
            for table in added:
                table.close()
                with suppress(StorageFault, FileNotFoundError):
                    kv.disk.remove(table.path)
            kv.fold()  # the log was abandoned, and its successor is not recorded in LMDB yet
            raise
        except BaseException as error:
            kv.fail(error)
            raise

    def _checkpoint_manifest(self) -> None:
        # Never twice without a record in between: an open finds only the recorded log and the one after its checkpoint.
        manifest = self._kv.manifest
        may_checkpoint = self._kv.is_fold_committed and manifest.is_log_recorded
        if may_checkpoint and manifest.log_bytes >= self._kv.settings.manifest_log_bytes:
            with self._discard_unless_logged(()):
                manifest.checkpoint()
            self._kv.fold()  # a failing event has to checkpoint again, which needs the new log to be recorded

    def add_tables(self, loaded: Sequence[SSTable], lsn: int, record: LoadRecord | None) -> None:
        """Publish a load's tables, after all memtables older than `lsn` have been flushed, and write the load's `record`."""
        kv = self._kv
        # Recovery takes a WAL batch at or below the highest lsn of the tables as flushed: with the load's lsn among
        # them, older batches must be in tables.
        while any(frozen.memtable.lsn_max < lsn for frozen in kv.view.frozen):
            self.flush_one()
        hit("lsm.load.flushed")
        with self._compacting:  # no compaction may remove the tables before the record is done (load_records.py)
            kv.require()
            tables = self._assign_level(loaded)
            if record is not None:
                write_load_record(kv.disk, kv.home, record)
                hit("lsm.load.announced")
            if tables:
                try:
                    with self._discard_unless_logged(tables):
                        kv.manifest.compaction([_entry(table.meta.sst_id) for table in tables], [])
                        hit("lsm.load.recorded")
                        kv.install(added=tables)
                except StorageFault:
                    if record is not None:
                        remove_load_record(kv.disk, kv.home, record.number)
                    raise
                kv.fold()
            if record is not None:
                try:
                    write_load_record(kv.disk, kv.home, msgspec.structs.replace(record, done=True))
                except BaseException as error:
                    kv.fail(error)  # the result of a repeated commit is unknown until the next open settles the record
                    raise
                hit("lsm.load.remembered")
        self.wake()

    def may_be_live(self, ids: Iterable[int]) -> bool:
        """Return whether an event names one of these tables, or may do so: after a failure its outcome can be unknown."""
        return self._kv.failure is not None or not self._kv.manifest.state().tables.keys().isdisjoint(ids)

    def _assign_level(self, loaded: Sequence[SSTable]) -> list[SSTable]:
        """Write the level of loaded tables into their files, and open them. REQUIRES the compaction lock."""
        from quire.lsm.sst_format import set_level

        kv = self._kv
        level = compaction.level_for(kv.view.levels, loaded, kv.settings) if loaded else 0
        for table in loaded:
            if table.meta.level == level:
                sync_file(kv.disk, table.path)  # for the archive's recorder: an executor may have written the file
                continue
            with closing(kv.disk.open(table.path)) as file:
                set_level(file, table.path, level)
        return [open_table(kv.disk, table.path, table.meta.sst_id, kv.cache) for table in loaded]

    def abandon_tables(self, ids: Iterable[int]) -> None:
        """Give up tables that no event will name. Files that exist are removed now, files still being written later."""
        self._abandoned_paths.update(self._kv.home.sst(sst_id) for sst_id in ids)
        self._remove_abandoned()

    def _remove_abandoned(self) -> None:
        for path in list(self._abandoned_paths):
            with suppress(StorageFault, FileNotFoundError):
                self._kv.disk.remove(path)
        if len(self._abandoned_paths) > ABANDONED_MAX:
            self._abandoned_paths.clear()

    # ── compaction ────────────────────────────────────────────────────────────────────────────────────────────────────
    def compact_all(self) -> None:
        """Merge all tables into one level, in the caller's thread."""
        with self._compacting:
            self._kv.require()
            job = compaction.pick_all(self._kv.view.levels)
            if job is not None:
                self._compact(job, self._jobs)
                del job  # it references the input tables, whose files `collect` is to remove
            self.collect()

    def compact_due(self, *, as_job: bool = True) -> bool:
        """Run one due compaction in the caller's thread. Return whether one was due. `as_job`: record it as a job."""
        with self._compacting:
            self._kv.require()
            job = compaction.pick(self._kv.view.levels, self._kv.settings, self._turn)
            if job is None:
                self.collect()
                return False
            self._turn += 1
            self._compact(job, self._jobs if as_job else None)
            return True

    def _compact(self, job: compaction.MergeJob, jobs: CompactionJobs | None) -> None:
        """Merge the inputs and publish the outputs. REQUIRES the compaction lock."""
        from quire.lsm.merge import merge_tables  # loads Arrow, which is not needed before the first compaction

        kv = self._kv
        if jobs is not None:
            jobs.begin(job)
        retention = self.retention(job)
        hit("lsm.compaction.begun")
        written = merge_tables(
            kv.disk,
            job.inputs,
            retention,
            level=job.level,
            table_bytes=kv.settings.table_bytes,
            options=self._options,
            new_table=self._new_table,
        )
        added = [open_table(kv.disk, path, meta.sst_id, kv.cache) for path, meta in written]
        hit("lsm.compaction.written")
        self.publish(job, added)
        if jobs is not None:
            size = sum(table.size_bytes for table in added)
            jobs.done({"tables": len(added), "size_bytes": size, "rows": sum(t.meta.rows for t in added)})

    def retention(self, job: compaction.MergeJob) -> compaction.VersionRetention:
        """Return what a compaction that begins now must keep: versions that open snapshots read, and tombstones that will hide
        rows of a load in progress.

        A snapshot taken later is above every lsn of the inputs, and needs only the newest version of each key.
        """
        kv = self._kv
        return compaction.VersionRetention(
            snapshots=kv.snapshots.lsns(), drop_tombstones_below=min(job.drop_below, *kv.loading, job.drop_below)
        )

    def publish(self, job: compaction.MergeJob, added: Sequence[SSTable]) -> None:
        """Replace the inputs of a compaction by its outputs, atomically. REQUIRES the compaction lock."""
        kv = self._kv
        with self._discard_unless_logged(added):
            kv.manifest.compaction(
                [_entry(table.meta.sst_id) for table in added], [table.meta.sst_id for table in job.inputs]
            )
            hit("lsm.compaction.recorded")
            kv.install(added=added, removed=job.inputs)
        for table in job.inputs:
            self._dead.add(table.path)
            table.call_when_unreferenced(partial(self._garbage.append, table.path))  # a view or scan may still read it
        self.compactions += 1
        kv.fold()
        with self._flushing:  # a flush may be checkpointing too
            self._checkpoint_manifest()

    @contextmanager
    def compaction_lock(self) -> Iterator[None]:
        """Block other compactions during the block."""
        with self._compacting:
            self._kv.require()
            yield

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Block flushes and compactions during the block."""
        with self._compacting, self._flushing:
            yield

    def dead_paths(self) -> frozenset[str]:
        """Return the files of tables that are dead and may still be read, or that no event will name."""
        self._remove_abandoned()
        return frozenset(self._dead | self._abandoned_paths)

    def _new_table(self) -> tuple[int, str]:
        sst_id = self._kv.manifest.allocate_sst_id()
        return sst_id, self._kv.home.sst(sst_id)

    def collect(self) -> int:
        """Remove the files of dead tables without readers. Return how many were removed."""
        removed = 0
        self._remove_abandoned()
        # Not before LMDB has the compaction: if the manifest lost that event, its inputs would be live again.
        while self._garbage and self._kv.is_fold_committed:
            path = self._garbage.popleft()
            with suppress(StorageFault, FileNotFoundError):
                self._kv.disk.remove(path)
                removed += 1
            self._dead.discard(path)
            hit("lsm.compaction.removed")
        return removed


def _entry(sst_id: int) -> ManifestSstEntry:
    return ManifestSstEntry(sst_id, sst_entry_path(sst_id))
