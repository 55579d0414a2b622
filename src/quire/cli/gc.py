"""The command `gc`: runs one round of maintenance, and shows what waits to be deleted.

Terms
  zero    an artifact that nothing refers to; it never gets a reference again, and its bytes are deleted after the grace period

Rules
  1. `--dry-run` only reads: it works while another process owns the store.
  2. Deletions are reported from the audit, so that none is missed and none is reported that did not happen.
  3. The grace period protects readers in other processes, which may just have looked up a name. `--now` skips it, and therefore
     asks for confirmation.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from heapq import nsmallest
from itertools import groupby, islice
from typing import TYPE_CHECKING, Annotated, Any

from quire.cli.declarations import Option, command
from quire.cli.errors import OK, PROBLEMS
from quire.cli.formatting import count_of, size, span
from quire.cli.job_progress import JobSession
from quire.cli.jobs import failed_jobs, job_json, state_text
from quire.cli.lookup import Yes, names_of
from quire.cli.output import CliResult, Facts, Listing, ListingRow, Note, Report
from quire.cli.prompts import confirm
from quire.core.clock import moment
from quire.core.errors import InvalidInput
from quire.core.ids import ArtifactKey, ArtifactKind
from quire.core.json_values import plain
from quire.core.time_parsing import parse_duration
from quire.durable.names import parse_object_key
from quire.manifest import tables as t
from quire.manifest.namespaces import retired_objects
from quire.manifest.ops.refs import artifact_bytes
from quire.manifest.records import AuditAction, JobKind, JobState

if TYPE_CHECKING:
    from quire.cli.command import Cli
    from quire.manifest.reads import ReadTxn
    from quire.manifest.store import ManifestStore

ROUND = {
    "snapshots": ("snapshot", "created by a schedule"),
    "dropped": ("snapshot", "dropped by retention"),
    "leases_lost": ("job", "reclaimed from a worker that died"),
    "jobs": ("job", "run"),
    "jobs_forgotten": ("old job", "removed"),
    "answers_forgotten": ("old idempotency key", "removed"),
    "audit_pruned": ("database", "with its old audit entries removed"),
    "leftovers": ("file", "of killed processes and dropped databases removed"),
    "trimmed": ("object", "of the archive removed: out of the window"),
    "collected": ("retired object", "deleted: no archived moment needs it"),
}
"""Counter of a round of maintenance → its words. `delete_jobs` is included in `jobs`."""


NAMED_MAX = 5
"""Most databases to name in a line."""


@dataclass(frozen=True, order=True)
class Zero:
    """An artifact that waits to be deleted, ordered by when it is due."""

    due_at_ms: int
    artifact: ArtifactKey
    size_bytes: int
    zero_since_ms: int

    @property
    def db_id(self) -> int:
        """The database that created it."""
        return self.artifact.origin_db_id


@dataclass
class Amount:
    """A number of artifacts and their bytes."""

    artifacts: int = 0
    size_bytes: int = 0

    def add(self, zero: Zero) -> None:
        """Add one artifact."""
        self.artifacts += 1
        self.size_bytes += zero.size_bytes

    def __str__(self) -> str:
        return f"{count_of(self.artifacts, 'artifact')}, {size(self.size_bytes)}" if self.artifacts else "nothing"


@dataclass
class Waiting:
    """What waits to be deleted: totals, and the artifacts that are due first."""

    first: list[Zero]
    total: Amount
    due: Amount


@command("gc", example="quire gc --dry-run")
def gc(
    cli: Cli,
    dry_run: Annotated[
        bool, Option("--dry-run", help="Only show what is waiting to be deleted, and when it is due.")
    ] = False,
    now: Annotated[
        bool, Option("--now", help="Skip the grace period, which protects readers in other processes.")
    ] = False,
    limit: Annotated[int, Option(min=0, metavar="N", help="With --dry-run: artifacts to list; 0 for all.")] = 20,
    keep: Annotated[
        str, Option("--keep", metavar="OBJECT", help="Run no round; keep this chunk or delta (see --until).")
    ] = "",
    until: Annotated[
        str, Option("--until", metavar="FOR", help="With --keep: how long to keep it, such as 7d; 0 ends it.")
    ] = "",
    yes: Yes = False,
) -> CliResult | Report | Note:
    """Run one round of maintenance now and show what it did.

    A round is what the owner of a store does automatically: schedules, retention, deletions, and all jobs that are due. Data
    that nothing refers to is deleted after a grace period of a minute (maintenance.delete_grace_seconds).
    """
    if keep or until:
        if dry_run or now:
            raise InvalidInput("`--keep` cannot be combined with `--dry-run` or `--now`", hint="it runs nothing else")
        return _keep(cli, keep, until)
    grace_ms = 0 if now else int(cli.settings().maintenance.delete_grace_seconds * 1000)
    if dry_run:
        with cli.reader() as manifest:
            return _outlook(manifest, grace_ms, limit)
    with cli.owner(grace_seconds=0 if now else None) as store:
        if now and not yes:
            waiting = at_zero(store.manifest, grace_ms).total
            what = (
                f"{waiting}, and everything this round releases"
                if waiting.artifacts
                else "everything this round releases"
            )
            question = f"delete at once, even if another process is reading it: {what}?"
            confirm(question, "nothing was done", {"done": False})
        return _collect(JobSession(store), grace_ms, at_once=now)


def _keep(cli: Cli, name: str, until: str) -> Note:
    """Keep the bytes of a chunk or delta for some time, even if nothing refers to them."""
    artifact = parse_object_key(name)
    if artifact is None or not until:
        hint = "`quire gc --keep 00000001/00000000/base:00000001 --until 7d`; `quire why DATABASE` shows names"
        raise InvalidInput("`--keep` takes an object's key, and `--until` a duration", hint=hint, given=name)
    seconds = parse_duration(until, "--until")
    with cli.owner() as store:
        until_ms = store.manifest.clock.now_ms() + seconds * 1000 if seconds else 0
        store.manifest.jobs.keep_until(artifact, until_ms).result()
    text = f"{name} is kept for at least {until}" if seconds else f"{name} is deleted when nothing refers to it"
    return Note(text=text, data={"kept": name, "purge_after_ms": until_ms})


# ── dry run ───────────────────────────────────────────────────────────────────────────────────────────────────────────
def at_zero(manifest: ManifestStore, grace_ms: int, first: int = 1) -> Waiting:
    """Return the totals of artifacts at zero, and the `first` that are due (0: all)."""
    waiting, now = Waiting([], Amount(), Amount()), manifest.clock.now_ms()
    with manifest.read() as txn:
        zeros = _counted(_zeros(txn, manifest, grace_ms), waiting, now)
        waiting.first = nsmallest(first, zeros) if first else sorted(zeros)
    return waiting


def _counted(zeros: Iterator[Zero], waiting: Waiting, now: int) -> Iterator[Zero]:
    for zero in zeros:
        waiting.total.add(zero)
        if zero.due_at_ms <= now:
            waiting.due.add(zero)
        yield zero


def _zeros(txn: ReadTxn, manifest: ManifestStore, grace_ms: int) -> Iterator[Zero]:
    """Yield all artifacts at zero, by database.

    None is deleted before the delete job of its database is due. With no grace period that job is run in any case.
    """
    for origin, rows in groupby(txn.scan(t.GC_ZERO), key=lambda row: row[0][0]):
        due, kept = 0, None
        if grace_ms:
            gate = txn.get(t.JOB_PENDING_INDEX, origin, JobKind.DELETE)
            job = txn.job(gate.value) if gate else None
            due = job.not_before_ms if job else 0
            # Only the owner has the leases; a reader sees their effect only after the delete job has been postponed.
            kept = None if manifest.read_only else manifest.leases.kept_since(origin)
        for key, row in rows:
            zero = _zero(txn, key, row.value, grace_ms, kept)
            yield replace(zero, due_at_ms=max(zero.due_at_ms, due))


def _zero(txn: ReadTxn, key: tuple[Any, ...], since_ms: int, grace_ms: int, kept: tuple[int, int] | None) -> Zero:
    origin, kind, number, generation, delta = key
    artifact = ArtifactKey(origin, ArtifactKind(kind), number, generation, delta)
    due = since_ms + grace_ms
    if kept is not None and since_ms >= kept[0]:
        due = max(due, kept[1])  # a leased version may need it
    if artifact.kind is ArtifactKind.LEAF:
        due = since_ms  # a leaf has no bytes that a reader could need
    row = txn.artifact(artifact)
    purge_after: int = getattr(row, "purge_after_ms", 0)
    return Zero(max(due, purge_after), artifact, artifact_bytes(row), since_ms)


def _outlook(manifest: ManifestStore, grace_ms: int, limit: int) -> Report:
    waiting = at_zero(manifest, grace_ms, limit)
    now = manifest.clock.now_ms()
    shown = waiting.first
    more = waiting.total.artifacts - len(shown)
    with manifest.read() as txn:
        names = txn.database_names(zero.db_id for zero in shown)
        pending = (txn.job(job_id) for (_, job_id), _ in txn.scan(t.JOBS_BY_STATE, JobState.PENDING))
        jobs_due = sum(job is not None and job.not_before_ms <= now for job in pending)
        kept = sorted((row.since_ms, row.name, row.db_id) for _, row in retired_objects(txn))
        names |= txn.database_names({db_id for _, _, db_id in kept})
    drops = _retention(manifest)
    table = Listing(
        columns=["artifact", ">size", "unreferenced", "deleted"],
        rows=[ListingRow(_cells(zero, names, now), None) for zero in shown],
        empty="nothing is waiting to be deleted",
        closing=f"{more:,} more: `--limit 0` shows all" if more else "",
    )
    total, due = waiting.total, waiting.due
    facts = Facts(
        lines=[
            ("would delete now", str(due)),
            ("later", str(Amount(total.artifacts - due.artifacts, total.size_bytes - due.size_bytes))),
            ("retention", _drops_text(drops)),
            ("jobs", f"{jobs_due:,} due"),
            ("kept for the archive", _kept(kept, names, now)),
        ],
        data=None,
    )  # fmt: skip
    data = {
        "dry_run": True,
        "artifacts": total.artifacts,
        "size_bytes": total.size_bytes,
        "due_artifacts": due.artifacts,
        "due_bytes": due.size_bytes,
        "would_drop": drops,
        "jobs_due": jobs_due,
        "waiting": [{**plain(vars(zero)), "database": names.get(zero.db_id, "")} for zero in shown],
        "retired": len(kept),
        "retired_since_ms": kept[0][0] if kept else 0,
        "retired_objects": [
            {"name": name, "database": names.get(db_id, ""), "since_ms": since}
            for since, name, db_id in (kept[:limit] if limit else kept)
        ],
    }
    return Report(parts=[table, facts], data=data)


def _kept(kept: list[tuple[int, str, int]], names: dict[int, str], now: int) -> str:
    """Describe the retired objects: of which databases, and that archived moments and clones need them."""
    if not kept:
        return "nothing"
    most = Counter(db_id for _, _, db_id in kept).most_common(NAMED_MAX)
    databases = ", ".join(f"{number:,} of {names.get(db_id) or 'dropped databases'}" for db_id, number in most)
    since = f"the first retired {span(now - kept[0][0])} ago ({moment(kept[0][0])})"
    return f"{count_of(len(kept), 'object')} that moments of the window or clones need: {databases}; {since}"


def _retention(manifest: ManifestStore) -> dict[str, int]:
    """Return database → number of snapshots that its policy would drop now, without zeros."""
    with manifest.read() as txn:
        databases = list(txn.owners(t.SNAPSHOT_INDEX))
    drops = {db_id: number for db_id in databases if (number := len(manifest.retention.plan(db_id).dropped))}
    with manifest.read() as txn:
        names = txn.database_names(drops)
    return {names.get(db_id, ""): number for db_id, number in drops.items()}


def _drops_text(drops: dict[str, int]) -> str:
    words = [
        f"would drop {count_of(number, 'snapshot')} of {name}" for name, number in islice(drops.items(), NAMED_MAX)
    ]
    left = len(drops) - len(words)
    return (
        "; ".join([*words, *([f"and some of {count_of(left, 'other database')}"] if left else [])])
        or "would drop nothing"
    )


def _cells(zero: Zero, names: dict[int, str], now: int) -> list[str]:
    key = zero.artifact
    layer = f", delta {key.delta_id}" if key.delta_id else ""
    version = f", generation {key.generation}" if key.generation else ""
    name = f"{key.kind.name.lower()} {key.id}{version}{layer} of {names.get(zero.db_id) or f'#{zero.db_id}'}"
    due = f"in {span(zero.due_at_ms - now)}" if zero.due_at_ms > now else "now"
    return [name, size(zero.size_bytes) if zero.size_bytes else "-", f"{span(now - zero.zero_since_ms)} ago", due]


# ── one round ─────────────────────────────────────────────────────────────────────────────────────────────────────────
def _collect(session: JobSession, grace_ms: int, *, at_once: bool) -> CliResult:
    store, manifest = session.store, session.store.manifest
    with manifest.read() as txn:
        _, head = txn.feed_bounds()
    began = manifest.clock.now_ms()
    done: dict[str, int] = {}

    def work() -> None:
        done.update(plain(store.maintain()))
        if at_once:  # delete jobs that were postponed until the end of the grace period
            for job in manifest.jobs.jobs(JobState.PENDING):
                if job.kind is JobKind.DELETE and store.worker.run(job.job_id):
                    done["jobs"] += 1

    session.watch(work)
    deleted = [
        entry
        for entry in manifest.audit(since_ms=max(began - 1000, 0))
        if entry.action is AuditAction.DELETED and entry.sequence > head
    ]
    freed = sum(entry.size_bytes for entry in deleted)
    waiting = at_zero(manifest, grace_ms)
    ran = session.ran()
    names = names_of(manifest, ran)
    data = {
        "dry_run": False,
        "round": done,
        "deleted": len(deleted),
        "freed_bytes": freed,
        "waiting": waiting.total.artifacts,
        "waiting_bytes": waiting.total.size_bytes,
        "next_due_at_ms": waiting.first[0].due_at_ms if waiting.first else 0,
        "jobs": [job_json(job, names) for job in ran],
    }
    lines = [("deleted", f"{count_of(len(deleted), 'artifact')}, {size(freed)} freed" if deleted else "nothing")]
    lines += [
        (name.replace("_", " "), f"{count_of(done[name], one)} {what}")
        for name, (one, what) in ROUND.items()
        if done.get(name)
    ]
    lines.append(("waiting", _waits(waiting, manifest.clock.now_ms())))
    failed = failed_jobs(ran)
    facts = Facts(lines=lines, data=None)
    if not failed:
        return CliResult(Report(parts=[facts], data=data), OK)
    table = Listing(
        columns=[">job", "kind", "state", "error"],
        rows=[
            ListingRow([str(job.job_id), job.kind.name.lower(), state_text(job), job.record.error], None)
            for job in failed
        ],
        closing="`quire jobs show ID` shows the details",
    )
    return CliResult(Report(parts=[facts, table], data=data), PROBLEMS)


def _waits(waiting: Waiting, now: int) -> str:
    if not waiting.first:
        return "nothing"
    due = waiting.first[0].due_at_ms
    when = f"the first is deleted in {span(due - now)}" if due > now else "the first can be deleted now"
    return f"{waiting.total}; {when} ({moment(due)})"
