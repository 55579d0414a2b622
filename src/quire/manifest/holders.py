"""Who holds what: reference counts recomputed from the rows that hold references, compared with `gc_refcounts`.

An artifact is coded as two numbers, (origin, kind, delta) and (id, generation), so that numpy can sort, count and compare
millions of them: the stored counts are equal to the recomputed ones in the common case, and only a difference is looked
at row by row. Where there are few of them `quire.manifest.few_holders` does the same without numpy.

Holders (the definition that every op keeps and R1 checks):
  leaf        each live database and each snapshot that names it
  base, delta each leaf row whose chains name it
  WAL         each database that tracks it and has not truncated it, each pin of a snapshot
  namespace   each database and each artifact row that names it

Memory: 16 bytes per reference and 24 per artifact, twice while sorting.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from quire.core.errors import QuireError
from quire.core.ids import ArtifactKey, ArtifactKind
from quire.core.limits import SLOTS_PER_LEAF
from quire.manifest import tables as t
from quire.manifest.few_holders import Finding, outstanding_uploads
from quire.manifest.ops.corrections import CorrectIndex, CorrectRefcount
from quire.manifest.ops.refs import artifact_key, unpack_artifact
from quire.manifest.reads import ReadTxn
from quire.manifest.records import WalState
from quire.manifest.slots import ENTRY, ENTRY_FIELDS

STEP_ROWS = 8_192
"""Rows looked at together: few enough that their objects stay in the processor's cache."""

Codes = npt.NDArray[np.uint64]
"""Rows of (origin << 24 | kind << 16 | delta, id << 32 | generation)."""


def encode(origin: Any, kind: Any, delta: Any, number: Any, generation: Any) -> Codes:
    """Codes of many artifacts at once."""
    owner, sort, layer = (np.asarray(part, np.uint64) for part in (origin, kind, delta))
    first = (owner << np.uint64(24)) | (sort << np.uint64(16)) | layer
    second = (np.asarray(number, np.uint64) << np.uint64(32)) | np.asarray(generation, np.uint64)
    return np.stack(np.broadcast_arrays(first, second), axis=-1).reshape(-1, 2)


def decode(code: Any) -> ArtifactKey:
    """The artifact of one code."""
    first, second = int(code[0]), int(code[1])
    return ArtifactKey(first >> 24, ArtifactKind(first >> 16 & 0xFF), second >> 32, second & 0xFFFFFFFF, first & 0xFFFF)


def tally(codes: Codes) -> tuple[Codes, npt.NDArray[np.int64]]:
    """Distinct codes in order, and how often each occurs."""
    if not len(codes):
        return codes.reshape(0, 2), np.zeros(0, np.int64)
    codes = codes[np.lexsort((codes[:, 1], codes[:, 0]))]
    starts = np.flatnonzero(np.concatenate(([True], (codes[1:] != codes[:-1]).any(axis=1))))
    return codes[starts], np.diff(np.append(starts, len(codes)))


def count_holders(txn: ReadTxn) -> Iterator[Finding]:
    """R1 to R4 and S2: every difference between what is counted and what is held."""
    findings: list[Finding] = []
    catalog: list[Codes] = []
    references = [*_leaf_holders(txn), *_chains(txn, catalog, findings), _wal_holders(txn)]
    catalog.extend(_catalog(txn, references, findings))
    held, counts = tally(np.concatenate([np.zeros((0, 2), np.uint64), *references]))
    yield from findings
    yield from _compare_counts(txn, held, counts)
    yield from _compare_catalog(held, np.concatenate([np.zeros((0, 2), np.uint64), *catalog]), txn)


def inventory(txn: ReadTxn) -> Iterator[tuple[str, Codes, npt.NDArray[np.int64]]]:
    """What R1, S2 and R4 compare, for who compares it elsewhere: ("held" or "row", codes, no counts) and ("stored", codes,
    `in_use`), block by block. What does not decode is left out: K1 names it."""
    none, catalog, namespaces = np.zeros(0, np.int64), list[Codes](), list[Codes]()
    for codes in [*_leaf_holders(txn), *_chains(txn, catalog, []), _wal_holders(txn)]:
        yield "held", codes, none
    for codes in [*catalog, *_catalog(txn, namespaces, [])]:
        yield "row", codes, none
    for codes in namespaces:
        yield "held", codes, none
    stored, in_use, _ = _stored_counts(txn)
    yield "stored", stored, in_use


def _packed(table: t.Table[Any], keys: list[bytes]) -> Any:
    return np.frombuffer(b"".join(keys), dtype=table.key.numpy_fields())


def _leaf_holders(txn: ReadTxn) -> Iterator[Codes]:
    live = [(row.origin_db_id, leaf, row.generation) for (_, leaf), row in txn.scan(t.LIVE_LEAF)]
    kept = [
        (origin, leaf, generation)
        for _, record in txn.scan(t.SNAPSHOT_INDEX)
        for leaf, origin, generation in record.leaves
    ]
    for rows in (live, kept):
        if rows:
            table = np.array(rows, np.uint64)
            yield encode(table[:, 0], ArtifactKind.LEAF, 0, table[:, 1], table[:, 2])


def _chains(txn: ReadTxn, catalog: list[Codes], findings: list[Finding]) -> Iterator[Codes]:
    """The artifacts that leaf rows name, and (into `catalog`) the leaves themselves; S2 on the way."""
    for keys, values in txn.steps(t.SLOT_LEAF, STEP_ROWS):
        leaves = _packed(t.SLOT_LEAF, keys)
        catalog.append(encode(leaves["origin_db_id"], ArtifactKind.LEAF, 0, leaves["leaf"], leaves["generation"]))
        bodies = []
        for raw in values:
            try:
                bodies.append(t.SLOT_LEAF.codec.decode(raw).entries)
            except QuireError as error:
                findings.append(("K1", f"a leaf does not decode: {error}", raw[:16].hex(), None, False))
                bodies.append(b"")
        sizes = np.array([len(body) // ENTRY.size for body in bodies])
        entries = np.frombuffer(b"".join(body[: len(body) // ENTRY.size * ENTRY.size] for body in bodies), ENTRY_FIELDS)
        number = np.repeat(leaves["leaf"].astype(np.uint64), sizes)
        owner = np.repeat(np.arange(len(keys)), sizes)
        for index in _bad_links(entries, owner):
            findings.append(
                ("S2", "a chain is not one base and rising deltas", f"leaf {leaves[owner[index]]}", None, False)
            )
        slot = number * np.uint64(SLOTS_PER_LEAF) + entries["offset"]
        yield encode(entries["origin_db_id"], entries["kind"], entries["delta_id"], slot, entries["generation"])


def _bad_links(entries: Any, owner: Any) -> list[int]:
    """Entries that break the rules of a chain (see `slots.py`)."""
    if not len(entries):
        return []
    same = np.zeros(len(entries), bool)
    same[1:] = (owner[1:] == owner[:-1]) & (entries["offset"][1:] == entries["offset"][:-1])
    rising = np.ones(len(entries), bool)
    rising[1:] = entries["covered_lsn"][1:] > entries["covered_lsn"][:-1]
    base = entries["kind"] == ArtifactKind.BASE
    delta = entries["kind"] == ArtifactKind.DELTA
    good = np.where(same, delta & rising, base)
    return [int(index) for index in np.flatnonzero(~good)]


def _wal_holders(txn: ReadTxn) -> Codes:
    rows = [
        (row.origin_db_id, segment)
        for (_, segment), row in txn.scan(t.WAL_CATALOG)
        if row.state is not WalState.TRUNCATED
    ]
    for _, record in txn.scan(t.SNAPSHOT_INDEX):
        rows.extend((pin.origin_db_id, pin.segment_id) for pin in record.pins)
    table = np.array(rows, np.uint64).reshape(-1, 2)
    return encode(table[:, 0], ArtifactKind.WAL, 0, table[:, 1], 0)


def _catalog(txn: ReadTxn, references: list[Codes], findings: list[Finding]) -> Iterator[Codes]:
    """The artifacts that have rows; adds what they refer to (namespaces) to `references`."""
    namespaces: list[int] = [record.namespace_id for _, record in txn.databases() if record.namespace_id]
    for table, kind in ((t.CHUNK_CATALOG, ArtifactKind.BASE), (t.CHUNK_DELTA_INDEX, ArtifactKind.DELTA)):
        for keys, values in txn.steps(table, STEP_ROWS):
            rows = _packed(table, keys)
            delta = rows["delta_id"] if kind is ArtifactKind.DELTA else 0
            yield encode(rows["origin_db_id"], kind, delta, rows["chunk_id"], rows["generation"])
            namespaces.extend(filter(None, _namespaces(table, keys, values, findings)))
    for (db_id, segment), row in txn.scan(t.WAL_CATALOG):
        if row.origin_db_id == db_id:
            yield encode(db_id, ArtifactKind.WAL, 0, segment, 0)
            if row.namespace_id:
                namespaces.append(row.namespace_id)
    for (namespace_id,), _ in txn.scan(t.REMOTE_NAMESPACE):
        yield encode(0, ArtifactKind.NAMESPACE, 0, namespace_id, 0)
    if namespaces:
        references.append(encode(0, ArtifactKind.NAMESPACE, 0, namespaces, 0))


def _namespaces(table: t.Table[Any], keys: list[bytes], values: list[bytes], findings: list[Finding]) -> list[int]:
    """The namespace of every row; decodes each (K1), all in one go unless something is odd."""
    head, body = table.codec.head, table.codec.decode_body
    assert body is not None, "catalog tables are not packed"
    try:
        if {raw[:2] for raw in values} == {head}:
            return [body(raw[2:]).namespace_id for raw in values]
    except (msgspec.MsgspecError, UnicodeDecodeError):
        pass  # found and named below
    found = []
    for key, raw in zip(keys, values):
        try:
            found.append(table.codec.decode(raw).namespace_id)
        except QuireError as error:
            findings.append(("K1", f"a row of {table.name} does not decode: {error}", key.hex(), None, False))
    return found


def _compare_counts(txn: ReadTxn, held: Codes, counts: npt.NDArray[np.int64]) -> Iterator[Finding]:
    """R1, R2, R3."""
    stored, in_use, pending = _stored_counts(txn)
    uploads = outstanding_uploads(txn)
    # R3 first: a corrected count puts its own index row right, whatever was done to it before.
    zeros = {key for key, _ in txn.raw_scan(t.GC_ZERO)}
    doomed = {artifact_key(decode(code)) for code in stored[(in_use == 0) & (pending == 0)]}
    for key in sorted(zeros ^ doomed):
        artifact = unpack_artifact(key)
        row = txn.refcount(artifact)
        since = None if key in zeros or row is None else row.zero_since_ms
        yield "R3", "gc_zero is wrong", artifact, CorrectIndex("gc_zero", key, since), False
    positive = in_use > 0
    if not (np.array_equal(stored[positive], held) and np.array_equal(in_use[positive], counts)):
        yield from _differences(stored, in_use, uploads, held, counts)
    waiting = {artifact_key(decode(code)): int(n) for code, n in zip(stored[pending > 0], pending[pending > 0])}
    for key in sorted(waiting.keys() | uploads.keys()):
        if waiting.get(key, 0) != uploads.get(key, 0):
            artifact = unpack_artifact(key)
            code = encode(artifact.origin_db_id, artifact.kind, artifact.delta_id, artifact.id, artifact.generation)
            holders = int(counts[(held == code).all(axis=1)].sum())
            fix = CorrectRefcount(key, holders, uploads.get(key, 0))
            what = f"pending_upload is {waiting.get(key, 0)}, {uploads.get(key, 0)} uploads are outstanding"
            yield "R2", what, artifact, fix, False


def _stored_counts(txn: ReadTxn) -> tuple[Codes, npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    codes, in_use, pending = [np.zeros((0, 2), np.uint64)], [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
    for keys, values in txn.steps(t.GC_REFCOUNTS, STEP_ROWS):
        rows = _packed(t.GC_REFCOUNTS, keys)
        row = np.frombuffer(b"".join(values), dtype=t.GC_REFCOUNTS.codec.numpy_fields())
        codes.append(encode(rows["origin_db_id"], rows["kind"], rows["delta_id"], rows["id"], rows["generation"]))
        in_use.append(row["in_use"].astype(np.int64))
        pending.append(row["pending_upload"].astype(np.int64))
    stored = np.concatenate(codes)
    order = np.lexsort((stored[:, 1], stored[:, 0]))
    return stored[order], np.concatenate(in_use)[order], np.concatenate(pending)[order]


def _differences(
    stored: Codes,
    in_use: npt.NDArray[np.int64],
    uploads: dict[bytes, int],
    held: Codes,
    counts: npt.NDArray[np.int64],
) -> Iterator[Finding]:
    actual = {(int(a), int(b)): int(n) for (a, b), n in zip(stored, in_use)}
    expected = {(int(a), int(b)): int(n) for (a, b), n in zip(held, counts)}
    for code in sorted(actual.keys() | expected.keys()):
        have, want = actual.get(code, 0), expected.get(code, 0)
        if have != want:
            artifact = decode(code)
            key = artifact_key(artifact)
            fix = CorrectRefcount(key, want, uploads.get(key, 0))
            yield "R1", f"in_use is {have}, held {want} times", artifact, fix, False


def _compare_catalog(held: Codes, catalog: Codes, txn: ReadTxn) -> Iterator[Finding]:
    """S2 and R4: what is held has a row; what has a row is, or was, held."""
    rows, _ = tally(catalog)
    if np.array_equal(rows, held):
        return
    present = {(int(a), int(b)) for a, b in rows}
    wanted = {(int(a), int(b)) for a, b in held}
    for code in sorted(wanted - present):
        yield "S2", "something refers to an artifact that is not in the catalog", decode(code), None, False
    for code in sorted(present - wanted):
        artifact = decode(code)
        if artifact.kind is not ArtifactKind.NAMESPACE and txn.refcount(artifact) is None:
            yield "R4", "nothing refers to this artifact, and nothing will delete it", artifact, None, True
