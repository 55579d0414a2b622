"""What a store holds besides artifacts: segments that are being written, key-value databases, backups, the manifest itself.

Terms
  loose file   a file without a row that could keep a verdict: it is read in every whole verification, and what was found is in
               the job's result, which `quire doctor` tells
  count        of one kind: how many files, how many bytes, how many problems

Rules
  1. Tables and segments are read by the runner, where it sees the store's files, else by threads here. Manifests and logs of
     key-value databases are small and belong to open databases: they are read here, by their engine.
  2. Bad is what is bad in a second look, by the rows as they are then: a table that was compacted away meanwhile is gone, not
     missing.
  3. A database that cannot be opened is a problem of its own and keeps no other from being looked at.

Threads: the caller's, and the runner's. Raises what disk and object store raise.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from quire.core.events import emit
from quire.durable.names import Tier, WalSegmentFile, stream_dir
from quire.durable.remote_names import kv_backups_prefix
from quire.jobs.context import JobContext
from quire.jobs.handler import Progress
from quire.jobs.runner import Runner
from quire.jobs.threads import thread_runner
from quire.jobs.verify.plan import LISTED_MAX
from quire.jobs.verify.run import FileFinding, FileKind, FilesTask, StoredFile, check_files
from quire.manifest import tables as t
from quire.manifest.probe import probe
from quire.manifest.reads import ReadTxn
from quire.manifest.records import DbKind, DbStatus, WalFormat, WalState

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
    here = runner if runner.shares_disk else thread_runner(ctx, label="quire-verify")
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
    """Tables of key-value databases and of their snapshots; everything else of theirs is read on the way (rule 1)."""
    with ctx.manifest.read() as txn:
        databases = {
            db_id: [key[1] for key, _ in txn.scan(t.SNAPSHOT_INDEX, db_id)] for db_id in _live(txn, DbKind.LSM)
        }
    for db_id, snapshots in databases.items():
        if ctx.kv is None:
            return
        found = ctx.kv(db_id, snapshots)
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
