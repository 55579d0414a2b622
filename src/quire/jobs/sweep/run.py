"""The task that lists a range of an object store's keys, and yields every object with the hash of its name.

Names that do not belong to artifacts (manifest logs, tables, unrelated files) are counted and are never orphans. Known names
are matched on the executor (`Runner.unmatched`); only differences, and one count for each range, are returned. Safe to run on
an executor.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import takewhile

from quire.core.ids import ArtifactKey
from quire.durable.failpoints import hit
from quire.durable.names import parse_object_key
from quire.jobs.runner import Tools
from quire.objects.api import ObjectInfo


@dataclass(frozen=True, slots=True, kw_only=True)
class ListTask:
    """Keys to list: those after `start_after` and, if it is not empty, up to `until`."""

    url: str
    prefix: str = ""
    start_after: str = ""
    until: str = ""
    databases: tuple[int, int] | None = None
    """First and last database whose objects are listed, for a space where other stores may have objects too."""


@dataclass(frozen=True, slots=True)
class Stray:
    """A listed object; a stray if its name is not known."""

    url: str
    key: str
    size_bytes: int
    modified_ms: int


@dataclass(frozen=True, slots=True)
class Listed:
    """The total of a range."""

    objects: int
    size_bytes: int


def name_hash(key: str) -> int:
    """Return an 8-byte hash of a name. A collision, two in 10^19, hides an orphan or a missing object, and deletes nothing."""
    return int.from_bytes(blake2b(key.encode(), digest_size=8).digest(), "little")


def artifact_of(key: str, prefix: str) -> ArtifactKey | None:
    """Return the artifact that an object below a prefix is named after, or `None`."""
    if not prefix:
        return parse_object_key(key)
    return parse_object_key(key[len(prefix) + 1 :]) if key.startswith(f"{prefix}/") else None


def list_range(task: ListTask, tools: Tools) -> Iterator[tuple[int | None, Stray | Listed]]:
    """Yield the objects of a range by hash, then its total."""
    objects = size = 0
    for page in _pages(task, tools):
        inside = list(takewhile(lambda info: not task.until or info.key <= task.until, page))
        for info in inside:
            if artifact_of(info.key, task.prefix) is None:
                continue
            yield name_hash(info.key), Stray(task.url, info.key, info.size_bytes, info.modified_ms)
        objects += len(inside)
        size += sum(info.size_bytes for info in inside)
        if len(inside) < len(page) and task.databases is None:
            break
    hit("jobs.sweep.listed")
    yield None, Listed(objects, size)


def _pages(task: ListTask, tools: Tools) -> Iterator[Sequence[ObjectInfo]]:
    store = tools.open_store(task.url)
    if task.databases is None:
        yield from store.list_pages(task.prefix, start_after=task.start_after)
        return
    first, last = task.databases
    for database in range(first, last + 1):
        yield from store.list_pages(f"{database:08x}", start_after=task.start_after)
