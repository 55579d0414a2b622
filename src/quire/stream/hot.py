"""Where a stream is written: appended records become blocks of the open segment, a group of them with one sync.

Terms
  pending    appended, with an id, and not written yet
  run        pending records that become one block; a batch that needs more than one block is a run of its own
  written    in the file, by a block
  durable    synced: what a returned `result()` covers, and what readers see
  spare      a file of zeros, or of a segment that is gone, made ahead to become the next segment

Rules
  1. Ids are given in `append`, in order and without gaps. An append is durable whole or not at all: its records are in one
     block, or in blocks of one segment of which only the last is a commit.
  2. One sync serves everyone who had appended when it began: what was pending is written as few blocks, by whoever leads
     (`handover.py`). A group that is one write, which is nearly every one, is written and synced by one call.
  3. A segment's header and name are synced, and the log knows it, before its first block is written. The segment before it is
     synced first, so that nothing survives whose past does not.
  4. Never append after a cut (P4): a log begins with no open segment, and opens a new one with its first block.
  5. After a failed write or sync nobody knows what is on disk: `StoreUnusable` until the stream is opened again (M12). A full
     disk while a segment is made breaks nothing: what is pending stays pending.
  6. `durable_upto` of a block is what was durable when it was written (S4).

Locks, in the order they are taken: `_writing` (file, segment, durable mark), `_lock` (ids and what is pending).
Threads: any. Format page: `docs/formats/stream-segment.md`.
Raises `StoreUnusable`, `StoreClosed`, `DiskFull`, `OutOfRange`, `InvalidInput`.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import msgspec

from quire.core.errors import DiskFull, OutOfRange, QuireError, StorageFault, StoreClosed, StoreFenced, poisoned_by
from quire.core.events import emit
from quire.core.ids import U64_MAX
from quire.core.limits import KIB
from quire.core.settings import StreamSettings
from quire.durable.failpoints import hit
from quire.durable.files import write_synced
from quire.durable.names import Tier
from quire.manifest.doorbell import Waiters
from quire.stream.files import StreamClock, StreamFiles
from quire.stream.handover import Handover
from quire.stream.open_segment import Newest, Opened, OpenSegment, Sealed
from quire.stream.pending import FULL, Many, Records, Run, many
from quire.stream.segment import ALIGN, BLOCK_BYTES, HEADER_BYTES, Place, SegmentHeader, aligned, encode_into
from quire.stream.spares import Spares

SEGMENT_BYTES_MIN = 256 * KIB
"""The first segment of a stream; each further one is twice as large, if the one before was filled."""

BUFFER_BYTES_MAX = 1 << 20
"""What a stream keeps at most to encode in; a larger run has memory of its own."""
BUFFER_STEP = 4 * KIB

_BYTES = (bytes, bytearray, memoryview)

Roll = Callable[[Sealed | None, Opened | None], None]
"""Says durably that a segment ended, and that the next one begins."""


class Appended(msgspec.Struct, gc=False, eq=False):
    """What `append` returns: the ids, at once; that they are durable, when asked.

    A struct of C's making: one is made for every record, and takes a third of the time that a class of ours would.
    """

    _log: HotLog
    record: int
    """The id of the first record."""
    count: int

    @property
    def done(self) -> bool:
        """Whether the records are durable."""
        return self._log.durable >= self.record + self.count

    def result(self) -> int:
        """Return when the records are durable: the id of the first one."""
        self._log.until(self.record + self.count)
        return self.record

    def __await__(self) -> Generator[Any, None, int]:
        if not self.done:
            import asyncio  # 40 ms that a program without an event loop need not pay

            yield from asyncio.get_running_loop().run_in_executor(None, self.result).__await__()
        return self.record


class HotLog:
    """The open end of one stream."""

    def __init__(
        self,
        files: StreamFiles,
        clock: StreamClock,
        settings: StreamSettings,
        roll: Roll,
        *,
        next_segment: int,
        next_record: int,
        asked: Callable[[], None] = lambda: None,
        check_owner: Callable[[], None] = lambda: None,
    ) -> None:
        # constant after construction
        self._files = files
        self._clock = clock
        self._settings = settings
        self._record_bytes_max = settings.record_bytes_max
        self._small_max = min(settings.record_bytes_max + 4, BLOCK_BYTES)
        """What a record takes at most that shares a block with others."""
        self._roll = roll
        self._asked = asked
        self._check_owner = check_owner
        group = self._group = Handover(self, self._sync)
        self.until = group.until
        """Returns when everything below an id is durable."""
        self.spares = Spares(files)
        self.waiters = Waiters()
        """Threads that wait for records to become durable."""
        # guarded by _writing
        self._writing = threading.RLock()
        self.segment: OpenSegment | None = None
        self._kept = memoryview(b"")
        self._next_segment = next_segment
        self._used_bytes = 0
        self.durable = next_record
        """The id behind the last durable record."""
        self.syncs = 0
        self.newest = Newest(0, 0, [])
        # guarded by _lock
        self._lock = threading.Lock()
        self._next = next_record
        self._runs: list[Run] = []
        self._run: Run = FULL
        """The last one, if more records may join it."""
        self._pending_bytes = 0
        # only ever set
        self.failure: QuireError | None = None

    # ── appending ─────────────────────────────────────────────────────────────────────────────────────────────────────
    def append(self, records: Records) -> Appended:
        """Add a record, or many: their ids are fixed now, and they are durable when the result's `result()` returns."""
        if type(records) is bytes and (size := len(records) + 4) <= self._small_max:
            with self._lock:
                run = self._run
                if size <= run.room:
                    run.room -= size
                    run.payloads.append(records)
                    first = self._next
                    self._next = first + 1
                    return Appended(self, first, 1)
            return self._append_first(records, size)
        return self._append_many(many([bytes(records)] if isinstance(records, _BYTES) else records))

    def _append_first(self, record: bytes, size: int) -> Appended:
        """The same, if there was no run that it fits into."""
        with self._lock:
            self.require()
            first = self._next
            if first >= U64_MAX:
                raise OutOfRange("a stream holds no more than 2**64 - 1 records", first_record=first)
            run = self._run
            if size > run.room:  # somebody else may have begun one
                run = self._begin_run(Run(first, []))
            run.room -= size
            run.payloads.append(record)
            self._next = first + 1
            pending = self._pending_bytes
        if pending > self._settings.pending_bytes_max:
            self._relieve()
        return Appended(self, first, 1)

    def _append_many(self, given: Many) -> Appended:
        """The same, at leisure."""
        limit = self._record_bytes_max
        if given.size > limit and (largest := given.largest()) > limit:
            hint = "split it, or raise stream.record_bytes_max"
            raise OutOfRange("a record is larger than this stream takes", hint=hint, bytes=largest, max=limit)
        count = given.records
        with self._lock:
            self.require()
            first = self._next
            if first + count > U64_MAX:
                raise OutOfRange("a stream holds no more than 2**64 - 1 records", first_record=first)
            if count and given.is_small:
                run = self._run
                if given.size > run.room:
                    run = self._begin_run(Run(first, []))
                run.payloads.extend(given.payloads)
                run.room -= given.size
            elif count:
                self._begin_run(Run(first, given.payloads, given.size, -1))
            self._next = first + count
            pending = self._pending_bytes
        if pending > self._settings.pending_bytes_max:
            self._relieve()
        return Appended(self, first, count)

    def _begin_run(self, run: Run) -> Run:
        """REQUIRES the lock."""
        if not self._runs:
            self._asked()  # somebody should sync, if nobody waits for it
        self._runs.append(run)
        self._pending_bytes += run.size
        self._run = run
        return run

    def _relieve(self) -> None:
        """Too much is pending: the appending thread writes it, and what is wrong with the disk is told here."""
        with self._writing:
            self._write_out()

    @property
    def next_record(self) -> int:
        """The id of the next record."""
        return self._next

    # ── writing ───────────────────────────────────────────────────────────────────────────────────────────────────────
    def _write_out(self, *, sync: bool = False) -> None:
        """Write what is pending; `sync`: and make it durable. REQUIRES `_writing`."""
        with self._lock:
            self.require()
            runs, self._runs, self._run, self._pending_bytes = self._runs, [], FULL, 0
        done = 0
        try:
            for run in runs:
                done += 1
                self._write(run, sync=sync and done == len(runs))
        except DiskFull:  # rule 5: nothing of this run is written
            if self.failure is None:
                self._put_back(runs[done - 1 :])
            raise
        segment = self.segment
        if sync and segment is not None and segment.written > self.durable:
            try:
                segment.file.sync()
            except BaseException as error:
                self._poison(error)
                raise
            self._synced(segment)

    def _put_back(self, runs: list[Run]) -> None:
        with self._lock:
            self._runs[:0] = runs
            self._pending_bytes += sum(run.size for run in runs)

    def _write(self, run: Run, *, sync: bool) -> None:
        """Encode a run and write it, in the open segment or in the next; `sync`: durably, if all before it is.

        REQUIRES `_writing`.
        """
        bodies = run.bodies()
        need = bodies[0].block_bytes if len(bodies) == 1 else sum(body.block_bytes for body in bodies)
        segment = self.segment
        if segment is None or segment.offset + need > segment.capacity:
            segment = self._next_open(run.first, need)
        stamp, first, offset, durable = self._clock.now_ms(), run.first, segment.offset, self.durable
        out, seed, last = self._buffer(need), segment.header.crc64, len(bodies)
        for number, body in enumerate(bodies, 1):
            place = Place(offset, first, stamp, durable)
            here = out[offset - segment.offset :]
            segment.crc = encode_into(here, seed, place, body, is_commit=number == last, running=segment.crc)
            segment.firsts.append(first)
            segment.offsets.append(offset)
            segment.stamps.append(stamp)
            offset, first = offset + body.block_bytes, first + body.records
        sync = sync and segment.written == durable
        try:
            if sync:
                write_synced(segment.file, out, segment.offset)
            else:
                segment.file.write_at(out, segment.offset)
        except BaseException as error:
            self._poison(error)
            raise
        hit("stream.hot.written")
        segment.offset, segment.written = offset, first
        if sync:
            self._synced(segment)
            if type(run.payloads) is list and run.size <= BLOCK_BYTES:
                self.newest = Newest(run.first, stamp, run.payloads)

    def _synced(self, segment: OpenSegment) -> None:
        hit("stream.hot.synced")
        try:
            self._check_owner()  # nothing is acknowledged that a second owner may already have cut off
        except StoreFenced as error:
            self._poison(error)
            raise
        self.syncs += 1
        self.durable = segment.written

    def _buffer(self, size: int) -> memoryview:
        """Where a run is encoded: the same memory each time, which is in the processor's cache. REQUIRES `_writing`."""
        if size > len(self._kept):
            if size > BUFFER_BYTES_MAX:
                return memoryview(bytearray(size))
            self._kept = memoryview(bytearray(aligned(size, BUFFER_STEP)))
        return self._kept[:size]

    def sync(self) -> None:
        """Return when everything that was appended is durable."""
        self.until(self._next)

    def _sync(self) -> None:
        """Rule 2. One at a time: `Handover` calls it."""
        with self._writing:
            self._write_out(sync=True)
        if self.waiters:
            self.waiters.wake()

    # ── segments ──────────────────────────────────────────────────────────────────────────────────────────────────────
    def seal(self) -> bool:
        """Sync, and end the open segment; False if there is none."""
        self.sync()
        with self._writing:
            self.require()
            if self.segment is None:
                return False
            self._end(None)
        self.waiters.wake()
        return True

    def is_due(self) -> bool:
        """Whether the open segment is old enough to be sealed."""
        segment = self.segment
        return segment is not None and self._clock.monotonic() - segment.opened_at >= self._settings.seal_seconds

    def _next_open(self, first: int, need: int) -> OpenSegment:
        """End the open segment and begin the next, with room for so many bytes. REQUIRES `_writing`."""
        before = self.segment
        if before is not None:
            self._used_bytes = before.capacity
        size = max(self._next_bytes(), aligned(HEADER_BYTES + need, ALIGN))
        file, size = self.spares.take(size)  # may raise `DiskFull`: nothing has happened yet
        segment_id = self._next_segment
        salt = int.from_bytes(os.urandom(8), "little") or 1  # `secrets` would do the same, and load OpenSSL
        header = SegmentHeader(self._files.stream_id, segment_id, first, self._clock.now_ms(), salt)
        header = SegmentHeader.decode(header.encode())
        try:
            file.write_at(header.encode(), 0)
            file.sync()
            hit("stream.hot.header")
            self._files.disk.rename(file.path, self._files.segment(Tier.HOT, segment_id))
            hit("stream.hot.renamed")
            self._files.disk.sync_dir(self._files.folder(Tier.HOT))
        except BaseException as error:
            self._poison(error)
            with suppress(StorageFault):
                file.close()
            raise
        self._next_segment = segment_id + 1
        opened = OpenSegment(file, header, size, self._clock.monotonic())
        self._end(opened)
        return opened

    def _end(self, opened: OpenSegment | None) -> None:
        """The open segment takes no more blocks; `opened` does. REQUIRES `_writing`."""
        before = self.segment
        try:
            if before is not None and before.written > self.durable:
                before.file.sync()  # rule 3
                self.durable = before.written
            sealed = None if before is None else before.sealed()
            self._roll(sealed, None if opened is None else Opened(opened.segment_id, opened.header.base_record))
            hit("stream.hot.rolled")
        except BaseException as error:
            self._poison(error)
            if opened is not None:
                opened.file.close()
            raise
        self.segment = opened
        if before is not None:
            if opened is None:
                self._used_bytes = min(before.offset, before.capacity)
            before.file.close()

    def _next_bytes(self) -> int:
        limit = self._settings.segment_bytes
        return min(limit, max(min(SEGMENT_BYTES_MIN, limit), 2 * aligned(self._used_bytes, ALIGN)))

    def prepare(self) -> bool:
        """Make the next segment's file, if the open one is half full and there is none; whether one was made."""
        segment = self.segment
        if segment is None or segment.offset * 2 < segment.capacity or self.failure is not None:
            return False
        return self.spares.prepare(min(self._settings.segment_bytes, max(SEGMENT_BYTES_MIN, 2 * segment.capacity)))

    def recycle(self, segment_id: int) -> bool:
        """Take the file of a segment that is evicted as the next spare; False if it is of no use here."""
        return self.failure is None and self.spares.recycle(segment_id, self._settings.segment_bytes)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Nothing is written or sealed for the length of a block."""
        with self._writing:
            yield

    # ── the end ───────────────────────────────────────────────────────────────────────────────────────────────────────
    def close(self) -> None:
        """Sync and seal what there is; then take nothing more."""
        try:
            if self.failure is None:
                self.seal()
                self.spares.close()
        finally:
            self.abandon(StoreClosed("the stream is closed", hint="open it again", stream_id=self._files.stream_id))

    def abandon(self, why: QuireError) -> None:
        """Take nothing more and close the files; what is not durable is left to recovery."""
        with self._lock:
            self._run = FULL
            if self.failure is None or isinstance(why, StoreClosed):
                self.failure = why
        with self._writing:
            if self.segment is not None:
                self.segment.file.close()
        self.spares.abandon()
        self._group.wake()
        self.waiters.wake()

    def forked(self) -> None:
        """In the child of a fork(): the files are the parent's, and nobody holds the locks (M12)."""
        self._run = FULL
        self.failure = StoreClosed("the stream belongs to the parent of this fork()", hint="open the store again")
        self._lock, self._writing = threading.Lock(), threading.RLock()
        self._group.forked()
        self.waiters = Waiters()

    def require(self) -> None:
        """Raise what has made the stream unusable, if something has."""
        if (why := self.failure) is not None:
            raise type(why)(why.what, hint=why.hint, **why.where) from why.__cause__

    def _poison(self, error: BaseException) -> None:
        """Rule 5."""
        if self.failure is None:
            what, hint = f"the stream's segment failed: {error}", "repair the cause, then open the stream again"
            failure = poisoned_by(error, what, hint=hint, stream_id=self._files.stream_id)
            with self._lock:
                self.failure, self._run = failure, FULL  # who appends next finds no room, and then the failure
            emit("error", "stream.failed", stream=self._files.stream_id, error=f"{type(error).__name__}: {error}")
        self.waiters.wake()
