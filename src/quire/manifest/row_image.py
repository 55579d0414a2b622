"""The manifest as rows: reads all of them for a base of the archive, and writes a manifest from a base (A7, A10).

Rows are copied as stored, with their checksums: nothing is decoded. Tables of other versions pass unseen.

Threads: one per object. Raises the errors of the environment.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from quire.core.closing import ClosedOnExit
from quire.core.errors import Corruption
from quire.core.settings import ManifestSettings
from quire.manifest import tables as t
from quire.manifest.checked_point import forget_point
from quire.manifest.env import CHANGE_LOG_NAME, ManifestEnv
from quire.manifest.overlay import TableRows
from quire.manifest.reads import ReadTxn, table_named

ROWS_PER_BLOCK = 4096


def image(read: Callable[[], ReadTxn], first_change: int) -> Iterator[TableRows]:
    """Yield all archived rows of a manifest in blocks; of the change log those from `first_change` on.

    Each block is read in a transaction of its own, which ends before the block is yielded, because the consumer may be
    slow. The blocks are therefore of several moments; replaying the log over them gives one consistent state.
    """
    for name in (*t.TABLES, CHANGE_LOG_NAME):
        if name in t.NOT_ARCHIVED:
            continue
        table = table_named(name)
        start = table.key.pack(first_change) if name == CHANGE_LOG_NAME else b""
        while True:
            with read() as txn:
                keys, values = next(txn.steps(table, ROWS_PER_BLOCK, start=start), ([], []))
            if not keys:
                break
            yield name, list(zip(keys, values)), []
            # The smallest key above the last one.
            start = keys[-1] + b"\0"


class RowImage(ClosedOnExit):
    """A manifest built from rows, for a restore or a standby. Each `apply` is one transaction."""

    def __init__(self, path: str, settings: ManifestSettings | None = None) -> None:
        self._env = ManifestEnv(path, settings or ManifestSettings(), write=True)
        forget_point(self._env)  # rows from elsewhere: an owner that opens this manifest checks everything

    def replace(self, blocks: Callable[[], Iterable[TableRows]]) -> None:
        """Replace all rows of the archived tables with these, in one durable transaction.

        `blocks` is called again if the map must grow.
        """

        def change(txn: Any) -> None:
            for name in (*t.TABLES, CHANGE_LOG_NAME):
                if name not in t.NOT_ARCHIVED:
                    txn.drop(self._env.handles[name], delete=False)
            self._write(txn, blocks())

        self._env.transact(change)

    def apply(self, commits: Sequence[Sequence[TableRows]]) -> None:
        """Put and delete rows, in order, in one durable transaction."""

        def change(txn: Any) -> None:
            for tables in commits:
                self._write(txn, tables)

        self._env.transact(change)

    def _write(self, txn: Any, tables: Iterable[TableRows]) -> None:
        for name, puts, deletes in tables:
            handle = self._env.handles.get(name)
            if handle is None:
                raise Corruption("the archive has a table that this version does not know", table=name)
            with txn.cursor(db=handle) as cursor:
                cursor.putmulti(puts)
            for key in deletes:
                txn.delete(key, db=handle)

    def read(self) -> ReadTxn:
        """Return a snapshot of the rows so far."""
        return ReadTxn(self._env)

    def close(self) -> None:
        self._env.close()
