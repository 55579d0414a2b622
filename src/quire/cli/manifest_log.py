"""Commands about the manifest logs of streams: inspect, verify, mode, mirror and bundle.

Rules
  1. `inspect` and `verify` only read and work alongside a live owner; they do not see what it has not committed.
  2. Damage is a problem for `verify`, with exit code 1, and an error for `inspect`, which shows the records before it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import islice
from typing import TYPE_CHECKING, Annotated

from quire.cli.declarations import Argument, Option
from quire.cli.errors import OK, PROBLEMS
from quire.cli.formatting import count_of, pairs
from quire.cli.job_progress import failure_of
from quire.cli.lookup import Follow, Runner, need_runner
from quire.cli.output import CliResult, Listing, ListingRow, Note
from quire.cli.output import follow as follow_rows
from quire.core.errors import InvalidInput, UnknownDatabase, WrongKind
from quire.core.ids import U32_MAX
from quire.core.json_values import plain
from quire.durable.files import OsDisk
from quire.durable.names import MANIFEST
from quire.jobs.locations import StorePool
from quire.jobs.runner import ThreadRunner, Tools
from quire.jobs.stream_verify.run import LogTask, verify_logs
from quire.manifest.records import DbKind
from quire.manifest.tables import DB_NAMES
from quire.pages.cache import PageCache
from quire.pages.sources import Sources
from quire.spark.sessions import spark_runner
from quire.store.layout import objects_url
from quire.store.object_access import open_place, options_by_url
from quire.stream.files import LogFiles, StreamFiles
from quire.stream.mlog_follower import LogFollower, Polled
from quire.stream.mlog_tier2 import LogObjects
from quire.stream.mlog_verify import inspect as rows_of
from quire.stream.mlog_verify import minimal_rows
from quire.stream.projection import witness_in
from quire.stream.state import log_objects

if TYPE_CHECKING:
    from quire.cli.command import Cli
    from quire.objects.api import ObjectStore
    from quire.spark.runner import SparkRunner
    from quire.stream.mlog_verify import LogProblem, LogRow

THREADS = 8
"""Logs verified concurrently: most of the time is spent waiting for the disk and the object store."""

Stream = Annotated[str, Argument(metavar="STREAM", help="The stream's name, or its id.")]


def inspect(
    cli: Cli,
    stream: Stream,
    start: Annotated[int | None, Option("--from", min=0, metavar="CHUNK", help="First chunk.")] = None,
    limit: Annotated[int, Option(min=0, metavar="N", help="Maximum number of records; 0 for all.")] = 100,
    minimal: Annotated[bool, Option("--minimal", help="Only the records that define the current state.")] = False,
) -> Listing:
    """Show the records of a stream's manifest log."""
    stream_id, _ = _one(cli, stream)
    if minimal:
        if start is not None:
            raise InvalidInput("`--minimal` shows the state of the whole log", hint="omit `--from` or `--minimal`")
        return Listing(
            columns=["record", ">segment", "says"],
            rows=_minimal(cli, stream_id, limit),
            empty=f"the manifest log of {stream} has no segments",
        )
    return Listing(
        columns=["at", "record", ">segment", "tier 2", "says"],
        rows=_records(cli, stream_id, start, limit),
        empty=f"{stream} has no manifest log on this disk",
    )


def verify(
    cli: Cli,
    stream: Annotated[str, Argument(metavar="[STREAM]", help="The stream's name.", show_default="default: all")] = "",
    shallow: Annotated[bool, Option("--shallow", help="Do not read whole objects.")] = False,
    runner: Runner = "",
) -> CliResult:
    """Check manifest logs against their rules, many at once.

    The exit code is 1 if a rule is broken.
    """
    need_runner(runner)
    streams = _streams(cli, stream)
    names = dict(streams)
    root, settings = os.path.abspath(cli.path), cli.settings().manifest_log
    with _stores(cli) as stores:
        with cli.reader() as manifest, manifest.read() as txn:
            own = objects_url(root, cli.settings())
            tasks = [
                LogTask(
                    stream_id=stream_id,
                    root=root,
                    url=txn.place_of(stream_id, own)[1],
                    settings=settings,
                    witness=witness_in(txn, stream_id),
                    prefixes=txn.object_prefixes(txn.place_of(stream_id, own)[0]),
                    store_id=txn.log_store_id(),
                )
                for stream_id in names
            ]
        here = _threads(root, stores)
        chosen = _spark(cli, root, own) if runner == "spark" and tasks else here
        problems = list(verify_logs(tasks, chosen, here, deep=not shallow))
    rows = [
        _problem(problem, stream_id, names[stream_id]) for stream_id, problem in sorted(problems, key=lambda it: it[0])
    ]
    sound = f"{count_of(len(streams), 'manifest log')} checked: all rules hold"
    shown = Listing(
        columns=["stream", "rule", "kind", "what"],
        rows=rows,
        empty=sound,
        closing=count_of(len(rows), "problem") if rows else "",
    )
    return CliResult(shown, PROBLEMS if rows else OK)


def mode(
    cli: Cli,
    wanted: Annotated[str, Argument(metavar="[MODE]", help="off, shadow or on; without it, the mode is shown.")] = "",
) -> Note:
    """Show or change how manifest logs of streams are used: off, shadow or on.

    The change is stored in the store, overrides quire.toml and applies to open streams at once.
    """
    with cli.owner() as store:
        engine = store.streams
        if wanted:
            engine.switch(wanted)
        modes = {str(stream.stream_id): stream.mode.value for stream in engine.streams()}
        now = engine.mode.value
    followed = f"; {count_of(len(modes), 'open stream')}" if modes else ""
    return Note(text=f"manifest logs are {now}{followed}", data={"mode": now, "streams": modes})


def mirror(
    cli: Cli,
    stream: Stream,
    directory: Annotated[str, Argument(metavar="DIRECTORY", help="Directory of the copy; must not be a store.")],
    follow: Follow = False,
) -> Note | CliResult:
    """Copy a stream from its object store: its manifest log and its sealed segments.

    Run it again, or with --follow, to continue where it stopped. It reads only the object store, never the owner.
    """
    stream_id, name = _one(cli, stream)
    root = os.path.abspath(directory)
    if os.path.exists(os.path.join(root, MANIFEST)):
        raise InvalidInput("the directory is a store", hint="use another directory", directory=root)
    with _stores(cli) as stores:
        _, objects = _log(cli, stores, stream_id)
        follower = LogFollower(objects, LogFiles(OsDisk(), root, stream_id, store_id=objects.store_id))

        def rows(polled: Polled) -> Iterator[ListingRow]:
            for segment_id in follower.hydrate(polled.hydrations):
                yield ListingRow([str(segment_id), "fetched"], {"segment_id": segment_id, "what": "fetched"})
            for segment_id in follower.prune():
                yield ListingRow([str(segment_id), "removed"], {"segment_id": segment_id, "what": "removed"})

        if follow:
            follow_rows([">segment", "what"], lambda: rows(follower.poll()), as_json=cli.as_json)
            return CliResult(None, OK)
        polled = follower.poll()
        moved = [row.data["what"] for row in rows(polled)]
        fetched, removed = moved.count("fetched"), moved.count("removed")
    text = f"{name}: {count_of(fetched, 'segment')} fetched, {removed} removed, {len(follower.index)} in the log"
    if polled.waiting_for is not None:
        text += f"; waiting for chunk {polled.waiting_for} of the log, which the bucket lacks"
    figures = {"segments": len(follower.index), "next_chunk": follower.next_chunk, "waiting_for": polled.waiting_for}
    data = {"fetched": fetched, "removed": removed, **figures}
    return Note(text=text, data=data)


def bundle(
    cli: Cli,
    stream: Annotated[str, Argument(metavar="[STREAM]", help="The stream's name.", show_default="default: all")] = "",
    runner: Runner = "",
) -> Note:
    """Bundle old chunks of manifest logs into one object per week.

    Maintenance does the same in the background.
    """
    need_runner(runner)
    if stream:
        stream = _one(cli, stream)[1]
    with cli.owner() as store:
        job = store.heavy.bundle(stream, runner=runner)
        if (failure := failure_of(job, "the bundle job")) is not None:
            raise failure
        result = job.result
    bundled = f"{count_of(result['bundles'], 'bundle')} of {count_of(result['streams'], 'manifest log')}"
    return Note(text=f"{bundled}, {count_of(result['retired'], 'chunk')} retired", data=result)


def _streams(cli: Cli, name: str) -> list[tuple[int, str]]:
    """Return (id, name) of one stream, or of all if the name is empty."""
    if name:
        return [_one(cli, name)]
    with cli.reader() as manifest, manifest.read() as txn:
        return [(db_id, record.name) for db_id, record in txn.databases() if record.kind is DbKind.STREAM]


def _one(cli: Cli, name: str) -> tuple[int, str]:
    with cli.reader() as manifest, manifest.read() as txn:
        # A name may be a number, so it is looked up as a name first.
        by_id = name.isdecimal() and txn.get(DB_NAMES, name) is None and int(name) <= U32_MAX
        db_id = int(name) if by_id else txn.database_id(name)
        record = txn.database(db_id)
    if record is None:
        raise UnknownDatabase("no database has this name or id", hint="`quire ls` lists them", name=name)
    if record.kind is not DbKind.STREAM:
        raise WrongKind("only streams have a manifest log", hint="`quire ls` shows the kinds", name=name)
    return db_id, record.name


@contextmanager
def _stores(cli: Cli) -> Iterator[Callable[[str], ObjectStore]]:
    """Yield a function that returns the object store at a URL, opening each only once."""

    def opened(url: str) -> ObjectStore:
        with cli.reader() as manifest, manifest.read() as txn:
            return open_place(txn, os.path.abspath(cli.path), cli.settings(), url)

    pool = StorePool(opened)
    try:
        yield pool
    finally:
        pool.close()


def _log(cli: Cli, stores: Callable[[str], ObjectStore], stream_id: int) -> tuple[LogFiles, LogObjects]:
    with cli.reader() as manifest, manifest.read() as txn:
        place_id, url = txn.place_of(stream_id, objects_url(os.path.abspath(cli.path), cli.settings()))
        prefixes, store_id = txn.object_prefixes(place_id), txn.log_store_id()
    files = LogFiles(OsDisk(), os.path.abspath(cli.path), stream_id, store_id=store_id)
    return files, log_objects(StreamFiles(files.disk, files.root, stream_id), stores(url), prefixes, store_id)


def _threads(root: str, stores: Callable[[str], ObjectStore]) -> ThreadRunner:
    sources = Sources(root=root, disk=OsDisk(), open_store=stores, cache=PageCache(0))
    return ThreadRunner(Tools(sources, stores, OsDisk(), root), THREADS, label="quire-verify")


def _spark(cli: Cli, root: str, url: str) -> SparkRunner:
    with cli.reader() as manifest, manifest.read() as txn:
        options = options_by_url(txn, root, cli.settings())
    return spark_runner(root=root, objects_url=url, options=options)


def _records(cli: Cli, stream_id: int, start: int | None, limit: int) -> Iterator[ListingRow]:
    with _stores(cli) as stores:
        files, objects = _log(cli, stores, stream_id)
        yield from map(_record, islice(rows_of(files, objects, start_chunk=start), limit or None))


def _minimal(cli: Cli, stream_id: int, limit: int) -> Iterator[ListingRow]:
    with _stores(cli) as stores:
        for row in islice(minimal_rows(*_log(cli, stores, stream_id)), limit or None):
            segment = str(row["segment_id"]) if row["segment_id"] else "-"
            yield ListingRow([row["record"], segment, pairs(row["fields"])], row)


def _record(row: LogRow) -> ListingRow:
    segment = str(row.segment_id) if row.segment_id else "-"
    tier2 = f"✗ {row.tier2}" if row.diverges else row.tier2
    return ListingRow(
        [f"{row.chunk_index}:{row.chunk_offset}", row.record, segment, tier2, pairs(row.fields)], plain(row)
    )


def _problem(problem: LogProblem, stream_id: int, name: str) -> ListingRow:
    data = {
        "stream": name,
        "stream_id": stream_id,
        "rule": problem.rule,
        "what": problem.what,
        "where": plain(problem.where),
        "leak": problem.leak,
    }
    kind = "leak" if problem.leak else "damage"
    return ListingRow([name, problem.rule, kind, f"{problem.what} ({pairs(problem.where)})"], data)
