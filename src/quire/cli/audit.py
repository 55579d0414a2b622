"""The command `audit`: shows the history of databases."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from quire.cli.declarations import Argument, Option, command
from quire.cli.formatting import size
from quire.cli.lookup import any_database, names_of
from quire.cli.output import Listing, ListingRow
from quire.core.clock import moment
from quire.core.errors import InvalidInput
from quire.core.json_values import plain
from quire.core.time_parsing import parse_moment
from quire.durable.object_names import parse_epoch_key

if TYPE_CHECKING:
    from quire.cli.command import Cli
    from quire.manifest.audit import AuditEntry

WORDS = {
    "snapshot_created": "snapshot created",
    "snapshot_dropped": "snapshot dropped",
    "forked": "forked as",
    "forked_from": "forked from",
    "database_dropped": "database dropped",
    "database_undropped": "database undropped",
    "snapshot_undropped": "snapshot undropped",
    "found_damaged": "found damaged",
    "rolled_back": "rolled back; before it",
}
"""Action → its text, if that differs from its name."""


@command("audit", example="quire audit shop --since 1h")
def audit(
    cli: Cli,
    database: Annotated[
        str,
        Argument(metavar="[DB]", help="A database's name, or the id of a dropped one.", show_default="default: all"),
    ] = "",
    since: Annotated[
        str, Option(metavar="WHEN", help="Start: an age (15m, '2 hours ago'), a day or a date in UTC.")
    ] = "",
    until: Annotated[str, Option(metavar="WHEN", help="End, exclusive; as --since.")] = "",
    limit: Annotated[int, Option(min=0, metavar="N", help="Only the newest N; 0 for all.")] = 50,
) -> Listing:
    """Show the history of databases: snapshots, forks, deletions."""
    with cli.reader() as manifest:
        now = manifest.clock.now_ms()
        since_ms = parse_moment(since, "--since", now_ms=now) if since else 0
        until_ms = parse_moment(until, "--until", now_ms=now) if until else None
        if until_ms is not None and until_ms <= since_ms:
            raise InvalidInput(
                "`--until` is not after `--since`", hint="`--since 2h --until 1h` is an hour", since=since, until=until
            )
        with manifest.read() as txn:
            wanted = any_database(txn, database) if database else None
        entries = manifest.audit(wanted, since_ms=since_ms, until_ms=until_ms, newest=limit + 1 if limit else 0)
        shown = entries[-limit:] if limit else entries
        names = names_of(manifest, shown)
    return Listing(
        columns=["when", "database", "what", "subject"],
        rows=[
            ListingRow(_cells(entry, names), {**plain(entry), "database": names.get(entry.db_id, "")})
            for entry in shown
        ],
        empty="no entries" + (" in that time" if since or until else " yet"),
        closing="there are earlier entries: `--limit 0` lists all" if len(shown) < len(entries) else "",
    )


def _cells(entry: AuditEntry, names: dict[int, str]) -> list[str]:
    action = entry.action.name.lower()
    subject = entry.subject or (f"#{entry.number}" if entry.number else "-")
    if in_epoch := parse_epoch_key(subject):
        # The prefix with the store's identity, common to all objects, fills half a line; --json has the whole name.
        subject = in_epoch[2]
    bytes_ = f", {size(entry.size_bytes)}" if entry.size_bytes else ""
    return [
        moment(entry.at_ms),
        names.get(entry.db_id) or f"#{entry.db_id}",
        WORDS.get(action, action),
        f"{subject}{bytes_}",
    ]
