"""Manages namespaces: named places, in addition to a store's own object store, that hold all objects of some databases.

Terms
  namespace   a place that was registered: a URL, accessed with the options in section `namespaces.NAME` of quire.toml
  user        a database whose objects are there; a dropped one counts until its last object is deleted

A name and a URL belong to one namespace, and the URL cannot be changed: objects are found through it. A namespace without
users stays until it is dropped; one with users cannot be dropped.

Threads: any. Raises `InvalidInput`, `InvalidName`, `InvalidConfig`, `NameTaken`, `UnknownNamespace`, `StillReferenced`.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import msgspec

from quire.core.barrier import changes
from quire.core.errors import InvalidInput, UnknownNamespace
from quire.durable.names import check_name
from quire.manifest import tables as t
from quire.manifest.namespaces import drop_namespace
from quire.manifest.reads import ReadTxn
from quire.manifest.records import NamespaceRecord
from quire.objects.urls import check_url
from quire.store import object_access, object_location

if TYPE_CHECKING:
    from quire.objects.api import ObjectStore
    from quire.store.store import Store


class NamespaceInfo(msgspec.Struct, frozen=True, kw_only=True):
    """One namespace."""

    namespace_id: int
    name: str
    """Empty for a namespace that was registered before namespaces had names."""
    url: str
    """Empty in a store that was restored from a backup: its objects are in the store's own object store."""
    created_at_ms: int
    databases: list[str]
    """The live databases whose objects are in the namespace."""
    dropped_databases: int
    """Dropped databases that still have objects in it."""
    objects: int
    """Objects in it that have a row in the manifest; those of key-value databases have none."""
    dropped_at_ms: int
    """When the namespace was dropped; its rows are removed after the grace period."""


def namespaces(txn: ReadTxn) -> list[NamespaceInfo]:
    """Return all namespaces, sorted by name."""
    rows = {key[0]: row for key, row in txn.scan(t.REMOTE_NAMESPACE)}
    places = {number: row.place_id if row.owner_epoch else number for number, row in rows.items()}
    users: dict[int, list[str]] = {}
    dropped: dict[int, int] = {}
    for _, database in txn.databases():
        if not database.namespace_id:
            continue
        place = places.get(database.namespace_id, database.namespace_id)
        if database.is_dropped:
            dropped[place] = dropped.get(place, 0) + 1
        else:
            users.setdefault(place, []).append(database.name)
    objects: dict[int, int] = {}
    tables: tuple[t.Table[Any], ...] = (t.CHUNK_CATALOG, t.CHUNK_DELTA_INDEX, t.WAL_CATALOG)
    for table in tables:
        for _, artifact in txn.scan(table):
            if artifact.namespace_id:
                place = places.get(artifact.namespace_id, artifact.namespace_id)
                objects[place] = objects.get(place, 0) + 1
    infos = [
        NamespaceInfo(
            namespace_id=number,
            name=row.name,
            url=_joined(row.url, row.prefix),
            created_at_ms=row.created_at_ms,
            databases=sorted(users.get(number, [])),
            dropped_databases=dropped.get(number, 0),
            objects=objects.get(number, 0),
            dropped_at_ms=row.dropped_at_ms,
        )
        for number, row in rows.items()
        if not row.owner_epoch
    ]
    return sorted(infos, key=lambda info: (info.name, info.namespace_id))


def _joined(url: str, prefix: str) -> str:
    return f"{url.rstrip('/')}/{prefix}" if prefix else url


def find_namespace(txn: ReadTxn, name: str) -> tuple[int, NamespaceRecord]:
    """Return a namespace by name, or by id if it has no name. A dropped one is not found.

    Unlike `namespaces`, it reads neither databases nor artifacts.
    """
    for (number,), row in txn.scan(t.REMOTE_NAMESPACE):
        if row.owner_epoch or row.dropped_at_ms:
            continue
        if row.name == name or (not row.name and str(number) == name):
            return number, row
    raise UnknownNamespace("no namespace has this name", hint="`quire namespace ls` lists them", name=name)


class Namespaces:
    """The namespaces of an opened store: `store.namespaces`."""

    def __init__(self, store: Store) -> None:
        self._store = store
        store.manifest.cover(self)

    @changes
    def create(self, name: str, url: str) -> NamespaceInfo:
        """Register a place. Nothing is contacted, and nothing is written there."""
        check_name("namespace", name)
        check_url(url)
        if "://" not in url and not os.path.isabs(url):
            raise InvalidInput("the path of a namespace must be absolute", hint=f"use {os.path.abspath(url)}", url=url)
        store = self._store
        place = object_location.place_of(store.path, url)
        if place == object_location.place_of(store.path, store.settings.object_store):
            raise InvalidInput("this is the store's own location", hint="its databases need no namespace", url=url)
        if object_location.is_inside(store.path, place):
            raise InvalidInput(
                "a namespace cannot be inside the store's directory", hint="choose a directory outside it", url=url
            )
        if "://" not in place:
            place = os.path.normpath(os.path.join(store.path, place))
        with store.manifest.read() as txn:
            # Raises on options that cannot work
            object_access.open_place(txn, store.path, store.settings, place).close()
        store.manifest.put_namespace(place, name=name)
        return self.get(name)

    def list(self) -> list[NamespaceInfo]:
        """Return all namespaces, sorted by name, each with the databases that use it."""
        with self._store.manifest.read() as txn:
            return namespaces(txn)

    def get(self, name: str) -> NamespaceInfo:
        """Return a namespace by name."""
        with self._store.manifest.read() as txn:
            number, _ = find_namespace(txn, name)
            return next(info for info in namespaces(txn) if info.namespace_id == number)

    def id_of(self, name: str) -> int:
        """Return the id of a namespace; 0, the store's own object store, if the name is empty."""
        if not name:
            return 0
        with self._store.manifest.read() as txn:
            return find_namespace(txn, name)[0]

    @changes
    def drop(self, name: str) -> NamespaceInfo:
        """Drop a namespace that no database uses. Its name can be reused at once."""
        info = self.get(name)
        drop_namespace(self._store.manifest, info.namespace_id)
        return info

    def objects(self, name: str) -> ObjectStore:
        """Return the object store of a namespace."""
        with self._store.manifest.read() as txn:
            _, row = find_namespace(txn, name)
        return self._store.context.open_store(_joined(row.url, row.prefix) or self._store.objects_url)

    def url_of(self, database: str) -> str:
        """Return the URL of a stream's or key-value database's objects: its namespace, or the store's own object store."""
        with self._store.manifest.read() as txn:
            return txn.place_of(txn.database_id(database), self._store.objects_url)[1]

    def objects_of(self, database: str) -> ObjectStore:
        """Return the object store at `url_of(database)`."""
        return self._store.context.open_store(self.url_of(database))
