"""Recognises a store's directory and creates a new one such that creation can continue after a crash at any step.

Terms
  debris   what an interrupted creation may leave next to a store's own files: the lock, files ending in `.tmp`
  begun    a directory with a quire.toml and no manifest: the user wrote the configuration, or a creation was interrupted

A directory is a store when it has both quire.toml and manifest.lmdb. The manifest gets its final name only when it is complete,
so a manifest.lmdb that does not open is damaged, never an interrupted creation. Existing files are never adopted by guessing:
a directory with foreign files, a manifest without its quire.toml, and data without a manifest are refused. Only the owner
(which holds the lock) creates or sweeps anything.

What is on disk if creation stops after each step, and what the next `open` does:
  make_dirs                nothing, or an empty directory      starts over
  take the lock            + store.lock                        the kernel has released it; starts over
  write quire.toml.tmp     + garbage under that name           overwritten, or swept
  rename to quire.toml     begun                               keeps the configuration, continues
  make manifest.lmdb.tmp   + garbage under that name           removed unread, created again
  rename to manifest.lmdb  begun, or the store                 continues, or opens it
  sync the directory       the store                           opens it

Threads: one, the opener's. Raises `InvalidInput`, `InvalidConfig`, `ConfigMismatch`, `ManifestDamaged`, and the errors of the
disk and the manifest.
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
"""Name of the manifest until it is complete."""

DEBRIS = frozenset(
    {names.LOCK, names.CONFIG + names.TEMPORARY, OWNER_FILE + names.TEMPORARY, UNFINISHED, UNFINISHED + "-lock"}
)
FOREIGN_BUT_FINE = frozenset({"lost+found"})
"""Present in the root of an empty file system, which may become a store."""

DATA = frozenset({names.PAGES, names.STREAMS, names.LSM, names.OBJECTS, names.READERS})


class DirectoryState(Enum):
    """The state of a directory that is to be a store."""

    NOTHING = "no directory"
    EMPTY = "a directory with nothing in it"
    BEGUN = "a configuration, but no manifest yet"
    FOREIGN = "a directory with unrelated files"
    STORE = "a store"


def directory_state(disk: Disk, root: str) -> DirectoryState:
    """Return the state of the directory `root`. Raises if it is damaged or must not become a store."""
    try:
        root.encode()
    except UnicodeEncodeError:  # LMDB accepts no other path
        hint = "use another directory"
        raise InvalidInput("a store's path must be valid UTF-8", hint=hint, path=root) from None
    try:
        present = set(disk.names(root))
    except FileNotFoundError:
        return DirectoryState.NOTHING
    except StorageFault as fault:
        if fault.where.get("errno") == "ENOTDIR":
            raise InvalidInput(
                "the path of a store must be a directory", hint="pass the path of a directory", path=root
            ) from fault
        raise
    if names.REPLAYED in present and not present & {names.ORIGIN, names.STANDBY}:
        hint = "remove the directory and restore again"
        raise InvalidInput("a restore into this directory did not complete", hint=hint, path=root)
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
            "the store's quire.toml is missing",
            hint=f"restore it; if it had only defaults, `touch {shlex.quote(os.path.join(root, names.CONFIG))}`",
            path=root,
        )
    if present - DEBRIS - FOREIGN_BUT_FINE:
        return DirectoryState.FOREIGN
    return DirectoryState.EMPTY


def not_found(root: str) -> StoreNotFound:
    """Return the error for a path without a store."""
    hint = f"name one with `--store DIR` or QUIRE_STORE; `quire init {shlex.quote(root)}` creates one"
    return StoreNotFound("no store found", hint=hint, path=root)


def not_empty(root: str) -> InvalidInput:
    """Return the error for creating a store in a directory that has other files."""
    hint = "use a new or an empty directory"
    return InvalidInput("the directory is not empty and is not a store", hint=hint, path=root)


def make_directory(disk: Disk, root: str) -> None:
    """Create the directory of a store: the first step of a creation, a restore, a clone and a standby."""
    try:
        disk.make_dirs(root)
    except (FileExistsError, FileNotFoundError) as error:
        raise InvalidInput("no directory can be created at this path", hint="pass another path", path=root) from error


def objects_url(root: str, settings: StoreSettings) -> str:
    """Return the URL or path of the objects; a relative path in quire.toml is relative to the store."""
    url = settings.object_store or names.OBJECTS
    return url if "://" in url else os.path.join(root, url)


def write_config(disk: Disk, root: str, object_store: str) -> None:
    """Write a commented quire.toml with the location of the objects."""
    check_url(object_store)
    quoted = object_store.replace("\\", "\\\\").replace('"', '\\"')
    text = EXAMPLE.format(object_store=quoted).encode()
    if load(text).object_store != object_store:
        raise InvalidConfig("the object store's URL cannot be written into quire.toml", url=object_store)
    write_atomic(disk, os.path.join(root, names.CONFIG), text)


def read_config(disk: Disk, root: str, given: StoreSettings | None) -> StoreSettings:
    """Return the settings to use: `given` if any, else those of quire.toml. The location of objects is always quire.toml's."""
    path = os.path.join(root, names.CONFIG)
    try:
        written = load(read_all(disk, path))
    except FileNotFoundError:
        raise not_found(root) from None
    except UnicodeDecodeError as error:
        raise InvalidConfig(
            "quire.toml is not valid UTF-8", hint="save it as UTF-8", path=path, offset=error.start
        ) from error
    except InvalidConfig as error:
        hint = "correct it; `quire init DIR` with a new DIR writes a commented example"
        raise InvalidConfig(error.what, hint=hint, path=path) from error
    try:
        check_url(written.object_store)
    except InvalidConfig as error:
        raise InvalidConfig(error.what, hint=error.hint, path=path, **error.where) from error
    if given is None:
        return written
    if given.object_store not in ("", written.object_store):
        raise ConfigMismatch(
            "the store keeps its objects in another location",
            hint=f"omit the location; to move the objects, copy them and edit {path}",
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
    """Return the settings of the store at `root`. Raises `StoreNotFound` if there is none."""
    need_store(disk, root)
    return read_config(disk, root, None)


def need_store(disk: Disk, root: str) -> None:
    """Raise `StoreNotFound` if there is no store at `root`."""
    if directory_state(disk, root) is not DirectoryState.STORE:
        raise not_found(root)


def sweep_debris(disk: Disk, root: str) -> None:
    """Remove what interrupted creations have left. REQUIRES the store's lock."""
    for name in sorted(DEBRIS - {names.LOCK}):
        path = os.path.join(root, name)
        if disk.exists(path):
            disk.remove(path)


def sweep_scratch(disk: Disk, root: str) -> None:
    """Remove what jobs of an earlier owner were staging. Nothing refers to it."""
    scratch = os.path.join(root, names.SCRATCH)
    try:
        staged = disk.names(scratch)
    except FileNotFoundError:
        return
    for name in staged:
        remove_tree(disk, os.path.join(scratch, name))
