"""Commands that look into the manifest: tables and dump; and, registered here, `check`, `inspect` and `verify`.

Rules
  1. `dump` holds no read transaction while it writes (M4): it reads `STEP_ROWS` rows at a time.
  2. Packed bodies are shown unpacked: a slot leaf as its chains.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from typing import TYPE_CHECKING, Annotated, Any

from quire.cli import check, manifest_log
from quire.cli.command import Cli
from quire.cli.declarations import Argument, Group, Option, command
from quire.cli.formatting import pairs, plain, telling
from quire.cli.output import STEP_ROWS, Listing, Row
from quire.core.errors import InvalidInput, ManifestDamaged
from quire.core.limits import SLOTS_PER_LEAF
from quire.manifest.change import ChangeRecord
from quire.manifest.reads import table_named
from quire.manifest.records import LeafRecord
from quire.manifest.slots import unpack_leaf
from quire.manifest.tables import TABLES

if TYPE_CHECKING:
    from quire.manifest.slots import Chain, Leaf
    from quire.manifest.tables import Table


CHANGE_LOG = {"change_log": ("local", "committed batches, in order", ["sequence"])}
"""The one table that tables.py does not declare: the module that does loads every operation (a test compares)."""


def add_to(app: Group) -> None:
    """Register these commands, as a group."""
    group = Group("Inspect the manifest, the catalog of everything in a store.")
    check.add_to(group)
    command(group, "tables", example="quire manifest tables")(tables)
    command(group, "dump", example="quire manifest dump chunk_catalog --limit 5 --json")(dump)
    manifest_log.add_to(group)
    app.add("manifest", group)


def tables(cli: Cli) -> Listing:
    """List the tables of the manifest."""
    declared = {
        each.name: (each.policy.value, each.purpose, [name for name, _ in each.key.fields]) for each in TABLES.values()
    }
    with cli.reader() as manifest, manifest.read() as txn:
        counts = {name: txn.count(name) for name in {**declared, **CHANGE_LOG}}
    rows = [(name, counts[name], *about) for name, about in {**declared, **CHANGE_LOG}.items()]
    return Listing(
        columns=["table", ">rows", "policy", "purpose"],
        rows=[
            Row(
                [name, f"{count:,}", policy, purpose],
                {"table": name, "rows": count, "policy": policy, "purpose": purpose, "key": key},
            )
            for name, count, policy, purpose, key in rows
        ],
    )


def dump(
    cli: Cli,
    table: Annotated[str, Argument(metavar="TABLE", help="A name that `quire manifest tables` lists.")],
    limit: Annotated[int, Option(min=0, metavar="N", help="Rows at most; 0: no limit.")] = 20,
) -> Listing:
    """Show the rows of a table, decoded.

    As text only the fields that differ from their defaults, as JSON all of them. A chain of slot_leaf reads
    SLOTS base:GENERATION@LSN + delta-ID:GENERATION@LSN.
    """
    try:
        chosen = table_named(table)
    except InvalidInput as error:
        raise InvalidInput(
            error.what, hint=f"`quire manifest tables` explains them; {error.hint}", **error.where
        ) from error
    return Listing(columns=["key", "record"], rows=_rows(cli, chosen, limit), empty=f"{table} is empty")


def _rows(cli: Cli, table: Table[Any], limit: int) -> Iterator[Row]:
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


def _row(key: dict[str, Any], record: Any) -> Row:
    data = {**key, "record": plain(record)}
    if isinstance(record, ChangeRecord):
        summary = {"operations": len(record.operations), "first": type(record.operations[0]).__name__}
        return Row([pairs(key), pairs(summary)], data)
    if isinstance(record, LeafRecord) and (chains := _chains(key["leaf"], record.entries)) is not None:
        data["chains"] = {str(slot): plain(chain) for slot, chain in chains.items()}
        return Row([pairs(key), _in_runs(chains, key["origin_db_id"])], data)
    return Row([pairs(key), pairs(telling(record))], data)


def _chains(number: int, entries: bytes) -> Leaf | None:
    """The chains of a leaf by slot; `None` if its bytes make no sense, which is for `check` to say."""
    try:
        return {number * SLOTS_PER_LEAF + offset: chain for offset, chain in unpack_leaf(entries).items()}
    except ManifestDamaged:
        return None


def _in_runs(chains: Leaf, origin_db_id: int) -> str:
    """Neighbouring slots with equal chains as one: `0-255 base:1@60`."""

    def key(place: tuple[int, tuple[int, Chain]]) -> tuple[int, Chain]:
        index, (slot, chain) = place
        return slot - index, chain

    runs = []
    for (_, chain), places in groupby(enumerate(sorted(chains.items())), key):
        slots = [slot for _, (slot, _) in places]
        numbers = str(slots[0]) if len(slots) == 1 else f"{slots[0]}-{slots[-1]}"
        runs.append(f"{numbers} {chain_text(chain, origin_db_id)}")
    return "; ".join(runs) or "no slots"


def chain_text(chain: Chain, origin_db_id: int) -> str:
    """`base:1@60 + delta-1:2@100`: kind, generation and covered lsn of each artifact; another origin is named."""
    links = []
    for link in chain:
        name = link.kind.name.lower() + (f"-{link.delta_id}" if link.delta_id else "")
        whose = "" if link.origin_db_id == origin_db_id else f" of db {link.origin_db_id}"
        links.append(f"{name}:{link.generation}@{link.covered_lsn}{whose}")
    return " + ".join(links)
