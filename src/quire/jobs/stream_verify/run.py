"""Verification of every byte of a stream: copies of segments, chunks of its manifest log, objects of the log.

A copy of a segment is good if it contains the segment that was sealed: valid blocks, and the crc64 of the whole that is in the
row. The compressed file and the object are decompressed for the comparison. One local copy, hot or compressed, is enough, and
every existing copy must be good; a file that disappears during the check was evicted.

Logs are checked against their rules (`stream/mlog_verify.py`) many at once, for `quire verify` and `quire manifest verify`:
first each log on its own, which needs the store's files, then the bodies of objects, in groups over all logs. A problem is
reported only if a second check confirms it: a live owner moves and deletes in the meantime. A log that cannot be read now does
not prevent the check of other logs; its error is raised at the end.

Reads only; works next to a live owner. Safe to run on an executor. Raises what disk and object store raise; damage is a
result.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from quire.core.errors import Corruption, ObjectNotFound, OutOfRange, QuireError
from quire.core.ids import ArtifactKind
from quire.core.settings import ManifestLogSettings
from quire.durable.checksums import crc64
from quire.durable.failpoints import hit
from quire.durable.files import Disk, read_all
from quire.durable.names import StreamSegmentFile, Tier
from quire.jobs.locations import ArtifactLocation, OpenStore
from quire.jobs.runner import Runner, Tick, Tools, no_tick
from quire.objects.api import exists
from quire.stream.files import LogFiles, StreamFiles
from quire.stream.mlog_tier2 import LogObjects
from quire.stream.mlog_verify import LogProblem, verify
from quire.stream.segment import sealed_blocks
from quire.stream.state import log_objects
from quire.stream.warm import bounded, reader_of
from quire.stream.witnesses import Witness


# ── segments ──────────────────────────────────────────────────────────────────────────────────────────────────────────
def is_stream_segment(place: ArtifactLocation) -> bool:
    """Return whether a location is of a stream's segment, which has a different form on each tier."""
    return place.key.kind is ArtifactKind.WAL and place.local.endswith("/" + _name(place, Tier.HOT))


def digest_segment(place: ArtifactLocation, *, disk: Disk, open_store: OpenStore) -> tuple[list[str], list[str]]:
    """Check a segment's copies; return (missing ones, altered ones) as texts."""
    missing: list[str] = []
    altered: list[str] = []
    if place.has_local:
        root = place.local.removesuffix(_name(place, Tier.HOT))
        copies = {
            "hot": _hot(place, disk),
            "compressed": _warm(os.path.join(root, _name(place, Tier.WARM)), disk, place.size_bytes),
        }
        if all(checksum is None for checksum in copies.values()):
            missing.append("the file is missing")
        for name, checksum in copies.items():
            if checksum is not None and checksum != place.crc64:
                altered.append(f"the {name} file is not the segment that was sealed")
    if place.has_remote:
        try:
            data = bounded(open_store(place.url), place.object_key, place.size_bytes)
            if _decompressed(data, place.object_key, place.size_bytes) != place.crc64:
                altered.append("the object is not the segment that was sealed")
        except ObjectNotFound:
            missing.append("the object is not there")
        except Corruption:
            altered.append("the object is larger than a segment of this size can be")
    hit("jobs.stream_verify.looked")
    return missing, altered


def _name(place: ArtifactLocation, tier: Tier) -> str:
    return StreamSegmentFile(stream_id=place.key.origin_db_id, tier=tier, segment_id=place.key.id).path


def _hot(place: ArtifactLocation, disk: Disk) -> int | None:
    """Return the crc64 of the hot file; -1 if it is damaged, `None` if it does not exist."""
    try:
        raw = memoryview(read_all(disk, place.local))[: place.size_bytes]
    except FileNotFoundError:
        return None
    try:
        sealed_blocks(raw, place.size_bytes, path=place.local)
    except Corruption:
        return -1
    return crc64(raw)


def _warm(path: str, disk: Disk, raw_bytes: int) -> int | None:
    try:
        data = read_all(disk, path)
    except FileNotFoundError:
        return None
    return _decompressed(data, path, raw_bytes)


def _decompressed(data: bytes, path: str, raw_bytes: int) -> int:
    """Return the crc64 of the segment in a compressed copy; -1 if it is damaged."""
    try:
        return reader_of(data, path, raw_bytes).verify()
    except (Corruption, OutOfRange):
        return -1


# ── manifest logs ─────────────────────────────────────────────────────────────────────────────────────────────────────
@dataclass(frozen=True, slots=True, kw_only=True)
class LogTask:
    """A log to check against its rules, by files and names, without the bodies of objects."""

    stream_id: int
    root: str
    url: str
    settings: ManifestLogSettings | None = None
    """The store's settings, which determine what is kept on disk."""
    witness: Witness | None = None
    """The stream's state in LMDB, which its log must contain."""
    prefixes: tuple[str, ...] = ("",)
    """Prefixes of the store's objects, the current owner epoch's first."""
    store_id: str = ""


@dataclass(frozen=True, slots=True)
class LogFound:
    """The problems of a log, and the objects that it has."""

    stream_id: int
    problems: tuple[LogProblem, ...]
    chunks: tuple[int, ...]
    bundles: tuple[tuple[int, int], ...]
    snapshots: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class BodiesTask:
    """Objects of logs to read completely: (stream, kind, first, last)."""

    url: str
    prefixes: tuple[str, ...]
    bodies: tuple[tuple[int, str, int, int], ...]
    store_id: str = ""


def check_log(task: LogTask, tools: Tools) -> LogFound:
    """Check every rule of a log that does not need the body of an object."""
    store = tools.open_store(task.url)
    files = LogFiles(tools.disk, task.root, task.stream_id, store_id=task.store_id)
    stream_files = StreamFiles(tools.disk, task.root, task.stream_id)
    objects = log_objects(stream_files, store, task.prefixes, task.store_id)
    problems = tuple(
        verify(
            files,
            objects,
            settings=task.settings,
            object_exists=partial(exists, store),
            deep=False,
            witness=task.witness,
        )
    )
    listing = objects.listing()
    return LogFound(task.stream_id, problems, tuple(listing.chunks), tuple(listing.bundles), tuple(listing.snapshots))


def check_bodies(task: BodiesTask, tools: Tools) -> list[tuple[int, LogProblem]]:
    """Read these objects; return (stream, problem) for damaged ones."""
    store, problems = tools.open_store(task.url), []
    for stream_id, what, first, last in task.bodies:
        objects = LogObjects(store, stream_id, task.prefixes, task.store_id)
        try:
            if what == "chunk":
                objects.check(first)
            elif what == "bundle":
                objects.check(first, last)
            else:
                objects.get_snapshot(first)
        except ObjectNotFound:
            continue  # superseded after it was listed
        except Corruption as error:
            damage = f"the object of a {what} is damaged: {error.what}"
            problems.append((stream_id, LogProblem(rule="L5", what=damage, where={what: first, **_plain(error)})))
    hit("jobs.stream_verify.bodies")
    return problems


def _plain(error: QuireError) -> dict[str, object]:
    return {name: value for name, value in error.where.items() if isinstance(value, int | str)}


# ── whole logs ────────────────────────────────────────────────────────────────────────────────────────────────────────
GROUP_OBJECTS = 64
"""Bodies that one task reads: 16 MiB of full chunks."""


def verify_logs(
    tasks: Sequence[LogTask], runner: Runner, here: Runner, *, deep: bool = True, tick: Tick = no_tick
) -> Iterator[tuple[int, LogProblem]]:
    """Yield (stream, problem) for these logs. `here` is a runner that sees the files; `deep` reads objects completely."""
    first: QuireError | None = None
    logs: dict[int, tuple[LogTask, LogFound]] = {}
    doubtful: list[LogTask] = []
    for answer in (runner if runner.shares_disk else here).map(check_log, tasks, tick=tick):
        task = tasks[answer.key]
        if isinstance(answer.error, Corruption):
            doubtful.append(task)
        elif answer.error is not None:
            first = first or answer.error
        else:
            logs[task.stream_id] = task, answer.result()
            if answer.result().problems:
                doubtful.append(task)
    for again in here.map(check_log, doubtful, tick=tick):
        task = doubtful[again.key]
        if isinstance(again.error, Corruption):
            yield task.stream_id, _unreadable(again.error)
        elif again.error is not None:
            first = first or again.error
        else:
            logs[task.stream_id] = task, again.result()
            yield from ((task.stream_id, problem) for problem in again.result().problems)
    groups = list(_bodies(logs.values())) if deep else []
    for bodies in runner.map(check_bodies, groups, tick=tick):
        if bodies.error is not None:
            first = first or bodies.error
            continue
        yield from bodies.result()
    if first is not None:
        raise first


def _unreadable(error: Corruption) -> LogProblem:
    """Return the problem for damage that prevents the check of the rest of a log."""
    path = error.where.get("path", "")
    return LogProblem(rule="L0", what=f"{error.what} ({path})" if path else error.what, where=error.where)


def _bodies(logs: Iterable[tuple[LogTask, LogFound]]) -> Iterator[BodiesTask]:
    """Group the objects of all logs into tasks; the objects of one task are in one place."""
    places: dict[tuple[str, tuple[str, ...], str], list[tuple[int, str, int, int]]] = {}
    for task, log in logs:
        wanted = places.setdefault((task.url, task.prefixes, task.store_id), [])
        wanted += ((log.stream_id, "chunk", index, index) for index in log.chunks)
        wanted += ((log.stream_id, "bundle", span[0], span[1]) for span in log.bundles)
        wanted += ((log.stream_id, "snapshot", number, number) for number in log.snapshots)
    for (url, prefixes, store_id), wanted in places.items():
        for start in range(0, len(wanted), GROUP_OBJECTS):
            bodies = tuple(wanted[start : start + GROUP_OBJECTS])
            yield BodiesTask(url=url, prefixes=prefixes, bodies=bodies, store_id=store_id)
