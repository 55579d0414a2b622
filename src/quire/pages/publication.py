"""Publishes the durable frames of a WAL to the manifest: first rows of the page index, then the seals of segments.

Publication proceeds in lsn order, in batches of about 8 k rows, never beyond the durable lsn (P5). That is always the end of a
transaction, so a large transaction can be published in steps; only its last step advances the applied mark and the size. A
batch's entries are written to their segments' index regions and synced before the batch is committed: at or below
`indexed_upto_lsn` the region is reliable (docs/decisions/008). Repeating a batch produces the same entries and rows, so after a
crash between two steps recovery repeats it. A segment becomes Sealed and Indexed in one batch, when it has ended and neither it
nor an earlier one has anything left to publish (P6). If entries cannot be written or synced, the state on disk is unknown, and
the database accepts nothing more (M12).

Threads: the writer updates `pieces` and `added_bytes` and calls `end`, under its append lock; `publish` by any, one at
a time. The two share no lock: each side has its own counters, and operations on the ends of a deque are atomic.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import groupby
from operator import attrgetter
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from quire.core.errors import IllegalTransition
from quire.core.events import emit
from quire.core.ids import U32_MAX
from quire.durable.failpoints import hit
from quire.durable.files import Disk
from quire.manifest import tables as t
from quire.manifest.ops.base import Op
from quire.manifest.ops.pageindex import ROW, PublishPages
from quire.manifest.ops.wal import AdvanceWal, AppendWalChunk, MoveWalState
from quire.manifest.records import WalState
from quire.manifest.store import ManifestStore
from quire.pages.page_source import Mark
from quire.pages.segment_file import IndexWriter, SegmentFile
from quire.pages.segment_scan import as_rows, entries_of, parse_heads
from quire.pages.wal_files import segment_crc, trim

PUBLISH_ROWS = 8_192
"""Approximate rows of the page index in one batch, which occupies the manifest's writer for about 25 ms."""


@dataclass(slots=True, eq=False)
class Segment:
    """A segment that this process writes or has written."""

    file: SegmentFile
    size_pages: int = 0
    """The database's size in pages at the segment's end; if that is within a transaction, the larger of the sizes before and
    after it, so that no checkpoint drops pages that the rest of the transaction keeps (P15)."""
    is_dirty: bool = False
    """Whether it waits for a sync; see `Wal`."""
    segment_id: int = field(init=False)
    first_page: int = U32_MAX
    last_page: int = 0
    """The range of published pages, maintained by the publisher."""
    stride: int = field(init=False)
    """Copied from the header, for fast access in each commit."""

    def __post_init__(self) -> None:
        self.segment_id, self.stride = self.file.header.segment_id, self.file.header.geometry.stride

    @property
    def used_bytes(self) -> int:
        return self.file.header.geometry.frame_offset(self.file.used)


class UnpublishedFrames(NamedTuple):
    """Frames of one append that are not published yet."""

    segment: Segment
    first_frame: int
    frame_count: int
    last_lsn: int
    heads: bytes
    """The heads of its frames, from which entries and rows are built."""
    mark: Mark | None
    """`None` if the transaction continues in the next segment."""
    added_bytes: int
    """`Publication.added_bytes` with this append."""


_segment_of = attrgetter("segment")


class Publication:
    """The unpublished frames of one database."""

    def __init__(
        self,
        *,
        db_id: int,
        disk: Disk,
        manifest: ManifestStore,
        forget: Callable[[list[int], int], None],
        poison: Callable[[BaseException], None],
    ) -> None:
        # constant after construction
        self._db_id = db_id
        self._disk = disk
        self._manifest = manifest
        self._forget = forget
        self._poison = poison
        # the writer appends at the right end, the publisher removes from the left end
        self.pieces: deque[UnpublishedFrames] = deque()
        self.ended: deque[Segment] = deque()
        """Segments that have ended and whose rows are not sealed yet."""
        # written by the writer
        self.added_bytes = 0
        # guarded by _publishing
        self._publishing = threading.Lock()
        self.published_bytes = 0
        self._published_lsn = 0
        self._stopped = False

    def end(self, segment: Segment) -> None:
        """Record that a segment gets no more frames."""
        self.ended.append(segment)

    def publish(self, durable: Callable[[], Mark]) -> Iterator[int]:
        """Publish everything durable, in steps, and yield the number of rows of each.

        Each step submits a commit and the next step waits for it, so that many databases share commits. Frames that become
        durable in the meantime are left to the next call: otherwise busy writers would keep this one running forever, with a
        few rows in each batch. A call that fails or is interrupted anywhere is completed by the next one.
        """
        with self._publishing:
            if self._stopped:
                return
            upto = durable().lsn
            while batch := self._next_batch(upto):
                yield from self._publish(batch)
            yield from self._seal_rows()

    def _next_batch(self, durable_lsn: int) -> list[UnpublishedFrames]:
        """Return about one batch of pieces. They stay in `pieces` until they are published."""
        pieces, batch, rows = self.pieces, list[UnpublishedFrames](), 0
        for number in range(len(pieces)):  # by number: the writer appends, which would end an iteration
            piece = pieces[number]
            if rows >= PUBLISH_ROWS or piece.last_lsn > durable_lsn:
                break
            rows += piece.frame_count
            batch.append(piece)
        return batch

    def _publish(self, pieces: list[UnpublishedFrames]) -> Iterator[int]:
        # By segment, not by piece: 20 µs of numpy for each small commit would be most of the work.
        parts = [self._index(segment, list(run)) for segment, run in groupby(pieces, _segment_of)]
        packed = b"".join([part.tobytes() for part in parts])
        ops: list[Op] = [
            PublishPages(self._db_id, packed[start : start + PUBLISH_ROWS * ROW.size])
            for start in range(0, len(packed), PUBLISH_ROWS * ROW.size)
        ]
        upto = pieces[-1].last_lsn
        # Only the end of a transaction moves the applied mark and the size: other processes open at that mark.
        mark = next((piece.mark for piece in reversed(pieces) if piece.mark is not None), None)
        applied, size, time = (mark.lsn, mark.size_pages, mark.commit_ms) if mark is not None else (0, None, 0)
        ops.append(AdvanceWal(self._db_id, 0, 0, upto, applied, size, time))
        hit("pages.wal.publishing")
        guard = self._manifest.submit(ops)
        yield len(packed) // ROW.size
        # Counted and forgotten only after the commit: until then readers find these versions in memory (P8).
        guard.result()
        hit("pages.wal.published")
        # An interrupt between these steps repeats the batch, so they only set what does not depend on earlier calls.
        self._forget(np.unique(np.concatenate([part["page"] for part in parts])).tolist(), upto)
        self.published_bytes, self._published_lsn = pieces[-1].added_bytes, upto
        while self.pieces and self.pieces[0].last_lsn <= upto:
            self.pieces.popleft()

    def _index(self, segment: Segment, pieces: list[UnpublishedFrames]) -> NDArray[np.void]:
        """Write the entries of consecutive pieces of one segment and return their rows."""
        file, header = segment.file, segment.file.header
        entries = entries_of(header, parse_heads(b"".join([piece.heads for piece in pieces])))
        segment.first_page = min(segment.first_page, int(entries["page"].min()))
        segment.last_page = max(segment.last_page, int(entries["page"].max()))
        with IndexWriter(self._disk, file.path, header) as index:  # a failed open changes nothing on disk: no poison
            try:
                index.write(pieces[0].first_frame, entries.tobytes())
            except BaseException as error:
                self._poison(error)
                raise
        return as_rows(header, entries)

    def _seal_rows(self) -> Iterator[int]:
        """Make ended segments Sealed and Indexed, in order, once everything in them is published."""
        while self.ended and self.ended[0].file.last_lsn <= self._published_lsn:
            segment = self.ended[0]
            if self._is_open(segment):
                guard = self._manifest.submit(self._seal(segment))
                yield 0
                try:
                    guard.result()
                except IllegalTransition:
                    # A call that was interrupted may have submitted the same batch, which commits all the same.
                    if self._is_open(segment):
                        raise
                hit("pages.wal.sealed")
                emit("info", "wal.indexed", db_id=self._db_id, segment_id=segment.segment_id, bytes=segment.used_bytes)
            # Only after the commit: a batch that was refused is submitted again by the next call.
            segment.file.retire()
            self.ended.popleft()

    def _is_open(self, segment: Segment) -> bool:
        with self._manifest.read() as txn:
            row = txn.get(t.WAL_CATALOG, self._db_id, segment.segment_id)
        return row is not None and row.state is WalState.OPEN

    def _seal(self, segment: Segment) -> list[Op]:
        """Return the operations that seal a segment. REQUIRES that its row is Open."""
        file, header, used = segment.file, segment.file.header, segment.used_bytes
        # Trim while the row is still Open: the segment gets no more frames, and an open one is never recycled. A crash
        # before the seal leaves an open segment whose file ends after its last frame.
        if file.room:
            trim(self._disk, file.path, used)
            hit("pages.wal.trimmed")
        with self._manifest.read() as txn:
            wal = txn.wal_state(self._db_id)
        sealed = AppendWalChunk(
            self._db_id,
            0,
            header.segment_id,
            wal.last_checkpoint_generation if wal is not None else 0,
            header.first_lsn,
            file.last_lsn,
            used,
            file.used,
            segment.size_pages,
            crc64=segment_crc(self._disk, file.path, used),
            first_page=segment.first_page,
            last_page=segment.last_page,
        )
        return [sealed, MoveWalState(self._db_id, header.segment_id, WalState.INDEXED)]

    def stop(self) -> None:
        """Stop publishing, after finishing a batch in progress. Called before recovery of a reopened database reads, so that
        nothing is sealed concurrently."""
        with self._publishing:
            self._stopped = True

    def forked(self) -> None:
        """Replace the lock in the child of a fork(), where no thread holds it."""
        self._publishing = threading.Lock()
