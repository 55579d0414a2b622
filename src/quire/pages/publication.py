"""What a WAL has written and the manifest does not know yet, and how it gets there: page index first, then the end of
segments.

Publication goes in the order of lsns, in batches of about 8 k rows, never beyond what is durable (P5). That is the end of a
transaction, so a large one may be published in steps; only its end moves the applied mark and the size. A batch's entries are
written into their segments' index regions and synced before the batch is committed: at or below `indexed_upto_lsn` the region
can be trusted (docs/decisions/008). Repeating a batch gives the same entries and rows: a crash between two steps is repaired
by recovery doing it again. A segment becomes Sealed and Indexed in one batch, when it has ended and nothing of it, or before
it, is left to publish (P6). If entries cannot be written or synced nobody knows what is on disk: the database takes nothing
more (M12).

Threads: `pieces`, `added` and `added_bytes` are the writer's to add to, under its append lock, as is `end`; `publish` by any,
one at a time. Between the two there is no lock: each side has counters of its own, and a deque's ends are atomic.
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

from quire.core.events import emit
from quire.core.ids import U32_MAX
from quire.durable.failpoints import hit
from quire.durable.files import Disk
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
"""Rows of the page index in one batch, about: it holds the manifest's writer for some 25 ms."""


@dataclass(slots=True, eq=False)
class Segment:
    """A segment that this process writes, or has written."""

    file: SegmentFile
    size_pages: int = 0
    """Of the database at its end; within a transaction the larger of the sizes before and after it, so that no checkpoint takes
    pages for gone that the rest of the transaction keeps (P15)."""
    is_dirty: bool = False
    """Whether it waits for a sync; see `Wal`."""
    added: int = 0
    """Pieces, counted by the writer."""
    published: int = 0
    """Pieces, counted by the publisher."""
    segment_id: int = field(init=False)
    first_page: int = U32_MAX
    last_page: int = 0
    """Of the pages that are published, by the publisher."""
    stride: int = field(init=False)
    """Of its header, within reach of each commit."""

    def __post_init__(self) -> None:
        self.segment_id, self.stride = self.file.header.segment_id, self.file.header.geometry.stride


class UnpublishedFrames(NamedTuple):
    """Frames of one append that are not published yet."""

    segment: Segment
    first_frame: int
    frame_count: int
    last_lsn: int
    heads: bytes
    """Of its frames: what their entries and rows are made of."""
    mark: Mark | None
    """`None` if the transaction goes on in the next segment."""


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
        # at its right end the writer's, at its left end the publisher's
        self.pieces: deque[UnpublishedFrames] = deque()
        self.ended: deque[Segment] = deque()
        """Segments that have ended and whose rows do not say so yet."""
        # the writer's
        self.added_bytes = 0
        # guarded by _publishing
        self._publishing = threading.Lock()
        self._taken: list[UnpublishedFrames] = []
        """The batch that is under way, or has failed and will be tried again."""
        self.published_bytes = 0
        self._stopped = False

    def end(self, segment: Segment) -> None:
        """A segment takes no more frames."""
        self.ended.append(segment)

    def publish(self, durable: Callable[[], Mark]) -> Iterator[int]:
        """Enter what is durable into the manifest, in steps: each submits a commit, for which the next one waits, so that many
        databases share commits; rows entered by each. What becomes durable meanwhile waits for the next time: busy writers
        would keep it going for ever, a commit's few rows in each batch."""
        with self._publishing:
            if self._stopped:
                return
            upto = durable().lsn
            while self._take(upto):
                yield from self._publish(self._taken)
                self._taken = []
            yield from self._seal_rows()

    def _take(self, durable_lsn: int) -> bool:
        """Have about a batch of pieces in hand; whether there is one. What a failed attempt has taken comes first."""
        pieces, taken = self.pieces, self._taken
        rows = sum(piece.frame_count for piece in taken)
        while pieces and rows < PUBLISH_ROWS and pieces[0].last_lsn <= durable_lsn:
            rows += pieces[0].frame_count
            taken.append(pieces.popleft())
        return bool(taken)

    def _publish(self, pieces: list[UnpublishedFrames]) -> Iterator[int]:
        # A segment at a time, not a piece at a time: 20 µs of numpy for piece small commit would be most of the work.
        parts = [self._index(segment, list(run)) for segment, run in groupby(pieces, _segment_of)]
        packed = b"".join([part.tobytes() for part in parts])
        ops: list[Op] = [
            PublishPages(self._db_id, packed[start : start + PUBLISH_ROWS * ROW.size])
            for start in range(0, len(packed), PUBLISH_ROWS * ROW.size)
        ]
        upto = pieces[-1].last_lsn
        mark = next((piece.mark for piece in reversed(pieces) if piece.mark is not None), None)
        applied, size = (mark.lsn, mark.size_pages) if mark is not None else (0, None)
        ops.append(AdvanceWal(self._db_id, 0, indexed_upto_lsn=upto, last_applied_lsn=applied, size_pages=size))
        hit("pages.wal.publishing")
        guard = self._manifest.submit(ops)
        yield len(packed) // ROW.size
        guard.result()
        hit("pages.wal.published")
        for piece in pieces:
            piece.segment.published += 1
            self.published_bytes += piece.frame_count * piece.segment.file.header.geometry.stride
        self._forget(np.unique(np.concatenate([part["page"] for part in parts])).tolist(), upto)

    def _index(self, segment: Segment, pieces: list[UnpublishedFrames]) -> NDArray[np.void]:
        """Write the entries of neighbouring pieces of one segment; their rows."""
        file, header = segment.file, segment.file.header
        entries = entries_of(header, parse_heads(b"".join([piece.heads for piece in pieces])))
        segment.first_page = min(segment.first_page, int(entries["page"].min()))
        segment.last_page = max(segment.last_page, int(entries["page"].max()))
        with IndexWriter(self._disk, file.path, header) as index:  # not being able to open it is no doubt
            try:
                index.write(pieces[0].first_frame, entries.tobytes())
            except BaseException as error:
                self._poison(error)
                raise
        return as_rows(header, entries)

    def _seal_rows(self) -> Iterator[int]:
        """Make ended segments Sealed and Indexed, once nothing of them or before them is left to publish."""
        while self.ended and self.ended[0].published == self.ended[0].added:
            segment = self.ended[0]
            file, header = segment.file, segment.file.header
            used = header.geometry.frame_offset(file.used)
            # Before its row says Sealed: from then on nobody writes to it, and as long as it is open nobody recycles it. A
            # crash in between leaves an open segment whose file ends behind its last frame.
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
            guard = self._manifest.submit([sealed, MoveWalState(self._db_id, header.segment_id, WalState.INDEXED)])
            yield 0
            guard.result()
            hit("pages.wal.sealed")
            emit("info", "wal.indexed", db_id=self._db_id, segment_id=header.segment_id, bytes=used)
            self.ended.popleft()
            file.retire()

    def stop(self) -> None:
        """Publish nothing more; a batch that is under way is finished first. Who opens the database anew calls it before
        recovery reads, so that nothing is sealed meanwhile."""
        with self._publishing:
            self._stopped = True

    def forked(self) -> None:
        """In the child of a fork() nobody holds the lock."""
        self._publishing = threading.Lock()
