"""Recognises a store's directory and makes a new one, so that a crash at any step leaves nothing that cannot go on.

Terms
  debris   what a creation that was cut off may leave beside a store's own files: the lock, files ending in `.tmp`
  begun    a directory with a quire.toml and no manifest: somebody wrote the configuration, or a creation was cut off

A directory is a store when it has both quire.toml and manifest.lmdb. The manifest gets its name only when it is whole, so a
manifest.lmdb that does not open is damage, never a creation that was cut off. What was there is never taken over by guessing:
a directory with other people's files, a manifest without its quire.toml, and data without a manifest are refused. Only the
owner (who has the lock) makes or sweeps anything.

What is on disk if the creation stops after each step, and what the next `open` does:
  make_dirs                nothing, or an empty directory      begins again
  take the lock            + store.lock                        the kernel has let go; begins again
  write quire.toml.tmp     + garbage under that name           overwritten, or swept
  rename to quire.toml     begun                               keeps the configuration, goes on
  make manifest.lmdb.tmp   + garbage under that name           removed unread, made again
  rename to manifest.lmdb  begun, or the store                 goes on, or opens it
  sync the directory       the store                           opens it

Threads: one, the opener's. Raises `InvalidInput`, `InvalidConfig`, `ConfigMismatch`, `ManifestDamaged`, and what the disk and
the manifest raise.
"""

from __future__ import annotations

import os
import shlex
from enum import Enum

import msgspec

from quire.core.errors import ConfigMismatch, InvalidConfig, InvalidInput, ManifestDamaged, StorageFault, StoreNotFound
from quire.core.settings import EXAMPLE, StoreSettings, load
from quire.durable import names
from quire.durable.files import Disk, read_all, remove_tree, write_atomic
from quire.durable.object_names import OWNER_FILE
from quire.objects.urls import check_url

UNFINISHED = names.MANIFEST + names.TEMPORARY
"""The manifest before it gets its name."""

DEBRIS = frozenset(
    {names.LOCK, names.CONFIG + names.TEMPORARY, OWNER_FILE + names.TEMPORARY, UNFINISHED, UNFINISHED + "-lock"}
)
FOREIGN_BUT_FINE = frozenset({"lost+found"})
"""An empty file system has it; its root may become a store."""

DATA = frozenset({names.PAGES, names.STREAMS, names.LSM, names.OBJECTS, names.READERS})


class DirectoryState(Enum):
    """What a directory is."""

    NOTHING = "no directory"
    EMPTY = "a directory with nothing in it"
    BEGUN = "a configuration, but no manifest yet"
    FOREIGN = "a directory with somebody else's files"
    STORE = "a store"


def directory_state(disk: Disk, root: str) -> DirectoryState:
    """What is at `root`; raises for what must not become a store."""
    try:
        root.encode()
    except UnicodeEncodeError:  # LMDB takes no other
        hint = "give the path of another directory"
        raise InvalidInput("a store's path must be valid UTF-8", hint=hint, path=root) from None
    try:
        present = set(disk.names(root))
    except FileNotFoundError:
        return DirectoryState.NOTHING
    except StorageFault as fault:
        if fault.where.get("errno") == "ENOTDIR":
            raise InvalidInput("a store is a directory", hint="give the path of a directory", path=root) from fault
        raise
    if names.REPLAYED in present and not present & {names.ORIGIN, names.STANDBY}:
        hint = "remove the directory and restore again"
        raise InvalidInput("a restore into this directory did not come to its end", hint=hint, path=root)
    if names.CONFIG in present:
        if names.MANIFEST in present:
            return DirectoryState.STORE
        if lost := sorted(present & DATA):
            raise ManifestDamaged(
                "the store has data but no manifest", hint="restore manifest.lmdb from a backup", path=root, data=lost
            )
        return DirectoryState.BEGUN
    if names.MANIFEST in present:
        raise InvalidConfig(
            "the store has lost its quire.toml",
            hint=f"restore it; if it had only defaults, `touch {shlex.quote(os.path.join(root, names.CONFIG))}`",
            path=root,
        )
    if present - DEBRIS - FOREIGN_BUT_FINE:
        return DirectoryState.FOREIGN
    return DirectoryState.EMPTY


def not_found(root: str) -> StoreNotFound:
    """The error for a path without a store."""
    hint = f"name one with `--store DIR` or QUIRE_STORE; `quire init {shlex.quote(root)}` makes one"
    return StoreNotFound("no store found", hint=hint, path=root)


def not_empty(root: str) -> InvalidInput:
    """The error for making a store where other files are."""
    hint = "use a new or an empty directory"
    return InvalidInput("the directory is not empty and is not a store", hint=hint, path=root)


def make_directory(disk: Disk, root: str) -> None:
    """The first step of a creation."""
    try:
        disk.make_dirs(root)
    except (FileExistsError, FileNotFoundError) as error:
        raise InvalidInput("a store is a directory", hint="give the path of a directory", path=root) from error


def objects_url(root: str, settings: StoreSettings) -> str:
    """Where the objects are; a relative path in quire.toml is relative to the store."""
    url = settings.object_store or names.OBJECTS
    return url if "://" in url else os.path.join(root, url)


def write_config(disk: Disk, root: str, object_store: str) -> None:
    """A commented quire.toml that says where the objects are."""
    check_url(object_store)
    quoted = object_store.replace("\\", "\\\\").replace('"', '\\"')
    text = EXAMPLE.format(object_store=quoted).encode()
    if load(text).object_store != object_store:
        raise InvalidConfig("the object store's URL cannot be written into quire.toml", url=object_store)
    write_atomic(disk, os.path.join(root, names.CONFIG), text)


def read_config(disk: Disk, root: str, given: StoreSettings | None) -> StoreSettings:
    """The settings to use: `given` if there are any, else quire.toml's; where objects live is always quire.toml's."""
    path = os.path.join(root, names.CONFIG)
    try:
        written = load(read_all(disk, path))
    except FileNotFoundError:
        raise not_found(root) from None
    except UnicodeDecodeError as error:
        raise InvalidConfig("quire.toml is not UTF-8", hint="write it again", path=path, offset=error.start) from error
    except InvalidConfig as error:
        hint = "correct it; `quire init DIR` with a new DIR writes one with the settings explained, to compare"
        raise InvalidConfig(error.what, hint=hint, path=path) from error
    try:
        check_url(written.object_store)
    except InvalidConfig as error:
        raise InvalidConfig(error.what, hint=error.hint, path=path, **error.where) from error
    if given is None:
        return written
    if given.object_store not in ("", written.object_store):
        raise ConfigMismatch(
            "the store keeps its objects elsewhere",
            hint=f"name no other; to move the objects, copy them and edit {path}",
            asked=given.object_store,
            configured=written.object_store,
        )
    plain = StoreSettings()
    return msgspec.structs.replace(
        given,
        object_store=written.object_store,
        objects=written.objects if given.objects == plain.objects else given.objects,
        namespaces={**written.namespaces, **given.namespaces},
    )


def existing_config(disk: Disk, root: str) -> StoreSettings:
    """The settings of the store at `root`; raises `StoreNotFound` if there is none."""
    need_store(disk, root)
    return read_config(disk, root, None)


def need_store(disk: Disk, root: str) -> None:
    """Raise `StoreNotFound` if there is no store at `root`."""
    if directory_state(disk, root) is not DirectoryState.STORE:
        raise not_found(root)


def sweep_debris(disk: Disk, root: str) -> None:
    """Remove what creations that were cut off have left. Only the owner may."""
    for name in sorted(DEBRIS - {names.LOCK}):
        path = os.path.join(root, name)
        if disk.exists(path):
            disk.remove(path)


def sweep_scratch(disk: Disk, root: str) -> None:
    """Remove what jobs of an earlier owner were staging; none of it is referred to by anything."""
    scratch = os.path.join(root, names.SCRATCH)
    try:
        staged = disk.names(scratch)
    except FileNotFoundError:
        return
    for name in staged:
        remove_tree(disk, os.path.join(scratch, name))
