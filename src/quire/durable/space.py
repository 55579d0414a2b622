"""Measures the disk space of files: the blocks that the file system has allocated, not the file length.

The two differ for files with holes, for space reserved in advance, and by the unused part of each file's last block. Users
compare with `du`, and disk quotas count the same way, so everything that reports or limits space uses this module. Directories
take space too, and are counted.

Reads names and sizes only; a file that is removed during the measurement counts as 0 bytes. Threads: any. Raises what the
system raises for a directory that cannot be read.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import NamedTuple

BLOCK_BYTES = 512
"""The unit of `st_blocks`, whatever the file system's block size (fixed on Linux, left open by POSIX)."""

STORE_ID_CHARS = 32
"""The minimum length of a store id, which distinguishes the directory of a store's epochs from that of a database."""


def allocated_bytes(path: str) -> int:
    """Return the bytes allocated to a file or to a directory itself; 0 if it does not exist."""
    try:
        return os.lstat(path).st_blocks * BLOCK_BYTES
    except FileNotFoundError:
        return 0


def walk_allocated(path: str) -> Iterator[tuple[str, int]]:
    """Yield (path, bytes) for a directory and everything below it; a file with several hard links is counted once."""
    seen: set[tuple[int, int]] = set()
    todo = [path]
    while todo:
        folder = todo.pop()
        yield folder, allocated_bytes(folder)
        with suppress(FileNotFoundError), os.scandir(folder) as listing:
            for entry in listing:
                if entry.is_dir(follow_symlinks=False):
                    todo.append(entry.path)
                    continue
                with suppress(FileNotFoundError):
                    status = entry.stat(follow_symlinks=False)
                    if status.st_nlink > 1:
                        if (status.st_dev, status.st_ino) in seen:
                            continue
                        seen.add((status.st_dev, status.st_ino))
                    yield entry.path, status.st_blocks * BLOCK_BYTES


class Space(NamedTuple):
    """The space of a store's directory, by owner. The parts add up to the total, which matches `du`."""

    total_bytes: int
    databases: dict[int, int]
    """Database → bytes of its files, and of its objects if they are in the directory."""
    others: dict[str, int]
    """Bytes that belong to no database, by part: `manifest`, `objects`, `quarantine`, `scratch`, `store` (the rest)."""


def measure(root: str) -> Space:
    """Measure every file of the store at `root`."""
    databases: Counter[int] = Counter()
    others: Counter[str] = Counter()
    for path, size in walk_allocated(root):
        whose = owner_of(os.path.relpath(path, root))
        if isinstance(whose, int):
            databases[whose] += size
        else:
            others[whose] += size
    return Space(databases.total() + others.total(), dict(databases), dict(others))


def measure_database(root: str, db_id: int) -> int:
    """Return the bytes of one database: its directories, and its objects if they are in the store's directory."""
    return measure_databases(root, [db_id])[db_id]


def measure_databases(root: str, db_ids: Iterable[int]) -> dict[int, int]:
    """Return the bytes of each of some databases, without examining other databases."""
    prefixes = ["objects"]
    with suppress(FileNotFoundError), os.scandir(os.path.join(root, "objects")) as stores:
        for store in stores:
            if len(store.name) >= STORE_ID_CHARS:
                with suppress(FileNotFoundError, NotADirectoryError):
                    epochs = os.listdir(os.path.join(store.path, "e"))
                    prefixes += [f"objects/{store.name}/e/{epoch}" for epoch in epochs]
    allocated: dict[int, int] = {}
    for db_id in db_ids:
        places = [f"pages/{db_id:08x}", f"lsm/{db_id:08x}", f"streams/{db_id}"]
        places += [f"{prefix}/{part}" for prefix in prefixes for part in (f"{db_id:08x}", f"manifest/{db_id}")]
        listings = (walk_allocated(os.path.join(root, place)) for place in places)
        allocated[db_id] = sum(
            size for part in listings for path, size in part if owner_of(os.path.relpath(path, root)) == db_id
        )
    return allocated


_OF_DATABASE = re.compile(r"(?:pages|lsm)/([0-9a-f]{8})(?:/.*)?")
_OF_STREAM = re.compile(r"streams/([0-9]{1,20})(?:/.*)?")
_EPOCH = r"(?:[0-9a-f-]{32,36}/e/[0-9a-f]{8}/)?"
_ARTIFACT = re.compile(rf"objects/{_EPOCH}([0-9a-f]{{8}})(?:/[0-9a-f]{{8}}(?:/[^/]+)?)?")
_LOG_OBJECT = re.compile(rf"objects/{_EPOCH}manifest/([0-9]{{1,20}})(?:/.*)?")


def owner_of(path: str) -> int | str:
    """Return the owner of a path in a store, file or directory: a database's id, or the part of the store.

    >>> (
    ...     owner_of("pages/0000000a/wal/00000001.seg"),
    ...     owner_of("objects/0000000a/00000000/base:00000001"),
    ...     owner_of("store.lock"),
    ... )
    (10, 10, 'store')
    """
    if (match := _OF_DATABASE.fullmatch(path) or _ARTIFACT.fullmatch(path)) is not None:
        return int(match[1], 16)
    if (match := _OF_STREAM.fullmatch(path) or _LOG_OBJECT.fullmatch(path)) is not None:
        return int(match[1])
    first = path.partition("/")[0]
    if first.startswith("manifest.lmdb"):
        return "manifest"
    return first if first in ("objects", "quarantine", "scratch") else "store"
