"""The write-ahead log of one database: transactions go in, versions of pages come out.

*Written* is what was appended to the open segment: the next writer builds on it. *Durable* is what was synced: readers may
open at it. *Published* is what is in the manifest's page index; `recent` has, in memory, each page's newest version that is
not, with those before it.

What is on disk, step by step, and what covers a crash there
  segments are made       see wal_files.py
  frames are appended     not synced, even if the disk has begun with them: a torn tail, cut at the last commit (P3)
  the segment is synced   every transaction up to `durable` is whole; recovery finds it in the frames
  it is published         see publication.py

Frames enter only in `append`, under the append lock, a transaction at a time, its commit frame last (P6). Everything that can
be refused is refused before the first frame is written, and changes nothing. lsns are reserved in the manifest in blocks
before they are used, so none is ever used twice; and nothing that names an lsn enters the manifest before that lsn is durable
(P5). After a failed write or sync the database takes nothing more until it is reopened (M12); what was durable by then can
still be read.

A segment is in the queue of dirty ones, with its flag up, whenever it has frames that no sync began after. So no lock is
needed between who appends and who syncs: a flag that is seen up belongs to a sync that is still to begin.

Threads: `append` by whoever holds the database's write lock; `sync`, `publish`, `seal` and reads by any.
"""

from __future__ import annotations

import threading
from array import array
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, NamedTuple

from quire.core.clock import Clock
from quire.core.errors import OutOfRange, QuireError, StoreClosed, poisoned_by
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
"""lsns reserved at a time: a commit of the manifest for every million page versions."""

FORGET_PAGES = 1_024
"""Pages that leave `recent` under one hold of the append lock: under a millisecond."""

HEADS_MAX = 65_536
"""Pages whose newest version is remembered for the next one's `prev_lsn`; beyond it, start over."""

ZERO_PAGES_MAX = 65_536
ZERO_BYTES_MAX = 256 * MIB
"""Pages that a transaction may bring into being without writing them, and the WAL they may take: each is a frame (P15)."""

_NO_HEAD = (0, 0)

Version = tuple[int, int, "Version | None"]
"""(lsn, segment) of one version of a page, and the version before it. Immutable: readers walk it while it is added to."""


class WalStart(NamedTuple):
    """Where writing goes on after recovery."""

    next_lsn: int
    next_segment_id: int
    durable: Mark


class Wal:
    """Made by the engine after recovery."""

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
        """What a commit's guard waits behind in mode `sync` of the archive."""
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
        """Segments that the transaction being written goes on in."""
        self._next_lsn = start.next_lsn
        self._reserved_lsn = start.next_lsn - 1
        self._heads: dict[int, tuple[int, int]] = {}
        # written under _append, read by all
        self.opened_at = clock.monotonic()
        """When the open segment was made, for the seal timer."""
        self.written = start.durable
        self.newest_lsn = array("q", [start.durable.lsn])
        """The lsn of `written`, for readers that cannot wait for the interpreter; -1 from the moment the log has failed."""
        self.recent: dict[int, Version] = {}
        self.appended_bytes = 0
        """Since the database was opened."""
        # only ever set
        self.failure: QuireError | None = None
        # written under the lock of _lanes, read by all
        self._lanes = SyncLanes(
            start.durable.lsn, begin=self._begin_sync, sync=self._sync, settle=self._settle, doubt=self._poison
        )
        self.until = self._lanes.until
        """Return when everything up to an lsn is durable."""
        self.durable = start.durable
        self.syncs = 0
        self._has_asked = False
        """Whether publication was asked for and has not begun: asking at each sync cost 5 µs, and the asked one its sleep."""
        self._dirty: deque[Segment] = deque()
        """Segments to sync: the writer enters one behind its frames, who syncs takes it out before the sync."""
        self._publication = Publication(
            db_id=db_id, disk=disk, manifest=manifest, forget=self._forget, poison=self._poison
        )

    # ── writing ───────────────────────────────────────────────────────────────────────────────────────────────────────
    def append(self, images: Mapping[int, bytes], db_size: int, zeros_from: int, spill: Spill | None = None) -> Mark:
        """Append a transaction that leaves the database at `db_size` pages; the version it makes.

        Its pages are those of `images` and `spill`; others from `zeros_from` on become zeros (P15).
        """
        with self._append:
            if self.failure is not None:
                self.require()
            # In rising order, so that neighbours are read together.
            order = sorted(images if spill is None else [*images, *spill])
            if zeros_from < db_size:
                self._add_zeros(order, db_size, zeros_from)
            count, segment = len(order), self._segment
            if self._next_lsn + count > self._reserved_lsn:
                self._reserve(count)
            room = segment.file.room if segment is not None else 0
            if count > room:
                self._ahead.extend(self._maker.make(count - room, self._next_lsn + room))
            try:
                return self._write(order, images, spill, db_size)
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
                "the transaction makes too many pages that it does not write",
                hint=f"write them, or grow the database by at most {limit} empty pages at a time",
                db_id=self.db_id,
                empty_pages=missing,
                size_pages=zeros_from,
                new_size_pages=db_size,
            )
        there = set(written)
        order += [page for page in range(zeros_from, db_size) if page not in there]
        order.sort()

    def _reserve(self, frames: int) -> None:
        """Reserve a block of lsns in the manifest before they are used."""
        upto = self._next_lsn + frames + LSN_BLOCK
        self._manifest.submit([AdvanceWal(self.db_id, 0, lsn_reserved=upto)]).result()
        self._reserved_lsn = upto

    def _write(self, order: list[int], images: Mapping[int, bytes], spill: Spill | None, db_size: int) -> Mark:
        """Write the transaction into the open segment and those made ahead, and note it down. What each commit costs in Python
        is mostly here, so steps that could have names of their own stand in one place."""
        before, recent, heads, publication = self.written, self.recent, self._heads, self._publication
        now, done, count, lsn = self._clock.now_ms(), 0, len(order), self._next_lsn
        image_of, former = images.get, recent.get
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
                self._know_heads([page for page in part if page not in heads], before.size_pages)
                writes = [(page, image_of(page), *heads[page]) for page in part]
            if spill:
                writes = [
                    write if write[1] is not None else (write[0], spill.get(write[0]), *write[2:]) for write in writes
                ]
            size, file = db_size if done == count else 0, segment.file
            first = file.used
            frame_heads = file.append(writes, db_size=size, durable_upto_lsn=self.durable.lsn, commit_ms=now)
            if not segment.is_dirty:  # behind its frames: who sees the flag syncs them
                segment.is_dirty = True
                self._dirty.append(segment)
            segment_id = segment.segment_id
            if len(heads) > HEADS_MAX:
                heads.clear()
            for page in part:
                heads[page] = (lsn, segment_id)
                recent[page] = (lsn, segment_id, former(page))
                lsn += 1
            self._next_lsn = lsn
            if size:
                mark = Mark(lsn - 1, db_size, segment_id, now)
            segment.size_pages = size or max(before.size_pages, db_size)
            written_bytes = len(part) * segment.stride
            segment.added += 1
            publication.added_bytes += written_bytes
            publication.pieces.append(UnpublishedFrames(segment, first, len(part), lsn - 1, frame_heads, mark))
            self.appended_bytes += written_bytes
        self.written = mark
        self.newest_lsn[0] = mark.lsn
        return mark

    def _know_heads(self, pages: list[int], size_before: int) -> None:
        """Enter the former versions of these pages. One beyond the end did not exist: it has none."""
        heads, recent = self._heads, self.recent
        asked: list[int] = []
        for page in pages:
            version = recent.get(page)
            heads[page] = version[:2] if version is not None else _NO_HEAD
            if version is None and page < size_before:
                asked.append(page)
        if asked:
            with self._manifest.read() as txn:
                for page in asked:
                    row = txn.get(t.PAGE_VERSION_HEAD, self.db_id, page)
                    if row is not None:
                        heads[page] = (row.lsn, row.segment_id)

    def _next_segment(self) -> Segment:
        """End the open segment, if there is one, and go on in the next. REQUIRES the append lock, and one made ahead."""
        self._end(self._segment)
        segment = self._segment = Segment(self._ahead.popleft())
        self.opened_at = self._clock.monotonic()
        return segment

    def _end(self, segment: Segment | None) -> None:
        """The open segment takes no more frames. REQUIRES the append lock."""
        if segment is not None:
            self._publication.end(segment)
            self._maker.ended(segment.file)
            self._segment = None

    def seal(self) -> Mark:
        """End the open segment, if it has frames; the version the segments that have ended hold now."""
        with self._append:
            if self._segment is not None and self._segment.file.used:
                self._end(self._segment)
            return self.written

    # ── durability ────────────────────────────────────────────────────────────────────────────────────────────────────
    def sync(self, upto_lsn: int | None = None) -> None:
        """Return when everything up to an lsn (default: all that is written) is durable."""
        self.until(self.written.lsn if upto_lsn is None else upto_lsn)

    def _begin_sync(self, flight: Flight, before: Flight | None) -> None:
        """What a sync that begins now makes durable. One at a time: `SyncLanes` calls it."""
        dirty = self._dirty
        flight.mark = self.written  # first: what is written from here on may be in segments that are not taken
        segments = flight.segments = []
        while dirty:
            segment = dirty.popleft()
            segment.is_dirty = False
            segments.append(segment)
        if before is not None:  # those may hold frames that only this sync vouches for
            segments += [segment for segment in before.segments if segment not in segments]

    def _sync(self, flight: Flight) -> None:
        """Two at a time, at most."""
        if self.failure is not None:
            self.require()
        for segment in flight.segments:
            segment.file.sync(flight.lane)
        self._manifest.writer.check_owner()  # nothing is acknowledged that a second owner may already have cut off
        hit("pages.wal.synced")

    def _settle(self, flight: Flight) -> None:
        """One at a time, in the order in which they began."""
        self.syncs += 1
        self.durable = flight.mark
        if not self._has_asked:
            waiting = self._publication
            if waiting.ended or waiting.added_bytes - waiting.published_bytes >= self._notify_bytes:
                self._has_asked = True
                self._notify()

    # ── publishing ────────────────────────────────────────────────────────────────────────────────────────────────────
    def publish(self) -> int:
        """Enter what is durable into the manifest's page index, and seal the rows of segments that have ended; rows entered."""
        return sum(self.publishing())

    def publishing(self) -> Iterator[int]:
        """The same in steps, each of which waits for the commit that the one before has submitted; rows entered by each."""
        self._has_asked = False
        return self._publication.publish(lambda: self.durable)

    def _forget(self, pages: list[int], upto: int) -> None:
        """These pages are published up to an lsn. Versions leave `recent` only after the batch that publishes them has
        committed: a reader that looks there first and begins its manifest transaction afterwards misses nothing (P8)."""
        recent = self.recent
        for start in range(0, len(pages), FORGET_PAGES):
            with self._append:
                for page in pages[start : start + FORGET_PAGES]:
                    version = recent.get(page)
                    if version is None or version[0] <= upto:  # nothing newer: the usual case
                        recent.pop(page, None)
                    elif (left := _after(version, upto)) is not None:
                        recent[page] = left

    # ── figures ───────────────────────────────────────────────────────────────────────────────────────────────────────
    @property
    def recycled(self) -> int:
        """Files that were used again."""
        return self._maker.recycled

    @property
    def unpublished_bytes(self) -> int:
        """Written, and not in the manifest."""
        return self._publication.added_bytes - self._publication.published_bytes

    def has_ended(self) -> bool:
        """Whether a segment has ended whose row does not say so yet."""
        return bool(self._publication.ended)

    @property
    def rests(self) -> bool:
        """Whether everything that was written is sealed and published, and no file waits for more."""
        waiting = self._publication
        return (
            self._segment is None
            and not waiting.ended
            and waiting.added_bytes == waiting.published_bytes
            and self.written.lsn == self.durable.lsn
            and not self._maker.has_spare
        )

    def prepare(self) -> bool:
        """Have the next file ready, if the open segment is a large one and half full; whether one was made."""
        segment = self._segment
        if segment is None:
            self._maker.drop_spare()  # nothing was written since the last seal: 16 MiB of zeros would wait for nobody
        if self._maker.has_spare or segment is None or segment.file.used * 2 < segment.file.header.geometry.capacity:
            return False
        return self._maker.prepare(segment.file.header.geometry.file_bytes)

    # ── reading ───────────────────────────────────────────────────────────────────────────────────────────────────────
    def newest(self, page: int, upto_lsn: int) -> Version | None:
        """The newest version of a page at or below an lsn that is not published yet."""
        version = self.recent.get(page)
        while version is not None and version[0] > upto_lsn:
            version = version[2]
        return version

    # ── the end ───────────────────────────────────────────────────────────────────────────────────────────────────────
    def close(self) -> None:
        """Sync, seal and publish what there is, so that the next open has nothing to recover; then take nothing more."""
        try:
            if self.failure is None:
                self.seal()
                self.sync()
                self.publish()
                self._maker.drop_spare()
        finally:
            self.abandon(StoreClosed("the database is closed", hint="open it again", db_id=self.db_id))

    def abandon(self, why: QuireError) -> None:
        """Take nothing more and close the files; what is not durable is left to recovery."""
        if self.failure is None:
            self.failure = why
        self.newest_lsn[0] = -1
        self._publication.stop()
        with self._append:
            self._lanes.drain()
            files = [*(segment.file for segment in self._publication.ended), *self._ahead]
            if self._segment is not None:
                files.append(self._segment.file)
            self._segment, self._ahead = None, deque()
            for file in files:
                file.close()
        self._lanes.wake()

    def forked(self) -> None:
        """In the child of a fork(): the files are the parent's, and nobody holds the locks (M12)."""
        self.failure = StoreClosed("the database belongs to the parent of this fork()", hint="open the store again")
        self.newest_lsn[0] = -1
        self._append = threading.Lock()
        self._lanes.forked()
        self._publication.forked()

    def require(self) -> None:
        """Raise what has made the database unusable, if something has."""
        if (why := self.failure) is not None:
            raise type(why)(why.what, hint=why.hint, **why.where) from why.__cause__

    def _poison(self, error: BaseException) -> None:
        """Take no more writes until the database is reopened: what is on disk is unknown."""
        if self.failure is None:
            hint = "fix the cause, then reopen the database"
            self.failure = poisoned_by(error, f"the database's WAL failed: {error}", hint=hint, db_id=self.db_id)
            self.newest_lsn[0] = -1
            emit("error", "wal.failed", db_id=self.db_id, error=f"{type(error).__name__}: {error}")


def _after(version: Version | None, upto_lsn: int) -> Version | None:
    """The versions above an lsn.

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
