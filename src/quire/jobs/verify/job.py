"""The verify job: compares every copy of every artifact of the store with its row, then reads the files that no row names.

Terms
  wave         artifacts that are verified between two commits of verdicts, in one call of the runner
  horizon      artifacts verified since then are skipped: the moment of the request, or `max_age_seconds` before it
  loose file   a file without a row that could keep a verdict: segments that are being written, key-value databases, backups,
               the manifest itself. It is read in every complete verification, and its problems are in the job's result

The artifacts whose last verification is oldest come first. A verification plans and reads until no artifact older than the
horizon is left, or its time (`max_duration_seconds`) is over. The result then has the number of artifacts left, and the next
verification continues with them, because rows record when each artifact was verified. A crash anywhere leaves the verdicts that
were committed.

A bad verdict needs a second check, against the current row, with the same outcome; it counts only if the artifact is still
where its bytes were read, and is not about to be deleted. Artifacts about to be deleted and segments that are still written are
skipped. Chunks of streams have no bytes of their own; their segments have a different form on each tier
(`jobs/stream_verify`).

An artifact that cannot be read does not prevent the verification of others, and gets no verdict; the attempt fails at the end
of the plan, unless its time is over. An executor that does not see the store's files reads objects only; this process then
verifies artifacts with files, and loose files.

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
"""Artifacts in one plan: 4 TiB of full chunks. The job plans again until no artifact is left."""

LISTED_MAX = 100
"""Damaged artifacts that a job's result lists; the rows have all of them."""

WAVE_BYTES = 4 * GIB
WAVE_ARTIFACTS = 4_096
TASK_BYTES_MIN, TASK_BYTES_MAX = 128 * MIB, GIB
"""A wave ends at the first two limits. It is cut into tasks between `TASK_BYTES_MIN` and `TASK_BYTES_MAX`."""

EVEN_BYTES = 768 * MIB
"""Bytes left per core at or below which the rest of a wave is divided evenly."""

ARTIFACT_BYTES = MIB // 4
"""Cost of opening an artifact, as a number of bytes."""

LOGS = "manifest log of a stream"


def verify_job(ctx: JobContext, job: Job, progress: Progress) -> Outcome:
    """Compare rows, files and objects, and record the verdicts."""
    given = options(job, scope="store", runner="", max_age_seconds=0.0, max_duration_seconds=0.0)
    if given["scope"] != "store" or job.db_id:
        raise InvalidInput("a verification always covers the whole store", job_id=job.job_id, scope=given["scope"])
    max_age, max_duration = given["max_age_seconds"], given["max_duration_seconds"]
    began = ctx.clock.monotonic()

    def plan() -> Aged:
        with ctx.manifest.read() as txn:
            return plan_aged(txn, job.record.created_at_ms, max_age)

    def is_over() -> bool:
        return bool(max_duration) and ctx.clock.monotonic() - began >= max_duration

    due = plan()
    runner = ctx.choose_runner(given["runner"], due.size_bytes, label="quire-verify")
    seen, done = Seen(), 0
    while due.left and not is_over():
        total = done + due.left
        for wave in waves(ctx, due.keys):
            progress(done, total)
            if is_over():
                break
            findings = _second_look(ctx, describe_artifacts(ctx, runner, wave, partial(progress, done, total)))
            _count(seen, _publish(ctx, job, findings))
            done += len(wave)
        else:
            if seen.first is not None:
                raise seen.first
        # Rows say what is left, not a count of what was read: artifacts are deleted and moved during the run.
        due = plan()
    progress(done, done + due.left)
    result = {**summary(seen), "left": due.left, "complete": not due.left}
    if due.left:
        return Completed(result)
    logs, looked = _verify_logs(ctx, progress, runner, deep=not max_age)
    counts = verify_files(ctx, runner, progress)
    if looked:
        counts.saw(LOGS, looked, 0)
        counts.kinds[LOGS]["problems"] = len(logs)
    result |= {"logs": logs, "problems": counts.problems, "kinds": {**result["kinds"], **counts.kinds}}
    return Completed(result, ops=(RecordVerification([*logs, *file_problems(result)]),))


# ── choosing artifacts ────────────────────────────────────────────────────────────────────────────────────────────────
@dataclass(frozen=True, slots=True)
class Aged:
    """The artifacts whose verification is older than the horizon."""

    keys: tuple[ArtifactKey, ...]
    """The oldest `PLANNED_MAX`, oldest first."""
    left: int
    size_bytes: int
    oldest_ms: int
    """When the oldest was verified; 0: never."""


def plan_aged(txn: ReadTxn, asked_at_ms: int, max_age_seconds: float) -> Aged:
    """Return the artifacts to verify, oldest verification first."""
    horizon = asked_at_ms - int(max_age_seconds * 1000)
    size, due = 0, []
    for key, row in artifacts(txn):
        if row.verified_at_ms < horizon and is_verifiable(txn, key, row, asked_at_ms):
            due.append((row.verified_at_ms, key))
            size += getattr(row, "used_bytes", 0) or getattr(row, "size_bytes", 0)
    first = heapq.nsmallest(PLANNED_MAX, due)
    return Aged(tuple(key for _, key in first), len(due), size, first[0][0] if first else 0)


def place_to_verify(ctx: JobContext, txn: ReadTxn, key: ArtifactKey) -> ArtifactLocation | None:
    """Return where the bytes of an artifact should be now; `None` if it is gone, about to be deleted, or borrows its bytes."""
    row = txn.artifact(key)
    if row is None or shares_bytes(key, row) or _is_doomed(txn, key):
        return None
    return ctx.place_of(txn, key, row)


def bitmap_of(txn: ReadTxn, key: ArtifactKey) -> int:
    """Return the hash of a chunk's page bitmap from its row; 0 if it is not a chunk, or no hash was recorded."""
    return int(getattr(txn.artifact(key), "bitmap_hash", 0))


def is_verifiable(txn: ReadTxn, key: ArtifactKey, row: Any, asked_at_ms: int) -> bool:
    """Return whether an artifact existed at the request, has bytes of its own, and is neither at zero nor being written."""
    if isinstance(row, WalRecord):
        return row.state is not WalState.OPEN and row.sealed_at_ms <= asked_at_ms and not _is_doomed(txn, key)
    return bool(row.created_at_ms <= asked_at_ms) and not shares_bytes(key, row) and not _is_doomed(txn, key)


def _is_doomed(txn: ReadTxn, key: ArtifactKey) -> bool:
    counts = txn.refcount(key)
    return counts is not None and not (counts.in_use or counts.pending_upload)


# ── verifying artifacts ───────────────────────────────────────────────────────────────────────────────────────────────
@dataclass(slots=True)
class Seen:
    """The findings of a verification so far."""

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
    """Yield waves of (place, bitmap hash), with rows as they are when the wave begins."""
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
    """Verify the artifacts of a wave. `alive` is called periodically, and may raise."""
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
    """Cut a wave into tasks of decreasing size; the last ones have equal size, so that all cores finish at about the same time.

    Tasks are few, because Spark needs 23 ms to start one, in which 25 MiB could be digested.
    """
    costs = [place.size_bytes + ARTIFACT_BYTES for place, _ in wave]
    left, ready = sum(costs), list[VerifyTask]()
    begin = size = 0
    wanted = _task_bytes(left, width)
    for end, cost in enumerate(costs):
        if begin < end and size + cost > wanted:
            ready.append(_task(wave[begin:end]))
            left, begin, size = left - size, end, 0
            if len(ready) % width == 0:
                wanted = _task_bytes(left, width)
        if begin == end and left <= EVEN_BYTES * width and len(ready) % width == 0:
            break
        size += cost
    return ready + _evenly(wave[begin:], costs[begin:], width)


def _task_bytes(left: int, width: int) -> int:
    """Return the size of each of the next tasks when `left` bytes are left."""
    return min(max(2 * left // (3 * width), TASK_BYTES_MIN), TASK_BYTES_MAX)


def _evenly(wave: Sequence[tuple[ArtifactLocation, int]], costs: Sequence[int], width: int) -> list[VerifyTask]:
    """Divide the rest into one task for each core, or fewer if there is little work."""
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
    """Return the findings in the form of a job's result."""
    counts = {name: getattr(seen, name) for name in ("verified", "missing", "altered", "unreadable")}
    return {**counts, "bytes": seen.size_bytes, "damaged": seen.damaged, "kinds": seen.kinds}


def _second_look(ctx: JobContext, findings: Sequence[ArtifactFinding]) -> list[ArtifactFinding]:
    """Keep a bad verdict only if a second check, against the current row, confirms it."""
    doubtful = [finding.place.key for finding in findings if finding.is_bad]
    return [finding for finding in findings if not finding.is_bad] + (_look_once(ctx, doubtful) if doubtful else [])


def _look_once(ctx: JobContext, keys: Sequence[ArtifactKey]) -> list[ArtifactFinding]:
    with ctx.manifest.read() as txn:
        placed = [(place, bitmap_of(txn, key)) for key in keys if (place := place_to_verify(ctx, txn, key)) is not None]
    task = VerifyTask(tuple(place for place, _ in placed), tuple(bitmap for _, bitmap in placed))
    return verify(task, disk=ctx.disk, open_store=ctx.open_store)


def _publish(ctx: JobContext, job: Job, findings: Sequence[ArtifactFinding]) -> list[ArtifactFinding]:
    """Commit the verdicts, report the bad ones, and return the findings that count in the job's result.

    Verdicts on an artifact that has moved, or is about to be deleted, are dropped: a file that was evicted in the meantime is
    not missing. An artifact that has moved stays due, and is in the next plan.
    """
    # Never before the request, whatever the clock does: otherwise the artifact would stay due for ever.
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
            return []  # one was deleted in between: the wave's verdicts are not recorded, and its artifacts stay due
    return [finding for finding in findings if finding.place.key not in moved]


# ── manifest logs of streams ──────────────────────────────────────────────────────────────────────────────────────────
def _verify_logs(ctx: JobContext, progress: Progress, runner: Runner, *, deep: bool) -> tuple[list[str], int]:
    """Return the problems of the manifest logs of streams, and the number of logs. No row records when a log was verified, so
    every complete run verifies all of them, and the bodies of their objects if no `max_age_seconds` is given."""
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
    """Counts of files by kind, and their problems."""

    kinds: dict[str, dict[str, int]] = field(default_factory=dict)
    problems: list[dict[str, str]] = field(default_factory=list)

    def add(self, kind: str, path: str, size_bytes: int, problems: tuple[str, ...] = ()) -> None:
        """Count one file, with its problems."""
        self.saw(kind, 1, size_bytes)
        for what in problems:
            self.problem(kind, path, what)

    def saw(self, kind: str, files: int, size_bytes: int) -> None:
        """Count files without problems."""
        count = self.kinds.setdefault(kind, {"files": 0, "bytes": 0, "problems": 0})
        count["files"] += files
        count["bytes"] += size_bytes

    def problem(self, kind: str, path: str, what: str) -> None:
        """Record and report a problem of one file."""
        count = self.kinds.setdefault(kind, {"files": 0, "bytes": 0, "problems": 0})
        count["problems"] += 1
        emit("error", "verify.file_damaged", kind=kind, path=path, what=what)
        if len(self.problems) < LISTED_MAX:
            self.problems.append({"kind": kind, "path": path, "what": what})


def verify_files(ctx: JobContext, runner: Runner, progress: Progress) -> Counts:
    """Read all loose files; a problem counts only if a second read confirms it."""
    counts = Counts()
    _manifest(ctx, counts)
    files = [*_open_segments(ctx), *_key_values(ctx, counts), *_backups(ctx)]
    findings = _check_files(ctx, files, runner, progress)
    again = {finding.file for finding in findings if finding.problems}
    if again:
        # A file that was compacted away in the meantime is not missing.
        still = {*_open_segments(ctx), *_key_values(ctx, Counts()), *_backups(ctx)}
        second = _check_files(ctx, [file for file in again if file in still], runner, progress)
        findings = [finding for finding in findings if not finding.problems] + second
    for finding in findings:
        file = finding.file
        # The path of a backup is the key of an object.
        path = file.path if file.kind is FileKind.KV_BACKUP else os.path.relpath(file.path, ctx.root)
        counts.add(str(file.kind), path, file.size_bytes or _size(file.path), finding.problems)
    return counts


def _check_files(ctx: JobContext, files: list[StoredFile], runner: Runner, progress: Progress) -> list[FileFinding]:
    here = runner if runner.shares_disk else ctx.thread_runner("quire-verify")
    starts = range(0, len(files), GROUP_FILES)
    tasks = [FilesTask(url=ctx.objects_url, files=tuple(files[start : start + GROUP_FILES])) for start in starts]
    return [finding for answer in here.map(check_files, tasks, tick=progress) for finding in answer.result()]


def _size(path: str) -> int:
    return os.stat(path).st_size if os.path.exists(path) else 0


def _manifest(ctx: JobContext, counts: Counts) -> None:
    """Check the manifest: its pages in a child process, which some damage kills, then every row and the rules between rows."""
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
    """Yield the segments that are being written: of page databases by their rows, of streams by their files."""
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
    """Yield the tables of key-value databases and of their snapshots; verify their other files along the way."""
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
    """Yield the tables that lists of backups name, in the store's own object store and in namespaces."""
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
