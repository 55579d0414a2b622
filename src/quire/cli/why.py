"""The command `why`: what keeps a database, a snapshot, a segment, a chunk or an object, and what would release it."""

from __future__ import annotations

import os
from contextlib import suppress
from typing import TYPE_CHECKING, Annotated

from quire.cli.declarations import Argument, command
from quire.cli.formatting import size
from quire.cli.output import Facts, Listing, ListingRow, Report
from quire.core.errors import InvalidInput, NotFound, ObjectNotFound, Unavailable
from quire.core.reader_info import ReaderInfo
from quire.service.local_owner import find_owner
from quire.store.layout import objects_url
from quire.store.object_access import open_place
from quire.store.why import readers_at
from quire.store.why import why as ask
from quire.store.why_files import on_disk

if TYPE_CHECKING:
    from quire.cli.command import Cli
    from quire.manifest.reads import ReadTxn


@command("why", example="quire why shop")
def why(
    cli: Cli,
    subject: Annotated[
        str,
        Argument(
            metavar="WHAT",
            help="A database's or namespace's name, DB@SNAPSHOT, DB:PAGE, a file's path, or an object's key.",
        ),
    ],
) -> Report:
    """Explain why data is retained and how to free it."""
    with cli.reader() as manifest, manifest.read() as txn:
        asked, root = _within(cli, subject), os.path.abspath(cli.path)
        answer = ask(txn, asked, lambda path: _size(cli, txn, path), lambda db_id: _readers(txn, root, db_id))
        answer = on_disk(txn, root, asked, answer)
    facts = [("what", f"{answer.kind} {answer.subject}"), ("state", answer.state), ("bytes", size(answer.size_bytes))]
    if answer.disk_bytes:
        facts.append(("on disk", size(answer.disk_bytes)))
    if answer.kind in ("segment", "base", "delta"):
        facts.append(("references", str(answer.references)))
    rows = [ListingRow([holder.kind, holder.name, holder.what, holder.release], holder) for holder in answer.holders]
    columns = ["held by", "name", "because", "released by"]
    return Report(
        parts=(Facts(lines=facts, data=None), Listing(columns=columns, rows=rows, empty="nothing holds it")),
        data=answer,
    )


def _readers(txn: ReadTxn, root: str, db_id: int) -> list[ReaderInfo]:
    """Return the readers of a database: from its owner, if it serves, since its own readers are only in memory; else those
    with lease files."""
    record = txn.database(db_id)
    if record is not None and (owner := find_owner(root)) is not None:
        with suppress(Unavailable, NotFound, InvalidInput), owner:  # it has ended, or is too old to support the call
            return owner.readers(record.name)
    return readers_at(root)(db_id)


def _within(cli: Cli, subject: str) -> str:
    """Strip the store's directory from a path that the shell completed, and the object store's URL from an object's address."""
    if "/" not in subject:
        return subject
    root = os.path.abspath(cli.path)
    if os.path.exists(subject) and os.path.abspath(subject).startswith(f"{root}/"):
        subject = os.path.relpath(os.path.abspath(subject), root)
    if "://" in subject:
        subject = subject.removeprefix(objects_url(root, cli.settings()).rstrip("/") + "/")
    return subject


def _size(cli: Cli, txn: ReadTxn, path: str) -> int | None:
    """Return the size in bytes of a file in the store or of an object, `None` if neither exists."""
    root = os.path.abspath(cli.path)
    try:
        return os.stat(os.path.join(root, path)).st_size
    except OSError:
        pass  # then it is an object
    store = open_place(txn, root, cli.settings())
    try:
        return store.head(path).size_bytes
    except (ObjectNotFound, InvalidInput):
        return None
    finally:
        store.close()
