"""Commands about SQLite databases: import, export, follow and shell.

Rules
  1. Import and follow need the owner. A shell alongside another owner sends its SQL to the owner's server, or reads what the
     owner has published. Shell and export also read a directory that is not the owner: a standby, a restore, a fenced one.
  2. Progress is shown on stderr, only on a terminal, and removed at the end.
"""

from __future__ import annotations

import shlex
import sys
from contextlib import ExitStack
from typing import TYPE_CHECKING, Annotated

from quire.cli.declarations import Argument, Group, Option, command
from quire.cli.errors import OK
from quire.cli.formatting import count_of, size, visible
from quire.cli.job_progress import Bars
from quire.cli.lookup import At, Database, Log, log_to, need_pages, recover_wal, version_of
from quire.cli.output import CliResult, Note, Report, until_interrupted
from quire.cli.prompts import REMOTE_ANSWER
from quire.core.errors import AlreadyExists, InvalidInput, StoreFenced, StoreLocked, UnknownDatabase
from quire.core.json_values import plain
from quire.manifest.records import DbKind
from quire.sqlite.exporting import export_file
from quire.sqlite.follow import Followed, Follower
from quire.sqlite.importing import import_file, name_for
from quire.sqlite.shell import run_shell

if TYPE_CHECKING:
    from quire.cli.command import Cli
    from quire.manifest.snapshots import SnapshotInfo
    from quire.sqlite.pep249.driver import Driver
    from quire.store.store import Store

INTERVAL_SECONDS_MIN = 0.01

File = Annotated[str, Argument(metavar="FILE", help="The SQLite database file.")]
Name = Annotated[str, Argument(metavar="[DB]", help="The database's name.", show_default="default: the file's name")]


group = Group("sqlite")


# ── import and export ─────────────────────────────────────────────────────────────────────────────────────────────────
@command("import", group, example="quire sqlite import ./shop.db")
def import_(
    cli: Cli,
    file: File,
    name: Name = "",
    lock: Annotated[
        bool, Option("--lock/--no-lock", help="Prevent other programs from writing during the import.")
    ] = True,
    replace: Annotated[bool, Option("--replace", help="Replace the content of an existing database.")] = False,
) -> Report:
    """Import a SQLite database, with its -wal file.

    It becomes a new database; with --replace, a new version of an existing one, of which only the changed pages are written,
    and the previous content is kept as a snapshot. Other programs may read the file during the import. The result is read
    back and compared.
    """
    with cli.owner(upkeep=True) as store, Bars(in_bytes=True) as bars:
        before = _kept_before(store, name or name_for(file), replace=replace)
        try:
            done = import_file(store.manifest, store.pages, file, name, lock=lock, progress=bars)
        except BaseException:
            _drop_if_unchanged(store, before)
            raise
        if before is not None and not done.changed_pages:
            store.drop_snapshot(before.db_id, before.snapshot_id)
            before = None
    total = size(done.size_pages * done.page_size)
    if done.created:
        text = f"imported {file} as {done.name}: {count_of(done.size_pages, 'page')}, {total}"
    elif done.changed_pages:
        changed = f"{done.changed_pages:,} of {count_of(done.size_pages, 'page')}"
        text = f"imported {file} into {done.name}: {changed} differ, {total}"
    else:
        text = f"{done.name} already matches {file}: {count_of(done.size_pages, 'page')}, {total}"
    back = f"go back with `quire rollback {shlex.quote(done.name)} --to '#{before.snapshot_id}'`" if before else ""
    data = {**plain(done), "snapshot_id": before.snapshot_id if before else 0}
    return Report(parts=[Note(text=line, data=None) for line in (text, back, done.note) if line], data=data)


def _kept_before(store: Store, name: str, *, replace: bool) -> SnapshotInfo | None:
    """Return a snapshot of what an import replaces, `None` if there is nothing. Raises `AlreadyExists` without `replace`."""
    try:
        info = recover_wal(store, name)
    except UnknownDatabase:
        return None
    if info.kind is not DbKind.PAGES:
        return None  # refused by the import itself
    with store.pages.open(info.db_id).open_snapshot(written=True, tags={"reader": "sqlite import"}) as newest:
        if not newest.size_pages:
            return None
    if not replace:
        hint = "use `--replace` to replace its content, which keeps it as a snapshot, or import under another name"
        raise AlreadyExists("a database with this name already exists", hint=hint, name=name)
    return store.snapshot(name, tags={"before": "import"})


def _drop_if_unchanged(store: Store, before: SnapshotInfo | None) -> None:
    """Drop the snapshot that an import made, unless the import has failed after it changed the database."""
    if before is None:
        return
    with store.pages.open(before.db_id).open_snapshot(written=True, tags={"reader": "sqlite import"}) as newest:
        changed = newest.lsn != before.anchor_lsn
    if not changed:
        store.drop_snapshot(before.db_id, before.snapshot_id)


@command("export", group, example="quire sqlite export shop ./monday.db --at monday")
def export(
    cli: Cli,
    database: Database,
    out: Annotated[str, Argument(metavar="OUT", help="The file to write.")],
    at: At = "",
    force: Annotated[bool, Option("--force", help="Replace an existing file.")] = False,
    check: Annotated[bool, Option("--check", help="Run SQLite's integrity_check on it.")] = False,
) -> Note:
    """Export a version of a database to an ordinary SQLite file.

    The file appears only when it is complete, synced, and has been read back and compared.
    """
    with cli.readable(upkeep=True) as store:
        need_pages(store.database(database), "can be exported")
        version = version_of(store.manifest, database, at)
        if store.mode == "rw":
            recover_wal(store, database)
        with Bars(in_bytes=True) as bars:
            done = export_file(
                store.pages,
                database,
                out,
                snapshot=version.snapshot.snapshot_id if version.snapshot else None,
                at=version.at,
                published=store.mode == "r",
                force=force,
                check=check,
                progress=bars,
            )
    checked = ", checked by SQLite" if done.checked else ""
    text = f"exported {database} {version.text} to {out}: {count_of(done.size_pages, 'page')}, "
    return Note(text=f"{text}{size(done.size_pages * done.page_size)}{checked}", data=done)


# ── following ─────────────────────────────────────────────────────────────────────────────────────────────────────────
@command("follow", group, example="quire sqlite follow ./app.db app")
def follow(
    cli: Cli,
    file: File,
    name: Name = "",
    once: Annotated[bool, Option("--once", help="Copy new transactions and exit.")] = False,
    interval: Annotated[float, Option(metavar="SECONDS", help="Time between two checks of the file.")] = 0.25,
    log: Log = "",
) -> Note:
    """Follow a SQLite file that another program writes.

    Each of its transactions becomes a version of the database. The other program is not disturbed. Runs until Ctrl-C.

    If `quire serve` owns the store, the server follows the file, also after a restart, until `quire sqlite unfollow DB`.
    """
    log_to(log)
    if not interval >= INTERVAL_SECONDS_MIN:
        hint = f"use {INTERVAL_SECONDS_MIN} or more"
        raise InvalidInput("`--interval` is too short", hint=hint, given=interval)
    if REMOTE_ANSWER.get() is not None and not once:
        with cli.owner() as store:
            kept = store.followers.follow(file, name, interval_seconds=interval)
        stop = f"`quire sqlite unfollow {shlex.quote(kept.database)}` stops it"
        text = f"the server follows {kept.path} as {kept.database}; {stop}"
        return Note(text=text, data=kept)
    with cli.owner(upkeep=True) as store, Bars(in_bytes=True) as bars:
        follower = Follower(
            manifest=store.manifest, pages=store.pages, root=store.path, path=file, name=name, progress=bars
        )
        if once:
            follower.look()
        else:
            with until_interrupted() as interrupted:
                if sys.stderr.isatty():
                    sys.stderr.write(visible(f"following {file} as {follower.name}; Ctrl-C stops it") + "\n")
                follower.run(interrupted, interval)
    data = {"name": follower.name, "path": follower.path, **plain(follower.done)}
    return Note(text=followed_text(follower.done, file, follower.name), data=data)


@command("unfollow", group, example="quire sqlite unfollow app")
def unfollow(cli: Cli, database: Database) -> Note:
    """Stop following a SQLite file. The database stays."""
    with cli.owner() as store:
        ended = store.followers.stop(database)
    return Note(text=f"{database} no longer follows {ended.path}", data=ended)


def followed_text(done: Followed, file: str, name: str) -> str:
    """Format what a follower did."""
    parts = [
        count_of(number, one, many)
        for number, one, many in (
            (done.transactions, "transaction", "transactions"),
            (done.patches, "patch over a restarted log", "patches over restarted logs"),
            (done.compares, "comparison of all pages", "comparisons of all pages"),
        )
        if number
    ]
    if not parts:
        return f"{name} matches {file}: no changes"
    return f"{name} matches {file}: {', '.join(parts)}; {count_of(done.pages, 'page')} written"


# ── shell ─────────────────────────────────────────────────────────────────────────────────────────────────────────────
@command("shell", group, example="quire sqlite shell shop --at monday")
def shell(
    cli: Cli,
    database: Database,
    statements: Annotated[
        list[str] | None,
        Argument(metavar="[SQL]...", help="Statements to run; without any, a prompt opens.", show_default=False),
    ] = None,
    at: At = "",
) -> CliResult:
    """Open SQLite's shell on a database or a version of it.

    Earlier versions are read-only. If `quire serve` owns the store, SQL runs there, and commands such as `.tables` show what
    it has published; if another program owns it, or this directory is a standby, a restore or fenced, the shell only reads.
    """
    store, why_read_only = _at_hand(cli)
    with store, ExitStack() as closing:
        need_pages(store.database(database), "have a shell")
        version = version_of(store.manifest, database, at)
        beside = bool(why_read_only)
        if not beside:
            recover_wal(store, database)
        wanted = version.at if version.snapshot is None else version.snapshot.name or version.snapshot.anchor_lsn
        connection = store.sqlite(database, at=wanted)
        served = _served(cli, database, closing) if beside and not at else None
        read_only = f", read-only: {why_read_only}" if beside and served is None else ""
        title = f"{database} {version.text}{', at the server' if served is not None else read_only}"
        try:
            code = run_shell(connection, visible(title), statements or [], served=served)
        except InvalidInput as error:
            if type(error.__cause__).__name__ == "ReadOnlyError":
                error.hint = _where_to_write(database, at, why_read_only)
            raise
        finally:
            connection.close()
    return CliResult(None, code or OK)


def _served(cli: Cli, database: str, closing: ExitStack) -> Driver | None:
    """Open a connection at the server that owns the store. Return `None` if the owner does not serve it."""
    client = cli.listening_owner()
    if client is None:
        return None
    closing.enter_context(client)
    driver: Driver = client.sqlite_driver(database)
    closing.callback(driver.close)
    return driver


OWNED = "another process owns the store"
DISOWNED = "this directory is not the owner of its store"


def _where_to_write(database: str, at: str, why_read_only: str) -> str:
    """Return the hint for a write to a database that is open for reading."""
    if at:
        fork = f"`quire fork {shlex.quote(database)} NEW --at {shlex.quote(at)}`"
        return f"an earlier version is read-only: {fork} creates a writable copy"
    if why_read_only == DISOWNED:
        return "write to the owner; `quire doctor` shows the role of this directory"
    if why_read_only:
        return "have the process that owns the store serve it (`store.serve()`), or write there (`quire doctor` shows which)"
    return "the statement needs a database that is open for writing"


def _at_hand(cli: Cli) -> tuple[Store, str]:
    """Open the store as its owner, or else for reading. Return it, and why it is only read; empty if it is not."""
    try:
        return cli.owner(upkeep=True), ""
    except StoreFenced:
        return cli.open_read_only(), DISOWNED
    except StoreLocked:
        return cli.open_read_only(), OWNED
