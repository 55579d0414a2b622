"""What a checkpoint will do: which segments it absorbs, and for each touched slot a new base or a delta.

Terms
  candidates   the contiguous run of indexed segments after `checkpointed_lsn` whose last lsn is at or below the floor (P9)
  covered      the last lsn of the last candidate: what the new artifacts hold everything up to

Rules
  1. A floor that was given out never falls again: no reader is let in below it, so the plan stays right while it runs.
  2. A slot is rewritten if it has no base, if more than a quarter of it is dirty, or if its chain is long or heavy; else it
     gets a delta (DESIGN 5.7). Slots beyond the size at `covered` are cleared (P15).
  3. The same inputs give the same plan and the same digest: which artifact a name means never depends on who ran it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from quire.core.errors import UnknownDatabase
from quire.core.ids import ArtifactKey, ArtifactKind
from quire.core.limits import CHUNK_BYTES, SLOTS_PER_LEAF
from quire.durable.names import object_key
from quire.jobs.checkpoint.run import SlotTask
from quire.manifest import tables as t
from quire.manifest.reads import ReadTxn
from quire.manifest.records import PlanRecord, WalRecord, WalState
from quire.manifest.slots import Chain, unpack_leaf
from quire.pages.places import chunk_place
from quire.pages.segment_scan import ROW_DTYPE, as_rows, page_map, sealed_entries
from quire.pages.sources import ChunkPlace, Sources

DIRTY_RATIO = 0.25
CHAIN_MAX = 8
"""DESIGN 5.7: beyond these a slot is rewritten."""


@dataclass(frozen=True, slots=True)
class CheckpointPlan:
    """One checkpoint (or merge) of one database."""

    db_id: int
    generation: int
    covered_lsn: int
    size_pages: int
    segments: tuple[int, ...]
    tasks: tuple[SlotTask, ...]
    cleared: tuple[int, ...]
    """Slots that no longer exist at `covered_lsn`."""
    digest: bytes

    def record(self, job_id: int, attempt: int, now_ms: int) -> PlanRecord:
        """As it is stored."""
        artifacts = [(task.key.id, task.key.delta_id, task.key.kind is ArtifactKind.DELTA) for task in self.tasks]
        return PlanRecord(
            job_id,
            attempt,
            self.covered_lsn,
            self.size_pages,
            self.digest,
            list(self.segments),
            artifacts,
            now_ms,
        )


@dataclass(frozen=True, slots=True)
class Shape:
    """What a plan needs to know of the database."""

    page_size: int
    pages_per_chunk: int
    generation: int
    objects_url: str


def shape_of(txn: ReadTxn, db_id: int, objects_url: str) -> Shape:
    """The fixed numbers of a database, and the generation its next plan burns."""
    record = txn.database(db_id)
    if record is None:
        raise UnknownDatabase("no database has this id", hint="`quire ls` lists the databases", db_id=db_id)
    page_size = record.page_size
    per_chunk = record.pages_per_chunk or (CHUNK_BYTES // page_size if page_size else 0)
    return Shape(page_size, per_chunk, record.next_generation, objects_url)


def candidates(txn: ReadTxn, db_id: int, floor_lsn: int) -> list[tuple[int, WalRecord]]:
    """(segment, row) of what can be absorbed now (P9)."""
    wal = txn.wal_state(db_id)
    after = wal.checkpointed_lsn if wal else 0
    rows = [(key[1], row) for key, row in txn.scan(t.WAL_CATALOG, db_id) if row.state < WalState.CHECKPOINTED]
    taken: list[tuple[int, WalRecord]] = []
    for segment_id, row in sorted(rows, key=lambda item: item[1].first_lsn):
        if row.state is not WalState.INDEXED or row.last_lsn > floor_lsn:
            break
        if row.last_lsn > after:
            taken.append((segment_id, row))
    return taken


def plan_checkpoint(
    txn: ReadTxn, sources: Sources, db_id: int, segments: Sequence[tuple[int, WalRecord]], shape: Shape
) -> CheckpointPlan:
    """The plan that absorbs these segments, whole transactions up to the end of the last."""
    covered = segments[-1][1].last_lsn
    size_pages = next((row.size_pages for _, row in reversed(segments) if row.size_pages), 0)
    rows = [_rows(sources, segment_id, row) for segment_id, row in segments]
    newest = page_map(np.concatenate(rows), covered)
    newest = newest[newest["page"] < np.uint32(size_pages)]
    first_lsn = min(row.first_lsn for _, row in segments)
    digest = _digest(db_id, shape.generation, covered, newest.tobytes())
    chains = _chains(txn, db_id)
    tasks = []
    slots = newest["page"] // np.uint32(shape.pages_per_chunk)
    for slot in np.unique(slots).tolist():
        frames = newest[slots == slot]
        tasks.append(
            _task(txn, db_id, slot, frames, chains.get(slot, ()), covered, size_pages, digest, first_lsn, shape)
        )
    last_slot = (size_pages - 1) // shape.pages_per_chunk if size_pages else -1
    cleared = tuple(sorted(slot for slot in chains if slot > last_slot))
    names = tuple(segment_id for segment_id, _ in segments)
    return CheckpointPlan(db_id, shape.generation, covered, size_pages, names, tuple(tasks), cleared, digest)


def _rows(sources: Sources, segment_id: int, row: WalRecord) -> NDArray[np.void]:
    file = sources.segment(row.origin_db_id, segment_id)
    count = row.last_lsn - file.header.first_lsn + 1
    return as_rows(file.header, sealed_entries(file.header, file.read_index(count), count, path=file.path))


def _task(
    txn: ReadTxn,
    db_id: int,
    slot: int,
    frames: NDArray[np.void],
    chain: Chain,
    covered: int,
    size_pages: int,
    digest: bytes,
    first_lsn: int,
    shape: Shape,
) -> SlotTask:
    places = tuple(chunk_place(txn, link.artifact(slot), shape.objects_url) for link in chain)
    pages_below = min(shape.pages_per_chunk, size_pages - slot * shape.pages_per_chunk)
    rewrite = is_rewritten(len(frames), pages_below, chain, places)
    kind, delta_id = (ArtifactKind.BASE, 0) if rewrite else (ArtifactKind.DELTA, 1)
    key = ArtifactKey(db_id, kind, slot, shape.generation, delta_id)
    return SlotTask(
        key=key,
        url=shape.objects_url,
        object_key=object_key(key),
        page_size=shape.page_size,
        pages_per_chunk=shape.pages_per_chunk,
        pages_below=pages_below,
        covered_lsn=covered,
        digest=digest,
        chain=places if rewrite else (),
        frames=frames,
        base_generation=0 if rewrite else chain[0].generation,
        lsn_start=first_lsn,
    )


def is_rewritten(dirty: int, pages: int, chain: Chain, places: Sequence[ChunkPlace]) -> bool:
    """Rule 2."""
    if not chain or dirty > DIRTY_RATIO * pages or len(chain) >= CHAIN_MAX:
        return True
    return sum(place.size_bytes for place in places[1:]) >= places[0].size_bytes


def _chains(txn: ReadTxn, db_id: int) -> dict[int, Chain]:
    """Slot → chain of the whole database."""
    chains: dict[int, Chain] = {}
    for (_, number), held in txn.scan(t.LIVE_LEAF, db_id):
        row = txn.get(t.SLOT_LEAF, held.origin_db_id, number, held.generation)
        if row is not None:
            leaf = unpack_leaf(row.entries)
            chains.update({number * SLOTS_PER_LEAF + offset: chain for offset, chain in leaf.items()})
    return chains


def _digest(db_id: int, generation: int, covered: int, body: bytes) -> bytes:
    head = f"{db_id}:{generation}:{covered}:".encode()
    return hashlib.sha256(head + body).digest()


def plan_merge(txn: ReadTxn, db_id: int, shape: Shape, *, chain_min: int = 2) -> CheckpointPlan | None:
    """Rewrite every slot whose chain is at least so long; `None` if there is none."""
    wal = txn.wal_state(db_id)
    if wal is None:
        return None
    long = {slot: chain for slot, chain in _chains(txn, db_id).items() if len(chain) >= chain_min}
    if not long:
        return None
    covered = wal.checkpointed_lsn
    body = b"".join(f"{slot}:{chain[-1].generation}:{len(chain)};".encode() for slot, chain in sorted(long.items()))
    digest = _digest(db_id, shape.generation, covered, body)
    nothing = np.zeros(0, ROW_DTYPE)
    tasks = []
    for slot, chain in sorted(long.items()):
        key = ArtifactKey(db_id, ArtifactKind.BASE, slot, shape.generation)
        tasks.append(
            SlotTask(
                key=key,
                url=shape.objects_url,
                object_key=object_key(key),
                page_size=shape.page_size,
                pages_per_chunk=shape.pages_per_chunk,
                pages_below=shape.pages_per_chunk,  # the size at its covered lsn is not known here: nothing is left out
                covered_lsn=chain[-1].covered_lsn,
                digest=digest,
                chain=tuple(chunk_place(txn, link.artifact(slot), shape.objects_url) for link in chain),
                frames=nothing,
            )
        )
    return CheckpointPlan(db_id, shape.generation, covered, wal.size_pages, (), tuple(tasks), (), digest)
