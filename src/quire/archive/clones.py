"""Clones of a store make themselves known below its prefix, and its collector keeps what they read (A12).

A clone reads objects that its parent had at the moment it was made of. The parent therefore keeps an object that was there at
that moment and is retired later, until the clone's registration is removed.

Whether an object was there at the moment is told by when the object store got it, with an hour to spare for its clock: keeping
too much costs space, and nothing else.

Threads: any. Raises what the object store raises: without the list of clones nothing is deleted.
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
"""How far the clocks of an owner and of its object store may be apart."""
SETTLED_MS = 60_000
"""A retirement has the time at which its commit began: it may come after a moment that seems to be later."""
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
    """For people: where the clone was made."""


def register(store: ObjectStore, store_id: str, registration: CloneRegistration) -> None:
    """Have what the clone reads kept."""
    store.put(clone_key(store_id, registration.clone_id), msgspec.json.encode(registration) + b"\n")


def release(store: DeletableStore, store_id: str, clone_id: str) -> None:
    """The clone does not read the store's objects any more, or a person says that it does not count."""
    withdraw(store, clone_key(store_id, clone_id))


def registrations(store: ObjectStore, store_id: str) -> list[CloneRegistration]:
    """The clones of a store, the earliest moment first. One that cannot be read raises: it may need anything."""
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
    """What a store's clones need, for its collector (`jobs/archive_window.py`)."""

    def __init__(self, store: ObjectStore, store_id: Callable[[], str]) -> None:
        # constant after construction
        self._store = store
        self._store_id = store_id
        # guarded by _lock
        self._lock = threading.Lock()
        self._listed_at = float("-inf")
        self._moments: list[int] = []

    def kept_until(self, place: ObjectStore, name: str, since_ms: int) -> int:
        """Until when a clone keeps an object that nothing needs since a moment: 0 if none does."""
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
        """Nothing is held."""
