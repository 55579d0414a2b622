"""Commands that look into the manifest: check, tables, dump. Only `check --repair` writes.

Rules
  1. `check` shows every broken rule and ends with 1 if there is one; what keeps the checker itself from going on is
     shown as one more problem, not as a failure of the command.
  2. `dump` holds no read transaction while it writes (M4): it reads `STEP_ROWS` rows at a time.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer

from quire.cli.command import Cli, Verdict, command, new_app
from quire.cli.exits import OK, PROBLEMS
from quire.cli.output import STEP_ROWS, Listing, Row
from quire.cli.plain import count_of, pairs, plain, telling
from quire.core.errors import ManifestDamaged, QuireError

if TYPE_CHECKING:
    from quire.manifest.check import Problem
    from quire.manifest.tables import Table
    from quire.store.store import Store


def add_to(app: typer.Typer) -> None:
    """Register these commands, as a group."""
    group = new_app("Look into the manifest: the catalog of everything in a store.")
    command(group, "check", example="quire manifest check --repair")(check)
    command(group, "tables", example="quire manifest tables")(tables)
    command(group, "dump", example="quire manifest dump chunk_catalog --limit 5 --json")(dump)
    app.add_typer(group, name="manifest")


def check(
    cli: Cli,
    repair: Annotated[
        bool, typer.Option("--repair", help="Mend what can be recomputed. Needs to own the store.")
    ] = False,
) -> Verdict:
    """Hold the manifest to its rules; exit code 1 if one is broken."""
    mended = 0
    if repair:
        before = _problems_now(cli)
        try:
            with cli.owner(repair=True) as store:
                problems = _problems(store)
        except ManifestDamaged:
            if not before:
                raise
            problems = _problems_now(cli)
        mended = max(0, len(before) - len(problems))
    else:
        problems = _problems_now(cli)
    return Verdict(_verdict(problems, mended), PROBLEMS if problems else OK)


def _problems_now(cli: Cli) -> list[Problem]:
    with cli.reader() as store:
        return _problems(store)


def _problems(store: Store) -> list[Problem]:
    from quire.manifest.check import Problem, check

    found: list[Problem] = []
    try:
        with store.manifest.read() as txn:
            found.extend(check(txn))
    except QuireError as error:  # rule 1
        found.append(Problem("K1", f"the check could not go on: {error}"))
    return found


def _verdict(problems: list[Problem], mended: int) -> Listing:
    rows = [
        Row(
            [each.rule, "leak" if each.leak else "damage", "yes" if each.fix else "no", str(each).partition(": ")[2]],
            {
                "rule": each.rule,
                "what": each.what,
                "where": plain(each.where),
                "leak": each.leak,
                "mendable": each.fix is not None,
            },
        )
        for each in problems
    ]
    after = f" after {count_of(mended, 'repair')}" if mended else ""
    mendable = sum(each.fix is not None and not each.leak for each in problems)
    closing = count_of(len(problems), "problem") + after
    if mendable:
        closing += f"; `quire manifest check --repair` mends {mendable:,} of them"
    return Listing(
        columns=["rule", "kind", "mendable", "what"],
        rows=rows,
        empty=f"the manifest keeps all its rules{after}",
        closing=closing,
    )


def tables(cli: Cli) -> Listing:
    """List the tables of the manifest."""
    from quire.manifest.tables import TABLES

    with cli.reader() as store, store.manifest.read() as txn:
        rows = [(each, txn.count(each)) for each in TABLES.values()]
    return Listing(
        columns=["table", ">rows", "policy", "purpose"],
        rows=[
            Row(
                [each.name, f"{count:,}", each.policy.value, each.purpose],
                {
                    "table": each.name,
                    "rows": count,
                    "policy": each.policy.value,
                    "purpose": each.purpose,
                    "key": [name for name, _ in each.key.fields],
                },
            )
            for each, count in rows
        ],
    )


def dump(
    cli: Cli,
    table: Annotated[str, typer.Argument(help="A table's name, as `quire manifest tables` lists them.")],
    limit: Annotated[int, typer.Option(min=0, help="Rows at most; 0: all.")] = 20,
) -> Listing:
    """Show the rows of a table, decoded.

    As text only the fields that differ from their defaults, as JSON all of them.
    """
    from quire.manifest.reads import table_named

    chosen = table_named(table)
    return Listing(columns=["key", "record"], rows=_rows(cli, chosen, limit), empty=f"{table} is empty")


def _rows(cli: Cli, table: Table[Any], limit: int) -> Iterator[Row]:
    names = [name for name, _ in table.key.fields]
    given = 0
    after: tuple[Any, ...] | None = None
    with cli.reader() as store:
        while True:
            step: list[tuple[tuple[Any, ...], Any]] = []
            with store.manifest.read() as txn:
                for key, record in txn.scan(table, start=after):
                    if key != after:
                        step.append((key, record))
                    if len(step) == STEP_ROWS or (limit and given + len(step) == limit):
                        break
            for key, record in step:
                cells = [pairs(dict(zip(names, plain(key)))), pairs(_summary(record))]
                yield Row(cells, {**dict(zip(names, plain(key))), "record": plain(record)})
            given += len(step)
            if not step or given == limit:
                return
            after = step[-1][0]


def _summary(record: Any) -> dict[str, Any]:
    from quire.manifest.change import ChangeRecord

    if isinstance(record, ChangeRecord):
        return {"operations": len(record.operations), "first": type(record.operations[0]).__name__}
    return telling(record)
