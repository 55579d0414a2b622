"""Commands about backups: backup."""

from __future__ import annotations

from typing import Annotated

from quire.cli.command import Cli
from quire.cli.declarations import Argument, Option, command
from quire.cli.formatting import count_of, moment, size
from quire.cli.job_progress import Bars
from quire.cli.output import Note


@command("backup", example="quire backup /mnt/backups/shop")
def backup(
    cli: Cli,
    target: Annotated[
        str, Argument(metavar="TARGET", help="A directory, a URL (s3://…, gs://…, az://…) or a new .tar file.")
    ],
    since: Annotated[
        str,
        Option("--since", metavar="PREVIOUS", help="An earlier backup elsewhere: what it has is not copied again."),
    ] = "",
) -> Note:
    """Back up the store while it is in use.

    A directory or URL may already contain backups of this store: only what is new is copied, and every backup can be restored.
    A backup with --since needs the earlier one to be restored. Restore with `quire restore-store TARGET DIR`.
    """
    with cli.owner() as store, Bars() as bars:
        done = store.backup(
            target, since=since, progress=lambda step, count, total: bars.update(step, step, count, total)
        )
    text = (
        f"backed up {store.path} to {done.target} as of {moment(done.at_ms)}: "
        f"copied {count_of(done.copied, 'object')}, {size(done.copied_bytes)}"
    )
    if done.present:
        text += f"; {done.present:,} already there"
    return Note(text=text, data=done)
