"""A WAL segment as a file: created, recycled, appended to, synced, indexed, and read frame by frame.

`create` and `recycle` return when header and name are durable (P1); only then may the manifest name the segment. A recycled
file stays in its database and gets a new salt, which invalidates its old frames. An append writes frames and no entries: a
commit then dirties one run of the file, and its sync writes to one place (docs/decisions/008); `IndexWriter` writes the entries
of frames that a sync has covered. An existing segment that is opened is never appended to (P4); only the object that created or
recycled it appends.

Rejected input changes nothing. After any other failure of an append or a sync the state on disk is unknown: the segment accepts
no more writes, and every call that writes raises `StoreUnusable`. A frame is returned only if its checksum matches this
segment, this position and, if given, this page.

Threads: one appends (under its owner's append lock); any may sync and read concurrently: offsets are explicit, and `used`
advances only when an append has completed. Format page: `docs/formats/segment.md`. Raises `StoreUnusable`, `ReadOnly`,
`OutOfRange`, `InvalidInput`; `ChecksumMismatch` for a bad frame, and what the header and the disk raise.
"""

from __future__ import annotations

import os
import secrets
import threading
from collections.abc import Sequence
from contextlib import closing, suppress
from threading import get_ident
from typing import Self

from quire.core.closing import ClosedOnExit
from quire.core.errors import (
    AlreadyExists,
    ChecksumMismatch,
    Corruption,
    InvalidInput,
    OutOfRange,
    ReadOnly,
    StorageFault,
    StoreUnusable,
)
from quire.core.limits import MIB
from quire.durable.failpoints import hit
from quire.durable.files import Disk, File, begin_write_back, drop_cached_pages, preallocate
from quire.pages.segment import (
    ENTRY_BYTES,
    FRAME_HEAD_BYTES,
    HEADER_BYTES,
    HINT,
    ZERO,
    FrameHead,
    Geometry,
    PageWrite,
    SegmentHeader,
    check_frame,
    check_pages,
    decode_header,
    encode,
    encode_one,
)

SLICE_BYTES = 1 * MIB
TWO_HANDLES_BYTES = 1 * MIB
"""Segments of about this size and above have two handles for syncs; databases that have written less have smaller segments."""


class SegmentFile(ClosedOnExit):
    """An open segment: writable if returned by `create` or `recycle`, read-only if returned by `open`."""

    __slots__ = (
        "_appender",
        "_failure",
        "_file",
        "_is_retired",
        "_lanes",
        "_slice",
        "_writable",
        "header",
        "room",
        "used",
    )

    def __init__(self, file: File, header: SegmentHeader, *, writable: bool, second: File | None = None) -> None:
        # Constant after construction.
        self._file = file
        self._lanes = [(handle, threading.Lock()) for handle in (file, second) if handle is not None]
        """Handles for syncs; a lock on each allows one sync at a time."""
        self.header = header
        """The decoded header."""
        self._writable = writable
        self._slice = max(1, SLICE_BYTES // header.geometry.stride)
        # Written by the appending thread, read by all.
        self.used = 0
        """Frames appended through this object; 0 for a read-only segment."""
        self.room = header.geometry.capacity if writable else 0
        """Frames that can still be appended."""
        self._appender = 0
        """The thread of the last append."""
        # Set once, never cleared.
        self._failure: StoreUnusable | None = None
        self._is_retired = False

    @classmethod
    def create(
        cls,
        disk: Disk,
        path: str,
        *,
        db_id: int,
        segment_id: int,
        first_lsn: int,
        page_size: int,
        file_bytes: int,
        created_at_ms: int = 0,
    ) -> SegmentFile:
        """Create a zero-filled segment file. A full disk raises `DiskFull` and leaves nothing behind."""
        header = SegmentHeader(
            geometry=Geometry.fitting(page_size=page_size, file_bytes=file_bytes),
            db_id=db_id,
            segment_id=segment_id,
            first_lsn=first_lsn,
            salt=secrets.randbits(64),
            created_at_ms=created_at_ms,
        )
        try:
            file = preallocate(disk, path, file_bytes)
        except FileExistsError as error:
            raise AlreadyExists("a segment file already exists", hint="remove or recycle it", path=path) from error
        try:
            hit("pages.segment.created")
            _write_header(file, header)
            return cls(file, header, writable=True, second=_second_handle(disk, file, header))
        except BaseException:
            file.close()
            # A failed cleanup must not hide the original fault.
            with suppress(StorageFault, FileNotFoundError):
                disk.remove(path)
            raise

    @classmethod
    def recycle(
        cls, disk: Disk, former: str, path: str, *, db_id: int, segment_id: int, first_lsn: int, created_at_ms: int = 0
    ) -> SegmentFile:
        """Start a new life of the file `former` under the name `path`, with the same geometry.

        REQUIRES that the former segment is no longer needed. If this fails, the file under either name is garbage.
        """
        # `rename` would replace an existing file without a trace, and it may have frames.
        if disk.exists(path):
            raise AlreadyExists("a segment file already exists", hint="remove it first", path=path)
        with closing(disk.open(former)) as file:
            old = read_header(file)
            if old.db_id != db_id:
                raise InvalidInput("a segment can only be recycled within its database", path=former, db_id=old.db_id)
            # Rising lsns keep the entries and heads of the former life from looking as if they were written in this
            # one: the scan counts positions by their lsns.
            if first_lsn <= old.first_lsn or file.size() < old.geometry.file_bytes:
                raise InvalidInput(
                    "the file cannot be recycled: its lsns would decrease, or it is incomplete",
                    hint="remove the file and create a new one",
                    path=former,
                    first_lsn=first_lsn,
                    former_lsn=old.first_lsn,
                    size=file.size(),
                )
            header = SegmentHeader(
                geometry=old.geometry,
                db_id=db_id,
                segment_id=segment_id,
                first_lsn=first_lsn,
                salt=secrets.randbits(64),
                created_at_ms=created_at_ms,
            )
            _write_header(file, header)
            hit("pages.segment.recycled")
        # A crash before the rename leaves the header of another segment under the old name. Nothing reads it: the former
        # segment is no longer needed.
        disk.rename(former, path)  # after the sync of the header: the new name never has an old header
        disk.sync_dir(os.path.dirname(path) or ".")
        file = disk.open(path)  # reopened, so that errors and `path` show the new name
        try:
            return cls(file, header, writable=True, second=_second_handle(disk, file, header))
        except BaseException:
            file.close()
            raise

    @classmethod
    def open(cls, disk: Disk, path: str, *, db_id: int | None = None, segment_id: int | None = None) -> SegmentFile:
        """Open a segment for reading; the ids, if given, must match its header."""
        file = disk.open(path, write=False)
        try:
            return cls(file, read_header(file, db_id=db_id, segment_id=segment_id), writable=False)
        except BaseException:
            file.close()
            raise

    @property
    def path(self) -> str:
        return self._file.path

    @property
    def last_lsn(self) -> int:
        """The lsn of the last frame appended; if there is none, the one before the segment's first."""
        return self.header.first_lsn + self.used - 1

    # ── writing ───────────────────────────────────────────────────────────────────────────────────────────────────────
    def append(
        self, pages: Sequence[PageWrite], *, db_size: int, durable_upto_lsn: int = 0, commit_ms: int = 0
    ) -> bytes:
        """Write a transaction, or (`db_size=0`) a part that the next segment continues; return the heads of its frames.

        Durable after `sync`.
        """
        if self._failure is not None or not self._writable:
            self._check()
        header, first, count = self.header, self.used, len(pages)
        geometry = header.geometry
        later_pages: Sequence[PageWrite] = ()
        if count == 1 and pages[0][1] is not None:
            heads, frame = encode_one(header, first, pages[0], db_size, durable_upto_lsn, commit_ms)
            pieces = [(geometry.frames_offset + geometry.stride * first, frame)]
        elif count <= self._slice:
            _, _, _, heads, pieces = encode(
                header, first, pages, db_size=db_size, durable_upto_lsn=durable_upto_lsn, commit_ms=commit_ms
            )
        else:
            # Reject bad input before the first slice is written.
            check_pages(header, first, pages)
            _, _, _, heads, pieces = encode(
                header, first, pages[: self._slice], db_size=0, durable_upto_lsn=durable_upto_lsn
            )
            later_pages = pages[self._slice :]
        try:
            for offset, data in pieces:
                self._file.write_at(data, offset)
            if later_pages:
                heads += self._write_slices(first + self._slice, later_pages, db_size, durable_upto_lsn, commit_ms)
            hit("pages.segment.frames")
            former, self._appender = self._appender, get_ident()
            # A thread that appends again after waiting for everything before will wait for this append too: start write-back
            # now, so that the disk works while the commit is recorded. This makes nothing durable
            # (docs/decisions/012-early-write-back.md).
            if former == self._appender and durable_upto_lsn == header.first_lsn + first - 1 and not later_pages:
                begin_write_back(self._file, geometry.stride * count, geometry.frames_offset + geometry.stride * first)
        except BaseException as error:
            self._mark_unusable("an append", error)
            raise
        # After the writes: readers and syncs take frames below `used` as completely written.
        self.used = first + count
        self.room -= count
        return heads

    def _write_slices(
        self, first: int, pages: Sequence[PageWrite], db_size: int, durable_upto_lsn: int, commit_ms: int
    ) -> bytes:
        """Write the remaining frames of a large transaction slice by slice and return their heads."""
        heads: list[bytes] = []
        for start in range(0, len(pages), self._slice):
            part = pages[start : start + self._slice]
            size = db_size if start + len(part) == len(pages) else 0
            encoded = encode(
                self.header,
                first + start,
                part,
                db_size=size,
                durable_upto_lsn=durable_upto_lsn,
                commit_ms=commit_ms,
            )
            for offset, data in encoded.pieces:
                self._file.write_at(data, offset)
            heads.append(encoded.heads)
        return b"".join(heads)

    def sync(self, lane: int = 0) -> int:
        """Make everything appended so far durable and return its last lsn. `lane` is 0 or 1."""
        # Read before the sync starts: it may or may not cover concurrent appends.
        lsn = self.header.first_lsn + self.used - 1
        handle, turn = self._lanes[lane if lane < len(self._lanes) else 0]
        with turn:
            # Checked in turn: if the lanes share a handle, a failed sync has consumed the write-back error, and this
            # one would succeed without covering its frames.
            if self._failure is not None or not self._writable:
                self._check()
            if self._is_retired:
                return lsn
            try:
                hit("pages.segment.sync")
                handle.sync()
            except BaseException as error:
                self._mark_unusable("a sync", error)
                raise
        return lsn

    # ── reading ───────────────────────────────────────────────────────────────────────────────────────────────────────
    def read_frame(self, frame_no: int, *, page: int | None = None) -> bytes:
        """Return the page in a frame, verified; `page` is the page number that the caller expects."""
        geometry = self.header.geometry
        if not 0 <= frame_no < geometry.capacity:
            raise OutOfRange("the segment has no such frame", frame=frame_no, capacity=geometry.capacity)
        data = self._file.read_at(geometry.stride, geometry.frame_offset(frame_no))
        head = self.checked(frame_no, data, page)
        # The body of a zero frame may not have been written (`GAP_BYTES`): the file has old bytes there.
        return bytes(geometry.page_size) if head.flags & ZERO else data[FRAME_HEAD_BYTES:]

    def read_head(self, frame_no: int) -> FrameHead:
        """Return a frame's head, after verifying the whole frame."""
        return self.checked(frame_no, self.read_raw(frame_no, 1), None)

    def read_raw(self, first: int, count: int) -> bytes:
        """Return the bytes of consecutive frames, unverified; fewer at the end of the file."""
        geometry = self.header.geometry
        if first < 0 or count < 0 or first + count > geometry.capacity:
            raise OutOfRange("the segment has no such frames", first=first, count=count, capacity=geometry.capacity)
        return self._file.read_at(count * geometry.stride, geometry.frame_offset(first))

    def read_index(self, count: int | None = None) -> bytes:
        """Return the first `count` entries (default: the whole region), unverified."""
        capacity = self.header.geometry.capacity
        count = capacity if count is None else count
        if not 0 <= count <= capacity:
            raise OutOfRange("the segment has no such entries", count=count, capacity=capacity)
        return self._file.read_at(count * ENTRY_BYTES, HEADER_BYTES)

    def sync_and_drop_cache(self) -> None:
        """Sync the file and drop its cached pages, so that later reads return durable bytes. Recovery calls it before reading.

        A killed writer leaves bytes that are readable but not yet on disk; publishing them and then losing power would be
        corruption. And after a failed fsync, Linux marks pages clean that are not on disk: drop those (advice only).
        """
        self._file.sync()
        drop_cached_pages(self._file)

    def retire(self) -> None:
        """Close a segment in which everything is durable. Waits for running syncs; later syncs do nothing."""
        for handle, turn in self._lanes:
            with turn:
                # Set in turn, so that no sync is running on the handle that is closed; a later one returns at once.
                self._is_retired = True
                handle.close()

    def close(self) -> None:
        """Close the file without syncing; frames that were not synced may be lost."""
        for handle, _ in self._lanes:
            handle.close()

    # ── helpers ───────────────────────────────────────────────────────────────────────────────────────────────────────
    def checked(self, frame_no: int, data: bytes | memoryview, page: int | None) -> FrameHead:
        """Return the head of the frame in `data`, after verifying that it is this segment's frame of this number and page."""
        head = check_frame(self.header, frame_no, data)
        if head is None or (page is not None and head.page != page):
            shown = {} if head is None else {"found_page": head.page}
            raise ChecksumMismatch(
                "a frame of the WAL differs from what was written",
                hint=HINT,
                path=self.path,
                db_id=self.header.db_id,
                segment_id=self.header.segment_id,
                frame=frame_no,
                offset=self.header.geometry.frame_offset(frame_no),
                page=page,
                **shown,
            )
        return head

    def _check(self) -> None:
        if not self._writable:
            raise ReadOnly("an existing segment cannot be appended to", hint="create a new segment", path=self.path)
        if self._failure is not None:
            raise self._failure.copied()

    def _mark_unusable(self, doing: str, error: BaseException) -> None:
        """Mark the segment unusable, because the state on disk is unknown, and raise; return if `error` is no `Exception`."""
        self._failure = StoreUnusable(
            f"{doing} to a WAL segment failed, and what reached the disk is unknown",
            hint="fix the cause, then reopen the store",
            path=self.path,
            segment_id=self.header.segment_id,
            frame=self.used,
            cause=str(error),
        )
        if isinstance(error, Exception):
            raise self._failure from error


def read_header(file: File, *, db_id: int | None = None, segment_id: int | None = None) -> SegmentHeader:
    """Return the header of an open segment file, after checking that its region of entries is complete."""
    header = decode_header(file.read_at(HEADER_BYTES, 0), file.path, db_id=db_id, segment_id=segment_id)
    # Not compared with the full size: a sealed segment is cut after its last frame (decision 023).
    if (size := file.size()) < header.geometry.frames_offset:
        raise Corruption(
            "the segment ends within its index", hint=HINT, path=file.path, size=size, min=header.geometry.frames_offset
        )
    return header


def _second_handle(disk: Disk, file: File, header: SegmentHeader) -> File | None:
    """Open a separate handle for the second sync lane; `None` for a small segment, whose syncs take turns.

    It is opened before the first frame: Linux reports a write-back error once per handle, and with a shared handle one sync
    could consume the error of the other.
    """
    return disk.open(file.path) if header.geometry.file_bytes > TWO_HANDLES_BYTES // 2 else None


def _write_header(file: File, header: SegmentHeader) -> None:
    file.write_at(header.encode(), 0)
    file.sync()


class IndexWriter:
    """Writes a segment's region of entries through a separate handle, so that its sync does not consume a write-back error that
    the sync of a commit must report. Threads: one at a time."""

    __slots__ = ("_file", "_header")

    def __init__(self, disk: Disk, path: str, header: SegmentHeader) -> None:
        try:
            self._file = disk.open(path)
        except FileNotFoundError as error:
            raise Corruption(
                "a WAL segment's file is missing",
                hint=HINT,
                path=path,
                db_id=header.db_id,
                segment_id=header.segment_id,
            ) from error
        self._header = header

    def write(self, first_frame: int, entries: bytes) -> None:
        """Write the entries of frames from `first_frame` on and make them durable. REQUIRES that the frames are durable."""
        geometry = self._header.geometry
        if first_frame < 0 or first_frame + len(entries) // ENTRY_BYTES > geometry.capacity:
            raise OutOfRange("the segment has no such entries", first=first_frame, capacity=geometry.capacity)
        self._file.write_at(entries, geometry.entry_offset(first_frame))
        hit("pages.segment.entries")
        self._file.sync()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()
