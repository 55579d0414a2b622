"""What a verification tells the manifest: findings that are still about what the row says.

Rules
  1. A verdict counts only if its artifact is where it was when its bytes were looked at, and is not about to be deleted: else a
     file that was evicted meanwhile would be called missing.
  2. A moment of verification is never before the moment it was asked for, whatever the clock does: else it would be repeated
     for ever (plan, rule 2).
"""

from __future__ import annotations

from collections.abc import Iterable

from quire.jobs.context import JobContext
from quire.jobs.locations import Place
from quire.jobs.steps import update
from quire.jobs.verify.plan import place_to_verify
from quire.jobs.verify.run import Finding
from quire.manifest.ops.base import Op
from quire.manifest.reads import ReadTxn
from quire.manifest.records import VerifyState


def verdict_ops(ctx: JobContext, txn: ReadTxn, findings: Iterable[Finding], asked_at_ms: int) -> list[Op]:
    """The operations that record the findings that count."""
    at_ms = max(ctx.clock.now_ms(), asked_at_ms)
    return [
        update(each.place.key, verify_state=each.state, verified_at_ms=at_ms, sha256=each.sha256 or None)
        for each in findings
        if each.state is not VerifyState.UNVERIFIED and still_holds(ctx, txn, each.place)
    ]


def still_holds(ctx: JobContext, txn: ReadTxn, place: Place) -> bool:
    """Whether the artifact is where it was when its bytes were looked at, and is not about to be deleted (rule 1)."""
    return place_to_verify(ctx, txn, place.key) == place
