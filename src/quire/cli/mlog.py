"""Commands that look into the manifest logs of streams: inspect and verify.

Rules
  1. Both read only and work beside a live owner; what it has not committed is not there for them.
  2. Damage is a problem for `verify`, with exit code 1, and an error for `inspect`, which shows what stands before it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import islice
from typing import TYPE_CHECKING, Annotated

import typer

from quire.cli.command import Cli, Verdict
from quire.cli.exits import OK, PROBLEMS
from quire.cli.output import Listing, Row
from quire.cli.plain import count_of, pairs
from quire.cli.typed import command
from quire.core.errors import ObjectNotFound, UnknownDatabase, WrongKind
from quire.core.plain import plain

if TYPE_CHECKING:
    from quire.objects.api import ObjectStore
    from quire.stream.mlog_files import LogFiles
    from quire.stream.mlog_tier2 import LogObjects
    from quire.stream.mlog_verify import LogRow, Problem

Stream = Annotated[str, typer.Argument(metavar="STREAM", help="The stream's name.")]


def add_to(group: typer.Typer) -> None:
    """Register these commands in the group `manifest`."""
    command(group, "inspect", example="quire manifest inspect clicks --limit 20")(inspect)
    command(group, "verify", example="quire manifest verify clicks")(verify)


def inspect(
    cli: Cli,
    stream: Stream,
    start: Annotated[int | None, typer.Option("--from", min=0, metavar="CHUNK", help="Begin with this chunk.")] = None,
    limit: Annotated[int, typer.Option(min=0, metavar="N", help="Records at most; 0: no limit.")] = 100,
) -> Listing:
    """Show the records of a stream's manifest log."""
    stream_id, _ = _one(cli, stream)
    return Listing(
        columns=["at", "record", ">segment", "says", "tier 2"],
        rows=_records(cli, stream_id, start, limit),
        empty=f"{stream} has no manifest log on this disk",
    )


def verify(
    cli: Cli,
    stream: Annotated[str, typer.Argument(metavar="[STREAM]", help="One stream; all if none is named.")] = "",
    shallow: Annotated[bool, typer.Option("--shallow", help="Do not read objects whole.")] = False,
) -> Verdict:
    """Hold manifest logs to their rules; exit code 1 if one is broken."""
    from quire.stream.mlog_verify import verify as problems_of

    settings = cli.settings().manifest_log
    streams = _streams(cli, stream)
    rows: list[Row] = []
    with _store(cli) as store:
        for stream_id, name in streams:
            files, objects = _log(cli, store, stream_id)
            found = problems_of(files, objects, settings=settings, object_exists=_existence(store), deep=not shallow)
            rows += [_problem(each, stream_id, name) for each in found]
    sound = f"{count_of(len(streams), 'manifest log')} kept all rules"
    shown = Listing(
        columns=["stream", "rule", "kind", "what"],
        rows=rows,
        empty=sound,
        closing=count_of(len(rows), "problem") if rows else "",
    )
    return Verdict(shown, PROBLEMS if rows else OK)


def _streams(cli: Cli, name: str) -> list[tuple[int, str]]:
    """(id, name) of one stream, or of all if the name is empty."""
    from quire.manifest.records import DbKind

    if name:
        return [_one(cli, name)]
    with cli.reader() as manifest, manifest.read() as txn:
        return [(db_id, record.name) for db_id, record in txn.databases() if record.kind is DbKind.STREAM]


def _one(cli: Cli, name: str) -> tuple[int, str]:
    from quire.manifest.records import DbKind

    with cli.reader() as manifest, manifest.read() as txn:
        db_id = txn.database_id(name)
        record = txn.database(db_id)
    if record is None:
        raise UnknownDatabase("no database has this name", hint="`quire ls` lists them", name=name)
    if record.kind is not DbKind.STREAM:
        raise WrongKind("only streams have a manifest log", hint="`quire ls` shows the kinds", name=name)
    return db_id, name


@contextmanager
def _store(cli: Cli) -> Iterator[ObjectStore]:
    from quire.objects.open import open_store
    from quire.store.layout import objects_url

    store = open_store(objects_url(os.path.abspath(cli.path), cli.settings()))
    try:
        yield store
    finally:
        store.close()


def _log(cli: Cli, store: ObjectStore, stream_id: int) -> tuple[LogFiles, LogObjects]:
    from quire.durable.files import OsDisk
    from quire.stream.mlog_files import LogFiles
    from quire.stream.mlog_tier2 import LogObjects

    return LogFiles(OsDisk(), os.path.abspath(cli.path), stream_id), LogObjects(store, stream_id)


def _existence(store: ObjectStore) -> Callable[[str], bool]:
    def exists(key: str) -> bool:
        try:
            store.head(key)
        except ObjectNotFound:
            return False
        return True

    return exists


def _records(cli: Cli, stream_id: int, start: int | None, limit: int) -> Iterator[Row]:
    from quire.stream.mlog_verify import inspect as rows_of

    with _store(cli) as store:
        files, objects = _log(cli, store, stream_id)
        yield from map(_record, islice(rows_of(files, objects, start_chunk=start), limit or None))


def _record(row: LogRow) -> Row:
    segment = str(row.segment_id) if row.segment_id else "-"
    return Row([f"{row.chunk_index}:{row.chunk_offset}", row.record, segment, pairs(row.fields), row.tier2], plain(row))


def _problem(problem: Problem, stream_id: int, name: str) -> Row:
    data = {
        "stream": name,
        "stream_id": stream_id,
        "rule": problem.rule,
        "what": problem.what,
        "where": plain(problem.where),
        "leak": problem.leak,
    }
    kind = "leak" if problem.leak else "damage"
    return Row([name, problem.rule, kind, f"{problem.what} ({pairs(problem.where)})"], data)
