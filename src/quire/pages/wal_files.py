"""Makes the files of a WAL: new ones, zero-filled, and those of segments that nobody needs any more, with a new header.

A transaction that needs several segments gets all of them, with their rows, before its first frame is written. A full disk is
`DiskFull`, leaves nothing behind and hurts nobody (M12). A file is recycled instead of made where there is one: the *spare*,
prepared ahead in the background so that no commit waits for its zeros, or that of a *doomed* segment, which is truncated, at
zero references and waits for the delete job. Sizes follow what is used: twice as large after a segment that was filled, no
larger than was used after one that was not (docs/decisions/023-space-of-segments.md).

What is there after each step, and what a crash behind it leads to:
  file, header, name synced   a file without a row and without a frame: removed at the next open
  rows committed              empty open segments: discarded at the next open

Thread: whoever holds the WAL's append lock; `prepare` any.
"""

from __future__ import annotations

import os
import threading
from contextlib import suppress

from quire.core.clock import Clock
from quire.core.errors import AlreadyExists, Conflict, DiskFull, InvalidInput, NotFound, QuireError, StorageFault
from quire.core.events import emit
from quire.core.ids import ArtifactKey, ArtifactKind
from quire.core.limits import MIB
from quire.durable.checksums import crc64
from quire.durable.failpoints import hit
from quire.durable.files import Disk
from quire.durable.names import WalSegmentFile
from quire.manifest import tables as t
from quire.manifest.ops.base import Op
from quire.manifest.ops.wal import DiscardSegment, OpenSegment
from quire.manifest.records import WalFormat, WalState
from quire.manifest.store import ManifestStore
from quire.pages.segment import ENTRY_BYTES, FILE_BYTES_MAX, FRAME_HEAD_BYTES, HEADER_BYTES, next_file_bytes
from quire.pages.segment_file import SegmentFile

SPARE = 0
"""The segment whose name the spare has."""


class SegmentMaker:
    """Makes the segments of one database."""

    def __init__(
        self,
        *,
        db_id: int,
        page_size: int,
        root: str,
        disk: Disk,
        manifest: ManifestStore,
        clock: Clock,
        next_segment_id: int,
    ) -> None:
        # constant after construction
        self._db_id = db_id
        self._page_size = page_size
        self._root = root
        self._disk = disk
        self._manifest = manifest
        self._clock = clock
        # guarded by the WAL's append lock
        self._next_id = next_segment_id
        self._file_bytes = 0
        """What the next segment is larger than."""
        self._doubtful: list[int] = []
        self.recycled = 0
        """Files that were used again, since the database was opened."""
        # guarded by _preparing
        self._preparing = threading.Lock()
        self._has_spare = False

    @property
    def has_spare(self) -> bool:
        """Whether a file is ready."""
        return self._has_spare

    def path(self, segment_id: int) -> str:
        """The file of a segment."""
        return os.path.join(self._root, WalSegmentFile(db_id=self._db_id, segment_id=segment_id).path)

    # ── for the writer ────────────────────────────────────────────────────────────────────────────────────────────────
    def make(self, frames: int, first_lsn: int) -> list[SegmentFile]:
        """Segments for so many frames, the first of which gets `first_lsn`; durable, and in the catalog."""
        segments: list[SegmentFile] = []
        file_bytes, first = self._file_bytes, self._next_id
        per_frame = self._page_size + FRAME_HEAD_BYTES + ENTRY_BYTES
        try:
            while frames > 0:
                file_bytes = next_file_bytes(file_bytes, frames * per_frame + HEADER_BYTES)
                segment = self._one(first + len(segments), first_lsn, file_bytes)
                segments.append(segment)
                frames -= segment.room
                first_lsn += segment.room
            hit("pages.wal.made")
            ops = [*self._discards(), *map(self._row, segments)]
            self._next_id = first + len(segments)
            self._doubtful += range(first, self._next_id)
            guard = self._manifest.submit(ops)
        except BaseException:
            # The next attempt goes past these ids: should a file be left that could not be removed, it is in nobody's way.
            self._next_id = first + len(segments) + 1
            self._give_up(segments)
            raise
        try:
            guard.result()
        except (Conflict, InvalidInput, NotFound, DiskFull):
            self._give_up(segments)  # refused: there is no row, and never will be
            raise
        except BaseException:
            for file in segments:
                file.close()  # whether there are rows is unknown: the files must stay
            raise
        hit("pages.wal.opened")
        self._doubtful = []
        self._file_bytes = file_bytes
        return segments

    def ended(self, segment: SegmentFile) -> None:
        """A segment takes no more frames, full or not: the next one's size follows."""
        if segment.room:
            self._file_bytes = segment.header.geometry.frame_offset(segment.used) - 1

    def _row(self, segment: SegmentFile) -> Op:
        header = segment.header
        return OpenSegment(
            self._db_id,
            header.segment_id,
            WalFormat.PAGER,
            header.geometry.file_bytes,
            header.salt.to_bytes(8, "little"),
            header.first_lsn,
        )

    def _discards(self) -> list[Op]:
        """Operations that discard segments of a batch of which it was unknown whether it was committed."""
        if not self._doubtful:
            return []
        with self._manifest.read() as txn:
            rows = [(number, txn.get(t.WAL_CATALOG, self._db_id, number)) for number in self._doubtful]
        there = [number for number, row in rows if row is not None and row.state is WalState.OPEN]
        if not there:
            return []
        return [
            *(DiscardSegment(self._db_id, number) for number in there),
            *self._manifest.jobs.deletions([self._db_id]),
        ]

    def _give_up(self, segments: list[SegmentFile]) -> None:
        for file in segments:
            file.close()
            self._remove(file.path)

    def _remove(self, path: str) -> None:
        # The first fault is the news, and a file without a row is removed at the next open.
        with suppress(StorageFault, FileNotFoundError):
            self._disk.remove(path)

    def _one(self, segment_id: int, first_lsn: int, file_bytes: int) -> SegmentFile:
        """One segment: from the spare, from a doomed one's file, or new."""
        with self._preparing:  # or a spare being prepared would take the name from the one that is being recycled
            if self._has_spare and file_bytes == FILE_BYTES_MAX:
                self._has_spare = False
                segment = self._recycle(self.path(SPARE), segment_id, first_lsn)
                if segment is not None:
                    return segment
        former = self._doomed(file_bytes)
        segment = self._recycle(former, segment_id, first_lsn) if former is not None else None
        if segment is not None:
            return segment
        path = self.path(segment_id)
        self._disk.make_dirs(os.path.dirname(path))
        return SegmentFile.create(
            self._disk,
            path,
            db_id=self._db_id,
            segment_id=segment_id,
            first_lsn=first_lsn,
            page_size=self._page_size,
            file_bytes=file_bytes,
            created_at_ms=self._clock.now_ms(),
        )

    def _recycle(self, former: str, segment_id: int, first_lsn: int) -> SegmentFile | None:
        """A new life of a file; `None` if that is not possible: the delete job was quicker, or the file is not whole."""
        path = self.path(segment_id)
        try:
            segment = SegmentFile.recycle(
                self._disk,
                former,
                path,
                db_id=self._db_id,
                segment_id=segment_id,
                first_lsn=first_lsn,
                created_at_ms=self._clock.now_ms(),
            )
        except AlreadyExists:
            raise  # not ours to remove
        except (FileNotFoundError, QuireError) as error:
            emit("debug", "wal.not_recycled", path=former, error=str(error))
            self._remove(path)  # under either name it is garbage: of no use any more, and without a row of its own
            return None
        self.recycled += 1
        return segment

    def _doomed(self, file_bytes: int) -> str | None:
        kept = self._manifest.leases.kept_since(self._db_id)
        with self._manifest.read() as txn:
            for (_, segment_id), row in txn.scan(t.WAL_CATALOG, self._db_id):
                if row.state is not WalState.TRUNCATED or row.origin_db_id != self._db_id:
                    continue
                # Only a file that was filled: `used_bytes` is below `file_bytes` where it was trimmed, or never sealed, and it
                # would need its zeros again.
                if not file_bytes // 2 < row.file_bytes <= min(file_bytes, row.used_bytes):
                    continue
                count = txn.refcount(ArtifactKey(self._db_id, ArtifactKind.WAL, segment_id, 0))
                if count is None or count.in_use or count.pending_upload:
                    continue
                if kept is not None and count.zero_since_ms >= kept[0]:  # a lent version may need it
                    continue
                path = self.path(segment_id)
                if self._disk.exists(path):
                    return path
        return None

    # ── in the background ─────────────────────────────────────────────────────────────────────────────────────────────
    def prepare(self, file_bytes: int) -> bool:
        """Have a spare for a busy database: one whose segments have this size; whether one was made."""
        if file_bytes <= FILE_BYTES_MAX // 2 or self._doomed(FILE_BYTES_MAX) is not None:
            return False
        with self._preparing:
            if self._has_spare:
                return False
            path = self.path(SPARE)
            if self._disk.exists(path):
                self._disk.remove(path)
            SegmentFile.create(
                self._disk,
                path,
                db_id=self._db_id,
                segment_id=1,  # 0 cannot be written; nobody reads it: recycling writes the true one
                first_lsn=1,
                page_size=self._page_size,
                file_bytes=FILE_BYTES_MAX,
            ).close()
            self._has_spare = True
            return True

    def drop_spare(self) -> None:
        """The database is being closed, or does not write any more: the spare goes."""
        with self._preparing:
            if self._has_spare:
                self._has_spare = False
                self._remove(self.path(SPARE))


CRC_STEP = MIB
"""Bytes of a segment that are read at a time for its checksum."""


def segment_crc(disk: Disk, path: str, used_bytes: int) -> int:
    """The crc64 of the bytes of a segment's file that are in use: what its row says of it from its sealing on."""
    crc, file = 0, disk.open(path, write=False)
    try:
        for offset in range(0, used_bytes, CRC_STEP):
            crc = crc64(file.read_at(min(CRC_STEP, used_bytes - offset), offset), crc)
    finally:
        file.close()
    return crc


def trim(disk: Disk, path: str, used_bytes: int) -> int:
    """Cut a segment's file to the bytes that are in use; bytes given back. REQUIRES that nobody appends to it, or recycles it.

    It need not be durable: a reader needs only `used_bytes`, and a file that is longer again after a crash is trimmed when the
    database is opened. Failing to give space back is no reason to fail what the caller is about, so it is only told.
    """
    try:
        if (size := disk.size(path)) <= used_bytes:
            return 0
        file = disk.open(path)
        try:
            file.truncate(used_bytes)
        finally:
            file.close()
        return size - used_bytes
    except FileNotFoundError:  # its database was dropped, or it was evicted
        return 0
    except StorageFault as fault:
        emit("warning", "wal.not_trimmed", path=path, error=str(fault))
        return 0
