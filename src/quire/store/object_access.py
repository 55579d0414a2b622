"""Opens a store's object stores, and verifies a move of its objects before accepting it (`store/object_location.py`).

Threads: any. Raises `ObjectNotFound`, and the errors of the manifest and the object store.
"""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, Any

from quire.archive.state_files import read_remote_files
from quire.core.errors import ObjectNotFound
from quire.core.ids import ArtifactKey, ArtifactKind
from quire.manifest import tables as t
from quire.manifest.ops.local import SetObjectPlace
from quire.manifest.reads import ReadTxn
from quire.objects.open import open_store
from quire.objects.options import options_at
from quire.store.layout import objects_url
from quire.store.object_location import place_of

if TYPE_CHECKING:
    from quire.core.settings import StoreSettings
    from quire.jobs.context import JobContext
    from quire.manifest.store import ManifestStore
    from quire.objects.api import DeletableStore
    from quire.objects.options import StoreOptions

SAMPLE = 64
"""Approximate number of objects of each kind to look for in the new place. An incomplete or misplaced copy shows early."""


def options_of(txn: ReadTxn, settings: StoreSettings, url: str) -> StoreOptions:
    """Return the options for the object store at `url` (`objects.options.options_at`)."""
    return options_at(url, settings, [(row.url, row.name) for _, row in txn.scan(t.REMOTE_NAMESPACE)])


def options_by_url(txn: ReadTxn, root: str, settings: StoreSettings) -> dict[str, StoreOptions]:
    """Return the options for every URL that the store uses, for processes that have neither its manifest nor quire.toml."""
    urls = {objects_url(root, settings), *(row.url for _, row in txn.scan(t.REMOTE_NAMESPACE) if row.url)}
    return {url: options_of(txn, settings, url) for url in sorted(urls)}


def open_place(txn: ReadTxn, root: str, settings: StoreSettings, url: str = "") -> DeletableStore:
    """Open the object store at `url` (default: the store's own), for a process that does not own the store."""
    url = url or objects_url(root, settings)
    return open_store(url, options=options_of(txn, settings, url))


def record_location(manifest: ManifestStore, place: str) -> None:
    """Record the place of the objects, durably."""
    manifest.submit([SetObjectPlace(place)]).result()


def accept_moved(ctx: JobContext, root: str, settings: StoreSettings) -> int:
    """Accept that the objects were moved to the place in quire.toml if a sample of them is there. Return the sample's size."""
    place, missing = place_of(root, settings.object_store), list[str]()
    with ctx.manifest.read() as txn:
        places = [ctx.place(txn, key) for key in _sample(txn)]
    # A segment's object may be compressed, and its row has the uncompressed size: only its existence is checked.
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
            stored_bytes = store.head(object_key).size_bytes
        except ObjectNotFound:
            missing.append(object_key)
            continue
        if size is not None and stored_bytes != size:
            missing.append(object_key)
    if missing:
        raise ObjectNotFound(
            f"{len(missing)} of {len(expected)} expected objects are missing from the new location, or have another size",
            hint="copy all objects under the same names, including those of a clone's parents; nothing was changed",
            place=place,
            first=missing[0],
        )
    record_location(ctx.manifest, place)
    return len(expected)


def _sample(txn: ReadTxn) -> list[ArtifactKey]:
    """Return artifacts of each kind, evenly spread over their tables."""
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
