"""The command `token create`: creates a signed token for some databases of a store, optionally for a limited time."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from quire.cli.declarations import Group, Option, command
from quire.cli.formatting import count_of
from quire.cli.output import Facts, Note, Report
from quire.core.time_parsing import duration, parse_duration
from quire.service.signed_tokens import create_token

if TYPE_CHECKING:
    from quire.cli.command import Cli

group = Group("token")


@command("create", group, example="quire token create --db shop --ro --ttl 1h")
def create(
    cli: Cli,
    db: Annotated[
        list[str] | None,
        Option(metavar="DB", help="A database that the token gives access to; repeatable.", show_default="all"),
    ] = None,
    ro: Annotated[bool, Option("--ro", help="Read-only.")] = False,
    attach: Annotated[
        list[str] | None,
        Option(metavar="DB", help="A database that may be read, and attached in SQL on the others; repeatable."),
    ] = None,
    ttl: Annotated[
        str,
        Option(metavar="TIME", help="How long the token is valid: 90s, 15m, 12h, 30d.", show_default="without limit"),
    ] = "",
) -> Report:
    """Create a token for clients of the SQL server (`quire serve --http`).

    It is signed with the store's own key, so the server need not be running. The token is the first line of the output; treat
    it like a password. It cannot be revoked: limit it with --ttl.
    """
    wanted, attached = list(db or ()), list(attach or ())
    with cli.reader() as manifest, manifest.read() as txn:
        for name in (*wanted, *attached):
            txn.database_id(name)  # raises: a name that does not exist is taken for a mistake
    seconds = parse_duration(ttl, "--ttl") if ttl else None
    token = create_token(cli.path, wanted, read_only=ro, attach=attached, ttl_seconds=seconds)
    what = ", ".join(wanted) if len(wanted) < 4 else count_of(len(wanted), "database")
    may = f"{'read' if ro else 'read and write'} {what or 'every database'}"
    until = f" for {duration(seconds)}" if seconds else ", for ever"
    first = wanted[0] if wanted else "DB"
    lines = [
        ("may", f"{may}{until}"),
        ("libSQL", f"url http://HOST:PORT/db/{first}/, authToken as above"),
        ("HTTP", "header Authorization: Bearer TOKEN"),
    ]
    if attached:
        lines.insert(1, ("attach", ", ".join(attached)))
    data = {"token": token, "databases": wanted, "attach": attached, "read_only": ro, "ttl_seconds": seconds}
    return Report(parts=[Note(text=token, data=None), Facts(lines=lines, data=None)], data=data)
