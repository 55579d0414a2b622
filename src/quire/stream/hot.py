"""Where a stream is written: appended records become blocks of the open segment, a group of them with one sync.

Pending records have an id and are not written yet; written ones are in the file, in a block; durable ones are synced: what a
returned `result()` covers, and what readers see. Ids are given in `append`, in order and without gaps. An append is durable
whole or not at all: its records are in one block, or in blocks of one segment of which only the last is a commit. Nothing is
appended after a cut (P4): a log begins with no open segment, and opens a new one with its first block.

After a failed write or sync nobody knows what is on disk: `StoreUnusable` until the stream is opened again (M12). `DiskFull`
means "not done, and never will be": a segment that cannot be made breaks nothing, and what is pending stays so until somebody
is to be told; then all of it is refused, and its ids are given out again (`AppendRound`). Who does not ask for the result of
an append is told by the next `sync`, `seal` or `close`. The background tells nobody, so it refuses nothing.

Locks, in the order they are taken: `_writing` (file, segment, durable mark), that of `Pending` (ids and what is pending).
Threads: any. Format page: `docs/formats/stream-segment.md`.
Raises `StoreUnusable`, `StoreClosed`, `DiskFull`, `OutOfRange`, `InvalidInput`."""

from __future__ import annotations

import os
import threading
from array import array
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


class Newest(NamedTuple):
    """Records that have just become durable: whoever waits for them need not read the file."""

    first: int
    timestamp_ms: int
    payloads: list[bytes]
    """Nobody adds to it any more."""


class ActiveSegment:
    """The segment that is being written, and where its blocks are."""

    __slots__ = ("capacity", "crc", "file", "firsts", "header", "offset", "offsets", "opened_at", "stamps", "written")

    def __init__(self, file: File, header: StreamSegmentHeader, capacity: int, opened_at: float) -> None:
        self.file = file
        self.header = header
        self.capacity = capacity
        self.opened_at = opened_at
        self.offset = HEADER_BYTES
        """Where the next block goes."""
        self.written = header.base_record
        """The id behind the last record in it."""
        self.crc = crc64(header.encode())
        self.firsts, self.offsets, self.stamps = array("Q"), array("Q"), array("Q")
        """Of its blocks. Appended to by the writer alone; readers look at those below the durable mark."""

    @property
    def segment_id(self) -> int:
        return self.header.segment_id

    def sealed(self) -> SegmentEnd:
        """What it is when it ends now."""
        header = self.header
        return SegmentEnd(header.segment_id, header.base_record, self.written, self.offset, self.crc, len(self.offsets))


BUFFER_BYTES_MAX = 1 << 20
"""What a stream keeps at most to encode in; a larger run has memory of its own."""
BUFFER_STEP = 4 * KIB

Roll = Callable[[SegmentEnd | None, SegmentStart | None], None]
"""Says durably that a segment ended, and that the next one begins."""


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
        """Has room made for what `roll` will say, so that a full disk is known before anything has happened."""
        self._group = GroupCommit(self, self._sync)
        self.spares = Spares(files)
        self.waiters = Waiters()
        """Threads that wait for records to become durable."""
        # guarded by _writing
        self._writing = threading.RLock()
        self.segment: ActiveSegment | None = None
        self._kept = memoryview(b"")
        self._next_segment = next_segment
        self._used_bytes = 0
        self.durable = next_record
        """The id behind the last durable record."""
        self.syncs = 0
        self.newest = Newest(0, 0, [])
        # only ever set
        self.failure: QuireError | None = None
        self.barrier: Barrier | None = None
        """What whoever waits for records waits behind (A9)."""
        pending = self._pending = Pending(
            self, settings, next_record=next_record, asked=asked, relieve=self._relieve, calls=calls or RecentKeys()
        )
        self.append, self.told = pending.append, pending.told

    def has_call(self, key: bytes) -> bool:
        """Whether records with this idempotency key were appended lately."""
        return self._pending.has_call(key)

    @property
    def calls(self) -> tuple[tuple[int, int], ...]:
        """Idempotency keys of the newest appends, with their first records: for when their segment is sealed."""
        return self._pending.newest_calls()

    def refuse_by(self, require_writable: Callable[[], None]) -> None:
        """Have every append ask this first, which raises if the stream takes no writes."""
        self._pending.require_writable = require_writable

    # ── appending ─────────────────────────────────────────────────────────────────────────────────────────────────────
    def _relieve(self, turn: AppendRound, first: int, count: int) -> None:
        """Too much is pending: the appending thread writes it, and what is wrong with the disk is told here."""
        try:
            with self._writing:
                self._write_out()
        except DiskFull as full:
            self._refuse(turn, first + count, full)
            if turn.refused_from < first + count:
                self.told(count)
                raise

    @property
    def next_record(self) -> int:
        """The id of the next record."""
        return self._pending.next_record

    # ── writing ───────────────────────────────────────────────────────────────────────────────────────────────────────
    def _write_out(self, *, sync: bool = False) -> None:
        """Write what is pending; `sync`: and make it durable. REQUIRES `_writing`."""
        runs = self._pending.take()
        done = 0
        try:
            for run in runs:
                self._write(run, sync=sync and done + 1 == len(runs))
                done += 1
        except BaseException:
            self._pending.put_back(runs[done:])  # nothing of this run is written, or the stream has failed
            if sync and self.failure is None:
                self._sync_written()  # who is told of a full disk must know what of its own is durable
            raise
        if sync:
            self._sync_written()

    def _sync_written(self) -> None:
        segment = self.segment
        if segment is None or segment.written <= self.durable:
            return
        try:
            segment.file.sync()
        except BaseException as error:
            self._poison(error)
            raise
        self._synced(segment)

    def _refuse(self, turn: AppendRound, upto: int, full: DiskFull) -> None:
        """Give up everything that is pending, if something below `upto` of this turn is."""
        with self._writing:  # nobody is writing what is refused
            count = self._pending.refuse(turn, upto, full)
        if count:
            emit("warning", "stream.refused", stream=self._files.stream_id, records=count, first=turn.refused_from)
            self._group.wake()

    def until(self, upto: int, turn: AppendRound) -> None:
        """Return when everything below an id is durable; `DiskFull`: it is not, and never will be."""
        while True:
            try:
                return self._group.until(upto, turn)
            except DiskFull as full:
                self._refuse(turn, upto, full)
                if turn.refused_from < upto:
                    raise

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
        out, seed, last, crc = self._buffer(need), segment.header.crc64, len(bodies), segment.crc
        marks = []
        for number, body in enumerate(bodies, 1):
            place = NextBlock(offset, first, stamp, durable, run.call)
            here = out[offset - segment.offset :]
            crc = encode_into(here, seed, place, body, is_commit=number == last, running=crc)
            marks.append((first, offset))
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
        for mark in marks:  # not before it is written: a run that was not is written once more
            segment.firsts.append(mark[0])
            segment.offsets.append(mark[1])
            segment.stamps.append(stamp)
        segment.crc, segment.offset, segment.written = crc, offset, first
        if sync:
            self._synced(segment)
            if type(run.payloads) is list and run.size <= BLOCK_BYTES:
                self.newest = Newest(run.first, stamp, run.payloads)

    def _synced(self, segment: ActiveSegment) -> None:
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
        """Return when everything that was appended is durable; `DiskFull` if something was refused that nobody knows of."""
        try:
            self.until(*self._pending.end())
        finally:
            untold = self._pending.all_told()
        if untold:
            hint = "free space, then append them again"
            raise DiskFull(
                "the disk was full and records were refused", hint=hint, records=untold, stream=self._files.stream_id
            )

    def sync_quietly(self) -> None:
        """The same for the background: a full disk is raised, and refuses nothing."""
        self._group.until(*self._pending.end())

    def _sync(self) -> None:
        """Write and sync everything that is pending, for all who wait. One at a time: `GroupCommit` calls it."""
        with self._writing:
            self._write_out(sync=True)
        if self.waiters:
            self.waiters.wake()

    # ── segments ──────────────────────────────────────────────────────────────────────────────────────────────────────
    def seal(self, *, quietly: bool = False) -> bool:
        """Sync, and end the open segment; False if there is none. `quietly`: see `sync_quietly`."""
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
        """In how many seconds the open segment is old enough to be sealed; `None` if there is none."""
        segment = self.segment
        if segment is None:
            return None
        return segment.opened_at + self._settings.seal_seconds - self._clock.monotonic()

    def is_due(self) -> bool:
        """Whether the open segment is old enough to be sealed."""
        seconds = self.seconds_until_seal()
        return seconds is not None and seconds <= 0

    def _next_open(self, first: int, need: int) -> ActiveSegment:
        """End the open segment and begin the next, with room for so many bytes. REQUIRES `_writing`."""
        before = self.segment
        if before is not None:
            self._used_bytes = before.capacity
        size = max(next_bytes(self._used_bytes, self._settings.segment_bytes), aligned(HEADER_BYTES + need, ALIGN))
        self._reserve()
        file, size = self.spares.take(size)  # this or that may raise `DiskFull`: nothing has happened yet
        segment_id = self._next_segment
        salt = int.from_bytes(os.urandom(8), "little") or 1  # `secrets` would do the same, and load OpenSSL
        header = StreamSegmentHeader(self._files.stream_id, segment_id, first, self._clock.now_ms(), salt)
        header = StreamSegmentHeader.decode(header.encode())
        try:
            file.write_at(header.encode(), 0)
            file.sync()
            hit("stream.hot.header")
            self._files.disk.rename(file.path, self._files.segment(Tier.HOT, segment_id))
            hit("stream.hot.renamed")
            # Header and name are durable, and the log knows the segment (`_end`), before its first block is written.
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
        """The open segment takes no more blocks; `opened` does. REQUIRES `_writing`."""
        before = self.segment
        try:
            if before is not None and before.written > self.durable:
                before.file.sync()  # before the next one gets a block: nothing survives whose past does not
                self.durable = before.written
            sealed = None if before is None else before.sealed()
            self._roll(sealed, None if opened is None else SegmentStart(opened.segment_id, opened.header.base_record))
            hit("stream.hot.rolled")
        except BaseException as error:
            if opened is not None:
                opened.file.close()
            self._poison(error)
            raise
        self.segment = opened
        if before is not None:
            if opened is None:
                self._used_bytes = min(before.offset, before.capacity)
            trim(before.file, before.offset)  # after the log knows that it ends here
            before.file.close()

    def prepare(self) -> bool:
        """Make the next segment's file, if the open one is half full and there is none; whether one was made."""
        segment = self.segment
        if segment is None or segment.offset * 2 < segment.capacity or self.failure is not None:
            return False
        return self.spares.prepare(next_bytes(segment.capacity, self._settings.segment_bytes))

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
                try:
                    self.sync()
                finally:  # what is durable is sealed, whatever was refused
                    if self.failure is None:
                        self._seal()
                        self.spares.close()
        finally:
            self.abandon(StoreClosed("the stream is closed", hint="open it again", stream_id=self._files.stream_id))

    def abandon(self, why: QuireError) -> None:
        """Take nothing more and close the files; what is not durable is left to recovery."""
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
        """In the child of a fork(): the files are the parent's, and nobody holds the locks (M12)."""
        self.failure = StoreClosed("the stream belongs to the parent of this fork()", hint="open the store again")
        self._writing = threading.RLock()
        self._pending.forked()
        self._group.forked()
        self.waiters = Waiters()

    def require(self) -> None:
        """Raise what has made the stream unusable, if something has."""
        if (why := self.failure) is not None:
            raise type(why)(why.what, hint=why.hint, **why.where) from why.__cause__

    def _poison(self, error: BaseException) -> None:
        """Take no more records until the stream is reopened. A full disk is told as what it is here: nobody knows what
        is on it, and `DiskFull` would say "not done"."""
        if self.failure is None:
            what = f"the stream's segment failed: {error}"
            hint = "fix the cause, reopen the stream, and check what it holds before appending again"
            self.failure = poisoned_by(error, what, hint=hint, stream_id=self._files.stream_id)
            self._pending.stop()  # who appends next finds no room, and then the failure
            emit("error", "stream.failed", stream=self._files.stream_id, error=f"{type(error).__name__}: {error}")
        self.waiters.wake()
        if isinstance(error, DiskFull):
            raise self.failure from self.failure.__cause__  # the first trouble, also if this one came later
