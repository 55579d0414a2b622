"""Listing a range of an object store's keys, and comparing it with the names that the manifest knew a moment ago.

Rules
  1. A name is known by 8 bytes of its hash: two names in 10^19 are confused, and then an orphan stays, or a missing object is
     not seen; nothing is ever deleted for it.
  2. What comes back are differences, and only so many of them: a listing never leaves the executor.

Safe to run on an executor.
"""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import blake2b
from itertools import takewhile

import numpy as np

from quire.durable.failpoints import hit
from quire.jobs.runner import Tools

DIFFERENCES_MAX = 4_096
"""Of each sort, of one range."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ListTask:
    """Keys to be listed: those after `start_after` and, if it says one, up to `until`."""

    url: str
    prefix: str = ""
    start_after: str = ""
    until: str = ""
    known: bytes = b""
    """Hashes of the names that should be there: u64, rising."""


@dataclass(frozen=True, slots=True)
class Stray:
    """An object that no name is known of."""

    url: str
    key: str
    size_bytes: int
    modified_ms: int


@dataclass(frozen=True, slots=True)
class Listed:
    """What a range turned out to hold."""

    objects: int
    size_bytes: int
    strays: tuple[Stray, ...]
    missing: tuple[int, ...]
    """Hashes of known names that no object has."""
    is_cut: bool
    """Whether there are more differences than these."""


def name_hash(key: str) -> int:
    """Rule 1."""
    return int.from_bytes(blake2b(key.encode(), digest_size=8).digest(), "little")


def list_range(task: ListTask, tools: Tools) -> Listed:
    """List a range, compare it with what should be there."""
    known = np.frombuffer(task.known, "<u8")
    seen = np.zeros(len(known), np.bool_)
    objects = size = 0
    strays: list[Stray] = []
    pages = tools.open_store(task.url).list_pages(task.prefix, start_after=task.start_after)
    for page in pages:
        inside = list(takewhile(lambda info: not task.until or info.key <= task.until, page))
        objects += len(inside)
        size += sum(info.size_bytes for info in inside)
        hashes = np.array([name_hash(info.key) for info in inside], "<u8")
        places = np.searchsorted(known, hashes)
        found = places < len(known)
        found[found] = known[places[found]] == hashes[found]
        seen[places[found]] = True
        strays += [
            Stray(task.url, info.key, info.size_bytes, info.modified_ms)
            for info, there in zip(inside, found.tolist())
            if not there
        ]
        if len(inside) < len(page):
            break
    hit("jobs.sweep.listed")
    missing = known[~seen].tolist()
    is_cut = max(len(strays), len(missing)) > DIFFERENCES_MAX
    return Listed(objects, size, tuple(strays[:DIFFERENCES_MAX]), tuple(missing[:DIFFERENCES_MAX]), is_cut)
