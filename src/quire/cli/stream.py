"""Commands about streams: append, read, tail, ls, info, seal, tier, checkpoint, verify, repair, retention.

Rules
  1. A record on the command line is text (UTF-8), or a line of stdin. Output is text if it is valid UTF-8, else `0x…`. JSON has
     payloads in hexadecimal.
  2. Appended records are durable before the command reports them.
  3. `read`, `tail` and `info` also work where this process cannot own the store: alongside another owner, on a standby, in a
     restored directory. `tail --follow` never owns the store, so that a writer can. The other commands own it.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from typing import TYPE_CHECKING, Annotated, Any

from quire.cli import manifest_log
from quire.cli.declarations import Argument, Group, Option, command
from quire.cli.errors import OK, PROBLEMS
from quire.cli.formatting import count_of, pairs, size, span
from quire.cli.job_progress import failure_of
from quire.cli.lookup import Database, Follow, suggesting_create
from quire.cli.output import CliResult, Facts, Listing, ListingRow, Note
from quire.cli.output import follow as follow_rows
from quire.core.clock import SystemClock, moment
from quire.core.errors import InvalidInput, StoreLocked
from quire.core.timeline import skip_gap
from quire.stream.gaps import after_records, before_records
from quire.stream.state import Retention
from quire.stream.verify import problems

if TYPE_CHECKING:
    from quire.cli.command import Cli
    from quire.store.store import Store
    from quire.stream.segments import StreamSegment
    from quire.stream.spans import StreamRecord
    from quire.stream.stream import Stream

LINES_PER_APPEND = 10_000
LINES_BYTES_MAX = 4 * 1024 * 1024
"""Bytes of stdin in one append, which is in memory."""
"""Lines of stdin in one append."""
READ_ROWS = 100
"""Default limit of `read`."""
MOVES = ("compress", "upload", "evict", "hydrate")

Limit = Annotated[int, Option("--limit", "-n", min=0, help="Maximum number of rows; 0 for all.")]


group = Group("stream")


@contextmanager
def _open(cli: Cli, name: str, *, create: bool = False) -> Iterator[Stream]:
    with cli.owner() as store:
        yield store.stream(name, create=create)


@contextmanager
def _reading(cli: Cli, name: str, *, beside: bool = False) -> Iterator[Stream]:
    """Open a stream for reading (rule 3). With `beside`, read directly even if the owner could run the command."""
    try:
        store = cli.readable()
    except StoreLocked:
        if not beside:
            raise
        store = cli.open_read_only()
    with store:
        yield store.stream(name)


# ── records ───────────────────────────────────────────────────────────────────────────────────────────────────────────
@command("append", group, example="quire stream append clicks 'ann bought apples' --create")
def append(
    cli: Cli,
    database: Database,
    record: Annotated[
        list[str] | None, Argument(metavar="[RECORD]...", help="Records; without any, lines of stdin.")
    ] = None,
    create: Annotated[bool, Option("--create", help="Create the stream if it does not exist.")] = False,
) -> Note:
    """Append records: the arguments, or the lines of stdin."""
    with suggesting_create(), _open(cli, database, create=create) as stream:
        if record:
            first = stream.append([text.encode("utf-8", "surrogateescape") for text in record]).result()
            return appended(database, first, len(record))
        first, count = stream.end_record, 0
        while lines := next_lines():
            first_of_lines = stream.append(lines).result()
            first, count = first if count else first_of_lines, count + len(lines)
    return appended(database, first, count)


def next_lines() -> list[bytes]:
    """Return the next lines of stdin, without their ends, for one append; empty at the end."""
    lines: list[bytes] = []
    size = 0
    for line in islice(sys.stdin.buffer, LINES_PER_APPEND):
        lines.append(line.rstrip(b"\n"))
        size += len(line)
        if size > LINES_BYTES_MAX:
            break
    return lines


def appended(database: str, first: int, count: int) -> Note:
    """Return the note about `count` records appended from id `first` on."""
    text = f"appended {count_of(count, 'record')} to {database}, from id {first}"
    return Note(text=text, data={"first": first, "count": count})


@command("read", group, example="quire stream read clicks --from 1 --limit 10")
def read(
    cli: Cli,
    database: Database,
    start: Annotated[int | None, Option("--from", metavar="ID", help="First record.")] = None,
    stop: Annotated[int | None, Option("--to", metavar="ID", help="Last record, exclusive.")] = None,
    limit: Limit = READ_ROWS,
) -> Listing:
    """Show records in order, from any tier."""

    left: list[int] = []

    def rows() -> Iterator[ListingRow]:
        with _reading(cli, database) as stream:
            begin = stream.first_record if start is None else start
            last = after_records(stream.gaps, begin, limit) if limit else None
            ends = [record_id for record_id in (stop, last) if record_id is not None]
            yield from map(_record, stream.read(begin, min(ends, default=None)))  # reads no more than is shown
            if last is not None and last < (stream.end_record if stop is None else min(stop, stream.end_record)):
                left.append(last)

    def closing() -> str:
        return f"there are more: `--from {left[0]}` continues, `--limit 0` lists all" if left else ""

    return Listing(columns=[">id", "appended", "record"], rows=rows(), empty="no matching records", closing=closing)


@command("tail", group, example="quire stream tail clicks -n 5")
def tail(cli: Cli, database: Database, limit: Limit = 10, follow: Follow = False) -> Listing | CliResult:
    """Show the last records.

    With --follow, also show new records as they are appended; with -n 0, only those.
    """
    columns = [">id", "appended", "record"]
    if follow:
        with cli.open_read_only() as store:
            stream = store.stream(database)
            position = _newest(stream, stream.end_record, limit)

            def new() -> Iterator[ListingRow]:
                nonlocal position
                for record in stream.tail(position, timeout=0):
                    position = record.id + 1
                    yield _record(record)

            follow_rows(columns, new, as_json=cli.as_json)
        return CliResult(None, OK)

    def rows() -> Iterator[ListingRow]:
        with _reading(cli, database, beside=True) as stream:
            end = stream.end_record  # fixed now: another process may append while we read
            yield from map(_record, stream.read(_newest(stream, end, limit) if limit else None, end))

    return Listing(columns=columns, rows=rows(), empty="no records")


def _newest(stream: Stream, end: int, limit: int) -> int:
    """Return the first id of the last `limit` records before `end`."""
    return max(stream.first_record, before_records(stream.gaps, end, limit))


def _record(record: StreamRecord) -> ListingRow:
    try:
        text = record.payload.decode()
    except UnicodeDecodeError:
        text = f"0x{record.payload.hex()}"
    data = {"id": record.id, "timestamp_ms": record.timestamp_ms, "payload": record.payload}
    return ListingRow([str(record.id), moment(record.timestamp_ms), text], data)


# ── segments ──────────────────────────────────────────────────────────────────────────────────────────────────────────
@command("ls", group, example="quire stream ls clicks")
def segments(cli: Cli, database: Database) -> Listing:
    """List the segments of a stream and the tiers of their copies."""
    with _open(cli, database) as stream:
        rows = [_segment(segment, SystemClock().now_ms()) for segment in stream.ledger.view]
    columns = [">id", ">first", ">records", ">size", ">compressed", "sealed", "tiers"]
    return Listing(columns=columns, rows=rows, empty=f"{database} has no segments")


def _segment(segment: StreamSegment, now_ms: int) -> ListingRow:
    names = ("hot", "warm", "remote")
    tiers = [name for name, there in zip(names, (segment.is_hot, segment.is_warm, segment.is_remote)) if there]
    data = {
        "segment_id": segment.segment_id,
        "base_record": segment.base_record,
        "end_record": segment.end_record,
        "durable_bytes": segment.durable_bytes,
        "warm_bytes": segment.warm_bytes,
        "dictionary_id": segment.dictionary_id,
        "sealed_ms": segment.sealed_ms,
        "key": segment.key,
        "tiers": tiers,
    }
    cells = [
        str(segment.segment_id),
        f"{segment.base_record:,}",
        f"{segment.records:,}" if segment.is_sealed else "-",
        size(segment.durable_bytes),
        size(segment.warm_bytes) if segment.warm_bytes else "-",
        f"{span(now_ms - segment.sealed_ms)} ago" if segment.is_sealed else "open",
        " ".join(tiers),
    ]
    return ListingRow(cells, data)


@command("info", group, example="quire stream info clicks")
def info(cli: Cli, database: Database) -> Facts:
    """Show the size, tiers, consumers and retention of a stream."""
    with _reading(cli, database) as stream:
        figures = stream.info()
    # The ids after the last record may be those that a takeover has skipped.
    end = skip_gap(figures.gaps, before_records(figures.gaps, figures.end_record, 1)) + 1
    held = ", ".join(f"{name} at {consumer.position}" for name, consumer in sorted(figures.consumers.items()))
    lines = [
        ("records", _id_range(figures.records, figures.first_record, end)),
        ("hot", f"{count_of(figures.hot_segments, 'segment')}, {size(figures.hot_bytes)}"),
        ("warm", f"{count_of(figures.warm_segments, 'segment')}, {size(figures.warm_bytes)}"),
        ("remote", f"{count_of(figures.remote_segments, 'segment')}, {size(figures.remote_bytes)}"),
        ("consumers", held or "none"),
        ("retention", _words(figures.retention)),
        ("manifest log", figures.mode),
    ]
    if figures.needs_repair:
        lost = ", ".join(map(str, figures.needs_repair))
        lines.append(
            (
                "needs repair",
                f"segments {lost}: their objects are missing; restore them, or let retention drop the segments",
            )
        )
    return Facts(lines=lines, data=figures)


def _id_range(count: int, first: int, end: int) -> str:
    """Format a number of records and their range of ids.

    >>> _id_range(3, 1, 4), _id_range(0, 4, 4)
    ('3, ids 1 to 3', 'none')
    """
    return f"{count:,}, ids {first:,} to {end - 1:,}" if count else "none"


# ── tiers and upkeep ──────────────────────────────────────────────────────────────────────────────────────────────────
@command("seal", group, example="quire stream seal clicks")
def seal(cli: Cli, database: Database) -> Note:
    """Seal the open segment, so that it can be moved between tiers."""
    with _open(cli, database) as stream:
        before = len(stream.ledger.view.sealed)
        stream.seal()
        count = len(stream.ledger.view.sealed)
    text = f"{database} has {count_of(count, 'sealed segment')}"
    return Note(text=text, data={"sealed": count, "newly": count - before})


@command("tier", group, example="quire stream tier clicks upload")
def tier(
    cli: Cli,
    database: Database,
    move: Annotated[str, Argument(metavar="MOVE", help="compress, upload, evict or hydrate.")],
    segment: Annotated[list[int] | None, Option("--segment", metavar="ID", help="Only these segments.")] = None,
    warm: Annotated[bool, Option("--warm", help="With evict: also compressed copies.")] = False,
) -> Note:
    """Move sealed segments between tiers."""
    if move not in MOVES:
        raise InvalidInput("unknown move", hint=f"moves: {', '.join(MOVES)}", move=move)
    if warm and move != "evict":
        raise InvalidInput("`--warm` only applies to evict", hint="omit it", move=move)
    with _open(cli, database) as stream:
        how: dict[str, Any] = {"warm": True} if warm else {}
        count = getattr(stream, move)(*(segment or ()), **how)
    what = count_of(count, "copy", "copies") if move == "evict" else count_of(count, "segment")
    return Note(text=f"{move}: {what} of {database}", data={"move": move, "count": count})


@command("checkpoint", group, example="quire stream checkpoint clicks")
def checkpoint(cli: Cli, database: Database) -> Note:
    """Publish sealed segments as chunks, unchanged.

    Maintenance does the same in the background.
    """
    with cli.owner() as store:
        return published(store, database)


def published(store: Store, database: str) -> Note:
    """Run a checkpoint of a stream and return the note about its result."""
    store.stream(database)  # raises if it is not a stream
    job = store.checkpoint(database)
    if (failure := failure_of(job, f"the checkpoint of {database}")) is not None:
        raise failure
    result = job.result
    text = f"{database}: {count_of(result['chunks'], 'segment')} published as chunks, {size(result['bytes'])}"
    if result["missing"]:
        text += f"; {count_of(result['missing'], 'segment')} without a copy: see `quire stream verify {shlex.quote(database)}`"
    return Note(text=text, data=result)


@command("verify", group, example="quire stream verify clicks")
def verify(
    cli: Cli,
    database: Database,
    shallow: Annotated[bool, Option("--shallow", help="Do not read whole objects.")] = False,
) -> CliResult:
    """Verify every copy of every segment."""
    with _open(cli, database) as stream:
        damage = list(problems(stream, deep=not shallow))
        count = len(stream.ledger.view.segments)
    rows = [
        ListingRow(
            [problem.rule, "leak" if problem.leak else "damage", f"{problem.what} ({pairs(problem.where)})"],
            {
                "rule": problem.rule,
                "what": problem.what,
                "where": {k: str(v) for k, v in problem.where.items()},
                "leak": problem.leak,
            },
        )
        for problem in damage
    ]
    shown = Listing(
        columns=["rule", "kind", "what"],
        rows=rows,
        empty=f"{database} has no damage: {count_of(count, 'segment')} read",
    )
    return CliResult(shown, PROBLEMS if any(not problem.leak for problem in damage) else OK)


@command("repair", group, example="quire stream repair clicks")
def repair(
    cli: Cli,
    database: Database,
    apply: Annotated[bool, Option("--apply", help="Apply the repair; without it, only show it.")] = False,
) -> CliResult:
    """Rebuild the manifest log of a stream that does not open.

    Uses its chunks on disk and in tier 2, the store's manifest, segments and objects. Nothing is removed: damaged and
    conflicting files go to quarantine. The exit code is 1 if data is lost.
    """
    with cli.owner() as store:
        plan = store.streams.repair(database, apply=apply)
        if apply and plan.steps:
            store.stream(database)  # raises if the repair was not sufficient
    rows = [
        ListingRow([kind, what], {"kind": kind, "what": what})
        for kind, lines in (("note", plan.notes), ("done" if apply else "to do", plan.steps), ("lost", plan.lost))
        for what in lines
    ]
    first, end = plan.records
    kept = f"{count_of(plan.segments, 'segment')}, records: {_id_range(end - first, first, end)}"
    more = "" if apply or not plan.steps else f"; `quire stream repair {shlex.quote(database)} --apply` applies it"
    shown = Listing(
        columns=["", "what"],
        rows=rows,
        empty=f"{database} needs no repair: {kept}",
        closing=f"{kept}{more}" if rows else "",
    )
    return CliResult(shown, PROBLEMS if plan.lost else OK)


command("mirror", group, example="quire stream mirror clicks ./clicks-copy")(manifest_log.mirror)


@command("retention", group, example="quire stream retention clicks --days 30")
def retention(
    cli: Cli,
    database: Database,
    days: Annotated[float | None, Option("--days", min=0, help="Drop records older than N days.")] = None,
    max_bytes: Annotated[
        int | None, Option("--bytes", min=0, help="Drop the oldest records beyond this size, in bytes.")
    ] = None,
    consumed: Annotated[bool, Option("--consumed", help="Drop records that all consumers have read.")] = False,
    reset: Annotated[bool, Option("--reset", help="Use the store's settings again.")] = False,
    apply: Annotated[bool, Option("--apply", help="Apply it now.")] = False,
) -> Note:
    """Show or set the retention of a stream."""
    if reset and (days is not None or max_bytes is not None or consumed):
        raise InvalidInput("`--reset` cannot be combined with other limits", hint="omit `--reset` to set them")
    with _open(cli, database) as stream:
        if reset:
            stream.retain(None)
        elif days is not None or max_bytes is not None or consumed:
            stream.retain(Retention(seconds=(days or 0) * 86_400, bytes=max_bytes or 0, consumed=consumed))
        gone = stream.retire() if apply else 0
        kept = stream.retention
    text = f"{database}: {_words(kept)}" + (f"; {count_of(gone, 'segment')} retired" if apply else "")
    return Note(text=text, data={"retention": kept, "retired": gone})


def _words(retention: Any) -> str:
    words = []
    if retention.seconds:
        words.append(f"{span(int(retention.seconds * 1000))}")
    if retention.bytes:
        words.append(size(retention.bytes))
    if retention.consumed:
        words.append("until every consumer has read it")
    return "keeps " + ", ".join(words) if words else "keeps all records"
