"""Creates the files of a WAL: new zero-filled ones, or recycled files of unneeded segments with a new header.

A transaction that needs several segments gets all of them, with their rows, before its first frame is written. A full disk
raises `DiskFull`, leaves nothing behind and makes nothing unusable (M12). If possible, a file is recycled rather than created:
the *spare*, prepared in the background so that no commit waits for its zeros, or the file of a *doomed* segment, which is
truncated, at zero references, and waits for the delete job. Sizes follow use: twice as large after a segment that was filled,
no larger than the bytes used after one that was not (docs/decisions/023-space-of-segments.md).

State after each step, and the effect of a crash at that point:
  file, header, name synced   a file without a row and without a frame: removed at the next open
  rows committed              empty open segments: discarded at the next open

Threads: the holder of the WAL's append lock; `prepare` by any.
"""

from __future__ import annotations

import os
import threading
from contextlib import closing, suppress

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
"""The segment id in the spare's file name."""


class SegmentMaker:
    """Creates the segments of one database."""

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
        """The next segment is larger than this."""
        self._uncertain_ids: list[int] = []
        """Ids of segments whose rows may or may not have been committed."""
        self.recycled = 0
        """How many files were recycled since the database was opened."""
        # guarded by _preparing
        self._preparing = threading.Lock()
        self._has_spare = False

    @property
    def has_spare(self) -> bool:
        """Whether a spare file is ready."""
        return self._has_spare

    def path(self, segment_id: int) -> str:
        """Return the path of a segment's file."""
        return os.path.join(self._root, WalSegmentFile(db_id=self._db_id, segment_id=segment_id).path)

    # ── for the writer ────────────────────────────────────────────────────────────────────────────────────────────────
    def make(self, frames: int, first_lsn: int) -> list[SegmentFile]:
        """Return new segments for `frames` frames, the first of which gets `first_lsn`; durable, and in the catalog."""
        segments: list[SegmentFile] = []
        file_bytes, first = self._file_bytes, self._next_id
        per_frame = self._page_size + FRAME_HEAD_BYTES + ENTRY_BYTES
        try:
            while frames > 0:
                file_bytes = next_file_bytes(file_bytes, frames * per_frame + HEADER_BYTES)
                segment = self._make_segment(first + len(segments), first_lsn, file_bytes)
                segments.append(segment)
                frames -= segment.room
                first_lsn += segment.room
            hit("pages.wal.made")
            # An uncertain segment starts at the same lsn as its replacement. While its row is open, sealing the
            # replacement would be refused (`AppendWalChunk`), so it is discarded in the same batch.
            ops = [*self._discards(), *map(self._row, segments)]
        except BaseException:
            # Skip these ids: a file that cannot be removed must not block the next attempt.
            self._next_id = first + len(segments) + 1
            self._give_up(segments)
            raise
        self._next_id = first + len(segments)
        # Before the submit: if its answer is lost, the next call looks up which rows exist.
        self._uncertain_ids += range(first, self._next_id)
        try:
            # An interrupt within `submit` may come after the batch was queued, so it is as uncertain as one in `result`.
            self._manifest.submit(ops).result()
        except (Conflict, InvalidInput, NotFound, DiskFull):
            self._give_up(segments)  # the batch was refused: there are no rows, and never will be
            raise
        except BaseException:
            for file in segments:
                file.close()  # whether the rows were committed is unknown: the files must stay
            raise
        hit("pages.wal.opened")
        self._uncertain_ids = []
        self._file_bytes = file_bytes
        return segments

    def ended(self, segment: SegmentFile) -> None:
        """Derive the next segment's size from one that gets no more frames, full or not."""
        if segment.room:
            # Minus one, because `next_file_bytes` returns the smallest size above this.
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
        """Return operations that discard the segments of an earlier batch whose outcome was unknown."""
        if not self._uncertain_ids:
            return []
        with self._manifest.read() as txn:
            rows = [(number, txn.get(t.WAL_CATALOG, self._db_id, number)) for number in self._uncertain_ids]
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
        # Must not hide the original fault; and a file without a row is removed at the next open.
        with suppress(StorageFault, FileNotFoundError):
            self._disk.remove(path)

    def _make_segment(self, segment_id: int, first_lsn: int, file_bytes: int) -> SegmentFile:
        """Return one segment: from the spare, from the file of a truncated segment, or new."""
        with self._preparing:  # `prepare` must not reuse the spare's name while it is being recycled
            if self._has_spare and file_bytes == FILE_BYTES_MAX:
                # First: if recycling fails, the file under the spare's name is garbage, and `prepare` replaces it.
                self._has_spare = False
                segment = self._recycle(self.path(SPARE), segment_id, first_lsn)
                if segment is not None:
                    return segment
        former = self._find_recyclable(file_bytes)
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
        """Recycle a file; return `None` if the delete job has already removed it, or it is incomplete."""
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
            self._remove(path)  # garbage under either name: it is no longer needed, and has no row
            return None
        self.recycled += 1
        return segment

    def _find_recyclable(self, file_bytes: int) -> str | None:
        """Return the path of a truncated segment's file that nothing needs and that is about `file_bytes` long."""
        with self._manifest.read() as txn:
            # After the transaction has begun. A lease that is taken later needs only what is referenced at that time, and
            # what is at zero in this transaction never gets a reference again (decision 014).
            kept = self._manifest.leases.kept_since(self._db_id)
            for (_, segment_id), row in txn.scan(t.WAL_CATALOG, self._db_id):
                if row.state is not WalState.TRUNCATED or row.origin_db_id != self._db_id:
                    continue
                # Only a file that was filled: if `used_bytes` is below `file_bytes`, it was trimmed or never sealed, and would
                # have to be zero-filled again.
                if not file_bytes // 2 < row.file_bytes <= min(file_bytes, row.used_bytes):
                    continue
                count = txn.refcount(ArtifactKey(self._db_id, ArtifactKind.WAL, segment_id, 0))
                # An upload reads the file: its bytes must not change under it.
                if count is None or count.in_use or count.pending_upload:
                    continue
                if kept is not None and count.zero_since_ms >= kept[0]:  # a version that was lent may need it
                    continue
                path = self.path(segment_id)
                if self._disk.exists(path):
                    return path
        return None

    # ── in the background ─────────────────────────────────────────────────────────────────────────────────────────────
    def prepare(self, file_bytes: int) -> bool:
        """Create a spare if segments of this size show that the database is busy; return whether one was created."""
        if file_bytes <= FILE_BYTES_MAX // 2 or self._find_recyclable(FILE_BYTES_MAX) is not None:
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
                segment_id=1,  # a header cannot have 0; this one is never read, because recycling replaces it
                first_lsn=1,
                page_size=self._page_size,
                file_bytes=FILE_BYTES_MAX,
            ).close()
            self._has_spare = True
            return True

    def drop_spare(self) -> None:
        """Remove the spare, because the database is being closed or is no longer written."""
        with self._preparing:
            if self._has_spare:
                self._has_spare = False
                self._remove(self.path(SPARE))


CRC_STEP = MIB
"""Bytes of a segment read at a time for its checksum."""


def segment_crc(disk: Disk, path: str, used_bytes: int) -> int:
    """Return the crc64 of the used bytes of a segment's file, which its row has once it is sealed."""
    crc = 0
    with closing(disk.open(path, write=False)) as file:
        for offset in range(0, used_bytes, CRC_STEP):
            crc = crc64(file.read_at(min(CRC_STEP, used_bytes - offset), offset), crc)
    return crc


def trim(disk: Disk, path: str, used_bytes: int) -> int:
    """Truncate a segment's file to its used bytes; return the bytes freed. REQUIRES that no thread appends to or recycles it.

    The truncation need not be durable: a reader needs only `used_bytes`, and a file that is longer again after a crash is
    trimmed when the database is opened. A failure to free space is logged and does not fail the caller.
    """
    try:
        if (size := disk.size(path)) <= used_bytes:
            return 0
        with closing(disk.open(path)) as file:
            file.truncate(used_bytes)
        return size - used_bytes
    except FileNotFoundError:  # its database was dropped, or it was evicted
        return 0
    except StorageFault as fault:
        emit("warning", "wal.not_trimmed", path=path, error=str(fault))
        return 0
