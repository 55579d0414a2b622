"""The write-ahead log of one database: appends transactions, makes them durable, and finds versions of pages.

Terms
  written    appended to the open segment: the next writer builds on it
  durable    synced: readers may open at it
  published  in the manifest's page index; `unpublished` has the other versions of each page in memory, newest first

State on disk after each step, and how a crash is handled
  segments are created    see wal_files.py
  frames are appended     not synced, even if write-back has started: a torn tail, cut at the last commit (P3)
  the segment is synced   every transaction up to `durable` is complete; recovery finds it in the frames
  it is published         see publication.py

Frames enter the log only in `append`, under the append lock, one transaction at a time, its commit frame last (P6). Everything
that can be rejected is rejected before the first frame is written, and changes nothing. lsns are reserved in the manifest in
blocks before they are used, so none is ever used twice; and nothing that names an lsn enters the manifest before that lsn is
durable (P5). After a failed write or sync the database accepts nothing more until it is reopened (M12); versions that were
durable by then can still be read.

Whenever a segment has frames that no later sync has started to cover, it is in the queue of dirty segments with its flag set.
So the appending and the syncing thread need no common lock: if the appender finds the flag set, the sync that will clear it has
not started.

Threads: `append` by the holder of the database's write lock; `sync`, `publish`, `seal` and reads by any.
"""

from __future__ import annotations

import threading
from array import array
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, NamedTuple

from quire.core.clock import Clock
from quire.core.errors import OutOfRange, QuireError, StoreClosed, StoreFenced, poisoned_by
from quire.core.events import emit
from quire.core.limits import MIB
from quire.durable.failpoints import hit
from quire.durable.files import Disk
from quire.manifest import tables as t
from quire.manifest.ops.wal import AdvanceWal
from quire.manifest.store import ManifestStore
from quire.pages.page_source import Mark
from quire.pages.publication import Publication, Segment, UnpublishedFrames
from quire.pages.segment import FRAME_HEAD_BYTES, PageWrite
from quire.pages.segment_file import SegmentFile
from quire.pages.sync_lanes import Flight, SyncLanes
from quire.pages.wal_files import SegmentMaker

if TYPE_CHECKING:
    from quire.pages.transaction import Spill

LSN_BLOCK = 1 << 20
"""lsns reserved at a time: one commit of the manifest per million page versions."""

FORGET_PAGES = 1_024
"""Pages removed from `unpublished` per acquisition of the append lock: less than a millisecond."""

HEADS_MAX = 65_536
"""Pages whose newest version is cached, for `prev_lsn` of the next one; above it, the cache is cleared."""

ZERO_PAGES_MAX = 65_536
ZERO_BYTES_MAX = 256 * MIB
"""How many pages a transaction may create without writing them, and the WAL bytes they may take: each is a frame (P15)."""

_NO_HEAD = (0, 0)

Version = tuple[int, int, "Version | None"]
"""(lsn, segment) of one version of a page, and the version before it. Immutable: readers follow the list while writers prepend
to it."""


class WalStart(NamedTuple):
    """Where writing continues after recovery."""

    next_lsn: int
    next_segment_id: int
    durable: Mark


class Wal:
    """The log of one open database; created by the engine after recovery."""

    def __init__(
        self,
        *,
        db_id: int,
        page_size: int,
        root: str,
        disk: Disk,
        manifest: ManifestStore,
        clock: Clock,
        start: WalStart,
        notify: Callable[[], None] = lambda: None,
        notify_bytes: int = 4 * MIB,
    ) -> None:
        # constant after construction
        self.db_id = db_id
        self.page_size = page_size
        self.disk = disk
        self.root = root
        self._manifest = manifest
        self._clock = clock
        self._notify = notify
        self._notify_bytes = notify_bytes
        self.barrier = manifest.barrier
        """The barrier that a commit's guard waits for in mode `sync` of the archive."""
        # guarded by _append
        self._append = threading.Lock()
        self._maker = SegmentMaker(
            db_id=db_id,
            page_size=page_size,
            root=root,
            disk=disk,
            manifest=manifest,
            clock=clock,
            next_segment_id=start.next_segment_id,
        )
        self._segment: Segment | None = None
        self._ahead: deque[SegmentFile] = deque()
        """Segments created for the rest of the transaction being written."""
        self._next_lsn = start.next_lsn
        # The manifest has reserved nothing above this: the first append reserves a block before it uses an lsn.
        self._reserved_lsn = start.next_lsn - 1
        self._heads: dict[int, tuple[int, int]] = {}
        # written under _append, read by all
        self.opened_at = clock.monotonic()
        """When the open segment was started, for the seal timer."""
        self.written = start.durable
        self.newest_lsn = array("q", [start.durable.lsn])
        """The lsn of `written`, for readers that must not wait for the interpreter lock; -1 once the log has failed."""
        self.unpublished: dict[int, Version] = {}
        self.appended_bytes = 0
        """Bytes appended since the database was opened."""
        # set once, never cleared
        self.failure: QuireError | None = None
        # written under the lock of _lanes, read by all
        self._lanes = SyncLanes(
            start.durable.lsn, begin=self._begin_sync, sync=self._sync, settle=self._settle, on_failure=self._poison
        )
        self.wait_durable = self._lanes.wait_durable
        """Return when everything up to an lsn is durable."""
        self.durable = start.durable
        self.syncs = 0
        self._publish_requested = False
        """Whether publication was requested and has not started. A request per sync would cost 5 µs and wake the ticker."""
        self._dirty: deque[Segment] = deque()
        """Segments to sync: the writer appends one after writing its frames; a flight removes it before its sync."""
        self._publication = Publication(
            db_id=db_id, disk=disk, manifest=manifest, forget=self.forget, poison=self._poison
        )

    # ── writing ───────────────────────────────────────────────────────────────────────────────────────────────────────
    def append(self, images: Mapping[int, bytes], db_size: int, zeros_from: int, spill: Spill | None = None) -> Mark:
        """Append a transaction that leaves the database at `db_size` pages, and return the version it creates.

        Its pages are those of `images` and `spill`; all other pages from `zeros_from` on become zeros (P15).
        """
        with self._append:
            if self.failure is not None:
                self.require()
            # In ascending order, so that neighbouring pages can be read together.
            order = sorted(images if spill is None else [*images, *spill])
            if zeros_from < db_size:
                self._add_zeros(order, db_size, zeros_from)
            count, segment = len(order), self._segment
            if self._next_lsn + count > self._reserved_lsn:
                self._reserve(count)
            room = segment.file.room if segment is not None else 0
            if count > room:  # before the first frame is written, so that a full disk changes nothing
                self._ahead.extend(self._maker.make(count - room, self._next_lsn + room))
            try:
                return self._write(order, images, spill, db_size)
            # From the first frame on the outcome is unknown: recovery may find the commit frame and keep it.
            except BaseException as error:
                self._poison(error)
                raise

    def _add_zeros(self, order: list[int], db_size: int, zeros_from: int) -> None:
        written = order[bisect_left(order, zeros_from) :]
        missing = db_size - zeros_from - len(written)
        if not missing:
            return
        limit = min(ZERO_PAGES_MAX, ZERO_BYTES_MAX // (self.page_size + FRAME_HEAD_BYTES))
        if missing > limit:
            raise OutOfRange(
                "the transaction adds too many pages without writing them",
                hint=f"write them, or grow the database by at most {limit} empty pages at a time",
                db_id=self.db_id,
                empty_pages=missing,
                size_pages=zeros_from,
                new_size_pages=db_size,
            )
        # Without frames of their own, pages that an earlier transaction cut off would come back with their old contents
        # when the database grows again.
        there = set(written)
        order += [page for page in range(zeros_from, db_size) if page not in there]
        order.sort()

    def _reserve(self, frames: int) -> None:
        """Reserve a block of lsns in the manifest, before they are used (P5)."""
        upto = self._next_lsn + frames + LSN_BLOCK
        # Awaited: if an lsn reached the disk before its reservation is durable, the next open would use it again.
        self._manifest.submit([AdvanceWal(self.db_id, 0, lsn_reserved=upto)]).result()
        self._reserved_lsn = upto

    def _write(self, order: list[int], images: Mapping[int, bytes], spill: Spill | None, db_size: int) -> Mark:
        """Write the transaction into the open segment and those created for it, and record it in memory.

        Most of the Python cost of a commit is here, so steps that could be functions are inlined.
        """
        before, unpublished, heads, publication = self.written, self.unpublished, self._heads, self._publication
        now, done, count, lsn = self._clock.now_ms(), 0, len(order), self._next_lsn
        image_of, former = images.get, unpublished.get
        # Times of commits never fall, even if the clock is set back: time travel finds them by bisection (P14).
        if now < before.commit_ms:
            now = before.commit_ms
        mark: Mark | None = None
        while mark is None:
            segment = self._segment
            room = segment.file.room if segment is not None else 0
            if segment is None or not room:
                segment = self._next_segment()
                room = segment.file.room
            part = order if not done and count <= room else order[done : done + room]
            done += len(part)
            try:
                writes: list[PageWrite] = [(page, image_of(page), *heads[page]) for page in part]
            except KeyError:
                self._load_heads([page for page in part if page not in heads], before.size_pages)
                writes = [(page, image_of(page), *heads[page]) for page in part]
            if spill:
                writes = [
                    write if write[1] is not None else (write[0], spill.get(write[0]), *write[2:]) for write in writes
                ]
            size, file = db_size if done == count else 0, segment.file
            first = file.used
            # Recovery takes `durable_upto_lsn` for proof that everything up to it was synced, so it must be `durable`,
            # never `written` (P3).
            frame_heads = file.append(writes, db_size=size, durable_upto_lsn=self.durable.lsn, commit_ms=now)
            if not segment.is_dirty:  # after the frames are written: the flight that takes the segment syncs them
                segment.is_dirty = True
                self._dirty.append(segment)
            segment_id = segment.segment_id
            if len(heads) > HEADS_MAX:
                heads.clear()
            for page in part:
                heads[page] = (lsn, segment_id)
                unpublished[page] = (lsn, segment_id, former(page))
                lsn += 1
            self._next_lsn = lsn
            if size:
                mark = Mark(lsn - 1, db_size, segment_id, now)
            segment.size_pages = size or max(before.size_pages, db_size)
            written_bytes = len(part) * segment.stride
            added_bytes = publication.added_bytes = publication.added_bytes + written_bytes
            piece = UnpublishedFrames(segment, first, len(part), lsn - 1, frame_heads, mark, added_bytes)
            publication.pieces.append(piece)
            self.appended_bytes += written_bytes
        # Last: a flight reads `written` first and collects dirty segments afterwards, so every frame of the version
        # must be written and its segment flagged by now.
        self.written = mark
        self.newest_lsn[0] = mark.lsn
        # A sync may have failed, or `abandon` run, in another thread during this append: the -1 must not be overwritten. Each
        # of them sets `failure` first.
        if self.failure is not None:
            self.newest_lsn[0] = -1
        return mark

    def _load_heads(self, pages: list[int], size_before: int) -> None:
        """Look up the previous versions of these pages. A page beyond the former end has none."""
        heads, unpublished = self._heads, self.unpublished
        missing: list[int] = []
        for page in pages:
            version = unpublished.get(page)
            heads[page] = version[:2] if version is not None else _NO_HEAD
            if version is None and page < size_before:
                missing.append(page)
        if missing:
            # After the look into memory: a version that is published in between is found in the index (P8).
            with self._manifest.read() as txn:
                for page in missing:
                    row = txn.get(t.PAGE_VERSION_HEAD, self.db_id, page)
                    if row is not None:
                        heads[page] = (row.lsn, row.segment_id)

    def _next_segment(self) -> Segment:
        """End the open segment, if any, and start the next one. REQUIRES the append lock and a segment in `_ahead`."""
        self._end(self._segment)
        segment = self._segment = Segment(self._ahead.popleft())
        self.opened_at = self._clock.monotonic()
        return segment

    def _end(self, segment: Segment | None) -> None:
        """End the open segment: it gets no more frames. REQUIRES the append lock."""
        if segment is not None:
            self._publication.end(segment)
            self._maker.ended(segment.file)
            self._segment = None

    def seal(self) -> Mark:
        """End the open segment, if it has frames, and return the version that the ended segments contain."""
        with self._append:
            if self._segment is not None and self._segment.file.used:
                self._end(self._segment)
            return self.written

    # ── durability ────────────────────────────────────────────────────────────────────────────────────────────────────
    def sync(self, upto_lsn: int | None = None) -> None:
        """Return when everything up to an lsn (default: everything written) is durable."""
        self.wait_durable(self.written.lsn if upto_lsn is None else upto_lsn)

    def _begin_sync(self, flight: Flight, before: Flight | None) -> None:
        """Set what a flight that begins now covers. `SyncLanes` calls it under its lock."""
        dirty = self._dirty
        flight.mark = self.written  # first: frames written after this may be in segments that the flight does not take
        segments = flight.segments = []
        while dirty:
            segment = dirty.popleft()
            segment.is_dirty = False
            segments.append(segment)
        if before is not None:  # its segments may have frames that were written after its mark (docs/decisions/011)
            segments += [segment for segment in before.segments if segment not in segments]

    def _sync(self, flight: Flight) -> None:
        """Sync the segments of one flight. At most two run concurrently."""
        # `abandon` sets `failure` and waits for running flights before it closes files; a flight that begins later must
        # not touch them.
        if self.failure is not None:
            self.require()
        for segment in flight.segments:
            segment.file.sync(flight.lane)
        self._manifest.writer.check_owner()  # a fenced owner must not acknowledge frames that its successor may cut
        hit("pages.wal.synced")

    def _settle(self, flight: Flight) -> None:
        """Record a completed flight as durable. Flights are settled one at a time, in the order in which they began."""
        self.syncs += 1
        self.durable = flight.mark
        if not self._publish_requested:
            waiting = self._publication
            if waiting.ended or waiting.added_bytes - waiting.published_bytes >= self._notify_bytes:
                self._publish_requested = True
                self._notify()

    # ── publishing ────────────────────────────────────────────────────────────────────────────────────────────────────
    def publish(self) -> int:
        """Publish everything durable, and seal the rows of segments that have ended; return the number of rows published."""
        return sum(self.publishing())

    def publishing(self) -> Iterator[int]:
        """Do the same in steps, each of which waits for the commit that the previous one submitted; yield the rows of each."""
        # Cleared before the publisher reads `durable`: what becomes durable after that is requested again.
        self._publish_requested = False
        return self._publication.publish(lambda: self.durable)

    def forget(self, pages: list[int], upto: int) -> None:
        """Remove the versions of these pages up to an lsn from `unpublished`.

        REQUIRES that the batch that publishes them has committed: a reader that checks `unpublished` first and begins its
        manifest transaction afterwards misses nothing (P8).
        """
        unpublished = self.unpublished
        for start in range(0, len(pages), FORGET_PAGES):
            # A version that a writer prepends between `get` and the assignment would be lost without the lock.
            with self._append:
                for page in pages[start : start + FORGET_PAGES]:
                    version = unpublished.get(page)
                    if version is None or version[0] <= upto:  # nothing newer: the usual case
                        unpublished.pop(page, None)
                    elif (left := _after(version, upto)) is not None:
                        unpublished[page] = left

    # ── figures ───────────────────────────────────────────────────────────────────────────────────────────────────────
    @property
    def recycled(self) -> int:
        """How many files were recycled."""
        return self._maker.recycled

    @property
    def unpublished_bytes(self) -> int:
        """Bytes that are written and not published."""
        return self._publication.added_bytes - self._publication.published_bytes

    def has_ended(self) -> bool:
        """Return whether a segment has ended whose row is not sealed yet."""
        return bool(self._publication.ended)

    @property
    def is_quiescent(self) -> bool:
        """Whether everything written is sealed and published, and there is no spare file."""
        waiting = self._publication
        return (
            self._segment is None
            and not waiting.ended
            and waiting.added_bytes == waiting.published_bytes
            and self.written.lsn == self.durable.lsn
            and not self._maker.has_spare
        )

    def prepare(self) -> bool:
        """Prepare the next file if the open segment is large and half full; return whether one was created."""
        # Without the append lock: if the segment ends meanwhile, the spare is created too early, or at the next tick.
        segment = self._segment
        if segment is None:
            self._maker.drop_spare()  # nothing was written since the last seal: do not keep 16 MiB of zeros
        if self._maker.has_spare or segment is None or segment.file.used * 2 < segment.file.header.geometry.capacity:
            return False
        return self._maker.prepare(segment.file.header.geometry.file_bytes)

    # ── reading ───────────────────────────────────────────────────────────────────────────────────────────────────────
    def newest(self, page: int, upto_lsn: int) -> Version | None:
        """Return the newest unpublished version of a page at or below an lsn."""
        version = self.unpublished.get(page)
        while version is not None and version[0] > upto_lsn:
            version = version[2]
        return version

    # ── the end ───────────────────────────────────────────────────────────────────────────────────────────────────────
    def close(self) -> None:
        """Sync, seal and publish everything, so that the next open has nothing to recover; then refuse all further writes."""
        try:
            if self.failure is None:
                # In this order: publication takes only what is durable, and seals only segments that have ended.
                self.seal()
                self.sync()
                self.publish()
                self._maker.drop_spare()
        finally:
            self.abandon(StoreClosed("the database is closed", hint="open it again", db_id=self.db_id))

    def abandon(self, why: QuireError) -> None:
        """Refuse all further writes and close the files; whatever is not durable is left to recovery."""
        if self.failure is None:
            self.failure = why
        self.newest_lsn[0] = -1
        # Before the append lock is taken: a batch in progress needs that lock to forget its pages.
        self._publication.stop()
        with self._append:
            self._lanes.drain()  # `failure` is set: syncs that begin from now on raise before they touch a file
            files = [*(segment.file for segment in self._publication.ended), *self._ahead]
            if self._segment is not None:
                files.append(self._segment.file)
            self._segment, self._ahead = None, deque()
            for file in files:
                file.close()
        # Sleepers that no flight serves any more: each tries to lead, and gets the failure.
        self._lanes.wake()

    def forked(self) -> None:
        """Mark the log closed in the child of a fork(): the files are the parent's. Replaces locks that a thread of the parent
        may have held (M12)."""
        self.failure = StoreClosed("the database was opened by the parent of a fork()", hint="open the store again")
        self.newest_lsn[0] = -1
        self._append = threading.Lock()
        self._lanes.forked()
        self._publication.forked()

    def require(self) -> None:
        """Raise the error that made the database unusable, if any."""
        if (why := self.failure) is not None:
            raise why.copied() from why.__cause__

    def _poison(self, error: BaseException) -> None:
        """Refuse writes until the database is reopened: the state on disk is unknown."""
        if self.failure is None:
            hint = "fix the cause, then reopen the database"
            self.failure = poisoned_by(error, f"the database's WAL failed: {error}", hint=hint, db_id=self.db_id)
            self.newest_lsn[0] = -1
            if not isinstance(error, StoreFenced):  # one event for the store is enough: manifest.fenced
                emit("error", "wal.failed", db_id=self.db_id, error=error)


def _after(version: Version | None, upto_lsn: int) -> Version | None:
    """Return the versions above an lsn.

    >>> _after((9, 1, (7, 1, (2, 1, None))), 2)
    (9, 1, (7, 1, None))
    """
    kept: list[Version] = []
    while version is not None and version[0] > upto_lsn:
        kept.append(version)
        version = version[2]
    left: Version | None = None
    for lsn, segment_id, _ in reversed(kept):
        left = (lsn, segment_id, left)
    return left
