"""The write path of a stream: appended records become blocks of the open segment, with one sync for a group of appends.

Records are *pending* (they have an id and are not written), *written* (in a block of the file), or *durable* (synced). A
returned `result()` covers durable records, and readers see only those. `append` assigns ids in order and without gaps. An
append is durable as a whole or not at all: its records are in one block, or in blocks of one segment of which only the last is
a commit. Nothing is appended after a cut (P4): a log starts without an open segment, and opens a new one for its first block.

After a failed write or sync, or an interrupt (Ctrl-C) from the moment records leave the buffer, the contents of the disk are
unknown: `StoreUnusable` until the stream is reopened (M12).
`DiskFull` means "not done, and never will be" (docs/decisions/020). If a segment cannot be created, the stream stays usable and
the records stay pending until a caller must get an answer; then all pending records are refused, and their ids are assigned
again (`AppendRound`). A caller that does not call `result()` gets the error from its next `sync`, `seal` or `close`. The
background has no caller to report to, so it refuses nothing.

Threads: any. Locks, in the order in which they are taken: `_writing` (file, segment, durable mark), then the lock of `Pending`
(ids and pending records). Format: docs/formats/stream-segment.md.
Raises: `StoreUnusable`, `StoreClosed`, `DiskFull`, `OutOfRange`, `InvalidInput`."""

from __future__ import annotations

import os
import threading
from array import array
from bisect import bisect_left
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import NamedTuple

from quire.core.barrier import Barrier
from quire.core.errors import DiskFull, QuireError, StorageFault, StoreClosed, StoreFenced, poisoned_by
from quire.core.events import emit
from quire.core.limits import KIB
from quire.core.recent_keys import RecentKeys
from quire.core.settings import StreamSettings
from quire.core.waiting import Waiters
from quire.durable.checksums import crc64
from quire.durable.failpoints import hit
from quire.durable.files import File, write_synced
from quire.durable.names import Tier
from quire.stream.append_buffer import Pending, Run
from quire.stream.files import Spares, StreamClock, StreamFiles, next_bytes, trim
from quire.stream.group_commit import AppendRound, GroupCommit
from quire.stream.segment import ALIGN, BLOCK_BYTES, HEADER_BYTES, NextBlock, StreamSegmentHeader, aligned, encode_into


class SegmentEnd(NamedTuple):
    """A segment that takes no more records."""

    segment_id: int
    base_record: int
    end_record: int
    durable_bytes: int
    crc64: int
    blocks: int


class SegmentStart(NamedTuple):
    """A segment that begins."""

    segment_id: int
    base_record: int


class LastSynced(NamedTuple):
    """The records that became durable last, so that readers waiting for them need not read the file."""

    first: int
    timestamp_ms: int
    payloads: list[bytes]
    """No longer appended to."""


class ActiveSegment:
    """The segment that is being written, and the positions of its blocks."""

    __slots__ = ("capacity", "crc", "file", "firsts", "header", "offset", "offsets", "opened_at", "stamps", "written")

    def __init__(self, file: File, header: StreamSegmentHeader, capacity: int, opened_at: float) -> None:
        self.file = file
        self.header = header
        self.capacity = capacity
        self.opened_at = opened_at
        self.offset = HEADER_BYTES
        """File offset of the next block."""
        self.written = header.base_record
        """The id after its last written record."""
        self.crc = crc64(header.encode())
        self.firsts, self.offsets, self.stamps = array("Q"), array("Q"), array("Q")
        """First record, file offset and timestamp of each block. Only the writer appends; readers use the blocks below the
        durable mark."""

    @property
    def segment_id(self) -> int:
        return self.header.segment_id

    def end_of(self, durable: int) -> int:
        """Return the file offset up to which blocks may be read if the records before `durable` are durable."""
        # Blocks are durable in order, so the first one at or above the mark ends what may be read.
        place = bisect_left(self.firsts, durable)
        return self.offsets[place] if place < len(self.offsets) else self.offset

    def sealed(self) -> SegmentEnd:
        """Return the description of the segment if it ends now."""
        header = self.header
        return SegmentEnd(header.segment_id, header.base_record, self.written, self.offset, self.crc, len(self.offsets))


BUFFER_BYTES_MAX = 1 << 20
"""Largest encoding buffer that a stream keeps; a larger run gets its own memory."""
BUFFER_STEP = 4 * KIB

Roll = Callable[[SegmentEnd | None, SegmentStart | None], None]
"""Records durably that a segment ended and that the next one begins."""


class HotLog:
    """The writable end of one stream."""

    def __init__(
        self,
        files: StreamFiles,
        clock: StreamClock,
        settings: StreamSettings,
        roll: Roll,
        *,
        next_segment: int,
        next_record: int,
        request_sync: Callable[[], None] = lambda: None,
        check_owner: Callable[[], None] = lambda: None,
        reserve: Callable[[], None] = lambda: None,
        calls: RecentKeys | None = None,
    ) -> None:
        # constant after construction
        self._files = files
        self._clock = clock
        self._settings = settings
        self._roll = roll
        self._check_owner = check_owner
        self._reserve = reserve
        """Reserves space in the manifest log for what `roll` records, so that a full disk fails before anything has changed."""
        self._group = GroupCommit(self, self._sync)
        self.spares = Spares(files)
        self.waiters = Waiters()
        """Readers that wait for records to become durable."""
        # guarded by _writing
        self._writing = threading.RLock()
        self.segment: ActiveSegment | None = None
        self._kept = memoryview(b"")
        self._next_segment = next_segment
        self._used_bytes = 0
        self.durable = next_record
        """The id after the last durable record."""
        self.syncs = 0
        self.last_synced = LastSynced(0, 0, [])
        self.last_append_ms = 0
        """Time of the last block written since the stream was opened; 0 if there is none."""
        # set, never cleared
        self.failure: QuireError | None = None
        self.barrier: Barrier | None = None
        """The archive's barrier, which `result()` waits for in mode `sync` (A9)."""
        self.is_archived = False
        """Whether the store has an archive, which has the records before the segment is sealed; set once, by the engine."""
        pending = self._pending = Pending(
            self,
            settings,
            next_record=next_record,
            request_sync=request_sync,
            relieve=self._relieve,
            calls=calls or RecentKeys(),
        )
        self.append, self.mark_reported = pending.append, pending.mark_reported

    def has_call(self, key: bytes) -> bool:
        """Return whether records with this idempotency key were appended recently."""
        return self._pending.has_call(key)

    @property
    def calls(self) -> tuple[tuple[int, int], ...]:
        """Idempotency keys of the newest appends, with their first records; recorded when their segment is sealed."""
        return self._pending.newest_calls()

    def set_write_check(self, require_writable: Callable[[], None]) -> None:
        """Have every append first call this function, which raises if the stream accepts no writes."""
        self._pending.require_writable = require_writable

    # ── appending ─────────────────────────────────────────────────────────────────────────────────────────────────────
    def _relieve(self, append_round: AppendRound, first: int, count: int) -> None:
        """Write pending records on the appending thread, because there are too many. A full disk is raised here."""
        try:
            with self._writing:
                self._write_out()
        except DiskFull as full:
            self._refuse(append_round, first + count, full)
            if append_round.refused_from < first + count:
                self.mark_reported(count)
                raise

    @property
    def next_record(self) -> int:
        """The id of the next record."""
        return self._pending.next_record

    # ── writing ───────────────────────────────────────────────────────────────────────────────────────────────────────
    def _write_out(self, *, sync: bool = False) -> None:
        """Write the pending records; with `sync`, make them durable. REQUIRES `_writing`."""
        try:
            self._write_runs(sync=sync)
        except StorageFault:  # what could not be written is pending again, or the stream has failed
            raise
        except BaseException as error:
            # An interrupt (Ctrl-C) may come at any line. Runs that were taken may be written, and may be lost.
            self._poison(error)
            raise

    def _write_runs(self, *, sync: bool) -> None:
        runs = self._pending.take()
        done = 0
        try:
            for run in runs:
                self._write(run, sync=sync and done + 1 == len(runs))
                done += 1
        except StorageFault:
            self._pending.put_back(runs[done:])  # nothing of this run is written, or the stream has failed
            if sync and self.failure is None:
                self._sync_written()  # a caller that gets `DiskFull` must know which of its records are durable
            raise
        if sync:
            self._sync_written()

    def _sync_written(self) -> None:
        segment = self.segment
        # Only the open segment can have unsynced blocks: `_end` syncs a segment before the next one gets a block.
        if segment is None or segment.written <= self.durable:
            return
        try:
            segment.file.sync()
        except BaseException as error:
            self._poison(error)
            raise
        self._synced(segment)

    def _refuse(self, append_round: AppendRound, upto: int, full: DiskFull) -> None:
        """Refuse all pending records, if one below `upto` of this round is pending."""
        with self._writing:  # no thread may be writing records that are being refused
            count = self._pending.refuse(append_round, upto, full)
        if count:
            emit(
                "warning",
                "stream.refused",
                stream=self._files.stream_id,
                records=count,
                first=append_round.refused_from,
            )
            self._group.wake()

    def wait_durable(self, upto: int, append_round: AppendRound) -> None:
        """Wait until everything below an id is durable. `DiskFull`: it is not, and never will be."""
        while True:
            try:
                return self._group.wait_durable(upto, append_round)
            except DiskFull as full:
                self._refuse(append_round, upto, full)
                # Otherwise another thread has written these records since the write failed: wait for them again.
                if append_round.refused_from < upto:
                    raise

    def _write(self, run: Run, *, sync: bool) -> None:
        """Encode a run and write it to the open segment, or to the next one if it does not fit.

        With `sync` the write is durable, unless written records before it are not. REQUIRES `_writing`.
        """
        bodies = run.bodies()
        need = bodies[0].block_bytes if len(bodies) == 1 else sum(body.block_bytes for body in bodies)
        segment = self.segment
        if segment is None or segment.offset + need > segment.capacity:
            segment = self._next_open(run.first, need)
        # After `_next_open`: it syncs the former segment, and so raises the mark that the blocks carry and `sync`
        # depends on.
        stamp, first, offset, durable = self._clock.now_ms(), run.first, segment.offset, self.durable
        out, seed, last, crc = self._buffer(need), segment.header.crc64, len(bodies), segment.crc
        marks = []
        for number, body in enumerate(bodies, 1):
            place = NextBlock(offset, first, stamp, durable, run.call)
            here = out[offset - segment.offset :]
            crc = encode_into(here, seed, place, body, is_commit=number == last, running=crc)
            marks.append((first, offset))
            offset, first = offset + body.block_bytes, first + body.records
        # A synced write covers its own bytes only. Unsynced blocks before it would be acknowledged with it, and power
        # loss could keep it without them; `_sync_written` syncs the whole file instead.
        sync = sync and segment.written == durable
        try:
            if sync:
                write_synced(segment.file, out, segment.offset)
            else:
                segment.file.write_at(out, segment.offset)
            hit("stream.hot.written")
        except BaseException as error:
            self._poison(error)
            raise
        for mark in marks:  # only after the write: a run that was not written is written again
            segment.firsts.append(mark[0])
            segment.offsets.append(mark[1])
            segment.stamps.append(stamp)
        # After the marks: a reader takes `offset` as the end only if no mark is at or above the durable id (reader.py).
        segment.crc, segment.offset, segment.written = crc, offset, first
        self.last_append_ms = stamp
        if sync:
            self._synced(segment)
            if type(run.payloads) is list and run.size <= BLOCK_BYTES:
                self.last_synced = LastSynced(run.first, stamp, run.payloads)

    def _synced(self, segment: ActiveSegment) -> None:
        try:
            hit("stream.hot.synced")
            self._check_owner()  # acknowledge nothing that a second owner may already have cut off
        except BaseException as error:
            self._poison(error)
            raise
        self.syncs += 1
        self.durable = segment.written

    def _buffer(self, size: int) -> memoryview:
        """Return the buffer for encoding a run. It is reused, so that it stays in the CPU's cache. REQUIRES `_writing`."""
        if size > len(self._kept):
            if size > BUFFER_BYTES_MAX:
                return memoryview(bytearray(size))
            self._kept = memoryview(bytearray(aligned(size, BUFFER_STEP)))
        return self._kept[:size]

    def sync(self) -> None:
        """Wait until everything that was appended is durable; `DiskFull` if a refusal has not been reported to any caller."""
        try:
            self.wait_durable(*self._pending.end())
        finally:
            unreported = self._pending.take_unreported()
        if unreported:
            hint = "free up space, then append them again"
            raise DiskFull(
                "the disk was full and records were refused",
                hint=hint,
                records=unreported,
                stream=self._files.stream_id,
            )

    def sync_quietly(self) -> None:
        """Do the same for the background: a full disk raises, and refuses nothing."""
        self._group.wait_durable(*self._pending.end())

    def _sync(self) -> None:
        """Write and sync all pending records, for all waiting threads. `GroupCommit` runs one call at a time."""
        with self._writing:
            self._write_out(sync=True)
        if self.waiters:
            self.waiters.wake()

    # ── segments ──────────────────────────────────────────────────────────────────────────────────────────────────────
    def seal(self, *, quietly: bool = False) -> bool:
        """Sync and seal the open segment; return False if there is none. `quietly`: see `sync_quietly`."""
        if quietly:
            self.sync_quietly()
        else:
            self.sync()
        return self._seal()

    def _seal(self) -> bool:
        with self._writing:
            self.require()
            if self.segment is None:
                return False
            self._end(None)
        self.waiters.wake()
        return True

    def seconds_until_seal(self) -> float | None:
        """Return the seconds until the open segment is old enough to be sealed; `None` if there is none."""
        segment = self.segment
        if segment is None:
            return None
        age = self._settings.seal_seconds
        if self.is_archived and segment.offset < self._settings.archived_seal_bytes:
            age = max(age, self._settings.archived_seal_seconds)
        return segment.opened_at + age - self._clock.monotonic()

    def is_due(self) -> bool:
        """Return whether the open segment is old enough to be sealed."""
        seconds = self.seconds_until_seal()
        return seconds is not None and seconds <= 0

    def _next_open(self, first: int, need: int) -> ActiveSegment:
        """End the open segment and begin the next, with room for `need` bytes of blocks. REQUIRES `_writing`."""
        before = self.segment
        if before is not None:
            self._used_bytes = before.capacity
        # An append is never split over two segments, so one that is larger than `segment_bytes` gets a larger file.
        size = max(next_bytes(self._used_bytes, self._settings.segment_bytes), aligned(HEADER_BYTES + need, ALIGN))
        self._reserve()
        file, size = self.spares.take(size)  # both lines may raise `DiskFull`: nothing has changed yet
        segment_id = self._next_segment
        salt = int.from_bytes(os.urandom(8), "little") or 1  # not `secrets`: it would load OpenSSL
        header = StreamSegmentHeader(self._files.stream_id, segment_id, first, self._clock.now_ms(), salt)
        # Decoded again for its crc64, the seed of every block.
        header = StreamSegmentHeader.decode(header.encode())
        try:
            file.write_at(header.encode(), 0)
            file.sync()
            hit("stream.hot.header")
            self._files.disk.rename(file.path, self._files.segment(Tier.HOT, segment_id))
            hit("stream.hot.renamed")
            # Header and name are durable, and the log has the segment (`_end`), before its first block is written.
            self._files.disk.sync_dir(self._files.folder(Tier.HOT))
        except BaseException as error:
            with suppress(StorageFault):
                file.close()
            self._poison(error)
            raise
        self._next_segment = segment_id + 1
        opened = ActiveSegment(file, header, size, self._clock.monotonic())
        self._end(opened)
        return opened

    def _end(self, opened: ActiveSegment | None) -> None:
        """End the open segment and continue with `opened`. REQUIRES `_writing`."""
        before = self.segment
        try:
            if before is not None and before.written > self.durable:
                before.file.sync()  # before the next one gets a block: no record may survive without its predecessors
                self._synced(before)
            sealed = None if before is None else before.sealed()
            self._roll(sealed, None if opened is None else SegmentStart(opened.segment_id, opened.header.base_record))
            hit("stream.hot.rolled")
            self.segment = opened  # before an interrupt can end this: nothing may be written to a sealed segment
        except BaseException as error:
            if opened is not None:
                opened.file.close()
            self._poison(error)
            raise
        if before is not None:
            if opened is None:
                self._used_bytes = min(before.offset, before.capacity)
            trim(before.file, before.offset)  # after the log has recorded its end
            before.file.close()

    def prepare(self) -> bool:
        """Preallocate the next segment's file if the open one is half full and no spare exists; return whether it did."""
        segment = self.segment
        if segment is None or segment.offset * 2 < segment.capacity or self.failure is not None:
            return False
        return self.spares.prepare(next_bytes(segment.capacity, self._settings.segment_bytes))

    def recycle(self, segment_id: int) -> bool:
        """Reuse the file of an evicted segment as the next spare; return False if it is not suitable."""
        return self.failure is None and self.spares.recycle(segment_id, self._settings.segment_bytes)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Suspend writing and sealing while the context is held."""
        with self._writing:
            yield

    # ── closing ───────────────────────────────────────────────────────────────────────────────────────────────────────
    def close(self) -> None:
        """Sync and seal the open segment, then accept no more records."""
        try:
            if self.failure is None:
                try:
                    self.sync()
                finally:  # durable records are sealed even if others were refused
                    if self.failure is None:
                        self._seal()
                        self.spares.close()
        finally:
            self.abandon(StoreClosed("the stream is closed", hint="open it again", stream_id=self._files.stream_id))

    def abandon(self, why: QuireError) -> None:
        """Accept no more records and close the files; records that are not durable are left to recovery."""
        # Also after a failure: `Stream.close` does nothing more once it finds `StoreClosed`.
        if self.failure is None or isinstance(why, StoreClosed):
            self.failure = why
        self._pending.stop()
        with self._writing:
            if self.segment is not None:
                self.segment.file.close()
        self.spares.abandon()
        self._group.wake()
        self.waiters.wake()

    def forked(self) -> None:
        """Make the log unusable in the child of a fork(): the files are the parent's, and no thread holds the locks (M12)."""
        self.failure = StoreClosed("the stream was opened by the parent of a fork()", hint="open the store again")
        self._writing = threading.RLock()
        self._pending.forked()
        self._group.forked()
        self.waiters = Waiters()

    def require(self) -> None:
        """Raise the error that has made the stream unusable, if any."""
        if (why := self.failure) is not None:
            raise why.copied() from why.__cause__

    def _poison(self, error: BaseException) -> None:
        """Accept no more records until the stream is reopened. `DiskFull` becomes `StoreUnusable` here: the contents of the
        disk are unknown, and `DiskFull` would mean "not done"."""
        if self.failure is None:
            what = f"the stream's segment failed: {str(error) or type(error).__name__}"  # an interrupt has no text
            hint = "fix the cause, reopen the stream, and check what it holds before appending again"
            self.failure = poisoned_by(error, what, hint=hint, stream_id=self._files.stream_id)
            self._pending.stop()  # the next append finds no room in the run, and then raises the failure
            if not isinstance(error, StoreFenced):  # one event for the store is enough: manifest.fenced
                emit("error", "stream.failed", stream=self._files.stream_id, error=error)
        self.waiters.wake()
        if isinstance(error, DiskFull):
            raise self.failure from self.failure.__cause__  # the first failure, even if this one came later
