"""Lists databases one page at a time, by name, by newest change, or by size, without reading all of them where possible.

By name: the index of names is scanned from the start of the page, so a page costs the rows it shows and those a filter skips.
By newest change: the change feed is scanned backwards from its end, and the last record that names a database is its newest
change: a published commit, a sealed segment, a flushed table, but also a rename, a snapshot or a fork. The owner adds appends
to open streams, which have no record until their segment is sealed. Databases without a record come last, by name.
By size: every database is read once, and only the page is kept in memory.

Pure functions of a read transaction. Raises `InvalidInput`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from heapq import merge, nlargest
from itertools import islice
from operator import itemgetter

from msgspec.structs import replace

from quire.core.errors import InvalidInput, ManifestDamaged
from quire.manifest import tables as t
from quire.manifest.change import CHANGE_LOG
from quire.manifest.op_effects import TOUCHES
from quire.manifest.reads import ReadTxn
from quire.service.values import DatabaseFilter
from quire.store.exclusive_artifacts import held_bytes
from quire.store.kind_names import kind_named
from quire.store.listing_by_name import Match, by_name, matching_record

SORTS = ("name", "written", "size")

Write = tuple[int, int]
"""(time in milliseconds, database)."""


def matching(txn: ReadTxn, wanted: DatabaseFilter, appends: Callable[[], Mapping[int, int]] = dict) -> Iterator[Match]:
    """Return (id, record) of the live databases that match the filter, in its order, at most `limit` of them.

    `appends` is called if the order needs it, and returns database → time in milliseconds of a write that may not be in the
    feed yet (`StreamEngine.last_appends`).
    """
    wanted = checked(wanted)
    order: dict[str, Callable[[ReadTxn, DatabaseFilter], Iterator[Match]]] = {
        "name": by_name,
        "written": partial(_by_change, appends),
        "size": _by_size,
    }
    return islice(order[wanted.sort](txn, wanted), wanted.limit or None)


def checked(wanted: DatabaseFilter) -> DatabaseFilter:
    """Return the filter with its kind as the manifest names it. Raises `InvalidInput` for what no list can have."""
    if wanted.sort not in SORTS:
        raise InvalidInput("unknown sort order", hint=f"one of {', '.join(SORTS)}", sort=wanted.sort)
    if wanted.after and wanted.sort != "name":
        raise InvalidInput("only a list by name continues after a name", hint='use sort="name"', sort=wanted.sort)
    if wanted.limit < 0:
        raise InvalidInput("the limit is negative", hint="0 lists everything", limit=wanted.limit)
    return replace(wanted, kind=kind_named(wanted.kind).name.lower()) if wanted.kind else wanted


def page_of(txn: ReadTxn, wanted: DatabaseFilter) -> tuple[list[Match], str]:
    """Return the matching databases, and the name of the last one if there are more than `limit`, else an empty string."""
    limit = checked(wanted).limit
    rows = list(matching(txn, replace(wanted, limit=limit + 1 if limit else 0)))
    is_cut = bool(limit) and len(rows) > limit
    return (rows[:limit], rows[limit - 1][1].name) if is_cut else (rows, "")


def is_whole(txn: ReadTxn, wanted: DatabaseFilter) -> bool:
    """Return whether the filter selects every database of the store, so that paging saves nothing."""
    is_chosen = wanted.prefix or wanted.kind or wanted.tag or wanted.after or wanted.sort != "name"
    return not is_chosen and (not wanted.limit or txn.count(t.DB) <= wanted.limit)


def _by_change(appends: Callable[[], Mapping[int, int]], txn: ReadTxn, wanted: DatabaseFilter) -> Iterator[Match]:
    seen: set[int] = set()
    for _, db_id in merge(_appended(appends()), _in_feed(txn), key=itemgetter(0), reverse=True):
        if db_id not in seen:
            seen.add(db_id)
            if (match := matching_record(txn, db_id, wanted)) is not None:
                yield match
    yield from (match for match in by_name(txn, wanted) if match[0] not in seen)


def _appended(appends: Mapping[int, int]) -> list[Write]:
    return sorted(((at_ms, db_id) for db_id, at_ms in appends.items()), reverse=True)


def _in_feed(txn: ReadTxn) -> Iterator[Write]:
    """Yield the databases that the records of the feed name, from its end."""
    at_ms = 2**63
    for key, raw in txn.raw_scan_back(CHANGE_LOG):
        try:
            record = CHANGE_LOG.rows.decode(key, raw)
        except ManifestDamaged:
            continue
        at_ms = min(at_ms, record.committed_at_ms)  # a clock that was set back must not disturb the order of the feed
        for op in record.operations:
            touches = TOUCHES.get(type(op))
            for db_id in touches.databases(op) if touches is not None else ():
                if db_id:
                    yield at_ms, db_id


def _by_size(txn: ReadTxn, wanted: DatabaseFilter) -> Iterator[Match]:
    sized = ((held_bytes(txn, match[0]), -match[0], match) for match in by_name(txn, wanted))
    ordered = nlargest(wanted.limit, sized) if wanted.limit else sorted(sized, reverse=True)
    return (match for _, _, match in ordered)
