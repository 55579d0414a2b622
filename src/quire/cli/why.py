"""The command `why`: what keeps a database, a segment, a chunk or an object, and what would release it."""

from __future__ import annotations

from typing import Annotated

from quire.cli.command import Cli
from quire.cli.declared import Argument, Group, command
from quire.cli.output import Facts, Listing, Report, Row
from quire.cli.plain import size


def add_to(app: Group) -> None:
    """Register this command."""
    command(app, "why", example="quire why pages/00000001/wal/00000001.seg")(why)


def why(
    cli: Cli,
    subject: Annotated[
        str, Argument(metavar="WHAT", help="A database's name, a file's path in the store, or an object's key.")
    ],
) -> Report:
    """Say what keeps something, and what would release it."""
    from quire.store.why import why as ask

    with cli.reader() as manifest, manifest.read() as txn:
        answer = ask(txn, subject)
    facts = [("what", f"{answer.kind} {answer.subject}"), ("state", answer.state), ("bytes", size(answer.size_bytes))]
    if answer.kind != "database":
        facts.append(("references", str(answer.references)))
    rows = [Row([each.kind, each.name, each.what, each.release], each) for each in answer.holders]
    columns = ["held by", "name", "because", "released by"]
    return Report(
        parts=(Facts(lines=facts, data=None), Listing(columns=columns, rows=rows, empty="nothing holds it")),
        data=answer,
    )
