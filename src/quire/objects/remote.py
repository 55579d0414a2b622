"""Object stores on obstore: S3, Google Cloud Storage, Azure Blob, and memory for tests.

Every call of obstore goes through `_call`, which translates its errors (`obstore_errors.py`) and retries one request. The
length of a body is compared with the length that the response announced: a short body is a transient error and never returned.
A put holds the caller's data plus at most `PART_BYTES * PARTS_IN_FLIGHT` (64 MiB); `put_file` holds only the latter, and maps
the file instead of reading it if the put is create-only.

Only this module and `quire.objects.obstore_errors` import obstore; `open_store` imports them only for URLs that need it.

Threads: any. obstore runs its own threads; a process that forks must open its store after the fork.

Raises: see `quire.objects.api`.
"""

from __future__ import annotations

import mmap
import os
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import timedelta
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import obstore
from obstore import store as backends
from obstore.exceptions import GenericError

from quire.core.errors import InvalidConfig, ObjectNotFound, OutOfRange, StorageFault
from quire.core.settings import ENDPOINT
from quire.durable.files import OsDisk, read_all
from quire.objects.api import (
    PAGE_OBJECTS,
    Buffer,
    Identity,
    NameIsTaken,
    ObjectInfo,
    PutResult,
    Range,
    check_digest_before_put,
    check_key,
    check_listing,
    check_prefix,
    check_range,
    create_or_adopt,
    merge_ranges,
    past_the_end,
    read_verified,
)
from quire.objects.obstore_errors import ALLOW_HTTP, FOREIGN, is_past_the_end, readable, translate
from quire.objects.options import Retrier, StoreOptions, Transient

if TYPE_CHECKING:
    from obstore import ObjectMeta
    from obstore.store import ObjectStore as Backend

T = TypeVar("T")

PART_BYTES = 16 << 20
PARTS_IN_FLIGHT = 4
MULTIPART_BYTES_MIN = 64 << 20
"""From this size on a put is a multipart upload: parts are sent concurrently, and no request exceeds the request timeout."""

SINGLE_PUT_BYTES_MAX = 5 << 30
"""S3's limit for one PUT (Azure and GCS allow about as much or more)."""

DELETE_BATCH = 1000
"""The limit of S3's DeleteObjects; obstore splits batches further for Azure."""

COALESCE_BYTES = 1 << 20
"""Ranges closer than this share a request: reading an extra MiB is cheaper than another round trip."""


class RemoteStore:
    """An `ObjectStore` on an obstore backend, under a prefix of its bucket."""

    __slots__ = ("_backend", "_copies", "_prefix", "_retrier", "_url")

    def __init__(self, backend: Backend, *, url: str, prefix: str, retrier: Retrier) -> None:
        self._backend = backend
        self._url = url
        self._prefix = prefix + "/" if prefix else ""
        self._retrier = retrier
        # obstore's MemoryStore keeps a reference to the buffer it is given: a caller that reuses a bytearray would
        # overwrite the stored object.
        self._copies = isinstance(backend, backends.MemoryStore)

    @property
    def url(self) -> str:
        return self._url

    def put(
        self,
        key: str,
        data: Buffer,
        *,
        create_only: bool = False,
        identity: Identity | None = None,
        sha256: bytes | None = None,
    ) -> PutResult:
        check_key(key)
        check_digest_before_put(key, data, sha256)
        if self._copies:
            data = bytes(data)
        return self._put(key, data, len(data), create_only, identity)

    def put_file(
        self, key: str, path: str, *, create_only: bool = False, identity: Identity | None = None
    ) -> PutResult:
        check_key(key)
        disk = OsDisk()
        size = disk.size(path)
        if size < MULTIPART_BYTES_MIN or self._copies:
            return self._put(key, read_all(disk, path), size, create_only, identity)
        if not create_only:
            return self._put(key, Path(path), size, create_only, identity)
        with disk.open(path, write=False) as file:
            # Not closed explicitly: obstore may hold the buffer a little longer; the last reference unmaps it.
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        return self._put(key, memoryview(mapped), size, create_only, identity)

    def get(self, key: str) -> bytes:
        check_key(key)

        def attempt() -> bytes:
            result = obstore.get(self._backend, self._prefix + key)
            return _whole(bytes(result.bytes()), result.meta["size"])

        return self._call(attempt, doing="reading an object", key=key)

    def get_range(self, key: str, offset: int, length: int) -> bytes:
        check_key(key)
        check_range(key, offset, length)
        if length == 0:
            return b""

        def attempt() -> bytes:
            try:
                result = obstore.get(self._backend, self._prefix + key, options={"range": (offset, offset + length)})
            except GenericError as error:
                if is_past_the_end(error):
                    raise past_the_end(key, offset, length, None) from error
                raise
            size = result.meta["size"]
            if offset + length > size:
                raise past_the_end(key, offset, length, size)
            return _whole(bytes(result.bytes()), length)

        return self._call(attempt, doing="reading a range", key=key)

    def get_ranges(self, key: str, ranges: Sequence[Range]) -> list[bytes]:
        check_key(key)
        for span in ranges:
            check_range(key, span.offset, span.length)
        spans = merge_ranges(ranges, gap_bytes=COALESCE_BYTES)
        if not spans:
            return [b""] * len(ranges)

        def attempt() -> list[bytes]:
            try:
                # Ranges are merged here, not by obstore: its coalescing panics when a range begins past the end.
                parts = obstore.get_ranges(
                    self._backend,
                    self._prefix + key,
                    starts=[span.offset for span in spans],
                    lengths=[span.length for span in spans],
                    coalesce=0,
                )
            except GenericError as error:
                if is_past_the_end(error):
                    raise past_the_end(key, spans[-1].offset, spans[-1].length, None) from error
                raise
            return [bytes(part) for part in parts]

        bodies = self._call(attempt, doing="reading ranges", key=key)
        if any(len(body) != span.length for body, span in zip(bodies, spans)):
            # The bulk call does not return the object's length, so a truncated body and a range past the end look alike.
            # The single call distinguishes them, and retries a truncated body.
            bodies = [self.get_range(key, span.offset, span.length) for span in spans]
        return [_cut(wanted, spans, bodies) for wanted in ranges]

    def get_verified(
        self, key: str, *, size_bytes: int, sha256: bytes | None = None, crc64: int | None = None
    ) -> bytes:
        return read_verified(self, key, size_bytes=size_bytes, sha256=sha256, crc64=crc64)

    def head(self, key: str) -> ObjectInfo:
        check_key(key)
        return self._info(
            self._call(lambda: obstore.head(self._backend, self._prefix + key), doing="looking up an object", key=key)
        )

    def list_pages(
        self, prefix: str = "", *, start_after: str = "", page_objects: int = PAGE_OBJECTS
    ) -> Iterator[Sequence[ObjectInfo]]:
        inside = self._inside(check_listing(prefix, start_after, page_objects))
        return self._pages(inside, start_after, page_objects)

    def _pages(self, inside: str | None, last: str, page_objects: int) -> Iterator[Sequence[ObjectInfo]]:
        stream: Iterator[Sequence[ObjectMeta]] | None = None

        def next_page() -> Sequence[ObjectMeta] | None:
            nonlocal stream
            if stream is None:
                offset = self._prefix + last if last else None
                stream = obstore.list(self._backend, inside, offset=offset, chunk_size=page_objects)
            try:
                return next(stream, None)
            except BaseException:
                stream = None  # a broken stream cannot be resumed: list again after the last key that was delivered
                raise

        while page := self._call(next_page, doing="listing objects"):
            infos = [self._info(meta) for meta in page]
            last = infos[-1].key
            yield infos

    def list_prefixes(self, prefix: str = "") -> list[str]:
        inside = self._inside(check_prefix(prefix))
        listing = self._call(lambda: obstore.list_with_delimiter(self._backend, inside), doing="listing prefixes")
        return sorted(prefix[len(self._prefix) :] for prefix in listing["common_prefixes"])

    def delete(self, key: str) -> None:
        check_key(key)
        try:
            self._call(lambda: obstore.delete(self._backend, self._prefix + key), doing="deleting an object", key=key)
        except ObjectNotFound:
            pass

    def delete_many(self, keys: Iterable[str]) -> None:
        rest = iter(keys)
        while batch := [check_key(key) for key in islice(rest, DELETE_BATCH)]:
            names = [self._prefix + key for key in batch]
            try:
                self._call(lambda names=names: obstore.delete(self._backend, names), doing="deleting objects")  # type: ignore[misc]
            except ObjectNotFound:
                # GCS and Azure stop a bulk delete at the first missing object: finish one by one.
                for key in batch:
                    self.delete(key)

    def close(self) -> None:
        """Do nothing: obstore closes its connections when the backend is garbage-collected."""

    def __repr__(self) -> str:
        return f"RemoteStore({self._url!r})"

    def __reduce__(self) -> NoReturn:
        raise TypeError("a store cannot be pickled; send its url and StoreOptions, and open it with open_store()")

    # ── internals ─────────────────────────────────────────────────────────────────────────────────────────────────────
    def _put(self, key: str, data: Buffer | Path, size: int, create_only: bool, identity: Identity | None) -> PutResult:
        name = self._prefix + key
        if create_only and size > SINGLE_PUT_BYTES_MAX:
            raise OutOfRange(
                "the object is too large for a create-only put, which is one request",
                hint="split the object",
                key=key,
                size_bytes=size,
                max=SINGLE_PUT_BYTES_MAX,
            )

        def attempt() -> PutResult:
            if create_only:
                # One conditional PUT, whatever its size: a multipart upload can only be completed conditionally as a copy, so
                # it could overwrite.
                result = obstore.put(self._backend, name, data, mode="create", use_multipart=False)
            elif size < MULTIPART_BYTES_MIN:
                result = obstore.put(self._backend, name, data, use_multipart=False)
            else:
                result = obstore.put(
                    self._backend,
                    name,
                    data,
                    use_multipart=True,
                    chunk_size=PART_BYTES,
                    max_concurrency=PARTS_IN_FLIGHT,
                )
            return PutResult(key=key, size_bytes=size, etag=result["e_tag"], adopted=False)

        def put() -> PutResult:
            return self._call(attempt, doing="storing an object", key=key)

        if create_only:
            return create_or_adopt(self, key, put, identity)
        try:
            return put()
        except NameIsTaken as conflict:
            # Only a 409 leads here: two overwriting puts collided. One of them is now the object.
            raise StorageFault(
                "another writer replaced the object at the same time", store=self._url, key=key
            ) from conflict

    def _call(self, attempt: Callable[[], T], *, doing: str, key: str | None = None) -> T:
        def translated() -> T:
            try:
                return attempt()
            except FOREIGN as error:
                raise translate(error, doing=doing, store=self._url, key=key) from error

        where = {} if key is None else {"key": key}
        return self._retrier.call(translated, doing=doing, store=self._url, **where)

    def _inside(self, prefix: str) -> str | None:
        return (self._prefix + prefix).removesuffix("/") or None

    def _info(self, meta: ObjectMeta) -> ObjectInfo:
        return ObjectInfo(
            key=meta["path"][len(self._prefix) :],
            size_bytes=meta["size"],
            etag=meta["e_tag"],
            modified_ms=int(meta["last_modified"].timestamp() * 1000),
        )


def _cut(wanted: Range, spans: Sequence[Range], bodies: Sequence[bytes]) -> bytes:
    """Return the wanted bytes from the span that covers them."""
    if wanted.length == 0:
        return b""
    index = bisect_right(spans, wanted.offset, key=lambda span: span.offset) - 1
    start = wanted.offset - spans[index].offset
    return bodies[index][start : start + wanted.length]


def _whole(body: bytes, announced: int) -> bytes:
    """Return `body` if it is complete; raise `Transient` otherwise."""
    if len(body) != announced:
        raise Transient(f"the body was cut short: {len(body)} of {announced} bytes arrived")
    return body


_MEMORY: dict[str, backends.MemoryStore] = {}
"""Named memory stores. They live until the process ends, so that a store in one can be closed and reopened."""


def open_remote(scheme: str, bucket: str, prefix: str, options: StoreOptions, retrier: Retrier) -> RemoteStore:
    """Open the store of an s3, gs, az or memory URL."""
    url = f"{scheme}://{bucket}" + (f"/{prefix}" if prefix else "")
    try:
        backend = _backend(scheme, bucket, options, url)
    except FOREIGN as error:
        raise InvalidConfig(
            f"the object store cannot be opened: {readable(str(error))}",
            hint="check [objects] of quire.toml, and the variables AWS_*, GOOGLE_* or AZURE_*",
            store=url,
        ) from error
    return RemoteStore(backend, url=url, prefix=prefix, retrier=retrier)


_ENDPOINT_VARIABLES = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT")


def _check_endpoint(scheme: str, options: StoreOptions, allow_http: bool, url: str) -> None:
    """Refuse an endpoint to which obstore cannot make a request: it reports "builder error" for some and panics for others."""
    source, endpoint = "`endpoint`", options.endpoint
    if endpoint is None and scheme == "s3":
        source = next((name for name in _ENDPOINT_VARIABLES if os.environ.get(name)), "")
        endpoint = os.environ.get(source) if source else None
    if endpoint is None:
        return
    if not ENDPOINT.fullmatch(endpoint):
        shown = {} if "@" in endpoint else {"endpoint": endpoint}  # the part before an '@' is probably a secret
        raise InvalidConfig(
            f"{source} is not the URL of a service",
            hint="use https://HOST or http://HOST:PORT, in [objects] of quire.toml or in the environment",
            store=url,
            **shown,
        )
    if endpoint.startswith("http:") and not allow_http:
        raise InvalidConfig(
            "the endpoint is plain HTTP, which is not allowed",
            hint=f"{ALLOW_HTTP}, or use an https:// endpoint",
            store=url,
            endpoint=endpoint,
        )


def _backend(scheme: str, bucket: str, options: StoreOptions, url: str) -> Backend:
    if scheme == "memory":
        return _MEMORY.setdefault(bucket, backends.MemoryStore()) if bucket else backends.MemoryStore()
    allow_http = options.allow_http or os.environ.get("AWS_ALLOW_HTTP", "").lower() in ("1", "true")
    _check_endpoint(scheme, options, allow_http, url)
    config: dict[str, Any] = dict(options.settings)
    common: dict[str, Any] = {
        "config": config,
        "client_options": {
            "allow_http": allow_http,
            "connect_timeout": timedelta(seconds=options.connect_timeout_seconds),
            "timeout": timedelta(seconds=options.request_timeout_seconds),
        },
        "retry_config": {"max_retries": 0},  # `Retrier` is the only retry loop (quire.objects.options)
    }
    if scheme == "s3":
        if options.region is not None:
            config["region"] = options.region
        if options.endpoint is not None:
            config["endpoint"] = options.endpoint
        return backends.S3Store(bucket, **common)
    if scheme == "gs":
        if options.endpoint is not None:
            config["base_url"] = options.endpoint
        return backends.GCSStore(bucket, **common)
    assert scheme == "az", scheme
    if options.endpoint is not None:
        config["endpoint"] = options.endpoint
    return backends.AzureStore(bucket, **common)
