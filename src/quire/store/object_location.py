"""Where a store's objects are: remembered with the first one, so that an edited quire.toml is told and not met as lost objects.

Terms
  place     `object_store` of quire.toml in one spelling, without credentials. A relative path stays relative: a store and its
            objects may be moved together
  inside    a place below the store's own directory: it goes wherever the directory goes

Until the first object is put the place may be edited freely. After that, a store whose quire.toml names another place is
refused, for reading too: what its rows name would not be there.

Threads: one, the opener's; `remember` any. Raises `ConfigMismatch`, `ObjectNotFound`, and what manifest and object store
raise.
"""

from __future__ import annotations

import os
from itertools import islice
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit

from quire.archive.state_files import read_remote_files
from quire.core.errors import ConfigMismatch, ObjectNotFound
from quire.core.ids import ArtifactKey, ArtifactKind
from quire.durable import names
from quire.manifest import tables as t
from quire.manifest.ops.local import SetObjectPlace
from quire.manifest.reads import ReadTxn
from quire.objects.open import open_store
from quire.objects.options import options_at
from quire.objects.ownership import OwnerState, recorded_state
from quire.store.layout import objects_url

if TYPE_CHECKING:
    from quire.core.settings import StoreSettings
    from quire.durable.files import Disk
    from quire.jobs.context import JobContext
    from quire.manifest.store import ManifestStore
    from quire.objects.api import DeletableStore
    from quire.objects.options import StoreOptions

SAMPLE = 64
"""Objects that are looked for in a moved place: a copy that was cut short or went elsewhere shows in the first few."""

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


def remembered(txn: ReadTxn) -> str:
    """The place that the manifest knows; empty before the first object."""
    row = txn.get(t.META, t.OBJECT_PLACE)
    return row.text if row is not None else ""


def check(txn: ReadTxn, root: str, settings: StoreSettings) -> None:
    """Refuse a quire.toml that names another place."""
    known, configured = remembered(txn), place_of(root, settings.object_store)
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


def options_of(txn: ReadTxn, settings: StoreSettings, url: str) -> StoreOptions:
    """How the object store at `url` is reached (`objects.options.options_at`)."""
    return options_at(url, settings, [(row.url, row.name) for _, row in txn.scan(t.REMOTE_NAMESPACE)])


def options_by_url(txn: ReadTxn, root: str, settings: StoreSettings) -> dict[str, StoreOptions]:
    """The same for every place that the manifest knows, for processes that have neither manifest nor quire.toml."""
    urls = {objects_url(root, settings), *(row.url for _, row in txn.scan(t.REMOTE_NAMESPACE) if row.url)}
    return {url: options_of(txn, settings, url) for url in sorted(urls)}


def open_place(txn: ReadTxn, root: str, settings: StoreSettings, url: str = "") -> DeletableStore:
    """The object store at `url`, or the store's own, for a process that does not own the store."""
    url = url or objects_url(root, settings)
    return open_store(url, options=options_of(txn, settings, url))


def remember(manifest: ManifestStore, place: str) -> None:
    """Write the place down, durably."""
    manifest.submit([SetObjectPlace(place)]).result()


def state_beside(txn: ReadTxn, disk: Disk, path: str, object_store: str) -> OwnerState:
    """Where a store stands by its directory alone: for a process that does not own it."""
    if not needs_owner(path, place_of(path, object_store)):
        return OwnerState(NOT_NEEDED, txn.owner_epoch())
    return recorded_state(disk, path, txn.owner_epoch())


def accept_moved(ctx: JobContext, root: str, settings: StoreSettings) -> int:
    """Believe that the objects were moved to where quire.toml says, if a sample of them is there; how many were looked for."""
    place, missing = place_of(root, settings.object_store), list[str]()
    with ctx.manifest.read() as txn:
        places = [ctx.place(txn, key) for key in _sample(txn)]
    # A segment's object may be compressed: its row has the size of what was compressed.
    expected = [
        (place.object_key, place.size_bytes if place.key.kind is not ArtifactKind.WAL else None)
        for place in places
        if place is not None and place.has_remote and place.url == ctx.objects_url
    ]
    remote = list(read_remote_files(ctx.disk, root).values())  # of a restore or a clone: tables and segments
    expected += [(file.key, file.size) for file in remote[:: max(1, len(remote) // SAMPLE)]]
    store = ctx.open_store(ctx.objects_url)
    for object_key, size in expected:
        try:
            found = store.head(object_key).size_bytes
        except ObjectNotFound:
            missing.append(object_key)
            continue
        if size is not None and found != size:
            missing.append(object_key)
    if missing:
        raise ObjectNotFound(
            f"{len(missing)} of {len(expected)} objects that were looked for are not in the new place, or have another size",
            hint="copy all objects there, under the same names (a clone's parents' too); nothing was changed",
            place=place,
            first=missing[0],
        )
    remember(ctx.manifest, place)
    return len(expected)


def _sample(txn: ReadTxn) -> list[ArtifactKey]:
    """Some artifacts of each kind, from all over their tables."""
    keys: list[ArtifactKey] = []
    kinds: dict[t.Table[Any], ArtifactKind] = {
        t.CHUNK_CATALOG: ArtifactKind.BASE,
        t.CHUNK_DELTA_INDEX: ArtifactKind.DELTA,
        t.WAL_CATALOG: ArtifactKind.WAL,
    }
    for table, kind in kinds.items():
        step = max(1, txn.count(table) // SAMPLE)
        for (origin, number, *rest), _ in islice(txn.scan(table), 0, None, step):
            keys.append(ArtifactKey(origin, kind, number, *(rest or (0,))))
    return keys
