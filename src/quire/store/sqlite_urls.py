"""Parses the argument of `quire.sqlite.dbapi.connect` and opens the driver for it.

    path of a store and a database in it    dir/shop
    the same as a URL, with parameters      quire:///dir/shop?at=monday
    a database of a server                  http://host:8080/shop?token_file=admin.token
    a SQLite URI, with `uri=True`           file:dir/shop?mode=ro
    a database in memory, as in SQLite      :memory:, an empty name, file:…?mode=memory

A URL's path is relative after three slashes and absolute after four, as in SQLAlchemy's and Django's URLs. Parameters:
`at` (a snapshot's name, an epoch or a time), `epoch` (an lsn), `time` (a time): open that version, read-only; `mode=ro`:
read-only; `mode=rw`: the database must exist; by default the database, and the store, are created if they do not exist.
`functions=django`: define the SQL functions that a package provides, also through a server. `token_file` and `tls_ca_file` are
those of `quire.connect`, which also documents the addresses.

A store that another process owns is reached through its server. If it has none, `connect` waits for one, or for the owner to
close the store, for up to `timeout`, as SQLite waits for a lock.

Threads: any. Raises PEP 249 errors with SQLite's codes: `SQLITE_CANTOPEN`, or `SQLITE_BUSY` if another process owns the store.
"""

from __future__ import annotations

import atexit
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import datetime
from typing import TYPE_CHECKING
from urllib.parse import parse_qsl, unquote, urlsplit

from quire.core.clock import SystemClock
from quire.core.errors import InvalidInput, QuireError, StoreLocked
from quire.core.lazy import lazy_names
from quire.core.time_parsing import parse_epoch_or_time, requested_version
from quire.durable import names
from quire.durable.locks import is_held
from quire.service.local_owner import find_owner
from quire.sqlite import memory
from quire.sqlite.dbfile import MAGIC
from quire.sqlite.function_packs import define_functions
from quire.sqlite.pep249.driver import Driver, LocalDriver
from quire.sqlite.pep249.errors import error_of
from quire.store.open import open as open_store
from quire.store.shared_stores import acquire, acquire_for_reading
from quire.store.store import Mode, Store

if TYPE_CHECKING:
    from quire.service.client import Client

SCHEME = "quire:"
NETWORK_SCHEMES = ("http://", "https://", "grpc://", "grpc+tls://")
MODES = ("ro", "rw", "rwc")
SQLITE_CANTOPEN, SQLITE_BUSY = 14, 5
RETRY_SECONDS = 0.05
_holding = threading.Lock()
_held: dict[str, Store] = {}
_load, _ = lazy_names(__name__, {"connect": "quire.service.client"})


@dataclass(frozen=True, slots=True)
class DatabasePath:
    """A database of a store, and the version of it to open."""

    root: str
    """The store's directory, or the address of its server."""
    name: str
    at: str | int | datetime | None = None
    mode: str = "rwc"
    functions: tuple[str, ...] = ()
    token_file: str = field(default="", repr=False)
    tls_ca_file: str = field(default="", repr=False)

    @property
    def is_remote(self) -> bool:
        return self.root.startswith(NETWORK_SCHEMES)

    @property
    def is_read_only(self) -> bool:
        return self.mode == "ro" or self.at is not None


def parse(database: str, *, uri: bool) -> DatabasePath | None:
    """Parse the argument of `connect`. Return `None` for a database in memory.

    >>> parse("quire:///dir/my%20shop?at=monday", uri=False)
    DatabasePath(root='dir', name='my shop', at='monday', mode='rwc', functions=())
    >>> parse("/data/shop", uri=False)
    DatabasePath(root='/data', name='shop', at=None, mode='rwc', functions=())
    >>> parse("file:/data/shop?mode=ro", uri=True).is_read_only, parse(":memory:", uri=False)
    (True, None)
    >>> parse("http://host:8080/shop?epoch=4711", uri=False)
    DatabasePath(root='http://host:8080', name='shop', at=4711, mode='rwc', functions=())
    """
    if database.startswith(NETWORK_SCHEMES):
        return _parse_remote(database)
    parameters: dict[str, str] = {}
    path = database
    if database.startswith(SCHEME) or (uri and database.startswith("file:")):
        location, _, query = database.partition(":")[2].partition("#")[0].partition("?")
        parameters = dict(parse_qsl(query, keep_blank_values=True))
        path = unquote(_path_of(location, database.startswith(SCHEME)))
    if path in ("", ":memory:") or parameters.get("mode") == "memory":
        return None
    root, name = os.path.split(path)
    if not name:
        raise InvalidInput(
            "the path names no database", hint="use the store and the database, as in dir/shop", path=path
        )
    return DatabasePath(root or ".", name, _version(parameters), _mode(parameters), _functions(parameters))


def _parse_remote(url: str) -> DatabasePath:
    parts = urlsplit(url)
    parameters = dict(parse_qsl(parts.query, keep_blank_values=True))
    name = unquote(parts.path.strip("/"))
    if not name or not parts.hostname:
        raise InvalidInput("the URL names no database", hint="add it, as in http://host:8080/shop", url=url)
    if "@" in parts.netloc:
        raise InvalidInput(
            "the URL contains a token", hint="write it into a file: http://host:8080/shop?token_file=PATH"
        )
    return DatabasePath(
        f"{parts.scheme}://{parts.netloc}",
        name,
        _version(parameters),
        _mode(parameters),
        _functions(parameters),
        parameters.get("token_file", ""),
        parameters.get("tls_ca_file", ""),
    )


def _mode(parameters: Mapping[str, str]) -> str:
    if parameters.get("immutable") in ("1", "true"):
        return "ro"
    mode = parameters.get("mode", "rwc")
    if mode not in MODES:  # as in SQLite: a misspelt `ro` must not open the database for writing
        raise InvalidInput("no such access mode", hint=f"use one of {', '.join(MODES)}", mode=mode)
    return mode


def _functions(parameters: Mapping[str, str]) -> tuple[str, ...]:
    return tuple(filter(None, parameters.get("functions", "").split(",")))


def _path_of(location: str, ours: bool) -> str:
    if not location.startswith("//"):
        return location
    host, slash, path = location[2:].partition("/")
    if ours:  # quire://dir/shop and quire:///dir/shop mean the same
        return f"{host}/{path}" if host else path
    if host not in ("", "localhost"):
        raise InvalidInput("a file URL cannot name another machine", hint="use file:///path", host=host)
    return slash + path


def _version(parameters: Mapping[str, str]) -> str | int | datetime | None:
    if (requested := requested_version(parameters)) is None or requested[0] == "at":
        return requested and requested[1]
    return parse_epoch_or_time(*requested, now_ms=SystemClock().now_ms())


def open_sqlite_path(database: str, *, timeout: float, uri: bool) -> Driver:
    """Open the driver for the argument of `connect`."""
    try:
        wanted = parse(database, uri=uri)
        if wanted is None:
            return LocalDriver(memory.connect(database, uri=uri, timeout=timeout))
        if wanted.is_remote:
            return through_server(wanted, timeout)
        _refuse(wanted)
        return _open_or_wait(wanted, timeout)
    except StoreLocked as error:
        raise error_of(SQLITE_BUSY, f"database is locked: {error}") from error
    except QuireError as error:
        raise error_of(SQLITE_CANTOPEN, f"unable to open database file: {error}") from error


def _open_or_wait(wanted: DatabasePath, timeout: float) -> Driver:
    """Open the driver, retrying until `timeout`: an owner that is starting up will serve the store, one that is shutting down
    will release it."""
    ends_at = time.monotonic() + timeout
    while True:
        try:
            try:
                return _open(wanted, timeout)
            except StoreLocked:
                return _beside_owner(wanted, timeout)
        except StoreLocked:
            # If the lock is free, this process itself has the manifest open, and waiting does not help.
            if time.monotonic() >= ends_at or not is_held(os.path.join(wanted.root, names.LOCK)):
                raise
        time.sleep(RETRY_SECONDS)


def _open(wanted: DatabasePath, timeout: float, mode: Mode = "rw") -> Driver:
    store, release = acquire(wanted.root, mode, _open_store, create=wanted.mode == "rwc" and wanted.at is None)
    try:
        creates = mode == "rw" and wanted.mode == "rwc" and wanted.at is None
        is_read_only = wanted.mode == "ro"
        connection = store.sqlite(wanted.name, at=wanted.at, create=creates, read_only=is_read_only, timeout=timeout)
        for pack in wanted.functions:
            if not define_functions(connection, pack):
                raise InvalidInput("no such functions", hint="install the package that provides them", functions=pack)
        return LocalDriver(connection, release)
    except BaseException:
        release()
        raise


@contextmanager
def shared_store(root: str) -> Iterator[Store]:
    """Own the store that connections to this path share, for the duration of the context."""
    store, release = acquire(root, "rw", _open_store, create=True)
    try:
        yield store
    finally:
        release()


def open_for_reading(root: str) -> tuple[Store, Callable[[], None]]:
    """Open a store for reading; return it and a function to call when it is no longer needed. Another process may own it."""
    return acquire_for_reading(root, _open_store)


def hold_store(root: str) -> None:
    """Keep a store open until this process ends, for programs that occasionally close their last connection."""
    with _holding:
        key = os.path.realpath(root)
        if key not in _held or not _held[key].is_open:
            with suppress(StoreLocked):  # another process owns it: connections go through its server
                _held[key], release = acquire(root, "rw", _open_store, create=True)
                atexit.register(release)


def _open_store(path: str, mode: Mode, create: bool) -> Store:
    return open_store(path, mode, create=create)


def _beside_owner(wanted: DatabasePath, timeout: float) -> Driver:
    """Open the driver for a store that another process owns: directly if it is read-only, else through the owner's server."""
    if wanted.is_read_only:
        return _open(wanted, timeout, "r")
    return through_server(wanted, timeout)


def through_server(wanted: DatabasePath, timeout: float) -> Driver:
    """Open a driver that connects to the server that owns the store."""
    client = _client_of(wanted)
    if client is None:
        raise StoreLocked(
            "another process owns the store and runs no server",
            hint="serve the store in that process (`store.serve()`), or add ?mode=ro to read what it has published",
            path=wanted.root,
            database=wanted.name,
        )
    try:
        return client.sqlite_driver(
            wanted.name,
            at=wanted.at,
            create=wanted.mode == "rwc" and wanted.at is None,
            timeout=timeout,
            read_only=wanted.mode == "ro",
            functions=wanted.functions,
            close=client.close,
        )
    except BaseException:
        client.close()
        raise


def _client_of(wanted: DatabasePath) -> Client | None:
    if not wanted.is_remote:
        return find_owner(wanted.root)
    client: Client = _load("connect")(wanted.root, token_file=wanted.token_file, tls_ca_file=wanted.tls_ca_file)
    return client


def _refuse(wanted: DatabasePath) -> None:
    """Raise `InvalidInput` if the store's parent does not exist, or the path is a directory or an ordinary SQLite file."""
    path = os.path.join(wanted.root, wanted.name)
    if not os.path.isdir(os.path.dirname(os.path.abspath(wanted.root))):
        raise InvalidInput("the directory does not exist", hint="create it, or check the path", path=wanted.root)
    if os.path.isdir(path):
        raise InvalidInput("the path is a directory", hint="name the store and the database: dir/shop", path=path)
    if os.path.isfile(path):
        with open(path, "rb") as file:
            if file.read(len(MAGIC)) == MAGIC:
                hint = "import it with `quire sqlite import`, or open it with the standard library's sqlite3"
                raise InvalidInput("the path is an ordinary SQLite file", hint=hint, path=path)
