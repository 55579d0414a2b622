"""The audit's table: differences between rows, bytes and listings, for Parquet files and DataFrames.

Columns
  state        MISSING and ALTERED (by the bytes), UNLISTED (no object in the listing), ORPHANED (no row), or a rule's number
  artifact     the artifact's name; empty for a rule that is not about an artifact
  what         the difference as text
  size_bytes   size of the artifact or object
  verified_ms  when the bytes were last verified; 0: never

Importing it does not load pyarrow.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from quire.core.ids import ArtifactKind
from quire.durable.names import object_key
from quire.manifest.check import Problem, Rule
from quire.manifest.reads import ReadTxn
from quire.manifest.records import VerifyState
from quire.manifest.verification import artifacts

if TYPE_CHECKING:
    import pyarrow as pa

COLUMNS = ("state", "artifact", "what", "size_bytes", "verified_ms")


def damaged(txn: ReadTxn) -> Iterator[dict[str, Any]]:
    """Yield a row for every artifact whose last verification found damage."""
    for key, row in artifacts(txn):
        if row.verify_state in (VerifyState.MISSING, VerifyState.ALTERED):
            yield {
                "state": row.verify_state.name,
                "artifact": object_key(key),
                "what": f"{key.kind.name.lower()} is {row.verify_state.name.lower()}",
                "size_bytes": row.used_bytes if key.kind is ArtifactKind.WAL else row.size_bytes,
                "verified_ms": row.verified_at_ms,
            }


COUNTED_RULES: frozenset[Rule] = frozenset({"R1", "R4", "S2", "P1", "P2"})
"""Rules of the manifest that the audit job checks, on executors if necessary."""


def audit_table(
    problems: Iterable[Problem],
    bad: Iterable[dict[str, Any]],
    swept: dict[str, Any],
    counted: Iterable[dict[str, Any]] = (),
) -> pa.Table:
    """Return the table of broken rules, differing counts, damaged artifacts, and the findings of a sweep."""
    rows: list[dict[str, Any]] = [{"state": problem.rule, "what": str(problem)} for problem in problems]
    rows += counted
    rows += bad
    rows += [{"state": "UNLISTED", "what": "its object is missing", **row} for row in swept.get("missing", ())]
    rows += [{"state": "ORPHANED", "what": "the manifest has no row for it", **row} for row in swept.get("orphans", ())]
    return as_table(rows)


def as_table(rows: Iterable[dict[str, Any]]) -> pa.Table:
    """Return rows, each with some of the columns, as an Arrow table."""
    import pyarrow as pa

    kinds = (pa.string(), pa.string(), pa.string(), pa.int64(), pa.int64())
    blank: tuple[Any, ...] = ("", "", "", 0, 0)
    listed = list(rows)
    columns = {
        name: pa.array([row.get(name, default) for row in listed], kind)
        for name, kind, default in zip(COLUMNS, kinds, blank)
    }
    return pa.table(columns)


def write_report(path: str, rows: Iterable[dict[str, Any]]) -> None:
    """Write the rows to a Parquet file."""
    import pyarrow.parquet as parquet

    parquet.write_table(as_table(rows), path)
