"""Becoming the owner of a manifest: what is done before anything may be written.

Order: migrate → check what changed since the last clean close (N3) → mend, if the caller asked for it → bring cursors back
into the range that is retained → read the next ids → start the writer. A database or a counter that breaks a rule is closed,
and everything else works; a manifest that breaks any other rule is refused with the rows named.

Threads: one, the opener's. Raises `ManifestDamaged`, `FormatTooNew`, and what LMDB raises for pages that make no sense.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress

import msgspec

from quire.core.clock import Clock
from quire.core.errors import ManifestDamaged
from quire.core.events import emit
from quire.manifest.check import LOOKS, OWN_LOOKS, Problem, Subject, check, closes
from quire.manifest.checked_point import CheckedPoint, read_point
from quire.manifest.env import ManifestEnv
from quire.manifest.migrations import migrate
from quire.manifest.ops.base import Counter
from quire.manifest.reads import ReadTxn
from quire.manifest.repair import propose
from quire.manifest.writer import ManifestWriter

_REPAIR = "close the store and run `quire manifest check --repair`; everything else works"
_NO_REPAIR = "everything else works; `quire manifest check` shows what is wrong, and only a backup has what is missing"

SHOWN = 5
"""Problems named in an error; the rest are counted."""

MEND_OPS = 4_096
"""Fixes in one batch."""

MEND_ROUNDS = 2
"""Rows that are restored show what else is wrong: then that is mended too."""


def take_ownership(
    env: ManifestEnv, clock: Clock, *, repair: bool
) -> tuple[ManifestWriter, dict[Counter, int], Sequence[str]]:
    """The writer, started; the next id of each counter; and what is left to look at (recount.py). `repair` checks everything,
    and first mends what can be recomputed."""
    migrate(env, clock)
    point = None if repair else read_point(env)
    is_unchanged = point is not None and point.transaction == env.last_txn_id()
    problems = _problems(env, point, OWN_LOOKS if is_unchanged else None)
    left = LOOKS if is_unchanged else ("_check_feed",) if point is not None else ()
    if is_unchanged and problems:
        left, problems = (), _problems(env)  # something is wrong: what else?
    rounds = MEND_ROUNDS if repair else 0
    while rounds and any(problem.fix is not None for problem in problems):
        _mend(env, clock, problems)
        problems = _problems(env)
        rounds -= 1
    cursors = [problem for problem in problems if problem.rule == "F2"]
    problems = [problem for problem in problems if problem.rule != "F2"]
    _refuse(problems, env.path)
    if cursors:
        _mend(env, clock, cursors)
    env.refused.update(_refusals(problems))
    with ReadTxn(env) as txn:
        for problem in problems:
            closed = ", ".join(_title(txn, *subject) for subject in closes(problem)) or "nothing"
            hint = "nothing is decided by it; `quire manifest check` says what to do"
            emit("error", "manifest.row_damaged", **problem.where, what=problem.what, closed=closed, hint=hint)
        ids = next_ids(txn)
    writer = ManifestWriter(env, clock)
    writer.start({problem.where["component"]: problem.where["log"] for problem in problems if problem.rule == "G1"})
    return writer, ids, left


def close_broken(env: ManifestEnv, writer: ManifestWriter) -> None:
    """A recount has found a broken rule: close what it is about. If that is the whole store, nothing more is written."""
    problems = _problems(env)
    fixes = [problem.fix for problem in problems if problem.rule == "F2" and problem.fix is not None]
    problems = [problem for problem in problems if problem.rule != "F2"]
    try:
        _refuse(problems, env.path)
    except ManifestDamaged as error:
        writer.stop_for(error)
        raise
    env.refused.update(_refusals(problems))
    writer.watch_refused()
    for problem in problems:
        emit("error", "manifest.row_damaged", **problem.where, what=problem.what, hint=_NO_REPAIR)
    for start in range(0, len(fixes), MEND_OPS):
        writer.submit(tuple(fixes[start : start + MEND_OPS])).result()


def next_ids(txn: ReadTxn) -> dict[Counter, int]:
    """The next id of each counter whose row is intact; `allocate` refuses the others."""
    ids: dict[Counter, int] = {}
    for counter in Counter:
        with suppress(ManifestDamaged):
            ids[counter] = txn.next_id(counter)
    return ids


def _refuse(problems: Iterable[Problem], path: str) -> None:
    """Raise if any of the problems endangers data beyond one database or counter."""
    bad = [problem for problem in problems if not (problem.leak or problem.contained or closes(problem))]
    if bad:
        named = "; ".join(map(str, bad[:SHOWN])) + (f"; and {len(bad) - SHOWN} more" if len(bad) > SHOWN else "")
        mendable = all(problem.fix is not None for problem in bad)
        raise ManifestDamaged(
            f"the manifest breaks its rules: {named}",
            hint="`quire manifest check --repair` mends it" if mendable else "restore the manifest from a backup",
            path=path,
            problems=len(bad),
        )


def _problems(
    env: ManifestEnv, point: CheckedPoint | None = None, looks: Collection[str] | None = None
) -> list[Problem]:
    env.refused.clear()
    with ReadTxn(env) as txn:
        problems = propose(txn, [problem for problem in check(txn, looks=looks, since=point) if not problem.leak])
        if any(problem.rule == "K1" and closes(problem) for problem in problems):
            # A damaged row hides what its rules would say of other rows. They are asked again without the row; what
            # they say then is no reason to change anything, because the row may be what they miss.
            env.refused.update(_refusals([problem for problem in problems if problem.rule == "K1"]))
            # What they say about a database that the row closes follows from it: the row's own fix is the repair.
            known = {str(problem) for problem in problems}
            others = [
                problem
                for problem in check(txn)
                if problem.rule != "K1" and str(problem) not in known and not _is_closed(env, problem)
            ]
            problems += [msgspec.structs.replace(problem, fix=None) for problem in others if not problem.leak]
    return problems


def _title(txn: ReadTxn, kind: str, number: int) -> str:
    name = txn.indexed_name(number) if kind == "database" else ""
    return f"{kind} {number}" + (f" ({name})" if name else "")


def _is_closed(env: ManifestEnv, problem: Problem) -> bool:
    """Whether all that a problem is about is closed already."""
    subjects = closes(problem)
    return bool(subjects) and all(subject in env.refused for subject in subjects)


def _refusals(problems: list[Problem]) -> dict[Subject, tuple[str, str]]:
    """What is closed, with the reason and the way out."""
    refusals: dict[Subject, tuple[str, str]] = {}
    for problem in problems:
        for subject in closes(problem):
            hint = _REPAIR if problem.fix is not None else _NO_REPAIR
            if subject not in refusals or problem.fix is None:
                refusals[subject] = (
                    f"the {subject[0]} is closed, its rows break a rule of the manifest: {problem}",
                    hint,
                )
    return refusals


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
