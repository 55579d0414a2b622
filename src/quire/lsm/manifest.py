"""The manifest of one key-value database: the WALs and tables that make up the database (the key-value manifest document).

An event is logged and synced before it is applied in memory. A checkpoint writes the whole state as a snapshot. Each log has a
random salt, which identifies its *life*; a snapshot names the life that it covers, and no event of that life is replayed.

What is on disk after each step, and what an open finds after a crash
  an event is appended        the event or not: a torn tail is cut (P4)
  the log is synced           the event
  a checkpoint, steps 1 to 5  the old snapshot, the log; MANIFEST-000001.tmp is removed
  step 6, the rename          the old snapshot or the new one, each with a log that fits it
  step 7, the directory       the new snapshot; the log is covered, and replaced by an empty one
  step 8, the new log         the new snapshot and an empty log

After a failed append or sync the contents of the disk are unknown. The log is then abandoned: the state without the event is
written as a snapshot that covers the log, so the event never reappears. If that fails too, or a signal handler
raises during the change (Ctrl-C), the manifest is unusable until it is opened again. If LMDB has recorded an end of the log
(witnesses.py), the log must reach it, or exactly one checkpoint must have followed; so no checkpoint covers a log whose life
is not recorded yet.

Threads: any; one lock for all changes. Format page: `docs/formats/lsm-manifest.md`. Errors carry the design document's `kind`
(manifest_data.py). Raises `StoreUnusable`, `StoreClosed`, `StorageFault`, `Corruption`, `SnapshotChecksumMismatch`,
`FormatTooNew`, `InternalError`."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from typing import Any

import msgspec

from quire.core.closing import ClosedOnExit
from quire.core.errors import Corruption, InternalError, QuireError, StorageFault, StoreClosed, StoreUnusable
from quire.core.events import emit
from quire.durable.failpoints import hit
from quire.durable.files import Disk, read_all
from quire.durable.log_format import NAMED_HEADER_BYTES, LogHeader, decode_header
from quire.durable.log_reader import LogContents, LogEnd, read_on, scan
from quire.durable.log_writer import LogWriter
from quire.durable.names import TEMPORARY, LsmHome
from quire.lsm.manifest_data import (
    AddFrozenWal,
    AddSst,
    AllocateSstId,
    Compaction,
    ErrorKind,
    ManifestData,
    ManifestEvent,
    ManifestSstEntry,
    RemoveFrozenWal,
    RemoveSst,
    SetActiveWal,
    UpdateLsn,
    Version,
    of_kind,
)
from quire.lsm.manifest_format import (
    LOG_FIRST,
    LOG_NEXT,
    ManifestSnapshot,
    decode_snapshot,
    encode_event,
    encode_snapshot,
    replay,
    snapshot_crc32,
)
from quire.lsm.witnesses import REPAIR, Owner, StoreFacts, log_end


class Manifest(ClosedOnExit):
    """An open manifest; made by `Manifest.open`."""

    def __init__(
        self, disk: Disk, home: LsmHome, owner: Owner, log: LogWriter, snapshot_crc32: int, data: ManifestData
    ) -> None:
        # constant after construction
        self._disk = disk
        self._home = home
        self._owner = owner
        self.has_projection = False
        """Whether ends of the log are recorded in LMDB; if so, a life that is not recorded must not be covered."""
        # guarded by _lock
        self._lock = threading.RLock()
        self._log = log
        self._snapshot_crc32 = snapshot_crc32
        self._data = data
        self._is_log_recorded = True
        self._failure: QuireError | None = None

    # ── lifecycle ─────────────────────────────────────────────────────────────────────────────────────────────────────
    @classmethod
    def open(
        cls,
        disk: Disk,
        home: LsmHome,
        facts: StoreFacts | None = None,
        *,
        number: int = 0,
        examine: Callable[[ManifestData], None] | None = None,
    ) -> Manifest:
        """Recover the manifest below `home`: the snapshot, then the log. Create an empty one if there is none, unless `facts`
        state that there was one.

        `number`: the number of a copy (snapshots.py), else 0. `examine` is called with the recovered state before any file of
        the manifest is changed, and may raise."""
        facts = facts or StoreFacts()
        if facts.files_created and not (disk.exists(home.manifest_log) or disk.exists(home.manifest_snapshot)):
            raise Corruption("the manifest is missing", hint=REPAIR, path=home.path, kind=ErrorKind.WAL.value)
        directory = os.path.dirname(home.manifest_log)
        with of_kind(ErrorKind.IO):
            disk.make_dirs(directory)
            for left in (home.manifest_log + TEMPORARY, home.manifest_snapshot + TEMPORARY):
                if disk.exists(left):
                    disk.remove(left)
            snapshot = None
            if disk.exists(home.manifest_snapshot):
                snapshot = decode_snapshot(read_all(disk, home.manifest_snapshot), home.manifest_snapshot)
        with of_kind(ErrorKind.WAL):
            manifest = cls._open_log(disk, home, snapshot, facts, number, examine or (lambda _: None))
        manifest.has_projection = facts.projection is not None
        manifest._is_log_recorded = facts.ends is None or facts.ends.manifest.salt == manifest.log_salt
        return manifest

    @classmethod
    def _open_log(
        cls,
        disk: Disk,
        home: LsmHome,
        snapshot: ManifestSnapshot | None,
        facts: StoreFacts,
        number: int,
        examine: Callable[[ManifestData], None],
    ) -> Manifest:
        path, owner = home.manifest_log, facts.owner
        data = snapshot.manifest_data if snapshot is not None else ManifestData()
        checksum = snapshot.checksum if snapshot is not None else 0
        if not disk.exists(path):
            if snapshot is not None:
                raise Corruption("the manifest's log is missing", hint=REPAIR, path=path)
            examine(data)
            return cls(disk, home, owner, _new_log(disk, path, LOG_FIRST, owner), checksum, data)
        header = read_header(disk, path)
        recorded = recorded_end(facts, header, snapshot, path)
        if recorded is None:
            owner.require(header, number, path)
        if snapshot is not None and header.salt == snapshot.covered_salt:
            examine(data)
            # step 8, which the checkpoint did not reach
            return cls(disk, home, owner, _new_log(disk, path, LOG_NEXT, owner), checksum, data)
        if snapshot is None and header.kind == LOG_NEXT:
            raise Corruption("the manifest's snapshot is missing", hint=REPAIR, path=home.manifest_snapshot)
        if snapshot is not None and header.kind == LOG_FIRST:
            raise Corruption("the manifest's log is older than its snapshot", hint=REPAIR, path=path)
        kind = LOG_FIRST if snapshot is None else LOG_NEXT

        def replayed(contents: LogContents) -> None:
            replay(data, contents.payloads, contents.offsets, path)
            examine(data)

        log, _ = LogWriter.open(disk, path, kind=kind, vouched=recorded, examine=replayed)
        return cls(disk, home, owner, log, checksum, data)

    def close(self) -> None:
        """Close the log. Idempotent."""
        with self._lock:
            if not isinstance(self._failure, StoreClosed):
                failed, self._failure = self._failure, StoreClosed("the manifest is closed", hint="open it again")
                if failed is None:
                    self._log.close()
                else:
                    self._log.abandon()

    def abandon(self) -> None:
        """Close the files without another write, not even the log's closing mark."""
        with self._lock:
            self._failure = StoreClosed("the manifest is closed", hint="open it again")
            self._log.abandon()

    # ── reading ───────────────────────────────────────────────────────────────────────────────────────────────────────
    def state(self) -> ManifestData:
        """Return a copy of the current state."""
        with self._lock:
            return self._data.copy()

    @property
    def version(self) -> int:
        """The version of the state; rises with each change."""
        return self._data.version

    @property
    def log_bytes(self) -> int:
        """Bytes of log that a replay would read."""
        return self._log.end - self._log.header.size

    def durable_end(self) -> tuple[LogEnd, int]:
        """Return how far the log is durable, and the CRC32 of the snapshot that it continues (0: none), to be recorded."""
        with self._lock:
            return self._log.durable_end(), self._snapshot_crc32

    @property
    def log_salt(self) -> int:
        """The salt of the log, which changes with each checkpoint."""
        return self._log.header.salt

    @property
    def is_log_recorded(self) -> bool:
        """Whether a checkpoint may cover the log: its life is recorded, or needs no record."""
        return self._is_log_recorded or not self.has_projection

    def mark_recorded(self, log_salt: int) -> None:
        """Note that an end of the log with this salt has been recorded."""
        with self._lock:
            self._is_log_recorded = self._is_log_recorded or log_salt == self.log_salt

    @property
    def failure(self) -> QuireError | None:
        """The error that made the manifest unusable, or `None`."""
        return self._failure

    # ── changes ───────────────────────────────────────────────────────────────────────────────────────────────────────
    def set_version(self, version: int) -> None:
        """Set the manifest's version. It never decreases."""
        with self._lock:
            if version < self._data.version:
                raise _internal("the manifest's version would decrease", version=version, now=self._data.version)
            self._record(Version(version))

    def set_active_wal(self, wal: int) -> None:
        """Make a WAL the active one."""
        self._record(SetActiveWal(wal))

    def add_frozen_wal(self, wal: int) -> None:
        """Mark a WAL as frozen: it is waiting to be flushed."""
        self._record(AddFrozenWal(wal))

    def remove_frozen_wal(self, wal: int) -> None:
        """Remove a frozen WAL whose contents are in a table."""
        self._record(RemoveFrozenWal(wal))

    def rotate_wal(self, frozen: int, active: int, last_lsn: int) -> None:
        """Freeze one WAL and make another one active.

        In this order, so that no WAL is lost: a crash in between leaves the old one frozen and active."""
        self._record(AddFrozenWal(frozen), SetActiveWal(active), UpdateLsn(last_lsn))

    def add_sst(self, entry: ManifestSstEntry) -> None:
        """Add a live table."""
        with self._lock:
            self._check_added((entry,))
            self._record(AddSst(entry))

    def flushed(self, entry: ManifestSstEntry | None, wal: int) -> None:
        """Add the table of a flushed memtable (`None` if the memtable was empty), then remove its frozen WAL."""
        with self._lock:
            added: list[ManifestEvent] = []
            if entry is not None:
                self._check_added((entry,))
                added.append(AddSst(entry))
            self._record(*added, RemoveFrozenWal(wal))

    def remove_sst(self, sst_id: int) -> None:
        """Remove a live table."""
        self._record(RemoveSst(sst_id))

    def update_lsn(self, last_lsn: int) -> None:
        """Raise the last lsn: no lsn up to this one will be assigned again."""
        self._record(UpdateLsn(last_lsn))

    def allocate_sst_id(self) -> int:
        """Return a table id that is never reused."""
        return self.allocate_sst_ids(1)[0]

    def allocate_sst_ids(self, count: int) -> range:
        """Return several table ids, at the cost of one event."""
        with self._lock:
            first = self._data.next_sst_id
            if count > 0:
                self._record(AllocateSstId(first + count - 1))
            return range(first, first + count)

    def compaction(self, added: Iterable[ManifestSstEntry], removed: Iterable[int]) -> None:
        """Add and remove tables atomically: after a crash, all of the change is in effect or none of it."""
        event = Compaction(tuple(added), tuple(removed))
        with self._lock:
            self._check_added(event.added)
            if not self._data.tables.keys() >= set(event.removed):
                raise _internal("a compaction removes a table that is not live", removed=list(event.removed))
            self._record(event)

    def _check_added(self, entries: Sequence[ManifestSstEntry]) -> None:
        """Refuse tables whose ids were never allocated or are already live, before they are logged."""
        for entry in entries:
            if entry.id >= self._data.next_sst_id:
                raise _internal("a table has an id that was never allocated", id=entry.id, next=self._data.next_sst_id)
            if entry.id in self._data.tables:
                raise _internal("a table with this id is already live", id=entry.id)

    def _record(self, *events: ManifestEvent) -> None:
        """Append, sync and apply events as one change, with a version one above the last."""
        with self._lock:
            self._require()
            if not isinstance(events[0], Version):
                # The version comes first, so that it is never missing from a group that power loss has cut short.
                events = (Version(self._data.version + 1), *events)
            records = [encode_event(event) for event in events]
            try:
                self._log.append_many(records)
                hit("lsm.manifest.appended")
                self._log.sync()
                hit("lsm.manifest.synced")
                self._data.apply_all(events)
            except (StoreUnusable, OSError) as error:
                self._abandon_log(error)
            except BaseException as error:
                # A signal may interrupt any of these steps: the log may have events that the state does not have.
                self._fail("a change of the manifest was interrupted; whether it reached the disk is unknown", error)
                raise

    def _require(self) -> None:
        if (why := self._failure) is not None:
            raise why.copied() from why.__cause__

    # ── checkpoint ────────────────────────────────────────────────────────────────────────────────────────────────────
    def checkpoint(self) -> None:
        """Write the whole state as a snapshot and start an empty log, so that the next open replays nothing."""
        with self._lock:
            self._require()
            self._checkpoint()

    def _checkpoint(self) -> None:
        """Perform the nine steps of the design document. REQUIRES the lock."""
        target, disk = self._home.manifest_snapshot, self._disk
        data = self._data
        hit("lsm.checkpoint.begun")
        # Steps 1 to 3: encode with checksum 0, compute the CRC32, combine the two.
        final = encode_snapshot(data, self._log.header.salt)
        hit("lsm.checkpoint.built")
        with of_kind(ErrorKind.IO):
            with closing(disk.open(target + TEMPORARY, create=True)) as file:
                file.truncate(0)
                file.write_at(final, 0)  # step 4
                hit("lsm.checkpoint.written")
                file.sync()  # step 5
            hit("lsm.checkpoint.synced")
            try:
                disk.rename(target + TEMPORARY, target)  # step 6
                hit("lsm.checkpoint.renamed")
                disk.sync_dir(os.path.dirname(target))  # step 7
                hit("lsm.checkpoint.named")
                # Without a closing mark: the snapshot covers this log, and nothing may be appended to it any more.
                self._log.abandon()
                self._log = _new_log(disk, self._home.manifest_log, LOG_NEXT, self._owner)  # step 8
                self._snapshot_crc32 = snapshot_crc32(final)
                self._is_log_recorded = False
                hit("lsm.checkpoint.truncated")
            except BaseException as error:
                # Nothing may be appended to the log, because the snapshot may already cover it.
                self._fail("a checkpoint of the manifest failed half-way", error)
                if isinstance(error, Exception):
                    self._require()
                raise
        data.dirty = False  # step 9

    def _abandon_log(self, error: Exception) -> None:
        """Write the state without the failed event as a snapshot that covers the log, so that the event never reappears.
        Always raises."""
        cause = error.__cause__ if isinstance(error, StoreUnusable) else error
        try:
            # A second checkpoint since the last record would leave LMDB two lives behind: an open refuses that.
            if not self.is_log_recorded:
                raise StoreUnusable("the log's salt is not recorded", hint="open the database again")
            self._checkpoint()
        except Exception as second:
            if self._failure is None:
                self._fail("an event could not be logged; whether it reached the disk is unknown", error)
            failure = self._failure
            assert failure is not None
            raise failure.copied() from second
        emit("warning", "lsm.manifest.log_abandoned", path=self._home.path, cause=str(cause))
        kind = type(cause) if isinstance(cause, StorageFault) else StorageFault
        raise kind(
            "a manifest change could not be logged and was not applied",
            hint="fix the cause, then try again",
            path=self._home.manifest_log,
            cause=str(cause),
            kind=ErrorKind.WAL.value,
        ) from error

    def _fail(self, what: str, error: BaseException) -> None:
        self._failure = StoreUnusable(
            what,
            hint="fix the cause, then reopen the database",
            path=self._home.path,
            cause=str(error),
            kind=ErrorKind.WAL.value,
        )
        self._failure.__cause__ = error
        self._log.abandon()


class ReadManifest(msgspec.Struct, frozen=True):
    """A manifest that was read without being opened."""

    data: ManifestData
    header: LogHeader | None
    """The header of its log; `None` if there is no manifest."""
    end: int
    """Offset of the log's end when it was read."""

    def is_current(self, disk: Disk, home: LsmHome) -> bool:
        """Return whether nothing has been logged since. After a checkpoint, which starts a new log, it returns `False`."""
        try:
            file = disk.open(home.manifest_log, write=False)
        except FileNotFoundError:
            return self.header is None
        try:
            header = decode_header(file.read_at(NAMED_HEADER_BYTES, 0), home.manifest_log)
            return header == self.header and not read_on(file, header, self.end)[0]
        finally:
            file.close()


def read_manifest(disk: Disk, home: LsmHome, owner: Owner, *, number: int = 0) -> ReadManifest:
    """Read the manifest below `home` while another process may be changing it. Nothing is written.

    Raises `Corruption` if snapshot and log do not match. A checkpoint during the read has the same effect, so a reader next to
    a live owner has to retry.
    """
    raw = _snapshot_bytes(disk, home)
    snapshot = decode_snapshot(raw, home.manifest_snapshot) if raw is not None else None
    path = home.manifest_log
    try:
        log = read_all(disk, path)
    except FileNotFoundError:
        if snapshot is None:
            return ReadManifest(ManifestData(), None, 0)
        raise Corruption("the manifest's log is missing", hint=REPAIR, path=path) from None
    if _snapshot_bytes(disk, home) != raw:  # the log may continue another snapshot than the one that was read
        raise Corruption("the manifest was written while it was read", hint="try again", path=path)
    contents = scan(log, path)
    owner.require(contents.header, number, path)
    data = snapshot.manifest_data if snapshot is not None else ManifestData()
    is_first = contents.header.kind == LOG_FIRST
    if snapshot is None or contents.header.salt != snapshot.covered_salt:
        if is_first is not (snapshot is None):
            raise Corruption("the manifest's log does not continue its snapshot", hint=REPAIR, path=path)
        replay(data, contents.payloads, contents.offsets, path)
    return ReadManifest(data, contents.header, contents.end)


def _snapshot_bytes(disk: Disk, home: LsmHome) -> bytes | None:
    try:
        return read_all(disk, home.manifest_snapshot)
    except FileNotFoundError:
        return None


def _new_log(disk: Disk, path: str, kind: bytes, owner: Owner) -> LogWriter:
    return LogWriter.create(disk, path, kind=kind, identity=owner.identity(0), replace=True)


def recorded_end(facts: StoreFacts, header: LogHeader, snapshot: ManifestSnapshot | None, path: str) -> LogEnd | None:
    """Return the recorded end that the log must reach, or `None` if nothing is recorded of its life."""
    if facts.ends is None:
        return None
    recorded = log_end(facts.ends.manifest)
    checksum = snapshot.checksum if snapshot is not None else 0
    covered = snapshot.covered_salt if snapshot is not None else 0
    if covered == recorded.salt:
        return None  # one checkpoint has followed the record
    if header.salt != recorded.salt:
        raise Corruption("the manifest is not the recorded one", hint=REPAIR, path=path)
    if checksum != facts.ends.snapshot_crc32:
        text = "the manifest's snapshot is not the one that its log continues from"
        raise Corruption(text, hint=REPAIR, path=path, snapshot=checksum, recorded=facts.ends.snapshot_crc32)
    return recorded


def read_header(disk: Disk, path: str) -> LogHeader:
    """Return the header of the manifest's log."""
    with closing(disk.open(path, write=False)) as file:
        return decode_header(file.read_at(NAMED_HEADER_BYTES, 0), path)


def _internal(what: str, **where: Any) -> InternalError:
    return InternalError(what, kind=ErrorKind.INTERNAL.value, **where)
