"""The store as a whole, for the dashboard: the JSON under `/api/overview`, `/api/lineage`, `/api/jobs`, `/api/verification` and
`/api/feed`. docs/dashboard.md describes the shapes.

Rules
  1. Bounded: lists have a limit, and state how much they leave out.
  2. A view uses short read transactions, and none is open while it is sent.

Threads: any; pure functions of a `WatchedStore`.
"""

from __future__ import annotations

import shutil
from importlib.metadata import version
from itertools import islice
from typing import Any, Unpack

import msgspec

from quire.core.json_values import plain
from quire.manifest import tables as t
from quire.manifest.jobqueue import Job
from quire.manifest.reads import ReadTxn
from quire.manifest.records import TERMINAL_JOB_STATES, DbKind, DbRecord, DbStatus, JobKind, JobRecord, JobState
from quire.manifest.snapshots import with_ancestors
from quire.service.values import DatabaseFilterOptions
from quire.service.web import changes
from quire.service.web.catalog_totals import survey_of
from quire.service.web.dashboard_state import WatchedStore

DATABASES_MAX = 1_000
SNAPSHOTS_MAX = 200
"""The newest snapshots of one database in the lineage."""
JOBS_MAX = 200
SEARCHED_MAX = 10_000
"""The newest jobs of the store among which those of one database are looked for."""
OUTSTANDING_MAX = 500


# ── the store ─────────────────────────────────────────────────────────────────────────────────────────────────────────
def overview(watched: WatchedStore) -> dict[str, Any]:
    """Return everything that the first page shows."""
    store, sums = watched.store, watched.survey().sums
    infos = store.databases(limit=DATABASES_MAX)
    disk = shutil.disk_usage(store.path)
    with watched.manifest.read() as txn:
        rows = [_database_row(watched, txn, info) for info in infos]
    opened, space = watched.open_figures(), watched.space()
    # For open databases the engine's figures are newer than those of the catalogs.
    closed_bytes = max(sums.unabsorbed_bytes - sum(watched.survey_of(db_id).unabsorbed_bytes for db_id in opened), 0)
    return {
        "store": watched.info(),
        "archive_dollars_per_month": archive.dollars_per_month
        if (archive := watched.info().archive) is not None
        else 0,
        "quire": version("quire"),
        "now_ms": watched.clock.now_ms(),
        "started_ms": watched.started_ms,
        "databases": rows,
        "databases_left_out": _left_out(watched, len(rows)),
        "databases_damaged": [{"db_id": db_id, "name": name} for db_id, name in watched.damaged().items()],
        "wal_bytes": closed_bytes + sum(figures.wal_bytes for figures in opened.values()),
        "segments_blocked": sum(figures.segments_blocked for figures in opened.values()),
        "jobs": watched.cached.get("states", lambda: _states(watched)),
        "tiers": {name: {"artifacts": count, "bytes": sums.tier_bytes[name]} for name, count in sums.tiers.items()},
        "segments": sums.segments,
        "verified": sums.verified,
        "readers": watched.readers(),
        "cursors": _cursors(watched),
        "disk_free_bytes": disk.free,
        "disk_bytes": disk.total,
        "space": {"total_bytes": space.total_bytes, "others": space.others},
    }


def databases(watched: WatchedStore, **wanted: Unpack[DatabaseFilterOptions]) -> dict[str, Any]:
    """Return a page of the selected databases; `after` begins the next one."""
    infos, after = _page(watched, wanted)
    with watched.manifest.read() as txn:
        rows = [_database_row(watched, txn, info) for info in infos]
    return {"databases": rows, "after": after}


_STATES = {"pending": JobState.PENDING, "in_flight": JobState.IN_FLIGHT, "failed": JobState.FAILED_PERMANENT}


def _states(watched: WatchedStore) -> dict[str, int]:
    with watched.manifest.read() as txn:
        return {word: sum(1 for _ in txn.raw_scan(t.JOBS_BY_STATE, state)) for word, state in _STATES.items()}


def _database_row(watched: WatchedStore, txn: ReadTxn, info: Any) -> dict[str, Any]:
    one, wal = survey_of(txn, info.db_id), txn.wal_state(info.db_id)
    figures, leases = watched.open_figures().get(info.db_id), watched.leases(info.db_id)
    size_bytes = one.size_bytes or watched.files_bytes(info.db_id, info.kind)
    newest, _ = watched.newest(info.db_id, wal)
    return {
        **plain(info),
        "size_bytes": size_bytes,
        "disk_bytes": watched.space().databases.get(info.db_id, 0),
        "chunks": one.chunks,
        "deltas": one.deltas,
        "segments": one.segments,
        "wal_bytes": figures.wal_bytes if figures else one.unabsorbed_bytes,
        "wal_pages": figures.page_index_rows if figures else one.unabsorbed_pages,
        "last_lsn": newest,
        "checkpointed_lsn": wal.checkpointed_lsn if wal else 0,
        "checkpointed_at_ms": wal.last_success_at_ms if wal else 0,
        "floor_lsn": min([lease.lsn for lease in leases], default=newest),
        "readers": len(leases),
        "segments_blocked": figures.segments_blocked if figures else 0,
        "damaged": one.verified["missing"] + one.verified["altered"],
    }


def _cursors(watched: WatchedStore) -> list[dict[str, Any]]:
    return [{**plain(cursor), "lag": cursor.lag} for cursor in watched.manifest.feed.cursors()]


# ── lineage ───────────────────────────────────────────────────────────────────────────────────────────────────────────
def lineage(watched: WatchedStore, **wanted: Unpack[DatabaseFilterOptions]) -> dict[str, Any]:
    """Return a page of databases with their snapshots and ancestors; `after` begins the next one."""
    infos, after = _page(watched, wanted)
    with watched.manifest.read() as txn:
        records_or_none = ((info.db_id, txn.database(info.db_id)) for info in infos)
        records, _ = with_ancestors(txn, [(db_id, record) for db_id, record in records_or_none if record is not None])
        shown = [_lineage_row(txn, *item) for item in records.items()]
    live = sum(not record.is_dropped for record in records.values())
    return {"databases": shown, "left_out": _left_out(watched, live), "after": after}


def _page(watched: WatchedStore, wanted: DatabaseFilterOptions) -> tuple[list[Any], str]:
    """Return a page of the selected databases, and the name that begins the next one."""
    limit = wanted.get("limit", DATABASES_MAX)
    more: DatabaseFilterOptions = {**wanted, "limit": limit + 1}  # one more, to find out whether there is a next page
    infos = watched.store.databases(**more)
    return infos[:limit], infos[limit - 1].name if len(infos) > limit else ""


def _left_out(watched: WatchedStore, shown: int) -> int:
    """Return how many live databases of the store are not shown."""
    counts: dict[str, int] = watched.info().databases
    return max(0, sum(counts.values()) - shown)


def _lineage_row(txn: ReadTxn, db_id: int, record: DbRecord) -> dict[str, Any]:
    snapshots = [
        {
            "snapshot_id": snapshot_id,
            "name": row.name,
            "kind": plain(row.kind),
            "created_at_ms": row.created_at_ms,
            "anchor_lsn": row.anchor_lsn,
            "expires_at_ms": row.expires_at_ms,
        }
        for (_, snapshot_id), row in txn.scan(t.SNAPSHOT_INDEX, db_id)
    ]
    return {
        "db_id": db_id,
        "name": record.title,
        "kind": plain(record.kind),
        "status": plain(DbStatus.TOMBSTONED if record.is_dropped else record.status),
        "created_at_ms": record.created_at_ms,
        "parent_db_id": record.parent_db_id,
        "parent_snapshot_id": record.parent_snapshot_id,
        "snapshots": snapshots[-SNAPSHOTS_MAX:],
        "snapshots_left_out": max(0, len(snapshots) - SNAPSHOTS_MAX),
    }


# ── jobs ──────────────────────────────────────────────────────────────────────────────────────────────────────────────
def jobs(watched: WatchedStore, db_id: int = 0) -> dict[str, Any]:
    """Return the outstanding jobs and the newest ones; of one database if `db_id` is given."""
    with watched.manifest.read() as txn:
        by_id: dict[int, Job] = {}
        for state in (JobState.IN_FLIGHT, JobState.PENDING):
            for (_, job_id), _ in islice(txn.scan(t.JOBS_BY_STATE, state), OUTSTANDING_MAX):
                if (record := txn.job(job_id)) is not None:
                    by_id[job_id] = Job(job_id, record, txn.get(t.JOB_LEASES, job_id))
        for key, raw in islice(txn.raw_scan_back(t.JOB_QUEUE), SEARCHED_MAX if db_id else JOBS_MAX):
            (job_id,) = t.JOB_QUEUE.key.unpack(key)
            record = t.JOB_QUEUE.rows.decode(key, raw)
            if not db_id or record.db_id == db_id:
                by_id.setdefault(job_id, Job(job_id, record))
        total = txn.count(t.JOB_QUEUE)
        names = txn.database_names(job.db_id for job in by_id.values())
    shown = [by_id[job_id] for job_id in sorted(by_id, reverse=True) if not db_id or by_id[job_id].db_id == db_id]
    return {
        "now_ms": watched.clock.now_ms(),
        "jobs": [job_row(job, names) for job in shown],
        "left_out": 0 if db_id else total - len(by_id),
    }


def job_row(job: Job, names: dict[int, str]) -> dict[str, Any]:
    """Return one job as JSON."""
    record: JobRecord = job.record
    return {
        "job_id": job.job_id,
        "kind": plain(job.kind),
        "state": plain(job.state),
        "db_id": job.db_id,
        "database": names.get(job.db_id, ""),
        "created_at_ms": record.created_at_ms,
        "started_at_ms": record.started_at_ms,
        "finished_at_ms": record.finished_at_ms,
        "not_before_ms": record.not_before_ms,
        "attempt": record.attempt,
        "max_attempts": record.max_attempts,
        "error": record.error,
        "worker": job.lease.worker if job.lease else "",
        "done": job.lease.done if job.lease else 0,
        "total": job.lease.total if job.lease else 0,
        "result": _result(record),
        "may_retry": job.state in (JobState.FAILED_PERMANENT, JobState.CANCELLED),
        "may_cancel": job.state not in TERMINAL_JOB_STATES,
    }


def _result(record: JobRecord) -> dict[str, Any]:
    """Return the numbers in a job's result; its lists and texts are left to `quire jobs show`."""
    try:
        result = msgspec.msgpack.decode(record.result) if record.result else {}
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return {}
    if not isinstance(result, dict):
        return {}
    return {name: value for name, value in result.items() if type(value) is int and value}


# ── verification ──────────────────────────────────────────────────────────────────────────────────────────────────────
def verification(watched: WatchedStore, **wanted: Unpack[DatabaseFilterOptions]) -> dict[str, Any]:
    """Return what was verified, when, and what was found damaged: of a page of databases, and in total."""
    totals, (infos, after) = watched.survey(), _page(watched, wanted)
    with watched.manifest.read() as txn:
        surveys = [(info, survey_of(txn, info.db_id)) for info in infos]
    rows = [
        {
            "db_id": info.db_id,
            "name": info.name,
            "artifacts": sum(one.verified.values()),
            "verified": one.verified,
            "oldest_verified_ms": one.oldest_verified_ms,
        }
        for info, one in surveys
        if info.kind is DbKind.PAGES or one.verified  # key-value sets have their own files and checks
    ]
    names = watched.names({artifact.db_id for artifact in totals.damaged})
    runs = [job for job in jobs(watched)["jobs"] if job["kind"] == plain(JobKind.VERIFY)]
    damaged = [{**plain(artifact), "database": names.get(artifact.db_id, "")} for artifact in totals.damaged]
    return {
        "now_ms": watched.clock.now_ms(),
        "totals": totals.sums.verified,
        "databases": rows,
        "databases_left_out": _left_out(watched, len(infos)),
        "after": after,
        "damaged": damaged,
        "damaged_left_out": totals.damaged_count - len(damaged),
        "jobs": runs[:20],
    }


# ── the feed ──────────────────────────────────────────────────────────────────────────────────────────────────────────
def feed(watched: WatchedStore, *, limit: int = 50, before: int = 0) -> dict[str, Any]:
    """Return the newest changes, and the cursors that follow them."""
    with watched.manifest.read() as txn:
        oldest, head = txn.feed_bounds()
        records = changes.recent(txn, limit, before=before)
    return {
        "oldest_sequence": oldest,
        "head_sequence": head,
        "changes": records,
        "cursors": _cursors(watched),
        "now_ms": watched.clock.now_ms(),
    }
