"""Moving bytes between a file and an object.

Everything may be repeated: an object that is there already is adopted if it has our size and our sha256 (the answer to an
earlier put may have been lost, P11), a file that is there already likewise. No bytes are passed on that are not those the row
describes. The caller makes sure that nothing needs a copy before it is removed here.

Safe to run on an executor. Raises what the disk and the object store raise, and `Corruption`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from quire.core.errors import AlreadyExists, Corruption
from quire.durable.failpoints import hit
from quire.durable.files import Disk
from quire.jobs.copies import (
    Tick,
    checked_file,
    checked_object,
    damaged,
    difference,
    fetch,
    look_at_object,
    no_tick,
    remove_files,
)
from quire.jobs.locations import ArtifactLocation, OpenStore
from quire.objects.api import ExistingObject, ObjectStore


@dataclass(frozen=True, slots=True)
class MoveTask:
    """One artifact whose bytes are to move."""

    place: ArtifactLocation
    root: str
    """The store's directory."""
    is_suspect: bool = False
    """A verification found one of its copies missing or altered: take nothing for granted."""


@dataclass(frozen=True, slots=True)
class Uploaded:
    """What an upload led to."""

    size_bytes: int
    sha256: bytes
    was_there: bool


# ── up ────────────────────────────────────────────────────────────────────────────────────────────────────────────────
def upload(task: MoveTask, *, disk: Disk, open_store: OpenStore, tick: Tick = no_tick) -> Uploaded:
    """Put an artifact's file as its object; the object is durable and seen on return."""
    copy = checked_file(task.place, disk, tick)
    hit("jobs.upload.hashed")
    place, store = replace(task.place, sha256=copy.sha256), open_store(task.place.url)
    try:
        was_there = _put(place, store, disk, is_longer=copy.size_bytes > place.size_bytes)
    except AlreadyExists as error:
        raise Corruption(
            "a different object exists under the artifact's key",
            hint="nothing was overwritten; check that object, remove it, and upload again",
            artifact=place.key,
            **error.where,
        ) from error
    hit("jobs.upload.sent")
    check_size(place, store)
    hit("jobs.upload.checked")
    return Uploaded(place.size_bytes, place.sha256, was_there)


def _put(place: ArtifactLocation, store: ObjectStore, disk: Disk, *, is_longer: bool) -> bool:
    def is_ours(existing: ExistingObject) -> bool:
        same_size = existing.info.size_bytes == place.size_bytes
        return same_size and not difference(place, look_at_object(place, existing.store), is_file=False)

    if not is_longer:
        return store.put_file(place.object_key, place.local, create_only=True, identity=is_ours).adopted
    # The file is a preallocated WAL segment (16 MiB at most, P1), the object what is used of it.
    file = disk.open(place.local, write=False)
    try:
        used = file.read_at(place.size_bytes, 0)
    finally:
        file.close()
    return store.put(place.object_key, used, create_only=True, identity=is_ours, sha256=place.sha256).adopted


def check_size(place: ArtifactLocation, store: ObjectStore) -> None:
    """Raise unless the object is there and has the right size."""
    size = store.head(place.object_key).size_bytes
    if size != place.size_bytes:
        what = f"the object has {size} bytes instead of {place.size_bytes}"
        raise damaged(place, what, store=store.url, key=place.object_key)


# ── down ──────────────────────────────────────────────────────────────────────────────────────────────────────────────
def hydrate(task: MoveTask, *, disk: Disk, open_store: OpenStore, tick: Tick = no_tick) -> bool:
    """Make an artifact's file from its object; False if it was there already."""
    return fetch(task.place, task.root, disk=disk, store=open_store(task.place.url), tick=tick)


# ── away ──────────────────────────────────────────────────────────────────────────────────────────────────────────────
def check_before_eviction(task: MoveTask, *, open_store: OpenStore, tick: Tick = no_tick) -> None:
    """Raise unless the object can take the file's place: it is there, and whole; if there is doubt, every byte of it."""
    place, store = task.place, open_store(task.place.url)
    check_size(place, store)
    if task.is_suspect:
        checked_object(place, store, tick)
    hit("jobs.evict.checked")


def remove_local(place: ArtifactLocation, *, disk: Disk) -> None:
    """Remove an artifact's file, and what a fetch may have left beside it."""
    for fault in remove_files([place.local, place.staged], disk).values():
        raise fault
    hit("jobs.evict.removed")
