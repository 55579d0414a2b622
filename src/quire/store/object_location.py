"""Records where a store's objects are, so that an edited quire.toml is reported as such and not as missing objects.

Terms
  place     `object_store` of quire.toml in canonical form, without credentials. A relative path stays relative, so that a store
            and its objects can be moved together
  inside    a place below the store's own directory: it moves with the directory

Until the first object is put, the place may be edited freely. After that, a store whose quire.toml names another place is
refused, for reading too: the objects that its rows name would not be found there.

Pure functions. Raises `ConfigMismatch`.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING
from urllib.parse import unquote, urlsplit

from quire.core.errors import ConfigMismatch
from quire.durable import names
from quire.manifest import tables as t
from quire.manifest.reads import ReadTxn
from quire.objects.ownership import OwnerState, recorded_state

if TYPE_CHECKING:
    from quire.core.settings import StoreSettings
    from quire.durable.files import Disk

NOT_NEEDED = "not needed"
"""The ownership state of a store whose objects no other store can reach."""


def place_of(root: str, object_store: str) -> str:
    """Return a place in canonical form.

    >>> (
    ...     place_of("/data/store", ""),
    ...     place_of("/data/store", "/data/store/objects/"),
    ...     place_of("/data/store", "../shared"),
    ... )
    ('objects', 'objects', '../shared')
    >>> place_of("/data/store", "S3://bucket//a/b/"), place_of("/data/store", "file:///mnt/x")
    ('s3://bucket/a/b', '/mnt/x')
    """
    url = object_store or names.OBJECTS
    if "://" in url:
        parts = urlsplit(url)
        if parts.scheme.lower() != "file":
            netloc = parts.netloc.rpartition("@")[2]
            path = "/".join(filter(None, parts.path.split("/")))
            return f"{parts.scheme.lower()}://{netloc}" + (f"/{path}" if path else "")
        url = unquote(parts.path)
    url = os.path.normpath(url)
    if os.path.isabs(url):
        below = os.path.relpath(url, root)
        return url if below.startswith("..") else below
    return url


def is_inside(root: str, place: str) -> bool:
    """Return whether a place is below the store's directory, with symbolic links resolved."""
    if "://" in place:
        return False
    home, target = os.path.realpath(root), os.path.realpath(os.path.join(root, place))
    return target == home or target.startswith(home.rstrip(os.sep) + os.sep)


def needs_owner(root: str, place: str) -> bool:
    """Return whether two copies of the store could write to the same place."""
    return not place.startswith("memory://") and not is_inside(root, place)


def recorded_location(txn: ReadTxn) -> str:
    """Return the place recorded in the manifest; empty before the first object is put."""
    row = txn.get(t.META, t.OBJECT_PLACE)
    return row.text if row is not None else ""


def check(txn: ReadTxn, root: str, settings: StoreSettings) -> None:
    """Raise `ConfigMismatch` if quire.toml names another place than the recorded one."""
    recorded, configured = recorded_location(txn), place_of(root, settings.object_store)
    if recorded and recorded != configured:
        hint = (
            f'restore `object_store = "{recorded}"` in quire.toml; or copy all objects to the new location and run '
            "`quire objects moved`"
        )
        raise ConfigMismatch(
            "the store's objects are not at the location in quire.toml",
            hint=hint,
            path=os.path.join(root, names.CONFIG),
            objects=recorded,
            configured=configured,
        )


def recorded_owner_state(txn: ReadTxn, disk: Disk, path: str, object_store: str) -> OwnerState:
    """Return the ownership state from the directory alone, for a process that does not own the store."""
    if not needs_owner(path, place_of(path, object_store)):
        return OwnerState(NOT_NEEDED, txn.owner_epoch())
    if disk.exists(os.path.join(path, names.STANDBY)):
        return OwnerState("standby", txn.owner_epoch())
    return recorded_state(disk, path, txn.owner_epoch())
