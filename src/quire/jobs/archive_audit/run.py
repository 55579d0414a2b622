"""The task that reads objects of an archive and compares them with the log: parts of bases, tables, compressed segments.

An object that cannot be read now is neither good nor bad: its error fails the task. Safe to run on an executor.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from quire.core.errors import ObjectNotFound
from quire.core.limits import MIB
from quire.jobs.runner import Tools

STEP_BYTES = 8 * MIB


@dataclass(frozen=True, slots=True)
class NamedObject:
    """An object that the log names, with its expected size and digest."""

    key: str
    size_bytes: int
    sha256: bytes


@dataclass(frozen=True, slots=True)
class ObjectsTask:
    """Objects to read and compare."""

    url: str
    objects: tuple[NamedObject, ...]


@dataclass(frozen=True, slots=True)
class ObjectDifference:
    """An object that differs from the log."""

    state: str
    """MISSING or ALTERED."""
    key: str
    what: str
    size_bytes: int = 0


def compare_objects(task: ObjectsTask, tools: Tools) -> list[ObjectDifference]:
    """Read the objects completely, and return only those that differ."""
    differences = (
        _difference(named, task.url, tools) and _difference(named, task.url, tools) for named in task.objects
    )
    return [difference for difference in differences if difference is not None]


def _difference(named: NamedObject, url: str, tools: Tools) -> ObjectDifference | None:
    """Return how an object differs from the log, or `None`. Called twice before a report: bytes may be garbled in transit."""
    store = tools.open_store(url)
    try:
        size = store.head(named.key).size_bytes
        if size != named.size_bytes:
            what = f"it has {size} bytes instead of {named.size_bytes}"
            return ObjectDifference("ALTERED", named.key, what, size)
        sha = hashlib.sha256()
        for start in range(0, size, STEP_BYTES):
            sha.update(store.get_range(named.key, start, min(STEP_BYTES, size - start)))
    except ObjectNotFound:
        return ObjectDifference("MISSING", named.key, "the object is missing", named.size_bytes)
    if sha.digest() != named.sha256:
        return ObjectDifference("ALTERED", named.key, "its SHA-256 does not match the log", size)
    return None
