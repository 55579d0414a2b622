"""Background work of a key-value database: flushes, compactions, checkpoints of the manifest, removal of obsolete files.

What is on disk, step by step, and what a crash there leaves
  a flush writes its table        a file that no event names: swept at the next open
  AddSst, RemoveFrozenWal         the table is live; after a crash between the two recovery skips the WAL's batches
  LMDB records it                 from here on a manifest without these events is known to be damaged
  the WAL's file goes             a file that no event names
  a compaction writes tables      files that no event names
  one Compaction event            the new ones are live and the old ones are not, at once
  the old files go                when nobody reads them any more; else at the next open

A file goes only after the event that makes it dead is durable and recorded in LMDB: so no damage to the manifest alone can
cost what the file held. A flush or compaction that fails leaves everything as it was and is retried; writers get the error.

Threads: those of the store's background, at most one flushes and one compacts; `flush_all` and `compact_all` do the same in
the caller's. Neither lock is taken with the write lock held; the compaction lock comes before the flush lock."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from quire.core.background import Background, Task
from quire.core.errors import InternalError, Overloaded, QuireError, StorageFault, StoreClosed, StoreUnusable
from quire.core.events import emit
from quire.durable.failpoints import hit
from quire.durable.files import sync_file
from quire.durable.names import sst_entry_path
from quire.lsm import compaction
from quire.lsm.load_notes import LoadNote, remove_note, write_note
from quire.lsm.manifest_data import ManifestSstEntry
from quire.lsm.memtable import Memtable
from quire.lsm.view import open_table

if TYPE_CHECKING:
    from quire.lsm.kv import Kv
    from quire.lsm.projection import CompactionJobs
    from quire.lsm.sst_reader import SSTable


class Stalls:
    """Writers that wait because too many memtables wait for their flush, or too many tables of level 0 for a compaction.

    A writer waits without the write lock, so that flushes, reads and snapshots do not wait behind it; for `stall_seconds` at
    most, and not for a background that has stopped or failed. Raises `Overloaded`, `StoreClosed`, and what stopped the
    background.
    """

    def __init__(self, kv: Kv) -> None:
        self._kv = kv
        # guarded by the condition that is given to `wait`
        self.waiting = 0
        """Writers that wait, now."""
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
        """Return when there is room; `changed` is notified with every change of the view."""
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
        kv.upkeep.raise_trouble()
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
"""Between two tries of something that failed."""


FORSAKEN_MAX = 10_000
"""Files of loads that are over and are still looked for; what others leave is swept at the next open."""


class KvBackground:
    """The threads that work for all databases of a store: flushes do not wait behind compactions."""

    def __init__(self, threads: int) -> None:
        self.flushing = Background("lsm-flush", threads_max=threads)
        self.compacting = Background("lsm-compact", threads_max=threads)

    def stop(self) -> None:
        """Wait for what runs, and begin nothing more."""
        self.flushing.stop()
        self.compacting.stop()

    def forked(self) -> None:
        """In the child of a fork(): the threads are the parent's."""
        self.flushing.forked()
        self.compacting.forked()


class KvMaintenance:
    """The background of one database."""

    def __init__(self, kv: Kv, jobs: CompactionJobs | None, background: KvBackground | None) -> None:
        self._kv = kv
        self._jobs = jobs
        self._options = compaction.table_options(kv.settings)
        self._flushing = threading.Lock()
        self._compacting = threading.Lock()
        self._stopping = threading.Event()
        self._turn = 0
        self._garbage: deque[str] = deque()
        """Files that nobody can reach; filled by finalizers, in any thread."""
        self._dead: set[str] = set()
        """Files that no event names any more, and that may still be read."""
        self._forsaken: set[str] = set()
        """Files of loads that are over: a task that nobody waits for may still write one."""
        self._trouble: QuireError | None = None
        self.flushes = 0
        self.compactions = 0
        self._tasks: list[Task] = []
        if background is not None:
            self._tasks = [
                background.flushing.task(partial(self._work, self.flush_one)),
                background.compacting.task(partial(self._work, self.compact_due)),
            ]
        self.wake()

    # ── life ──────────────────────────────────────────────────────────────────────────────────────────────────────────
    @property
    def is_running(self) -> bool:
        """Whether the background does anything."""
        return bool(self._tasks) and not self._stopping.is_set()

    @property
    def is_busy(self) -> bool:
        """Whether something is being flushed or compacted, or is to be."""
        return not all(task.is_idle for task in self._tasks)

    def wake(self) -> None:
        """There may be work."""
        for task in self._tasks:
            task.ask()

    def stop(self) -> None:
        """End the background; what it is doing is finished first."""
        self._stopping.set()
        for task in self._tasks:
            task.stop()
        if self._jobs is not None:
            self._jobs.close()
        self.collect()

    def raise_trouble(self) -> None:
        """Tell a writer why the background does not get on."""
        if (why := self._trouble) is not None:
            raise type(why)(why.what, hint=why.hint, **why.where) from why

    def _work(self, step: Callable[[], bool]) -> float | None:
        """What is due; in how many seconds to try again, if it failed."""
        try:
            while not self._stopping.is_set() and self._kv.failure is None and step():
                self._trouble = None
        except Exception as error:
            self._complain(error)
            if self._kv.failure is None and not self._stopping.is_set():
                return RETRY_SECONDS
        return None

    def _complain(self, error: Exception) -> None:
        if isinstance(error, StoreClosed) or self._kv.failure is not None:
            return
        if not isinstance(error, QuireError):
            error = InternalError(f"the background failed: {error!r}", path=self._kv.home.path)
        self._trouble = error
        if not isinstance(error, StorageFault):  # damage or a bug: no retry will help
            self._kv.fail(error)
        emit("error", "lsm.background_failed", path=self._kv.home.path, error=str(error))
        self._kv.notify()

    # ── flush ─────────────────────────────────────────────────────────────────────────────────────────────────────────
    def flush_all(self) -> None:
        """Flush every frozen memtable, in the caller's thread."""
        while self.flush_one():
            pass

    def flush_one(self) -> bool:
        """Flush the oldest frozen memtable; whether there was one.

        In the order in which they were written, one at a time: so a table's lsns are above those of every table flushed before.
        """
        kv = self._kv
        with self._flushing:
            kv.require()
            if not kv.view.frozen:
                return False
            kv.fold()  # which WAL took over: a manifest that has forgotten it would pass for one before the rotation
            oldest = kv.view.frozen[-1]
            added = [self._write_memtable(oldest.memtable)] if oldest.memtable.entries else []
            hit("lsm.flush.written")
            with self._recording(added):
                kv.manifest.flushed(_entry(added[0].meta.sst_id) if added else None, oldest.wal)
            hit("lsm.flush.recorded")
            kv.install(flushed=oldest, added=added)
            self.flushes += 1
            kv.fold()
            hit("lsm.flush.folded")
            if kv.is_recorded:  # else the next open removes it
                with suppress(StorageFault, FileNotFoundError):
                    kv.disk.remove(kv.home.wal(oldest.wal))
            hit("lsm.flush.done")
            self._checkpoint_manifest()
        self.wake()
        return True

    def _write_memtable(self, memtable: Memtable) -> SSTable:
        from quire.lsm.sst_writer import TableWriter  # Arrow: not before something is flushed

        kv = self._kv
        sst_id = kv.manifest.allocate_sst_id()
        writer = TableWriter(sst_id, 0, self._options)
        for batch in memtable.rows_between(b"", None):
            writer.add(batch)
        hit("lsm.flush.begun")
        path = kv.home.sst(sst_id)
        writer.write(kv.disk, path)
        return open_table(kv.disk, path, sst_id, kv.cache)

    @contextmanager
    def _recording(self, added: Sequence[SSTable]) -> Iterator[None]:
        """An event is being logged that names new tables. If it certainly was not, they are garbage."""
        kv = self._kv
        try:
            yield
        except StorageFault:
            for table in added:
                table.close()
                with suppress(StorageFault, FileNotFoundError):
                    kv.disk.remove(table.path)
            kv.fold()  # the log was abandoned, and the one behind it is not known yet
            raise
        except StoreUnusable as error:
            kv.fail(error)
            raise

    def _checkpoint_manifest(self) -> None:
        # Not twice without a record in between: an open knows the log that was recorded, and the one behind its checkpoint.
        manifest = self._kv.manifest
        is_recorded = self._kv.is_recorded and manifest.is_recorded
        if is_recorded and manifest.log_bytes >= self._kv.settings.manifest_log_bytes:
            with self._recording(()):
                manifest.checkpoint()
            self._kv.fold()  # an event that fails next makes another checkpoint

    def add_tables(self, loaded: Sequence[SSTable], lsn: int, note: LoadNote | None) -> None:
        """Have a load's tables in the database, when everything older is in tables too; remembered, if there is a note."""
        kv = self._kv
        while any(frozen.memtable.lsn_max < lsn for frozen in kv.view.frozen):
            self.flush_one()
        hit("lsm.load.flushed")
        with self._compacting:  # until the note is done: load_notes.py
            kv.require()
            tables = self._levelled(loaded)
            if note is not None:
                write_note(kv.disk, kv.home, note)
                hit("lsm.load.announced")
            if tables:
                try:
                    with self._recording(tables):
                        kv.manifest.compaction([_entry(table.meta.sst_id) for table in tables], [])
                except StorageFault:
                    if note is not None:
                        remove_note(kv.disk, kv.home, note.number)
                    raise
                hit("lsm.load.recorded")
                kv.install(added=tables)
                kv.fold()
            if note is not None:
                try:
                    write_note(kv.disk, kv.home, msgspec.structs.replace(note, done=True))
                except BaseException as error:
                    kv.fail(error)  # what a repeated commit would be told is known again after the next open
                    raise
                hit("lsm.load.remembered")
        self.wake()

    def _levelled(self, loaded: Sequence[SSTable]) -> list[SSTable]:
        """Loaded tables, opened, each with its level in its file. REQUIRES the compaction lock."""
        from quire.lsm.sst_format import set_level

        kv = self._kv
        level = compaction.level_for(kv.view.levels, loaded, kv.settings) if loaded else 0
        for table in loaded:
            if table.meta.level == level:
                sync_file(kv.disk, table.path)  # an executor may have written it: the archive has to learn of it
                continue
            file = kv.disk.open(table.path)
            try:
                set_level(file, table.path, level)
            finally:
                file.close()
        return [open_table(kv.disk, table.path, table.meta.sst_id, kv.cache) for table in loaded]

    def forsake(self, ids: Iterable[int]) -> None:
        """Nobody will name these tables: their files go now, and those that somebody still writes with the next look."""
        self._forsaken.update(self._kv.home.sst(sst_id) for sst_id in ids)
        self._remove_forsaken()

    def _remove_forsaken(self) -> None:
        for path in list(self._forsaken):
            with suppress(StorageFault, FileNotFoundError):
                self._kv.disk.remove(path)
        if len(self._forsaken) > FORSAKEN_MAX:
            self._forsaken.clear()

    # ── compaction ────────────────────────────────────────────────────────────────────────────────────────────────────
    def compact_all(self) -> None:
        """Merge all tables into one level, in the caller's thread."""
        with self._compacting:
            self._kv.require()
            job = compaction.pick_all(self._kv.view.levels)
            if job is not None:
                self._compact(job, self._jobs)
                del job  # it holds the tables that are to go
            self.collect()

    def compact_due(self, *, as_job: bool = True) -> bool:
        """Do one compaction that is due, in the caller's thread; whether there was one. `as_job`: it is a job of the store."""
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
        """REQUIRES the compaction lock."""
        from quire.lsm.merge import merge_tables  # Arrow: not before something is compacted

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
        """What a compaction that begins now must keep: versions for open snapshots, and tombstones that hide what a load
        will bring.

        A snapshot that is taken later is above everything in the inputs, and needs only the newest of each key.
        """
        kv = self._kv
        return compaction.VersionRetention(
            snapshots=kv.snapshots.lsns(), drop_tombstones_below=min(job.drop_below, *kv.loading, job.drop_below)
        )

    def publish(self, job: compaction.MergeJob, added: Sequence[SSTable]) -> None:
        """Have the outputs of a compaction live and its inputs not. REQUIRES the compaction lock."""
        kv = self._kv
        with self._recording(added):
            kv.manifest.compaction(
                [_entry(table.meta.sst_id) for table in added], [table.meta.sst_id for table in job.inputs]
            )
        hit("lsm.compaction.recorded")
        kv.install(added=added, removed=job.inputs)
        for table in job.inputs:
            self._dead.add(table.path)
            table.on_last(partial(self._garbage.append, table.path))  # a view or scan may still read it
        self.compactions += 1
        kv.fold()
        with self._flushing:  # who flushes may be checkpointing
            self._checkpoint_manifest()

    @contextmanager
    def compacting(self) -> Iterator[None]:
        """No other compaction meanwhile."""
        with self._compacting:
            self._kv.require()
            yield

    @contextmanager
    def held(self) -> Iterator[None]:
        """Neither flush nor compaction meanwhile."""
        with self._compacting, self._flushing:
            yield

    def dead_paths(self) -> frozenset[str]:
        """Files of tables that are dead and may still be read, or that nobody will name."""
        self._remove_forsaken()
        return frozenset(self._dead | self._forsaken)

    def _new_table(self) -> tuple[int, str]:
        sst_id = self._kv.manifest.allocate_sst_id()
        return sst_id, self._kv.home.sst(sst_id)

    def collect(self) -> int:
        """Remove the files that nobody can reach any more; how many."""
        removed = 0
        self._remove_forsaken()
        while self._garbage and self._kv.is_recorded:
            path = self._garbage.popleft()
            with suppress(StorageFault, FileNotFoundError):
                self._kv.disk.remove(path)
                removed += 1
            self._dead.discard(path)
            hit("lsm.compaction.removed")
        return removed


def _entry(sst_id: int) -> ManifestSstEntry:
    return ManifestSstEntry(sst_id, sst_entry_path(sst_id))
