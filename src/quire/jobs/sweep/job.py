"""The sweep job: compares object listings with the manifest in both directions; deletes orphans on request.

Terms
  space     (URL of an object store, prefix in it): one for each namespace, and for each owner epoch before the current one. It
            contains objects of this store only (A1)
  former    the space of a store that is older than epochs: no prefix. Other stores may have objects there too, so it is listed
            database by database, and only the store that has the claim to it deletes orphans there
  range     a part of a space's keys: names of at most `RANGE_DATABASES` databases, with about `RANGE_NAMES` expected names.
            Ranges cover every possible key, and each is listed by one task
  orphan    an object with an artifact's name that the manifest does not contain

The listing comes first, the manifest is read after it (O3): a stray of a listing is an orphan only if the manifest, read
afterwards, has no row of that name and no plan that may be writing it; a missing object is reported only if its row still
promises it and a request by name fails. Names of generations that are not used up yet are also spared, as are objects younger
than a grace period by the object store's clock. No reference to an orphan can arise (M5, P10), so its deletion needs no intent.

The runner joins listings with the hashes of known names, 8 bytes per name; only differences are returned, a few thousand at a
time. Ranges of one wave are read in one short transaction. An error of an object store ends the attempt: without a complete
listing no object is known to be missing. If an object store is a directory, old staging files of crashed puts are removed, too.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence, Set
from dataclasses import dataclass, field
from heapq import merge
from itertools import islice, takewhile
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from quire.core.background import thread_pool
from quire.core.errors import ObjectNotFound
from quire.core.events import emit
from quire.core.ids import U32_MAX, ArtifactKey, ArtifactKind
from quire.durable.failpoints import hit
from quire.durable.names import object_key
from quire.durable.object_names import parse_epoch_key
from quire.jobs.context import JobContext
from quire.jobs.handler import Completed, Outcome, Progress, options
from quire.jobs.locations import ArtifactLocation
from quire.jobs.row_groups import part
from quire.jobs.runner import Runner
from quire.jobs.sweep.run import Listed, ListTask, Stray, artifact_of, list_range, name_hash
from quire.jobs.verify.job import place_to_verify
from quire.manifest import tables as t
from quire.manifest.jobqueue import Job
from quire.manifest.ops.base import Counter
from quire.manifest.reads import ReadTxn
from quire.manifest.records import Residency
from quire.objects.guarded import path_store
from quire.pages.catalog import space_of

WAVE_RANGES = 256
"""Ranges that one call of the runner compares: at most 4 million names, 8 bytes each in memory."""

SETTLED_AT_ONCE = 4_096
"""Differences that are looked up, requested or deleted in one step."""

ASKED_AT_ONCE = 16
"""Objects that are requested concurrently: the time is spent on round trips."""

LISTED_MAX = 1_000
GRACE_SECONDS = 3_600.0
"""Objects younger than this, by the object store's clock, are spared: clocks differ (M8)."""


@dataclass(slots=True)
class _Sweep:
    """The parameters and the findings of a sweep."""

    ctx: JobContext
    before_ms: int
    delete: bool
    total: dict[str, Any] = field(
        default_factory=lambda: {
            **dict.fromkeys(("objects", "bytes_listed", "orphaned", "bytes", "deleted", "lost", "staged"), 0),
            "more": False,
            "orphans": [],
            "missing": [],
        }
    )


@dataclass(frozen=True, slots=True)
class _Wave:
    """Ranges of one space that are compared in one call."""

    ranges: Sequence[ListingRange]
    space: Space
    namespaces: set[int]
    since: RangeStart

    @property
    def next(self) -> RangeStart | None:
        return self.ranges[-1].next

    @property
    def names(self) -> int:
        return sum(len(listing.known) for listing in self.ranges)


def sweep_job(ctx: JobContext, job: Job, progress: Progress) -> Outcome:
    """Find objects that the manifest does not name, and rows whose objects are missing."""
    ctx.manifest.recount.finish()  # rows decide what is a stray, so they must be verified since the open (N3)
    given = options(job, delete=False, runner="", grace_seconds=GRACE_SECONDS)
    sweep = _Sweep(ctx, ctx.clock.now_ms() - int(given["grace_seconds"] * 1000), given["delete"])
    with ctx.manifest.read() as txn:
        namespaces_by_space, rows = spaces(ctx, txn), rows_with_objects(txn)
    total, done = len(namespaces_by_space) * (rows + 1), 0
    progress(0, total)
    runner = ctx.choose_runner(given["runner"], rows * 1024, label="quire-sweep")
    for number, (space, namespaces) in enumerate(namespaces_by_space.items(), 1):
        for wave in _waves(ctx, space, namespaces):
            ends = min(done + wave.names, number * (rows + 1)) if wave.next else number * (rows + 1)
            _compare(sweep, runner, wave, part(progress, done, ends, total))
            done = ends
    if sweep.delete:
        sweep.total["staged"] = sum(_unstage(ctx, url) for url in {url for url, _ in namespaces_by_space})
    progress(total, total)
    return Completed(sweep.total)


def _waves(ctx: JobContext, space: Space, namespaces: set[int]) -> Iterator[_Wave]:
    """Yield the ranges of a space in waves; no transaction is open while a wave is compared."""
    mark: RangeStart | None = RangeStart()
    while mark is not None:
        with ctx.manifest.read() as txn:
            # These rows are read before the listing, so a difference from them proves nothing. It is decided by the
            # manifest as it is after the listing (O3).
            wave = _Wave(list(islice(ranges(txn, namespaces, space, mark), WAVE_RANGES)), space, namespaces, mark)
        yield wave
        mark = wave.next


def _unstage(ctx: JobContext, url: str) -> int:
    """Remove old staging files of crashed puts, if the object store is a directory; return how many."""
    store = ctx.open_store(url)
    return local.sweep_temporary() if (local := path_store(store)) is not None else 0


def _compare(sweep: _Sweep, runner: Runner, wave: _Wave, tick: Progress) -> None:
    """Let the runner join listings with known names, and look up the differences in the manifest."""
    total, strays, missing = sweep.total, list[Stray](), array("Q")
    names = np.unique(np.concatenate([listing.known for listing in wave.ranges]))
    for number, item in runner.unmatched(list_range, [listing.task for listing in wave.ranges], names, tick=tick):
        if isinstance(item, Listed):
            total["objects"] += item.objects
            total["bytes_listed"] += item.size_bytes
        elif item is not None:
            strays.append(item)
        elif number is not None:
            missing.append(number)
        if len(strays) >= SETTLED_AT_ONCE:
            _settle(sweep, strays, wave)
            strays.clear()
    _settle(sweep, strays, wave)
    _report_missing(sweep, np.sort(np.array(missing, np.uint64)), wave)
    total["more"] = total["orphaned"] > len(total["orphans"]) or total["lost"] > len(total["missing"])


def _report_missing(sweep: _Sweep, missing: Any, wave: _Wave) -> None:
    """Look up missing objects again, and report those that are still missing."""
    ctx, total = sweep.ctx, sweep.total
    with ctx.manifest.read() as txn:
        places = still_promised(ctx, txn, missing, wave.namespaces, wave.space, wave.since, wave.next)
        for place in _not_there(ctx, places):
            total["lost"] += 1
            if len(total["missing"]) < LISTED_MAX:
                described = {
                    "artifact": object_key(place.key),
                    "object": place.object_key,
                    "size_bytes": place.size_bytes,
                }
                total["missing"].append(described)


def _not_there(ctx: JobContext, places: Iterator[ArtifactLocation]) -> Iterator[ArtifactLocation]:
    """Yield the locations whose object does not exist when it is requested by name."""

    def is_there(place: ArtifactLocation) -> bool:
        try:
            ctx.open_store(place.url).head(place.object_key)
        except ObjectNotFound:
            return False
        return True

    with thread_pool(ASKED_AT_ONCE, "quire-sweep-ask") as pool:
        while some := list(islice(places, SETTLED_AT_ONCE)):
            yield from (place for place, there in zip(some, pool.map(is_there, some)) if not there)


def _settle(sweep: _Sweep, strays: Iterable[Stray], wave: _Wave) -> None:
    """Decide which strays are orphans, by the manifest as it is after the listing; report and delete these."""
    ctx, total = sweep.ctx, sweep.total
    with ctx.manifest.read() as txn:
        orphans = list(real_orphans(txn, strays, wave.space[1], sweep.before_ms))
    for stray, key in orphans:
        total["orphaned"] += 1
        total["bytes"] += stray.size_bytes
        if len(total["orphans"]) < LISTED_MAX:
            described = {
                "artifact": object_key(key),
                "object": stray.key,
                "size_bytes": stray.size_bytes,
                "url": stray.url,
            }
            total["orphans"].append(described)
    gone: set[str] = set()
    if sweep.delete and orphans:
        for url in {stray.url for stray, _ in orphans}:
            # `delete` refuses a whole call that contains one foreign name, and a listing may contain foreign names.
            may_go = ctx.collector.deletable(url, [stray.key for stray, _ in orphans if stray.url == url])
            ctx.collector.delete(url, may_go)
            gone |= {f"{url} {key}" for key in may_go}
        hit("jobs.sweep.deleted")
        total["deleted"] += len(gone)
    for stray, _ in orphans:
        emit(
            "warning",
            "sweep.orphan",
            object=stray.key,
            store=stray.url,
            size_bytes=stray.size_bytes,
            deleted=f"{stray.url} {stray.key}" in gone,
        )


# ── planning ──────────────────────────────────────────────────────────────────────────────────────────────────────────
RANGE_NAMES = 16_384
RANGE_DATABASES = 256
LOOKED_UP = 4_096
"""Names that are looked up in one step among the missing ones."""

Space = tuple[str, str]
Hashes = NDArray[np.uint64]


class RangeStart(NamedTuple):
    """The start of a range."""

    after: str = ""
    """The key after which it begins."""
    database: int = 0
    """The first database of its group of `RANGE_DATABASES`."""
    row: tuple[int, int] = (0, 0)
    """(origin, id) of the first row that may promise one of its names."""


FORMER = ""
"""The prefix of objects that are older than owner epochs."""

END = (U32_MAX + 1, 0)
"""A position after all rows."""


@dataclass(frozen=True, slots=True)
class ListingRange:
    """A part of a space's keys."""

    task: ListTask
    known: Hashes
    """Hashes of the names that should exist."""
    next: RangeStart | None
    """Start of the next range; `None` for the last one."""


def spaces(ctx: JobContext, txn: ReadTxn) -> dict[Space, set[int]]:
    """Return the spaces of this store, the current epoch's first → the namespaces that have objects there."""
    namespaces: dict[Space, set[int]] = {(ctx.objects_url, prefix): set() for prefix in txn.object_prefixes() if prefix}
    is_old = "" in txn.object_prefixes()
    for (number,), space in txn.scan(t.REMOTE_NAMESPACE):
        if space.name:  # rows of a stream name the place itself, whatever the epoch of its objects
            for prefix in txn.object_prefixes(number):
                namespaces.setdefault((space.url, prefix), set())
        if space.owner_epoch or is_old:  # otherwise objects are only below the prefixes of a place, not in it
            namespaces.setdefault(space_of(txn, number, ctx.objects_url), set()).add(number)
    if is_old:
        namespaces.setdefault((ctx.objects_url, FORMER), set()).add(0)
    parents = tuple(f"{parent.store_id}/" for parent in txn.parents())
    if parents:  # a clone's parents sweep their own objects
        return {space: numbers for space, numbers in namespaces.items() if not space[1].startswith(parents)}
    return namespaces


def rows_with_objects(txn: ReadTxn) -> int:
    """Return how many rows may promise an object."""
    tables: tuple[t.Table[Any], ...] = (t.CHUNK_CATALOG, t.CHUNK_DELTA_INDEX, t.WAL_CATALOG)
    return sum(txn.count(table) for table in tables)


def ranges(txn: ReadTxn, namespaces: Set[int], space: Space, mark: RangeStart) -> Iterator[ListingRange]:
    """Yield the ranges of a space in order, starting at a mark."""
    url, prefix = space
    known = array("Q")
    start, first, row = mark
    last = END

    def cut(border: str, row: tuple[int, int]) -> ListingRange:
        nonlocal known, start
        databases = (_database(start, 1), _database(border, txn.next_id(Counter.DB) - 1)) if prefix == FORMER else None
        task = ListTask(url=url, prefix=prefix, start_after=start, until=border, databases=databases)
        listing = ListingRange(task, np.array(known, np.uint64), RangeStart(border, first, row) if border else None)
        known, start = array("Q"), border
        return listing

    for key, name in _names(txn, namespaces, space, row):
        place = key.origin_db_id, key.id
        while place[0] >= first + RANGE_DATABASES:
            # Groups without a name are listed with the one before them: a takeover leaves 256 of them, as ids of databases
            # continue 2^16 higher. The former space is listed database by database, so that more tasks are faster.
            first += RANGE_DATABASES if prefix == FORMER else (place[0] - first) // RANGE_DATABASES * RANGE_DATABASES
            yield cut(_under(prefix, f"{first:08x}"), place)
        if len(known) >= RANGE_NAMES and place != last:
            yield cut(_under(prefix, f"{place[0]:08x}/{place[1]:08x}"), place)
        known.append(name_hash(name))
        last = place
    while prefix == FORMER and first + RANGE_DATABASES < txn.next_id(Counter.DB):
        first += RANGE_DATABASES
        yield cut(_under(prefix, f"{first:08x}"), END)
    yield cut("", END)


def _database(border: str, otherwise: int) -> int:
    """Return the database that contains a border of the former space."""
    return int(border[:8], 16) if border else otherwise


def _under(prefix: str, name: str) -> str:
    return f"{prefix}/{name}" if prefix else name


def _names(
    txn: ReadTxn, namespaces: Set[int], space: Space, row: tuple[int, int] = (0, 0)
) -> Iterator[tuple[ArtifactKey, str]]:
    """Yield (artifact, name) of every object that a row promises in these namespaces, by (origin, id), from `row` on."""
    if row >= END:
        return
    url, prefix = space
    places = (key[0] for key, place in txn.scan(t.REMOTE_NAMESPACE) if place.name and place.url == url)
    place_id = next(places, 0)
    every = merge(
        _chunks(txn, row), _deltas(txn, row), _segments(txn, row), key=lambda item: (item[0].origin_db_id, item[0].id)
    )
    for key, record in every:
        if record.residency is Residency.LOCAL:
            continue
        if parse_epoch_key(record.suffix) is not None:
            if record.namespace_id == place_id and prefix and record.suffix.startswith(f"{prefix}/"):
                yield key, record.suffix  # an object of a stream: its log has complete keys
        elif record.namespace_id in namespaces:
            yield key, _under(prefix, record.suffix or object_key(key))


def _chunks(txn: ReadTxn, row: tuple[int, int]) -> Iterator[tuple[ArtifactKey, Any]]:
    for (origin, slot, generation), record in txn.scan(t.CHUNK_CATALOG, start=(*row, 0)):
        yield ArtifactKey(origin, ArtifactKind.BASE, slot, generation), record


def _deltas(txn: ReadTxn, row: tuple[int, int]) -> Iterator[tuple[ArtifactKey, Any]]:
    for (origin, slot, generation, number), record in txn.scan(t.CHUNK_DELTA_INDEX, start=(*row, 0, 0)):
        yield ArtifactKey(origin, ArtifactKind.DELTA, slot, generation, number), record


def _segments(txn: ReadTxn, row: tuple[int, int]) -> Iterator[tuple[ArtifactKey, Any]]:
    for (db_id, segment_id), record in txn.scan(t.WAL_CATALOG, start=row):
        if record.origin_db_id == db_id:
            yield ArtifactKey(db_id, ArtifactKind.WAL, segment_id, 0), record


# ── after the listing ─────────────────────────────────────────────────────────────────────────────────────────────────
def real_orphans(
    txn: ReadTxn, strays: Iterable[Stray], prefix: str, before_ms: int
) -> Iterator[tuple[Stray, ArtifactKey]]:
    """Yield the strays that are orphans by the manifest as it is now."""
    for stray in strays:
        key = artifact_of(stray.key, prefix)
        if key is None or stray.modified_ms >= before_ms or _is_referenced(txn, key) or _is_retired(txn, stray):
            continue
        yield stray, key


def _is_retired(txn: ReadTxn, stray: Stray) -> bool:
    """Return whether an object waits until no archived moment needs it (A8). The store's own place has no URL in that table."""
    return any(txn.get(t.RETIRED, t.retired_digest(url, stray.key)) is not None for url in ("", stray.url))


def _is_referenced(txn: ReadTxn, key: ArtifactKey) -> bool:
    if key.origin_db_id in txn.refused_databases():
        return True  # its rows are damaged, and may have named it
    if txn.artifact(key) is not None or txn.refcount(key) is not None:
        return True
    if key.kind is ArtifactKind.WAL:
        return txn.get(t.WAL_CATALOG, key.origin_db_id, key.id) is not None
    record = txn.database(key.origin_db_id)
    if record is not None and key.generation >= record.next_generation:
        return True  # its generation is not used up yet
    return txn.get(t.CHECKPOINT_PLAN, key.origin_db_id, key.generation) is not None


def still_promised(
    ctx: JobContext,
    txn: ReadTxn,
    missing: Hashes,
    namespaces: Set[int],
    space: Space,
    since: RangeStart,
    until: RangeStart | None,
) -> Iterator[ArtifactLocation]:
    """Yield where the missing objects of a wave, from one mark to the other, should be by the rows as they are now.

    `missing` is in ascending order. The rows of the wave are read once, however many objects are missing.
    """
    if not len(missing):
        return
    end = until.row if until is not None else END
    names = takewhile(lambda item: (item[0].origin_db_id, item[0].id) < end, _names(txn, namespaces, space, since.row))
    while step := list(islice(names, LOOKED_UP)):
        hashes = np.array([name_hash(name) for _, name in step], np.uint64)
        places = np.minimum(np.searchsorted(missing, hashes), len(missing) - 1)
        for place in np.flatnonzero(missing[places] == hashes).tolist():
            location = place_to_verify(ctx, txn, step[place][0])
            if location is not None:  # otherwise it is about to be deleted
                yield location
