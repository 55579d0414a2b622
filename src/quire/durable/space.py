"""What files take on the disk: the blocks that the file system has given, not the length that a file shows.

The two differ where a file has holes, where its space was reserved ahead, and by the rest of each file's last block. People
look at `du`, and quotas of machines count the same: so everything that shows or limits space asks here. Directories take space
too, and are counted.

Reads names and sizes only; what is removed while it is looked at takes nothing. Any thread. Raises what the system raises for a
directory that cannot be read.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import NamedTuple

BLOCK_BYTES = 512
"""The unit of `st_blocks`, whatever the file system's own is (POSIX leaves it open, Linux does not)."""

STORE_ID_CHARS = 32
"""At least so many, by which the directory of a store's epochs is told from one of a database."""


def given_bytes(path: str) -> int:
    """Bytes that the file system has given to a file or directory itself; 0 if there is none."""
    try:
        return os.lstat(path).st_blocks * BLOCK_BYTES
    except FileNotFoundError:
        return 0


def given_below(path: str) -> Iterator[tuple[str, int]]:
    """(path, bytes) of everything below a directory, itself included; a file with several names in it is given once."""
    seen: set[tuple[int, int]] = set()
    todo = [path]
    while todo:
        folder = todo.pop()
        yield folder, given_bytes(folder)
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
    """What a store's directory takes, and whose it is. The parts add up to the total, which is what `du` says."""

    total_bytes: int
    databases: dict[int, int]
    """Database → what its files take, and its objects if they are in the directory."""
    others: dict[str, int]
    """What belongs to no database: `manifest`, `objects`, `quarantine`, `scratch`, `store` (the rest)."""


def measure(root: str) -> Space:
    """Look at every file of the store at `root`."""
    databases: Counter[int] = Counter()
    others: Counter[str] = Counter()
    for path, size in given_below(root):
        whose = owner_of(os.path.relpath(path, root))
        if isinstance(whose, int):
            databases[whose] += size
        else:
            others[whose] += size
    return Space(databases.total() + others.total(), dict(databases), dict(others))


def measure_database(root: str, db_id: int) -> int:
    """What one database takes: its directories and its objects, as far as they are in the store's directory."""
    return measure_databases(root, [db_id])[db_id]


def measure_databases(root: str, db_ids: Iterable[int]) -> dict[int, int]:
    """The same of some databases; nothing of the others is looked at."""
    prefixes = ["objects"]
    with suppress(FileNotFoundError), os.scandir(os.path.join(root, "objects")) as stores:
        for store in stores:
            if len(store.name) >= STORE_ID_CHARS:
                with suppress(FileNotFoundError, NotADirectoryError):
                    epochs = os.listdir(os.path.join(store.path, "e"))
                    prefixes += [f"objects/{store.name}/e/{epoch}" for epoch in epochs]
    given: dict[int, int] = {}
    for db_id in db_ids:
        places = [f"pages/{db_id:08x}", f"lsm/{db_id:08x}", f"streams/{db_id}"]
        places += [f"{prefix}/{part}" for prefix in prefixes for part in (f"{db_id:08x}", f"manifest/{db_id}")]
        listings = (given_below(os.path.join(root, place)) for place in places)
        given[db_id] = sum(
            size for part in listings for path, size in part if owner_of(os.path.relpath(path, root)) == db_id
        )
    return given


_OF_DATABASE = re.compile(r"(?:pages|lsm)/([0-9a-f]{8})(?:/.*)?")
_OF_STREAM = re.compile(r"streams/([0-9]{1,20})(?:/.*)?")
_EPOCH = r"(?:[0-9a-f-]{32,36}/e/[0-9a-f]{8}/)?"
_ARTIFACT = re.compile(rf"objects/{_EPOCH}([0-9a-f]{{8}})(?:/[0-9a-f]{{8}}(?:/[^/]+)?)?")
_LOG_OBJECT = re.compile(rf"objects/{_EPOCH}manifest/([0-9]{{1,20}})(?:/.*)?")


def owner_of(path: str) -> int | str:
    """Whose a path in a store is, file or directory: a database's id, or what else it is part of.

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
