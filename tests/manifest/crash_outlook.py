"""What a process that only reads sees of a manifest while its owners come, work and are killed."""

from __future__ import annotations

from quire.core.settings import ManifestSettings
from quire.manifest import tables as t
from quire.manifest.change import CHANGE_LOG
from quire.manifest.migrations import STORE_ID
from quire.manifest.reads import ReadTxn
from quire.manifest.store import ManifestStore
from quire.testing.manifest import Dump


def rows_of(manifest: ManifestStore) -> Dump:
    """Every row that follows from the batches: not the store's id, when it was migrated, nor change
    records that are waiting to be removed."""
    with manifest.read() as txn:
        return rows_in(txn)


def rows_in(txn: ReadTxn) -> Dump:
    """The same, of one snapshot."""
    oldest = CHANGE_LOG.key.pack(txn.feed_bounds()[0])
    rows = {table.name: list(txn.raw_scan(table)) for table in t.TABLES.values() if table is not t.MIGRATIONS}
    rows[CHANGE_LOG.name] = [row for row in rows[CHANGE_LOG.name] if row[0] >= oldest]
    rows[t.META.name] = [row for row in rows[t.META.name] if row[0] != STORE_ID]
    return rows


class Outlook:
    """A read-only view, opened when it is needed."""

    def __init__(self, path: str) -> None:
        self.stays = False
        """Whether it is open while owners die: then the next owner finds LMDB's lock held by the dead, else a new lock file."""
        self._path = path
        self._manifest: ManifestStore | None = None
        self._held: tuple[ReadTxn, Dump] | None = None

    @property
    def is_open(self) -> bool:
        return self._manifest is not None

    def look(self) -> ManifestStore:
        """The manifest as the owner left it, or as it is."""
        if self._manifest is None:
            self._manifest = ManifestStore.open(self._path, mode="r", settings=ManifestSettings())
        return self._manifest

    def hold(self) -> None:
        """Keep a snapshot: no owner may reuse its pages, not one that never saw who holds it either."""
        self.release()
        txn = self.look().read()
        self._held = txn, rows_in(txn)

    def held_is_unchanged(self) -> bool:
        return self._held is None or rows_in(self._held[0]) == self._held[1]

    def release(self) -> None:
        """Give the snapshot back."""
        if self._held is not None:
            self._held[0].close()
            self._held = None

    def step_back(self) -> None:
        """Somebody is about to die: close, unless it stays."""
        if not self.stays:
            self.close()

    def close(self) -> None:
        self.release()
        if self._manifest is not None:
            self._manifest.close()
            self._manifest = None
