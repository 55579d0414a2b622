"""Where a store's objects are: remembered with the first one, so that an edited quire.toml is told and not met as lost objects.

Terms
  place     `object_store` of quire.toml in one spelling, without credentials. A relative path stays relative: a store and its
            objects may be moved together
  inside    a place below the store's own directory: it goes wherever the directory goes

Until the first object is put the place may be edited freely. After that, a store whose quire.toml names another place is
refused, for reading too: what its rows name would not be there.

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
"""The state of a store whose objects nobody else can reach."""


def place_of(root: str, object_store: str) -> str:
    """A place in one spelling.

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
    """Whether objects are below the store's directory, whatever links lead there."""
    if "://" in place:
        return False
    home, target = os.path.realpath(root), os.path.realpath(os.path.join(root, place))
    return target == home or target.startswith(home.rstrip(os.sep) + os.sep)


def needs_owner(root: str, place: str) -> bool:
    """Whether two copies of the store could meet in this place."""
    return not place.startswith("memory://") and not is_inside(root, place)


def recorded_location(txn: ReadTxn) -> str:
    """The place that the manifest knows; empty before the first object."""
    row = txn.get(t.META, t.OBJECT_PLACE)
    return row.text if row is not None else ""


def check(txn: ReadTxn, root: str, settings: StoreSettings) -> None:
    """Refuse a quire.toml that names another place."""
    known, configured = recorded_location(txn), place_of(root, settings.object_store)
    if known and known != configured:
        hint = (
            f'put `object_store = "{known}"` back into quire.toml; or copy all objects to the new place and run '
            "`quire objects moved`"
        )
        raise ConfigMismatch(
            "the store's objects are not where quire.toml says",
            hint=hint,
            path=os.path.join(root, names.CONFIG),
            objects=known,
            configured=configured,
        )


def state_beside(txn: ReadTxn, disk: Disk, path: str, object_store: str) -> OwnerState:
    """Where a store stands by its directory alone: for a process that does not own it."""
    if not needs_owner(path, place_of(path, object_store)):
        return OwnerState(NOT_NEEDED, txn.owner_epoch())
    return recorded_state(disk, path, txn.owner_epoch())
