"""Clones of a store register below its prefix, and its collector keeps the objects that they read (A12).

A clone reads objects that its parent had at the moment from which the clone was made. The parent therefore keeps an object that
existed at that moment and is retired later, until the clone's registration is removed.

Whether an object existed at that moment follows from its modification time in the object store, with an hour of tolerance for
that store's clock: keeping too much only costs space.

A clone and its parent's collector run at the same time, and neither waits for the other. Each makes itself visible first and
looks second:
  clone       1. registers          2. checks that the log still has its moment; if not, it ends
  collector   1. deletes the log    2. lists the clones, then deletes the objects that none of them needs
If the clone finds its moment in the log, the collector has not deleted it there yet, and lists the clones after that: it sees
the registration. If the collector does not see the registration, the log was deleted before the clone registered: the clone
does not find its moment. So the list is read again in each round (`jobs/archive_window.py`), after the log was trimmed.

A takeover registers, too, until it has claimed the store. If it dies before that, an owner removes the registration once it has
seen it for `TAKEOVER_SECONDS`. A takeover that has taken half as long does not claim the store any more.

Threads: any. Raises the object store's errors: without the list of clones nothing is deleted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Self

import msgspec

from quire.archive.log_reader import STORE_ID
from quire.core.clock import Clock
from quire.core.decoding import UNDECODABLE, described
from quire.core.errors import Corruption, ObjectNotFound, QuireError, Unavailable
from quire.core.events import emit
from quire.durable.object_names import clone_key, clones_prefix
from quire.objects.api import DeletableStore, ObjectStore, list_objects
from quire.objects.collector import withdraw

CLOCK_MS = 3_600_000
"""Largest difference between the clocks of an owner and of its object store."""
SETTLED_MS = 60_000
"""Tolerance for retirements: they carry the time at which their commit began, and may take effect after a later moment."""
TAKEOVER_SECONDS = 3_600.0
"""How long an owner keeps objects for a takeover after it first saw the registration. Each side uses its own clock."""


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
    is_takeover: bool = False
    """Whether a takeover has registered, for as long as it takes."""


def register(store: ObjectStore, store_id: str, registration: CloneRegistration) -> None:
    """Register a clone, so that the objects it reads are kept."""
    store.put(clone_key(store_id, registration.clone_id), msgspec.json.encode(registration) + b"\n")


def release(store: DeletableStore, store_id: str, clone_id: str) -> None:
    """Remove a registration: the clone no longer reads the store's objects, or the administrator gives it up."""
    withdraw(store, clone_key(store_id, clone_id))


def clone_keys(store: ObjectStore, store_id: str) -> list[str]:
    """Return the names of the registrations of a store's clones, without reading them. Other names are not ours."""
    keys = (info.key for info in list_objects(store, clones_prefix(store_id)))
    return [key for key in keys if STORE_ID.fullmatch(key.rpartition("/")[2])]


def registrations(store: ObjectStore, store_id: str) -> list[CloneRegistration]:
    """Return the clones of a store, earliest moment first. Raises if one cannot be read, because it may need any object."""
    clones = []
    for key in clone_keys(store, store_id):
        try:
            clones.append(msgspec.json.decode(store.get(key), type=described(CloneRegistration)))
        except ObjectNotFound:
            continue  # released meanwhile
        except UNDECODABLE as error:
            hint = "if no clone needs it, remove it: `quire clones forget ID`"
            raise Corruption("the registration of a clone is damaged", hint=hint, key=key) from error
    return sorted(clones, key=lambda clone: (clone.at_ms, clone.clone_id))


@contextmanager
def kept_for_takeover(
    store: DeletableStore, store_id: str, registration: CloneRegistration, clock: Clock
) -> Iterator[Callable[[], None]]:
    """Register for the duration of a block, like a clone: the owner keeps what a directory reads while that takes over.

    Yields a function to call immediately before the claim, which raises if the owner may have stopped keeping it.
    """
    deadline = clock.monotonic() + TAKEOVER_SECONDS / 2  # before the registration, so earlier than any owner can see it
    register(store, store_id, registration)

    def require_kept() -> None:
        if clock.monotonic() >= deadline:
            what = "the takeover took too long: the owner may have deleted objects that this directory reads"
            raise Unavailable(what, hint="nothing was claimed; try again", position=registration.position)

    try:
        yield require_kept
    finally:
        with suppress(QuireError):  # `quire clones forget` removes it
            release(store, store_id, registration.clone_id)


class SeenTakeovers:
    """Since when an owner has seen the registrations of takeovers; `forget` removes one that would otherwise stay."""

    def __init__(self, clock: Clock, forget: Callable[[CloneRegistration], None]) -> None:
        self._clock = clock
        self._forget = forget
        self._first_seen: dict[str, float] = {}

    def without_dead(self, clones: list[CloneRegistration]) -> list[CloneRegistration]:
        """Return the registrations without those of takeovers that have died, which are removed."""
        now = self._clock.monotonic()
        takeovers = {clone.clone_id for clone in clones if clone.is_takeover}
        self._first_seen = {clone_id: self._first_seen.get(clone_id, now) for clone_id in takeovers}
        dead = {clone_id for clone_id, since in self._first_seen.items() if now - since >= TAKEOVER_SECONDS}
        for clone in clones:
            if clone.clone_id in dead:
                self._forget(clone)
        return [clone for clone in clones if clone.clone_id not in dead]


class ClonedMoments(msgspec.Struct, frozen=True):
    """The moments that the clones of a store read, as one listing found them."""

    moments: tuple[int, ...] = ()
    is_complete: bool = True
    """Whether every registration could be read; otherwise a clone may need any object."""

    @classmethod
    def listed(cls, store: ObjectStore, store_id: str, takeovers: SeenTakeovers) -> Self:
        """List the clones of a store. A damaged registration is reported, and keeps every object."""
        try:
            return cls(tuple(clone.at_ms for clone in takeovers.without_dead(registrations(store, store_id))))
        except Corruption as error:
            emit("error", "archive.clone_damaged", error=str(error))
            return cls(is_complete=False)

    def need(self, place: ObjectStore, name: str, since_ms: int) -> bool:
        """Return whether a clone needs an object that its parent does not need since `since_ms`."""
        if not self.is_complete:
            return True
        moments = [at_ms for at_ms in self.moments if at_ms < since_ms + SETTLED_MS]
        if not moments:
            return False
        try:
            created_ms = place.head(name).modified_ms
        except ObjectNotFound:
            return False
        return any(created_ms <= at_ms + CLOCK_MS for at_ms in moments)
