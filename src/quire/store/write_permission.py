"""Checks, before the owner's engines and jobs put or delete objects, that the place is recorded and still owned by this store.

Opening a store sends no request: the bucket is checked before the first put (A2). A place inside the store's directory, and
`memory://`, belong to the process that holds the lock. Objects of namespaces in other places are guarded by the session in
the store's own place.

Threads: any. Raises `StoreFenced`, and the errors of the manifest and the object store.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from quire.core.errors import InvalidInput, ReadOnly, StoreFenced
from quire.manifest.namespaces import Parent
from quire.objects.guarded import GuardedStore
from quire.objects.open import open_store
from quire.objects.ownership import Ownership, OwnerState, refuse_fenced
from quire.objects.requests import RequestCount
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
        self.requests = RequestCount()
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
        """Wrap an object store with the checks; engines and jobs get only wrapped stores."""
        return GuardedStore(store, self.before_put, self.before_delete, self.requests)

    def before_put(self) -> None:
        """Check that this store may put objects, and record their place. Nearly always sends no request."""
        if self._refusal:
            raise ReadOnly(self._refusal, hint="`quire takeover` makes this directory the owner", path=self._path)
        if self._ownership is not None:
            self._ownership.check()
        self.remember_place()

    def remember_place(self) -> None:
        """Record the place of the objects durably, before the first one is put."""
        if not self._is_written_down:
            with self._lock:
                if not self._is_written_down:
                    object_access.record_location(self._manifest, self._place)
                    self._is_written_down = True

    def refuse(self, reason: str) -> None:
        """Refuse every put and delete from now on: this process only completes a directory that has no owner yet."""
        self._refusal = reason

    def before_delete(self) -> None:
        """Check that this store may delete objects. Sends a request to the bucket for every batch of deletions (A2)."""
        if self._refusal:
            raise ReadOnly(self._refusal, path=self._path)
        if self._ownership is not None:
            self._ownership.confirm()

    def owns_legacy(self) -> bool:
        """Return whether this store may delete objects at the root of the place, which have no store's prefix."""
        return self._ownership.owns_legacy() if self._ownership is not None else True

    @property
    def state(self) -> OwnerState:
        """The state of ownership, for display."""
        if self._ownership is not None:
            return self._ownership.state
        with self._manifest.read() as txn:
            return OwnerState(object_location.NOT_NEEDED, txn.owner_epoch())

    def depose(self, error: StoreFenced) -> None:
        """Record in the directory that the store was taken over, so that the next opening is refused at once."""
        if self._ownership is not None:
            self._ownership.depose(error)

    def refuse_fenced(self) -> None:
        """Raise `StoreFenced` if the directory records that another owner has taken over."""
        if self._needs_owner:
            refuse_fenced(self._disk, self._path, self._epoch)

    def take_over(self, parent: Parent | None = None) -> OwnerState:
        """Begin a new owner epoch, which fences the previous owner. `parent` is where that owner's log ended, if known."""
        if self._ownership is None:
            raise InvalidInput(
                "there is nothing to take over: the store's objects are in its own directory",
                hint="open it directly; a copy of the directory is an independent store",
                path=self._path,
            )
        parent = parent or Parent()
        return self._ownership.take_over(lambda at_least: self._manifest.begin_owner_epoch(at_least, parent))

    def _first_epoch(self) -> int:
        self._manifest.ensure_owner_epoch()
        with self._manifest.read() as txn:
            return txn.owner_epoch()

    def close(self) -> None:
        """Close the connection to the object store."""
        with self._lock:
            raw, self._raw = self._raw, None
        if raw is not None:
            raw.close()

    def _raw_store(self) -> DeletableStore:
        with self._lock:
            if self._raw is None:
                with self._manifest.read() as txn:
                    options = object_access.options_of(txn, self._settings, self._url)
                store = open_store(self._url, options=options, disk=self._disk)
                self._raw = GuardedStore(store, _allow, _allow, self.requests)  # the checks themselves use it
            return self._raw


def _allow() -> None:
    """Check nothing."""
