"""The command `manifest check`: hold the manifest to its rules, and mend what can be recomputed.

Rules
  1. It shows every broken rule and ends with 1 if there is one; what keeps the checker itself from going on is shown as
     one more problem, not as a failure of the command.
  2. `--repair` first sees whether everything can be mended. If not, it changes nothing and says what is in the way:
     a store that is half mended is harder to understand than a damaged one. `--partial` mends the rest all the same.
  3. Before a repair people are told how to copy the store. What was mended is said once: in the listing.
  4. The pages are read by a child process first: some damage does not raise but kills whoever reads it.
"""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stderr
from io import StringIO
from typing import TYPE_CHECKING, Annotated

from quire.cli.command import Cli, Verdict
from quire.cli.declarations import Group, Option, command
from quire.cli.exit_codes import OK, PROBLEMS
from quire.cli.formatting import count_of, in_words, plain
from quire.cli.output import Listing, Row
from quire.core.errors import InvalidInput, ManifestDamaged, QuireError
from quire.durable import names
from quire.durable.files import OsDisk
from quire.manifest.check import Problem
from quire.manifest.env import denied
from quire.manifest.probe import probe
from quire.manifest.repair import propose
from quire.store.layout import Found, look, not_found

if TYPE_CHECKING:
    from quire.manifest.store import ManifestStore

CIRCULAR = re.compile(r"; run `quire manifest check`[^()]*(?=\(|$)")
"""What an error inside a problem advises: what its reader is doing."""
RESTORE = "restore the manifest from a backup (docs/operations.md)"


def add_to(group: Group) -> None:
    """Register this command."""
    command(group, "check", example="quire manifest check --repair")(check)


def check(
    cli: Cli,
    repair: Annotated[
        bool,
        Option("--repair", help="Mend what can be recomputed, if that is all there is. Needs to own the store."),
    ] = False,
    partial: Annotated[
        bool, Option("--partial", help="With --repair: mend what can be, even if something else cannot.")
    ] = False,
) -> Verdict:
    """Hold the manifest to its rules; exit code 1 if one is broken.

    Copy the store before you repair it: `cp -r` while no process owns it.
    """
    if partial and not repair:
        raise InvalidInput("`--partial` says how to repair", hint="say `--repair --partial`")
    before = _problems_now(cli)
    damage = [each for each in before if not each.leak]
    if not repair or not damage:
        return _verdict(before, advice=_advice(cli, damage))
    stuck = sum(each.fix is None for each in damage)
    if stuck == len(damage) or (stuck and not partial):
        return _verdict(before, advice=f"Nothing was changed.\n{_advice(cli, damage)}")
    left = _mend(cli)
    remaining = {_line(each) for each in left}
    mended = [each for each in damage if _line(each) not in remaining]
    return _verdict(left, mended=() if cli.as_json else mended, repairs=len(mended), advice=_advice(cli, left))


def unreadable(root: str) -> str | None:
    """What keeps the pages of a store's manifest from being read; `None` if nothing does (rule 4)."""
    if look(OsDisk(), root) is not Found.STORE:
        raise not_found(root)
    path = os.path.join(root, names.MANIFEST)
    why = probe(path)
    if why is not None and (refused := denied(path, write=False)) is not None:
        raise refused  # who may not look has found no damage
    return why


def _problems_now(cli: Cli) -> list[Problem]:
    if (why := unreadable(os.path.abspath(cli.path))) is not None:
        return [Problem("K1", why)]
    with cli.reader() as manifest:
        return _problems(manifest)


def _problems(manifest: ManifestStore) -> list[Problem]:
    from quire.manifest.check import Problem, check

    found: list[Problem] = []
    try:
        with manifest.read() as txn:
            found = propose(txn, list(check(txn)))
    except QuireError as error:  # rule 1
        found.append(Problem("K1", f"the check could not go on: {error}"))
    return found


def _mend(cli: Cli) -> list[Problem]:
    """Mend what can be; what is left."""
    try:
        with _without_repair_warnings(), cli.owner(repair=True) as store:
            return _problems(store.manifest)
    except ManifestDamaged:  # not all of it could be: the store stays closed to owners
        return _problems_now(cli)


@contextmanager
def _without_repair_warnings() -> Iterator[None]:
    """Rule 3: the manifest warns of each repair on stderr, for those who repair from a program. Other warnings go on."""
    heard = StringIO()
    try:
        with redirect_stderr(heard):
            yield
    finally:
        for line in heard.getvalue().splitlines(keepends=True):
            if "manifest.repair" not in line:
                sys.stderr.write(line)


def _verdict(
    problems: Sequence[Problem], *, mended: Sequence[Problem] = (), repairs: int = 0, advice: str = ""
) -> Verdict:
    after = f" after {count_of(repairs, 'repair')}" if repairs else ""
    closing = count_of(len(problems), "problem") if problems else "the manifest keeps all its rules"
    shown = Listing(
        columns=["rule", "kind", "what"],
        rows=[*(_row(each, "mended") for each in mended), *(_row(each, _kind(each)) for each in problems)],
        empty=f"the manifest keeps all its rules{after}",
        closing=f"{closing}{after}" + (f"\n{advice}" if advice else ""),
    )
    return Verdict(shown, PROBLEMS if problems else OK)


def _row(problem: Problem, kind: str) -> Row:
    data = {
        "rule": problem.rule,
        "what": problem.what,
        "where": plain(problem.where),
        "leak": problem.leak,
        "mendable": problem.fix is not None,
    }
    return Row([problem.rule, kind, _line(problem)], data)


def _kind(problem: Problem) -> str:
    if problem.leak:
        return "leak"
    return "mendable" if problem.fix is not None else "damage"


def _line(problem: Problem) -> str:
    place = ", ".join(f"{name.replace('_', ' ')}: {in_words(value)}" for name, value in problem.where.items())
    what = CIRCULAR.sub(" ", problem.what).strip()
    return f"{what} ({place})" if place else what


def _advice(cli: Cli, problems: Sequence[Problem]) -> str:
    """What to do about damage (leaks need nothing), the copy first."""
    damage = [each for each in problems if not each.leak]
    if not damage:
        return ""
    stuck = sum(each.fix is None for each in damage)
    if stuck == len(damage):
        return f"{'It cannot' if stuck == 1 else 'None of it can'} be mended: {RESTORE}."
    root = os.path.abspath(cli.path)
    copy = f"cp -r {shlex.quote(root)} {shlex.quote(root + '.copy')}"
    lines = [f"Copy the store first, while no process owns it (a hot copy: docs/operations.md):\n  {copy}"]
    how = f"quire manifest check --repair{' --partial' if stuck else ''} --store {shlex.quote(root)}"
    if stuck:
        lines.insert(0, f"{stuck:,} of {len(damage):,} cannot be mended: {RESTORE}, or mend the rest.")
    return "\n".join([*lines, f"Then mend {'the rest' if stuck else 'it'}:\n  {how}"])
