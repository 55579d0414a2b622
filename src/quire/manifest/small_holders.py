"""Who holds what, where there is little of it: the rules of `quire.manifest.holders`, which defines them, without numpy.

Loading numpy takes longer than most commands do, and a command that changes a store checks the whole manifest first. So what is
small is counted one by one, here; what is large is counted by numpy, there. A test holds the two together.

Terms
  code   an artifact as (origin, kind, delta, id, generation): sorts as the codes of numpy do

Costs some microseconds per reference. Pure functions of a read transaction.
"""

from __future__ import annotations

from collections import Counter as Tally
from collections.abc import Iterator
from typing import Any

from quire.core.errors import ManifestDamaged, QuireError
from quire.core.ids import ArtifactKey, ArtifactKind
from quire.core.limits import SLOTS_PER_LEAF
from quire.manifest import tables as t
from quire.manifest.ops.base import Op
from quire.manifest.ops.corrections import CorrectIndex, CorrectRefcount
from quire.manifest.ops.refs import artifact_key, unpack_artifact
from quire.manifest.reads import ReadTxn
from quire.manifest.records import TERMINAL_JOB_STATES, LeafRecord, RefcountRecord, WalState
from quire.manifest.slots import ENTRY

FEW = 20_000
"""References up to which this is quicker than loading numpy, about."""

UNREADABLE = -1
"""Stands for `in_use` of a row whose checksum is wrong."""

Code = tuple[int, int, int, int, int]

Finding = tuple[str, str, ArtifactKey | str, Op | None, bool]
"""(rule, what, artifact, fix, leak)."""


def are_few(txn: ReadTxn) -> bool:
    """Whether the references of a manifest are few: a look at the sizes of its tables."""
    tables: tuple[t.Table[Any], ...] = (t.GC_REFCOUNTS, t.LIVE_LEAF, t.SNAPSHOT_INDEX, t.WAL_CATALOG, t.CHUNK_CATALOG)
    rows = sum(txn.count(table) for table in (*tables, t.CHUNK_DELTA_INDEX))
    return rows + txn.count(t.SLOT_LEAF) * SLOTS_PER_LEAF <= FEW


def count_few(txn: ReadTxn) -> Iterator[Finding]:
    """R1 to R4, S2 and S4: every difference between what is counted and what is held."""
    findings: list[Finding] = []
    held: Tally[Code] = Tally()
    rows: set[Code] = set()
    _leaf_holders(txn, held)
    _chains(txn, held, rows, findings)
    _wal_holders(txn, held)
    _catalog(txn, held, rows, findings)
    yield from findings
    yield from _compare_counts(txn, held)
    for code in sorted(held.keys() - rows):
        yield "S2", "something refers to an artifact that is not in the catalog", _decoded(code), None, False
    for code in sorted(rows - held.keys()):
        artifact = _decoded(code)
        if artifact.kind is not ArtifactKind.NAMESPACE and txn.refcount(artifact) is None:
            yield "R4", "nothing refers to this artifact, and nothing will delete it", artifact, None, True


def _decoded(code: Code) -> ArtifactKey:
    origin, kind, delta, number, generation = code
    return ArtifactKey(origin, ArtifactKind(kind), number, generation, delta)


# ── what is held ──────────────────────────────────────────────────────────────────────────────────────────────────────
def _leaf_holders(txn: ReadTxn, held: Tally[Code]) -> None:
    for (_, leaf), row in txn.scan(t.LIVE_LEAF):
        held[row.origin_db_id, ArtifactKind.LEAF, 0, leaf, row.generation] += 1
    for _, record in txn.scan(t.SNAPSHOT_INDEX):
        for leaf, origin, generation in record.leaves:
            held[origin, ArtifactKind.LEAF, 0, leaf, generation] += 1


def _chains(txn: ReadTxn, held: Tally[Code], rows: set[Code], findings: list[Finding]) -> None:
    """The artifacts that leaf rows name, and the leaves themselves; S4 on the way."""
    for raw_key, raw in txn.raw_scan(t.SLOT_LEAF):
        origin, leaf, generation = t.SLOT_LEAF.key.unpack(raw_key)
        rows.add((origin, ArtifactKind.LEAF, 0, leaf, generation))
        try:
            record: LeafRecord = t.SLOT_LEAF.rows.decode(raw_key, raw)
        except QuireError as error:
            findings.append(("K1", f"a leaf does not decode: {error}", raw_key.hex(), None, False))
            continue
        last = (-1, 0)
        for offset, kind, delta, owner, number, covered in ENTRY.iter_unpack(
            record.entries[: len(record.entries) // ENTRY.size * ENTRY.size]
        ):
            is_sound = (
                kind == ArtifactKind.DELTA and covered > last[1] if offset == last[0] else kind == ArtifactKind.BASE
            )
            if not is_sound:
                artifact = ArtifactKey(origin, ArtifactKind.LEAF, leaf, generation)
                findings.append(("S4", "a chain is not one base and rising deltas", artifact, None, False))
            last = (offset, covered)
            held[owner, kind, delta, leaf * SLOTS_PER_LEAF + offset, number] += 1


def _wal_holders(txn: ReadTxn, held: Tally[Code]) -> None:
    for (_, segment), row in txn.scan(t.WAL_CATALOG):
        if row.state is not WalState.TRUNCATED:
            held[row.origin_db_id, ArtifactKind.WAL, 0, segment, 0] += 1
    for _, record in txn.scan(t.SNAPSHOT_INDEX):
        for pin in record.pins:
            held[pin.origin_db_id, ArtifactKind.WAL, 0, pin.segment_id, 0] += 1


def _catalog(txn: ReadTxn, held: Tally[Code], rows: set[Code], findings: list[Finding]) -> None:
    """The artifacts that have rows, and the namespaces that rows refer to."""
    namespaces = [record.namespace_id for _, record in txn.databases()]
    for table, kind in ((t.CHUNK_CATALOG, ArtifactKind.BASE), (t.CHUNK_DELTA_INDEX, ArtifactKind.DELTA)):
        for raw_key, raw in txn.raw_scan(table):
            origin, chunk, generation, *delta = table.key.unpack(raw_key)
            rows.add((origin, kind, delta[0] if delta else 0, chunk, generation))
            try:
                namespaces.append(table.rows.decode(raw_key, raw).namespace_id)
            except QuireError as error:
                what = f"a row of {table.name} does not decode: {error}"
                findings.append(("K1", what, raw_key.hex(), None, False))
    for (db_id, segment), row in txn.scan(t.WAL_CATALOG):
        if row.origin_db_id == db_id:
            rows.add((db_id, ArtifactKind.WAL, 0, segment, 0))
            namespaces.append(row.namespace_id)
    namespaces += own_references(txn)
    for (namespace_id,), _ in txn.scan(t.REMOTE_NAMESPACE):
        rows.add((0, ArtifactKind.NAMESPACE, 0, namespace_id, 0))
    for namespace_id in filter(None, namespaces):
        held[0, ArtifactKind.NAMESPACE, 0, namespace_id, 0] += 1


def own_references(txn: ReadTxn) -> list[int]:
    """Namespaces that hold themselves, so that they stay while they are empty: those of the current owner epoch (A1), and
    places that people call by a name; neither if it was dropped."""
    epoch = txn.owner_epoch()
    rows = ((key[0], row) for key, row in txn.scan(t.REMOTE_NAMESPACE) if not row.dropped_at_ms)
    return [number for number, row in rows if row.holds_itself or (epoch and row.owner_epoch == epoch)]


# ── what is counted ───────────────────────────────────────────────────────────────────────────────────────────────────
def _compare_counts(txn: ReadTxn, held: Tally[Code]) -> Iterator[Finding]:
    """Counts that differ from the holders and the outstanding uploads, and a wrong `gc_zero` (R1, R2, R3)."""
    stored = dict(_stored_counts(txn))
    uploads = outstanding_uploads(txn)
    # R3 first: a corrected count puts its own index row right, whatever was done to it before.
    damaged: list[bytes] = []
    zeros = set(intact_zeros(txn, damaged))
    doomed = {_key(code) for code, row in stored.items() if not (row.in_use or row.pending_upload)}
    for key in sorted((zeros ^ doomed).union(damaged)):
        yield wrong_zero(txn, key, is_doomed=key in doomed)
    for code in sorted(stored.keys() | held.keys()):
        have = stored[code].in_use if code in stored else 0
        if have != held[code]:
            key = _key(code)
            fix = CorrectRefcount(key, held[code], uploads.get(key, 0))
            yield "R1", wrong_count(have, held[code]), _decoded(code), fix, False
    waiting = {_key(code): row.pending_upload for code, row in stored.items() if row.pending_upload}
    for key in sorted(waiting.keys() | uploads.keys()):
        if waiting.get(key, 0) != uploads.get(key, 0):
            artifact = unpack_artifact(key)
            code = (artifact.origin_db_id, artifact.kind, artifact.delta_id, artifact.id, artifact.generation)
            what = f"pending_upload is {waiting.get(key, 0)}, {uploads.get(key, 0)} uploads are outstanding"
            yield "R2", what, artifact, CorrectRefcount(key, held[code], uploads.get(key, 0)), False


def _stored_counts(txn: ReadTxn) -> Iterator[tuple[Code, RefcountRecord]]:
    for key, raw in txn.raw_scan(t.GC_REFCOUNTS):
        origin, kind, number, generation, delta = t.GC_REFCOUNTS.key.unpack(key)
        try:
            row = t.GC_REFCOUNTS.rows.decode(key, raw)
        except ManifestDamaged:
            row = RefcountRecord(UNREADABLE)
        yield (origin, kind, delta, number, generation), row


def intact_zeros(txn: ReadTxn, damaged: list[bytes]) -> Iterator[bytes]:
    """The keys of `gc_zero` in order; those of damaged rows go into `damaged`, and count as missing."""
    for key, raw in txn.raw_scan(t.GC_ZERO):
        try:
            t.GC_ZERO.rows.decode(key, raw)
        except ManifestDamaged:
            damaged.append(key)
        else:
            yield key


def wrong_zero(txn: ReadTxn, key: bytes, *, is_doomed: bool) -> Finding:
    """What R3 says of a row of `gc_zero`: it is missing, too many, or damaged."""
    artifact = unpack_artifact(key)
    row = txn.refcount(artifact) if is_doomed else None
    fix = CorrectIndex("gc_zero", key, None if row is None else row.zero_since_ms)
    return "R3", "gc_zero is wrong", artifact, fix, False


def wrong_count(have: int, held: int) -> str:
    """What R1 says of a count."""
    return (
        f"the row of its counts is damaged, held {held} times" if have < 0 else f"in_use is {have}, held {held} times"
    )


def _key(code: Code) -> bytes:
    return artifact_key(_decoded(code))


def outstanding_uploads(txn: ReadTxn) -> dict[bytes, int]:
    """How many upload jobs of each artifact have not ended."""
    uploads: dict[bytes, int] = {}
    for _, job in txn.scan(t.JOB_QUEUE):
        if job.artifact is not None and job.state not in TERMINAL_JOB_STATES:
            origin, kind, number, generation, delta = job.artifact
            key = artifact_key(ArtifactKey(origin, ArtifactKind(kind), number, generation, delta))
            uploads[key] = uploads.get(key, 0) + 1
    return uploads
