"""Commands about the change feed: tail, cursors, resume, drop.

Rules
  1. `tail` and `cursors` only read; nothing is acknowledged.
  2. `tail` holds no read transaction while it writes (M4): it reads `STEP_RECORDS` at a time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import islice
from typing import TYPE_CHECKING, Annotated, Any

from quire.cli.declarations import Argument, Group, Option, command
from quire.cli.errors import OK
from quire.cli.formatting import count_of, non_default_fields, pairs, span
from quire.cli.lookup import Follow, Yes
from quire.cli.output import CliResult, Listing, ListingRow, Note
from quire.cli.output import follow as follow_rows
from quire.cli.prompts import confirm
from quire.core.clock import SystemClock, moment
from quire.core.errors import CursorLost, UnknownCursor
from quire.core.json_values import plain
from quire.core.timeline import gap_of_start, step_back
from quire.manifest.change import change_json
from quire.manifest.ops.cursors import refuse_lost

if TYPE_CHECKING:
    from quire.cli.command import Cli
    from quire.manifest.change import ChangeRecord, CursorInfo
    from quire.manifest.feed import ChangeFeed
    from quire.manifest.reads import ReadTxn
    from quire.manifest.store import ManifestStore

STEP_RECORDS = 64
"""Change records read in one transaction: each may hold thousands of operations."""


group = Group("feed")


# ── records ───────────────────────────────────────────────────────────────────────────────────────────────────────────
@command("tail", group, example="quire feed tail --limit 5")
def tail(
    cli: Cli,
    start: Annotated[int, Option("--from", min=0, metavar="N", help="First sequence; 0 for the newest records.")] = 0,
    limit: Annotated[int, Option("--limit", "-n", min=0, help="Maximum number of records; 0 for all.")] = 10,
    follow: Follow = False,
) -> Listing | CliResult:
    """Show change records: their sequence, time and operations.

    With --follow, show the records from --from on, or the newest N, and then new ones as they are committed.
    """
    columns = [">sequence", "committed", "operations"]
    if follow:
        with cli.reader() as manifest:
            tail = _FeedTail(manifest, start, limit)
            follow_rows(columns, lambda: map(_row, tail.new()), as_json=cli.as_json)
        return CliResult(None, OK)
    return Listing(
        columns=columns,
        rows=map(_row, _records(cli, start, limit)),
        empty=f"the feed has no changes from sequence {start:,} on" if start else "the feed is empty",
    )


def _row(change: ChangeRecord) -> ListingRow:
    return ListingRow([f"{change.sequence:,}", moment(change.committed_at_ms), summary(change)], change_json(change))


class _FeedTail:
    """Follows the end of the feed (rule 2)."""

    def __init__(self, manifest: ManifestStore, start: int, limit: int) -> None:
        self._manifest = manifest
        with manifest.read() as txn:
            oldest, head = txn.feed_bounds()
            _refuse_lost(txn, start)
            self._next = start or max(oldest, step_back(txn.gaps(), head, limit) + 1)

    def new(self) -> Iterator[ChangeRecord]:
        """Yield the changes since the last call. Raises `CursorLost` if some were trimmed before they were seen."""
        while True:
            with self._manifest.read() as txn:
                oldest, _ = txn.feed_bounds()
                step = list(islice(txn.changes(self._next), STEP_RECORDS))
            if self._next < oldest:
                kept = f"the changes {self._next:,} to {oldest - 1:,} are no longer retained"
                raise CursorLost(kept, hint=f"`quire feed tail --from {oldest} --follow` continues after them")
            yield from step
            if not step:
                return
            self._next = step[-1].sequence + 1


def _refuse_lost(txn: ReadTxn, start: int) -> None:
    """Raise `CursorLost` if a takeover has given up the changes before `start`."""
    gaps = txn.gaps()
    if gap_of_start(gaps, start) is not None:
        refuse_lost(gaps, start - 1)


def _records(cli: Cli, start: int, limit: int) -> Iterator[ChangeRecord]:
    with cli.reader() as manifest:
        given = 0
        while not limit or given < limit:
            with manifest.read() as txn:
                oldest, head = txn.feed_bounds()
                _refuse_lost(txn, start)
                if not start:
                    start = max(oldest, step_back(txn.gaps(), head, limit) + 1) if limit else oldest
                step = list(islice(txn.changes(start), min(limit - given, STEP_RECORDS) if limit else STEP_RECORDS))
            if not step:
                return
            yield from step
            given += len(step)
            start = step[-1].sequence + 1


def summary(record: ChangeRecord) -> str:
    """Summarise a batch in one line: a single operation with its fields, several by kind and number."""
    if len(record.operations) == 1:
        (op,) = record.operations
        shown = {name: value for name, value in non_default_fields(op).items() if isinstance(value, str | int | float)}
        if "record" in op.__struct_fields__:
            name = getattr(getattr(op, "record", None), "name", "")
            shown.update({"name": name} if name else {})
        return f"{type(op).__name__} {pairs(shown)}"
    counts = Counter(type(op).__name__ for op in record.operations)
    return ", ".join(f"{count:,} × {name}" if count > 1 else name for name, count in counts.items())


# ── cursors ───────────────────────────────────────────────────────────────────────────────────────────────────────────
@command("cursors", group, example="quire feed cursors --json")
def cursors(cli: Cli) -> Listing:
    """List the cursors of the change feed: their positions and limits.

    A live cursor retains every change that it has not acknowledged; without a ttl and a max lag it retains them forever.
    Registration counts as the first acknowledgement.
    """
    with cli.reader() as manifest:
        infos = manifest.feed.cursors()
    lost = [info for info in infos if info.state.name == "LOST"]
    return Listing(
        columns=[">id", "name", ">acked", ">lag", "state", "last ack", "ttl", "max lag"],
        rows=[ListingRow(_cells(info), cursor_json(info)) for info in infos],
        empty="the feed has no cursors (see docs/feed.md)",
        closing="\n".join(f"{_called(info)} is lost: {info.lost_reason}" for info in lost),
    )


def _cells(info: CursorInfo) -> list[str]:
    lost = info.state.name == "LOST"
    return [
        str(info.cursor_id),
        info.name,
        f"{info.acked_sequence:,}",
        f"{info.lag:,}",
        info.state.name.lower(),
        "-" if lost else f"{span(SystemClock().now_ms() - info.updated_at_ms)} ago",
        span(info.ttl_ms) if info.ttl_ms else "-",
        f"{info.max_lag:,}" if info.max_lag else "-",
    ]


def cursor_json(info: CursorInfo) -> dict[str, Any]:
    """Return a cursor as JSON, with its lag and next sequence."""
    return {**plain(info), "lag": info.lag, "next_sequence": info.next_sequence}


@command("resume", group, example="quire feed resume my-app")
def resume(cli: Cli, cursor: Annotated[str, Argument(metavar="CURSOR", help="A cursor's name, or its id.")]) -> Note:
    """Resume a lost cursor where it stopped, or at the oldest retained change. The changes in between are skipped."""
    with cli.owner() as store:
        feed = store.manifest.feed
        lost = _find(feed, cursor)
        if lost.state.name == "LIVE":
            return Note(text=f"{_called(lost)} is live; nothing to do", data={"resumed": cursor_json(lost)})
        resumed = feed.resume(lost.cursor_id)
    return Note(
        text=f"{_called(resumed)} resumes at change {resumed.next_sequence:,}", data={"resumed": cursor_json(resumed)}
    )


@command("drop", group, example="quire feed drop my-app --yes")
def drop(
    cli: Cli,
    cursor: Annotated[str, Argument(metavar="CURSOR", help="A cursor's name, or its id.")],
    yes: Yes = False,
) -> Note:
    """Drop a cursor. Changes that were retained only for it may then be trimmed."""
    with cli.owner() as store:
        feed = store.manifest.feed
        info = _find(feed, cursor)
        if not yes:
            question = f"drop {_called(info)}, {count_of(info.lag, 'change')} behind?"
            confirm(question, "nothing was dropped", {"dropped": None}, about=info.cursor_id)
        feed.drop(info.cursor_id)
    return Note(text=f"dropped {_called(info)}", data={"dropped": cursor_json(info)})


def _find(feed: ChangeFeed, text: str) -> CursorInfo:
    """Find a cursor by name, then by id: a name may be a number."""
    try:
        return feed.cursor(text)
    except UnknownCursor:
        if not text.isdecimal() or not text.isascii():
            raise
    return feed.cursor(int(text))


def _called(info: CursorInfo) -> str:
    return f"cursor {info.name} (id {info.cursor_id})" if info.name else f"cursor {info.cursor_id}"
