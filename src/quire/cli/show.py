"""Commands that only look at a store: ls and info."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from quire.cli.command import Cli
from quire.cli.formatting import count_of, moment, size, tags_text
from quire.cli.output import Facts, Listing, Row
from quire.core.reader_info import reader_text
from quire.store.info import Glance

if TYPE_CHECKING:
    from quire.manifest.snapshots import SnapshotInfo
    from quire.store.info import DatabaseInfo, StoreInfo

LENT = ("by", "lend")
"""The tag of a snapshot that the service has lent to somebody who reads; `quire.manifest.retention.LENT_TAGS`."""
TIME_TRAVEL = "time-travel"
"""The tag of what checkpoints keep so that earlier moments can be read; `quire.manifest.retention.WINDOW_TAG`, slow to load."""


def ls(cli: Cli) -> Listing:
    """List the databases of a store."""
    with Glance(cli.path) as store:
        found = store.databases()
    followed = any(database.follows for database in found)  # else the column would take room from the others
    return Listing(
        columns=["name", "kind", "status", ">snapshots", "created", "forked from", *(["follows"] if followed else [])],
        rows=[Row([*_cells(database), *([database.follows] if followed else [])], database) for database in found],
        empty="no databases yet: `quire create NAME --kind pages` makes one",
    )


def _cells(each: DatabaseInfo) -> list[str]:
    status = each.status.name.lower().replace("_", "-")
    return [each.name, each.kind.name.lower(), status, str(each.snapshots), moment(each.created_at_ms), origin(each)]


def origin(each: DatabaseInfo) -> str:
    """What a database was forked from: a name, or the id of a parent that has none any more."""
    return each.parent or (f"#{each.parent_db_id}, dropped" if each.parent_db_id else "")


def info(cli: Cli) -> Facts:
    """Show a summary of a store."""
    with Glance(cli.path) as store:
        found = store.info()
    databases = ", ".join(f"{count:,} {kind}" for kind, count in found.databases.items() if count) or "none"
    changes = f"{found.oldest_change:,} to {found.newest_change:,}" if found.oldest_change else "none"
    artifacts = (
        count_of(found.chunks, "chunk"),
        count_of(found.deltas, "delta"),
        count_of(found.wal_segments, "WAL segment"),
    )
    return Facts(
        lines=[
            ("store", found.path),
            ("id", f"{found.store_id} (schema {found.schema})"),
            ("objects", found.object_store),
            ("owner", _owner_text(found)),
            ("databases", databases + (f"; {found.dropped:,} dropped" if found.dropped else "")),
            ("snapshots", f"{found.snapshots:,}"),
            ("artifacts", ", ".join(artifacts)),
            ("unreferenced", f"{count_of(found.unreferenced, 'artifact')} waiting for the collector"),
            ("jobs", f"{found.jobs:,}"),
            *([("follows", count_of(found.followed_files, "SQLite file"))] if found.followed_files else []),
            ("change feed", changes),
            ("manifest", f"{size(found.manifest_bytes)} in a map of {size(found.map_bytes)}"),
            ("readers", f"{count_of(found.readers, 'slot')} in use"),
            ("on disk", size(found.disk_bytes)),
            *[("reads it", reader_text(each)) for each in found.page_readers],
        ],
        data=found,
    )


def _owner_text(found: StoreInfo) -> str:
    """Who may write the objects: an epoch, a session, and whether the bucket has confirmed them."""
    if found.owner_state == "not needed":
        return f"epoch {found.owner_epoch:,}; the objects are the store's own"
    session = f", session {found.owner_session:,}" if found.owner_session else ""
    return f"epoch {found.owner_epoch:,}{session}, {found.owner_state}"


def about(each: SnapshotInfo) -> str:
    """For whom a snapshot is there that nobody has named, until when, and its tags."""
    others = {key: value for key, value in each.tags.items() if (key, value) != LENT and key != TIME_TRAVEL}
    until = f"goes by itself {moment(each.expires_at_ms)}" if each.expires_at_ms else ""
    return ", ".join(filter(None, (purpose(each.tags), until, tags_text(others))))


def purpose(tags: Mapping[str, str]) -> str:
    """What a snapshot is there for that no person has made."""
    if tags.get(LENT[0]) == LENT[1]:
        return "lent to a query (Spark, or another reader)"
    return "for time travel" if TIME_TRAVEL in tags else ""
