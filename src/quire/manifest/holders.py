"""Recompute reference counts from the rows that hold references, and compare them with `gc_refcounts`.

An artifact is coded as two numbers, (origin, kind, delta) and (id, generation), so that numpy can sort, count and
compare millions of them. Usually the stored counts equal the recomputed ones; only a difference is examined row by row.

Holders (the definition that every op maintains and R1 checks):
  leaf        each live database and each snapshot that names it
  base, delta each leaf row whose chains name it
  WAL         each database that tracks it and has not truncated it, each pin of a snapshot
  namespace   each database and each artifact row that names it; itself, if it is the current owner epoch's

Entry points
  `count_holders`  R1 to R4, S2, S4, compared here. Memory: 16 bytes per reference and 24 per artifact, twice while sorting
  `inventory`      the input of R1, R4 and S2, for callers that compare it elsewhere. Memory: one step of rows
  `check_rows`     rules that need no counting of holders (K1, R2, R3, S4). Memory: one step of rows, and the artifacts
                   being uploaded
  `check_held`     for a view of some databases: counts must not be below what these hold, because others may hold more
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import chain, islice
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from quire.core.decoding import UNDECODABLE
from quire.core.errors import ManifestDamaged, QuireError
from quire.core.ids import ArtifactKey, ArtifactKind
from quire.core.limits import SLOTS_PER_LEAF
from quire.manifest import tables as t
from quire.manifest.ops.base import Op
from quire.manifest.ops.corrections import CorrectIndex, CorrectRefcount
from quire.manifest.ops.refs import artifact_key, unpack_artifact
from quire.manifest.reads import ReadTxn
from quire.manifest.records import TERMINAL_JOB_STATES, WalState
from quire.manifest.slots import ENTRY, ENTRY_FIELDS

if TYPE_CHECKING:
    from quire.manifest.check import Rule

UNREADABLE = -1
"""Placeholder for `in_use` of a row whose checksum is wrong."""

Finding = tuple["Rule", str, ArtifactKey | str, Op | None, bool]
"""(rule, what, artifact, fix, leak)."""

STEP_ROWS = 8_192
"""Rows processed together: few enough that their objects stay in the processor's cache."""

LEAF_ROWS = 256
"""Leaves processed together: each has as many references as a few hundred other rows."""

Codes = npt.NDArray[np.uint64]
"""Rows of (origin << 24 | kind << 16 | delta, id << 32 | generation)."""


def encode(origin: Any, kind: Any, delta: Any, number: Any, generation: Any) -> Codes:
    """Return the codes of many artifacts at once."""
    owner, sort, layer = (np.asarray(part, np.uint64) for part in (origin, kind, delta))
    # Kind and delta have 8 and 16 bits in the key too, so two artifacts never have the same code.
    first = (owner << np.uint64(24)) | (sort << np.uint64(16)) | layer
    second = (np.asarray(number, np.uint64) << np.uint64(32)) | np.asarray(generation, np.uint64)
    return np.stack(np.broadcast_arrays(first, second), axis=-1).reshape(-1, 2)


def decode(code: Any) -> ArtifactKey:
    """Return the artifact of one code."""
    first, second = int(code[0]), int(code[1])
    return ArtifactKey(first >> 24, ArtifactKind(first >> 16 & 0xFF), second >> 32, second & 0xFFFFFFFF, first & 0xFFFF)


def tally(codes: Codes) -> tuple[Codes, npt.NDArray[np.int64]]:
    """Return the distinct codes in order, and how often each occurs."""
    if not len(codes):
        return codes.reshape(0, 2), np.zeros(0, np.int64)
    codes = codes[np.lexsort((codes[:, 1], codes[:, 0]))]
    starts = np.flatnonzero(np.concatenate(([True], (codes[1:] != codes[:-1]).any(axis=1))))
    return codes[starts], np.diff(np.append(starts, len(codes)))


def count_holders(txn: ReadTxn) -> Iterator[Finding]:
    """Check R1 to R4, S2 and S4: yield every difference between what is counted and what is held."""
    findings: list[Finding] = []
    references: dict[str, list[Codes]] = {sort: [np.zeros((0, 2), np.uint64)] for sort in ("held", "row")}
    for sort, codes in _references(txn, findings):
        references[sort].append(codes)
    # `pop` frees the parts before the next large array is made.
    held, counts = tally(np.concatenate(references.pop("held")))
    yield from findings

    def holders_of(artifact: ArtifactKey, _: int) -> int:
        code = encode(artifact.origin_db_id, artifact.kind, artifact.delta_id, artifact.id, artifact.generation)
        return int(counts[(held == code).all(axis=1)].sum())

    yield from _check_index(txn, holders_of)
    yield from _compare_counts(txn, held, counts)
    yield from _compare_catalog(held, np.concatenate(references.pop("row")), txn)


def inventory(txn: ReadTxn) -> Iterator[tuple[str, Codes, npt.NDArray[np.int64]]]:
    """Yield what R1, S2 and R4 compare, a step at a time.

    The parts are ("held", codes, how often each is held by these rows), ("row", codes, ones) and ("stored", codes,
    `in_use`). Rows that do not decode are left out: `check_rows` names them (K1).
    """
    unread: list[Finding] = []
    for sort, codes in _references(txn, unread):
        unread.clear()
        yield (sort, *tally(codes))
    for codes, in_use in _stored_steps(txn, t.GC_REFCOUNTS.rows.columns):
        yield "stored", codes, in_use


def check_rows(txn: ReadTxn) -> Iterator[Finding]:
    """Check K1 of leaves and catalogs, R2, R3 and S4. The fix of R2 trusts `in_use`, because no holders were counted."""
    findings: list[Finding] = []
    for _ in chain(_leaf_steps(txn, findings), _catalog_steps(txn, findings)):
        yield from findings
        findings.clear()
    yield from _check_index(txn, lambda _, in_use: in_use)


def check_held(txn: ReadTxn) -> Iterator[Finding]:
    """Check K1, S2, S4 and R3 of the rows that a view has, and that no count is below its holders in the view (R1, R2)."""
    findings: list[Finding] = []
    references = [codes for sort, codes in _references(txn, findings) if sort == "held"]
    yield from findings
    for code, count in zip(*tally(np.concatenate([np.zeros((0, 2), np.uint64), *references]))):
        artifact = decode(code)
        row = txn.refcount(artifact)
        if row is None or row.in_use < count:
            yield "R1", _wrong_count(0 if row is None else row.in_use, int(count)), artifact, None, False
        if not _is_listed(txn, artifact):
            yield "S2", "a referenced artifact is not in the catalog", artifact, None, False
    for key in _symmetric_difference(_intact_zeros(txn, []), _doomed(txn, {})):
        yield _wrong_zero(txn, key, is_doomed=_is_doomed(txn, key))
    for key, count in outstanding_uploads(txn).items():
        artifact = unpack_artifact(key)
        row = txn.refcount(artifact)
        if row is None or row.pending_upload < count:
            yield "R2", f"{count} uploads are outstanding, but pending_upload is below that", artifact, None, False


def _is_listed(txn: ReadTxn, artifact: ArtifactKey) -> bool:
    """Return whether an artifact of any kind has its row."""
    if artifact.kind is ArtifactKind.LEAF:
        return txn.get(t.SLOT_LEAF, artifact.origin_db_id, artifact.id, artifact.generation) is not None
    if artifact.kind is ArtifactKind.NAMESPACE:
        return txn.namespace(artifact.id) is not None
    return txn.artifact(artifact) is not None


def _references(txn: ReadTxn, findings: list[Finding]) -> Iterator[tuple[str, Codes]]:
    """Yield every reference ("held") and every row that can be held ("row"), a step at a time."""
    for codes in chain(_leaf_holders(txn), _wal_holders(txn)):
        yield "held", codes
    yield from _chains(txn, findings)
    yield from _catalog(txn, findings)


def _packed(table: t.Table[Any], keys: list[bytes]) -> Any:
    return np.frombuffer(b"".join(keys), dtype=table.key.numpy_fields())


def _tables(rows: Iterable[tuple[int, ...]]) -> Iterator[npt.NDArray[np.uint64]]:
    """Yield rows of numbers, a step at a time."""
    rest = iter(rows)
    while step := list(islice(rest, STEP_ROWS)):
        yield np.array(step, np.uint64)


def _leaf_holders(txn: ReadTxn) -> Iterator[Codes]:
    live = ((row.origin_db_id, leaf, row.generation) for (_, leaf), row in txn.scan(t.LIVE_LEAF))
    kept = (
        (origin, leaf, generation)
        for _, record in txn.scan(t.SNAPSHOT_INDEX)
        for leaf, origin, generation in record.leaves
    )
    for rows in _tables(chain(live, kept)):
        yield encode(rows[:, 0], ArtifactKind.LEAF, 0, rows[:, 1], rows[:, 2])


def _leaf_steps(txn: ReadTxn, findings: list[Finding]) -> Iterator[tuple[Any, Any, npt.NDArray[np.int64]]]:
    """Yield (keys of leaves, their entries, the leaf of each entry); adds K1 and S4 to `findings`."""
    for keys, values in txn.steps(t.SLOT_LEAF, LEAF_ROWS):
        leaves = _packed(t.SLOT_LEAF, keys)
        bodies = []
        for key, raw in zip(keys, values, strict=True):
            try:
                bodies.append(t.SLOT_LEAF.rows.decode(key, raw).entries)
            except QuireError as error:
                findings.append(("K1", f"a leaf does not decode: {error}", key.hex(), None, False))
                bodies.append(b"")
        sizes = np.array([len(body) // ENTRY.size for body in bodies])
        entries = np.frombuffer(b"".join(body[: len(body) // ENTRY.size * ENTRY.size] for body in bodies), ENTRY_FIELDS)
        owner = np.repeat(np.arange(len(keys)), sizes)
        for index in _bad_links(entries, owner):
            origin, leaf, generation = map(int, leaves[owner[index]].tolist())
            artifact = ArtifactKey(origin, ArtifactKind.LEAF, leaf, generation)
            findings.append(("S4", "a chain is not one base followed by rising deltas", artifact, None, False))
        yield leaves, entries, owner


def _chains(txn: ReadTxn, findings: list[Finding]) -> Iterator[tuple[str, Codes]]:
    """Yield the leaves themselves, and the artifacts that they name."""
    for leaves, entries, owner in _leaf_steps(txn, findings):
        yield "row", encode(leaves["origin_db_id"], ArtifactKind.LEAF, 0, leaves["leaf"], leaves["generation"])
        yield "held", named_by(leaves["leaf"][owner], entries)


def named_by(leaf: Any, entries: Any) -> Codes:
    """Return the artifacts that entries of leaves name; `leaf` is the number of each entry's leaf."""
    slot = leaf.astype(np.uint64) * np.uint64(SLOTS_PER_LEAF) + entries["offset"]
    return encode(entries["origin_db_id"], entries["kind"], entries["delta_id"], slot, entries["generation"])


def _bad_links(entries: Any, owner: Any) -> list[int]:
    """Return the entries that break the rules of a chain (see `slots.py`)."""
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


def _wal_holders(txn: ReadTxn) -> Iterator[Codes]:
    tracked = (
        (row.origin_db_id, segment)
        for (_, segment), row in txn.scan(t.WAL_CATALOG)
        if row.state is not WalState.TRUNCATED
    )
    pinned = ((pin.origin_db_id, pin.segment_id) for _, record in txn.scan(t.SNAPSHOT_INDEX) for pin in record.pins)
    for rows in _tables(chain(tracked, pinned)):
        yield encode(rows[:, 0], ArtifactKind.WAL, 0, rows[:, 1], 0)


def _catalog(txn: ReadTxn, findings: list[Finding]) -> Iterator[tuple[str, Codes]]:
    """Yield the artifacts that have rows, and the namespaces that rows refer to."""
    yield "held", _in_namespaces(record.namespace_id for _, record in txn.every_database())
    for kind, rows, namespaces in _catalog_steps(txn, findings):
        delta = rows["delta_id"] if kind is ArtifactKind.DELTA else 0
        yield "row", encode(rows["origin_db_id"], kind, delta, rows["chunk_id"], rows["generation"])
        yield "held", _in_namespaces(namespaces)
    own = ((db_id, segment, row.namespace_id) for (db_id, segment), row in txn.scan(t.WAL_CATALOG)
           if row.origin_db_id == db_id)  # fmt: skip
    for segments in _tables(own):
        yield "row", encode(segments[:, 0], ArtifactKind.WAL, 0, segments[:, 1], 0)
        yield "held", _in_namespaces(segments[:, 2].tolist())
    yield "held", _in_namespaces(_own_references(txn))
    for spaces in _tables(key for key, _ in txn.scan(t.REMOTE_NAMESPACE)):
        yield "row", encode(0, ArtifactKind.NAMESPACE, 0, spaces[:, 0], 0)


def _in_namespaces(namespaces: Iterable[int]) -> Codes:
    """Return references to namespaces; 0 stands for none."""
    return encode(0, ArtifactKind.NAMESPACE, 0, list(filter(None, namespaces)), 0)


def _catalog_steps(txn: ReadTxn, findings: list[Finding]) -> Iterator[tuple[ArtifactKind, Any, list[int]]]:
    """Yield (kind, keys of chunks, their namespaces); adds K1 to `findings`."""
    for table, kind in ((t.CHUNK_CATALOG, ArtifactKind.BASE), (t.CHUNK_DELTA_INDEX, ArtifactKind.DELTA)):
        for keys, values in txn.steps(table, STEP_ROWS):
            yield kind, _packed(table, keys), _namespaces(table, keys, values, findings)


def _namespaces(table: t.Table[Any], keys: list[bytes], values: list[bytes], findings: list[Finding]) -> list[int]:
    """Return the namespace of every row; decodes each (K1), all in one pass unless a row is damaged."""
    body = table.codec.decode_body
    assert body is not None, "catalog tables are not packed"
    try:
        if table.rows.are_intact(keys, values):
            return [body(raw[2:-4]).namespace_id for raw in values]
    except UNDECODABLE:
        pass  # the loop below finds the row
    namespaces = []
    for key, raw in zip(keys, values):
        try:
            namespaces.append(table.rows.decode(key, raw).namespace_id)
        except QuireError as error:
            findings.append(("K1", f"a row of {table.name} does not decode: {error}", key.hex(), None, False))
    return namespaces


def _compare_counts(txn: ReadTxn, held: Codes, counts: npt.NDArray[np.int64]) -> Iterator[Finding]:
    """Check R1: yield counts that differ from the holders."""
    stored, in_use = _stored_counts(txn)
    positive = in_use != 0  # includes unreadable rows, which never equal what is held
    if np.array_equal(stored[positive], held) and np.array_equal(in_use[positive], counts):
        return
    uploads = outstanding_uploads(txn)
    actual = {(int(a), int(b)): int(n) for (a, b), n in zip(stored, in_use)}
    expected = {(int(a), int(b)): int(n) for (a, b), n in zip(held, counts)}
    for code in sorted(actual.keys() | expected.keys()):
        have, want = actual.get(code, 0), expected.get(code, 0)
        if have != want:
            artifact = decode(code)
            key = artifact_key(artifact)
            fix = CorrectRefcount(key, want, uploads.get(key, 0))
            yield "R1", _wrong_count(have, want), artifact, fix, False


def _check_index(txn: ReadTxn, holders_of: Callable[[ArtifactKey, int], int]) -> Iterator[Finding]:
    """Check R3 and R2; `holders_of` returns how many hold an artifact, given the `in_use` of its row."""
    waiting: dict[bytes, tuple[int, int]] = {}
    damaged: list[bytes] = []
    # R3 first: a corrected count also corrects its own index row, whatever was done to it before.
    for key in _symmetric_difference(_intact_zeros(txn, damaged), _doomed(txn, waiting)):
        yield _wrong_zero(txn, key, is_doomed=_is_doomed(txn, key))
    for key in damaged:
        if not _is_doomed(txn, key):  # otherwise it was reported as missing above
            yield _wrong_zero(txn, key, is_doomed=False)
    uploads = outstanding_uploads(txn)
    for key in sorted(waiting.keys() | uploads.keys()):
        in_use, pending = waiting.get(key, (0, 0))
        if pending != uploads.get(key, 0):
            artifact = unpack_artifact(key)
            if key not in waiting and (row := txn.refcount(artifact)) is not None:
                in_use = row.in_use
            what = f"pending_upload is {pending}, but {uploads.get(key, 0)} uploads are outstanding"
            fix = CorrectRefcount(key, holders_of(artifact, in_use), uploads.get(key, 0))
            yield "R2", what, artifact, fix, False


def _doomed(txn: ReadTxn, waiting: dict[bytes, tuple[int, int]]) -> Iterator[bytes]:
    """Yield the keys of artifacts at zero, in order; add (`in_use`, `pending_upload`) of those being uploaded to `waiting`."""
    for keys, values in txn.steps(t.GC_REFCOUNTS, STEP_ROWS):
        rows = _counts(keys, values)
        for place in np.flatnonzero(rows["pending_upload"]).tolist():
            waiting[keys[place]] = int(rows["in_use"][place]), int(rows["pending_upload"][place])
        for place in np.flatnonzero((rows["in_use"] == 0) & (rows["pending_upload"] == 0)).tolist():
            yield keys[place]


def _symmetric_difference(first: Iterator[bytes], second: Iterator[bytes]) -> Iterator[bytes]:
    """Yield the elements that only one of two rising sequences has, in order."""
    one, other = next(first, None), next(second, None)
    while one is not None or other is not None:
        if one == other:
            one, other = next(first, None), next(second, None)
        elif other is None or (one is not None and one < other):
            assert one is not None, "they are not both over"
            yield one
            one = next(first, None)
        else:
            yield other
            other = next(second, None)


def _stored_counts(txn: ReadTxn) -> tuple[Codes, npt.NDArray[np.int64]]:
    """Return (codes in order, `in_use`) as stored."""
    steps = [(np.zeros((0, 2), np.uint64), np.zeros(0, np.int64)), *_stored_steps(txn, _counts)]
    stored, in_use = (np.concatenate(column) for column in zip(*steps))
    order = np.lexsort((stored[:, 1], stored[:, 0]))
    return stored[order], in_use[order]


def _stored_steps(
    txn: ReadTxn, counts: Callable[[list[bytes], list[bytes]], Any]
) -> Iterator[tuple[Codes, npt.NDArray[np.int64]]]:
    """Yield (codes, `in_use`) as stored; `counts` decodes the rows of a step."""
    for keys, values in txn.steps(t.GC_REFCOUNTS, STEP_ROWS):
        rows = _packed(t.GC_REFCOUNTS, keys)
        codes = encode(rows["origin_db_id"], rows["kind"], rows["delta_id"], rows["id"], rows["generation"])
        yield codes, counts(keys, values)["in_use"].astype(np.int64)


def _counts(keys: list[bytes], values: list[bytes]) -> Any:
    """Return rows of counts; a damaged row has `UNREADABLE` references, which no artifact has."""
    try:
        return t.GC_REFCOUNTS.rows.columns(keys, values)
    except ManifestDamaged:
        counts = np.zeros(len(keys), [("in_use", np.int64), ("pending_upload", np.int64)])
        for place, (key, raw) in enumerate(zip(keys, values, strict=True)):
            try:
                row = t.GC_REFCOUNTS.rows.decode(key, raw)
                counts[place] = row.in_use, row.pending_upload
            except ManifestDamaged:
                counts[place] = UNREADABLE, 0
        return counts


def _is_doomed(txn: ReadTxn, key: bytes) -> bool:
    try:
        row = txn.refcount(unpack_artifact(key))
    except ManifestDamaged:
        return False
    return row is not None and not (row.in_use or row.pending_upload)


def _compare_catalog(held: Codes, catalog: Codes, txn: ReadTxn) -> Iterator[Finding]:
    """Check S2 and R4: a held artifact has a row; an artifact with a row is, or was, held."""
    rows, _ = tally(catalog)
    if np.array_equal(rows, held):
        return
    present = {(int(a), int(b)) for a, b in rows}
    wanted = {(int(a), int(b)) for a, b in held}
    for code in sorted(wanted - present):
        yield "S2", "a referenced artifact is not in the catalog", decode(code), None, False
    for code in sorted(present - wanted):
        artifact = decode(code)
        if artifact.kind is not ArtifactKind.NAMESPACE and txn.refcount(artifact) is None:
            yield "R4", "an unreferenced artifact will never be deleted", artifact, None, True


def _own_references(txn: ReadTxn) -> list[int]:
    """Return the namespaces that hold themselves, so that they stay while they are empty.

    These are the namespaces of the current owner epoch (A1) and places with a name, unless they were dropped.
    """
    epoch = txn.owner_epoch()
    rows = ((key[0], row) for key, row in txn.scan(t.REMOTE_NAMESPACE) if not row.dropped_at_ms)
    return [number for number, row in rows if row.holds_itself or (epoch and row.owner_epoch == epoch)]


def _intact_zeros(txn: ReadTxn, damaged: list[bytes]) -> Iterator[bytes]:
    """Yield the keys of `gc_zero` in order; keys of damaged rows go into `damaged`, and count as missing."""
    for key, raw in txn.raw_scan(t.GC_ZERO):
        try:
            t.GC_ZERO.rows.decode(key, raw)
        except ManifestDamaged:
            damaged.append(key)
        else:
            yield key


def _wrong_zero(txn: ReadTxn, key: bytes, *, is_doomed: bool) -> Finding:
    """Return the finding of R3 for a row of `gc_zero` that is missing, superfluous or damaged."""
    artifact = unpack_artifact(key)
    row = txn.refcount(artifact) if is_doomed else None
    fix = CorrectIndex("gc_zero", key, None if row is None else row.zero_since_ms)
    return "R3", "gc_zero is wrong", artifact, fix, False


def _wrong_count(have: int, held: int) -> str:
    """Return the text of R1 for a wrong count."""
    return (
        f"the row of its counts is damaged, held {held} times"
        if have < 0
        else f"in_use is {have}, but it is held {held} times"
    )


def outstanding_uploads(txn: ReadTxn) -> dict[bytes, int]:
    """Return how many upload jobs of each artifact have not ended."""
    uploads: dict[bytes, int] = {}
    for _, job in txn.scan(t.JOB_QUEUE):
        if job.artifact is not None and job.state not in TERMINAL_JOB_STATES:
            key = t.GC_REFCOUNTS.key.pack(*job.artifact)
            uploads[key] = uploads.get(key, 0) + 1
    return uploads
