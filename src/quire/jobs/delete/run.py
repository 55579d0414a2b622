"""Deleting bytes: files of the store and objects, by what their rows said of them.

What is gone already is a success, and what cannot be removed keeps nothing else from being removed. Objects go where a row
promises one, and where an upload has announced one. Files go in any case: a move that was given up may have left one that the
row does not promise.

Runs in the owner: objects are deleted by its collector alone (A3).
"""

from __future__ import annotations

from dataclasses import dataclass

from quire.core.errors import QuireError
from quire.core.ids import ArtifactKey
from quire.durable.failpoints import hit
from quire.durable.files import Disk
from quire.jobs.copies import remove_files
from quire.jobs.locations import ArtifactLocation
from quire.objects.collector import Collector


@dataclass(frozen=True, slots=True)
class DeleteTask:
    """Artifacts whose bytes are to go."""

    places: tuple[ArtifactLocation, ...]


@dataclass(frozen=True, slots=True)
class Deleted:
    """What a task removed, and what it could not."""

    gone: tuple[ArtifactKey, ...]
    freed_bytes: int
    failed: tuple[tuple[ArtifactLocation, QuireError], ...] = ()


def delete(task: DeleteTask, *, disk: Disk, collector: Collector) -> Deleted:
    """Remove the bytes of every place of the task; those of `gone` are, on return."""
    failed: dict[ArtifactKey, QuireError] = {}
    # A name that came back after a crash, when its row has left the manifest, would never be looked for again: it is synced.
    faults = remove_files((path for place in task.places for path in (place.local, place.staged)), disk)
    for place in task.places:
        if (fault := faults.get(place.local) or faults.get(place.staged)) is not None:
            failed[place.key] = fault
    hit("jobs.delete.files_gone")
    by_url: dict[str, list[ArtifactLocation]] = {}
    for place in task.places:
        if place.may_have_remote:
            by_url.setdefault(place.url, []).append(place)
    for url, places in by_url.items():
        try:
            collector.delete(url, [place.object_key for place in places])
        except QuireError as error:
            for place in places:
                failed.setdefault(place.key, error)
    hit("jobs.delete.objects_gone")
    gone = [place for place in task.places if place.key not in failed]
    return Deleted(
        tuple(place.key for place in gone),
        sum(place.size_bytes for place in gone),
        tuple((place, failed[place.key]) for place in task.places if place.key in failed),
    )
