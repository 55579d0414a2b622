"""`quire snapshot diff --rows`: shows the rows that differ between two versions of a database, or a database and its fork."""

from __future__ import annotations

import shlex
from contextlib import ExitStack
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from quire.cli.formatting import count_of, short
from quire.cli.lookup import VersionRef, need_pages, recover_wal, version_of
from quire.cli.output import Facts, Listing, ListingRow, Note, Report
from quire.core.errors import EpochLost, NotFound, OutOfRange
from quire.core.ids import Epoch
from quire.core.json_values import plain
from quire.sqlite.row_changes import ComparedVersion
from quire.sqlite.table_diff import ChangedRow, TableDiff, diff_tables, table_names
from quire.sqlite.tables import connected

if TYPE_CHECKING:
    from quire.cli.command import Cli
    from quire.pages.snapshot import Snapshot
    from quire.store.store import Store

NOW = "now"
VALUES_MAX = 12
"""Most columns of a row to show as text."""


def row_diff(cli: Cli, before: tuple[str, str], after: tuple[str, str], tables: list[str], limit: int) -> Report:
    """Compare two versions, each given as a database and the user's text for a version of it."""
    with cli.readable() as store, ExitStack() as closing:
        sides = [_opened(store, database, text, closing) for database, text in (before, after)]
        (old, old_text), (new, new_text) = sides
        first, second = (ComparedVersion(reader, closing.enter_context(connected(reader))) for reader in (old, new))
        known = table_names(first.connection) | table_names(second.connection)
        wanted = _chosen(tables, known, before[0]) if tables else known
        pages = _changed(store, old, new) if before[0] == after[0] else None
        changed = range(1, max(old.size_pages, new.size_pages) + 1) if pages is None else pages
        diffs = list(diff_tables(first, second, wanted, lambda: changed, limit=limit or None))
    facts = Facts(lines=[("before", f"{before[0]} {old_text}"), ("after", f"{after[0]} {new_text}")], data=None)
    data = {
        "before": {"database": before[0], "epoch": str(old.epoch)},
        "after": {"database": after[0], "epoch": str(new.epoch)},
        "tables": [_json(diff) for diff in diffs],
    }
    if not diffs:
        return Report(parts=[facts, Note(text="no row differs", data=None)], data=data)
    return Report(parts=[facts, *(_shown(diff, limit) for diff in diffs)], data=data)


def _opened(store: Store, database: str, text: str, closing: ExitStack) -> tuple[Snapshot, str]:
    """Open a reader of a version, and return it with the version's description."""
    need_pages(store.database(database), "have rows")
    version = VersionRef("as it is now") if text == NOW else version_of(store, database, text)
    reader: Any
    if version.snapshot is not None:
        reader = store.pages.open_view(database, version.snapshot.snapshot_id)
    elif store.mode == "r":
        db_id = store.database(database).db_id
        reader = (
            store.pages.open_published(db_id)
            if version.at is None
            else store.pages.open_published_at(db_id, _at(version))
        )
    else:
        recover_wal(store, database)
        opened = store.pages.open(database)
        opened.wal.sync()
        reader = opened.open_snapshot() if version.at is None else opened.open_snapshot(at=_at(version))
    return closing.enter_context(reader), version.text


def _at(version: VersionRef) -> Any:
    return version.at.lsn if isinstance(version.at, Epoch) else version.at


def _changed(store: Store, old: Snapshot, new: Snapshot) -> set[int] | None:
    """Return the pages that may differ, by SQLite's numbers (from 1); `None` if that cannot be determined."""
    if store.mode == "r":
        return None
    earlier, later = sorted((old, new), key=lambda reader: reader.lsn)
    try:
        pages = {page + 1 for page in store.pages.open(new.db_id).changed(earlier.lsn, later.mark)}
    except (EpochLost, OutOfRange):
        return None
    return pages | set(range(later.size_pages + 1, earlier.size_pages + 1))


def _chosen(tables: list[str], known: set[str], database: str) -> set[str]:
    by_name = {name.lower(): name for name in known}
    for table in tables:
        if table.lower() not in by_name:
            raise NotFound(
                "neither version has this table",
                hint=f"`quire sqlite shell {shlex.quote(database)} .tables` lists them",
                table=table,
            )
    return {by_name[table.lower()] for table in tables}


# ── output ────────────────────────────────────────────────────────────────────────────────────────────────────────────
def _shown(diff: TableDiff, limit: int) -> Listing | Note:
    title = f"{diff.table}: {_counts(diff)}"
    if not diff.rows:
        return Note(text=title, data=None)
    left = diff.changes - len(diff.rows)
    return Listing(
        columns=[title, ">key", "row"],
        rows=[ListingRow([_mark(row), _key_text(row.key), _row_text(row)], None) for row in diff.rows],
        closing=f"{left:,} more rows: `--limit 0` shows all" if left and limit else "",
    )


def _counts(diff: TableDiff) -> str:
    if diff.error:
        return f"not compared: {diff.error}"
    where = {"before": "dropped, ", "after": "created, "}.get(diff.only, "altered, " if diff.altered else "")
    counts = ((diff.inserted, "inserted"), (diff.updated, "updated"), (diff.deleted, "deleted"))
    return where + (", ".join(f"{number:,} {what}" for number, what in counts if number) or count_of(0, "row"))


def _mark(row: ChangedRow) -> str:
    return "+" if row.before is None else "-" if row.after is None else "~"


def _key_text(key: Any) -> str:
    return ", ".join(map(_value, key)) if isinstance(key, tuple) else str(key)


def _row_text(row: ChangedRow) -> str:
    if row.before is not None and row.after is not None:
        pairs = [(name, row.before.get(name), value) for name, value in row.after.items()]
        parts = [
            f"{name}: {_value(old)} → {_value(new)}"
            for name, old, new in pairs
            if old != new or type(old) is not type(new)
        ]
    else:
        parts = [f"{name}={_value(value)}" for name, value in (row.after or row.before or {}).items()]
    more = [f"… {len(parts) - VALUES_MAX} more"] if len(parts) > VALUES_MAX else []
    return ", ".join([*parts[:VALUES_MAX], *more])


def _value(value: Any) -> str:
    if value is None:
        return "NULL"
    return f"{len(value):,} bytes" if isinstance(value, bytes) else short(str(value))


def _json(diff: TableDiff) -> dict[str, Any]:
    data = asdict(diff)
    return {**data, "rows": plain(data["rows"]), "truncated": len(diff.rows) < diff.changes}
