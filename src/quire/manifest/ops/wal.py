"""Operations on write-ahead logs: segments and their states, and the progress marks of a database.

States move OPEN → SEALED → INDEXED → CHECKPOINT_READY → CHECKPOINTED → TRUNCATED, one step at a time. The one backward
edge is CHECKPOINT_READY → INDEXED, for an abandoned checkpoint (P6). A database's tracking row holds one reference on
the segment until TRUNCATED; snapshots and forks hold their own, so truncating a segment in one database never takes
bytes from them (P12). Marks in `wal_state` only rise (P5).
"""

from msgspec.structs import replace

from quire.core.errors import AlreadyExists, IllegalTransition, InvalidInput, UnknownArtifact, UnknownDatabase
from quire.core.ids import some_u32, u64
from quire.manifest import tables as t
from quire.manifest.metrics import MetricKind, observe
from quire.manifest.ops.base import Component, Op
from quire.manifest.ops.refs import release, retain, wal_count_key
from quire.manifest.overlay import Overlay
from quire.manifest.records import Residency, UInt, WalChunkPointer, WalFormat, WalRecord, WalState, WalStateRecord

NEXT_STATES: dict[WalState, frozenset[WalState]] = {
    WalState.OPEN: frozenset({WalState.SEALED}),
    WalState.SEALED: frozenset({WalState.INDEXED}),
    WalState.INDEXED: frozenset({WalState.CHECKPOINT_READY}),
    WalState.CHECKPOINT_READY: frozenset({WalState.CHECKPOINTED, WalState.INDEXED}),
    WalState.CHECKPOINTED: frozenset({WalState.TRUNCATED}),
    WalState.TRUNCATED: frozenset(),
}


def wal_state_of(tables: Overlay, db_id: int, shard: int) -> tuple[bytes, WalStateRecord]:
    """Return key and row of a database's WAL state."""
    key = t.WAL_STATE.key.pack(db_id, shard)
    row = tables.wal_state.get(key)
    if row is None:
        raise UnknownDatabase("the database has no such WAL shard", db_id=db_id, shard=shard)
    return key, row


def _track(tables: Overlay, db_id: int, segment_id: int, row: WalRecord) -> None:
    some_u32("segment_id", segment_id)
    key = t.WAL_CATALOG.key.pack(db_id, segment_id)
    if tables.wal_catalog.has(key):
        raise AlreadyExists("a segment with this id already exists", db_id=db_id, segment_id=segment_id)
    tables.wal_catalog.put(key, row)
    retain(tables, wal_count_key(row.origin_db_id, segment_id))


class OpenSegment(Op, frozen=True, tag=40):
    """Add a new segment whose file exists and whose header is synced (P1): a file without this row is garbage."""

    component = int(Component.WAL)
    db_id: UInt
    segment_id: UInt
    format: WalFormat
    file_bytes: UInt
    salt: bytes
    first_lsn: UInt

    def apply(self, tables: Overlay, at_ms: int) -> None:
        tables.writable(self.db_id)
        state_key, state = wal_state_of(tables, self.db_id, 0)
        if self.segment_id < state.next_segment_id:
            raise AlreadyExists("segment ids are never reused", segment_id=self.segment_id, next=state.next_segment_id)
        row = WalRecord(
            origin_db_id=self.db_id,
            state=WalState.OPEN,
            format=self.format,
            created_at_ms=at_ms,
            first_lsn=u64("first_lsn", self.first_lsn),
            file_bytes=self.file_bytes,
            salt=self.salt,
        )
        _track(tables, self.db_id, self.segment_id, row)
        tables.wal_state.put(state_key, replace(state, next_segment_id=self.segment_id + 1))


class AppendWalChunk(Op, frozen=True, tag=41):
    """Seal a segment (the catalog document): enter it in the order of its generation, with its range and size.

    A segment without an open row (streams make segments in their final form) is added here.
    """

    component = int(Component.WAL)
    db_id: UInt
    shard: UInt
    segment_id: UInt
    generation: UInt
    first_lsn: UInt
    last_lsn: UInt
    used_bytes: UInt
    frame_count: UInt = 0
    size_pages: UInt = 0
    format: WalFormat = WalFormat.PAGER
    residency: Residency = Residency.LOCAL
    crc64: UInt = 0
    """crc64 of the file's first `used_bytes` bytes."""
    first_page: UInt = 0
    last_page: UInt = 0
    """`first_page` and `last_page`: the lowest and highest page that it has versions of; both 0 for a stream's segment."""
    sealed_at_ms: UInt = 0
    """0: the time of the batch. A stream has a clock of its own, which never goes back: searches by time rely on it."""

    def apply(self, tables: Overlay, at_ms: int) -> None:
        tables.writable(self.db_id, even="read_only")
        if self.last_lsn < self.first_lsn:
            raise InvalidInput("a segment ends before it starts", first_lsn=self.first_lsn, last_lsn=self.last_lsn)
        state_key, state = wal_state_of(tables, self.db_id, self.shard)
        key = t.WAL_CATALOG.key.pack(self.db_id, self.segment_id)
        row = tables.wal_catalog.get(key)
        if row is None:
            row = WalRecord(self.db_id, WalState.OPEN, self.format, created_at_ms=at_ms, residency=self.residency)
            _track(tables, self.db_id, self.segment_id, row)
        if row.state is not WalState.OPEN:
            raise IllegalTransition(
                "the segment is already sealed", db_id=self.db_id, segment_id=self.segment_id, state=row.state.name
            )
        # Sealed segments end at or below `last_applied_lsn`, so a stream's next one cannot overlap them; a page
        # database also has open segments to compare with.
        if self.format is WalFormat.PAGER or self.first_lsn <= state.last_applied_lsn:
            self._refuse_overlap(tables)
        sealed = replace(
            row,
            state=WalState.SEALED,
            sealed_at_ms=self.sealed_at_ms or at_ms,
            first_lsn=self.first_lsn,
            last_lsn=u64("last_lsn", self.last_lsn),
            used_bytes=self.used_bytes,
            frame_count=self.frame_count,
            size_pages=self.size_pages,
            crc64=self.crc64,
            first_page=self.first_page,
            last_page=self.last_page,
        )
        tables.wal_catalog.put(key, sealed)
        pointer = WalChunkPointer(self.db_id, self.first_lsn, self.last_lsn, self.used_bytes, at_ms)
        tables.wal_manifest.put(t.WAL_MANIFEST.key.pack(self.db_id, self.generation, self.segment_id), pointer)
        tables.wal_state.put(
            state_key,
            replace(
                state,
                next_segment_id=max(state.next_segment_id, self.segment_id + 1),
                last_sealed_segment=max(state.last_sealed_segment, self.segment_id),
                last_applied_lsn=max(state.last_applied_lsn, self.last_lsn),
                lsn_reserved=max(state.lsn_reserved, self.last_lsn),
            ),
        )

    def _refuse_overlap(self, tables: Overlay) -> None:
        """Refuse lsns that another segment has, unless that is truncated. An open segment has at least its first lsn."""
        for key, row in tables.wal_catalog.scan(t.WAL_CATALOG.key.prefix(self.db_id)):
            number = t.WAL_CATALOG.key.unpack(key)[1]
            if number == self.segment_id or row.state is WalState.TRUNCATED:
                continue
            ends = row.last_lsn if row.state is not WalState.OPEN else row.first_lsn
            if row.first_lsn <= self.last_lsn and ends >= self.first_lsn:
                raise IllegalTransition(
                    "two segments of a database cannot hold the same lsns",
                    hint="start the segment above the last lsn of the previous one",
                    db_id=self.db_id,
                    segment_id=self.segment_id,
                    lsns=f"{self.first_lsn} to {self.last_lsn}",
                    other_segment_id=number,
                    other_lsns=f"{row.first_lsn} to {ends}",
                )


class DiscardSegment(Op, frozen=True, tag=45):
    """End an open segment without any commit, because of a crash before its first one: its file can be deleted."""

    component = int(Component.WAL)
    db_id: UInt
    segment_id: UInt

    def apply(self, tables: Overlay, at_ms: int) -> None:
        tables.database(self.db_id)
        key = t.WAL_CATALOG.key.pack(self.db_id, self.segment_id)
        row = tables.wal_catalog.get(key)
        if row is None or row.state is not WalState.OPEN:
            raise IllegalTransition(
                "only an open segment can be discarded",
                db_id=self.db_id,
                segment_id=self.segment_id,
                at=row.state.name if row else "gone",
            )
        release(tables, wal_count_key(row.origin_db_id, self.segment_id), at_ms)
        tables.wal_catalog.put(key, replace(row, state=WalState.TRUNCATED))


class MoveWalState(Op, frozen=True, tag=42):
    """Move a segment to its next state."""

    component = int(Component.WAL)
    db_id: UInt
    segment_id: UInt
    state: WalState
    gc_ticket: UInt = 0

    def apply(self, tables: Overlay, at_ms: int) -> None:
        tables.database(self.db_id)
        key = t.WAL_CATALOG.key.pack(self.db_id, self.segment_id)
        row = tables.wal_catalog.get(key)
        if row is None:
            raise UnknownArtifact("no such WAL segment", db_id=self.db_id, segment_id=self.segment_id)
        if self.state not in NEXT_STATES[row.state]:
            raise IllegalTransition(
                "a WAL segment in this state does not allow this step",
                db_id=self.db_id,
                segment_id=self.segment_id,
                at=row.state.name,
                asked=self.state.name,
            )
        moved = replace(row, state=self.state, gc_ticket=self.gc_ticket or row.gc_ticket)
        if self.state is WalState.TRUNCATED:
            release(tables, wal_count_key(row.origin_db_id, self.segment_id), at_ms)
            self._forget_order(tables)
            # An inherited row only tracks the segment; the row at the origin describes the bytes and stays (M6).
            if row.origin_db_id != self.db_id:
                tables.wal_catalog.delete(key)
                return
        tables.wal_catalog.put(key, moved)

    def _forget_order(self, tables: Overlay) -> None:
        """Remove the segment from the order of its generation."""
        for key, _ in list(tables.wal_manifest.scan(t.WAL_MANIFEST.key.prefix(self.db_id))):
            if t.WAL_MANIFEST.key.unpack(key)[2] == self.segment_id:
                tables.wal_manifest.delete(key)


class AdvanceWal(Op, frozen=True, tag=43):
    """Raise the marks of a database's WAL; a mark that is not above the current one changes nothing."""

    component = int(Component.WAL)
    db_id: UInt
    shard: UInt = 0
    lsn_reserved: UInt = 0
    indexed_upto_lsn: UInt = 0
    last_applied_lsn: UInt = 0
    size_pages: UInt | None = None
    commit_ms: UInt = 0
    """Time of the commit at `last_applied_lsn`."""

    def apply(self, tables: Overlay, at_ms: int) -> None:
        tables.writable(self.db_id, even="read_only")
        key, state = wal_state_of(tables, self.db_id, self.shard)
        reserved = max(state.lsn_reserved, u64("lsn_reserved", self.lsn_reserved))
        if max(self.indexed_upto_lsn, self.last_applied_lsn) > reserved:
            raise IllegalTransition(
                "an lsn that was not reserved is used",
                hint="raise lsn_reserved first, or in the same operation",
                db_id=self.db_id,
                reserved=reserved,
                indexed_upto_lsn=self.indexed_upto_lsn,
                last_applied_lsn=self.last_applied_lsn,
            )
        is_newest = self.last_applied_lsn >= state.last_applied_lsn
        tables.wal_state.put(
            key,
            replace(
                state,
                lsn_reserved=reserved,
                indexed_upto_lsn=max(state.indexed_upto_lsn, u64("indexed_upto_lsn", self.indexed_upto_lsn)),
                last_applied_lsn=max(state.last_applied_lsn, u64("last_applied_lsn", self.last_applied_lsn)),
                size_pages=state.size_pages if self.size_pages is None else self.size_pages,
                # Also if it is 0: the time of an earlier commit would be wrong for this one.
                last_commit_ms=self.commit_ms if is_newest else state.last_commit_ms,
            ),
        )


class AdvanceCheckpoint(Op, frozen=True, tag=44):
    """Record that a checkpoint has absorbed everything up to an lsn. Never moves back."""

    component = int(Component.WAL)
    db_id: UInt
    generation: UInt
    checkpointed_lsn: UInt
    shard: UInt = 0

    def apply(self, tables: Overlay, at_ms: int) -> None:
        tables.writable(self.db_id, even="read_only")
        key, state = wal_state_of(tables, self.db_id, self.shard)
        if self.generation <= state.last_checkpoint_generation or self.checkpointed_lsn < state.checkpointed_lsn:
            raise IllegalTransition(
                "a checkpoint cannot move backwards",
                db_id=self.db_id,
                generation=self.generation,
                last_generation=state.last_checkpoint_generation,
                lsn=self.checkpointed_lsn,
                last_lsn=state.checkpointed_lsn,
            )
        if self.checkpointed_lsn > state.last_applied_lsn:
            raise IllegalTransition(
                "a checkpoint cannot cover what the WAL has not applied",
                hint="call append_wal_chunk first",
                db_id=self.db_id,
                lsn=self.checkpointed_lsn,
                last_applied_lsn=state.last_applied_lsn,
            )
        # After a takeover only lsns of the new range count: the gap is not lag.
        begins = [gap.first - 1 for gap in tables.gaps() if gap.first <= state.last_applied_lsn]
        waiting = state.last_applied_lsn - max([state.checkpointed_lsn, *begins])
        observe(tables, self.db_id, MetricKind.WAL_LAG, [max(waiting, 0)], at_ms)
        tables.wal_state.put(
            key,
            replace(state, last_checkpoint_generation=self.generation, checkpointed_lsn=self.checkpointed_lsn),
        )
