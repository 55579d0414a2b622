"""Commands about the manifest: check, tables, dump; those about manifest logs are in `manifest_log`.

Rules
  1. `check` lists every broken rule, with exit code 1 if there is one; an error that stops the checker is listed as one more
     problem.
  2. `--repair` changes nothing unless every problem can be repaired, because a half-repaired store is harder to understand than
     a damaged one; `--partial` repairs what it can regardless.
  3. Repairs are rows of the result, not warnings on stderr.
  4. A child process reads the pages first: some damage kills the process that reads it.
  5. `dump` holds no read transaction while it writes (M4): it reads `STEP_ROWS` rows at a time.
"""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stderr
from io import StringIO
from itertools import groupby
from typing import TYPE_CHECKING, Annotated, Any

from quire.cli import manifest_log
from quire.cli.declarations import Argument, Group, Option, command
from quire.cli.errors import OK, PROBLEMS
from quire.cli.formatting import chain_text, count_of, in_words, non_default_fields, pairs
from quire.cli.output import STEP_ROWS, CliResult, Listing, ListingRow
from quire.core.errors import InvalidInput, ManifestDamaged, QuireError
from quire.core.json_values import plain
from quire.core.limits import SLOTS_PER_LEAF
from quire.durable import names
from quire.durable.files import OsDisk
from quire.manifest.change import ChangeRecord
from quire.manifest.check import Problem
from quire.manifest.check import check as check_rules
from quire.manifest.env import access_error
from quire.manifest.probe import probe
from quire.manifest.reads import table_named
from quire.manifest.records import LeafRecord
from quire.manifest.repair import propose
from quire.manifest.slots import unpack_leaf
from quire.manifest.tables import TABLES
from quire.store.layout import need_store

if TYPE_CHECKING:
    from quire.cli.command import Cli
    from quire.manifest.slots import Chain, Leaf
    from quire.manifest.store import ManifestStore
    from quire.manifest.tables import Table

CIRCULAR = re.compile(r"; run `quire manifest check`[^()]*(?=\(|$)")
"""The advice, in the text of an error inside a problem, to run the very command that shows it."""
RESTORE = "restore the manifest from a backup (docs/operations.md)"


group = Group("manifest")


@command("check", group, example="quire manifest check --repair")
def check(
    cli: Cli,
    repair: Annotated[
        bool,
        Option("--repair", help="Repair the manifest if every problem can be repaired. Must own the store."),
    ] = False,
    partial: Annotated[
        bool, Option("--partial", help="With --repair: repair what is possible, even if other problems remain.")
    ] = False,
) -> CliResult:
    """Check the manifest against its rules. The exit code is 1 if one is broken.

    Before a repair, copy the store (`cp -r`) while no process owns it.
    """
    if partial and not repair:
        raise InvalidInput("`--partial` needs `--repair`", hint="use `--repair --partial`")
    before = _problems_now(cli)
    damage = [problem for problem in before if not problem.leak]
    if not repair or not damage:
        return _verdict(before, advice=_advice(cli, damage))
    stuck = sum(problem.fix is None for problem in damage)
    if stuck == len(damage) or (stuck and not partial):
        return _verdict(before, advice=f"Nothing was changed.\n{_advice(cli, damage)}")
    left = _repair(cli)
    remaining = {_line(problem) for problem in left}
    mended = [problem for problem in damage if _line(problem) not in remaining]
    return _verdict(left, mended=() if cli.as_json else mended, repairs=len(mended), advice=_advice(cli, left))


def unreadable(root: str) -> str | None:
    """Return why the pages of a store's manifest cannot be read, `None` if they can (rule 4)."""
    need_store(OsDisk(), root)
    path = os.path.join(root, names.MANIFEST)
    why = probe(path)
    if why is not None and (refused := access_error(path, write=False)) is not None:
        raise refused  # missing permission is not damage
    return why


def _problems_now(cli: Cli) -> list[Problem]:
    if (why := unreadable(os.path.abspath(cli.path))) is not None:
        return [Problem("K1", why)]
    with cli.reader() as manifest:
        return _problems(manifest)


def _problems(manifest: ManifestStore) -> list[Problem]:
    problems: list[Problem] = []
    try:
        with manifest.read() as txn:
            problems = propose(txn, list(check_rules(txn)))
    except QuireError as error:  # rule 1
        problems.append(Problem("K1", f"the check stopped: {error}"))
    return problems


def _repair(cli: Cli) -> list[Problem]:
    """Repair what can be repaired and return the remaining problems."""
    try:
        with _without_repair_warnings(), cli.owner(repair=True) as store:
            return _problems(store.manifest)
    except ManifestDamaged:  # some damage remains, so the store cannot be opened by an owner
        return _problems_now(cli)


@contextmanager
def _without_repair_warnings() -> Iterator[None]:
    """Suppress the manifest's warnings about repairs, which are for programs (rule 3). Other warnings are passed on."""
    captured = StringIO()
    try:
        with redirect_stderr(captured):
            yield
    finally:
        for line in captured.getvalue().splitlines(keepends=True):
            if "manifest.repair" not in line:
                sys.stderr.write(line)


def _verdict(
    problems: Sequence[Problem], *, mended: Sequence[Problem] = (), repairs: int = 0, advice: str = ""
) -> CliResult:
    after = f" after {count_of(repairs, 'repair')}" if repairs else ""
    closing = count_of(len(problems), "problem") if problems else "all rules of the manifest hold"
    shown = Listing(
        columns=["rule", "kind", "what"],
        rows=[
            *(_problem_row(problem, "repaired") for problem in mended),
            *(_problem_row(problem, _kind(problem)) for problem in problems),
        ],
        empty=f"all rules of the manifest hold{after}",
        closing=f"{closing}{after}" + (f"\n{advice}" if advice else ""),
    )
    return CliResult(shown, PROBLEMS if problems else OK)


def _problem_row(problem: Problem, kind: str) -> ListingRow:
    data = {
        "rule": problem.rule,
        "what": problem.what,
        "where": plain(problem.where),
        "leak": problem.leak,
        "mendable": problem.fix is not None,
    }
    return ListingRow([problem.rule, kind, _line(problem)], data)


def _kind(problem: Problem) -> str:
    if problem.leak:
        return "leak"
    return "repairable" if problem.fix is not None else "damage"


def _line(problem: Problem) -> str:
    place = ", ".join(f"{name.replace('_', ' ')}: {in_words(value)}" for name, value in problem.where.items())
    what = CIRCULAR.sub(" ", problem.what).strip()
    return f"{what} ({place})" if place else what


def _advice(cli: Cli, problems: Sequence[Problem]) -> str:
    """Return what to do about damage, beginning with a copy of the store. Leaks need no action."""
    damage = [problem for problem in problems if not problem.leak]
    if not damage:
        return ""
    stuck = sum(problem.fix is None for problem in damage)
    if stuck == len(damage):
        return f"{'It cannot' if stuck == 1 else 'None of it can'} be repaired: {RESTORE}."
    root = os.path.abspath(cli.path)
    copy = f"cp -r {shlex.quote(root)} {shlex.quote(root + '.copy')}"
    lines = [f"Copy the store first, while no process owns it (a hot copy: docs/operations.md):\n  {copy}"]
    how = f"quire manifest check --repair{' --partial' if stuck else ''} --store {shlex.quote(root)}"
    if stuck:
        lines.insert(0, f"{stuck:,} of {len(damage):,} cannot be repaired: {RESTORE}, or repair the rest.")
    return "\n".join([*lines, f"Then repair {'the rest' if stuck else 'it'}:\n  {how}"])


# ── tables ────────────────────────────────────────────────────────────────────────────────────────────────────────────
@command("tables", group, example="quire manifest tables")
def tables(cli: Cli) -> Listing:
    """List the tables of the manifest."""
    with cli.reader() as manifest, manifest.read() as txn:
        counts = {name: txn.count(name) for name in TABLES}
    return Listing(
        columns=["table", ">rows", "policy", "purpose"],
        rows=[
            ListingRow(
                [table.name, f"{counts[table.name]:,}", table.policy.value, table.purpose],
                {
                    "table": table.name,
                    "rows": counts[table.name],
                    "policy": table.policy.value,
                    "purpose": table.purpose,
                    "key": [name for name, _ in table.key.fields],
                },
            )
            for table in TABLES.values()
        ],
    )


@command("dump", group, example="quire manifest dump chunk_catalog --limit 5 --json")
def dump(
    cli: Cli,
    table: Annotated[str, Argument(metavar="TABLE", help="A table's name; `quire manifest tables` lists them.")],
    limit: Annotated[int, Option(min=0, metavar="N", help="Maximum number of rows; 0 for all.")] = 20,
) -> Listing:
    """Show the rows of a table, decoded.

    Text shows the fields that differ from their defaults, JSON all of them.

    A chain of slot_leaf is SLOTS base:GENERATION@LSN + delta-ID:GENERATION@LSN.
    """
    try:
        chosen = table_named(table)
    except InvalidInput as error:
        raise InvalidInput(
            error.what, hint=f"`quire manifest tables` describes them; {error.hint}", **error.where
        ) from error
    return Listing(columns=["key", "record"], rows=_rows(cli, chosen, limit), empty=f"{table} is empty")


def _rows(cli: Cli, table: Table[Any], limit: int) -> Iterator[ListingRow]:
    names = [name for name, _ in table.key.fields]
    given = 0
    after: tuple[Any, ...] | None = None
    with cli.reader() as manifest:
        while True:
            step: list[tuple[tuple[Any, ...], Any]] = []
            with manifest.read() as txn:
                for key, record in txn.scan(table, start=after):
                    if key != after:
                        step.append((key, record))
                    if len(step) == STEP_ROWS or (limit and given + len(step) == limit):
                        break
            yield from (_row(dict(zip(names, plain(key))), record) for key, record in step)
            given += len(step)
            if not step or given == limit:
                return
            after = step[-1][0]


def _row(key: dict[str, Any], record: Any) -> ListingRow:
    data = {**key, "record": plain(record)}
    if isinstance(record, ChangeRecord):
        summary = {"operations": len(record.operations), "first": type(record.operations[0]).__name__}
        return ListingRow([pairs(key), pairs(summary)], data)
    if isinstance(record, LeafRecord) and (chains := _chains(key["leaf"], record.entries)) is not None:
        data["chains"] = {str(slot): plain(chain) for slot, chain in chains.items()}
        return ListingRow([pairs(key), _in_runs(chains, key["origin_db_id"])], data)
    return ListingRow([pairs(key), pairs(non_default_fields(record))], data)


def _chains(number: int, entries: bytes) -> Leaf | None:
    """Return the chains of a leaf by slot, `None` if it cannot be decoded, which `check` reports."""
    try:
        return {number * SLOTS_PER_LEAF + offset: chain for offset, chain in unpack_leaf(entries).items()}
    except ManifestDamaged:
        return None


def _in_runs(chains: Leaf, origin_db_id: int) -> str:
    """Format chains, with adjacent slots that have equal chains combined: `0-255 base:1@60`."""

    def key(place: tuple[int, tuple[int, Chain]]) -> tuple[int, Chain]:
        index, (slot, chain) = place
        return slot - index, chain

    runs = []
    for (_, chain), places in groupby(enumerate(sorted(chains.items())), key):
        slots = [slot for _, (slot, _) in places]
        numbers = str(slots[0]) if len(slots) == 1 else f"{slots[0]}-{slots[-1]}"
        runs.append(f"{numbers} {chain_text(chain, origin_db_id)}")
    return "; ".join(runs) or "no slots"


command("inspect", group, example="quire manifest inspect clicks --limit 20")(manifest_log.inspect)
command("verify", group, example="quire manifest verify clicks")(manifest_log.verify)
command("mode", group, example="quire manifest mode shadow")(manifest_log.mode)
command("bundle", group, example="quire manifest bundle clicks")(manifest_log.bundle)
