"""What verifications have recorded, for people: damaged artifacts in their rows, the rest in a row of its own.

Reads the manifest and nothing else. Pure functions of a read transaction.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import msgspec

from quire.core.ids import ArtifactKey, ArtifactKind
from quire.durable.names import object_key, parse_object_key
from quire.manifest import tables as t
from quire.manifest.reads import ReadTxn
from quire.manifest.records import JobKind, JobState, VerifyState


@dataclass(frozen=True, slots=True)
class LastVerification:
    """The last verification of a whole store that came to its end."""

    ended_at_ms: int
    problems: list[str]
    """What it found in files that have no row; artifacts have their own."""


def file_problems(result: dict[str, Any]) -> list[str]:
    """What is wrong with files that are no artifacts, by a job's result; a line each."""
    return [f"{problem['kind']} {problem['path']}: {problem['what']}" for problem in result.get("problems", [])]


def shares_bytes(key: ArtifactKey, row: Any) -> bool:
    """Whether an artifact's bytes are another's."""
    if key.kind is not ArtifactKind.BASE or not row.suffix:
        return False
    named = parse_object_key(row.suffix)
    return named is not None and named.kind is ArtifactKind.WAL


def artifacts(txn: ReadTxn) -> Iterator[tuple[ArtifactKey, Any]]:
    """(key, row) of every artifact that has bytes, each once: at its origin."""
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
    """(name, MISSING or ALTERED) of artifacts whose last verification was bad."""
    bad = (VerifyState.MISSING, VerifyState.ALTERED)
    return [(object_key(key), row.verify_state.name) for key, row in artifacts(txn) if row.verify_state in bad]


def last_verification(txn: ReadTxn) -> LastVerification | None:
    """The newest one that looked at everything; `None` if nothing tells of any. Before quire kept it, jobs told."""
    row = txn.get(t.META, t.LAST_VERIFICATION)
    if row is not None:
        return LastVerification(row.number, msgspec.json.decode(row.text, type=list[str]))
    last: LastVerification | None = None
    for (_, job_id), _ in txn.scan(t.JOBS_BY_STATE, JobState.SUCCEEDED):
        job = txn.job(job_id)
        if job is not None and job.kind is JobKind.VERIFY and not job.db_id and job.result:
            result = msgspec.msgpack.decode(job.result)
            if result.get("complete") and "problems" in result:
                last = LastVerification(job.finished_at_ms, [*result.get("logs", []), *file_problems(result)])
    return last
