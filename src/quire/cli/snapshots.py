"""Commands about versions: snapshot create, ls, show, drop, undrop and diff; fork; rollback.

Rules
  1. Listing and comparing need a reader; creating and dropping need the owner.
  2. Dropping shows what is deleted with the snapshot: the artifacts without another holder.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

import msgspec

from quire.cli.declarations import Argument, Group, Option, command
from quire.cli.formatting import chain_text, count_of, size, span, tags_text
from quire.cli.lookup import (
    At,
    Database,
    Snapshot,
    Yes,
    need_no_number,
    need_pages,
    recover_wal,
    snapshot_named,
    tags_of,
    title_of,
    version_of,
)
from quire.cli.output import Facts, Listing, ListingRow, Note, Report
from quire.cli.prompts import confirm
from quire.core.clock import moment
from quire.core.errors import UnknownSnapshot
from quire.core.json_values import plain
from quire.manifest import tables as t
from quire.manifest.ops.refs import artifact_bytes
from quire.manifest.records import DROPPED_TAG, FORKS_TAGS, LENT_TAGS, SCHEDULE_TAG, WINDOW_TAG, WalState
from quire.store.exclusive_artifacts import snapshots_share

if TYPE_CHECKING:
    from quire.cli.command import Cli
    from quire.manifest.differences import SlotDiff, SnapshotDiff
    from quire.manifest.snapshots import SnapshotInfo
    from quire.manifest.store import ManifestStore
    from quire.store.exclusive_artifacts import ExclusiveShare

NOW = "now"
"""Stands for the current state of a database, in place of a snapshot."""


group = Group("snapshot")


# ── create, fork, rollback ────────────────────────────────────────────────────────────────────────────────────────────
@command("create", group, example="quire snapshot create shop monday --tag by=ann")
def create(
    cli: Cli,
    database: Database,
    name: Annotated[
        str, Argument(metavar="[NAME]", help="The snapshot's name.", show_default="default: none, only an id")
    ] = "",
    tag: Annotated[list[str] | None, Option("--tag", metavar="KEY=VALUE", help="A tag; repeatable.")] = None,
) -> Note:
    """Create a snapshot of a database. Nothing is copied, whatever the size."""
    need_no_number(name)
    tags: dict[str, str] = {}
    if tag:
        tags = tags_of(tag, reserved=SCHEDULE_TAG)
    with cli.owner_or_client() as store:
        recover_wal(store, database)
        created = store.snapshot(database, name, tags=tags)
    return Note(text=f"created snapshot {title_of(created)} of {database}", data=snapshot_json(created, database))


@command("fork", example="quire fork shop shop-test --at monday")
def fork(
    cli: Cli,
    database: Database,
    new: Annotated[str, Argument(metavar="NEW", help="The new database's name.")],
    at: At = "",
    tag: Annotated[
        list[str] | None, Option("--tag", metavar="KEY=VALUE", help="A tag, added to those of DB; repeatable.")
    ] = None,
) -> Note:
    """Fork a database: create a copy that shares its data.

    The two share all data until one of them changes it; nothing is copied, whatever the size. VERSION is a snapshot, an epoch
    (3:4711, as exports print it) or a time (15m, '2 hours ago', yesterday, 'yesterday 18:00', 2026-05-01T14:30).
    """
    with cli.owner_or_client() as store:
        info = store.database(database)
        if info.kind.name != "LSM":
            need_pages(info, "can be forked")
        version = version_of(store, database, at)
        if version.at is not None:
            need_pages(info, "can be forked between snapshots")
        recover_wal(store, database)
        tags = tags_of(tag or [], reserved="")
        snapshot_id = version.snapshot.snapshot_id if version.snapshot else None
        created = store.fork(database, new, at=version.at or snapshot_id, tags=tags)
    return Note(text=f"created {created.name} with id {created.db_id}, as {database} {version.then}", data=created)


@command("rollback", example="quire rollback shop --to monday")
def rollback(
    cli: Cli,
    database: Database,
    to: Annotated[str, Option("--to", metavar="VERSION", help="A snapshot, an epoch or a time.")],
) -> Note | Report:
    """Undo everything since a version, in place.

    The old state becomes a new version. VERSION is a snapshot, an epoch (3:4711) or a time (15m, '2 hours ago',
    'yesterday 18:00'); for a key-value set, a snapshot. The state before the rollback is kept as a snapshot; rolling back to
    it undoes the rollback. Programs that have the database open continue with the new version.
    """
    with cli.owner() as store:
        version = version_of(store, database, to)
        recover_wal(store, database)
        snapshot = version.snapshot
        done = store.rollback(database, to=snapshot.name or snapshot.anchor_lsn if snapshot else version.at or to)
    if not done.snapshot:
        return Note(text=f"nothing to do: {database} is already as it {version.then}", data=done)
    changed = count_of(done.changed_keys, "key") if done.changed_keys else count_of(done.changed_pages, "page")
    text = f"{database} is again as it {version.then}: {changed} changed"
    undo = f"undo with `quire rollback {shlex.quote(database)} --to {shlex.quote(done.snapshot)}`"
    return Report(parts=[Note(text=text, data=None), Note(text=undo, data=None)], data=done)


# ── list, show, drop ──────────────────────────────────────────────────────────────────────────────────────────────────
@command("ls", group, example="quire snapshot ls shop")
def ls(cli: Cli, database: Database) -> Listing:
    """List the snapshots of a database, oldest first."""
    with cli.reader() as manifest:
        infos = manifest.snapshots.of(database)
    return Listing(
        columns=[">id", "name", "created", ">size", "about"],
        rows=[ListingRow(_cells(snapshot), snapshot_json(snapshot, database)) for snapshot in infos],
        empty=f"{database} has no snapshots: `quire snapshot create {shlex.quote(database)} NAME` creates one",
    )


def _cells(snapshot: SnapshotInfo) -> list[str]:
    return [
        str(snapshot.snapshot_id),
        snapshot.name or "-",
        moment(snapshot.created_at_ms),
        size(snapshot.size_pages * snapshot.page_size),
        about(snapshot) or "-",
    ]


@command("show", group, example="quire snapshot show shop monday")
def show(cli: Cli, database: Database, snapshot: Snapshot) -> Facts:
    """Show a snapshot: its size, its exclusive data, its forks and tags."""
    with cli.reader() as manifest:
        info = snapshot_named(manifest, database, snapshot)
        detail = manifest.snapshots.describe(info.db_id, info.snapshot_id)
        now = manifest.clock.now_ms()
        with manifest.read() as txn:
            share = snapshots_share(txn, info.db_id, [info.snapshot_id])
            children = [
                record.name
                for _, record in txn.databases()
                if (record.parent_db_id, record.parent_snapshot_id) == (info.db_id, info.snapshot_id)
            ]
    pages = f"{count_of(info.size_pages, 'page')}, {size(info.size_pages * info.page_size)}"
    expires = f"{moment(info.expires_at_ms)}, in {span(info.expires_at_ms - now)}" if info.expires_at_ms else "never"
    lines = [
        ("snapshot", f"{title_of(info)} of {database}, {info.kind.name.lower()}"),
        ("created", f"{moment(info.created_at_ms)}, {span(now - info.created_at_ms)} ago"),
        ("expires", expires),
        ("version", f"lsn {info.anchor_lsn:,}, generation {info.generation:,}"),
        ("size", pages),
        ("chunks", f"{count_of(detail.artifacts, 'artifact')} in {count_of(detail.slots, 'slot')}, "
                   f"{size(detail.chunk_bytes)}"),
        ("WAL", f"{count_of(info.pins, 'segment')} pinned, {size(detail.wal_bytes)}"),
        ("exclusive", share_words(share) if share.artifacts else "nothing: everything is shared"),
        ("forks", ", ".join(children) or "none"),
        *([("purpose", whom)] if (whom := purpose(info.tags)) else []),
        ("tags", tags_text(info.tags) or "none"),
    ]  # fmt: skip
    data = {
        **snapshot_json(info, database),
        "slots": detail.slots,
        "artifacts": detail.artifacts,
        "chunk_bytes": detail.chunk_bytes,
        "wal_bytes": detail.wal_bytes,
        "share": share_json(share),
        "forks": children,
    }
    return Facts(lines=lines, data=data)


@command("drop", group, example="quire snapshot drop shop monday --yes")
def drop(
    cli: Cli,
    database: Database,
    snapshot: Snapshot,
    now: Annotated[bool, Option("--now", help="Permanently; also for one dropped before.")] = False,
    yes: Yes = False,
) -> Note:
    """Drop a snapshot. Its name can be reused at once; `quire snapshot undrop` restores it within a day.

    Data that only this snapshot refers to is deleted after that day (maintenance.undrop_seconds), with --now after a minute or
    more.
    """
    with cli.owner() as store:
        info = snapshot_named(store.manifest, database, snapshot)
        with store.manifest.read() as txn:
            share = snapshots_share(txn, info.db_id, [info.snapshot_id])
        if not yes:
            seconds = 0 if now or info.expires_at_ms else int(store.settings.maintenance.undrop_seconds)
            back = f" (it can be brought back for {_length(seconds)})" if seconds else " (it cannot be brought back)"
            question = f"drop snapshot {title_of(info)} of {database}, {share_clause(share)}{back}?"
            confirm(question, "nothing was dropped", {"dropped": None, "until_ms": None, "share": None})
        store.drop_snapshot(info.db_id, info.snapshot_id, undoable=not now)
        left = next(
            (kept for kept in store.manifest.snapshots.of(info.db_id) if kept.snapshot_id == info.snapshot_id), None
        )
    until_ms = left.expires_at_ms if left is not None else None
    later = share_later(share) if until_ms is None else _can_return(database, info, until_ms)
    return Note(
        text=f"dropped snapshot {title_of(info)} of {database}{later}",
        data={"dropped": snapshot_json(info, database), "until_ms": until_ms, "share": share_json(share)},
    )


def _length(seconds: int) -> str:
    return "a day" if seconds == 86_400 else span(seconds * 1000)


def _can_return(database: str, info: SnapshotInfo, until_ms: int) -> str:
    words = shlex.join([database, info.name or f"#{info.snapshot_id}"])
    return f"; `quire snapshot undrop {words}` brings it back until {moment(until_ms)}"


@command("undrop", group, example="quire snapshot undrop shop monday")
def undrop(
    cli: Cli,
    database: Database,
    snapshot: Annotated[str, Argument(metavar="NAME", help="The snapshot's former name, or its id (#7).")],
    new: Annotated[str, Option("--as", metavar="NEW", help="A new name.", show_default="its former name")] = "",
) -> Note:
    """Restore a dropped snapshot.

    If several had this name, the last one dropped is restored. `quire snapshot ls` lists them as `dropped`.
    """
    need_no_number(new)
    with cli.owner_or_client() as store:
        back = store.undrop_snapshot(database, snapshot, new_name=new)
    return Note(text=f"restored snapshot {title_of(back)} of {database}", data=snapshot_json(back, database))


# ── diff ──────────────────────────────────────────────────────────────────────────────────────────────────────────────
class DiffSide(msgspec.Struct, frozen=True):
    """One side of a comparison; snapshot 0 is the current state of the database."""

    database: str
    size_pages: int
    snapshot_id: int = 0
    snapshot: str = ""

    @property
    def text(self) -> str:
        if not self.snapshot_id:
            return f"{self.database} as it is now"
        name = f"{self.snapshot} (id {self.snapshot_id})" if self.snapshot else f"#{self.snapshot_id}"
        return f"{self.database} at snapshot {name}"


@command("diff", group, example="quire snapshot diff shop monday")
def diff(
    cli: Cli,
    database: Database,
    before: Annotated[str, Argument(metavar="A", help="A snapshot's name or id, or `now`; with --rows also a time.")],
    after: Annotated[str, Argument(metavar="[B]", help="As A.", show_default=f"default: {NOW}")] = NOW,
    of: Annotated[str, Option("--of", metavar="OTHERDB", help="B is a version of this database, such as a fork.")] = "",
    rows: Annotated[bool, Option("--rows", help="Compare the rows of all tables.")] = False,
    table: Annotated[list[str] | None, Option("--table", metavar="NAME", help="Only this table; repeatable.")] = None,
    limit: Annotated[int, Option(min=0, metavar="N", help="Slots to list, or rows of each table; 0 for all.")] = 20,
) -> Report:
    """Show what differs between two versions.

    Compares slots, chunks, pages, and the WAL that only one of them pins. No page is read: versions share equal pages. For a
    database that is being written, `now` is the last sealed WAL segment, at most a minute old.

    With --rows, the tables whose pages differ are read, and the rows that were inserted (+), deleted (-) and updated (~) shown.
    """
    if rows or table:
        from quire.cli.row_diff import row_diff  # loads SQLite and Arrow

        return row_diff(cli, (database, before), (of or database, after), table or [], limit)
    with cli.reader() as manifest:
        first = _version(manifest, database, before)
        second = _version(manifest, of or database, after)
        difference = manifest.snapshots.diff(
            first.database, first.snapshot_id or None, second.snapshot_id or None, other=second.database
        )
        added, removed = _bytes(manifest, difference)
        unsealed = [side.database for side in (first, second) if not side.snapshot_id and _is_open(manifest, side)]
    lines = _summary(first, second, difference, added, removed)
    if unsealed:
        lines.append(("not included", f"the open WAL segment of {unsealed[0]}, which is sealed within a minute"))
    facts = Facts(lines=lines, data=None)
    data = {
        "before": plain(first),
        "after": plain(second),
        "same": difference.same,
        "unsealed": bool(unsealed),
        **plain(difference),
    }
    if not difference.slots:
        return Report(parts=[facts], data=data)
    shown = difference.slots[:limit] if limit else difference.slots
    left = len(difference.slots) - len(shown)
    slots = Listing(
        columns=[">slot", ">pages", "before", "after"],
        rows=[ListingRow(_slot_cells(slot), None) for slot in shown],
        closing=f"{left:,} more slots: `--limit 0` shows all" if left else "",
    )
    return Report(parts=[facts, slots], data=data)


def _version(manifest: ManifestStore, database: str, text: str) -> DiffSide:
    try:
        info = snapshot_named(manifest, database, text)
    except UnknownSnapshot:
        if text != NOW:
            raise
        with manifest.read() as txn:
            wal = txn.wal_state(txn.database_id(database))
        return DiffSide(database, wal.size_pages if wal else 0)
    return DiffSide(database, info.size_pages, info.snapshot_id, info.name)


def _is_open(manifest: ManifestStore, version: DiffSide) -> bool:
    """Return whether a database has an unsealed WAL segment: it is being written, or its owner crashed."""
    with manifest.read() as txn:
        rows = txn.scan(t.WAL_CATALOG, txn.database_id(version.database))
        return any(row.state is WalState.OPEN for _, row in rows)


def _bytes(manifest: ManifestStore, difference: SnapshotDiff) -> tuple[int, int]:
    with manifest.read() as txn:
        added, removed = (
            sum(artifact_bytes(txn.artifact(key)) for key in keys) for keys in (difference.added, difference.removed)
        )
        return added, removed


def _summary(
    first: DiffSide, second: DiffSide, difference: SnapshotDiff, added: int, removed: int
) -> list[tuple[str, str]]:
    lines = [("before", first.text), ("after", second.text)]
    if difference.same:
        return [*lines, ("differences", "none: both are the same version")]
    chunks = [
        f"{len(keys):,} only {where} ({size(bytes_)})"
        for keys, where, bytes_ in ((difference.removed, "before", removed), (difference.added, "after", added))
        if keys
    ]
    pins = [
        f"{count_of(len(pins), 'segment')} only {where} ({size(sum(pin.used_bytes for pin in pins))})"
        for pins, where in ((difference.pins_removed, "before"), (difference.pins_added, "after"))
        if pins
    ]
    differ = (
        f"{len(difference.slots):,} {'differs' if len(difference.slots) == 1 else 'differ'}"
        if difference.slots
        else "none differs"
    )
    return [
        *lines,
        ("slots", differ),
        ("chunks", ", ".join(chunks) or "no difference"),
        ("pages", _pages_text(difference, max(first.size_pages, second.size_pages))),
        ("WAL", ", ".join(pins) or "no difference"),
    ]


def _pages_text(difference: SnapshotDiff, size_pages: int) -> str:
    besides = ", and those in the WAL" if difference.pins_added or difference.pins_removed else ""
    listed_pages = sum(len(slot.pages) for slot in difference.slots if slot.pages is not None)
    if difference.pages == listed_pages and any(slot.pages is None for slot in difference.slots):
        return "any in these slots: the page size is not set before the database is first opened"
    return f"at most {count_of(min(difference.pages, size_pages) if size_pages else difference.pages, 'page')}{besides}"


def _slot_cells(slot: SlotDiff) -> list[str]:
    origin = (slot.after or slot.before)[0].origin_db_id
    pages = "all" if slot.pages is None else f"{len(slot.pages):,}"
    return [f"{slot.slot:,}", pages, *(chain_text(chain, origin) or "-" for chain in (slot.before, slot.after))]


# ── text and JSON ─────────────────────────────────────────────────────────────────────────────────────────────────────
def about(snapshot: SnapshotInfo) -> str:
    """Format the purpose of an automatic snapshot, the expiry of a snapshot, and its tags."""
    own = {WINDOW_TAG, DROPPED_TAG}
    tags = {
        key: value
        for key, value in snapshot.tags.items()
        if key not in own and value not in (LENT_TAGS.get(key), FORKS_TAGS.get(key))
    }
    expires = f"expires {moment(snapshot.expires_at_ms)}" if snapshot.expires_at_ms else ""
    return ", ".join(filter(None, (purpose(snapshot.tags), expires, tags_text(tags))))


def purpose(tags: Mapping[str, str]) -> str:
    """Return the purpose of a snapshot that was not created by a user; empty for any other."""
    if tags.items() >= LENT_TAGS.items():
        return "held by a query (Spark or another reader)"
    if tags.items() >= FORKS_TAGS.items():
        return "for forks that are being made"
    if DROPPED_TAG in tags:
        return f"dropped, was {tags[DROPPED_TAG]}" if tags[DROPPED_TAG] else "dropped"
    return "for time travel" if WINDOW_TAG in tags else ""


def snapshot_json(info: SnapshotInfo, database: str) -> dict[str, Any]:
    """Return a snapshot as JSON, with the name of its database."""
    return {**plain(info), "database": database}


def share_json(share: ExclusiveShare) -> dict[str, Any]:
    """Return a share as JSON, with its number of artifacts."""
    return {**plain(share), "artifacts": share.artifacts}


def share_words(share: ExclusiveShare) -> str:
    """Format a share as a list: `2 chunks, 1 WAL segment (64.0 MiB)`."""
    parts = [
        count_of(number, one)
        for number, one in ((share.chunks, "chunk"), (share.deltas, "delta"), (share.wal_segments, "WAL segment"))
        if number
    ]
    return f"{', '.join(parts)} ({size(share.size_bytes)})" if parts else "nothing"


def share_clause(share: ExclusiveShare, holders: int = 1) -> str:
    """Format what dropping `holders` snapshots deletes, as the end of a question."""
    if not share.artifacts:
        return f"which {'shares all its' if holders == 1 else 'share all their'} chunks and segments"
    return f"and delete {share_words(share)} that only {'it holds' if holders == 1 else 'they hold'}"


def share_later(share: ExclusiveShare) -> str:
    """Format what a drop will delete, as the end of a sentence."""
    return f"; {share_words(share)} will be deleted (see `quire gc --dry-run`)" if share.artifacts else ""
