"""Opens the store in a directory, as its owner or as a reader. `quire.open` (open.py) and restores call it.

Rules
  1. Opening either returns a complete store, or raises and leaves the directory as it was (creating a store: layout.py).
  2. The lock is taken before anything is written, and released if opening fails.

Threads: one at a time for one directory.
Raises `StoreLocked`, `StoreNotFound`, `NotWritable`, `InvalidInput`, `InvalidConfig`, `ConfigMismatch`, `ManifestDamaged`,
`FormatTooNew`, `ReadOnly`, `StoreFenced`.
"""

from __future__ import annotations

import os

from quire.core.clock import Clock
from quire.core.errors import InvalidInput, StorageFault
from quire.core.events import emit
from quire.core.settings import StoreSettings
from quire.durable import names
from quire.durable.files import Disk, remove_if_exists
from quire.durable.locks import FileLock
from quire.manifest.store import ManifestStore
from quire.store import layout, object_access, object_location
from quire.store.archiving import open_archived, open_for_reader, refuse_standby, take_over
from quire.store.shared_stores import register_opened
from quire.store.store import Store


def open_reader(root: str, given: StoreSettings | None, clock: Clock, disk: Disk) -> Store:
    """Open the store at `root` for reading."""
    layout.need_store(disk, root)
    settings = layout.read_config(disk, root, given)
    path = os.path.join(root, names.MANIFEST)
    manifest = ManifestStore.open(path, mode="r", settings=settings.manifest, clock=clock)
    try:
        with manifest.read() as txn:
            object_location.check(txn, root, settings)
        store = open_for_reader(root, settings, manifest, disk)
    except BaseException:
        manifest.close()
        raise
    return register_opened(store, "r")


def open_owner(
    root: str,
    given: StoreSettings | None,
    clock: Clock,
    disk: Disk,
    *,
    create: bool = False,
    repair: bool = False,
    takeover: bool = False,
    discard: bool = False,
    moved: bool = False,
) -> Store:
    """Open the store at `root` as its owner."""
    state = layout.directory_state(disk, root)
    if state is not layout.DirectoryState.STORE and not create:
        raise layout.not_found(root)
    if state is layout.DirectoryState.FOREIGN:
        raise layout.not_empty(root)
    if state is layout.DirectoryState.NOTHING:
        layout.make_directory(disk, root)
    refuse_standby(disk, root)
    lock = FileLock.acquire(os.path.join(root, names.LOCK), clock)
    try:
        # Again: another process may have created the store, or a standby, before we got the lock.
        refuse_standby(disk, root)
        state = layout.directory_state(disk, root)
        if state is layout.DirectoryState.EMPTY:
            layout.write_config(disk, root, given.object_store if given else "")
        settings = layout.read_config(disk, root, given)
        if state is not layout.DirectoryState.STORE:
            _make_manifest(disk, root, settings, clock)
        manifest = ManifestStore.open(
            os.path.join(root, names.MANIFEST), settings=settings.manifest, clock=clock, create=False, repair=repair
        )
    except BaseException:
        lock.close()
        raise
    manifest.feed.settings = settings.feed
    manifest.writer.owner_check = lock.verify
    try:
        store = open_archived(root, settings, manifest, lock, disk)
    except BaseException:
        manifest.close()
        lock.close()
        raise
    try:
        _check_object_access(store, takeover=takeover, discard=discard, moved=moved)
        _sweep(disk, root)  # before the archive's and upkeep's threads write owner.json and stage files
        if store.archive is not None:
            store.rights.remember_place()  # now: the archive still puts objects after the manifest's writer has ended
            store.archive.start()  # after a takeover: it writes in the new owner epoch
        # After `start`, which sets itself as the receiver of commits: the backup's recorder passes them on to it.
        store.backup_recorder.attach(manifest.writer)
        if takeover:
            manifest.jobs.requeue_all()
        manifest.jobs.recover()
        manifest.feed.prune()
        if settings.maintenance.enabled:
            store.start_upkeep()
    except BaseException:
        store.close()
        raise
    return register_opened(store, "rw")


def _check_object_access(store: Store, *, takeover: bool, discard: bool, moved: bool) -> None:
    """Check that the objects are at the location in quire.toml and that this directory may write them, without a request to a
    bucket unless `takeover` or `moved` is set."""
    if moved:
        store.moved_objects = object_access.accept_moved(store.context, store.path, store.settings)
    else:
        with store.manifest.read() as txn:
            object_location.check(txn, store.path, store.settings)
    if takeover:
        take_over(store, discard=discard)
    elif object_location.needs_owner(store.path, object_location.place_of(store.path, store.settings.object_store)):
        _refuse_unfinished_clone(store)  # first: it says more
        store.rights.refuse_fenced()


def _refuse_unfinished_clone(store: Store) -> None:
    """Refuse a clone that was interrupted before its own owner epoch: it would put and delete below its parent's prefix."""
    with store.manifest.read() as txn:
        is_own = txn.store_of_epoch(txn.owner_epoch()) == txn.store_id()
    if not is_own:
        hint = "`quire takeover` completes it; or remove the directory, and run `quire clones forget` in the parent"
        raise InvalidInput("the clone was interrupted and is incomplete", hint=hint, path=store.path)


def _sweep(disk: Disk, root: str) -> None:
    """Remove leftovers of an earlier process. What cannot be removed costs only space, and is swept at the next opening."""
    try:
        layout.sweep_debris(disk, root)
        layout.sweep_scratch(disk, root)
    except StorageFault as fault:
        emit("warning", "store.sweep_failed", path=root, error=str(fault))


def _make_manifest(disk: Disk, root: str, settings: StoreSettings, clock: Clock) -> None:
    """Create the manifest of a new store. It gets its final name only when it is complete (layout.py)."""
    layout.sweep_debris(disk, root)
    unfinished = os.path.join(root, layout.UNFINISHED)
    ManifestStore.open(unfinished, settings=settings.manifest, clock=clock).close()
    disk.rename(unfinished, os.path.join(root, names.MANIFEST))
    disk.sync_dir(root)
    remove_if_exists(disk, unfinished + "-lock")
