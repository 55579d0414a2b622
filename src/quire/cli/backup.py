"""Commands about backups: backup, restore-db."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from quire.cli.declarations import Argument, Option, command
from quire.cli.formatting import count_of, size
from quire.cli.job_progress import Bars
from quire.cli.lookup import AllowHttp, Endpoint, Moment, Region, StoreId, moment_given, options_given
from quire.cli.output import Note
from quire.core.clock import moment

if TYPE_CHECKING:
    from quire.cli.command import Cli


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
    endpoint: Endpoint = "",
    region: Region = "",
    allow_http: AllowHttp = False,
) -> Note:
    """Back up the store while it is in use.

    A directory or URL may already contain backups of this store: only what is new is copied, and every backup can be restored.
    `quire restore-store TARGET DIR` restores it. To restore a backup made with --since, the earlier one is needed too.
    """
    with cli.owner() as store, Bars() as bars:
        done = store.backup(
            target,
            since=since,
            options=options_given(endpoint, region, allow_http),
            progress=lambda step, count, total: bars.update(step, step, count, total),
        )
    text = (
        f"backed up {store.path} to {done.target} as of {moment(done.at_ms)}: "
        f"wrote {size(done.copied_bytes)}, the store's state and {count_of(done.copied, 'object')}"
    )
    if done.present:
        text += f"; {count_of(done.present, 'object')} already there"
    return Note(text=text, data=done)


@command("restore-db", example="quire restore-db s3://my-bucket/shop orders --at 2h --as orders_then")
def restore_db(
    cli: Cli,
    url: Annotated[str, Argument(metavar="URL", help="An archive or a backup, such as this store's own bucket.")],
    name: Annotated[str, Argument(metavar="NAME", help="The database's name in the archive.")],
    at: Moment = "",
    new: Annotated[str, Option("--as", metavar="NEW", help="Its name in this store.", show_default="NAME")] = "",
    store_id: StoreId = "",
    endpoint: Endpoint = "",
    region: Region = "",
    allow_http: AllowHttp = False,
) -> Note:
    """Copy one database out of an archive or backup.

    Streams and key-value sets can be copied as well.

    The archive is restored to a temporary directory and stays unchanged. The database appears under its new name when it is
    complete and has been compared with the archive. Its snapshots are not copied; records of a stream get new ids and times.
    """
    at_ms = moment_given(at)
    with cli.owner() as store, Bars() as bars:
        done = store.restore_db(
            url,
            name,
            new=new,
            at_ms=at_ms,
            store_id=store_id,
            options=options_given(endpoint, region, allow_http),
            progress=lambda step, count, total: bars.update(step, step, count, total),
        )
    items = {"PAGES": "page", "STREAM": "record", "LSM": "pair"}[done.kind.name]
    text = f"restored {done.name} as of {moment(done.at_ms)}: {count_of(done.items, items)}, compared with the archive"
    return Note(text=text, data=done)
