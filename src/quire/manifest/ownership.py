"""Take ownership of a manifest: the steps before anything may be written.

Order: migrate → check what changed since the checked point (N3) → repair, if the caller requested it → move cursors
into the retained range → read the next ids → start the writer. A database or a counter that breaks a rule is closed,
and everything else works; a manifest that breaks any other rule is refused, with the rows named.

Threads: one, the opener's. Raises `ManifestDamaged`, `FormatTooNew`, and the errors of LMDB for invalid pages.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress

import msgspec

from quire.core.clock import Clock
from quire.core.errors import ManifestDamaged, StorageFault
from quire.core.events import emit
from quire.manifest.changed_rows import ChangedRows, changed_since
from quire.manifest.check import (
    CHANGED_CHECK_NAMES,
    CHECK_NAMES,
    FEED_CHECK_NAMES,
    STORE_CHECK_NAMES,
    Problem,
    check,
    closed_subjects,
)
from quire.manifest.checked_point import CheckedPoint, forget_point, point_of, read_point, transaction_of, write_point
from quire.manifest.env import ManifestEnv, Refusals
from quire.manifest.migrations import migrate
from quire.manifest.ops.base import Counter
from quire.manifest.reads import ReadTxn
from quire.manifest.repair import propose
from quire.manifest.writer import ManifestWriter

_REPAIR = "close the store and run `quire manifest check --repair`; the rest of the store works"
_NO_REPAIR = (
    "run `quire manifest check` to see the damage, and restore the manifest from a backup; the rest of the store works"
)

SHOWN = 5
"""Number of problems named in an error; the rest are counted."""

REPAIR_OPS = 4_096
"""Fixes per batch."""

REPAIR_ROUNDS = 2
"""Rounds of repair: restored rows reveal further problems, which are repaired too."""


def take_ownership(
    env: ManifestEnv, clock: Clock, *, repair: bool
) -> tuple[ManifestWriter, dict[Counter, int], Sequence[str]]:
    """Return the started writer, the next id of each counter, and the checks left for the recount (recount.py).

    `repair` checks everything, and first repairs what can be recomputed.
    """
    if repair:
        forget_point(env)  # repairs of indexes are not in the change log
    # Before the point is read: a migration step deletes it.
    migrate(env, clock)
    point = read_point(env)
    is_sound = _is_sound_since(env, point)
    left = CHECK_NAMES if is_sound else FEED_CHECK_NAMES if point is not None else ()
    problems = [] if is_sound else _problems(env, point)
    if not problems and (reached := point_of(env)) != point:
        # As at a clean close: a process that dies again and again must not check the same changes at every open.
        write_point(env, reached)
    elif problems:
        # A point that is left may be believed by the next open, which would not find again what is closed now.
        with suppress(StorageFault):  # the recount finds it in any case, before anything is deleted
            forget_point(env)
    rounds = REPAIR_ROUNDS if repair else 0
    while rounds and any(problem.fix is not None for problem in problems):
        _repair(env, clock, problems)
        problems = _problems(env)
        rounds -= 1
    cursors = [problem for problem in problems if problem.rule == "F2"]
    problems = [problem for problem in problems if problem.rule != "F2"]
    _refuse(problems, env.path)
    if cursors:
        _repair(env, clock, cursors)
    env.refused = _refusals(problems)
    with ReadTxn(env) as txn:
        for problem in problems:
            closed = ", ".join(_title(txn, *subject) for subject in closed_subjects(problem)) or "nothing"
            hint = "the row is ignored; `quire manifest check` shows what to do"
            emit("error", "manifest.row_damaged", **problem.where, what=problem.what, closed=closed, hint=hint)
        ids = next_ids(txn)
    writer = ManifestWriter(env, clock)
    writer.start({problem.where["component"]: problem.where["log"] for problem in problems if problem.rule == "G1"})
    return writer, ids, left


def _is_sound_since(env: ManifestEnv, point: CheckedPoint | None) -> bool:
    """Check what changed since the point; return whether that is known, and breaks no rule.

    A problem is not reported from here: others may follow from it in rows that were not read, so everything is checked.
    """
    if point is None:
        return False
    with ReadTxn(env) as txn:
        is_unchanged = point.transaction == transaction_of(txn)
        changed = None if is_unchanged else changed_since(txn, point)
        if (changed is None and not is_unchanged) or any(check(txn, checks=STORE_CHECK_NAMES, since=point)):
            return False
    if changed is None:
        return True
    with ChangedRows(env, changed) as rows:
        return not any(check(rows, checks=CHANGED_CHECK_NAMES))


def close_broken(env: ManifestEnv, writer: ManifestWriter) -> None:
    """Close what a recount found broken. If that is the whole store, the writer stops."""
    problems = _problems(env)
    fixes = [problem.fix for problem in problems if problem.rule == "F2" and problem.fix is not None]
    problems = [problem for problem in problems if problem.rule != "F2"]
    try:
        _refuse(problems, env.path)
    except ManifestDamaged as error:
        writer.stop_for(error)
        raise
    env.refused = _refusals(problems)  # in one step: what was closed before is in it, and accepts no write in between
    writer.watch_refused()
    for problem in problems:
        emit("error", "manifest.row_damaged", **problem.where, what=problem.what, hint=_NO_REPAIR)
    for start in range(0, len(fixes), REPAIR_OPS):
        writer.submit(tuple(fixes[start : start + REPAIR_OPS])).result()


def next_ids(txn: ReadTxn) -> dict[Counter, int]:
    """Return the next id of each counter whose row is intact; `allocate` refuses the others."""
    ids: dict[Counter, int] = {}
    for counter in Counter:
        with suppress(ManifestDamaged):
            ids[counter] = txn.next_id(counter)
    return ids


def _refuse(problems: Iterable[Problem], path: str) -> None:
    """Raise if any problem endangers data beyond one database or counter."""
    bad = [problem for problem in problems if not (problem.leak or problem.contained or closed_subjects(problem))]
    if bad:
        named = "; ".join(map(str, bad[:SHOWN])) + (f"; and {len(bad) - SHOWN} more" if len(bad) > SHOWN else "")
        mendable = all(problem.fix is not None for problem in bad)
        raise ManifestDamaged(
            f"the manifest breaks its rules: {named}",
            hint="run `quire manifest check --repair`" if mendable else "restore the manifest from a backup",
            path=path,
            problems=len(bad),
        )


def _problems(env: ManifestEnv, since: CheckedPoint | None = None) -> list[Problem]:
    """Check everything, except the change log up to `since`, and return the problems that are not leaks."""
    with ReadTxn(env) as txn:
        # Closed databases must be found broken again. Only for this snapshot: a list that the process empties meanwhile would
        # let them accept writes for as long as the check takes.
        txn.refused = {}
        problems = propose(txn, [problem for problem in check(txn, since=since) if not problem.leak])
        if any(problem.rule == "K1" and closed_subjects(problem) for problem in problems):
            # A damaged row hides what its rules would report about other rows, so they are checked again without it.
            # Their reports are then no reason to change anything, because the row may be what they miss.
            txn.refused = _refusals([problem for problem in problems if problem.rule == "K1"])
            # Problems of a database that the row closes follow from the row: its own fix is the repair.
            reported = {str(problem) for problem in problems}
            others = [
                problem
                for problem in check(txn)
                if problem.rule != "K1" and str(problem) not in reported and not _is_closed(txn, problem)
            ]
            problems += [msgspec.structs.replace(problem, fix=None) for problem in others if not problem.leak]
    return problems


def _title(txn: ReadTxn, kind: str, number: int) -> str:
    name = txn.indexed_name(number) if kind == "database" else ""
    return f"{kind} {number}" + (f" ({name})" if name else "")


def _is_closed(txn: ReadTxn, problem: Problem) -> bool:
    """Return whether everything that a problem concerns is closed already."""
    subjects = closed_subjects(problem)
    return bool(subjects) and all(subject in txn.refused for subject in subjects)


def _refusals(problems: list[Problem]) -> Refusals:
    """Return what is closed, with the reason and a hint."""
    refusals: Refusals = {}
    for problem in problems:
        for subject in closed_subjects(problem):
            hint = _REPAIR if problem.fix is not None else _NO_REPAIR
            if subject not in refusals or problem.fix is None:
                refusals[subject] = (
                    f"the {subject[0]} is closed because its rows break a rule of the manifest: {problem}",
                    hint,
                )
    return refusals


def _repair(env: ManifestEnv, clock: Clock, problems: list[Problem]) -> None:
    """Apply the fixes that `check` proposed, as ordinary batches."""
    fixes = [problem.fix for problem in problems if problem.fix is not None]
    for problem in problems:
        emit("warning", "manifest.repair", rule=problem.rule, what=problem.what, fixed=problem.fix is not None)
    writer = ManifestWriter(env, clock)
    writer.start()
    try:
        for start in range(0, len(fixes), REPAIR_OPS):
            writer.submit(tuple(fixes[start : start + REPAIR_OPS])).result()
    finally:
        writer.close()
