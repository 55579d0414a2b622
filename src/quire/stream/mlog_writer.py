"""The writer of a manifest log. It appends to one active chunk, a file that is committed, sealed and followed by the next.

States of a chunk
  absent ──append──▶ `.mlog.tmp` ──first commit──▶ `.mlog` ──rotate──▶ sealed ──upload──▶ uploaded

A chunk's file is allocated and zero-filled, never sparse: a full disk is `DiskFull` when the file is created or grown, and the
log stays usable. Records are in memory until their commit writes them; a mapped file would serve as well, but would keep a
descriptor open (docs/decisions/024). A commit writes the records and the commit copy, syncs, writes the header, and syncs; the
first commit of a chunk then renames the file and syncs the directory. The checksum continues from the last commit's, so a
commit costs only its new bytes. A restart continues after the last committed record. After a failed write or sync the contents
of the disk are unknown: `StoreUnusable` until the log is reopened.

Threads: any, one at a time: callers that share a writer hold a lock around every call (`ManifestLog` does); another lock here
would cost a fifth of an append. Format: docs/formats/manifest-log.md.
Raises: `StoreLocked`, `StoreUnusable`, `StoreClosed`, `OutOfRange`, `DiskFull`, and on opening `ManifestIntegrityError`."""

from __future__ import annotations

import struct
from collections.abc import Callable
from contextlib import closing, suppress

from quire.core.clock import Clock
from quire.core.closing import AbandonedOnError
from quire.core.errors import OutOfRange, StorageFault, StoreClosed, StoreUnusable, poisoned_by
from quire.core.settings import ManifestLogSettings
from quire.durable.checksums import crc64
from quire.durable.failpoints import hit
from quire.durable.files import File, drop_cached_pages, preallocate, remove_if_exists
from quire.durable.locks import FileLock, NoopLock
from quire.stream.files import LogFiles
from quire.stream.mlog_format import (
    CHUNK_BYTES,
    CHUNK_FILE_BYTES_MIN,
    COPY_BYTES,
    GROWTH_BYTES,
    NO_SEGMENT,
    RECORD,
    RECORD_BYTES,
    SEALED,
    ChunkFacts,
    new_header,
)
from quire.stream.mlog_reader import Chunk, LogPosition, RecordView, load_chunk
from quire.stream.mlog_records import PAYLOAD_BYTES_MAX, Payload, RecordType, SnapshotMarker, check_payload

_pack = RECORD.pack
SHRINK_BYTES_MIN = 4096
"""Freeing less than a block of the file system is not worth a sync."""
_MARKER = int(RecordType.SNAPSHOT_MARKER)
"""From this type on records are rare: markers, custom events, and types that this version does not know."""


class ManifestLogWriter(AbandonedOnError):
    """The only writer of a log. Use `open` to create one."""

    def __init__(
        self,
        files: LogFiles,
        lock: FileLock | NoopLock,
        clock: Clock,
        settings: ManifestLogSettings,
        start: tuple[int, int],
    ) -> None:
        # Constant after construction.
        self._files = files
        self._file_lock = lock
        self._clock = clock
        self._now_ms = clock.now_ms
        self._identity = files.identity
        self._settings = settings
        # The active chunk, and the end of the previous one.
        self._trouble: StoreUnusable | StoreClosed | None = None
        self._file: File | None = None
        self._pending = bytearray()
        """Encoded records after `committed`."""
        self._size = self._room = 0
        self._index, self._base_record = start
        self._snapshot_id = 0
        self._last_ms = 0
        self._last_commit = clock.monotonic()
        self._tail = self._committed = CHUNK_BYTES
        self._crc = 0
        self._count = 0
        self._about_data = False
        self._named = False

    @classmethod
    def open(
        cls,
        files: LogFiles,
        *,
        clock: Clock,
        settings: ManifestLogSettings,
        start: tuple[int, int] = (0, 0),
        lock: FileLock | NoopLock | None = None,
    ) -> ManifestLogWriter:
        """Open a log for appending. `start` is (chunk_index, base_record) of the first chunk if none is on the disk.

        `lock` is the log's lock if the caller has taken it already (`begin_log`); the writer takes it over.
        """
        lock = lock or begin_log(files, clock)
        try:
            files.sweep()
            writer = cls(files, lock, clock, settings, start)
            if here := files.chunks():
                writer._resume(here[-1])
        except BaseException:
            lock.close()
            raise
        return writer

    # ── positions ─────────────────────────────────────────────────────────────────────────────────────────────────────
    @property
    def position(self) -> LogPosition:
        """The position of the next record."""
        return LogPosition(self._index, self._tail)

    @property
    def committed(self) -> LogPosition:
        """The position before which everything is durable."""
        return LogPosition(self._index, self._committed)

    @property
    def next_record(self) -> int:
        """The ordinal of the next record."""
        return self._base_record + self._count

    @property
    def snapshot_id(self) -> int:
        """The id in the newest snapshot marker; 0 for none."""
        return self._snapshot_id

    def records_from(self, offset: int) -> bytes:
        """Return the records of the active chunk from an offset on, committed or not, as bytes."""
        if self._file is None:
            raise StoreClosed("the manifest log is closed", hint="open the stream again")
        if offset >= self._committed:
            return bytes(self._pending[offset - self._committed :])
        return self._file.read_at(self._committed - offset, offset) + self._pending

    @property
    def is_full(self) -> bool:
        """Whether the chunk may have no room for another record of up to `record_bytes_max`."""
        full = self._settings.chunk_bytes - COPY_BYTES
        return self._file is not None and self._tail + self._settings.record_bytes_max > full

    @property
    def file_bytes(self) -> int:
        """Size of the active chunk's file; 0 while there is none."""
        return self._size

    # ── appending ─────────────────────────────────────────────────────────────────────────────────────────────────────
    def append(self, value: Payload, segment_id: int = NO_SEGMENT, *, logical_offset: int = 0) -> int:
        """Append a record and return its offset. It is durable after `commit`. A chunk that it does not fit is sealed first."""
        try:
            payload = value.encode()
            kind, size = value.TYPE, len(payload)
            rare = kind >= _MARKER or not size or size & 7 or size > PAYLOAD_BYTES_MAX
            if rare:
                check_payload(kind, payload)
            tail = self._tail
            end = tail + RECORD_BYTES + size
            if end > self._room:  # also after a failure, which sets the room to 0
                tail = self._make_room(RECORD_BYTES + size)
                end = tail + RECORD_BYTES + size
            now = self._now_ms()
            if now > self._last_ms:
                self._last_ms = now
            else:
                now = self._last_ms
            self._pending += _pack(kind, 0, size, segment_id, logical_offset, now, crc64(payload)) + payload
            self._count += 1
            if segment_id:
                self._about_data = True
            if rare and isinstance(value, SnapshotMarker):
                self._snapshot_id = value.snapshot_id
            self._tail = end
            return tail
        except struct.error as error:
            raise OutOfRange(f"a field of the record does not fit: {error}", record=value, segment=segment_id) from None

    def reserve(self, size: int) -> None:
        """Reserve space for `size` more bytes of records."""
        if self._tail + size > self._room:
            self._make_room(size)

    def commit(self) -> LogPosition:
        """Make everything appended durable, and return its end."""
        self._check()
        if self._tail > self._committed:
            self._guard("a commit", lambda: self._write_commit(0))
        return self.committed

    def needs_rotation(self) -> bool:
        """Return whether the chunk is nearly full, or has had records about segments for long enough."""
        return self.rotation_due_in() == 0

    def rotation_due_in(self) -> float | None:
        """Return the seconds until the chunk is to be sealed; `None` if no record in it requires that."""
        if self._file is None or self._tail == CHUNK_BYTES:
            return None
        if self.is_full:
            return 0.0
        quiet = self._clock.monotonic() - self._last_commit
        # Only a chunk with a record about a data segment is sealed by time: the log does not log itself (S3).
        return max(self._settings.rotation_seconds - quiet, 0.0) if self._about_data else None

    def rotate(self) -> int | None:
        """Commit and seal the chunk; return its index, `None` if there is none. The next append begins another."""
        self._check()
        if self._file is None or self._tail == CHUNK_BYTES:
            return None
        self._guard("sealing a chunk", lambda: self._write_commit(SEALED))
        hit("stream.mlog.sealed")
        sealed = self._index
        if self._size - COPY_BYTES - self._tail >= SHRINK_BYTES_MIN:
            with suppress(StorageFault):  # the chunk is sealed already: this only frees space
                shrink(self._file, self._facts(self._crc, SEALED))
        self._release()
        self._index, self._base_record = sealed + 1, self._base_record + self._count
        self._begin_chunk()
        return sealed

    def close(self) -> None:
        """Commit and close; after a failure, close and raise it. Closing twice is allowed."""
        try:
            if not isinstance(self._trouble, StoreClosed):
                # Also after a failure, which it raises: a caller that hears nothing counts records that are not in the log.
                self.commit()
        finally:
            self.abandon()

    def abandon(self) -> None:
        """Close without committing: uncommitted records are lost."""
        if not isinstance(self._trouble, StoreClosed):
            self._trouble = StoreClosed("the manifest log is closed", hint="open it again", path=self._files.directory)
            self._release()
            self._file_lock.close()

    # ── the active chunk ──────────────────────────────────────────────────────────────────────────────────────────────
    def _begin_chunk(self) -> None:
        self._pending = bytearray()
        self._tail = self._committed = CHUNK_BYTES
        self._crc = 0
        self._count = 0
        self._about_data = False
        self._named = False

    def _make_room(self, size: int) -> int:
        """Make room for `size` bytes of records, and return their offset. Only the first record of a chunk may make it exceed
        `chunk_bytes`."""
        self._check()
        if self._tail > CHUNK_BYTES and self._tail + size > self._settings.chunk_bytes - COPY_BYTES:
            self.rotate()
        if self._file is None:
            first = min(self._settings.chunk_bytes, CHUNK_FILE_BYTES_MIN)  # most chunks have few records
            path = self._files.chunk(self._index, temporary=True)
            remove_if_exists(self._files.disk, path)
            self._file = preallocate(self._files.disk, path, first)
            self._resized(first)
            hit("stream.mlog.created")
        # The commit copy belongs at the end of the file, so it is invalid from here to the next commit. The header is
        # not: it is written only after the next copy is durable.
        if self._tail + size > self._room:
            steps = -(-(self._tail + size - self._room) // GROWTH_BYTES)
            self._file.allocate(self._size + steps * GROWTH_BYTES)
            self._resized(self._size + steps * GROWTH_BYTES)
            hit("stream.mlog.grown")
        return self._tail

    def _resized(self, size: int) -> None:
        self._size, self._room = size, size - COPY_BYTES

    def _write_commit(self, flags: int) -> None:
        assert self._file is not None
        self._file_lock.verify()
        crc = crc64(self._pending, self._crc) if self._pending else self._crc
        if self._pending:
            self._file.write_at(self._pending, self._committed)
        write_header(self._file, self._size, self._facts(crc, flags))
        # Named after the commit: a chunk that can be found has a valid header. One without a name is swept.
        if not self._named:
            path = self._files.chunk(self._index)
            self._files.disk.rename(self._file.path, path)
            hit("stream.mlog.renamed")
            self._files.disk.sync_dir(self._files.directory)
            self._named = True
        self._committed, self._crc = self._tail, crc
        self._pending = bytearray()
        self._last_commit = self._clock.monotonic()
        hit("stream.mlog.committed")

    def _facts(self, crc: int, flags: int) -> ChunkFacts:
        header = new_header(
            chunk_index=self._index,
            base_record=self._base_record,
            committed_len=self._tail,
            chunk_crc64=crc,
            flags=flags,
        )
        return ChunkFacts(header, self._count, self._snapshot_id, self._identity)

    def _resume(self, index: int) -> None:
        """Continue after the last chunk, or in it if it is not sealed."""
        file = self._files.disk.open(self._files.chunk(index))
        try:
            data = file.read_at(file.size(), 0)
            chunk = load_chunk(data, chunk_index=index, path=file.path, owner=self._identity)
        except BaseException:
            file.close()
            raise
        facts = chunk.facts
        self._snapshot_id = facts.snapshot_id
        views = [RecordView(chunk, offset) for offset in chunk.offsets]
        self._last_ms = max(view.timestamp_ms for view in views)
        if facts.header.sealed:
            try:
                self._settle(file, chunk)
            finally:
                file.close()
            self._index, self._base_record = index + 1, facts.next_record
            self._begin_chunk()
            return
        self._file = file
        self._index, self._base_record = index, facts.header.base_record
        self._tail = self._committed = facts.header.committed_len
        self._crc, self._count, self._named = facts.header.chunk_crc64, facts.record_count, True
        self._about_data = any(view.segment_id != NO_SEGMENT for view in views)
        self._resize(chunk)

    def _resize(self, chunk: Chunk) -> None:
        """Continue in an existing chunk. One that was restored from tier 2 has no spare room, and grows like any other."""
        assert self._file is not None
        self._resized(self._file.size())
        self._settle(self._file, chunk)

    def _settle(self, file: File, chunk: Chunk) -> None:
        """Make header and commit copy of the last chunk agree: one was torn, or a commit or a sealing was interrupted."""
        if chunk.data[:CHUNK_BYTES] != chunk.header.encode() or chunk.data[-COPY_BYTES:] != chunk.facts.encode():
            write_header(file, file.size(), chunk.facts._replace(identity=self._identity))

    def _release(self) -> None:
        self._pending = bytearray()
        if self._file is not None:
            file, self._file = self._file, None
            with suppress(StorageFault):
                file.close()
        self._size = self._room = 0

    def _check(self) -> None:
        if self._trouble is not None:
            raise self._trouble.copied()

    def _guard(self, doing: str, step: Callable[[], None]) -> None:
        """Run a step whose failure leaves the contents of the disk unknown."""
        try:
            step()
        except BaseException as error:
            self._room = 0  # so that the next append raises the failure
            self._trouble = poisoned_by(
                error,
                f"{doing} of the manifest log failed, and what reached the disk is unknown",
                hint="fix the cause, then reopen the stream",
                path=self._files.directory,
                chunk=self._index,
                offset=self._committed,
                cause=str(error),
            )
            if isinstance(error, Exception) and self._trouble is not error:
                raise self._trouble from error
            raise


def lock_log(files: LogFiles, clock: Clock) -> FileLock | NoopLock:
    """Take the lock of a log, and create its directory if necessary."""
    files.disk.make_dirs(files.directory)
    if files.store_locked:
        return NoopLock()
    return FileLock.acquire(files.lock, clock)


def begin_log(files: LogFiles, clock: Clock) -> FileLock | NoopLock:
    """Take the lock of a log that will be read and continued, and have reads return what is on disk.

    Before anything is read: no decision may rest on bytes that could still be lost, and after a failed sync the page cache may
    have records of the last chunk that the disk does not.
    """
    lock = lock_log(files, clock)
    try:
        if here := files.chunks():
            with closing(files.disk.open(files.chunk(here[-1]))) as file:
                file.sync()
                drop_cached_pages(file)
    except BaseException:
        lock.close()
        raise
    return lock


def shrink(file: File, facts: ChunkFacts) -> None:
    """Truncate a sealed chunk's file after its records.

    A second commit copy is written after the records and synced before the cut, so that the file always ends with one.
    """
    end = facts.header.committed_len
    file.write_at(facts.encode(), end)
    file.sync()
    hit("stream.mlog.shrinking")
    file.truncate(end + COPY_BYTES)


def write_header(file: File, size: int, facts: ChunkFacts) -> None:
    """Write commit copy and header in the order that always leaves one of them intact. `size` is the size of the file."""
    file.write_at(facts.encode(), size - COPY_BYTES)
    hit("stream.mlog.copied")
    # Records and copy are durable before the header is touched: if that write is torn, `settle` takes the copy.
    file.sync()
    hit("stream.mlog.synced")
    file.write_at(facts.header.encode(), 0)
    hit("stream.mlog.header")
    file.sync()
