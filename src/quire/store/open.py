"""`quire.open`: opens the store in a directory.

    >>> import tempfile
    >>> with open(tempfile.mkdtemp()) as store:
    ...     created = store.create("shop", "pages")
    ...     [(info.name, info.kind.name, info.snapshots) for info in store.databases()]
    [('shop', 'PAGES', 0)]

Threads: one at a time for one directory.
Raises `StoreLocked`, `StoreNotFound`, `NotWritable`, `InvalidInput`, `InvalidConfig`, `ConfigMismatch`, `ManifestDamaged`,
`FormatTooNew`, `ReadOnly`, `StoreFenced`.
"""

from __future__ import annotations

import os

from quire.core.clock import Clock, SystemClock
from quire.core.errors import InvalidInput, ReadOnly
from quire.core.settings import StoreSettings
from quire.durable.files import Disk, OsDisk
from quire.store.archive_copy import restored_copy
from quire.store.opening import open_owner, open_reader
from quire.store.store import Mode, Store


def open(  # noqa: A001 - `quire.open` reads as it should
    path: str | os.PathLike[str],
    mode: Mode = "rw",
    *,
    create: bool = True,
    settings: StoreSettings | None = None,
    clock: Clock | None = None,
    repair: bool = False,
    takeover: bool = False,
    discard: bool = False,
    moved: bool = False,
    disk: Disk | None = None,
) -> Store:
    """Open the store at `path`. With mode "rw", become its owner and, unless `create=False`, create it if it does not exist.

    `settings` replace those of quire.toml for this opening, except for the location of objects, which always comes from
    quire.toml (for a new store it is written there). `repair=True` repairs what `quire manifest check` finds and can recompute.
    `takeover=True` makes this directory the owner of its bucket and fences any other copy of the store that writes there;
    `discard=True` does so even if the archive has newer changes than this directory, which are given up. `moved=True` accepts
    that the objects were copied to the place that quire.toml now names. `clock` and `disk` are seams for tests; LMDB and remote
    objects do not go through `disk`.
    """
    root = os.path.abspath(os.fspath(path))
    clock, disk = clock or SystemClock(), disk or OsDisk()
    if mode == "r":
        if repair or takeover or moved:
            raise ReadOnly("a reader cannot repair, take over or move", hint='open with mode="rw"', path=root)
        store = open_reader(root, settings, clock, disk)
    elif mode == "rw":
        store = open_owner(
            root,
            settings,
            clock,
            disk,
            create=create,
            repair=repair,
            takeover=takeover,
            discard=discard,
            moved=moved,
        )
    else:
        raise InvalidInput("mode must be 'rw' or 'r'", mode=mode)
    store._open_copy = restored_copy
    return store
