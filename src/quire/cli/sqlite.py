"""Commands about SQLite databases: import, export, follow and shell.

Rules
  1. Each needs the owner: versions come and go while they are read.
  2. Progress is on stderr, only on a terminal, and gone at the end.
  3. A version is named by a snapshot, by its epoch (`3:4711`, as exports print it), or by a moment: the first that fits, in
     this order.
"""

from __future__ import annotations

import re
import sys
from contextlib import ExitStack
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from quire.cli.command import Cli, Verdict, on_terminal
from quire.cli.exits import OK
from quire.cli.logging import Log, log_to
from quire.cli.named import Database, need_pages, settled, snapshot_named, title_of
from quire.cli.output import Note
from quire.cli.plain import count_of, moment, size, visible
from quire.cli.times import moment_of
from quire.cli.typed import command, new_app
from quire.core.errors import InvalidInput, UnknownSnapshot
from quire.core.ids import Epoch
from quire.core.plain import plain

if TYPE_CHECKING:
    from datetime import datetime

    from rich.progress import Progress, TaskID

    from quire.manifest.snapshots import SnapshotInfo
    from quire.manifest.store import ManifestStore
    from quire.sqlite.follow import Followed

INTERVAL_SECONDS_MIN = 0.01

_EPOCH = re.compile(r"([0-9]{1,10}):([0-9]{1,20})")

At = Annotated[
    str,
    typer.Option("--at", metavar="VERSION", help="A snapshot, an epoch or a moment.", show_default="as it is now"),
]
File = Annotated[str, typer.Argument(metavar="FILE", help="The SQLite database file.")]
Name = Annotated[
    str, typer.Argument(metavar="[DB]", help="The database's name here.", show_default="as the file is called")
]


def add_to(app: typer.Typer) -> None:
    """Register these commands."""
    group = new_app("SQLite databases: in, out, followed, by hand.")
    command(group, "import", example="quire sqlite import ./shop.db")(import_)
    command(group, "export", example="quire sqlite export shop ./monday.db --at monday")(export)
    command(group, "follow", example="quire sqlite follow ./app.db app")(follow)
    command(group, "shell", example="quire sqlite shell shop --at monday")(shell)
    app.add_typer(group, name="sqlite")


# ── in and out ────────────────────────────────────────────────────────────────────────────────────────────────────────
def import_(
    cli: Cli,
    file: File,
    name: Name = "",
    lock: Annotated[
        bool, typer.Option("--lock/--no-lock", help="Whether to keep programs from writing meanwhile.")
    ] = True,
) -> Note:
    """Import a SQLite database, with its -wal file.

    It becomes a new database, or a new version of one: then only the pages that differ are written. Other programs may use the
    file meanwhile. What was written is read back and compared.
    """
    from quire.sqlite.importing import import_file

    with cli.owner(upkeep=True) as store, Bars() as bars:
        done = import_file(store.manifest, store.pages, file, name, lock=lock, progress=bars)
    total = size(done.size_pages * done.page_size)
    if done.created:
        text = f"imported {file} as {done.name}: {count_of(done.size_pages, 'page')}, {total}"
    elif done.changed_pages:
        changed = f"{done.changed_pages:,} of {count_of(done.size_pages, 'page')}"
        text = f"imported {file} into {done.name}: {changed} differ, {total}"
    else:
        text = f"{done.name} is as {file} already: {count_of(done.size_pages, 'page')}, {total}"
    return Note(text=f"{text}\n{done.note}" if done.note else text, data=done)


def export(
    cli: Cli,
    database: Database,
    out: Annotated[str, typer.Argument(metavar="OUT", help="The file to write.")],
    at: At = "",
    force: Annotated[bool, typer.Option("--force", help="Replace the file if there is one.")] = False,
    check: Annotated[bool, typer.Option("--check", help="Have SQLite check it (integrity_check).")] = False,
) -> Note:
    """Export a version of a database to an ordinary SQLite file.

    The file appears when it is whole, synced, and was read back and compared.
    """
    from quire.sqlite.exporting import export_file

    with cli.owner(upkeep=True) as store:
        need_pages(store.database(database), "can be exported")
        version = version_of(store.manifest, database, at)
        settled(store, database)
        with Bars() as bars:
            done = export_file(
                store.pages,
                database,
                out,
                snapshot=version.snapshot.snapshot_id if version.snapshot else None,
                at=version.at,
                force=force,
                check=check,
                progress=bars,
            )
    checked = ", checked by SQLite" if done.checked else ""
    text = f"exported {database} {version.text} to {out}: {count_of(done.size_pages, 'page')}, "
    return Note(text=f"{text}{size(done.size_pages * done.page_size)}{checked}", data=done)


# ── following ─────────────────────────────────────────────────────────────────────────────────────────────────────────
def follow(
    cli: Cli,
    file: File,
    name: Name = "",
    once: Annotated[bool, typer.Option("--once", help="Take over what is new, and end.")] = False,
    interval: Annotated[float, typer.Option(metavar="SECONDS", help="Between two looks at the file.")] = 0.25,
    log: Log = "",
) -> Note:
    """Follow a SQLite file that another program writes.

    Until Ctrl-C, or `--once`. Each of its transactions becomes a version here, as soon as it is seen. The program is not
    disturbed.
    """
    from quire.cli.working import until_interrupted
    from quire.sqlite.follow import Follower

    log_to(log)
    if not interval >= INTERVAL_SECONDS_MIN:
        hint = f"say {INTERVAL_SECONDS_MIN} or more"
        raise InvalidInput("`--interval` takes seconds", hint=hint, given=interval)
    with cli.owner(upkeep=True) as store, Bars() as bars:
        follower = Follower(
            manifest=store.manifest, pages=store.pages, root=store.path, path=file, name=name, progress=bars
        )
        if once:
            follower.look()
        else:
            with until_interrupted() as stop:
                if sys.stderr.isatty():
                    sys.stderr.write(visible(f"following {file} as {follower.name}; Ctrl-C ends it") + "\n")
                follower.run(stop, interval)
    data = {"name": follower.name, "path": follower.path, **plain(follower.done)}
    return Note(text=followed_text(follower.done, file, follower.name), data=data)


def followed_text(done: Followed, file: str, name: str) -> str:
    """What a follower did."""
    parts = [
        count_of(number, one)
        for number, one in (
            (done.transactions, "transaction"),
            (done.patches, "patch over a log begun anew"),
            (done.compares, "comparison of all pages"),
        )
        if number
    ]
    if not parts:
        return f"{name} is as {file}: nothing was new"
    return f"{name} is as {file}: {', '.join(parts)}; {count_of(done.pages, 'page')} written"


# ── by hand ───────────────────────────────────────────────────────────────────────────────────────────────────────────
def shell(
    cli: Cli,
    database: Database,
    statements: Annotated[
        list[str], typer.Argument(metavar="[SQL]...", help="Run these instead of asking.", show_default=False)
    ] = [],  # noqa: B006 - typer makes a new one
    at: At = "",
) -> Verdict:
    """Open SQLite's shell on a database or a version of it.

    An earlier version is for reading.
    """
    from quire.sqlite.terminal import run_shell

    with cli.owner(upkeep=True) as store:
        need_pages(store.database(database), "have a shell")
        version = version_of(store.manifest, database, at)
        settled(store, database)
        wanted = version.at if version.snapshot is None else version.snapshot.name or version.snapshot.anchor_lsn
        connection = store.sqlite(database, at=wanted)
        try:
            code = run_shell(connection, visible(f"{database} {version.text}"), statements)
        finally:
            connection.close()
    return Verdict(None, code or OK)


# ── versions ──────────────────────────────────────────────────────────────────────────────────────────────────────────
class Version(msgspec.Struct, frozen=True):
    """Which version is meant: a snapshot, what was current at an epoch or a time, or (neither) the newest."""

    text: str
    snapshot: SnapshotInfo | None = None
    at: Epoch | datetime | None = None


def version_of(manifest: ManifestStore, database: str, text: str) -> Version:
    """What people typed for a version (rule 3)."""
    if not text:
        return Version("as it is now")
    try:
        found = snapshot_named(manifest, database, text)
        return Version(f"as of snapshot {title_of(found)}", snapshot=found)
    except UnknownSnapshot as unknown:
        if epoch := _EPOCH.fullmatch(text):
            return Version(f"as of epoch {text}", at=Epoch(int(epoch[2]), int(epoch[1])))
        try:
            at_ms = moment_of(text, "--at", now_ms=manifest.clock.now_ms())
        except InvalidInput:
            raise unknown from None
    from datetime import UTC, datetime

    return Version(f"as it was {moment(at_ms)}", at=datetime.fromtimestamp(at_ms / 1000, UTC))


# ── what people see meanwhile ─────────────────────────────────────────────────────────────────────────────────────────
class Bars:
    """A bar for what is being done (rule 2), with its rate and the time left. It is a `quire.sqlite.copying.Progress`."""

    def __init__(self) -> None:
        self._wanted = on_terminal()
        self._closing = ExitStack()
        self._progress: Progress | None = None
        self._bars: dict[str, TaskID] = {}

    def __enter__(self) -> Bars:
        return self

    def __exit__(self, *_: object) -> None:
        self._closing.close()

    def __call__(self, doing: str, done: int, total: int) -> None:
        if not self._wanted:
            return
        progress = self._progress or self._start()
        if doing not in self._bars:
            self._bars[doing] = progress.add_task(doing, total=total)
        progress.update(self._bars[doing], completed=done, total=total)
        if done >= total:
            progress.remove_task(self._bars.pop(doing))

    def _start(self) -> Progress:
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            DownloadColumn,
            Progress,
            TextColumn,
            TimeRemainingColumn,
            TransferSpeedColumn,
        )

        columns: list[Any] = [
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=20),
            DownloadColumn(binary_units=True),
            TransferSpeedColumn(),
            TimeRemainingColumn(),
        ]
        self._progress = Progress(*columns, console=Console(stderr=True), transient=True)
        return self._closing.enter_context(self._progress)
