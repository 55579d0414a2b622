"""Verifying a whole store, a bit at a time: what was not looked at for longest comes first (payload `{"scope": "store"}`).

Terms
  wave      artifacts that are looked at between two commits of verdicts, in one run of the runner
  horizon   what was verified since then is not looked at again: the moment it was asked for, or `max_age_seconds` before

  - A verification ends when nothing older than the horizon is left, or when its time (`max_duration_seconds`) is over: then
    the result says how much is left, and the next one goes on there, because what was seen when is in the rows.
  - Verdicts are given as in `handler.py`: bad ones only after a second look, and only about what the row still says.
  - An executor that does not see the store's files looks at objects; artifacts with files are then this process's.
  - What could not be read keeps nothing else from being verified, and is not verified: at the end the attempt has failed, if
    its time is not over.
  - A wave's first tasks are large, one for each core with two thirds of its share, and so on with the rest, until a core's
    share of it is less than a second's work: that is cut evenly, so that cores are done at about the same moment.
    Few tasks in all, because what Spark needs to start one (23 ms) is worth 25 MiB of digests.

What a store holds besides artifacts: segments that are being written, key-value databases, backups, the manifest itself.

Terms
  loose file   a file without a row that could keep a verdict: it is read in every whole verification, and what was found is in
               the job's result, which `quire doctor` tells
  count        of one kind: how many files, how many bytes, how many problems

  - Tables and segments are read by the runner, where it sees the store's files, else by threads here. Manifests and logs of
    key-value databases are small and belong to open databases: they are read here, by their engine.
  - Bad is what is bad in a second look, by the rows as they are then: a table that was compacted away meanwhile is gone, not
    missing.
  - A database that cannot be opened is a problem of its own and keeps no other from being looked at.

Threads: the caller's, and the runner's. Raises what disk and object store raise.
"""

from __future__ import annotations

import heapq
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from typing import Any

from quire.core.errors import QuireError
from quire.core.events import emit
from quire.core.ids import ArtifactKey, ArtifactKind
from quire.core.limits import GIB, MIB
from quire.durable.names import Tier, WalSegmentFile, object_key, stream_dir
from quire.durable.object_names import kv_backups_prefix
from quire.jobs.context import JobContext
from quire.jobs.handler import Done, Outcome, Progress
from quire.jobs.locations import Place
from quire.jobs.runner import Answer, Runner, balanced
from quire.jobs.verify.plan import LISTED_MAX, PLANNED_MAX, bitmap_of, is_meant, place_to_verify
from quire.jobs.verify.run import (
    FileFinding,
    FileKind,
    FilesTask,
    Finding,
    StoredFile,
    VerifyTask,
    check_files,
    run_task,
)
from quire.lsm.verify import stored
from quire.manifest import tables as t
from quire.manifest.jobqueue import Job
from quire.manifest.probe import probe
from quire.manifest.reads import ReadTxn
from quire.manifest.records import DbKind, DbStatus, WalFormat, WalState
from quire.manifest.verification import artifacts

WAVE_BYTES = 4 * GIB
WAVE_ARTIFACTS = 4_096
TASK_BYTES_MIN, TASK_BYTES_MAX = 128 * MIB, GIB
"""A wave ends at the first two. It is cut into tasks of at least and at most so much."""

EVEN_BYTES = 768 * MIB
"""A core's share of what is left that is cut no further."""

ARTIFACT_BYTES = MIB // 4
"""What opening an artifact costs, as if it were so many more bytes."""

Settle = Callable[[list[Finding]], list[Finding]]
"""Looks at bad ones again, records the verdicts; the findings as they are then."""


@dataclass(slots=True)
class Seen:
    """What a verification has found so far."""

    verified: int = 0
    missing: int = 0
    altered: int = 0
    unreadable: int = 0
    size_bytes: int = 0
    damaged: list[str] = field(default_factory=list)
    kinds: dict[str, dict[str, int]] = field(default_factory=dict)
    """Artifacts, bytes and problems of each kind."""
    first: QuireError | None = None


@dataclass(frozen=True, slots=True)
class Aged:
    """What is older than the horizon."""

    keys: tuple[ArtifactKey, ...]
    """The oldest of them, in order; as many as one plan takes."""
    left: int
    size_bytes: int
    oldest_ms: int
    """When the oldest was verified; 0: never."""


def plan_aged(txn: ReadTxn, asked_at_ms: int, max_age_seconds: float) -> Aged:
    """What has to be looked at, oldest first."""
    horizon = asked_at_ms - int(max_age_seconds * 1000)
    size, due = 0, []
    for key, row in artifacts(txn):
        if row.verified_at_ms < horizon and is_meant(txn, key, row, asked_at_ms):
            due.append((row.verified_at_ms, key))
            size += getattr(row, "used_bytes", 0) or getattr(row, "size_bytes", 0)
    first = heapq.nsmallest(PLANNED_MAX, due)
    return Aged(tuple(key for _, key in first), len(due), size, first[0][0] if first else 0)


def verify_store(
    ctx: JobContext, job: Job, progress: Progress, runner: Runner, limits: tuple[float, float], settle: Settle
) -> Outcome:
    """Look at what is due. `limits` are (max_age_seconds, max_duration_seconds; 0: no end)."""
    max_age, max_duration = limits
    began, asked_at = ctx.clock.monotonic(), job.record.created_at_ms
    with ctx.manifest.read() as txn:
        aged = plan_aged(txn, asked_at, max_age)
    seen, done = Seen(), 0
    for wave in waves(ctx, aged.keys):
        progress(done, aged.left)
        if max_duration and ctx.clock.monotonic() - began >= max_duration:
            break
        _count(seen, settle(look(ctx, runner, wave, partial(progress, done, aged.left))))
        done += len(wave)
    else:
        if seen.first is not None:
            raise seen.first
    progress(done, aged.left)
    return Done({**summary(seen), "left": aged.left - done, "complete": done == aged.left})


def waves(ctx: JobContext, keys: Sequence[ArtifactKey]) -> Iterator[list[tuple[Place, int]]]:
    """(place, bitmap hash) of artifacts as they are when their turn comes, a wave at a time."""
    rest = iter(keys)
    while taken := list(islice(rest, WAVE_ARTIFACTS)):
        with ctx.manifest.read() as txn:
            placed = [
                (place, bitmap_of(txn, key)) for key in taken if (place := place_to_verify(ctx, txn, key)) is not None
            ]
        wave: list[tuple[Place, int]] = []
        size = 0
        for each in placed:
            wave.append(each)
            size += each[0].size_bytes
            if size >= WAVE_BYTES:
                yield wave
                wave, size = [], 0
        if wave:
            yield wave


def look(
    ctx: JobContext, runner: Runner, wave: Sequence[tuple[Place, int]], alive: Callable[[], None]
) -> list[Finding]:
    """What the artifacts of a wave are. `alive` is called now and then, and may raise."""
    here = [each for each in wave if each[0].has_local and not runner.shares_disk]
    there = [each for each in wave if not (each[0].has_local and not runner.shares_disk)]

    def tick(*_: int) -> None:
        alive()

    answers: list[Answer[int, list[Finding]]] = list(runner.map(run_task, tasks(there, runner.width), tick=tick))
    if here:
        local = ctx.thread_runner("quire-verify")
        answers += local.map(run_task, tasks(here, local.width), tick=tick)
    return [finding for answer in answers for finding in answer.result()]


def tasks(wave: Sequence[tuple[Place, int]], width: int) -> list[VerifyTask]:
    """Rule 5: a wave, in pieces that become smaller; the last ones of one size."""
    costs = [place.size_bytes + ARTIFACT_BYTES for place, _ in wave]
    left, made = sum(costs), list[VerifyTask]()
    begin = size = 0
    wanted = _wanted(left, width)
    for end, cost in enumerate(costs):
        if begin < end and size + cost > wanted:
            made.append(_task(wave[begin:end]))
            left, begin, size = left - size, end, 0
            if len(made) % width == 0:
                wanted = _wanted(left, width)
        if begin == end and left <= EVEN_BYTES * width and len(made) % width == 0:
            break
        size += cost
    return made + _evenly(wave[begin:], costs[begin:], width)


def _wanted(left: int, width: int) -> int:
    """Of so much that is left, how much each of the next tasks takes."""
    return min(max(2 * left // (3 * width), TASK_BYTES_MIN), TASK_BYTES_MAX)


def _evenly(wave: Sequence[tuple[Place, int]], costs: Sequence[int], width: int) -> list[VerifyTask]:
    """One task for each core, if there is work for so many."""
    parts: list[list[tuple[Place, int]]] = [[] for _ in range(min(-(-sum(costs) // TASK_BYTES_MIN), width))]
    for each, part in zip(wave, balanced(costs, len(parts)), strict=True):
        parts[part].append(each)
    return [_task(part) for part in parts if part]


def _task(group: Sequence[tuple[Place, int]]) -> VerifyTask:
    return VerifyTask(tuple(place for place, _ in group), tuple(bitmap for _, bitmap in group))


def _count(seen: Seen, findings: Sequence[Finding]) -> None:
    for each in findings:
        name = "unreadable" if each.error is not None else each.state.name.lower()
        setattr(seen, name, getattr(seen, name) + 1)
        seen.size_bytes += each.place.size_bytes
        count = seen.kinds.setdefault(_kind(each.place), {"files": 0, "bytes": 0, "problems": 0})
        count["files"] += 1
        count["bytes"] += each.place.size_bytes
        count["problems"] += each.is_bad
        seen.first = seen.first or each.error
        if each.is_bad and len(seen.damaged) < LISTED_MAX:
            seen.damaged.append(f"{object_key(each.place.key)} {each.state.name}")


def _kind(place: Place) -> str:
    if place.key.kind is ArtifactKind.WAL:
        return "page-WAL segment" if place.is_page_segment else "stream segment"
    return {ArtifactKind.BASE: "chunk", ArtifactKind.DELTA: "delta"}[place.key.kind]


def summary(seen: Seen) -> dict[str, Any]:
    """As a job's result has it."""
    counts = {name: getattr(seen, name) for name in ("verified", "missing", "altered", "unreadable")}
    return {**counts, "bytes": seen.size_bytes, "damaged": seen.damaged, "kinds": seen.kinds}


# ── files that no row names ───────────────────────────────────────────────────────────────────────────────────────────
GROUP_FILES = 16
"""Files that one task reads."""

MANIFEST = "manifest"
KV_LOGS = "key-value manifest or log"


@dataclass(slots=True)
class Counts:
    """What was looked at, by kind, and what is wrong."""

    kinds: dict[str, dict[str, int]] = field(default_factory=dict)
    problems: list[dict[str, str]] = field(default_factory=list)

    def add(self, kind: str, path: str, size_bytes: int, problems: tuple[str, ...] = ()) -> None:
        """One file."""
        self.saw(kind, 1, size_bytes)
        for what in problems:
            self.told(kind, path, what)

    def saw(self, kind: str, files: int, size_bytes: int) -> None:
        """So many files in which nothing was wrong yet."""
        count = self.kinds.setdefault(kind, {"files": 0, "bytes": 0, "problems": 0})
        count["files"] += files
        count["bytes"] += size_bytes

    def told(self, kind: str, path: str, what: str) -> None:
        """A problem of one file."""
        count = self.kinds.setdefault(kind, {"files": 0, "bytes": 0, "problems": 0})
        count["problems"] += 1
        emit("error", "verify.file_damaged", kind=kind, path=path, what=what)
        if len(self.problems) < LISTED_MAX:
            self.problems.append({"kind": kind, "path": path, "what": what})


def verify_files(ctx: JobContext, runner: Runner, progress: Progress) -> Counts:
    """Read them all."""
    counts = Counts()
    _manifest(ctx, counts)
    files = [*_open_segments(ctx), *_key_values(ctx, counts), *_backups(ctx)]
    findings = _look(ctx, files, runner, progress)
    again = {each.file for each in findings if each.problems}
    if again:
        still = {*_open_segments(ctx), *_key_values(ctx, Counts()), *_backups(ctx)}  # rule 2
        second = _look(ctx, [file for file in again if file in still], runner, progress)
        findings = [each for each in findings if not each.problems] + second
    for each in findings:
        size = each.file.size_bytes or _size(each.file.path)
        counts.add(str(each.file.kind), os.path.relpath(each.file.path, ctx.root), size, each.problems)
    return counts


def _look(ctx: JobContext, files: list[StoredFile], runner: Runner, progress: Progress) -> list[FileFinding]:
    here = runner if runner.shares_disk else ctx.thread_runner("quire-verify")
    starts = range(0, len(files), GROUP_FILES)
    tasks = [FilesTask(url=ctx.objects_url, files=tuple(files[start : start + GROUP_FILES])) for start in starts]
    return [finding for answer in here.map(check_files, tasks, tick=progress) for finding in answer.result()]


def _size(path: str) -> int:
    return os.stat(path).st_size if os.path.exists(path) else 0


# ── which ─────────────────────────────────────────────────────────────────────────────────────────────────────────────
def _manifest(ctx: JobContext, counts: Counts) -> None:
    """Pages by a child process, which some damage kills; then every row, and the rules between them."""
    path = ctx.manifest.env.path
    counts.saw(MANIFEST, 1, _size(path))
    name = os.path.relpath(path, ctx.root)
    if (why := probe(path)) is not None:
        counts.told(MANIFEST, name, why)
        return
    for problem in ctx.manifest.check():
        if not problem.leak:
            counts.told(MANIFEST, name, str(problem))


def _open_segments(ctx: JobContext) -> Iterator[StoredFile]:
    """Segments that are being written: of page databases by their rows, of streams by their files."""
    with ctx.manifest.read() as txn:
        for (db_id, segment_id), row in txn.scan(t.WAL_CATALOG):
            if row.state is WalState.OPEN and row.origin_db_id == db_id and row.format is WalFormat.PAGER:
                wal = txn.wal_state(db_id)
                path = os.path.join(ctx.root, WalSegmentFile(db_id=db_id, segment_id=segment_id).path)
                upto = 0 if wal is None else wal.indexed_upto_lsn
                yield StoredFile(kind=FileKind.PAGE_WAL, path=path, db_id=db_id, number=segment_id, upto=upto)
        streams = list(_live(txn, DbKind.STREAM))
        sealed = {
            (db_id, segment_id)
            for (db_id, segment_id), row in txn.scan(t.WAL_CATALOG)
            if row.state is not WalState.OPEN and row.format is WalFormat.APPEND_ONLY
        }
    for db_id in streams:
        folder = os.path.join(ctx.root, stream_dir(db_id, Tier.HOT))
        for name in ctx.disk.names(folder) if ctx.disk.exists(folder) else ():
            number = int(name.removesuffix(".seg"), 16) if name.endswith(".seg") else None
            if number is not None and (db_id, number) not in sealed:
                path = os.path.join(folder, name)
                yield StoredFile(kind=FileKind.STREAM, path=path, db_id=db_id, number=number)


def _key_values(ctx: JobContext, counts: Counts) -> Iterator[StoredFile]:
    """Tables of key-value databases and of their snapshots; everything else of theirs is read on the way."""
    with ctx.manifest.read() as txn:
        databases = {
            db_id: [key[1] for key, _ in txn.scan(t.SNAPSHOT_INDEX, db_id)] for db_id in _live(txn, DbKind.LSM)
        }
    for db_id, snapshots in databases.items():
        if ctx.kv is None:
            return
        found = stored(ctx.kv(), db_id, snapshots)
        for path in found.logs:
            counts.saw(KV_LOGS, 1, _size(path))
        for problem in found.problems:
            counts.told(KV_LOGS, os.path.relpath(problem.path, ctx.root) if problem.path else "", str(problem))
        for path, sst_id, size_bytes in found.tables:
            yield StoredFile(kind=FileKind.KV_TABLE, path=path, db_id=db_id, number=sst_id, size_bytes=size_bytes)


def _backups(ctx: JobContext) -> Iterator[StoredFile]:
    """Tables that lists of backups name, in the store's own object store and in namespaces."""
    with ctx.manifest.read() as txn:
        if not any(True for _ in _live(txn, DbKind.LSM)):
            return
        homes = (kv_backups_prefix(txn.store_id()), "kv")
        urls = [ctx.objects_url, *(row.url for _, row in txn.scan(t.REMOTE_NAMESPACE) if row.holds_itself)]
    from quire.lsm.backup import backups, labels, read_backup  # Arrow with it

    for url in urls:
        store, seen = ctx.open_store(url), set[str]()
        for home, label in [(place, name) for place in homes for name in labels(store, place)]:
            for lsn in backups(store, label, home):
                for table in read_backup(store, label, lsn, home).tables:
                    if table.key not in seen:
                        seen.add(table.key)
                        facts = StoredFile(kind=FileKind.KV_BACKUP, path=table.key, size_bytes=table.size_bytes)
                        yield replace(facts, sha256=table.sha256, url=url)


def _live(txn: ReadTxn, kind: DbKind) -> Iterator[int]:
    for db_id, record in txn.databases():
        if record.kind is kind and record.status is not DbStatus.TOMBSTONED:
            yield db_id
