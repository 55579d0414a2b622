"""The command `gc`: one round of maintenance, and what waits to be deleted.

Terms
  zero    an artifact that nothing refers to; it never comes back, and its bytes go after the grace

Rules
  1. `--dry-run` only reads: it works while another process owns the store.
  2. What is told of deletions is what the audit says: it can neither miss one nor tell of one that did not happen.
  3. The grace is for readers in other processes, which may have found a name a moment ago. `--now` takes it away, so it asks.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any

from quire.cli.command import Cli, confirm
from quire.cli.declarations import Option, command
from quire.cli.formatting import count_of, moment, size, span
from quire.cli.job_progress import Bench
from quire.cli.jobs import job_json, state_text
from quire.cli.lookup import Yes, names_in, names_of
from quire.cli.output import Facts, Listing, ListingRow, Note, Report
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
"""What a round of maintenance counts, in words; `delete_jobs` among `jobs`."""


@dataclass(frozen=True)
class Zero:
    """An artifact that waits to be deleted."""

    artifact: ArtifactKey
    database: str
    size_bytes: int
    zero_since_ms: int
    due_at_ms: int


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
        str, Option("--keep", metavar="OBJECT", help="Run nothing; keep this chunk or delta (see --until).")
    ] = "",
    until: Annotated[
        str, Option("--until", metavar="FOR", help="With --keep: for how long, as 7d; 0 to keep it no longer.")
    ] = "",
    yes: Yes = False,
) -> Report | Note:
    """Run one round of maintenance now and show what it did.

    A round is what the owner of a store does by itself: schedules, retention, deletions, and all jobs that are due. Data that
    nothing refers to is deleted after a grace period of a minute (maintenance.delete_grace_seconds).
    """
    if keep or until:
        return _keep(cli, keep, until)
    grace_ms = 0 if now else int(cli.settings().maintenance.delete_grace_seconds * 1000)
    if dry_run:
        with cli.reader() as manifest:
            return _outlook(manifest, grace_ms, limit)
    with cli.owner(grace_seconds=0 if now else None) as store:
        if now and not yes:
            waiting = at_zero(store.manifest, grace_ms)
            what = (
                f"{_amount(waiting)}, and everything this round releases"
                if waiting
                else "everything this round releases"
            )
            question = f"delete at once, even if another process is reading it: {what}?"
            confirm(question, "nothing was done", {"done": False})
        return _collect(Bench(store), grace_ms, at_once=now)


def _keep(cli: Cli, name: str, until: str) -> Note:
    """Have a chunk's or delta's bytes stay, whatever refers to them."""
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


# ── looking ahead ─────────────────────────────────────────────────────────────────────────────────────────────────────
def at_zero(manifest: ManifestStore, grace_ms: int) -> list[Zero]:
    """Everything at zero, what goes first at the beginning.

    Nothing goes before the delete job of its database is due, except with no grace: then that job is run in any case.
    """
    due: dict[int, int] = {}
    with manifest.read() as txn:
        names = names_of(txn)
        for origin in txn.owners(t.GC_ZERO) if grace_ms else ():
            gate = txn.get(t.JOB_PENDING_INDEX, origin, JobKind.DELETE)
            job = txn.job(gate.value) if gate else None
            due[origin] = job.not_before_ms if job else 0
        # Leases are known to the owner alone: whoever only reads learns of them when the delete job was put off.
        kept = {} if manifest.read_only else {origin: manifest.leases.kept_since(origin) for origin in due}
        zeros = [_zero(txn, key, row.value, names, grace_ms, kept.get(key[0])) for key, row in txn.scan(t.GC_ZERO)]
    zeros = [replace(zero, due_at_ms=max(zero.due_at_ms, due.get(zero.artifact.origin_db_id, 0))) for zero in zeros]
    return sorted(zeros, key=lambda zero: (zero.due_at_ms, zero.artifact))


def _zero(
    txn: ReadTxn,
    key: tuple[Any, ...],
    since_ms: int,
    names: dict[int, str],
    grace_ms: int,
    kept: tuple[int, int] | None,
) -> Zero:
    origin, kind, number, generation, delta = key
    artifact = ArtifactKey(origin, ArtifactKind(kind), number, generation, delta)
    due = since_ms + grace_ms
    if kept is not None and since_ms >= kept[0]:
        due = max(due, kept[1])  # a version that is lent may need it
    if artifact.kind is ArtifactKind.LEAF:
        due = since_ms  # it has no bytes that somebody could be reading
    row = txn.artifact(artifact)
    purge_after: int = getattr(row, "purge_after_ms", 0)
    return Zero(artifact, names.get(origin, ""), artifact_bytes(row), since_ms, max(due, purge_after))


def _outlook(manifest: ManifestStore, grace_ms: int, limit: int) -> Report:
    waiting = at_zero(manifest, grace_ms)
    now = manifest.clock.now_ms()
    names = names_in(manifest)
    going = [(names.get(db_id, ""), dropped) for db_id, dropped in _retention(manifest).items()]
    due = [job for job in manifest.jobs.jobs(JobState.PENDING) if job.record.not_before_ms <= now]
    shown = waiting[:limit] if limit else waiting
    more = len(waiting) - len(shown)
    table = Listing(
        columns=["artifact", ">size", "unreferenced", "deleted"],
        rows=[ListingRow(_cells(zero, now), None) for zero in shown],
        empty="nothing is waiting to be deleted",
        closing=f"{more:,} more: `--limit 0` shows all" if more else "",
    )
    ready = [zero for zero in waiting if zero.due_at_ms <= now]
    with manifest.read() as txn:
        kept = sorted((row.since_ms, row.name, row.db_id) for _, row in retired_objects(txn))
    facts = Facts(
        lines=[
            ("would delete now", _amount(ready)),
            ("later", _amount([zero for zero in waiting if zero.due_at_ms > now])),
            ("retention", "; ".join(f"would drop {count_of(number, 'snapshot')} of {name}" for name, number in going)
             or "would drop nothing"),
            ("jobs", f"{len(due):,} due"),
            ("kept for the archive", _kept(kept, now)),
        ],
        data=None,
    )  # fmt: skip
    data = {
        "dry_run": True,
        "artifacts": len(waiting),
        "size_bytes": sum(zero.size_bytes for zero in waiting),
        "due_artifacts": len(ready),
        "due_bytes": sum(zero.size_bytes for zero in ready),
        "would_drop": dict(going),
        "jobs_due": len(due),
        "waiting": [plain(vars(zero)) for zero in shown],
        "retired": len(kept),
        "retired_since_ms": kept[0][0] if kept else 0,
        "retired_objects": [
            {"name": name, "database": names.get(db_id, ""), "since_ms": since}
            for since, name, db_id in (kept[:limit] if limit else kept)
        ],
    }
    return Report(parts=[table, facts], data=data)


def _kept(kept: list[tuple[int, str, int]], now: int) -> str:
    """What is deleted when no archived moment needs it."""
    if not kept:
        return "nothing"
    return f"{count_of(len(kept), 'object')}, retired since {span(now - kept[0][0])} ago ({moment(kept[0][0])})"


def _retention(manifest: ManifestStore) -> dict[int, int]:
    """Database → snapshots that its policy would drop now, where that is any."""
    with manifest.read() as txn:
        databases = list(txn.owners(t.SNAPSHOT_INDEX))
    going = {db_id: len(manifest.retention.plan(db_id).dropped) for db_id in databases}
    return {db_id: number for db_id, number in going.items() if number}


def _cells(zero: Zero, now: int) -> list[str]:
    key = zero.artifact
    layer = f", delta {key.delta_id}" if key.delta_id else ""
    version = f", generation {key.generation}" if key.generation else ""
    name = f"{key.kind.name.lower()} {key.id}{version}{layer} of {zero.database or f'#{key.origin_db_id}'}"
    due = f"in {span(zero.due_at_ms - now)}" if zero.due_at_ms > now else "now"
    return [name, size(zero.size_bytes) if zero.size_bytes else "-", f"{span(now - zero.zero_since_ms)} ago", due]


def _amount(waiting: list[Zero]) -> str:
    if not waiting:
        return "nothing"
    return f"{count_of(len(waiting), 'artifact')}, {size(sum(zero.size_bytes for zero in waiting))}"


# ── doing ─────────────────────────────────────────────────────────────────────────────────────────────────────────────
def _collect(bench: Bench, grace_ms: int, *, at_once: bool) -> Report:
    store, manifest = bench.store, bench.store.manifest
    with manifest.read() as txn:
        _, head = txn.feed_bounds()
    began = manifest.clock.now_ms()
    done: dict[str, int] = {}

    def work() -> None:
        done.update(plain(store.maintain()))
        if at_once:  # those that had been put off until the grace is over
            for job in manifest.jobs.jobs(JobState.PENDING):
                if job.kind is JobKind.DELETE and store.worker.run(job.job_id):
                    done["jobs"] += 1

    bench.watch(work)
    deleted = [
        entry
        for entry in manifest.audit(since_ms=max(began - 1000, 0))
        if entry.action is AuditAction.DELETED and entry.sequence > head
    ]
    freed = sum(entry.size_bytes for entry in deleted)
    waiting = at_zero(manifest, grace_ms)
    names = names_in(manifest)
    ran = bench.ran()
    data = {
        "dry_run": False,
        "round": done,
        "deleted": len(deleted),
        "freed_bytes": freed,
        "waiting": len(waiting),
        "waiting_bytes": sum(zero.size_bytes for zero in waiting),
        "next_due_at_ms": waiting[0].due_at_ms if waiting else 0,
        "jobs": [job_json(job, names) for job in ran],
    }
    lines = [("deleted", f"{count_of(len(deleted), 'artifact')}, {size(freed)} freed" if deleted else "nothing")]
    lines += [
        (name.replace("_", " "), f"{count_of(done[name], one)} {what}")
        for name, (one, what) in ROUND.items()
        if done.get(name)
    ]
    lines.append(("waiting", _waits(waiting, manifest.clock.now_ms())))
    failed = [job for job in ran if job.record.error]
    facts = Facts(lines=lines, data=None)
    if not failed:
        return Report(parts=[facts], data=data)
    table = Listing(
        columns=[">job", "kind", "state", "error"],
        rows=[
            ListingRow([str(job.job_id), job.kind.name.lower(), state_text(job), job.record.error], None)
            for job in failed
        ],
        closing="`quire jobs show ID` has more",
    )
    return Report(parts=[facts, table], data=data)


def _waits(waiting: list[Zero], now: int) -> str:
    if not waiting:
        return "nothing"
    due = waiting[0].due_at_ms
    when = f"the first is deleted in {span(due - now)}" if due > now else "the first can be deleted now"
    return f"{_amount(waiting)}; {when} ({moment(due)})"
