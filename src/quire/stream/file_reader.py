"""A stream, followed from its files by a process that does not own the store, whoever owns it, and whether anybody does.

Listed segments are sealed ones that LMDB has rows of; they are read wherever a copy is (`remote_read.py`). Unlisted ones are
hot files behind those: the segment that is being written, and what was sealed a moment ago. Records come in order, each once,
and what is given is durable. Nothing is changed: the writer does not notice.

Threads: one. Raises `CursorLost`, `Corruption`, `UnknownDatabase`, `WrongKind`, and what disk, object store and manifest
raise."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from quire.core.clock import Clock
from quire.core.errors import Corruption, CursorLost
from quire.durable.checksums import Bytes
from quire.durable.files import File
from quire.durable.names import Tier
from quire.manifest import tables as t
from quire.manifest.records import DbKind, Residency, WalState
from quire.manifest.store import ManifestStore
from quire.stream.files import StreamFiles
from quire.stream.remote_read import SharedReader, SharedSegment, SharedStream
from quire.stream.segment import (
    BLOCK_HEAD_BYTES,
    HEADER_BYTES,
    RecordBlock,
    StreamSegmentHeader,
    decode_head,
    is_body_good,
)
from quire.stream.sources import WINDOW_BYTES
from quire.stream.spans import Plain, RecordSpan, StreamRecord

if TYPE_CHECKING:
    from quire.objects.api import ObjectStore

Piece = tuple[RecordBlock, Bytes]
"""A block and its body, checked."""

GAP_SECONDS = 5.0
"""How long a record may be nowhere before it is gone: a segment may be between two places."""


@dataclass(slots=True)
class _Place:
    """How far an unlisted file was read."""

    header: StreamSegmentHeader
    offset: int
    record: int
    stamp: int = 0


class Beside:
    """One stream, beside its owner. `position` is the id of the next record that `new` gives."""

    def __init__(
        self, manifest: ManifestStore, name: str, files: Callable[[int], StreamFiles], store: Callable[[], ObjectStore]
    ) -> None:
        with manifest.read() as txn:
            stream_id, _ = txn.live(name, DbKind.STREAM)
        self._manifest = manifest
        self._clock: Clock = manifest.clock
        self._name = name
        self._stream_id = stream_id
        self._files = files(stream_id)
        self._reader = SharedReader(self._files, store, stream_id, self._locate, uploads=False)
        self._places: dict[int, _Place] = {}
        self._passed = 0
        """The last segment of which everything was given."""
        self._gap_since: float | None = None
        self.position = 0

    def bounds(self) -> tuple[int, int]:
        """The id of the first record that is retained, and the one behind the last."""
        hot = self._files.segments(Tier.HOT)
        rows = self._listed(0)
        first, end = rows[0].base_record if rows else None, rows[-1].end_record if rows else 0
        for segment_id in hot:
            if rows and segment_id <= rows[-1].segment_id:
                continue
            for place, _ in self._committed(segment_id, None):
                first, end = place.header.base_record if first is None else first, max(end, place.record)
        with self._manifest.read() as txn:
            state = txn.wal_state(self._stream_id)
        end = max(end, (state.last_applied_lsn if state is not None else 0) + 1)
        return end if first is None else first, end

    def new(self) -> Iterator[StreamRecord]:
        """Every record from `position` on that is there by now."""
        hot = self._files.segments(Tier.HOT)  # before LMDB is read: a segment whose file has gone by then has a row
        rows = self._listed(self._passed)
        if rows and rows[0].base_record <= self.position < rows[-1].end_record:
            yield from self._of_rows(rows)
        ahead = any(row.base_record > self.position for row in rows)
        listed = max([self._passed, *(row.segment_id for row in rows)])
        for segment_id in hot:
            if segment_id > listed:
                ahead = (yield from self._of_file(segment_id)) or ahead
        self._note_gap(ahead)
        self._passed = max([self._passed, *(row.segment_id for row in rows if row.end_record <= self.position)])
        self._places = {segment_id: place for segment_id, place in self._places.items() if segment_id > self._passed}

    def _note_gap(self, ahead: bool) -> None:
        """Remember since when there have been records ahead that do not follow the last one."""
        if not ahead:
            self._gap_since = None
            return
        now = self._clock.monotonic()
        if self._gap_since is None:
            self._gap_since = now
        elif now - self._gap_since > GAP_SECONDS:
            hint = f"`quire stream info {self._name}` says which are"
            raise CursorLost("these records are no longer retained", hint=hint, start=self.position)

    # ── listed ────────────────────────────────────────────────────────────────────────────────────────────────────────
    def _listed(self, behind: int) -> list[SharedSegment]:
        """The listed segments behind one, in order."""
        listed = []
        with self._manifest.read() as txn:
            txn.live(self._stream_id, DbKind.STREAM)  # it may have been dropped
            for (db_id, segment_id), row in txn.scan(t.WAL_CATALOG, start=(self._stream_id, behind + 1)):
                if db_id != self._stream_id:
                    break
                if row.state is not WalState.TRUNCATED:
                    key = row.suffix if row.residency is not Residency.LOCAL else ""
                    end = row.last_lsn + 1
                    listed.append(
                        SharedSegment(
                            segment_id, row.first_lsn, end, row.used_bytes, row.crc64, row.sealed_at_ms, key=key
                        )
                    )
        return listed

    def _of_rows(self, rows: list[SharedSegment]) -> Iterator[StreamRecord]:
        for span in self._reader.spans(tuple(rows), self.position, rows[-1].end_record):
            yield from self._of_span(span)

    def _locate(self, start: int, stop: int, _upload: bool) -> SharedStream:
        """What LMDB says by now: how the reader looks again when a copy has moved."""
        rows = tuple(
            segment for segment in self._listed(0) if segment.end_record > start and segment.base_record < stop
        )
        return SharedStream("", self._stream_id, self._files.root, "", start, stop, rows)

    # ── unlisted ──────────────────────────────────────────────────────────────────────────────────────────────────────
    def _of_file(self, segment_id: int) -> Generator[StreamRecord, None, bool]:
        """The records of an unlisted file that are new; True if it has some, and others come before them."""
        for place, pieces in self._committed(segment_id, self._places.get(segment_id)):
            if pieces and pieces[0][0].first_record > self.position:
                return True
            for block, body in pieces:
                if block.end_record > self.position:
                    yield from self._of_span(_span(block, body))
            self._places[segment_id] = place
        return False

    def _of_span(self, span: RecordSpan) -> Iterator[StreamRecord]:
        for record in span.within(self.position, span.end_record).records():
            yield record
            self.position = record.id + 1

    def _committed(self, segment_id: int, known: _Place | None) -> Iterator[tuple[_Place, list[Piece]]]:
        """The commits of a file behind a place, synced: some at a time, each with the place behind them."""
        try:
            file = self._files.disk.open(self._files.segment(Tier.HOT, segment_id), write=False)
        except FileNotFoundError:
            return  # it has moved on: next time it has a row
        try:
            place = known if known is not None else self._begin(file, segment_id)
            while place is not None:
                pieces, following = _commits(file, place)
                if following.offset == place.offset:
                    return
                file.sync()  # its writer may have written a block and not synced it yet: only durable records are given
                yield following, pieces
                place = following
        finally:
            file.close()

    def _begin(self, file: File, segment_id: int) -> _Place | None:
        try:
            header = StreamSegmentHeader.decode(file.read_at(HEADER_BYTES, 0), path=file.path)
        except Corruption:
            return None  # its name comes before its header
        if (header.stream_id, header.segment_id) != (self._stream_id, segment_id):
            return None
        return _Place(header, HEADER_BYTES, header.base_record)


def _span(block: RecordBlock, body: Bytes) -> RecordSpan:
    return RecordSpan(block.first_record, block.timestamp_ms, Plain(block, body), block.body_bytes)


def _commits(file: File, place: _Place) -> tuple[list[Piece], _Place]:
    """Whole commits from a place on, about a window of them, and the place behind."""
    window, here = WINDOW_BYTES, file.size()
    while True:
        window = min(window, max(here - place.offset, 0))  # a head may ask for more than there is
        raw = memoryview(file.read_at(window, place.offset))
        pieces, reached, need = _parsed(raw, place)
        if pieces or need <= len(raw) or len(raw) < window or window + place.offset >= here:
            return pieces, reached
        window = max(need, 2 * window)  # a commit that is larger


def _parsed(raw: memoryview, place: _Place) -> tuple[list[Piece], _Place, int]:
    """The whole commits that bytes begin with, the place behind them, and how many bytes tell more."""
    pieces: list[Piece] = []
    committed, at, reached = 0, 0, place
    record, stamp = place.record, place.stamp
    while (block := decode_head(raw, place.offset + at, place.header.crc64, at=at)) is not None:
        start = at + BLOCK_HEAD_BYTES
        if block.first_record != record or not block.records or block.timestamp_ms < stamp:
            break
        if start + block.body_bytes > len(raw):
            return pieces[:committed], reached, start + block.body_bytes
        body = raw[start : start + block.body_bytes]
        if not is_body_good(block, body):
            break  # it is being written
        pieces.append((block, body))
        at, record, stamp = block.end - place.offset, block.end_record, block.timestamp_ms
        if block.is_commit:
            committed, reached = len(pieces), _Place(place.header, block.end, record, stamp)
    need = at + BLOCK_HEAD_BYTES if at + BLOCK_HEAD_BYTES > len(raw) else 0
    return pieces[:committed], reached, need
