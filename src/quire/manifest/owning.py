"""Becoming the owner of a manifest: what is done before anything may be written.

Order (seed 001, start-up): migrate → check → mend, if the caller asked for it → rehydrate → start the writer. A manifest that
breaks a rule is refused with the rows named.

Kept apart from store.py because readers need none of what is loaded here.

Threads: one, the opener's. Raises `ManifestDamaged`, `FormatTooNew`, and what LMDB raises for pages that make no sense.
"""

from __future__ import annotations

from quire.core.clock import Clock
from quire.core.events import emit
from quire.manifest.check import Problem, check
from quire.manifest.env import ManifestEnv
from quire.manifest.migrations import migrate
from quire.manifest.reads import ReadTxn
from quire.manifest.rehydrate import Rehydrated, refuse, rehydrate
from quire.manifest.repair import propose
from quire.manifest.writer import ManifestWriter

MEND_OPS = 4_096
"""Fixes in one batch."""

MEND_ROUNDS = 2
"""Rows that are restored show what else is wrong: then that is mended too."""


def own(env: ManifestEnv, clock: Clock, *, repair: bool) -> tuple[ManifestWriter, Rehydrated]:
    """The writer, started, and what was in the manifest; `repair` mends what can be recomputed first."""
    migrate(env, clock)
    problems = _problems(env)
    rounds = MEND_ROUNDS if repair else 0
    while rounds and any(problem.fix is not None for problem in problems):
        _mend(env, clock, problems)
        problems = _problems(env)
        rounds -= 1
    refuse(problems, env.path)
    for problem in problems:
        hint = "nothing is decided by it; `quire manifest check` says what to do"
        emit("error", "manifest.row_damaged", **problem.where, what=problem.what, hint=hint)
    with ReadTxn(env) as txn:
        recovered = rehydrate(txn)
    writer = ManifestWriter(env, clock)
    writer.start()
    return writer, recovered


def _problems(env: ManifestEnv) -> list[Problem]:
    with ReadTxn(env) as txn:
        return propose(txn, [problem for problem in check(txn) if not problem.leak])


def _mend(env: ManifestEnv, clock: Clock, problems: list[Problem]) -> None:
    """Carry out the fixes that `check` proposed, as ordinary batches."""
    fixes = [problem.fix for problem in problems if problem.fix is not None]
    for problem in problems:
        emit("warning", "manifest.repair", rule=problem.rule, what=problem.what, fixed=problem.fix is not None)
    writer = ManifestWriter(env, clock)
    writer.start()
    try:
        for start in range(0, len(fixes), MEND_OPS):
            writer.submit(tuple(fixes[start : start + MEND_OPS])).result()
    finally:
        writer.close()
