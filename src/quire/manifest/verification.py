"""Recorded results of verifications, for display: damaged artifacts in their own rows, the rest in a row of `meta`.

Threads: pure functions of a read transaction; they read the manifest and nothing else.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import msgspec

from quire.core.decoding import described
from quire.core.ids import ArtifactKey, ArtifactKind
from quire.durable.names import object_key, parse_object_key
from quire.manifest import tables as t
from quire.manifest.reads import ReadTxn
from quire.manifest.records import VerifyState


@dataclass(frozen=True, slots=True)
class LastVerification:
    """The last completed verification of a whole store."""

    ended_at_ms: int
    problems: list[str]
    """What it found in files without a row; artifacts have their own rows."""


def file_problems(result: dict[str, Any]) -> list[str]:
    """Return the problems of files that are not artifacts from a job's result, one line each."""
    return [f"{problem['kind']} {problem['path']}: {problem['what']}" for problem in result.get("problems", [])]


def shares_bytes(key: ArtifactKey, row: Any) -> bool:
    """Return whether an artifact's bytes belong to another artifact."""
    if key.kind is not ArtifactKind.BASE or not row.suffix:
        return False
    named = parse_object_key(row.suffix)
    return named is not None and named.kind is ArtifactKind.WAL


def artifacts(txn: ReadTxn) -> Iterator[tuple[ArtifactKey, Any]]:
    """Yield (key, row) of every artifact that has bytes, once, at its origin."""
    for (origin, slot, generation), chunk in txn.scan(t.CHUNK_CATALOG):
        key = ArtifactKey(origin, ArtifactKind.BASE, slot, generation)
        if not shares_bytes(key, chunk):
            yield key, chunk
    for (origin, slot, generation, number), delta in txn.scan(t.CHUNK_DELTA_INDEX):
        yield ArtifactKey(origin, ArtifactKind.DELTA, slot, generation, number), delta
    for (db_id, segment_id), segment in txn.scan(t.WAL_CATALOG):
        if segment.origin_db_id == db_id:
            yield ArtifactKey(db_id, ArtifactKind.WAL, segment_id, 0), segment


def damaged_artifacts(txn: ReadTxn) -> list[tuple[str, str]]:
    """Return (name, MISSING or ALTERED) of artifacts that failed their last verification."""
    bad = (VerifyState.MISSING, VerifyState.ALTERED)
    return [(object_key(key), row.verify_state.name) for key, row in artifacts(txn) if row.verify_state in bad]


def last_verification(txn: ReadTxn) -> LastVerification | None:
    """Return the last complete verification of this directory; `None` if none is recorded."""
    row = txn.get(t.META, t.LAST_VERIFICATION)
    if row is None:
        return None
    return LastVerification(row.number, msgspec.json.decode(row.text, type=described(list[str])))
