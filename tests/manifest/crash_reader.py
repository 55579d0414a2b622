"""The read-only process's view of a manifest whose owners are killed again and again."""

from __future__ import annotations

from quire.core.settings import ManifestSettings
from quire.manifest import tables as t
from quire.manifest.change import CHANGE_LOG
from quire.manifest.migrations import STORE_ID
from quire.manifest.reads import ReadTxn
from quire.manifest.store import ManifestStore
from quire.testing.manifest import Dump


def rows_of(manifest: ManifestStore) -> Dump:
    """Every row that is determined by the batches: not the store's id, the time of its migration, or change records
    that are waiting to be removed."""
    with manifest.read() as txn:
        return rows_in(txn)


def rows_in(txn: ReadTxn) -> Dump:
    """The same, of one read transaction."""
    oldest = CHANGE_LOG.key.pack(txn.feed_bounds()[0])
    rows = {table.name: list(txn.raw_scan(table)) for table in t.TABLES.values() if table is not t.MIGRATIONS}
    rows[CHANGE_LOG.name] = [row for row in rows[CHANGE_LOG.name] if row[0] >= oldest]
    rows[t.META.name] = [row for row in rows[t.META.name] if row[0] != STORE_ID]
    return rows


class ReaderView:
    """A read-only view of the manifest, opened on demand."""

    def __init__(self, path: str) -> None:
        self.stays_open = False
        """Whether it stays open while owners die: then the next owner finds LMDB's lock held by the dead one. Otherwise the
        lock file is new."""
        self._path = path
        self._manifest: ManifestStore | None = None
        self._snapshot: tuple[ReadTxn, Dump] | None = None

    @property
    def is_open(self) -> bool:
        return self._manifest is not None

    def manifest(self) -> ManifestStore:
        """The manifest in its current state, or as the last owner left it."""
        if self._manifest is None:
            self._manifest = ManifestStore.open(self._path, mode="r", settings=ManifestSettings())
        return self._manifest

    def hold_snapshot(self) -> None:
        """Keep a snapshot open: no owner may reuse its pages, not even one that starts after the reader."""
        self.release()
        txn = self.manifest().read()
        self._snapshot = txn, rows_in(txn)

    def snapshot_is_unchanged(self) -> bool:
        return self._snapshot is None or rows_in(self._snapshot[0]) == self._snapshot[1]

    def release(self) -> None:
        """Close the snapshot."""
        if self._snapshot is not None:
            self._snapshot[0].close()
            self._snapshot = None

    def prepare_for_kill(self) -> None:
        """Close before an owner is killed, unless the view stays open."""
        if not self.stays_open:
            self.close()

    def close(self) -> None:
        self.release()
        if self._manifest is not None:
            self._manifest.close()
            self._manifest = None
