"""Lists databases one page at a time, by name, by newest change, or by size, without reading all of them where possible.

By name: the index of names is scanned from the start of the page, so a page costs the rows it shows and those a filter skips.
By newest change: the change feed is scanned backwards from its end; databases without a change in it come last, by name.
By size: every database is read once, and only the page is kept in memory.

Pure functions of a read transaction. Raises `InvalidInput`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from heapq import nlargest
from itertools import islice

from msgspec.structs import replace

from quire.core.errors import InvalidInput, ManifestDamaged
from quire.manifest import tables as t
from quire.manifest.change import CHANGE_LOG
from quire.manifest.op_effects import TOUCHES
from quire.manifest.reads import ReadTxn
from quire.manifest.records import DbRecord
from quire.service.values import DatabaseFilter
from quire.store.listing_by_name import Match, by_name, matching_record

SORTS = ("name", "written", "size")


def matching(txn: ReadTxn, wanted: DatabaseFilter) -> Iterator[Match]:
    """Return (id, record) of the live databases that match the filter, in its order, at most `limit` of them."""
    if wanted.sort not in SORTS:
        raise InvalidInput("unknown sort order", hint=f"one of {', '.join(SORTS)}", sort=wanted.sort)
    if wanted.after and wanted.sort != "name":
        raise InvalidInput("only a list by name continues after a name", hint='use sort="name"', sort=wanted.sort)
    order: dict[str, Callable[[ReadTxn, DatabaseFilter], Iterator[Match]]] = {
        "name": by_name,
        "written": _by_change,
        "size": _by_size,
    }
    return islice(order[wanted.sort](txn, wanted), wanted.limit or None)


def page_of(txn: ReadTxn, wanted: DatabaseFilter) -> tuple[list[Match], str]:
    """Return the matching databases, and the name of the last one if there are more than `limit`, else an empty string."""
    limit = wanted.limit
    found = list(matching(txn, replace(wanted, limit=limit + 1 if limit else 0)))
    is_cut = bool(limit) and len(found) > limit
    return (found[:limit], found[limit - 1][1].name) if is_cut else (found, "")


def is_whole(txn: ReadTxn, wanted: DatabaseFilter) -> bool:
    """Return whether the filter selects every database of the store, so that paging saves nothing."""
    is_chosen = wanted.prefix or wanted.kind or wanted.tag or wanted.after or wanted.sort != "name"
    return not is_chosen and (not wanted.limit or txn.count(t.DB) <= wanted.limit)


def _by_change(txn: ReadTxn, wanted: DatabaseFilter) -> Iterator[Match]:
    seen: set[int] = set()
    for key, raw in txn.raw_scan_back(CHANGE_LOG):
        try:
            record = CHANGE_LOG.rows.decode(key, raw)
        except ManifestDamaged:
            continue
        for op in record.operations:
            touches = TOUCHES.get(type(op))
            for db_id in touches.databases(op) if touches is not None else ():
                if db_id and db_id not in seen:
                    seen.add(db_id)
                    if (match := matching_record(txn, db_id, wanted)) is not None:
                        yield match
    yield from (match for match in by_name(txn, wanted) if match[0] not in seen)


def _by_size(txn: ReadTxn, wanted: DatabaseFilter) -> Iterator[Match]:
    sized = ((size_bytes(txn, *match), -match[0], match) for match in by_name(txn, wanted))
    ordered = nlargest(wanted.limit, sized) if wanted.limit else sorted(sized, reverse=True)
    return (match for _, _, match in ordered)


def size_bytes(txn: ReadTxn, db_id: int, record: DbRecord) -> int:
    """Return the size of a page database's newest published version, or of another database's segments and tables."""
    state = txn.wal_state(db_id)
    if record.page_size:
        return state.size_pages * record.page_size if state is not None else 0
    segments = sum(row.used_bytes for _, row in txn.scan(t.WAL_CATALOG, db_id))
    return segments + sum(row.size_bytes for _, row in txn.scan(t.LSM_CATALOG, db_id))
