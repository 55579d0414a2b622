"""Commands about a store and its databases: ls, info, create, drop, undrop, rename; db set-status and db set."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING, Annotated

from msgspec.structs import replace

from quire.cli.declarations import Argument, Group, Option, command
from quire.cli.formatting import (
    KIND_WORDS,
    article,
    behind_text,
    cost_text,
    count_of,
    databases_text,
    drill_lines,
    kind_text,
    size,
    span,
    tags_text,
)
from quire.cli.lookup import (
    After,
    Database,
    Kind,
    Limit,
    Prefix,
    Sort,
    Tag,
    Yes,
    limit_of,
    more_text,
    tags_of,
)
from quire.cli.output import Facts, Listing, ListingRow, Note
from quire.cli.prompts import confirm
from quire.core.clock import SystemClock, moment
from quire.core.errors import Conflict, InvalidInput, UnknownDatabase
from quire.core.json_values import plain
from quire.core.reader_info import reader_text
from quire.core.timeline import RANGE_BITS
from quire.manifest.records import DbStatus
from quire.service.values import DatabaseFilter
from quire.store.info import StoreReader
from quire.store.kind_names import kind_named
from quire.store.listing_by_name import is_named

if TYPE_CHECKING:
    from quire.archive.status import ArchiveStatus
    from quire.cli.command import Cli
    from quire.service.client import Client
    from quire.service.values import DatabaseInfo, DroppedDatabase, MirrorStatus, StoreInfo
    from quire.store.store import Store

Name = Annotated[str, Argument(metavar="NAME", help="The database's name.")]


@command("ls", example="quire ls tenant- --tag plan=free")
def ls(
    cli: Cli,
    prefix: Prefix = "",
    kind: Kind = "",
    tag: Tag = "",
    sort: Sort = "name",
    limit: Limit = None,
    after: After = "",
    dropped: Annotated[
        bool, Option("--dropped", help="List dropped databases that `quire undrop` can restore.")
    ] = False,
) -> Listing:
    """List the databases of a store, by name."""
    most = limit_of(limit, as_json=cli.as_json)
    with StoreReader(cli.path) as store:
        if dropped:
            wanted = DatabaseFilter(prefix=prefix, kind=kind, tag=tag, sort=sort, after=after)
            return _dropped(store.dropped(), wanted, most)
        databases = store.databases(
            prefix=prefix, kind=kind, tag=tag, sort=sort, limit=most + 1 if most else 0, after=after
        )
    is_cut = bool(most) and len(databases) > most
    databases = databases[:most] if is_cut else databases
    followed = any(database.follows for database in databases)  # an empty column would take space from the others
    return Listing(
        columns=["name", "kind", "status", ">snapshots", "created", "forked from", *(["follows"] if followed else [])],
        rows=[
            ListingRow([*_cells(database), *([database.follows] if followed else [])], database)
            for database in databases
        ],
        empty="no databases: create one with `quire create NAME --kind pages`"
        if not (prefix or kind or tag or after)
        else "no database matches",
        closing=more_text(databases[-1].name, sort) if is_cut else "",
    )


def _dropped(databases: list[DroppedDatabase], wanted: DatabaseFilter, most: int) -> Listing:
    if wanted.tag or wanted.after or wanted.sort != "name":
        hint = "a list of dropped databases begins with the last one dropped"
        raise InvalidInput("`--dropped` cannot be combined with `--tag`, `--sort` or `--after`", hint=hint)
    kind = kind_named(wanted.kind) if wanted.kind else None
    matches = [info for info in databases if is_named(info.name, wanted.prefix) and kind in (None, info.kind)]
    shown = matches[:most] if most else matches

    def cells(info: DroppedDatabase) -> list[str]:
        moments = moment(info.dropped_at_ms), moment(info.until_ms)
        return [
            f"#{info.db_id}",
            info.name,
            kind_text(info.kind),
            *moments,
            str(info.snapshots),
            size(info.size_bytes),
        ]

    return Listing(
        columns=["id", "name", "kind", "dropped", "can be brought back until", ">snapshots", ">size"],
        rows=[ListingRow(cells(info), info) for info in shown],
        empty="no dropped database matches" if databases else "no dropped databases",
        # By id: another database may have the name by now, and would be dropped for ever.
        closing="`quire undrop NAME` restores one; `quire drop '#ID' --now` frees its space."
        + ("\nthere are more: `--limit 0` lists all" if len(shown) < len(matches) else ""),
    )


def _cells(info: DatabaseInfo) -> list[str]:
    status = info.status.name.lower().replace("_", "-")
    return [info.name, kind_text(info.kind), status, str(info.snapshots), moment(info.created_at_ms), origin(info)]


def origin(info: DatabaseInfo) -> str:
    """Return what a database was forked from: the parent's name, or its id if it was dropped."""
    return info.parent or (f"#{info.parent_db_id}, dropped" if info.parent_db_id else "")


@command("info", example="quire info --json")
def info(cli: Cli) -> Facts:
    """Show a summary of a store."""
    summary = _summary(cli)
    databases = databases_text(summary.databases)
    changes = f"{summary.oldest_change:,} to {summary.newest_change:,}" if summary.oldest_change else "none"
    if summary.newest_change >> RANGE_BITS:
        changes += "; each takeover begins a new range of numbers"
    artifacts = (
        count_of(summary.chunks, "chunk"),
        count_of(summary.deltas, "delta"),
        count_of(summary.wal_segments, "WAL segment"),
    )
    return Facts(
        lines=[
            ("store", summary.path),
            ("id", f"{summary.store_id} (schema {summary.schema})"),
            ("objects", summary.object_store),
            ("owner", _owner_text(summary)),
            *_archive_lines(summary.archive),
            ("databases", (databases or "none") + (f"; {summary.dropped:,} dropped" if summary.dropped else "")),
            ("snapshots", f"{summary.snapshots:,}"),
            ("artifacts", ", ".join(artifacts)),
            ("unreferenced", f"{count_of(summary.unreferenced, 'artifact')} awaiting deletion"),
            ("jobs", f"{summary.jobs:,}"),
            *([("follows", count_of(summary.followed_files, "SQLite file"))] if summary.followed_files else []),
            *[("mirror", _mirror_text(mirror)) for mirror in summary.mirrors],
            ("change feed", changes),
            ("manifest", f"{size(summary.manifest_bytes)} in a map of {size(summary.map_bytes)}"),
            ("readers", f"{count_of(summary.readers, 'slot')} in use"),
            ("on disk", size(summary.disk_bytes)),
            *[("reader", reader_text(reader)) for reader in summary.page_readers],
        ],
        data={**plain(summary), "archive_dollars_per_month": _dollars(summary.archive)},
    )


def _summary(cli: Cli) -> StoreInfo:
    """Read the summary from the directory. The owner of an archived store is asked about its archive, if it serves."""
    with StoreReader(cli.path) as store:
        summary = store.info()
    if summary.archive is None or summary.archive.state != "owned" or (owner := cli.listening_owner()) is None:
        return summary
    with owner:
        return replace(summary, archive=owner.info().archive)


def _mirror_text(mirror: MirrorStatus) -> str:
    """Format a mirror, and whether its target is behind."""
    failed = f"; {count_of(mirror.failures, 'failed run')}" if mirror.failures else ""
    return f"{mirror.name}: {behind_text(mirror) or 'up to date'}{failed}"


def _owner_text(summary: StoreInfo) -> str:
    """Format the ownership of the objects: an epoch, a session, and whether the bucket has confirmed them."""
    if summary.owner_state == "not needed":
        return f"epoch {summary.owner_epoch:,}; objects are local to the store"
    session = f", session {summary.owner_session:,}" if summary.owner_session else ""
    return f"epoch {summary.owner_epoch:,}{session}, {summary.owner_state}"


def _dollars(status: ArchiveStatus | None) -> float | None:
    return status.dollars_per_month if status is not None and status.is_live else None


def _archive_lines(status: ArchiveStatus | None) -> list[tuple[str, str]]:
    """Format the state of the archive. Only an owner that serves knows its lag and what it costs."""
    if status is None:
        return [("archive", "off")]
    states = {
        "owned": "the owner does not serve, so its lag is unknown",
        "closed": "closed after its last upload",
        "not closed cleanly": "changes may wait until the store is opened",
    }
    facts = [status.mode, states.get(status.state, status.state)]
    if status.is_live:
        facts.append(f"lag {status.lag_seconds:.1f} s")
    facts.append(f"window {span(int(status.retain_seconds * 1000))}")
    cost = [("cost", cost_text(status))] if status.is_live else []
    return [("archive", "; ".join(facts)), *cost, *drill_lines(status, SystemClock().now_ms())]


@command("create", example="quire create shop --kind pages")
def create(
    cli: Cli,
    name: Name,
    kind: Annotated[str, Option(metavar="KIND", help="pages (or sqlite), stream, kv (or lsm).")] = "pages",
    namespace: Annotated[
        str, Option(metavar="NAME", help="Namespace for its objects.", show_default="the store's object store")
    ] = "",
) -> Note:
    """Create a database."""
    with cli.owner_or_client() as store:
        created = store.create(name, kind, namespace=namespace)
    text = f"created {created.name}, {article(KIND_WORDS[created.kind.name.lower()])} with id {created.db_id}"
    return Note(text=text, data=created)


@command("drop", example="quire drop shop --yes")
def drop(
    cli: Cli,
    name: Name,
    snapshots: Annotated[bool, Option("--snapshots", help="Drop its snapshots as well.")] = False,
    now: Annotated[
        bool, Option("--now", help="Free its space now, which cannot be undone; also for one dropped before.")
    ] = False,
    yes: Yes = False,
) -> Note:
    """Drop a database. Its name can be reused at once; `quire undrop` restores it within a day.

    Its space is freed after that day (maintenance.undrop_seconds), or at once with --now, when nothing else refers to it.
    """
    with cli.owner_or_client() as store:
        try:
            info = store.database(name)
        except UnknownDatabase:
            gone = next((gone for gone in store.dropped() if name in (gone.name, f"#{gone.db_id}")), None)
            if not now or gone is None:
                raise
            return _purge(store, gone, yes)
        if not yes:
            also = f" with {count_of(info.snapshots, 'snapshot')}" if snapshots and info.snapshots else ""
            lost = " It cannot be brought back." if now else ""
            question = f"drop the {KIND_WORDS[info.kind.name.lower()]} {name}{also}?{lost}"
            confirm(question, "nothing was dropped", {"dropped": None})
            _refuse_another(store, name, info, snapshots=snapshots)
        dropped = store.drop(name, snapshots=snapshots, undoable=not now)
        kept = [gone for gone in store.dropped() if gone.db_id == info.db_id]
    left = replace(dropped, status=DbStatus.TOMBSTONED, snapshots=0)  # its snapshots are dropped with it
    back = f"; `quire undrop {shlex.quote(name)}` brings it back until {moment(kept[0].until_ms)}" if kept else ""
    return Note(text=f"dropped {name}{back}", data={"dropped": left, "until_ms": kept[0].until_ms if kept else None})


def _refuse_another(store: Store | Client, name: str, shown: DatabaseInfo, *, snapshots: bool) -> None:
    """Raise `Conflict` if the name, or what is dropped with the database, has changed while the user was asked: the owner is
    another process, which goes on."""
    info = store.database(name)
    if info.db_id != shown.db_id or (snapshots and info.snapshots > shown.snapshots):
        hint = "nothing was dropped; run the command again"
        raise Conflict("the database was changed in the meantime", hint=hint, name=name)


def _purge(store: Store | Client, dropped: DroppedDatabase, yes: bool) -> Note:
    """Remove permanently a database that was dropped before."""
    if not yes:
        confirm(
            f"free the space of the dropped database {dropped.name}? It cannot be brought back.",
            "nothing was dropped",
            {"dropped": None},
        )
    gone = store.purge(dropped.db_id)
    text = f"{gone.name} (id {gone.db_id}) can no longer be brought back; its space is freed when nothing refers to it"
    return Note(text=text, data={"dropped": gone, "until_ms": None})


@command("undrop", example="quire undrop shop")
def undrop(
    cli: Cli,
    name: Annotated[str, Argument(metavar="NAME", help="Its former name, or its id (#7).")],
    new: Annotated[str, Option("--as", metavar="NEW", help="A new name.", show_default="its former name")] = "",
) -> Note:
    """Restore a dropped database.

    It is restored with its snapshots. If several had this name, the last one dropped is restored. `quire ls --dropped` lists
    them.
    """
    with cli.owner_or_client() as store:
        back = store.undrop(name, new_name=new)
    return Note(text=f"restored {back.name} with {count_of(back.snapshots, 'snapshot')}", data=back)


@command("rename", example="quire rename shop store")
def rename(
    cli: Cli,
    old: Annotated[str, Argument(metavar="OLD", help="The current name.")],
    new: Annotated[str, Argument(metavar="NEW", help="The new name.")],
) -> Note:
    """Rename a database."""
    with cli.owner_or_client() as store:
        renamed = store.rename(old, new)
    return Note(text=f"renamed {old} to {new}", data=renamed)


# ── status, tags, compression ─────────────────────────────────────────────────────────────────────────────────────────
db = Group("db")


@command("set-status", db, example="quire db set-status shop read_only")
def set_status(
    cli: Cli,
    database: Database,
    status: Annotated[str, Argument(metavar="STATUS", help="active or read_only.")],
) -> Note:
    """Make a database read-only, or writable again.

    It takes effect at once, also in programs that have the database open. Maintenance continues.
    """
    with cli.owner_or_client() as store:
        changed = store.set_status(database, status.replace("-", "_").lower())
    return Note(text=f"{changed.name} is {changed.status.name.lower()}", data=changed)


@command("set", db, example="quire db set shop --tag team=sales")
def set_options(
    cli: Cli,
    database: Database,
    tag: Annotated[list[str] | None, Option("--tag", metavar="KEY=VALUE", help="Set a tag; repeatable.")] = None,
    untag: Annotated[list[str] | None, Option("--untag", metavar="KEY", help="Remove a tag.")] = None,
    compression: Annotated[str, Option(metavar="NAME", help="none or zstd.", show_default="unchanged")] = "",
) -> Note:
    """Change the tags of a database, or the compression of its new chunks."""
    if not (tag or untag or compression):
        raise InvalidInput("no change was given", hint="give --tag, --untag or --compression", database=database)
    with cli.owner_or_client() as store:
        tags = None
        if tag or untag:
            tags = {key: value for key, value in store.database(database).tags.items() if key not in (untag or [])}
            tags |= tags_of(tag or [], reserved="")
        changed = store.set_options(database, tags=tags, compression=compression)
    chunks = f"; compression of new chunks: {compression}" if compression else ""
    return Note(text=f"{changed.name}: {tags_text(changed.tags) or 'no tags'}{chunks}", data=changed)
