"""The verify job: compares every copy of every artifact of the store with its row, then reads the files that no row names.

Terms
  wave         artifacts that are looked at between two commits of verdicts, in one run of the runner
  horizon      what was verified since then is not looked at again: the moment it was asked for, or `max_age_seconds` before
  loose file   a file without a row that could keep a verdict: segments that are being written, key-value databases, backups,
               the manifest itself. It is read in every whole verification, and what was found is in the job's result

What was not looked at for longest comes first. A verification ends when nothing older than the horizon is left, or when its
time (`max_duration_seconds`) is over: then the result says how much is left, and the next one goes on there, because what was
seen when is in the rows. A crash anywhere leaves the verdicts that were committed.

A bad verdict is given only if a second look, at the row as it is by then, comes to the same; it counts only if the artifact
is where it was when its bytes were looked at, and is not about to be deleted. Left alone are artifacts that are to be deleted
and segments that are still written. Chunks of streams have no bytes of their own; their segments have another form on each
tier (`jobs/stream_verify`).

What cannot be read keeps nothing else from being verified, and is not verified: at the end the attempt has failed, if its
time is not over. An executor that does not see the store's files looks at objects; artifacts with files, and loose files, are
then this process's.

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

from quire.core.errors import InvalidInput, QuireError, UnknownArtifact
from quire.core.events import emit
from quire.core.ids import ArtifactKey, ArtifactKind
from quire.core.limits import GIB, MIB
from quire.durable.failpoints import hit
from quire.durable.names import Tier, WalSegmentFile, object_key, stream_dir
from quire.durable.object_names import kv_backups_prefix
from quire.jobs.context import JobContext
from quire.jobs.handler import Completed, Outcome, Progress, commit_step, options, update
from quire.jobs.locations import ArtifactLocation
from quire.jobs.runner import Runner, TaskResult, balanced
from quire.jobs.stream_verify.run import LogTask, verify_logs
from quire.jobs.verify.run import (
    ArtifactFinding,
    FileFinding,
    FileKind,
    FilesTask,
    StoredFile,
    VerifyTask,
    check_files,
    run_task,
    verify,
)
from quire.lsm.backup import backups, labels, read_backup
from quire.lsm.verify import stored
from quire.manifest import tables as t
from quire.manifest.jobqueue import Job
from quire.manifest.ops.base import Op
from quire.manifest.ops.local import RecordVerification
from quire.manifest.probe import probe
from quire.manifest.reads import ReadTxn
from quire.manifest.records import DbKind, DbStatus, VerifyState, WalFormat, WalRecord, WalState
from quire.manifest.verification import artifacts, file_problems, shares_bytes
from quire.stream.projection import witness_in

PLANNED_MAX = 65_536
"""Artifacts planned for one attempt: 4 TiB of full chunks. More are found by the next one."""

LISTED_MAX = 100
"""Damaged artifacts that a job's result names; the rows tell of all."""

WAVE_BYTES = 4 * GIB
WAVE_ARTIFACTS = 4_096
TASK_BYTES_MIN, TASK_BYTES_MAX = 128 * MIB, GIB
"""A wave ends at the first two. It is cut into tasks of at least and at most so much."""

EVEN_BYTES = 768 * MIB
"""A core's share of what is left that is cut no further."""

ARTIFACT_BYTES = MIB // 4
"""What opening an artifact costs, as if it were so many more bytes."""

LOGS = "manifest log of a stream"


def verify_job(ctx: JobContext, job: Job, progress: Progress) -> Outcome:
    """Compare rows, files and objects, and record what was found."""
    given = options(job, scope="store", runner="", max_age_seconds=0.0, max_duration_seconds=0.0)
    if given["scope"] != "store" or job.db_id:
        raise InvalidInput("a verification is of the whole store", job_id=job.job_id, scope=given["scope"])
    max_age, max_duration = given["max_age_seconds"], given["max_duration_seconds"]
    began = ctx.clock.monotonic()
    with ctx.manifest.read() as txn:
        due = plan_aged(txn, job.record.created_at_ms, max_age)
    runner = ctx.choose_runner(given["runner"], due.size_bytes, label="quire-verify")
    seen, done = Seen(), 0
    for wave in waves(ctx, due.keys):
        progress(done, due.left)
        if max_duration and ctx.clock.monotonic() - began >= max_duration:
            break
        findings = _second_look(ctx, describe_artifacts(ctx, runner, wave, partial(progress, done, due.left)))
        _count(seen, _publish(ctx, job, findings))
        done += len(wave)
    else:
        if seen.first is not None:
            raise seen.first
    progress(done, due.left)
    result = {**summary(seen), "left": due.left - done, "complete": done == due.left}
    if not result["complete"]:
        return Completed(result)
    logs, looked = _verify_logs(ctx, progress, runner, deep=not max_age)
    counts = verify_files(ctx, runner, progress)
    if looked:
        counts.saw(LOGS, looked, 0)
        counts.kinds[LOGS]["problems"] = len(logs)
    result |= {"logs": logs, "problems": counts.problems, "kinds": {**result["kinds"], **counts.kinds}}
    return Completed(result, ops=(RecordVerification([*logs, *file_problems(result)]),))


# ── which artifacts ───────────────────────────────────────────────────────────────────────────────────────────────────
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


def place_to_verify(ctx: JobContext, txn: ReadTxn, key: ArtifactKey) -> ArtifactLocation | None:
    """Where the bytes of an artifact should be now; `None` if it is (about to be) gone."""
    row = txn.artifact(key)
    if row is None or shares_bytes(key, row) or _is_doomed(txn, key):
        return None
    return ctx.place_of(txn, key, row)


def bitmap_of(txn: ReadTxn, key: ArtifactKey) -> int:
    """The hash of a chunk's page bitmap, by its row; 0 if it is no chunk, or none was recorded."""
    return int(getattr(txn.artifact(key), "bitmap_hash", 0))


def is_meant(txn: ReadTxn, key: ArtifactKey, row: Any, asked_at_ms: int) -> bool:
    """Whether an artifact was there when it was asked for, has bytes of its own, and is neither doomed nor being written."""
    if isinstance(row, WalRecord):
        return row.state is not WalState.OPEN and row.sealed_at_ms <= asked_at_ms and not _is_doomed(txn, key)
    return bool(row.created_at_ms <= asked_at_ms) and not shares_bytes(key, row) and not _is_doomed(txn, key)


def _is_doomed(txn: ReadTxn, key: ArtifactKey) -> bool:
    counts = txn.refcount(key)
    return counts is not None and not (counts.in_use or counts.pending_upload)


# ── looking at artifacts ──────────────────────────────────────────────────────────────────────────────────────────────
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


def waves(ctx: JobContext, keys: Sequence[ArtifactKey]) -> Iterator[list[tuple[ArtifactLocation, int]]]:
    """(place, bitmap hash) of artifacts as they are when their turn comes, a wave at a time."""
    rest = iter(keys)
    while taken := list(islice(rest, WAVE_ARTIFACTS)):
        with ctx.manifest.read() as txn:
            placed = [
                (place, bitmap_of(txn, key)) for key in taken if (place := place_to_verify(ctx, txn, key)) is not None
            ]
        wave: list[tuple[ArtifactLocation, int]] = []
        size = 0
        for artifact in placed:
            wave.append(artifact)
            size += artifact[0].size_bytes
            if size >= WAVE_BYTES:
                yield wave
                wave, size = [], 0
        if wave:
            yield wave


def describe_artifacts(
    ctx: JobContext, runner: Runner, wave: Sequence[tuple[ArtifactLocation, int]], alive: Callable[[], None]
) -> list[ArtifactFinding]:
    """What the artifacts of a wave are. `alive` is called now and then, and may raise."""
    here = [artifact for artifact in wave if artifact[0].has_local and not runner.shares_disk]
    readable = [artifact for artifact in wave if not (artifact[0].has_local and not runner.shares_disk)]

    def tick(*_: int) -> None:
        alive()

    answers: list[TaskResult[int, list[ArtifactFinding]]] = list(
        runner.map(run_task, tasks(readable, runner.width), tick=tick)
    )
    if here:
        local = ctx.thread_runner("quire-verify")
        answers += local.map(run_task, tasks(here, local.width), tick=tick)
    return [finding for answer in answers for finding in answer.result()]


def tasks(wave: Sequence[tuple[ArtifactLocation, int]], width: int) -> list[VerifyTask]:
    """A wave, in pieces that become smaller; the last ones of one size, so that cores are done at about the same moment.

    Few tasks in all, because what Spark needs to start one (23 ms) is worth 25 MiB of digests.
    """
    costs = [place.size_bytes + ARTIFACT_BYTES for place, _ in wave]
    left, ready = sum(costs), list[VerifyTask]()
    begin = size = 0
    wanted = _wanted(left, width)
    for end, cost in enumerate(costs):
        if begin < end and size + cost > wanted:
            ready.append(_task(wave[begin:end]))
            left, begin, size = left - size, end, 0
            if len(ready) % width == 0:
                wanted = _wanted(left, width)
        if begin == end and left <= EVEN_BYTES * width and len(ready) % width == 0:
            break
        size += cost
    return ready + _evenly(wave[begin:], costs[begin:], width)


def _wanted(left: int, width: int) -> int:
    """Of so much that is left, how much each of the next tasks takes."""
    return min(max(2 * left // (3 * width), TASK_BYTES_MIN), TASK_BYTES_MAX)


def _evenly(wave: Sequence[tuple[ArtifactLocation, int]], costs: Sequence[int], width: int) -> list[VerifyTask]:
    """One task for each core, if there is work for so many."""
    parts: list[list[tuple[ArtifactLocation, int]]] = [[] for _ in range(min(-(-sum(costs) // TASK_BYTES_MIN), width))]
    for artifact, part in zip(wave, balanced(costs, len(parts)), strict=True):
        parts[part].append(artifact)
    return [_task(part) for part in parts if part]


def _task(group: Sequence[tuple[ArtifactLocation, int]]) -> VerifyTask:
    return VerifyTask(tuple(place for place, _ in group), tuple(bitmap for _, bitmap in group))


def _count(seen: Seen, findings: Sequence[ArtifactFinding]) -> None:
    for finding in findings:
        name = "unreadable" if finding.error is not None else finding.state.name.lower()
        setattr(seen, name, getattr(seen, name) + 1)
        seen.size_bytes += finding.place.size_bytes
        count = seen.kinds.setdefault(_kind(finding.place), {"files": 0, "bytes": 0, "problems": 0})
        count["files"] += 1
        count["bytes"] += finding.place.size_bytes
        count["problems"] += finding.is_bad
        seen.first = seen.first or finding.error
        if finding.is_bad and len(seen.damaged) < LISTED_MAX:
            seen.damaged.append(f"{object_key(finding.place.key)} {finding.state.name}")


def _kind(place: ArtifactLocation) -> str:
    if place.key.kind is ArtifactKind.WAL:
        return "page-WAL segment" if place.is_page_segment else "stream segment"
    return {ArtifactKind.BASE: "chunk", ArtifactKind.DELTA: "delta"}[place.key.kind]


def summary(seen: Seen) -> dict[str, Any]:
    """As a job's result has it."""
    counts = {name: getattr(seen, name) for name in ("verified", "missing", "altered", "unreadable")}
    return {**counts, "bytes": seen.size_bytes, "damaged": seen.damaged, "kinds": seen.kinds}


def _second_look(ctx: JobContext, findings: Sequence[ArtifactFinding]) -> list[ArtifactFinding]:
    """Keep a bad verdict only if a second look, at the row as it is by then, gives the same."""
    doubtful = [finding.place.key for finding in findings if finding.is_bad]
    return [finding for finding in findings if not finding.is_bad] + (_look_once(ctx, doubtful) if doubtful else [])


def _look_once(ctx: JobContext, keys: Sequence[ArtifactKey]) -> list[ArtifactFinding]:
    with ctx.manifest.read() as txn:
        placed = [(place, bitmap_of(txn, key)) for key in keys if (place := place_to_verify(ctx, txn, key)) is not None]
    task = VerifyTask(tuple(place for place, _ in placed), tuple(bitmap for _, bitmap in placed))
    return verify(task, disk=ctx.disk, open_store=ctx.open_store)


def _publish(ctx: JobContext, job: Job, findings: Sequence[ArtifactFinding]) -> list[ArtifactFinding]:
    """Commit the verdicts, report the bad ones, and return what counts in the job's result.

    Verdicts on an artifact that moved, or is about to be deleted, are dropped: a file that was evicted meanwhile is not
    missing.
    """
    # Never before the moment it was asked for, whatever the clock does: else it would be repeated for ever.
    at_ms = max(ctx.clock.now_ms(), job.record.created_at_ms)
    with ctx.manifest.read() as txn:
        moved = {item.place.key for item in findings if place_to_verify(ctx, txn, item.place.key) != item.place}
    ops: list[Op] = []
    for finding in findings:
        key = finding.place.key
        if finding.state is VerifyState.UNVERIFIED or key in moved:
            continue
        if finding.is_bad:
            emit("error", "verify.damaged", artifact=object_key(key), problems=list(finding.problems))
        ops.append(update(key, verify_state=finding.state, verified_at_ms=at_ms, sha256=finding.sha256 or None))
    if ops:
        try:
            commit_step(ctx, job, ops)
            hit("jobs.verify.published")
        except UnknownArtifact:
            pass  # one was deleted in between: the wave's verdicts are not recorded, and the next verification looks again
    return [finding for finding in findings if not (finding.is_bad and finding.place.key in moved)]


# ── manifest logs of streams ──────────────────────────────────────────────────────────────────────────────────────────
def _verify_logs(ctx: JobContext, progress: Progress, runner: Runner, *, deep: bool) -> tuple[list[str], int]:
    """What is wrong with the manifest logs of streams, and how many there are. No row says when they were
    looked at: that is with every whole run, and of objects' bodies if everything is wanted, however lately it was seen."""
    with ctx.manifest.read() as txn:
        tasks = [
            LogTask(
                stream_id=db_id,
                root=ctx.root,
                url=txn.place_of(db_id, ctx.objects_url)[1],
                witness=witness_in(txn, db_id),
                prefixes=txn.object_prefixes(txn.place_of(db_id, "")[0]),
                store_id=txn.log_store_id(),
            )
            for db_id, record in txn.databases()
            if record.kind is DbKind.STREAM and record.status is not DbStatus.TOMBSTONED
        ]
    if not tasks:
        return [], 0
    here = ctx.thread_runner("quire-verify")
    damage = [problem for problem in verify_logs(tasks, runner, here, deep=deep, tick=progress) if not problem[1].leak]
    for stream_id, problem in damage:
        emit("error", "verify.log_damaged", stream=stream_id, rule=problem.rule, what=problem.what, where=problem.where)
    described = [
        f"manifest log of stream {stream_id}, {problem.rule}: {problem.what}"
        for stream_id, problem in damage[:LISTED_MAX]
    ]
    return described, len(tasks)


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
            self.problem(kind, path, what)

    def saw(self, kind: str, files: int, size_bytes: int) -> None:
        """So many files in which nothing was wrong yet."""
        count = self.kinds.setdefault(kind, {"files": 0, "bytes": 0, "problems": 0})
        count["files"] += files
        count["bytes"] += size_bytes

    def problem(self, kind: str, path: str, what: str) -> None:
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
    again = {finding.file for finding in findings if finding.problems}
    if again:
        still = {
            *_open_segments(ctx),
            *_key_values(ctx, Counts()),
            *_backups(ctx),
        }  # one that was compacted away is gone, not missing
        second = _look(ctx, [file for file in again if file in still], runner, progress)
        findings = [finding for finding in findings if not finding.problems] + second
    for finding in findings:
        size = finding.file.size_bytes or _size(finding.file.path)
        counts.add(str(finding.file.kind), os.path.relpath(finding.file.path, ctx.root), size, finding.problems)
    return counts


def _look(ctx: JobContext, files: list[StoredFile], runner: Runner, progress: Progress) -> list[FileFinding]:
    here = runner if runner.shares_disk else ctx.thread_runner("quire-verify")
    starts = range(0, len(files), GROUP_FILES)
    tasks = [FilesTask(url=ctx.objects_url, files=tuple(files[start : start + GROUP_FILES])) for start in starts]
    return [finding for answer in here.map(check_files, tasks, tick=progress) for finding in answer.result()]


def _size(path: str) -> int:
    return os.stat(path).st_size if os.path.exists(path) else 0


def _manifest(ctx: JobContext, counts: Counts) -> None:
    """Pages by a child process, which some damage kills; then every row, and the rules between them."""
    path = ctx.manifest.env.path
    counts.saw(MANIFEST, 1, _size(path))
    name = os.path.relpath(path, ctx.root)
    if (why := probe(path)) is not None:
        counts.problem(MANIFEST, name, why)
        return
    for problem in ctx.manifest.check():
        if not problem.leak:
            counts.problem(MANIFEST, name, str(problem))


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
        files = stored(ctx.kv(), db_id, snapshots)
        for path in files.logs:
            counts.saw(KV_LOGS, 1, _size(path))
        for problem in files.problems:
            counts.problem(KV_LOGS, os.path.relpath(problem.path, ctx.root) if problem.path else "", str(problem))
        for path, sst_id, size_bytes in files.tables:
            yield StoredFile(kind=FileKind.KV_TABLE, path=path, db_id=db_id, number=sst_id, size_bytes=size_bytes)


def _backups(ctx: JobContext) -> Iterator[StoredFile]:
    """Tables that lists of backups name, in the store's own object store and in namespaces."""
    with ctx.manifest.read() as txn:
        if not any(True for _ in _live(txn, DbKind.LSM)):
            return
        homes = (kv_backups_prefix(txn.store_id()), "kv")
        urls = [ctx.objects_url, *(row.url for _, row in txn.scan(t.REMOTE_NAMESPACE) if row.holds_itself)]
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
