"""The databases that the Datasette plugin shows: one `datasette.database.Database` per database of a store and per snapshot.

A store is read alongside its owner, so `quire serve` and programs can continue to use it. With `write`, Datasette plugins
that write do so like any other program: this process owns the store, or uses the server of the process that does.

Threads: Datasette's event loop and its threads for SQL. Raises the errors of opening a store.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import threading
import time
from collections.abc import Callable
from typing import Any

from datasette.database import Database

from quire.core.errors import InvalidInput
from quire.integrations.database_versions import ListedVersion, list_versions
from quire.sqlite import dbapi
from quire.store.sqlite_urls import hold_store, open_for_reading
from quire.store.store import Store

REFRESH_SECONDS = 1.0
SETTINGS = ("store", "databases", "snapshots", "write")


class VersionDatabase(Database):
    """A database of a store in Datasette; a snapshot is immutable."""

    def __init__(self, ds: Any, store: Store, version: ListedVersion, *, write: bool) -> None:
        path = os.path.join(store.path, version.label)
        # There is no file to attach or download, which `is_memory` tells Datasette.
        super().__init__(ds, path=path, is_mutable=not version.snapshot, is_memory=True)
        self.store, self.version, self.writes = store, version, write and not version.snapshot
        self._threads = threading.local()

    def connect(self, write: bool = False) -> Any:
        """Open a connection to the version, read-only unless Datasette requests to write and may."""
        if write and self.writes:
            return dbapi.connect(f"{self.version.url(self.store.path)}?mode=rw", check_same_thread=False)
        connection = dbapi.wrap(self.store.sqlite(self.version.name, at=self.version.snapshot or None))
        connection.execute("PRAGMA query_only = 1")
        return connection

    async def execute_fn(self, fn: Callable[[Any], Any]) -> Any:
        """Run a function on the connection of a thread. Datasette caches connections by database name, but a name in a store
        may refer to another database later."""
        if self.ds.executor is None:
            return await super().execute_fn(fn)

        def run() -> Any:
            connection = getattr(self._threads, "connection", None)
            if connection is None:
                connection = self.connect()
                self.ds._prepare_connection(connection, self.name)
                self._threads.connection = connection
            return fn(connection)

        return await asyncio.get_running_loop().run_in_executor(self.ds.executor, run)

    @property
    def hash(self) -> str | None:
        """For a snapshot: a hash of its identity, not of its contents."""
        version = self.version
        if self.is_mutable:
            return None
        return hashlib.sha256(f"{self.store.path} {version.db_id} {version.lsn}".encode()).hexdigest()

    @property
    def size(self) -> int:
        """Size in bytes."""
        return self.version.size_bytes

    @property
    def mtime_ns(self) -> int | None:
        """When a snapshot was made."""
        return self.version.time_ms * 1_000_000 or None


class StoreDatabases:
    """The databases of the configured stores, in one Datasette."""

    def __init__(self, ds: Any, config: dict[str, Any]) -> None:
        if unknown := set(config) - set(SETTINGS):
            known = ", ".join(SETTINGS)
            raise InvalidInput("the plugin has no such setting", hint=f"one of {known}", setting=min(unknown))
        if not config.get("store"):
            raise InvalidInput("the plugin needs the path of a store", hint="set `plugins: quire: store: PATH`")
        roots = config["store"] if isinstance(config["store"], list) else [config["store"]]
        self._ds = ds
        self._pattern = str(config.get("databases", "*"))
        self._snapshots = bool(config.get("snapshots", True))
        self._writes = bool(config.get("write", False))
        if self._writes:
            for root in roots:
                hold_store(root)
        self._stores = [open_for_reading(root)[0] for root in roots]
        self._shown: dict[tuple[str, int, int], VersionDatabase] = {}
        self._refreshed_at = float("-inf")
        self._refreshing = asyncio.Lock()

    async def refresh(self) -> None:
        """Add and remove databases to match the stores, at most once a second."""
        async with self._refreshing:
            if time.monotonic() - self._refreshed_at < REFRESH_SECONDS:
                return
            listed = await asyncio.get_running_loop().run_in_executor(None, self._list)
            self._show(listed)
            self._refreshed_at = time.monotonic()

    def _list(self) -> dict[tuple[str, int, int], tuple[Store, ListedVersion]]:
        return {
            (store.path, version.db_id, version.snapshot_id): (store, version)
            for store in self._stores
            for version in list_versions(store, self._pattern, snapshots=self._snapshots)
        }

    def _show(self, listed: dict[tuple[str, int, int], tuple[Store, ListedVersion]]) -> None:
        for key in [key for key in self._shown if key not in listed or self._is_renamed(key, listed)]:
            self._ds.remove_database(self._shown.pop(key).name)
        for key, (store, version) in listed.items():
            if key in self._shown:
                self._shown[key].version = version  # its size may have changed
            else:
                shown = self._shown[key] = VersionDatabase(self._ds, store, version, write=self._writes)
                self._ds.add_database(shown, name=version.label)

    def _is_renamed(self, key: tuple[str, int, int], listed: dict[Any, tuple[Store, ListedVersion]]) -> bool:
        return self._shown[key].version.label != listed[key][1].label
