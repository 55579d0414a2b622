"""The quick way to lists that scripts look at again and again: jobs ls, feed cursors.

The rules are those of `quire.cli.quick`. The fields, and the names of kinds and states, are those of `quire.manifest.records`,
in the same order; a test holds the two together.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

from quire.cli import feed, jobs
from quire.cli.command import Cli
from quire.cli.output import Listing, Ready
from quire.cli.quick import Looked
from quire.core.clock import SystemClock
from quire.manifest.glance import DB, Unfamiliar, record

_REQUIRED = DB["name"]
"""How a field without a default is marked."""

JOB: Mapping[str, Any] = {
    "kind": _REQUIRED, "db_id": _REQUIRED, "created_at_ms": _REQUIRED, "state": 1, "payload": b"", "attempt": 0,
    "max_attempts": 5, "not_before_ms": 0, "started_at_ms": 0, "finished_at_ms": 0, "error": "", "result": b"", "token": b"",
    "artifact": None, "failures": 0,
}  # fmt: skip
LEASE: Mapping[str, Any] = {
    "worker": _REQUIRED, "expires_at_ms": _REQUIRED, "heartbeat_at_ms": _REQUIRED, "done": 0, "total": 0,
}  # fmt: skip
CURSOR: Mapping[str, Any] = {
    "acked_sequence": _REQUIRED, "created_at_ms": _REQUIRED, "updated_at_ms": _REQUIRED, "name": "", "state": 1, "ttl_ms": 0,
    "max_lag": 0, "lost_reason": "",
}  # fmt: skip

JOB_KINDS = (
    "CHECKPOINT", "MERGE", "DELETE", "UPLOAD", "EVICT", "HYDRATE", "VERIFY", "RETENTION", "TRUNCATE", "COMPACTION", "BUNDLE",
    "SWEEP", "AUDIT", "RESTORE", "STATS",
)  # fmt: skip
JOB_STATES = ("PENDING", "IN_FLIGHT", "SUCCEEDED", "FAILED_PERMANENT", "CANCELLED")
CURSOR_STATES = ("LIVE", "LOST")
"""The names of the values 1, 2, …"""

JOBS_MAX = 2_000
"""Where there are more, msgspec has read them before Python has: loading it pays."""


def jobs_ls(cli: Cli, state: str, limit: int) -> Listing:
    """As `quire.cli.jobs.ls`, for all databases."""
    wanted = JOB_STATES[_state_number(state)] if state else ""
    with Looked(cli) as store:
        if store.count("job_queue") > JOBS_MAX:
            raise Unfamiliar("so many jobs")
        names = {db_id: each.name for db_id, each in store.databases().items()}
        leases = {_number(key): record("job_leases", key, raw, LEASE) for key, raw in store.rows("job_leases")}
        found: Any = [
            _job(_number(key), record("job_queue", key, raw, JOB), leases) for key, raw in store.rows("job_queue")
        ]
    chosen = [each for each in found if wanted in ("", each.state.name)]
    return jobs.listing(chosen, names, SystemClock().now_ms(), state, limit)


def _state_number(text: str) -> int:
    """The place of a state among its names; raises where there is none."""
    longer = {short: name for name, short in jobs.STATES.items()}
    asked = text.lower().replace("-", "_")
    return JOB_STATES.index(longer.get(asked, asked).upper())


def _job(job_id: int, row: SimpleNamespace, leases: dict[int, SimpleNamespace]) -> SimpleNamespace:
    kind, state = _named(JOB_KINDS, row.kind), _named(JOB_STATES, row.state)
    return SimpleNamespace(job_id=job_id, record=row, lease=leases.get(job_id), kind=kind, state=state, db_id=row.db_id)


def feed_cursors(cli: Cli) -> Listing:
    """As `quire.cli.feed.cursors`."""
    with Looked(cli) as store:
        oldest, head = store.feed_bounds()
        found: Any = [
            _cursor(_number(key), record("change_cursors", key, raw, CURSOR), oldest, head)
            for key, raw in store.rows("change_cursors")
        ]
    return feed.listing(found, [Ready({**vars(each), "state": each.state.name.lower()}) for each in found])


def _cursor(cursor_id: int, row: SimpleNamespace, oldest: int, head: int) -> SimpleNamespace:
    """With the fields of `CursorInfo`, and what follows from them."""
    return SimpleNamespace(
        cursor_id=cursor_id,
        name=row.name,
        state=_named(CURSOR_STATES, row.state),
        acked_sequence=row.acked_sequence,
        oldest_sequence=oldest,
        head_sequence=head,
        created_at_ms=row.created_at_ms,
        updated_at_ms=row.updated_at_ms,
        ttl_ms=row.ttl_ms,
        max_lag=row.max_lag,
        lost_reason=row.lost_reason,
        lag=max(head - row.acked_sequence, 0),
        next_sequence=max(row.acked_sequence + 1, oldest),
    )


def _number(key: bytes) -> int:
    return int.from_bytes(key, "big")


def _named(names: tuple[str, ...], number: int) -> SimpleNamespace:
    """What has the name of an enumeration's value; raises for one that is not familiar."""
    if number < 1:
        raise Unfamiliar("a value of an enumeration")
    return SimpleNamespace(name=names[number - 1])
