"""Wires a store and its archive together: the disk that records changes, remote files of a restore, and takeovers.

Threads: the opener's. Raises `InvalidConfig`, `InvalidInput`, `StoreFenced`, `ArchiveAhead`.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable
from contextlib import closing
from typing import TYPE_CHECKING
from uuid import uuid4

from quire.archive.archiver import Archiver
from quire.archive.backup_recorder import BackupRecorder
from quire.archive.clones import CloneRegistration, kept_for_takeover
from quire.archive.log_reader import epochs
from quire.archive.recorder import REMOTE_FILES
from quire.archive.remote_files import RemoteFiles
from quire.archive.sealing import (
    former_epoch,
    newest_missing_position,
    note_parent,
    positions_after,
    seal_former,
)
from quire.archive.state_files import Origin, StandbyPhase, read_origin, read_standby_state, take_archive_state
from quire.archive.window import require_in_window
from quire.core.barrier import Barrier
from quire.core.errors import ArchiveAhead, InvalidConfig, StoreFenced
from quire.manifest.namespaces import Parent
from quire.objects.ownership import READ_ONLY_COMMANDS, newer_owner
from quire.store import object_location
from quire.store.layout import objects_url
from quire.store.object_access import open_place
from quire.store.reader_files import ReaderFiles
from quire.store.restore_drill import drill
from quire.store.store import Store

if TYPE_CHECKING:
    from quire.archive.format import Position
    from quire.core.settings import StoreSettings
    from quire.durable.files import Disk
    from quire.durable.locks import FileLock
    from quire.manifest.store import ManifestStore
    from quire.objects.api import ObjectStore
    from quire.store.wiring import Wiring


def open_archived(root: str, settings: StoreSettings, manifest: ManifestStore, lock: FileLock, disk: Disk) -> Store:
    """Open the store of an owner. With archiving on, every file it opens for writing hands its changes to the archiver (A5)."""
    store: Store
    wiring: Wiring
    below = _with_remote_files(disk, root, lambda: store.objects)
    if settings.archive.mode == "off":
        # Changes from now on are not archived, so the next opening with archiving on must begin with a base.
        take_archive_state(disk, root)
        backups = BackupRecorder(below, root, below)
        store = Store(root, settings, manifest, lock, backups.recorder, backups)
        return store
    place = object_location.place_of(root, settings.object_store)
    if object_location.is_inside(root, place) or place.startswith("memory://"):
        raise InvalidConfig(
            "the archive needs an object store outside the store's directory",
            hint="set object_store in quire.toml to a bucket, or to a directory on another disk",
            object_store=settings.object_store,
        )
    manifest.ensure_owner_epoch()
    archiver = Archiver(
        root=root,
        disk=below,
        clock=manifest.clock,
        manifest=manifest,
        objects=lambda: wiring.stores(objects_url(root, settings)),  # not `store.objects`: also needed during close
        settings=settings.archive,
        fence=manifest.writer.fence,
        confirm=lambda: wiring.rights.before_delete(),
        depose=lambda error: wiring.rights.depose(error),
        drill=lambda: drill(store),
        requests=lambda: wiring.rights.requests,
    )
    backups = BackupRecorder(archiver.recorder, root, below)
    store = Store(root, settings, manifest, lock, backups.recorder, backups)
    wiring = store._parts
    wiring.before_retire = archiver.require_end
    store.archive = archiver
    if settings.archive.mode == "sync":
        manifest.set_barrier(Barrier(archiver.wait))
        manifest.cover(store)
    return store


def open_for_reader(root: str, settings: StoreSettings, manifest: ManifestStore, disk: Disk) -> Store:
    """Open the store of a reader."""
    store: Store
    store = Store(root, settings, manifest, None, ReaderFiles(disk, root, lambda: store.objects))
    return store


def _with_remote_files(disk: Disk, root: str, objects: Callable[[], ObjectStore]) -> Disk:
    """Return the disk, extended with the files that a restore left in the bucket, if any."""
    if not disk.exists(os.path.join(root, REMOTE_FILES)):
        return disk
    return RemoteFiles(disk, root, objects)


def refuse_standby(disk: Disk, root: str) -> None:
    """Raise `StoreFenced` for a standby's directory, which belongs to another owner, unless a promotion has sealed the log."""
    state = read_standby_state(disk, root)
    if state is not None and state.phase is not StandbyPhase.SEALED:
        hint = f"{READ_ONLY_COMMANDS}; `quire promote {shlex.quote(root)}` makes it the owner"
        raise StoreFenced("this directory is a standby of another owner", hint=hint, path=root)


def parent_of(store: Store) -> Parent:
    """Return where the previous owner's history ends: at the last object that was restored, if this directory was restored."""
    origin = _followed(store)
    return Parent(origin.position.number, origin.at_ms) if origin is not None else Parent()


def _followed(store: Store) -> Origin | None:
    """Return what the directory was restored from, `None` after its takeover: from then on it has its own history, and changes
    of the archive that it lacks were given up."""
    origin = read_origin(store.disk, store.path)
    with store.manifest.read() as txn:
        return origin if origin is not None and txn.owner_epoch() == origin.position.epoch else None


def refuse_stale_directory(store: Store) -> None:
    """Raise `ArchiveAhead` if the archive has changes that this directory lacks, because it was restored to an earlier moment
    or is an old copy."""
    with store.manifest.read() as txn:
        store_id, epoch = txn.store_id(), txn.owner_epoch()
    objects, origin = store.objects, _followed(store)
    if origin is not None:
        newest = newest_missing_position(objects, store_id, origin.position)
        if newest is not None:
            raise _ahead(restored=str(origin.position), newest=str(newest))
    elif epochs(objects, store_id) and (owner := newer_owner(objects, store_id, epoch, store.disk, store.path)):
        raise _ahead(owner=owner)


def _ahead(**where: str) -> ArchiveAhead:
    return ArchiveAhead(
        "the archive has changes that this directory lacks",
        hint="restore again with --takeover, which includes them; `quire takeover --discard` gives them up",
        **where,
    )


def refuse_unapplied(objects: ObjectStore, store_id: str, position: Position) -> None:
    """Raise `ArchiveAhead` if the log has objects after `position`, which a standby that waits for a base cannot apply."""
    later = list(positions_after(objects, store_id, position))
    if later:
        raise ArchiveAhead(
            f"the archive has {len(later):,} log objects that this standby cannot apply without the next base",
            hint="wait for the base if the owner still runs; `quire promote --discard` gives these objects up",
            first=str(later[0]),
            last=str(later[-1]),
        )


def take_over(store: Store, *, discard: bool) -> None:
    """Make this directory the owner, and seal the previous owner's log: that owner is fenced at its next upload."""
    if not discard:
        refuse_stale_directory(store)
    origin = _followed(store)
    if origin is None:
        _claim(store)
        return
    # Registered, checked, claimed, in this order: until the claim, a running owner may delete what leaves its window.
    clock, registration_id = store.manifest.clock, str(uuid4())
    registration = CloneRegistration(
        clone_id=registration_id,
        position=str(origin.position),
        at_ms=origin.at_ms,
        registered_at_ms=clock.now_ms(),
        host=os.uname().nodename,
        path=store.path,
        is_takeover=True,
    )
    with store.manifest.read() as txn:
        bucket = open_place(txn, store.path, store.settings)
    with closing(bucket), kept_for_takeover(bucket, origin.store_id, registration, clock) as require_kept:
        require_in_window(bucket, origin.store_id, origin.position)
        require_kept()
        _claim(store)


def _claim(store: Store) -> None:
    with store.manifest.read() as txn:
        # `own` is the epoch before the takeover, which begins another one in the manifest.
        store_id, own = txn.store_id(), txn.owner_epoch()
    epoch = store.rights.take_over(parent_of(store)).epoch
    if former_epoch(store.objects, store_id, epoch):
        seal_former(store.objects, store_id, epoch, store.manifest.clock.now_ms())
        note_parent(store.objects, store.disk, store.path, store_id, own=own, epoch=epoch)
