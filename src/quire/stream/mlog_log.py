"""The manifest log of one stream: keeps state and writer in step, takes snapshots, uploads, and removes old files.

A record is checked against the transition table, appended and folded in one critical section: the live index is always the
fold of the records that the writer holds, and `recover` returns the fold of the records that were committed. `tick` is one
round of upkeep: rotate a chunk that is due, upload sealed chunks, take a snapshot, remove old files. The log's own uploads are
not records: header bit 1 marks an uploaded chunk (S3).

Threads: any; one lock, which also covers the writer. `tick` does not hold it while it uses the object store, and only one
thread ticks at a time.
Raises: `IllegalTransition`, `StoreUnusable`, `StoreClosed`, `DiskFull`; on opening `StoreLocked`, `ManifestIntegrityError`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence

import msgspec

from quire.core.clock import Clock
from quire.core.closing import AbandonedOnError
from quire.core.errors import ManifestIntegrityError, StorageFault, StoreClosed, Unavailable
from quire.core.events import emit
from quire.core.settings import ManifestLogSettings
from quire.durable.failpoints import hit
from quire.durable.files import read_all, remove_if_exists
from quire.durable.locks import FileLock, NoopLock
from quire.stream.files import LogFiles
from quire.stream.metrics import LogFigures, count_crc_error, crc_errors
from quire.stream.mlog_format import NO_SEGMENT, log_fields
from quire.stream.mlog_index import ManifestIndex
from quire.stream.mlog_reader import LogPosition, ManifestLogReader
from quire.stream.mlog_records import Payload, SnapshotMarker, Tier2Deleted, Tier2DeleteQueued
from quire.stream.mlog_recovery import (
    Reconciled,
    RecoveredLog,
    local_facts,
    mark_uploaded,
    reconcile,
    recover,
)
from quire.stream.mlog_snapshot import write_snapshot
from quire.stream.mlog_tier2 import LogObjects
from quire.stream.mlog_writer import ManifestLogWriter, begin_log, lock_log

RESERVED_BYTES = 1024
"""Bytes in the log for ending a segment and beginning the next, with a margin."""
Collect = Callable[[Sequence[str]], None]
"""Passes objects to the collector, by their keys in the store's own object store (A3)."""

RETRY_SECONDS = 0.25
RETRY_SECONDS_MAX = 30.0


class Ticked(msgspec.Struct):
    """The result of a round of upkeep."""

    rotated: int | None = None
    uploaded: list[int] = msgspec.field(default_factory=list)
    snapshot_id: int | None = None
    removed: list[int] = msgspec.field(default_factory=list)
    deleted: list[str] = msgspec.field(default_factory=list)
    failed: str = ""
    """The error of the object store, if it failed; otherwise empty."""


class ManifestLog(AbandonedOnError):
    """The manifest log of one stream, open for writing. Use `open` to create one."""

    def __init__(
        self,
        files: LogFiles,
        writer: ManifestLogWriter,
        recovered: RecoveredLog,
        clock: Clock,
        settings: ManifestLogSettings,
        objects: LogObjects | None,
        collect: Collect,
    ) -> None:
        # Constant after construction.
        self.files = files
        self.objects = objects
        self._collect = collect
        self._clock = clock
        self._settings = settings
        self._writer = writer
        self._replay_seconds = recovered.seconds
        # Under the lock.
        self._lock = threading.RLock()
        self.index: ManifestIndex = recovered.index
        self._snapshot_position = recovered.snapshot_position
        # Under the ticking lock.
        self._ticking = threading.Lock()
        self._retries = 0
        self._upload_failed = False
        """Whether the next round's uploads are retries."""
        self._failures = 0
        self._retry_at = clock.monotonic()
        self._remote_snapshots: set[int] | None = None
        """Snapshots in tier 2: listed once, then tracked. A listing per tick would cost more than the uploads."""

    @classmethod
    def open(
        cls,
        files: LogFiles,
        *,
        clock: Clock,
        settings: ManifestLogSettings,
        objects: LogObjects | None = None,
        collect: Collect = lambda _: None,
    ) -> ManifestLog:
        """Recover the state and open the log for appending. `collect` is for logs that have objects."""
        fetch = objects.fetch if objects is not None else None
        lock = begin_log(files, clock)  # before anything is read: another writer may still be committing
        try:
            recovered = recover(files, clock, fetch)
            start = (recovered.end.chunk_index, recovered.index.records)
            writer = ManifestLogWriter.open(files, clock=clock, settings=settings, start=start, lock=lock)
        except BaseException as error:
            lock.close()
            if isinstance(error, ManifestIntegrityError):
                count_crc_error(files.stream_id)
                emit("error", "stream.mlog.quarantined", stream=files.stream_id, what=error.what, **log_fields(error))
            raise
        return cls(files, writer, recovered, clock, settings, objects, collect)

    # ── writing ───────────────────────────────────────────────────────────────────────────────────────────────────────
    def append(self, value: Payload, segment_id: int = NO_SEGMENT, *, logical_offset: int = 0) -> LogPosition:
        """Append a record to the log and fold it into the state. It is durable after `commit`."""
        with self._lock:
            self.index.check(value, segment_id)
            if self._writer.is_full:
                self._writer.rotate()
            offset = self._writer.append(value, segment_id, logical_offset=logical_offset)
            self.index.fold_raw(self._writer.records_from(offset))
            return LogPosition(self._writer.position.chunk_index, offset)

    def reserve(self) -> None:
        """Reserve space for a few more records. A full disk is `DiskFull` here, and the log stays usable."""
        with self._lock:
            if self._writer.is_full:
                self._writer.rotate()
            self._writer.reserve(RESERVED_BYTES)

    def commit(self) -> LogPosition:
        """Make appended records durable, and return the end of the log."""
        with self._lock:
            return self._writer.commit()

    def rotate(self) -> int | None:
        """Seal the active chunk, whatever its age, and return its index; `None` if it has no records."""
        with self._lock:
            return self._writer.rotate()

    def rotate_when_due(self) -> float | None:
        """Seal the active chunk if it is due; otherwise return the seconds until it is, `None` if nothing requires it."""
        with self._lock:
            due = self._writer.rotation_due_in()
            if due == 0:
                self._writer.rotate()
            return due or None

    @property
    def committed(self) -> LogPosition:
        return self._writer.committed

    def snapshot(self) -> int:
        """Write a snapshot of the state and its marker, and return its id."""
        with self._lock:
            # A snapshot may not be ahead of the log: after power loss, recovery would refuse a log that ends before it.
            position = self._writer.commit()
            snapshot_id = max([self.index.snapshot_id, *self.files.snapshots()]) + 1
            write_snapshot(self.files, snapshot_id, position, self.index, self._uploaded_upto())
            self.append(SnapshotMarker(*position, snapshot_id))
            self._writer.commit()
            hit("stream.mlog.snapshot.marked")
            self._snapshot_position = position
            self._announce("snapshot", "snapshot", *position)
            return snapshot_id

    # ── upkeep ────────────────────────────────────────────────────────────────────────────────────────────────────────
    def tick(self) -> Ticked:
        """Run one round of upkeep. Errors of the object store are counted and reported, not raised."""
        done = Ticked()
        with self._ticking:
            with self._lock:
                if self._writer.needs_rotation():
                    done.rotated = self._writer.rotate()
                if self._sealed_since_snapshot() >= self._settings.snapshot_chunks:
                    done.snapshot_id = self.snapshot()
            if self.objects is not None and self._clock.monotonic() >= self._retry_at:
                self._retries += self._upload_failed
                self._talk(self.objects, done)
            with self._lock:
                done.removed = self._retain()
        return done

    def upload(self) -> list[int]:
        """Upload every sealed chunk and snapshot that has no object yet, and return the chunks. Errors of the object store are
        raised."""
        assert self.objects is not None
        done = Ticked()
        with self._ticking:
            self._upload_all(self.objects, done)
        return done.uploaded

    def reconcile(self) -> Reconciled:
        """Compare the chunks that recovery would read, those on disk from the newest snapshot on, with tier 2, and upload
        missing ones. A stream does this in its first round of upkeep."""
        assert self.objects is not None
        with self._ticking:
            return reconcile(self.files, self.objects, self._snapshot_position.chunk_index)

    def queue_own_deletes(self, keys: Iterable[str]) -> None:
        """Record durably that objects of the log are superseded."""
        with self._lock:
            for key in keys:
                if key not in self.index.own_deletes:
                    self.append(Tier2DeleteQueued(key))
            self._writer.commit()

    def drain_own_deletes(self) -> list[str]:
        """Delete the queued objects of the log, record it, and return their keys."""
        assert self.objects is not None
        with self._lock:
            keys = sorted(self.index.own_deletes)
        # Without the lock: this may take seconds. Recorded afterwards, so that a crash in between repeats the deletion,
        # which is no error.
        self._collect(keys)
        hit("stream.mlog.own_deleted")
        with self._lock:
            for key in keys:
                self.append(Tier2Deleted(key))
            self._writer.commit()
        return keys

    def count_retry(self) -> None:
        """Count the retry of a segment's upload."""
        with self._ticking:
            self._retries += 1

    def figures(self) -> LogFigures:
        """Return the log's metrics, under the design document's names."""
        with self._lock:
            taken_ms = self.index.snapshot_ms
            return LogFigures(
                stream_id=self.files.stream_id,
                manifest_chunks_active=len(self.files.chunks()),
                manifest_replay_seconds=self._replay_seconds,
                manifest_crc_error_count=crc_errors(self.files.stream_id),
                manifest_upload_retries=self._retries,
                manifest_snapshot_age_seconds=max(self._clock.now_ms() - taken_ms, 0) / 1000 if taken_ms else 0.0,
            )

    def close(self) -> None:
        """Commit and close."""
        with self._lock:
            self._writer.close()

    def abandon(self) -> None:
        """Close without committing."""
        with self._lock:
            self._writer.abandon()

    def _talk(self, objects: LogObjects, done: Ticked) -> None:
        try:
            self._upload_all(objects, done)
            self._retire_snapshots(objects)
            if self.index.own_deletes:
                done.deleted = self.drain_own_deletes()
        except (Unavailable, StorageFault) as error:
            self._upload_failed = bool(self._to_upload()) or bool(self.files.snapshots())
            wait = min(RETRY_SECONDS * 2**self._failures, RETRY_SECONDS_MAX)
            self._failures = min(self._failures + 1, 16)
            self._retry_at = self._clock.monotonic() + wait
            done.failed = str(error)
            emit(
                "warning",
                "stream.mlog.upload_failed",
                stream=self.files.stream_id,
                tier_action="upload",
                retry_seconds=wait,
                cause=str(error),
            )
        else:
            self._failures = 0
            self._upload_failed = False

    def _upload_all(self, objects: LogObjects, done: Ticked) -> None:
        reader = ManifestLogReader(self.files)
        for index in self._to_upload():
            chunk = reader.chunk(index)
            objects.put_chunk(chunk)
            hit("stream.mlog.uploaded")
            # Only now: `_retain` removes chunks that have this mark.
            mark_uploaded(self.files, index)
            done.uploaded.append(index)
            self._announce("chunk_uploaded", "upload", index, chunk.header.committed_len)
        newest = self.files.snapshots()[:1]
        if newest and self._remote_snapshots is None:
            self._remote_snapshots = set(objects.own_listing().snapshots)
        for snapshot_id in newest:
            assert self._remote_snapshots is not None
            if snapshot_id not in self._remote_snapshots:
                objects.put_snapshot(snapshot_id, read_all(self.files.disk, self.files.snapshot(snapshot_id)))
                self._remote_snapshots.add(snapshot_id)

    def _retire_snapshots(self, objects: LogObjects) -> None:
        """Queue snapshots in tier 2 beyond the newest ones for deletion."""
        old = sorted(self._remote_snapshots or (), reverse=True)[self._settings.snapshots_kept :]
        if self._remote_snapshots is not None and old:
            self.queue_own_deletes([objects.snapshot_key(snapshot_id) for snapshot_id in old])
            self._remote_snapshots.difference_update(old)

    def _announce(self, event: str, action: str, chunk_index: int, chunk_offset: int) -> None:
        """Emit an event about the log itself. `Ledger` emits those about segments."""
        emit(
            "info",
            f"stream.mlog.{event}",
            stream=self.files.stream_id,
            tier_action=action,
            chunk_index=chunk_index,
            chunk_offset=chunk_offset,
        )

    def _sealed(self) -> list[int]:
        return [index for index in self.files.chunks() if index < self._writer.position.chunk_index]

    def _to_upload(self) -> list[int]:
        with self._lock:
            sealed = self._sealed()
        return [index for index in sealed if not local_facts(self.files.disk, self.files, index).header.uploaded]

    def _uploaded_upto(self) -> int:
        return min(self._to_upload(), default=self._writer.position.chunk_index)

    def _sealed_since_snapshot(self) -> int:
        return self._writer.position.chunk_index - self._snapshot_position.chunk_index

    def _retain(self) -> list[int]:
        """Remove files that are no longer needed, oldest first, so that the remaining ones have no gaps; return the chunks."""
        sealed = self._sealed()
        kept = max(self._settings.sealed_kept, 0)
        removed = []
        for index in sealed[: len(sealed) - kept] if kept else sealed:
            # Recovery reads from this chunk on, and must not depend on tier 2.
            if index >= self._snapshot_position.chunk_index:
                break
            header = local_facts(self.files.disk, self.files, index).header
            if not header.uploaded:
                break
            self.files.disk.remove(self.files.chunk(index))
            hit("stream.mlog.evicted")
            removed.append(index)
            self._announce("chunk_evicted", "evict", index, header.committed_len)
        old = self.files.snapshots()[self._settings.snapshots_kept :]
        for snapshot_id in old:
            remove_if_exists(self.files.disk, self.files.snapshot(snapshot_id))
        if removed or old:
            self.files.disk.sync_dir(self.files.directory)
        return removed


class AbsentLog(ManifestLog):
    """A placeholder for a log that is not open, because its mode is off or a shadow failed. It reads and writes nothing.

    It holds the log's lock, so the stream still has one writer. `Ledger.guarded` calls none of its operations.
    """

    def __init__(
        self, files: LogFiles, objects: LogObjects | None, clock: Clock, reopen: Callable[[], ManifestLog]
    ) -> None:
        self.files = files
        self.objects = objects
        self.index = ManifestIndex()
        self._reopen = reopen
        self._file_lock: FileLock | NoopLock = lock_log(files, clock)

    def open_again(self) -> ManifestLog:
        """Release the lock, and open the log itself."""
        self._file_lock.close()
        return self._reopen()

    def append(self, value: Payload, segment_id: int = NO_SEGMENT, *, logical_offset: int = 0) -> LogPosition:
        raise StoreClosed(
            "the manifest log is not open",
            hint="enable it with `quire manifest mode on`",
            record=value,
            segment=segment_id,
            offset=logical_offset,
        )

    def figures(self) -> LogFigures:
        return LogFigures(stream_id=self.files.stream_id, manifest_crc_error_count=crc_errors(self.files.stream_id))

    def close(self) -> None:
        self._file_lock.close()

    def abandon(self) -> None:
        self._file_lock.close()
