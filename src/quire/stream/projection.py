"""The projection: LMDB's rows about a stream's segments, folded from the manifest log by idempotent operations (S1).

Log first, LMDB second: steps that LMDB lacks are folded at the next move or opening, as the difference. A segment's row in
`wal_catalog` is created when the segment is sealed, in its final form; record ids are the row's lsns, and its entry in
`wal_manifest` has the writer's epoch as generation. An object's key (`suffix`) is recorded before its first byte is sent, so
that the deletion of the row also deletes the object. LMDB does not record tier 1 copies or etags. A segment that a checkpoint
has published is also a slot (docs/decisions/009-stream-chunks.md): the fold that ends its row clears the slot.

Threads: any. Raises: what the manifest raises."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import closing

from quire.core.ids import ArtifactKey, ArtifactKind
from quire.durable.names import Tier
from quire.manifest import tables as t
from quire.manifest.ops.artifacts import UpdateArtifact
from quire.manifest.ops.base import Op
from quire.manifest.ops.slots import SetSlots
from quire.manifest.ops.wal import AppendWalChunk, MoveWalState
from quire.manifest.reads import ReadTxn
from quire.manifest.records import Residency, WalFormat, WalRecord, WalState
from quire.manifest.slots import pack_leaf, place
from quire.manifest.store import ManifestStore
from quire.stream.files import StreamFiles
from quire.stream.mlog_modes import SegmentFacts
from quire.stream.mlog_states import Remote
from quire.stream.segments import SegmentList, StreamSegment
from quire.stream.warm import WARM_HEADER_BYTES, dictionary_of
from quire.stream.witnesses import Witness, witness_of

_ORDER = (WalState.SEALED, WalState.INDEXED, WalState.CHECKPOINT_READY, WalState.CHECKPOINTED, WalState.TRUNCATED)


class StreamProjection:
    """The rows of one stream."""

    def __init__(self, manifest: ManifestStore, files: StreamFiles) -> None:
        self._manifest = manifest
        self._files = files
        self._stream_id = files.stream_id
        with manifest.read() as txn:
            self._place_id, _ = txn.place_of(files.stream_id, "")

    def prefixes(self) -> tuple[str, ...]:
        """Return the prefixes of the stream's objects; the first is that of new objects, the current owner epoch's (A1)."""
        self._manifest.ensure_owner_epoch()
        with self._manifest.read() as txn:
            return txn.object_prefixes(self._place_id)

    def store_id(self) -> str:
        """Return the store's id, which the chunks of the manifest log carry."""
        with self._manifest.read() as txn:
            return txn.log_store_id()

    def fold(self, view: SegmentList, segment_ids: Iterable[int] | None = None) -> int:
        """Bring the rows of these segments, or of all, up to the view; return the number of operations."""
        with self._manifest.read() as txn:
            if segment_ids is None:
                rows = {
                    key[1]: row
                    for key, row in txn.scan(t.WAL_CATALOG, self._stream_id)
                    if row.origin_db_id == self._stream_id
                }
                wanted = {*rows, *(segment.segment_id for segment in view)}
            else:
                wanted = set(segment_ids)
                rows = {
                    segment_id: row
                    for segment_id in wanted
                    if (row := txn.get(t.WAL_CATALOG, self._stream_id, segment_id))
                }
            chunks = [
                segment_id
                for segment_id in wanted
                if view.get(segment_id) is None and txn.chain(self._stream_id, segment_id)
            ]
        ops = [
            op
            for segment_id in sorted(wanted)
            for op in self._ops(segment_id, view.get(segment_id), rows.get(segment_id))
        ]
        if chunks:
            generation = self._manifest.reserve_generation(self._stream_id)
            with self._manifest.read() as txn:
                ops += self._unpublish(txn, chunks, generation)
        if ops:
            self._manifest.submit(ops).result()
        return len(ops)

    def _ops(self, segment_id: int, segment: StreamSegment | None, row: WalRecord | None) -> list[Op]:
        """Return the operations that bring a row up to its segment."""
        if segment is None:
            return [] if row is None else self._truncate(segment_id, row)
        if not segment.is_sealed or not segment.records:
            return []
        ops: list[Op] = []
        if row is None:
            ops.append(
                AppendWalChunk(
                    self._stream_id,
                    0,
                    segment_id,
                    segment.epoch,
                    segment.base_record,
                    segment.end_record - 1,
                    segment.durable_bytes,
                    segment.records,
                    0,
                    WalFormat.APPEND_ONLY,
                    Residency.LOCAL,
                    segment.crc64,
                    sealed_at_ms=segment.sealed_ms,
                )
            )
        residency, suffix = _residency(segment), _suffix(segment)
        before = (row.residency, row.suffix) if row is not None else (Residency.LOCAL, "")
        if before != (residency, suffix):
            now = self._manifest.clock.now_ms() if segment.is_remote else None
            ops.append(
                UpdateArtifact(
                    self._stream_id, ArtifactKind.WAL, segment_id, 0, residency=residency, suffix=suffix,
                    uploaded_at_ms=now, namespace_id=self._place_id if suffix else 0,
                )
            )  # fmt: skip
        return ops

    def _truncate(self, segment_id: int, row: WalRecord) -> list[Op]:
        if row.state not in _ORDER:
            return []
        ops: list[Op] = []
        if (row.residency, row.suffix) != (Residency.LOCAL, "") and row.state is not WalState.TRUNCATED:
            where = (self._stream_id, ArtifactKind.WAL, segment_id, 0)  # the log has deleted it: no other job may
            ops.append(UpdateArtifact(*where, residency=Residency.LOCAL, suffix="", namespace_id=0))
        steps = _ORDER[_ORDER.index(row.state) + 1 :]
        return ops + [MoveWalState(self._stream_id, segment_id, state) for state in steps]

    def _unpublish(self, txn: ReadTxn, segment_ids: Iterable[int], generation: int) -> list[Op]:
        """Return the operations that remove the chunks of retired segments from the live set."""
        offsets: dict[int, list[int]] = {}
        for segment_id in sorted(segment_ids):
            leaf, offset = place(segment_id)
            offsets.setdefault(leaf, []).append(offset)
        ops: list[Op] = []
        for leaf, cleared in offsets.items():
            held = txn.get(t.LIVE_LEAF, self._stream_id, leaf)
            if held is not None:
                before = (held.origin_db_id, held.generation)
                ops.append(SetSlots(self._stream_id, leaf, generation, *before, pack_leaf({}), bytes(cleared)))
        return ops

    def pinned(self, segment_id: int) -> bool:
        """Return whether a holder other than the stream refers to a segment."""
        with self._manifest.read() as txn:
            counts = txn.refcount(ArtifactKey(self._stream_id, ArtifactKind.WAL, segment_id, 0))
        # One reference is the stream's own.
        return counts is not None and counts.in_use > 1

    # ── reading ───────────────────────────────────────────────────────────────────────────────────────────────────────
    def rows(self) -> dict[int, WalRecord]:
        """Return the rows of segments that are not truncated."""
        with self._manifest.read() as txn:
            return _rows(txn, self._stream_id)

    def ever(self) -> set[int]:
        """Return the segments that have a row, including truncated ones."""
        with self._manifest.read() as txn:
            return {key[1] for key, _ in txn.scan(t.WAL_CATALOG, self._stream_id)}

    def name(self) -> str:
        """Return the name of the stream."""
        with self._manifest.read() as txn:
            record = txn.database(self._stream_id)
        return record.name if record is not None else f"#{self._stream_id}"

    def witness(self) -> Witness:
        """Return what the manifest log must contain."""
        with self._manifest.read() as txn:
            return witness_in(txn, self._stream_id)

    def last_segment(self) -> int:
        """Return the highest segment id that ever had a row."""
        with self._manifest.read() as txn:
            state = txn.wal_state(self._stream_id)
        return state.last_sealed_segment if state is not None else 0

    def next_record(self) -> int:
        """Return the id after the highest record that ever had a row: ids are never reused (M5)."""
        with self._manifest.read() as txn:
            state = txn.wal_state(self._stream_id)
        return (state.last_applied_lsn if state is not None else 0) + 1

    def range_starts(self) -> list[int]:
        """Return the first numbers of the ranges that takeovers of the store have begun (A10)."""
        with self._manifest.read() as txn:
            return [first for first, _ in txn.timelines()]

    def facts(self, etags: Mapping[int, str]) -> dict[int, SegmentFacts]:
        """Return the facts of every sealed segment from LMDB and the directories; `etags` are taken as given."""
        hot, warm = set(self._files.segments(Tier.HOT)), set(self._files.segments(Tier.WARM))
        with self._manifest.read() as txn:
            epochs = {key[2]: key[1] for key, _ in txn.scan(t.WAL_MANIFEST, self._stream_id)}
        facts = {}
        for segment_id, row in sorted(self.rows().items()):
            size, dictionary_id = self._warm(segment_id) if segment_id in warm else (None, 0)
            has_object = row.residency is not Residency.LOCAL
            facts[segment_id] = SegmentFacts(
                base_offset=row.first_lsn,
                epoch=epochs.get(segment_id, 0),
                sealed=True,
                durable_bytes=row.used_bytes,
                segment_crc64=row.crc64,
                hot=segment_id in hot,
                warm_bytes=size,
                dictionary_id=dictionary_id,
                key=row.suffix if has_object else None,
                etag=etags.get(segment_id, "") if has_object else "",
            )
        return facts

    def _warm(self, segment_id: int) -> tuple[int, int]:
        path = self._files.segment(Tier.WARM, segment_id)
        with closing(self._files.disk.open(path, write=False)) as file:
            return file.size(), dictionary_of(file.read_at(WARM_HEADER_BYTES, 0), path=path)


def witness_in(txn: ReadTxn, stream_id: int) -> Witness:
    """Return what LMDB has of a stream, all of which its manifest log must contain."""
    state = txn.wal_state(stream_id)
    return witness_of(_rows(txn, stream_id), state.last_sealed_segment if state is not None else 0)


def _rows(txn: ReadTxn, stream_id: int) -> dict[int, WalRecord]:
    rows = {key[1]: row for key, row in txn.scan(t.WAL_CATALOG, stream_id)}
    return {segment_id: row for segment_id, row in rows.items() if row.state in _ORDER[:-1]}


def _residency(segment: StreamSegment) -> Residency:
    if not segment.is_remote:
        return Residency.LOCAL
    return Residency.LOCAL_AND_REMOTE if segment.is_hot or segment.is_warm else Residency.EVICTED


def _suffix(segment: StreamSegment) -> str:
    """Return the object's key from before its first byte is uploaded until the object is deleted; otherwise empty."""
    return segment.key if segment.state.remote not in (Remote.NONE, Remote.DELETED) else ""
