"""Clones of a store register below its prefix, and its collector keeps the objects that they read (A12).

A clone reads objects that its parent had at the moment from which the clone was made. The parent therefore keeps an object that
existed at that moment and is retired later, until the clone's registration is removed.

Whether an object existed at that moment follows from its modification time in the object store, with an hour of tolerance for
that store's clock: keeping too much only costs space.

Threads: any. Raises the object store's errors: without the list of clones nothing is deleted.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import msgspec

from quire.core.errors import Corruption, ObjectNotFound
from quire.durable.object_names import clone_key, clones_prefix
from quire.objects.api import DeletableStore, ObjectStore, list_objects
from quire.objects.collector import withdraw

LIST_SECONDS = 60.0
CLOCK_MS = 3_600_000
"""Largest difference between the clocks of an owner and of its object store."""
SETTLED_MS = 60_000
"""Tolerance for retirements: they carry the time at which their commit began, and may take effect after a later moment."""
FOREVER_MS = 1 << 62


class CloneRegistration(msgspec.Struct, frozen=True, kw_only=True):
    """`{store_id}/clones/{clone_id}`: which moment of the store a clone reads."""

    format: int = 1
    clone_id: str
    position: str
    at_ms: int
    """The parent's clock at that moment."""
    registered_at_ms: int
    host: str = ""
    path: str = ""
    """Where the clone was created; informational."""


def register(store: ObjectStore, store_id: str, registration: CloneRegistration) -> None:
    """Register a clone, so that the objects it reads are kept."""
    store.put(clone_key(store_id, registration.clone_id), msgspec.json.encode(registration) + b"\n")


def release(store: DeletableStore, store_id: str, clone_id: str) -> None:
    """Remove a registration: the clone no longer reads the store's objects, or the administrator gives it up."""
    withdraw(store, clone_key(store_id, clone_id))


def registrations(store: ObjectStore, store_id: str) -> list[CloneRegistration]:
    """Return the clones of a store, earliest moment first. Raises if one cannot be read, because it may need any object."""
    clones = []
    for info in list_objects(store, clones_prefix(store_id)):
        try:
            clones.append(msgspec.json.decode(store.get(info.key), type=CloneRegistration))
        except ObjectNotFound:
            continue  # released meanwhile
        except msgspec.MsgspecError as error:
            hint = "if no clone needs it, remove it: `quire clones forget ID`"
            raise Corruption("the registration of a clone is damaged", hint=hint, key=info.key) from error
    return sorted(clones, key=lambda clone: (clone.at_ms, clone.clone_id))


class CloneKeeper:
    """Tells a store's collector which objects its clones need (`jobs/archive_window.py`)."""

    def __init__(self, store: ObjectStore, store_id: Callable[[], str]) -> None:
        # constant after construction
        self._store = store
        self._store_id = store_id
        # guarded by _lock
        self._lock = threading.Lock()
        self._listed_at = float("-inf")
        self._moments: list[int] = []

    def kept_until(self, place: ObjectStore, name: str, since_ms: int) -> int:
        """Return until when an object, retired at `since_ms`, must be kept for clones; 0 if no clone needs it."""
        moments = [at_ms for at_ms in self._clones() if at_ms < since_ms + SETTLED_MS]
        if not moments:
            return 0
        try:
            created_ms = place.head(name).modified_ms
        except ObjectNotFound:
            return 0
        return FOREVER_MS if any(created_ms <= at_ms + CLOCK_MS for at_ms in moments) else 0

    def _clones(self) -> list[int]:
        with self._lock:
            if time.monotonic() - self._listed_at >= LIST_SECONDS:
                self._moments = [clone.at_ms for clone in registrations(self._store, self._store_id())]
                self._listed_at = time.monotonic()
            return self._moments

    def close(self) -> None:
        """Do nothing: no resource is held."""
