"""Commands that only look at a store: ls and info.

They have no arguments, and so a short way in (`quire.cli.lane`); and they glance at the store instead of opening it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from quire.cli.command import Cli
from quire.cli.output import Facts, Listing, Row
from quire.cli.plain import count_of, moment, size

if TYPE_CHECKING:
    from quire.store.info import DatabaseInfo


def ls(cli: Cli) -> Listing:
    """List the databases of a store."""
    from quire.store.info import Glance

    with Glance(cli.path) as store:
        found = store.databases()
    return Listing(
        columns=["name", "kind", "status", ">snapshots", "created", "forked from"],
        rows=[Row(_cells(each), each) for each in found],
        empty="no databases yet: `quire create NAME --kind pages` makes one",
    )


def _cells(each: DatabaseInfo) -> list[str]:
    status = each.status.name.lower().replace("_", "-")
    return [each.name, each.kind.name.lower(), status, str(each.snapshots), moment(each.created_at_ms), origin(each)]


def origin(each: DatabaseInfo) -> str:
    """What a database was forked from: a name, or the id of a parent that has none any more."""
    return each.parent or (f"#{each.parent_db_id}, dropped" if each.parent_db_id else "")


def info(cli: Cli) -> Facts:
    """Show a store in numbers."""
    from quire.store.info import Glance

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
            ("databases", databases + (f"; {found.dropped:,} dropped" if found.dropped else "")),
            ("snapshots", f"{found.snapshots:,}"),
            ("artifacts", ", ".join(artifacts)),
            ("unreferenced", f"{count_of(found.unreferenced, 'artifact')} waiting for the collector"),
            ("jobs", f"{found.jobs:,}"),
            ("change feed", changes),
            ("manifest", f"{size(found.manifest_bytes)} in a map of {size(found.map_bytes)}"),
            ("readers", f"{count_of(found.readers, 'slot')} in use"),
        ],
        data=found,
    )
