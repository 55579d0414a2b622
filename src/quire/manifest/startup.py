"""What the owner learns from the manifest when it opens a store.

Order: open → migrate → check → rehydrate → start the writer. Nothing is served before the check has
passed; a store that breaks a rule is refused with the rows named, or repaired if the caller asked for it.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from typing import TYPE_CHECKING

import msgspec

from quire.core.errors import ManifestDamaged
from quire.manifest import tables as t
from quire.manifest.check import closes
from quire.manifest.ops.base import Counter
from quire.manifest.reads import ReadTxn
from quire.manifest.records import DbRecord, DbStatus, JobRecord, JobState, WalStateRecord

if TYPE_CHECKING:
    from quire.manifest.check import Problem

SHOWN = 5
"""Problems named in an error; the rest are counted."""


class Rehydrated(msgspec.Struct, frozen=True):
    """The state that lives on in memory."""

    databases: dict[int, DbRecord] = msgspec.field(default_factory=dict)
    wal_states: dict[int, WalStateRecord] = msgspec.field(default_factory=dict)
    pending_jobs: dict[int, JobRecord] = msgspec.field(default_factory=dict)
    in_flight_jobs: dict[int, JobRecord] = msgspec.field(default_factory=dict)
    next_ids: dict[Counter, int] = msgspec.field(default_factory=dict)


def rehydrate(txn: ReadTxn) -> Rehydrated:
    """Read the live databases, their WAL states, unfinished jobs and id watermarks."""
    state = Rehydrated()
    for db_id, record in txn.databases():
        if record.status is not DbStatus.TOMBSTONED:
            state.databases[db_id] = record
    for (db_id, _), wal in txn.scan(t.WAL_STATE):
        if db_id in state.databases:
            state.wal_states[db_id] = wal
    for job_state, jobs in ((JobState.PENDING, state.pending_jobs), (JobState.IN_FLIGHT, state.in_flight_jobs)):
        for (_, job_id), _ in txn.scan(t.JOBS_BY_STATE, job_state):
            job = txn.job(job_id)
            assert job is not None, "check has just compared this index with its table"
            jobs[job_id] = job
    for counter in Counter:
        with suppress(ManifestDamaged):  # `allocate` refuses it
            state.next_ids[counter] = txn.next_id(counter)
    return state


def refuse(problems: Iterable[Problem], path: str) -> None:
    """Raise if any of the problems endangers data beyond one database or counter."""
    bad = [problem for problem in problems if not (problem.leak or problem.contained or closes(problem))]
    if bad:
        named = "; ".join(map(str, bad[:SHOWN])) + (f"; and {len(bad) - SHOWN} more" if len(bad) > SHOWN else "")
        mendable = all(problem.fix is not None for problem in bad)
        raise ManifestDamaged(
            f"the manifest breaks its rules: {named}",
            hint="`quire manifest check --repair` mends it" if mendable else "restore the manifest from a backup",
            path=path,
            problems=len(bad),
        )
