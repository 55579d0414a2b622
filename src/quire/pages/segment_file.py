"""A WAL segment as a file: made, recycled, appended to, synced, indexed, and read frame by frame.

`create` and `recycle` return when header and name are durable (P1); only then may the manifest name the segment. A recycled
file stays in its database and gets a new salt: its old frames are invalid from then on. An append writes frames and no
entries: a commit then dirties one run of the file, and its sync has one place to go to (docs/decisions/008); `IndexWriter`
writes entries for frames that a sync has covered. A segment that was opened is never appended to (P4); only the object that
made it can.

Input that is refused changes nothing. After any other failure of an append or a sync nobody knows what is on disk: the segment
takes nothing more and every call that writes raises `StoreUnusable`. A frame is handed out only if its checksum fits this
segment, this place and, if told, this page.

Threads: one appends (under its owner's append lock), any may sync and read meanwhile: positions are explicit, and `used` moves
only when an append is through. Format page: `docs/formats/segment.md`. Raises `StoreUnusable`, `ReadOnly`, `OutOfRange`,
`InvalidInput`; `ChecksumMismatch` for a bad frame, and what the header and the disk raise.
"""

from __future__ import annotations

import os
import secrets
import threading
from collections.abc import Sequence
from contextlib import suppress
from threading import get_ident
from typing import Self

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
from quire.durable.files import Disk, File, begin_write_back, preallocate
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
"""From this size on a segment has two handles to be synced through: databases that have written about as much."""


class SegmentFile:
    """An open segment: `create` and `recycle` give one that can be appended to, `open` one to read."""

    __slots__ = (
        "_appender",
        "_file",
        "_is_retired",
        "_lanes",
        "_slice",
        "_trouble",
        "_writable",
        "header",
        "room",
        "used",
    )

    def __init__(self, file: File, header: SegmentHeader, *, writable: bool, second: File | None = None) -> None:
        # Constant after construction.
        self._file = file
        self._lanes = [(handle, threading.Lock()) for handle in (file, second) if handle is not None]
        """Handles to sync through, each by one at a time."""
        self.header = header
        """What its first bytes say."""
        self._writable = writable
        self._slice = max(1, SLICE_BYTES // header.geometry.stride)
        # Moved by the appending thread, read by all.
        self.used = 0
        """Frames appended through this object; 0 for a segment that was opened to read."""
        self.room = header.geometry.capacity if writable else 0
        """Frames that can still be appended."""
        self._appender = 0
        """The thread that has appended last."""
        # Only ever set.
        self._trouble: StoreUnusable | None = None
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
        """Make a zero-filled segment file. A full disk is `DiskFull` and leaves nothing behind."""
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
            raise AlreadyExists("there is a segment file already", hint="remove or recycle it", path=path) from error
        try:
            hit("pages.segment.created")
            _write_header(file, header)
            return cls(file, header, writable=True, second=_second_handle(disk, file, header))
        except BaseException:
            file.close()
            # The first fault is the news; failing to clean up on top of it must not hide it.
            with suppress(StorageFault, FileNotFoundError):
                disk.remove(path)
            raise

    @classmethod
    def recycle(
        cls, disk: Disk, former: str, path: str, *, db_id: int, segment_id: int, first_lsn: int, created_at_ms: int = 0
    ) -> SegmentFile:
        """Begin a new life of the file `former` under the name `path`, with the geometry it has.

        The caller knows that nobody needs the former segment: its row is gone. If this fails, the file under either name
        is garbage.
        """
        if disk.exists(path):
            raise AlreadyExists("there is a segment file already", hint="remove it first", path=path)
        file = disk.open(former)
        try:
            old = read_header(file)
            if old.db_id != db_id:
                raise InvalidInput("a segment is recycled inside one database only", path=former, db_id=old.db_id)
            if first_lsn <= old.first_lsn or file.size() < old.geometry.file_bytes:
                raise InvalidInput(
                    "the file cannot be recycled: lsns do not go back, and the file must be whole",
                    hint="remove the file and make a new one",
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
        finally:
            file.close()
        disk.rename(former, path)  # behind the sync of the header: the new name never shows an old one
        disk.sync_dir(os.path.dirname(path) or ".")
        file = disk.open(path)  # anew, so that errors and `path` show the name it has now
        try:
            return cls(file, header, writable=True, second=_second_handle(disk, file, header))
        except BaseException:
            file.close()
            raise

    @classmethod
    def open(cls, disk: Disk, path: str, *, db_id: int | None = None, segment_id: int | None = None) -> SegmentFile:
        """Open a segment to read it; the ids, if given, must be those in its header."""
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
        """The lsn of the last frame appended; the one before the segment's first, if there is none."""
        return self.header.first_lsn + self.used - 1

    # ── writing ───────────────────────────────────────────────────────────────────────────────────────────────────────
    def append(
        self, pages: Sequence[PageWrite], *, db_size: int, durable_upto_lsn: int = 0, commit_ms: int = 0
    ) -> bytes:
        """Write a transaction, or (`db_size=0`) a part that the next segment goes on with; the heads of its frames.

        Durable after `sync`.
        """
        if self._trouble is not None or not self._writable:
            self._check()
        header, first, count = self.header, self.used, len(pages)
        geometry = header.geometry
        rest: Sequence[PageWrite] = ()
        if count == 1 and pages[0][1] is not None:
            heads, frame = encode_one(header, first, pages[0], db_size, durable_upto_lsn, commit_ms)
            pieces = [(geometry.frames_offset + geometry.stride * first, frame)]
        elif count <= self._slice:
            _, _, _, heads, pieces = encode(
                header, first, pages, db_size=db_size, durable_upto_lsn=durable_upto_lsn, commit_ms=commit_ms
            )
        else:
            # So that ordinary bad input is refused before the first slice is written.
            check_pages(header, first, pages)
            _, _, _, heads, pieces = encode(
                header, first, pages[: self._slice], db_size=0, durable_upto_lsn=durable_upto_lsn
            )
            rest = pages[self._slice :]
        try:
            for offset, data in pieces:
                self._file.write_at(data, offset)
            if rest:
                heads += self._write_slices(first + self._slice, rest, db_size, durable_upto_lsn, commit_ms)
            hit("pages.segment.frames")
            former, self._appender = self._appender, get_ident()
            # A thread that appends once more, and has waited for all before, will wait for this one too: the disk begins at
            # once, and works while the commit is noted down. That makes nothing durable
            # (docs/decisions/012-early-write-back.md).
            if former == self._appender and durable_upto_lsn == header.first_lsn + first - 1 and not rest:
                begin_write_back(self._file, geometry.stride * count, geometry.frames_offset + geometry.stride * first)
        except BaseException as error:
            self._doubt("an append", error)
            raise
        self.used = first + count
        self.room -= count
        return heads

    def _write_slices(
        self, first: int, pages: Sequence[PageWrite], db_size: int, durable_upto_lsn: int, commit_ms: int
    ) -> bytes:
        """Write the frames of a large transaction slice by slice; their heads."""
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
        """Make everything appended so far durable; returns the lsn up to which it is. `lane`: 0 or 1."""
        # Read before the sync starts: what is appended meanwhile may or may not be covered.
        lsn = self.header.first_lsn + self.used - 1
        handle, turn = self._lanes[lane if lane < len(self._lanes) else 0]
        with turn:
            if self._trouble is not None or not self._writable:
                self._check()
            if self._is_retired:
                return lsn
            try:
                hit("pages.segment.sync")
                handle.sync()
            except BaseException as error:
                self._doubt("a sync", error)
                raise
        return lsn

    # ── reading ───────────────────────────────────────────────────────────────────────────────────────────────────────
    def read_frame(self, frame_no: int, *, page: int | None = None) -> bytes:
        """The page in a frame, verified; `page` is which one the caller expects there."""
        geometry = self.header.geometry
        if not 0 <= frame_no < geometry.capacity:
            raise OutOfRange("the segment has no such frame", frame=frame_no, capacity=geometry.capacity)
        data = self._file.read_at(geometry.stride, geometry.frame_offset(frame_no))
        head = self.checked(frame_no, data, page)
        return bytes(geometry.page_size) if head.flags & ZERO else data[FRAME_HEAD_BYTES:]

    def read_head(self, frame_no: int) -> FrameHead:
        """A frame's head; the whole frame is verified."""
        return self.checked(frame_no, self.read_raw(frame_no, 1), None)

    def read_raw(self, first: int, count: int) -> bytes:
        """The bytes of neighbouring frames, unverified; fewer where the file ends."""
        geometry = self.header.geometry
        if first < 0 or count < 0 or first + count > geometry.capacity:
            raise OutOfRange("the segment has no such frames", first=first, count=count, capacity=geometry.capacity)
        return self._file.read_at(count * geometry.stride, geometry.frame_offset(first))

    def read_index(self, count: int | None = None) -> bytes:
        """The first `count` entries (default: the whole region), unverified."""
        capacity = self.header.geometry.capacity
        count = capacity if count is None else count
        if not 0 <= count <= capacity:
            raise OutOfRange("the segment has no such entries", count=count, capacity=capacity)
        return self._file.read_at(count * ENTRY_BYTES, HEADER_BYTES)

    def settle(self) -> None:
        """Make what is read from here on what is on disk, and durable: before anything is concluded from it.

        A killed writer leaves bytes that are readable but not yet on disk; publishing them and losing power would turn them
        into corruption. And after a failed fsync Linux calls pages clean that are not on disk: drop those (advice only).
        """
        self._file.sync()
        with suppress(OSError, AttributeError):
            os.posix_fadvise(self._file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)

    def retire(self) -> None:
        """Close it for good: everything in it is durable, and a sync that comes late finds nothing to do. Waits for syncs that
        are under way."""
        for handle, turn in self._lanes:
            with turn:
                self._is_retired = True
                handle.close()

    def close(self) -> None:
        """Close the file and nothing else; what was appended but not synced may be lost."""
        for handle, _ in self._lanes:
            handle.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ── helpers ───────────────────────────────────────────────────────────────────────────────────────────────────────
    def checked(self, frame_no: int, data: bytes | memoryview, page: int | None) -> FrameHead:
        """The head of a frame whose bytes were read, if it is this segment's frame of this number and page."""
        head = check_frame(self.header, frame_no, data)
        if head is None or (page is not None and head.page != page):
            shown = {} if head is None else {"found_page": head.page}
            raise ChecksumMismatch(
                "a frame of the WAL is not what was written there",
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
            raise ReadOnly("an opened segment is never appended to", hint="make a new segment", path=self.path)
        if self._trouble is not None:
            raise type(self._trouble)(self._trouble.what, hint=self._trouble.hint, **self._trouble.where)

    def _doubt(self, doing: str, error: BaseException) -> None:
        """Nobody knows what is on disk: raises, now and in later calls. Returns if `error` is no `Exception`."""
        self._trouble = StoreUnusable(
            f"{doing} to a WAL segment failed, and what reached the disk is unknown",
            hint="repair the cause, then reopen the store",
            path=self.path,
            segment_id=self.header.segment_id,
            frame=self.used,
            cause=str(error),
        )
        if isinstance(error, Exception):
            raise self._trouble from error


def read_header(file: File, *, db_id: int | None = None, segment_id: int | None = None) -> SegmentHeader:
    """The header of an open segment file, whose region of entries must be there in full."""
    header = decode_header(file.read_at(HEADER_BYTES, 0), file.path, db_id=db_id, segment_id=segment_id)
    if (size := file.size()) < header.geometry.frames_offset:
        raise Corruption(
            "the segment ends within its index", hint=HINT, path=file.path, size=size, min=header.geometry.frames_offset
        )
    return header


def _second_handle(disk: Disk, file: File, header: SegmentHeader) -> File | None:
    """A handle of its own for the second sync lane, opened before the first frame: Linux tells of a failed write-back once per
    handle, and through a shared one a sync could take the news from another. A small segment has one: its syncs take turns."""
    return disk.open(file.path) if header.geometry.file_bytes > TWO_HANDLES_BYTES // 2 else None


def _write_header(file: File, header: SegmentHeader) -> None:
    file.write_at(header.encode(), 0)
    file.sync()


class IndexWriter:
    """A segment's region of entries, to be written through a handle of its own, so that its sync takes no news of a failed
    write-back from the sync of a commit. Thread: one at a time."""

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
        """Write the entries of frames from `first_frame` on; returns when they are durable. REQUIRES that the frames are."""
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
