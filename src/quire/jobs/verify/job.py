"""The verify job: of one artifact (the one it names), of a database (payload `{"scope": "database"}`), or of the whole store
(`{"scope": "store"}`: `whole.py`).

  - A bad verdict is given only if a second look, at the row as it is by then, comes to the same.
  - Verdicts are committed every few artifacts, and an attempt that is interrupted loses only what came after the last commit.
  - One attempt looks at a bounded number of artifacts, then lets other jobs run.
  - What cannot be read now keeps nothing else from being verified; if something of that is left, the attempt has failed.

Durable are only the verdicts, in rows: a crash anywhere leaves those that were committed, and the repeat looks at the others.

What a verification tells the manifest: findings that are still about what the row says.

  - A verdict counts only if its artifact is where it was when its bytes were looked at, and is not about to be deleted: else a
    file that was evicted meanwhile would be called missing.
  - A moment of verification is never before the moment it was asked for, whatever the clock does: else it would be repeated
    for ever.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any

from quire.core.errors import InvalidInput, UnknownArtifact
from quire.core.events import emit
from quire.core.ids import ArtifactKey
from quire.durable.failpoints import hit
from quire.durable.names import object_key
from quire.jobs.context import JobContext
from quire.jobs.handler import Done, Later, Outcome, Progress, artifact_of, commit_step, options, update
from quire.jobs.locations import Place, Trouble
from quire.jobs.runner import Runner
from quire.jobs.stream_verify.run import LogTask, verify_logs
from quire.jobs.verify.plan import (
    LISTED_MAX,
    bitmap_of,
    place_to_verify,
    plan_verification,
    summary,
)
from quire.jobs.verify.run import Finding, VerifyTask, verify
from quire.jobs.verify.whole import plan_aged, verify_files, verify_store
from quire.manifest.jobqueue import Job
from quire.manifest.ops.base import Op
from quire.manifest.ops.local import RecordVerification
from quire.manifest.reads import ReadTxn
from quire.manifest.records import DbKind, DbStatus, VerifyState
from quire.manifest.verification import told
from quire.stream.projection import witness_in

STEP_ARTIFACTS = 16
"""Artifacts between two commits: 1 GiB of full chunks."""

ATTEMPT_ARTIFACTS = 1_024
"""Looked at in one attempt: 64 GiB of full chunks."""

LOGS = "manifest log of a stream"

PAUSE_MS = 1_000
"""For how long the others may run between two attempts."""


def verify_job(ctx: JobContext, job: Job, progress: Progress) -> Outcome:
    """Compare rows, files and objects, and record what was found."""
    given = options(job, scope="", runner="", max_age_seconds=0.0, max_duration_seconds=0.0)
    scope = given["scope"]
    if scope == "store" and not job.db_id:
        return _verify_store(ctx, job, progress, given)
    if scope == "database" and job.record.artifact is None:
        return _verify_database(ctx, job, progress)
    if scope:
        raise InvalidInput(
            "a verification is of one artifact, or has the scope `database` or `store`", job_id=job.job_id, scope=scope
        )
    return _verify_artifact(ctx, job)


def _verify_store(ctx: JobContext, job: Job, progress: Progress, given: dict[str, Any]) -> Outcome:
    with ctx.manifest.read() as txn:
        due = plan_aged(txn, job.record.created_at_ms, given["max_age_seconds"])
    runner = ctx.choose_runner(given["runner"], due.size_bytes, label="quire-verify")
    limits = (given["max_age_seconds"], given["max_duration_seconds"])

    def settle(findings: list[Finding]) -> list[Finding]:
        """Rule 1, and the verdicts are recorded."""
        settled = _second_look(ctx, findings)
        _publish(ctx, job, settled)
        return settled

    outcome = verify_store(ctx, job, progress, runner, limits, settle)
    if isinstance(outcome, Done) and outcome.result["complete"]:
        logs, looked = _verify_logs(ctx, progress, runner, deep=not given["max_age_seconds"])
        counts = verify_files(ctx, runner, progress)
        if looked:
            counts.saw(LOGS, looked, 0)
            counts.kinds[LOGS]["problems"] = len(logs)
        kinds = {**outcome.result["kinds"], **counts.kinds}
        outcome.result.update(logs=logs, problems=counts.problems, kinds=kinds)
        recorded = RecordVerification([*logs, *told(outcome.result)])
        return replace(outcome, ops=(*outcome.ops, recorded))
    return outcome


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
                store_id=txn.store_id(),
            )
            for db_id, record in txn.databases()
            if record.kind is DbKind.STREAM and record.status is not DbStatus.TOMBSTONED
        ]
    if not tasks:
        return [], 0
    here = ctx.thread_runner("quire-verify")
    found = [each for each in verify_logs(tasks, runner, here, deep=deep, tick=progress) if not each[1].leak]
    for stream_id, problem in found:
        emit("error", "verify.log_damaged", stream=stream_id, rule=problem.rule, what=problem.what, where=problem.where)
    told = [f"manifest log of stream {stream_id}, {each.rule}: {each.what}" for stream_id, each in found[:LISTED_MAX]]
    return told, len(tasks)


def _verify_artifact(ctx: JobContext, job: Job) -> Outcome:
    key = artifact_of(job)
    with ctx.manifest.read() as txn:
        if place_to_verify(ctx, txn, key) is None:
            raise UnknownArtifact("no such artifact in the catalog", artifact=key)
    (finding,) = _look(ctx, [key])
    if finding.error is not None:
        raise finding.error
    with ctx.manifest.read() as txn:
        ops = verdict_ops(ctx, txn, [finding], job.record.created_at_ms)
    if not ops:
        return Later(ctx.clock.now_ms() + PAUSE_MS)  # it moved under our eyes: look again
    return Done({"state": finding.state.name, "problems": list(finding.problems)}, ops=tuple(ops))


def _verify_database(ctx: JobContext, job: Job, progress: Progress) -> Outcome:
    asked_at = job.record.created_at_ms
    with ctx.manifest.read() as txn:
        plan = plan_verification(txn, job.db_id, asked_at)
    trouble, looked = Trouble(), 0
    rest = iter(plan.keys)
    while looked < ATTEMPT_ARTIFACTS and (step := list(islice(_unspared(ctx, rest, trouble), STEP_ARTIFACTS))):
        progress(plan.seen + looked, plan.seen + plan.left)
        findings = _look(ctx, step)
        for each in findings:
            if each.error is not None:
                trouble.add(each.place, each.error)
        _publish(ctx, job, findings)
        looked += len(step)
    if next(rest, None) is not None or plan.left > len(plan.keys):
        return Later(ctx.clock.now_ms() + PAUSE_MS)
    trouble.settle()
    with ctx.manifest.read() as txn:
        if plan_verification(txn, job.db_id, asked_at).left:
            return Later(ctx.clock.now_ms() + PAUSE_MS)  # some moved under our eyes: look again
        return Done(summary(txn, job.db_id, asked_at))


def _unspared(ctx: JobContext, keys: Iterator[ArtifactKey], trouble: Trouble) -> Iterator[ArtifactKey]:
    """The keys that are worth a look now."""
    for key in keys:
        if trouble.first is not None:
            with ctx.manifest.read() as txn:
                place = place_to_verify(ctx, txn, key)
            if place is not None and trouble.spares(place):
                continue
        yield key


def _look(ctx: JobContext, keys: Sequence[ArtifactKey]) -> list[Finding]:
    """What these artifacts are, by the rows as they are now; bad ones by a second look."""
    return _second_look(ctx, _look_once(ctx, keys))


def _second_look(ctx: JobContext, findings: Sequence[Finding]) -> list[Finding]:
    """Keep a bad verdict only if a second look, at the row as it is by then, gives the same."""
    doubtful = [each.place.key for each in findings if each.is_bad]
    return [each for each in findings if not each.is_bad] + (_look_once(ctx, doubtful) if doubtful else [])


def _look_once(ctx: JobContext, keys: Sequence[ArtifactKey]) -> list[Finding]:
    with ctx.manifest.read() as txn:
        found = [(place, bitmap_of(txn, key)) for key in keys if (place := place_to_verify(ctx, txn, key)) is not None]
    task = VerifyTask(tuple(place for place, _ in found), tuple(bitmap for _, bitmap in found))
    return verify(task, disk=ctx.disk, open_store=ctx.open_store)


def _publish(ctx: JobContext, job: Job, findings: list[Finding]) -> None:
    """Commit the verdicts, and say aloud which are bad."""
    with ctx.manifest.read() as txn:
        ops = verdict_ops(ctx, txn, findings, job.record.created_at_ms)
        bad = [each for each in findings if each.is_bad and still_holds(ctx, txn, each.place)]
    for each in bad:
        emit("error", "verify.damaged", artifact=object_key(each.place.key), problems=list(each.problems))
    if ops:
        try:
            commit_step(ctx, job, ops)
        except UnknownArtifact:
            return  # one was deleted in between: the step's verdicts are not recorded, and the next attempt looks again
        hit("jobs.verify.published")


# ── publishing ────────────────────────────────────────────────────────────────────────────────────────────────────────
def verdict_ops(ctx: JobContext, txn: ReadTxn, findings: Iterable[Finding], asked_at_ms: int) -> list[Op]:
    """The operations that record the findings that count."""
    at_ms = max(ctx.clock.now_ms(), asked_at_ms)
    return [
        update(each.place.key, verify_state=each.state, verified_at_ms=at_ms, sha256=each.sha256 or None)
        for each in findings
        if each.state is not VerifyState.UNVERIFIED and still_holds(ctx, txn, each.place)
    ]


def still_holds(ctx: JobContext, txn: ReadTxn, place: Place) -> bool:
    """Whether the artifact is where it was when its bytes were looked at, and is not about to be deleted."""
    return place_to_verify(ctx, txn, place.key) == place
