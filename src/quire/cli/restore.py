"""The command `restore`: a snapshot of a page database as a file, written in parallel."""

from __future__ import annotations

from typing import Annotated

from quire.cli.checkpoint import DryRun, Runner, need_runner
from quire.cli.command import Cli
from quire.cli.declarations import Argument, Group, Option, command
from quire.cli.formatting import count_of, size
from quire.cli.job_progress import bar
from quire.cli.lookup import Database, Snapshot, need_pages, snapshot_named
from quire.cli.output import Note


def add_to(app: Group) -> None:
    """Register this command."""
    command(app, "restore", example="quire restore shop monday shop-monday.db")(restore)


def restore(
    cli: Cli,
    database: Database,
    snapshot: Snapshot,
    file: Annotated[str, Argument(metavar="FILE", help="Where to write it.")],
    replace: Annotated[bool, Option("--replace", help="Replace an existing file.")] = False,
    runner: Runner = "",
    dry_run: DryRun = False,
) -> Note:
    """Write a snapshot to a file.

    Slots are read and written in parallel. Of a SQLite database the file is one that SQLite opens.
    """
    need_runner(runner)
    with cli.owner() as store:
        need_pages(store.database(database), "are restored page by page")
        found = snapshot_named(store, database, snapshot)
        if dry_run:
            view = store.view(database, found.snapshot_id)
            pages, plain = view.size_pages, view.size_pages * view.page_size
            planned = {"path": file, "pages": pages, "bytes": plain, "lsn": view.lsn, "dry_run": True}
            return Note(text=f"would write {file}: {count_of(pages, 'page')}, {size(plain)}", data=planned)
        with bar(f"restore of {database}") as told:
            done = store.heavy.restore(database, found.snapshot_id, file, runner=runner, replace=replace, progress=told)
    text = f"{done['path']}: {count_of(done['pages'], 'page')}, {size(done['bytes'])}, as of lsn {done['lsn']:,}"
    return Note(text=text, data=done)
