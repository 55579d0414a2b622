"""The page of one database: the JSON under `/api/databases/NAME`. docs/dashboard.md describes its shape.

Rules
  1. Bounded: at most `SEGMENTS_MAX` segments, `SLOTS_MAX` slots and `AUDIT_MAX` events, the newest or first ones, with the
     number of those left out.
  2. Readers are those of this process, of processes that read the store alongside it, and clients (M10).

Threads: any; pure functions of a `WatchedStore`. Raises `UnknownDatabase`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import islice
from typing import Any

from quire.core.json_values import plain
from quire.core.limits import SLOTS_PER_LEAF
from quire.durable.names import object_key
from quire.manifest import tables as t
from quire.manifest.reads import ReadTxn
from quire.manifest.records import DbKind, WalState
from quire.manifest.slots import Chain, unpack_leaf
from quire.service.web import overview
from quire.service.web.catalog_totals import state_name
from quire.service.web.dashboard_state import FILES_MAX, WatchedStore
from quire.service.web.metrics import open_kv, open_stream
from quire.service.web.streams import stream_figures, stream_page

SEGMENTS_MAX = 400
SLOTS_MAX = 4_096
CHAINS_MAX = 20
AUDIT_MAX = 50
SNAPSHOTS_MAX = 500


def database_page(watched: WatchedStore, name: str) -> dict[str, Any]:
    """Return everything that the page of a database shows."""
    info: Any = watched.store.database(name)
    one = watched.survey_of(info.db_id)
    page = {
        "now_ms": watched.clock.now_ms(),
        "database": {
            **plain(info),
            "size_bytes": one.size_bytes or watched.files_bytes(info.db_id, info.kind),
            "disk_bytes": watched.space().databases.get(info.db_id, 0),
        },
        "tiers": {tier: {"artifacts": n, "bytes": one.tier_bytes[tier]} for tier, n in one.tiers.items()},
        "verified": one.verified,
        "snapshots": _snapshots(watched, info.db_id),
        "retention": watched.manifest.retention.get(info.db_id),
        "audit": _audit(watched, info.db_id),
        "jobs": overview.jobs(watched, info.db_id)["jobs"][:20],
        "why": why(watched, name),
    }
    if info.kind is DbKind.PAGES:
        page["pages"] = _pages(watched, info)
        page["followed"] = plain(watched.store.followers.file(name)) if info.follows else None
    elif info.kind is DbKind.STREAM:
        page["stream"] = stream_page(watched, info.db_id)
        opened = open_stream(watched, info.db_id)
        page["figures"] = stream_figures(opened.info()) if opened is not None else None
    else:
        files = watched.files(info.db_id, info.kind)
        page["figures"] = plain(kv.stats()) if (kv := open_kv(watched, info.db_id)) is not None else None
        page["files"] = [{"path": path, "bytes": size} for path, size in sorted(files)[:SEGMENTS_MAX]]
        page["files_left_out"] = max(0, len(files) - SEGMENTS_MAX)
        page["files_at_least"] = len(files) >= FILES_MAX
    return page


def why(watched: WatchedStore, subject: str) -> dict[str, Any]:
    """Return what keeps a subject, and what would release it."""
    with watched.manifest.read() as txn:
        explained: dict[str, Any] = plain(watched.explain(txn, subject))
    return explained


# ── versions ──────────────────────────────────────────────────────────────────────────────────────────────────────────
def _snapshots(watched: WatchedStore, db_id: int) -> list[dict[str, Any]]:
    """Return the newest snapshots, oldest first, each with the decision of its retention policy."""
    plan = watched.manifest.retention.plan(db_id)
    return [
        {**plain(decision.snapshot), "keep": decision.keep, "why": decision.why}
        for decision in plan.decisions[-SNAPSHOTS_MAX:]
    ]


def _audit(watched: WatchedStore, db_id: int) -> list[dict[str, Any]]:
    """Return the audit entries of a database, newest first."""
    return [plain(entry) for entry in reversed(watched.manifest.audit(db_id, newest=AUDIT_MAX))]


# ── page databases ────────────────────────────────────────────────────────────────────────────────────────────────────
def _pages(watched: WatchedStore, info: Any) -> dict[str, Any]:
    readers = _readers(watched, info.db_id)
    with watched.manifest.read() as txn:
        wal = txn.wal_state(info.db_id)
        lowest = min((reader["lsn"] for reader in readers), default=None)
        segments = [_segment(segment_id, row, lowest) for (_, segment_id), row in txn.scan(t.WAL_CATALOG, info.db_id)]
        slots = list(islice(_slots(txn, info.db_id), SLOTS_MAX + 1))
        chains = [
            _chain(txn, *slot) for slot in sorted(slots, key=_depth, reverse=True)[:CHAINS_MAX] if len(slot[1]) > 1
        ]
        cells = [_cell(txn, *slot) for slot in slots[:SLOTS_MAX]]
    figures = watched.open_figures().get(info.db_id)
    newest_lsn, size_pages = watched.newest(info.db_id, wal)
    return {
        "wal": wal,
        "newest_lsn": newest_lsn,
        "size_pages": size_pages,
        "wal_pages": figures.page_index_rows if figures else watched.survey_of(info.db_id).unabsorbed_pages,
        "figures": figures,
        "floor_lsn": lowest if lowest is not None else newest_lsn,
        "readers": readers,
        "segments": segments[-SEGMENTS_MAX:],
        "segments_left_out": max(0, len(segments) - SEGMENTS_MAX),
        "states": [{"at_ms": at_ms, "segments": counts} for at_ms, counts in watched.history.of(info.db_id)],
        "slots": cells,
        "slots_left_out": len(slots) > SLOTS_MAX,
        "chain_lengths": Counter(str(len(chain)) for _, chain in slots),
        "chains": chains,
    }


def _readers(watched: WatchedStore, db_id: int) -> list[dict[str, Any]]:
    """Return the readers, lowest version first (rule 2)."""
    return [
        {"reader_id": lease.reader_id, "opened_at_ms": lease.opened_at_ms, **plain(lease.info)}
        for lease in watched.leases(db_id)[:SEGMENTS_MAX]
    ]


def _segment(segment_id: int, row: Any, lowest: int | None) -> dict[str, Any]:
    blocked = lowest is not None and row.state is WalState.INDEXED and row.last_lsn > lowest
    return {
        "segment_id": segment_id,
        "origin_db_id": row.origin_db_id,
        "state": state_name(row.state),
        "created_at_ms": row.created_at_ms,
        "sealed_at_ms": row.sealed_at_ms,
        "first_lsn": row.first_lsn,
        "last_lsn": row.last_lsn,
        "used_bytes": row.used_bytes,
        "file_bytes": row.file_bytes,
        "frames": row.frame_count,
        "tier": state_name(row.residency),
        "verified": state_name(row.verify_state),
        "blocked": blocked,
    }


# ── the chunk map ─────────────────────────────────────────────────────────────────────────────────────────────────────
def _slots(txn: ReadTxn, db_id: int) -> Iterator[tuple[int, Chain]]:
    for (_, leaf), held in txn.scan(t.LIVE_LEAF, db_id):
        row = txn.get(t.SLOT_LEAF, held.origin_db_id, leaf, held.generation)
        if row is not None:
            for offset, chain in sorted(unpack_leaf(row.entries).items()):
                yield leaf * SLOTS_PER_LEAF + offset, chain


def _depth(slot: tuple[int, Chain]) -> int:
    return len(slot[1])


def _cell(txn: ReadTxn, slot: int, chain: Chain) -> dict[str, Any]:
    """Return a slot for the map: coloured by its newest generation, or by where its base is."""
    base = txn.get(t.CHUNK_CATALOG, chain[0].origin_db_id, slot, chain[0].generation)
    return {
        "slot": slot,
        "origin_db_id": chain[0].origin_db_id,
        "generation": chain[-1].generation,
        "links": len(chain),
        "bytes": base.size_bytes if base else 0,
        "tier": state_name(base.residency) if base else "",
        "verified": state_name(base.verify_state) if base else "",
        "covered_lsn": chain[-1].covered_lsn,
    }


def _chain(txn: ReadTxn, slot: int, chain: Chain) -> dict[str, Any]:
    links = []
    for link in chain:
        row = txn.artifact(link.artifact(slot))
        links.append(
            {
                "object": object_key(link.artifact(slot)),
                "kind": link.kind.name.lower(),
                "generation": link.generation,
                "covered_lsn": link.covered_lsn,
                "bytes": row.size_bytes if row is not None else 0,
                "pages": row.page_count if row is not None else 0,
            }
        )
    return {"slot": slot, "links": links}
