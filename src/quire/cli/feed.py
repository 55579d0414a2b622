"""Commands about the change feed: tail. They read; nothing is acknowledged."""

from __future__ import annotations

from collections import Counter
from itertools import islice
from typing import TYPE_CHECKING, Annotated, Any

import typer

from quire.cli.command import Cli, command, new_app
from quire.cli.output import Listing, Row
from quire.cli.plain import moment, pairs, plain, telling

if TYPE_CHECKING:
    from quire.manifest.change import ChangeRecord


def add_to(app: typer.Typer) -> None:
    """Register these commands, as a group."""
    group = new_app("Read the change feed: every batch that was committed, in order.")
    command(group, "tail", example="quire feed tail --limit 5")(tail)
    app.add_typer(group, name="feed")


def tail(
    cli: Cli,
    start: Annotated[int, typer.Option("--from", min=0, help="First sequence; 0: so that the newest are shown.")] = 0,
    limit: Annotated[int, typer.Option(min=1, max=10_000, help="Records at most.")] = 10,
) -> Listing:
    """Show change records: their sequence, time and operations."""
    with cli.reader() as store:
        if not start:
            start = max(1, store.info().newest_change - limit + 1)
        with store.manifest.read() as txn:
            records = list(islice(txn.changes(start), limit))
    return Listing(
        columns=[">sequence", "committed", "operations"],
        rows=[
            Row([f"{each.sequence:,}", moment(each.committed_at_ms), summary(each)], as_json(each)) for each in records
        ],
        empty=f"the feed has nothing from sequence {start:,} on",
    )


def summary(record: ChangeRecord) -> str:
    """What a batch did, in a line: one operation with its fields, several by their number."""
    if len(record.operations) == 1:
        (op,) = record.operations
        shown = {name: value for name, value in telling(op).items() if isinstance(value, str | int | float)}
        if "record" in op.__struct_fields__:
            name = getattr(getattr(op, "record", None), "name", "")
            shown.update({"name": name} if name else {})
        return f"{type(op).__name__} {pairs(shown)}"
    counts = Counter(type(op).__name__ for op in record.operations)
    return ", ".join(f"{count:,} × {name}" if count > 1 else name for name, count in counts.items())


def as_json(record: ChangeRecord) -> dict[str, Any]:
    """A change record with every operation in full."""
    from quire.manifest.ops.base import Component

    return {
        "sequence": record.sequence,
        "committed_at_ms": record.committed_at_ms,
        "operations": plain(record.operations),
        "generations": {Component(number).name.lower(): reached for number, reached in record.generation_updates},
        "trace_id": record.trace_id,
    }
