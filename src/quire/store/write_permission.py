"""What the owner's engines and jobs ask before they put or delete: whether the place is written down, and still ours.

Opening asks nobody: the bucket is looked at before the first put (A2). A place inside the store's directory, and `memory://`,
belong to whoever has the lock. Objects of namespaces in other places are guarded by the session in the store's own place.

Threads: any. Raises `StoreFenced`, and what manifest and object store raise.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from quire.core.errors import InvalidInput, ReadOnly, StoreFenced
from quire.manifest.namespaces import Parent
from quire.objects.guarded import GuardedStore
from quire.objects.open import open_store
from quire.objects.ownership import Ownership, OwnerState, refuse_fenced
from quire.store import object_access, object_location

if TYPE_CHECKING:
    from quire.core.settings import StoreSettings
    from quire.durable.files import Disk
    from quire.manifest.store import ManifestStore
    from quire.objects.api import DeletableStore


class ObjectRights:
    """The right of an opened store to change its objects."""

    def __init__(self, *, path: str, settings: StoreSettings, manifest: ManifestStore, disk: Disk, url: str) -> None:
        # constant after construction
        self._manifest = manifest
        self._disk = disk
        self._path = path
        self._url = url
        self._settings = settings
        self._place = object_location.place_of(path, settings.object_store)
        self._needs_owner = object_location.needs_owner(path, self._place)
        # guarded by _lock
        self._lock = threading.Lock()
        self._raw: DeletableStore | None = None
        self._is_written_down = False
        self._refusal = ""
        with manifest.read() as txn:
            epoch, store_id, legacy = txn.owner_epoch(), txn.store_id(), txn.current_namespace()[1].legacy
            self._is_written_down = object_location.recorded_location(txn) == self._place
        self._epoch = epoch
        self._ownership = (
            Ownership(
                store_id=store_id,
                epoch=epoch,
                root=path,
                disk=disk,
                clock=manifest.clock,
                place=self._raw_store,
                fence=manifest.writer.fence,
                first_epoch=self._first_epoch,
                legacy=legacy,
            )
            if self._needs_owner
            else None
        )

    def guarded(self, store: DeletableStore) -> DeletableStore:
        """The store as engines and jobs get it."""
        return GuardedStore(store, self.before_put, self.before_delete)

    def before_put(self) -> None:
        """The place is written down, and the store is ours: nearly always known without asking anybody."""
        if self._refusal:
            raise ReadOnly(self._refusal, hint="`quire takeover` makes this directory the owner", path=self._path)
        if self._ownership is not None:
            self._ownership.check()
        self.remember_place()

    def remember_place(self) -> None:
        """Write the place of the objects down, before the first one is put."""
        if not self._is_written_down:
            with self._lock:
                if not self._is_written_down:
                    object_access.record_location(self._manifest, self._place)
                    self._is_written_down = True

    def refuse(self, reason: str) -> None:
        """Put and delete nothing: this process only completes a directory that is nobody's yet."""
        self._refusal = reason

    def before_delete(self) -> None:
        """Before a batch of deletions: the bucket is asked each time."""
        if self._refusal:
            raise ReadOnly(self._refusal, path=self._path)
        if self._ownership is not None:
            self._ownership.confirm()

    def owns_legacy(self) -> bool:
        """Whether objects below no store's prefix, at the root of the place, are this store's to delete."""
        return self._ownership.owns_legacy() if self._ownership is not None else True

    @property
    def state(self) -> OwnerState:
        """Where the store stands, for people."""
        if self._ownership is not None:
            return self._ownership.state
        with self._manifest.read() as txn:
            return OwnerState(object_location.NOT_NEEDED, txn.owner_epoch())

    def depose(self, error: StoreFenced) -> None:
        """Have the directory remember that it was taken over: the next opening is refused at once."""
        if self._ownership is not None:
            self._ownership.depose(error)

    def refuse_fenced(self) -> None:
        """Raise `StoreFenced` if this directory remembers that it is behind."""
        if self._needs_owner:
            refuse_fenced(self._disk, self._path, self._epoch)

    def take_over(self, parent: Parent | None = None) -> OwnerState:
        """Begin an owner epoch: whoever wrote to the place before is fenced. `parent` is where that owner ended, if known."""
        if self._ownership is None:
            raise InvalidInput(
                "there is nothing to take over: the store's objects are its own, in its directory",
                hint="open it; a copy of the directory is a store of its own",
                path=self._path,
            )
        parent = parent or Parent()
        return self._ownership.take_over(lambda at_least: self._manifest.begin_owner_epoch(at_least, parent))

    def _first_epoch(self) -> int:
        self._manifest.ensure_owner_epoch()
        with self._manifest.read() as txn:
            return txn.owner_epoch()

    def close(self) -> None:
        """Give the connection back."""
        with self._lock:
            raw, self._raw = self._raw, None
        if raw is not None:
            raw.close()

    def _raw_store(self) -> DeletableStore:
        with self._lock:
            if self._raw is None:
                with self._manifest.read() as txn:
                    options = object_access.options_of(txn, self._settings, self._url)
                self._raw = open_store(self._url, options=options, disk=self._disk)
            return self._raw
