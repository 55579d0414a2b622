"""Creates a clone: a new store with its own identity that starts as a copy of another store and reads its objects (A12).

Terms
  parent    the store that was cloned, and every store that it was itself cloned from
  foreign   objects below a parent's prefix: read on demand, never written, swept or deleted by the clone

A clone lives in its parent's bucket, below its own store_id. Nothing large is copied: chunks, tables and compressed segments
stay where they are. Owner epochs continue from the parent's, so an epoch identifies its store (`manifest.reads.ParentStore`).

State after each step, and what happens if cloning stops there:
  registered         the parents keep what the clone would read     an operator removes it: `quire clones forget`
  files, rows        a directory that is not a store                refused by the next clone: not empty
  identity written   the same                                       the same
  complete           a store in its parent's owner epoch            refused until `quire takeover` gives it its own
  taken over         a store                                        opens
A clone that raises withdraws its registrations, unless the directory may already be complete: that store reads the objects.

Threads: one. Raises `InvalidInput`, `StillReferenced`, `ObjectNotFound`, `Corruption`, and what disk and object store raise.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterable
from contextlib import closing, suppress
from datetime import datetime
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import msgspec

from quire.archive.clones import CloneRegistration, register, release
from quire.archive.format import Position
from quire.archive.log_reader import RestorePoint
from quire.archive.replay import Replay
from quire.archive.state_files import read_remote_files
from quire.archive.store_choice import choose_store
from quire.archive.window import Line, list_archive, point_at, require_in_window
from quire.core.clock import Clock, SystemClock
from quire.core.errors import InvalidInput, QuireError, StillReferenced
from quire.core.time_parsing import requested_moment
from quire.durable.failpoints import hit
from quire.durable.files import Disk, OsDisk, remove_tree
from quire.durable.object_names import clone_key
from quire.manifest import tables as t
from quire.manifest.reads import ParentStore
from quire.manifest.records import MetaRecord
from quire.manifest.row_image import RowImage
from quire.objects.open import open_store
from quire.objects.options import options_of
from quire.objects.ownership import read_file
from quire.store import layout, object_access
from quire.store.backup import Progress, no_progress
from quire.store.opening import open_owner, open_reader
from quire.store.restoring import (
    correct_rows,
    open_written,
    quiet_settings,
    replay_point,
    replay_state,
    write_config,
)

if TYPE_CHECKING:
    from quire.manifest.reads import ReadTxn
    from quire.objects.api import DeletableStore, ObjectStore
    from quire.objects.options import StoreOptions


class Cloned(msgspec.Struct, frozen=True, kw_only=True):
    """The result of `clone`."""

    path: str
    store_id: str
    parent_id: str
    position: Position
    at_ms: int
    """The parent's clock at the moment that was cloned."""
    owner_epoch: int
    damaged: tuple[Position, ...] = ()
    """Later log objects of the parent that were requested and are damaged."""
    abandoned: Position | None = None
    """A newer state that the parent had at the requested time, and abandoned; clone it with its owner epoch."""
    abandoned_at_ms: int = 0
    remote_files: int
    seconds: float


class Released(msgspec.Struct, frozen=True, kw_only=True):
    """The result of `release_clone`: a clone that no longer reads any object of its parents."""

    store_id: str
    parents: tuple[str, ...]


def clone(
    source: str | os.PathLike[str],
    directory: str | os.PathLike[str],
    *,
    at: datetime | str | int | None = None,
    at_ms: int | None = None,
    epoch: int | None = None,
    store_id: str = "",
    options: StoreOptions | None = None,
    disk: Disk | None = None,
    clock: Clock | None = None,
    progress: Progress | None = None,
) -> Cloned:
    """Create a new store from the archive at `source`, a URL or a store's directory: its newest state, or the one `at`
    a moment, which is given as to `quire.restore`.

    `epoch` clones a state of that owner epoch, also if a takeover of an earlier state has abandoned it. The two stores are
    independent: neither sees what the other writes.
    """
    started = time.monotonic()
    disk, clock = disk or OsDisk(), clock or SystemClock()
    at_ms = requested_moment(at, at_ms, now_ms=clock.now_ms())
    root = os.path.abspath(os.fspath(directory))
    if layout.directory_state(disk, root) not in (layout.DirectoryState.NOTHING, layout.DirectoryState.EMPTY):
        raise InvalidInput("the directory is not empty", hint="clone into a new directory", path=root)
    url, store_id, recorded = _source(disk, os.fspath(source), store_id)
    options = options or recorded
    clone_id = str(uuid4())
    with closing(open_store(url, options=options)) as bucket:
        point = point_at(bucket, choose_store(bucket, store_id), at_ms, epoch=epoch)
        registered = [point.store_id]
        try:
            _register(bucket, point.store_id, clone_id, point, clock, root)
            hit("clone.registered")
            # Now that we are registered: the parent may have trimmed the moment before it saw the registration (A12).
            require_in_window(bucket, point.store_id, point.position)
            layout.make_directory(disk, root)
            replay, *_ = replay_state(bucket, point, disk, root, progress or no_progress)
            with replay:
                correct_rows(replay, root, url)
                *earlier, here = _parents(replay.rows(), point)
                for parent in earlier:
                    registered.append(parent.store_id)
                    _register(bucket, parent.store_id, clone_id, point, clock, root, parent)
                    # After our own registration: until that one is removed, it keeps what we would read.
                    bucket.head(clone_key(parent.store_id, point.store_id))
                _write_identity(replay.rows(), clone_id, (*earlier, here))
                write_config(disk, root, url, options)
                registered.clear()  # from here on the directory may be a store that reads the parents' objects
                replay.finish()
            hit("clone.made")
            owner_epoch = _begin(root, clock, disk)
        except BaseException:
            for parent_id in registered:
                with suppress(QuireError):
                    release(bucket, parent_id, clone_id)
            raise
    return Cloned(
        path=root,
        store_id=clone_id,
        parent_id=point.store_id,
        position=point.position,
        at_ms=point.at_ms,
        owner_epoch=owner_epoch,
        damaged=point.damaged,
        abandoned=point.abandoned,
        abandoned_at_ms=point.abandoned_at_ms,
        remote_files=len(replay.remote),
        seconds=time.monotonic() - started,
    )


def _source(disk: Disk, source: str, store_id: str) -> tuple[str, str, StoreOptions | None]:
    """Return (URL, store_id, options) of the archive to clone, given a URL or a store's directory, whose quire.toml has the
    options."""
    if "://" in source or layout.directory_state(disk, os.path.abspath(source)) is not layout.DirectoryState.STORE:
        return source if "://" in source else os.path.abspath(source), store_id, None
    root = os.path.abspath(source)
    settings = layout.existing_config(disk, root)
    owner = read_file(disk, root)  # every archived store has one; not opened, because this process may own the store
    if owner is None:
        raise InvalidInput("the store is not archived", hint="turn archiving on, then clone it", path=root)
    return layout.objects_url(root, settings), owner.store_id, options_of(settings.objects, "objects")


def _parents(rows: RowImage, point: RestorePoint) -> tuple[ParentStore, ...]:
    """Return the parents of the store that is cloned, and that store itself as the last one."""
    with rows.read() as txn:
        if txn.current_namespace()[1].legacy:
            hint = "run `quire takeover` on it once, then clone it"
            raise InvalidInput("the store is older than owner epochs", hint=hint, store_id=point.store_id)
        earlier, last_epoch = txn.parents(), txn.owner_epoch()
    cloned = ParentStore(
        store_id=point.store_id, last_epoch=last_epoch, at_ms=point.at_ms, position=str(point.position)
    )
    return *earlier, cloned


def _begin(root: str, clock: Clock, disk: Disk) -> int:
    """Open the clone for the first time, in a new owner epoch. Return that epoch."""
    settings = quiet_settings(disk, root)
    with open_owner(root, settings, clock, disk, takeover=True) as store:
        open_written(store)
        return store.info().owner_epoch


def _register(
    bucket: DeletableStore,
    parent_id: str,
    clone_id: str,
    point: RestorePoint,
    clock: Clock,
    root: str,
    parent: ParentStore | None = None,
) -> None:
    registration = CloneRegistration(
        clone_id=clone_id,
        position=parent.position if parent is not None else str(point.position),
        at_ms=parent.at_ms if parent is not None else point.at_ms,
        registered_at_ms=clock.now_ms(),
        host=os.uname().nodename,
        path=root,
    )
    register(bucket, parent_id, registration)


def _write_identity(rows: RowImage, clone_id: str, parents: tuple[ParentStore, ...]) -> None:
    pack = t.META.key.pack
    meta = [
        (pack("store_id"), MetaRecord(text=clone_id)),
        (pack(t.PARENTS), MetaRecord(text=msgspec.json.encode(parents).decode())),
    ]
    rows.apply([[(t.META.name, t.META.rows.encode_all(meta), [])]])


# ── release ───────────────────────────────────────────────────────────────────────────────────────────────────────────
def foreign_objects(txn: ReadTxn, disk: Disk, root: str) -> int:
    """Return the number of its parents' objects that a clone still reads."""
    return _foreign_objects(txn, (file.key for file in read_remote_files(disk, root).values()))


def _foreign_objects(txn: ReadTxn, files: Iterable[str]) -> int:
    """Return the number of objects of parents among those that rows name and these `files`."""
    prefixes = tuple(f"{parent.store_id}/" for parent in txn.parents())
    spaces = {key[0] for key, row in txn.scan(t.REMOTE_NAMESPACE) if row.prefix.startswith(prefixes)}
    tables: tuple[t.Table[Any], ...] = (t.CHUNK_CATALOG, t.CHUNK_DELTA_INDEX, t.WAL_CATALOG)
    rows = sum(row.namespace_id in spaces for table in tables for _, row in txn.scan(table))
    return rows + sum(key.startswith(prefixes) for key in files)


def _foreign_objects_of_archive(bucket: ObjectStore, clone_id: str, disk: Disk) -> int:
    """Return the number of parents' objects that the oldest restorable moment of a clone's archive reads. Later ones read no
    others: a clone begins with all that it will ever read."""
    oldest = Line(bucket, list_archive(bucket, clone_id)).oldest()
    if oldest is None:
        return 0
    scratch = tempfile.mkdtemp(prefix="quire-release-")
    try:
        with Replay(disk, scratch) as replay:
            replay_point(bucket, point_at(bucket, clone_id, oldest.at_ms), replay, no_progress)
            with replay.rows().read() as txn:
                return _foreign_objects(txn, [file.key for file in replay.remote.values()])
    finally:
        remove_tree(disk, scratch)


def release_clone(directory: str | os.PathLike[str], *, options: StoreOptions | None = None) -> Released:
    """Withdraw a clone's registrations, so that its parents may delete what they kept for it.

    Raises `StillReferenced` while the clone, or a restorable moment of its own archive, still reads any of their objects.
    """
    root, disk = os.path.abspath(os.fspath(directory)), OsDisk()
    with open_reader(root, None, SystemClock(), disk) as store, store.manifest.read() as txn:
        parents, clone_id = txn.parents(), txn.store_id()
        count = foreign_objects(txn, disk, root)
        url = store.objects_url
        options = options or object_access.options_of(txn, store.settings, url)
        is_archived = store.settings.archive.mode != "off"
    if not parents:
        raise InvalidInput("this store is not a clone", hint="`quire clones ls` lists the clones of a store", path=root)
    if count:
        hint = "drop the databases that it was cloned with, or run `quire clones forget` in the parent"
        raise StillReferenced(f"the clone still reads {count:,} objects of its parents", hint=hint, path=root)
    with closing(open_store(url, options=options)) as bucket:
        # With archiving off, moments are not kept restorable.
        if is_archived and (count := _foreign_objects_of_archive(bucket, clone_id, disk)):
            hint = "wait until they have left the window (archive.retain_seconds), or run `quire clones forget` in the parent"
            what = f"archived moments of the clone still read {count:,} objects of its parents"
            raise StillReferenced(what, hint=hint, path=root)
        for parent in parents:
            release(bucket, parent.store_id, clone_id)
    return Released(store_id=clone_id, parents=tuple(parent.store_id for parent in parents))
