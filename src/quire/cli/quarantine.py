"""Commands about the quarantine: ls, restore, rm.

`ls` reads only files, so it works alongside an owner and on a store whose manifest does not open. The others take the store's
lock but do not open the store: what they repair may be what keeps it from opening.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

from quire.archive.state_files import take_archive_state
from quire.cli.declarations import Argument, Group, command
from quire.cli.formatting import count_of, size
from quire.cli.lookup import Yes
from quire.cli.output import Listing, ListingRow, Note
from quire.cli.prompts import confirm
from quire.core.clock import moment
from quire.core.errors import InvalidInput, NotFound
from quire.durable.files import OsDisk
from quire.durable.locks import FileLock
from quire.durable.names import LOCK
from quire.durable.quarantine import entries, remove
from quire.durable.quarantine import restore as put_back

if TYPE_CHECKING:
    from quire.cli.command import Cli

Number = Annotated[int, Argument(metavar="NUMBER", min=1, help="Its number in `quire quarantine ls`.")]


group = Group("quarantine")


@command("ls", group, example="quire quarantine ls")
def ls(cli: Cli) -> Listing:
    """List quarantined files, with their original paths and reasons."""
    rows = [
        ListingRow(
            [str(entry.number), moment(entry.moved_ms), size(entry.size_bytes), entry.path or "-", entry.why],
            {
                "number": entry.number,
                "path": entry.path,
                "place": entry.place if entry.path else "",
                "why": entry.why,
                "moved_ms": entry.moved_ms,
                "database": entry.database,
                "size_bytes": entry.size_bytes,
            },
        )
        for entry in entries(OsDisk(), _root(cli))
    ]
    return Listing(columns=[">number", "moved", ">size", "was", "why"], rows=rows, empty="the quarantine is empty")


@command("restore", group, example="quire quarantine restore 1")
def restore(cli: Cli, number: Number) -> Note:
    """Move a file back to its original path.

    The file is not used until `quire stream repair` or `quire kv repair` is run on its database.
    """
    with _owned(cli, [number]) as root:
        entry = put_back(OsDisk(), root, number)
    return Note(text=f"restored {entry.path}", data={"number": number, "path": entry.path})


@command("rm", group, example="quire quarantine rm 2 --yes")
def rm(
    cli: Cli,
    numbers: Annotated[
        list[int] | None, Argument(metavar="NUMBER...", help="Numbers in `quire quarantine ls`.")
    ] = None,
    yes: Yes = False,
) -> Note:
    """Delete files in quarantine permanently."""
    if not numbers:
        raise InvalidInput("no files were named", hint="`quire quarantine ls` lists them by number")
    numbers = list(dict.fromkeys(numbers))
    question = "" if yes else f"permanently remove {count_of(len(numbers), 'file')}?"
    with _owned(cli, numbers, question) as root:
        for number in numbers:
            remove(OsDisk(), root, number)
    return Note(text=f"removed {count_of(len(numbers), 'file')}", data={"removed": numbers})


def _root(cli: Cli) -> str:
    cli.settings()  # raises if there is no store
    return os.path.abspath(cli.path)


@contextmanager
def _owned(cli: Cli, numbers: Sequence[int], question: str = "") -> Iterator[str]:
    """Hold the store's lock, and yield its directory. Raises `NotFound` before anything is changed if a file is not there.

    A question is asked under the lock: otherwise another process could remove a file meanwhile, and give its number to a later
    one.
    """
    root = _root(cli)
    lock = FileLock.acquire(os.path.join(root, LOCK))
    try:
        known = {entry.number for entry in entries(OsDisk(), root)}
        for number in numbers:
            if number not in known:
                hint = "`quire quarantine ls` lists them"
                raise NotFound("no file in quarantine has this number", hint=hint, number=number)
        if question:
            confirm(question, "nothing was removed", {"removed": []})
        take_archive_state(OsDisk(), root)  # these changes are not archived, so the archive must begin with a new base
        yield root
    finally:
        lock.close()
