"""Removes files of page databases and objects that killed processes and dropped databases leave behind, and that no row names.

  left                                         by                                           removed
  pages/<db>/….tmp                             a hydration, or a position being written     an hour after it was touched
  objects/.tmp/…                               a put into a directory of objects            an hour after it began
  pages/<db>/follow.json, the directories      a database that was dropped                  with its tombstone, or here

Only files with names of ours are removed; any other file stays, and so does its directory. Streams and key-value sets have
their own sweeps, in their engines.

Threads: the owner's maintenance, about once an hour. Raises nothing because of a single file: the next round tries it again.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress

from quire.core.errors import StorageFault, Unavailable
from quire.core.events import emit
from quire.durable import names
from quire.durable.failpoints import hit
from quire.durable.files import Disk
from quire.durable.names import parse_stream_home
from quire.jobs.context import JobContext
from quire.manifest import tables as t
from quire.manifest.ops.base import Counter
from quire.manifest.records import DbStatus
from quire.objects.guarded import path_store
from quire.objects.local import TEMPORARY_AGE_SECONDS


def sweep_leftovers(ctx: JobContext) -> int:
    """Remove all leftovers; return the number of files."""
    ctx.manifest.recount.finish()  # rows decide which files are leftovers, so they must be verified since the open (N3)
    return _staged_objects(ctx) + _temporary(ctx) + _dropped(ctx)


def _staged_objects(ctx: JobContext) -> int:
    try:
        store = ctx.open_store(ctx.objects_url)
        return local.sweep_temporary() if (local := path_store(store)) is not None else 0
    except (StorageFault, Unavailable) as error:
        emit("warning", "leftovers.not_removed", store=ctx.objects_url, error=str(error))
        return 0


def _temporary(ctx: JobContext) -> int:
    """Remove temporary files not modified for an hour: a live writer modifies its file many times within that."""
    horizon = ctx.clock.now_ms() / 1000 - TEMPORARY_AGE_SECONDS
    home = os.path.join(ctx.root, names.PAGES)
    aged = [
        path for path in _files(ctx.disk, home) if path.endswith(names.TEMPORARY) and _touched_seconds(path) <= horizon
    ]
    return sum(_remove(ctx.disk, path) for path in aged if _is_ours(ctx.root, path))


def _dropped(ctx: JobContext) -> int:
    """Remove files of databases that are known to be gone: their ids were allocated and have no row.

    An id that was never allocated may belong to a database that is newer than the manifest, if that was restored from an older
    copy: its files stay, and `quire why` reports them. So do the files of a database that is closed because its row is lost.
    """
    # Before the rows are read: a database has its row before it has files, so the row of every directory listed here is seen.
    homes = _names(ctx.disk, os.path.join(ctx.root, names.PAGES))
    with ctx.manifest.read() as txn:
        given_out, known = txn.next_id(Counter.DB), set(txn.owners(t.DB)) | txn.refused_databases()
    removed = 0
    for name in homes:
        db_id = int(name, 16) if len(name) == 8 and set(name) <= set("0123456789abcdef") else 0
        if 0 < db_id < given_out and db_id not in known:
            removed += remove_home(ctx.disk, ctx.root, db_id)
    return removed


def has_dropped_streams(ctx: JobContext) -> bool:
    """Return whether a dropped stream still has a directory: its drop was interrupted, and its engine must sweep it."""
    homes = {parse_stream_home(name) for name in _names(ctx.disk, os.path.join(ctx.root, names.STREAMS))}
    if not homes:
        return False
    with ctx.manifest.read() as txn:
        given_out = txn.next_id(Counter.DB)
        refused = txn.refused_databases()
        asked = (db_id for db_id in homes if db_id is not None and 0 < db_id < given_out and db_id not in refused)
        rows = (txn.database(db_id) for db_id in asked)
        return any(row is None or row.status is DbStatus.TOMBSTONED for row in rows)


def remove_home(disk: Disk, root: str, db_id: int) -> int:
    """Remove the files of a page database that is gone, and its directories if empty by then; return the number of files."""
    home = os.path.join(root, os.path.dirname(names.pages_wal_dir(db_id)))
    removed = sum(_remove(disk, path) for path in list(_files(disk, home)) if _is_ours(root, path))
    hit("jobs.leftovers.removed")
    remove_empty(home, disk)
    return removed


def remove_empty(folder: str, disk: Disk) -> None:
    """Remove a directory and its subdirectories where they are empty. A directory that stays is harmless."""
    try:
        for name in disk.names(folder):
            remove_empty(os.path.join(folder, name), disk)
        disk.remove_dir(folder)
    except (FileNotFoundError, StorageFault):
        pass  # it does not exist, is a file, or is not empty


def _is_ours(root: str, path: str) -> bool:
    return names.parse_path(os.path.relpath(path, root).removesuffix(names.TEMPORARY)) is not None


def _files(disk: Disk, folder: str) -> Iterator[str]:
    for name in _names(disk, folder):
        path = os.path.join(folder, name)
        if os.path.isdir(path):
            yield from _files(disk, path)
        else:
            yield path


def _names(disk: Disk, folder: str) -> list[str]:
    """Return the names in a directory. One that cannot be read is reported and counts as empty, so that the sweep continues."""
    try:
        return disk.names(folder)
    except FileNotFoundError:
        return []
    except StorageFault as fault:
        emit("warning", "leftovers.not_read", path=folder, error=str(fault))
        return []


def _touched_seconds(path: str) -> float:
    with suppress(FileNotFoundError):
        return os.stat(path).st_mtime
    return float("inf")  # gone: its writer was alive after all


def _remove(disk: Disk, path: str) -> bool:
    try:
        disk.remove(path)
    except FileNotFoundError:
        return False
    except StorageFault as fault:
        emit("warning", "leftovers.not_removed", path=path, error=str(fault))
        return False
    return True
