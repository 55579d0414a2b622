"""How a data source reaches the owner of a store (K6).

Spark calls sources in its own processes, so all of them are clients: the process that owns the store must listen.
`options_of(store)` ensures this if the owner is this very process. A token is never an option, because options appear in
plans, logs and the user interface; the name of its file is. A path stands for the socket of the store's live owner, resolved
where the query is planned. Executors get the address: those on another machine need `grpc://` or `grpc+tls://`.

A bucket with an archive, and a directory that has no writer (a standby, a restore that was not taken over), are read from a
copy that is served for the driver (`service/archive_copies.py`).

Importable on executors: code that needs a manifest is loaded only where a query is planned. Threads: any. Raises
`StoreNotFound`, `Unavailable`, `InvalidInput`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Protocol
from urllib.parse import urlsplit

from quire.archive.recorder import REMOTE_FILES
from quire.archive.state_files import read_origin, read_standby_state
from quire.core.errors import AccessDenied, InvalidInput, StoreNotFound, Unavailable
from quire.core.settings import load
from quire.durable import names
from quire.durable.files import OsDisk, read_all
from quire.objects.open import open_store
from quire.objects.options import options_at
from quire.objects.urls import REMOTE_SCHEMES
from quire.service.archive_copies import CopyRequest, served_copy
from quire.service.channel import Channel
from quire.service.sockets import SCHEME, is_alive, where_owner_listens

if TYPE_CHECKING:
    from quire.durable.files import Disk
    from quire.objects.options import StoreOptions
    from quire.service.client import Client
    from quire.service.values import Hello

CALL_SECONDS = 30.0
"""Seconds that an owner may be unreachable before a query fails."""


class Served(Protocol):
    """The part of a store that `options_of` needs."""

    path: str

    def serve(self) -> Any: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnerAddress:
    """Where the owner listens, and the credentials for it."""

    uri: str
    token_file: str = ""
    tls_ca_file: str = ""
    is_copy: bool = False
    """Whether it is a copy of an archive, which ends when it gets no calls."""

    def connect(self) -> Client:
        """Return a client. Needs the manifest's code, so it works on the driver's machine only."""
        from quire.service.client import connect

        return connect(self.uri, token_file=self.token_file, tls_ca_file=self.tls_ca_file, timeout=CALL_SECONDS)

    def channel(self) -> Channel:
        """Return a bare connection, which is all that an executor needs."""
        return Channel(self.uri, token_file=self.token_file, tls_ca_file=self.tls_ca_file, call_seconds=CALL_SECONDS)


def object_options(hello: Hello) -> dict[str, StoreOptions]:
    """Return how each of the owner's object stores is reached, by URL: from quire.toml, if visible where a query is planned.

    Otherwise, and on every executor, the environment decides. Values given as `env:NAME` are read here.
    """
    try:
        settings = load(read_all(OsDisk(), os.path.join(hello.path, names.CONFIG)))
    except (FileNotFoundError, AccessDenied):
        return {}
    named = [(place.url, place.name) for place in hello.namespaces]
    urls = {hello.objects_url, *(url for url, _ in named)}
    return {url: options_at(url, settings, named) for url in urls if "://" in url}


def disk_at(path: str, options: Mapping[str, StoreOptions] | None = None) -> Disk:
    """Return the disk on which an executor finds the files of the store that contains `path`.

    A store that was restored from an archive has its large files in the bucket. `options` defines how buckets are reached, by
    URL; by default quire.toml and the environment do.
    """
    root = os.path.abspath(path)
    while not os.path.isfile(os.path.join(root, names.CONFIG)):
        if root == os.path.dirname(root):
            return OsDisk()
        root = os.path.dirname(root)
    if not os.path.isfile(os.path.join(root, REMOTE_FILES)):
        return OsDisk()
    from quire.archive.remote_files import RemoteFiles  # needs lmdb, which executors on other machines do not have

    settings = load(read_all(OsDisk(), os.path.join(root, names.CONFIG)))
    url = settings.object_store
    known = (options or {}).get(url)
    return RemoteFiles(OsDisk(), root, lambda: open_store(url, options=known or options_at(url, settings, [])))


StoreLike = Served | str | os.PathLike[str] | Mapping[str, str]
"""A store that this process owns, the path or address of one that is served, or the options by which sources find it."""


def options_of(store: StoreLike) -> dict[str, str]:
    """Return the options by which sources find a store. A store that this process owns starts to listen if it does not yet.

    spark.read.format("quire.table").options(**options_of(store)).option("table", "db").load()
    """
    if isinstance(store, Mapping):
        return dict(store)
    if isinstance(store, str | os.PathLike):
        return {"store": os.fspath(store)}
    if not _listening(store.path):
        store.serve()
    return {"store": store.path}


def access_of(options: Mapping[str, str]) -> OwnerAddress:
    """Return the address given by the options `store`, `archived_at`, `token_file` and `tls_ca_file`."""
    if "token" in options:
        raise InvalidInput("a token cannot be an option: it would appear in plans and logs", hint="use token_file")
    where = options.get("store", "") or options.get("path", "")
    if not where:
        raise InvalidInput(
            "no store was given", hint='pass option("store", …) with its path, the address of its owner, or its bucket'
        )
    if archived := _archive_of(where, options.get("archived_at", "")):
        return OwnerAddress(uri=SCHEME + served_copy(archived), is_copy=True)
    uri = where if "://" in where else SCHEME + _socket_of(os.path.abspath(where))
    over_network = not uri.startswith(SCHEME)
    token = options.get("token_file", "") or (os.environ.get("QUIRE_TOKEN_FILE", "") if over_network else "")
    return OwnerAddress(uri=uri, token_file=token, tls_ca_file=options.get("tls_ca_file", ""))


def _archive_of(where: str, at: str) -> CopyRequest | None:
    """Return the archive to read instead of calling an owner, or None if the owner is called."""
    if urlsplit(where).scheme.lower() in REMOTE_SCHEMES:
        return CopyRequest(url=where, at=at)
    if "://" not in where:
        root, disk = os.path.abspath(where), OsDisk()
        if _listening(root) and not at:
            return None
        if (standby := read_standby_state(disk, root)) is not None:
            return CopyRequest(url=standby.url, store_id=standby.store_id, at=at, config=root)
        origin = read_origin(disk, root)
        if origin is not None and not origin.epoch:
            restored = datetime.fromtimestamp(origin.at_ms / 1_000, UTC).isoformat()
            return CopyRequest(url=origin.url, store_id=origin.store_id, at=at or restored, config=root)
        if not os.path.isfile(os.path.join(root, names.CONFIG)) and _has_archive(root):
            return CopyRequest(url=root, at=at)
    if at:
        hint = "`snapshot` names a version of a database; `archived_at` is for a bucket, a standby or a restore"
        raise InvalidInput("`archived_at` needs an archive", hint=hint, store=where)
    return None


def _has_archive(root: str) -> bool:
    """Return whether a directory is an object store with an archive."""
    with suppress(OSError), os.scandir(root) as entries:
        return any(os.path.isdir(os.path.join(entry.path, "archive")) for entry in entries)
    return False


def _listening(root: str) -> str:
    """Return the socket at which a store is served; empty if it is not."""
    socket_path = where_owner_listens(OsDisk(), root)
    return socket_path if socket_path and is_alive(socket_path) else ""


def _socket_of(root: str) -> str:
    if not os.path.isfile(os.path.join(root, names.CONFIG)):
        raise StoreNotFound("no store found", hint="create one with `quire init`", path=root)
    if socket_path := _listening(root):
        return socket_path
    raise Unavailable(
        "no owner listens for this store",
        hint="run `quire serve`, or pass `quire.spark.options_of(store)` in the process that owns it",
        path=root,
    )
