"""Planning of checkpoints and merges: which segments a checkpoint absorbs, and whether a slot gets a new base or a delta.

Terms
  candidates   the contiguous run of indexed segments after `checkpointed_lsn` whose last lsn is at or below the floor (P9)
  covered      the last lsn of the last candidate: the lsn up to which the new artifacts contain everything
  dirty        slot → how many of its pages changed, in how many segments; counted before a plan is made

The floor is read after the job's lease was taken, and a floor that was returned never falls again: no reader is admitted below
it, so the plan stays valid while it runs (M10). A slot is rewritten if it has no base, if more than a quarter of it is dirty,
or if its chain is long or heavy; otherwise it gets a delta. Slots beyond the size at `covered` are cleared (P15).

The same inputs give the same plan and the same digest: the artifact that a name denotes never depends on which process ran the
plan. The digest covers the segments (which never change), the choice for each slot, and the chain that the slot had. Rows of
the page index are never sent to the process that plans (K2). A plan is bounded, however much WAL waits; the next job takes the
rest.

Time travel (P14): with a window (`maintenance.time_travel_seconds`), the versions that a checkpoint is about to pass are kept
first, as an anonymous snapshot: the leaves before the checkpoint, and every segment from the last absorbed one up to its
anchor, the newest version that is sealed and indexed. The snapshot is made before the plan is stored, so no checkpoint is
published without it; a repeated attempt finds it by its anchor. The segment in which the last checkpoint ended is pinned too,
because only that segment has the size and time of its end. The snapshot expires a window after the commit at its anchor.

A long reader holds the floor, and thereby every checkpoint. When half of the WAL budget is used, its version is set aside in
the same way: from the snapshot's commit on, readers of the versions that the snapshot serves hold no floor
(`pages/readers.py`). The snapshot lives as long as such a reader: each round of maintenance extends it, or drops it if no
reader is left; after a crash it expires.

Threads: any. Raises what publishing a snapshot raises: `StalePlan`, `ArtifactGone` and `UnknownArtifact` mean that a newer
attempt has overtaken this one. The page-versions document calls the selection of segments
`CheckpointPlanner::select_mvcc_segments`, and its span has that name.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from quire.core.errors import InternalError, StoreUnusable, UnknownDatabase, UnknownSnapshot
from quire.core.events import emit
from quire.core.ids import ArtifactKey, ArtifactKind
from quire.core.limits import CHUNK_BYTES, SLOTS_PER_LEAF
from quire.core.tracing import span
from quire.durable.failpoints import hit
from quire.durable.names import object_key
from quire.jobs.checkpoint.run import Dirty, SegmentInput, SlotTask
from quire.jobs.context import JobContext, PagesOfStore
from quire.manifest import tables as t
from quire.manifest.ops.snapshots import ExtendSnapshot
from quire.manifest.reads import ReadTxn
from quire.manifest.records import WINDOW_TAG, Compression, LeafRef, PlanRecord, WalRecord, WalState
from quire.manifest.slots import Chain, place, unpack_leaf
from quire.pages.anchors import anchor_at
from quire.pages.catalog import PageShape, check_hash, chunk_place, segment_place, space_of
from quire.pages.framemap import Regions
from quire.pages.readers import Lease, is_kept
from quire.pages.sources import ChunkPlace, SegmentPlace
from quire.pages.timetravel import newest_sealed
from quire.pages.view_build import FROM_TAG, KEPT_FOR_READER, kept_range, reader_snapshots

DIRTY_RATIO = 0.25
CHAIN_MAX = 8
"""A slot with a larger dirty fraction, or a chain of this length, is rewritten (docs/design.md, defaults)."""

PLAN_FRAMES_MAX = 1 << 19
"""Frames of WAL in one plan for threads: 2 GiB of 4 KiB pages, whose rows are in this process's memory."""

SPARK_FRAMES_MAX = 1 << 23
"""Frames of WAL in one plan for Spark: 32 GiB of 4 KiB pages, 64 MiB of rows over all executors."""

COUNT_HERE_FRAMES = 1 << 20
"""Frames of WAL whose index entries the planning process counts itself, segment by segment: 4 GiB of 4 KiB pages, 48 MiB of
entries, a fifth of a second. The runner counts larger amounts."""

MERGE_SLOTS_MAX = 64
"""Slots that one merge rewrites: at most 4 GiB, so that other jobs get their turn."""

MERGE_ALL = 2
"""Length of the shortest chain that can be merged."""


@dataclass(frozen=True, slots=True)
class CheckpointPlan:
    """The plan of one checkpoint or merge of one database."""

    db_id: int
    generation: int
    covered_lsn: int
    size_pages: int
    segments: tuple[int, ...]
    tasks: tuple[SlotTask, ...]
    cleared: tuple[int, ...]
    """Slots that no longer exist at `covered_lsn`."""
    leaves: dict[int, LeafRef]
    """The leaves that the plan is based on: publishing requires them unchanged (P10)."""
    digest: bytes
    inputs: tuple[SegmentInput, ...] = ()
    """The segments, and where to read them; none for a merge."""
    more: bool = False
    """Whether work is left for the next job."""
    namespace_id: int = 0
    """Namespace of its artifacts."""

    @property
    def read_bytes(self) -> int:
        """Approximate number of bytes that it reads."""
        dirty = sum(task.dirty * task.page_size for task in self.tasks)
        return dirty + sum(place.size_bytes for task in self.tasks for place in task.chain)

    def record(self, job_id: int, attempt: int, now_ms: int) -> PlanRecord:
        """Return the plan as a manifest row."""
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
            self.namespace_id,
        )


@dataclass(frozen=True, slots=True)
class PlanSettings:
    """The properties of a database that a plan needs."""

    page_size: int
    pages_per_chunk: int
    generation: int
    objects_url: str
    """URL of the store's own object store."""
    compression: Compression = Compression.ZSTD
    namespace_id: int = 0
    """Namespace of the new artifacts."""
    url: str = ""
    prefix: str = ""

    def name(self, key: ArtifactKey) -> str:
        """Return the key of an artifact's object in the object store at `url`."""
        return f"{self.prefix}/{object_key(key)}" if self.prefix else object_key(key)


@dataclass(frozen=True, slots=True)
class SlotMap:
    """The slot map of a database at the time of planning."""

    chains: dict[int, Chain]
    leaves: dict[int, LeafRef]

    def under(self, slots: Iterable[int]) -> dict[int, LeafRef]:
        """Return the leaves of some slots; a leaf that does not exist yet has generation 0."""
        numbers = sorted({place(slot)[0] for slot in slots})
        return {number: self.leaves.get(number, LeafRef(0, 0)) for number in numbers}


def shape_of(txn: ReadTxn, db_id: int, objects_url: str, stored: tuple[int, PlanRecord] | None = None) -> PlanSettings:
    """Return the properties of a database, with the generation and namespace of its next plan, or of the `stored` one."""
    record = txn.database(db_id)
    if record is None:
        raise UnknownDatabase("no database has this id", hint="`quire ls` lists the databases", db_id=db_id)
    page_size = record.page_size
    per_chunk = record.pages_per_chunk or (CHUNK_BYTES // page_size if page_size else 0)
    if page_size:  # else the checkpoint would write chunks of another shape than the database has
        check_hash(db_id, record, PageShape(page_size, per_chunk))
    if stored is None:
        generation, namespace_id = record.next_generation, txn.current_namespace(record.namespace_id)[0]
    else:
        # Of the stored plan, not the current namespace: its objects were put there, and are adopted or deleted there.
        generation, namespace_id = stored[0], stored[1].namespace_id
    url, prefix = space_of(txn, namespace_id, objects_url)
    return PlanSettings(page_size, per_chunk, generation, objects_url, record.compression, namespace_id, url, prefix)


def candidates(txn: ReadTxn, db_id: int, floor_lsn: int) -> list[tuple[int, WalRecord]]:
    """Return (segment, row) of the segments that can be absorbed now (P9)."""
    wal = txn.wal_state(db_id)
    after = wal.checkpointed_lsn if wal else 0
    rows = [(key[1], row) for key, row in txn.scan(t.WAL_CATALOG, db_id) if row.state < WalState.CHECKPOINTED]
    taken: list[tuple[int, WalRecord]] = []
    for segment_id, row in sorted(rows, key=lambda item: item[1].first_lsn):
        # Stop at the first segment that cannot be taken: `checkpointed_lsn` states that chunks contain everything up
        # to it, so a later segment must not be absorbed before an earlier one.
        if row.state is not WalState.INDEXED or row.last_lsn > floor_lsn:
            break
        if row.last_lsn > after:
            taken.append((segment_id, row))
    return taken


def first_step(segments: Sequence[tuple[int, WalRecord]], frames_max: int) -> list[tuple[int, WalRecord]]:
    """Return the first candidates, as many as one plan takes: at least one, then up to `frames_max` frames."""
    taken, frames = list(segments[:1]), 0
    for (_, before), segment in pairwise(segments):
        frames += before.last_lsn - before.first_lsn + 1
        if frames + segment[1].last_lsn - segment[1].first_lsn + 1 > frames_max:
            break
        taken.append(segment)
    return taken


def inputs_of(
    txn: ReadTxn, db_id: int, segments: Sequence[tuple[int, WalRecord]], shape: PlanSettings
) -> list[SegmentInput]:
    """Return what to read of these segments, and from where."""
    covered, size_pages = _end_of(segments)
    return [
        SegmentInput(
            db_id=db_id,
            place=segment_place(txn, row.origin_db_id, segment_id, shape.objects_url)
            or SegmentPlace(origin_db_id=row.origin_db_id, segment_id=segment_id),
            last_lsn=row.last_lsn,
            covered_lsn=covered,
            size_pages=size_pages,
            pages_per_chunk=shape.pages_per_chunk,
        )
        for segment_id, row in segments
    ]


def _end_of(segments: Sequence[tuple[int, WalRecord]]) -> tuple[int, int]:
    """Return (covered lsn, size in pages at that lsn) of a run of segments."""
    return segments[-1][1].last_lsn, next((row.size_pages for _, row in reversed(segments) if row.size_pages), 0)


def plan_checkpoint(
    txn: ReadTxn,
    db_id: int,
    segments: Sequence[tuple[int, WalRecord]],
    shape: PlanSettings,
    dirty: Mapping[int, Dirty],
) -> CheckpointPlan:
    """Return the plan that absorbs these segments: complete transactions up to the end of the last one."""
    covered, size_pages = _end_of(segments)
    first_lsn = min(row.first_lsn for _, row in segments)
    held = _slots(txn, db_id)
    tasks = tuple(
        _task(txn, db_id, slot, dirty[slot], held.chains.get(slot, ()), covered, size_pages, first_lsn, shape)
        for slot in sorted(dirty)
    )
    last_slot = (size_pages - 1) // shape.pages_per_chunk if size_pages else -1
    cleared = tuple(sorted(slot for slot in held.chains if slot > last_slot))
    digest = _digest(db_id, shape, covered, size_pages, segments, tasks, cleared, held)
    return CheckpointPlan(
        db_id=db_id,
        generation=shape.generation,
        namespace_id=shape.namespace_id,
        covered_lsn=covered,
        size_pages=size_pages,
        segments=tuple(segment_id for segment_id, _ in segments),
        tasks=tuple(replace(task, digest=digest) for task in tasks),
        cleared=cleared,
        leaves=held.under([*(task.key.id for task in tasks), *cleared]),
        digest=digest,
        inputs=tuple(inputs_of(txn, db_id, segments, shape)),
    )


def _task(
    txn: ReadTxn,
    db_id: int,
    slot: int,
    dirty: Dirty,
    chain: Chain,
    covered: int,
    size_pages: int,
    first_lsn: int,
    shape: PlanSettings,
) -> SlotTask:
    places = tuple(chunk_place(txn, link.artifact(slot), shape.objects_url) for link in chain)
    pages_below = min(shape.pages_per_chunk, size_pages - slot * shape.pages_per_chunk)
    rewrite = is_rewritten(dirty.pages, pages_below, chain, places)
    kind, delta_id = (ArtifactKind.BASE, 0) if rewrite else (ArtifactKind.DELTA, 1)
    key = ArtifactKey(db_id, kind, slot, shape.generation, delta_id)
    return SlotTask(
        key=key,
        url=shape.url,
        object_key=shape.name(key),
        namespace_id=shape.namespace_id,
        page_size=shape.page_size,
        pages_per_chunk=shape.pages_per_chunk,
        pages_below=pages_below,
        covered_lsn=covered,
        digest=b"",
        chain=places if rewrite else (),
        dirty=dirty.pages,
        parts=dirty.parts,
        base_generation=0 if rewrite else chain[0].generation,
        lsn_start=first_lsn,
        compression=shape.compression,
    )


def is_rewritten(dirty: int, pages: int, chain: Chain, places: Sequence[ChunkPlace]) -> bool:
    """Return whether a slot gets a new base: it has none, much of it is dirty, or its chain is long or heavy."""
    if not chain or dirty > DIRTY_RATIO * pages or len(chain) >= CHAIN_MAX:
        return True
    return sum(place.size_bytes for place in places[1:]) >= places[0].size_bytes


def is_long(chain_length: int, base_bytes: int, delta_bytes: int, *, chain_min: int, ratio: float) -> bool:
    """Return whether a chain is so long, or its deltas so heavy, that a merge is due."""
    return chain_length >= chain_min or (chain_length > 1 and delta_bytes >= ratio * base_bytes)


def _slots(txn: ReadTxn, db_id: int) -> SlotMap:
    """Read the slot map of the whole database."""
    chains: dict[int, Chain] = {}
    leaves: dict[int, LeafRef] = {}
    for (_, number), held in txn.scan(t.LIVE_LEAF, db_id):
        leaves[number] = held
        row = txn.get(t.SLOT_LEAF, held.origin_db_id, number, held.generation)
        if row is not None:
            leaf = unpack_leaf(row.entries)
            chains.update({number * SLOTS_PER_LEAF + offset: chain for offset, chain in leaf.items()})
    return SlotMap(chains, leaves)


def _digest(
    db_id: int,
    shape: PlanSettings,
    covered: int,
    size_pages: int,
    segments: Sequence[tuple[int, WalRecord]],
    tasks: Sequence[SlotTask],
    cleared: Sequence[int],
    held: SlotMap,
) -> bytes:
    """Return the digest that identifies a plan by its segments, the choice for each slot and the chains that it starts from."""
    fixed = (shape.page_size, shape.pages_per_chunk, int(shape.compression))
    digest = hashlib.sha256(repr((db_id, shape.generation, covered, size_pages, fixed, tuple(cleared))).encode())
    for segment_id, row in segments:
        digest.update(repr((row.origin_db_id, segment_id, row.first_lsn, row.last_lsn, row.salt)).encode())
    for task in tasks:
        chain = [
            (int(link.kind), link.origin_db_id, link.generation, link.delta_id, link.covered_lsn)
            for link in held.chains.get(task.key.id, ())
        ]
        key, changed = task.key, (task.dirty, task.parts)
        digest.update(repr((key.id, int(key.kind), key.delta_id, chain, changed)).encode())
    return digest.digest()


def plan_merge(
    txn: ReadTxn, db_id: int, shape: PlanSettings, *, chain_min: int = MERGE_ALL, ratio: float = 0.0
) -> CheckpointPlan | None:
    """Plan the rewrite of slots with `chain_min` parts, or with deltas of `ratio` times the base; `None` if there is none."""
    wal = txn.wal_state(db_id)
    if wal is None:
        return None
    held = _slots(txn, db_id)
    due: list[tuple[int, Chain, tuple[ChunkPlace, ...]]] = []
    for slot, chain in held.chains.items():
        if len(chain) >= MERGE_ALL:
            places = tuple(chunk_place(txn, link.artifact(slot), shape.objects_url) for link in chain)
            base, *deltas = (place.size_bytes for place in places)
            if is_long(len(chain), base, sum(deltas), chain_min=chain_min, ratio=ratio):
                due.append((slot, chain, places))
    if not due:
        return None
    # A total order: a retry must choose the same slots, and list them in the same order, for its digest to match.
    due.sort(key=lambda item: (-len(item[1]), item[0]))
    chosen = sorted(due[:MERGE_SLOTS_MAX], key=lambda item: item[0])
    tasks = [_merge_task(db_id, slot, chain, places, shape) for slot, chain, places in chosen]
    covered = wal.checkpointed_lsn
    digest = _digest(db_id, shape, covered, wal.size_pages, (), tasks, (), held)
    return CheckpointPlan(
        db_id=db_id,
        generation=shape.generation,
        namespace_id=shape.namespace_id,
        covered_lsn=covered,
        size_pages=wal.size_pages,
        segments=(),
        tasks=tuple(replace(task, digest=digest) for task in tasks),
        cleared=(),
        leaves=held.under(task.key.id for task in tasks),
        digest=digest,
        more=len(due) > len(chosen),
    )


def _merge_task(db_id: int, slot: int, chain: Chain, places: tuple[ChunkPlace, ...], shape: PlanSettings) -> SlotTask:
    key = ArtifactKey(db_id, ArtifactKind.BASE, slot, shape.generation)
    return SlotTask(
        key=key,
        url=shape.url,
        object_key=shape.name(key),
        namespace_id=shape.namespace_id,
        page_size=shape.page_size,
        pages_per_chunk=shape.pages_per_chunk,
        pages_below=shape.pages_per_chunk,  # the size at its covered lsn is not known here: keep all pages
        covered_lsn=chain[-1].covered_lsn,
        digest=b"",
        chain=places,
        compression=shape.compression,
    )


# ── versions kept for the window ──────────────────────────────────────────────────────────────────────────────────────
ASIDE_MS = 600_000
"""How long a version that was set aside is kept after the last time its reader was seen: ten rounds of upkeep."""


def set_readers_aside(ctx: JobContext, db_id: int, floor: int) -> bool:
    """Keep the versions of readers that hold back a checkpoint, so that it may pass them; return whether it now may."""
    if ctx.pages is None:
        return False
    with ctx.manifest.read() as txn:
        mark, wal = newest_sealed(txn, Regions(ctx.pages.sources), db_id, ctx.objects_url), txn.wal_state(db_id)
        if mark is None or wal is None or mark.lsn <= floor:
            return False
        if any(row.anchor_lsn >= mark.lsn for _, row in reader_snapshots(txn, db_id)):
            return False
        anchor = anchor_at(txn, db_id, mark, with_base=True)
    readers = [lease.description for lease in ctx.pages.readers(db_id) if lease.lsn <= mark.lsn and not lease.set_aside]
    tags = {WINDOW_TAG: KEPT_FOR_READER, FROM_TAG: str(wal.checkpointed_lsn)}
    expires = ctx.clock.now_ms() + ASIDE_MS
    info = ctx.manifest.snapshots.publish(db_id, anchor=anchor, tags=tags, expires_at_ms=expires)
    hit("jobs.checkpoint.set_aside")
    emit("info", "reader.set_aside", db_id=db_id, snapshot_id=info.snapshot_id, lsn=mark.lsn, readers=readers)
    return True


def review_set_aside(ctx: JobContext, db_ids: Iterable[int]) -> int:
    """Extend the snapshots that readers of these databases who were set aside still need, and drop the rest; return how many
    were dropped."""
    if ctx.pages is None:
        return 0
    with ctx.manifest.read() as txn:
        kept = [(db_id, *snapshot) for db_id in db_ids for snapshot in reader_snapshots(txn, db_id)]
    dropped, now = 0, ctx.clock.now_ms()
    for db_id, snapshot_id, row in kept:
        if any(is_kept(lease.lsn, [kept_range(row)]) for lease in ctx.pages.readers(db_id)):
            # Not in every round: each extension is a commit, and a change in the feed.
            if row.expires_at_ms < now + ASIDE_MS // 2:
                ctx.manifest.submit([ExtendSnapshot(db_id, snapshot_id, now + ASIDE_MS)]).result()
        else:
            with suppress(UnknownSnapshot):  # it was dropped in the meantime
                ctx.manifest.snapshots.drop(db_id, snapshot_id)
                dropped += 1
    return dropped


def keep_versions(ctx: JobContext, db_id: int) -> int:
    """Keep the sealed versions, if a window is configured and no snapshot keeps them yet; return the snapshot's id, or 0."""
    window_ms = int(ctx.settings.time_travel_seconds * 1000)
    if not window_ms or ctx.pages is None:
        return 0
    with ctx.manifest.read() as txn:
        mark = newest_sealed(txn, Regions(ctx.pages.sources), db_id, ctx.objects_url)
        if mark is None or mark.commit_ms + window_ms <= ctx.clock.now_ms():
            # Already out of the window: the snapshot would expire at once.
            return 0
        kept = (row for _, row in txn.scan(t.SNAPSHOT_INDEX, db_id) if row.tags.get(WINDOW_TAG) == "window")
        if any(row.anchor_lsn >= mark.lsn for row in kept):
            return 0
        anchor = anchor_at(txn, db_id, mark, with_base=True)
    info = ctx.manifest.snapshots.publish(
        db_id, anchor=anchor, tags={WINDOW_TAG: "window"}, expires_at_ms=mark.commit_ms + window_ms
    )
    hit("jobs.checkpoint.kept")
    return info.snapshot_id


# ── choosing segments ─────────────────────────────────────────────────────────────────────────────────────────────────
SPAN = "CheckpointPlanner.select_mvcc_segments"


def engine_of(ctx: JobContext) -> PagesOfStore:
    """Return the page engine; `InternalError` if this worker has none."""
    if ctx.pages is None:
        raise InternalError("this worker has no page engine", hint="run the job in the owner's process")
    return ctx.pages


def select_segments(
    ctx: JobContext, db_id: int, *, frames_max: Callable[[int], int] = lambda _: PLAN_FRAMES_MAX
) -> tuple[list[tuple[int, WalRecord]], bool]:
    """Return (segment, row) of the segments that the next plan absorbs, and whether more could be absorbed.

    `frames_max` returns how many frames one plan takes, given the bytes of WAL that wait.
    """
    pages = engine_of(ctx)
    # Before anything is chosen: after a crash, a stored plan is published by a later attempt, and by then a snapshot
    # must keep the versions that it passes (P14).
    keep_versions(ctx, db_id)
    with span(SPAN, db_id=db_id) as trace:
        floor = pages.floor(db_id)  # after the job's lease was taken; from now on it never falls (M10)
        with ctx.manifest.read() as txn:
            absorbable = candidates(txn, db_id, floor)
            indexed = [row.last_lsn for _, row in txn.scan(t.WAL_CATALOG, db_id) if row.state is WalState.INDEXED]
        waiting = len(indexed) - len(absorbable)
        if waiting and pages.quota.is_half_full(db_id) and set_readers_aside(ctx, db_id, floor):
            # Readers that were set aside no longer hold it.
            floor = pages.floor(db_id)
            with ctx.manifest.read() as txn:
                absorbable = candidates(txn, db_id, floor)
            waiting = len(indexed) - len(absorbable)
        chosen = first_step(absorbable, frames_max(sum(row.used_bytes for _, row in absorbable))) if absorbable else []
        trace.set(
            floor_lsn=floor,
            segments=[segment_id for segment_id, _ in chosen],
            waiting=waiting,
            blocking_readers=[lease.description for lease in blocking_readers(pages, db_id)] if waiting else [],
        )
    if ctx.settings.time_travel_seconds:
        if floor > max(indexed, default=0):
            with suppress(StoreUnusable):  # a database that accepts no more writes has nothing more to seal
                pages.flush(db_id)
        keep_versions(ctx, db_id)
    return chosen, len(chosen) < len(absorbable)


def blocking_readers(pages: PagesOfStore, db_id: int) -> list[Lease]:
    """Return the readers that hold the floor, oldest version first; readers that were set aside do not."""
    return [lease for lease in pages.readers(db_id) if not lease.set_aside]


def waiting_for_readers(ctx: JobContext, db_id: int) -> dict[str, Any]:
    """Return the amount of WAL that readers keep from being absorbed, and these readers, for the job's result."""
    leases = blocking_readers(engine_of(ctx), db_id)
    with ctx.manifest.read() as txn:
        indexed = [row for _, row in txn.scan(t.WAL_CATALOG, db_id) if row.state is WalState.INDEXED]
    held = [row for row in indexed if leases and row.last_lsn > leases[0].lsn]
    if not held:
        return {}
    readers = [lease.info for lease in leases if lease.lsn < max(row.last_lsn for row in held)]
    return {"waiting_segments": len(held), "waiting_bytes": sum(row.used_bytes for row in held), "readers": readers}
