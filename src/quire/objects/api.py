"""The protocol that every object store implements, its value types, and the code that all implementations share.

A key is '/'-separated segments without a leading '/' (`check_key`). A prefix is whole segments: `a/b` covers `a/b/c`, not
`a/bc`. No key may be a prefix of another: a directory cannot also be a file, and a store must be movable from a bucket to a
path and back.

An object is visible whole or not at all, and immutable. When `put` returns it is durable. A *create-only* put never replaces
an object: either the name is free, or the caller's `identity` confirms that the existing object is the one being put, and it
is *adopted*. The caller knows the format; the store never compares bytes, because two runs of one plan may compress
differently and still be the same artifact (P11). Reads return exactly the requested bytes or raise. Deleting a missing object
succeeds. Listings are sorted by key (byte order of UTF-8), complete for objects that existed throughout, and returned in
bounded pages.

Threads: every implementation may be used from any number of threads at once.

Raises: `InvalidName`, `OutOfRange` (fix the call) · `ObjectNotFound` · `AlreadyExists` · `ObjectStoreUnavailable` (retries ran
out) · `AccessDenied`, `DiskFull`, `StorageFault` · `ChecksumMismatch` (only where a digest was given).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Protocol

import msgspec

from quire.core.errors import (
    AlreadyExists,
    ChecksumMismatch,
    InvalidInput,
    InvalidName,
    ObjectNotFound,
    ObjectStoreUnavailable,
    OutOfRange,
)
from quire.durable.checksums import crc64 as crc64_of

KEY_BYTES_MAX = 1024
"""The limit of S3 and GCS for a whole name. Ours are ~40 bytes plus the configured prefix."""

SEGMENT_BYTES_MAX = 255
"""The limit of Linux file systems for one directory entry."""

TEMPORARY_SEGMENT = ".tmp"
"""The path backend stages its writes under this name, so no key may start with it, in any store."""

PAGE_OBJECTS = 1000
"""Objects per listing page: the most that S3 and GCS return per request (Azure: 5000)."""

Buffer = bytes | bytearray | memoryview


class ObjectInfo(msgspec.Struct, frozen=True, kw_only=True):
    """Metadata of an object, available without reading it."""

    key: str
    size_bytes: int
    etag: str | None
    """Changes when the object changes; opaque, and not comparable between stores."""
    modified_ms: int
    """Time of the last change in milliseconds, by the *store's* clock: for display and generous grace periods, never for
    ordering (M8)."""


class PutResult(msgspec.Struct, frozen=True, kw_only=True):
    """The outcome of a put."""

    key: str
    size_bytes: int
    """Size of the stored object. An adopted object may differ in size from the data offered."""
    etag: str | None
    adopted: bool
    """True if the object existed already and the caller's `identity` accepted it."""


class Range(msgspec.Struct, frozen=True, kw_only=True):
    """`length` bytes from `offset`."""

    offset: int
    length: int


class ExistingObject(msgspec.Struct, frozen=True):
    """The object that a create-only put found under its key, for the caller's `identity` to inspect."""

    store: ObjectStore
    info: ObjectInfo

    def read(self, offset: int, length: int) -> bytes:
        """Read a range, for example the footer that holds the identity."""
        return self.store.get_range(self.info.key, offset, length)

    def read_tail(self, length: int) -> bytes:
        """Read the last `length` bytes, or the whole object if it is shorter."""
        length = min(length, self.info.size_bytes)
        return self.store.get_range(self.info.key, self.info.size_bytes - length, length)

    def read_all(self) -> bytes:
        return self.store.get(self.info.key)


Identity = Callable[[ExistingObject], bool]
"""Returns whether the existing object is the one being put. It may read; it must not write."""


class ObjectStore(Protocol):
    """Verified, durable, immutable objects by key. The module docstring states the rules."""

    @property
    def url(self) -> str:
        """The URL of the store, without credentials: for messages and for opening it again."""

    def put(
        self,
        key: str,
        data: Buffer,
        *,
        create_only: bool = False,
        identity: Identity | None = None,
        sha256: bytes | None = None,
    ) -> PutResult:
        """Store `data` under `key`, durably. `sha256` is compared with the digest of `data` before anything is sent."""

    def put_file(
        self, key: str, path: str, *, create_only: bool = False, identity: Identity | None = None
    ) -> PutResult:
        """Store the contents of a local file in bounded memory. The file must not change meanwhile."""

    def get(self, key: str) -> bytes:
        """Return the whole object."""

    def get_range(self, key: str, offset: int, length: int) -> bytes:
        """Return exactly `length` bytes from `offset`; raise `OutOfRange` if the object is too short."""

    def get_ranges(self, key: str, ranges: Sequence[Range]) -> list[bytes]:
        """Return several ranges of one object, in the order of `ranges`. Neighbouring ranges may share a request."""

    def get_verified(
        self, key: str, *, size_bytes: int, sha256: bytes | None = None, crc64: int | None = None
    ) -> bytes:
        """Return the whole object; raise `ChecksumMismatch` if its size or digests differ."""

    def head(self, key: str) -> ObjectInfo:
        """Return size, etag and modification time, without the body."""

    def list_pages(
        self, prefix: str = "", *, start_after: str = "", page_objects: int = PAGE_OBJECTS
    ) -> Iterator[Sequence[ObjectInfo]]:
        """Yield the objects under `prefix` whose keys sort after `start_after`, in key order, in non-empty pages."""

    def list_prefixes(self, prefix: str = "") -> list[str]:
        """Return the direct children of `prefix` that have objects below them, sorted. Sweeps are partitioned by them (O3)."""

    def close(self) -> None:
        """Release connections and descriptors. Closing twice is allowed."""


class DeletableStore(ObjectStore, Protocol):
    """What `open_store` returns. Only the collector uses it as such (A3); all other code gets an `ObjectStore`."""

    def delete(self, key: str) -> None:
        """Delete an object. A missing object is not an error."""

    def delete_many(self, keys: Iterable[str]) -> None:
        """Delete objects in bulk. Missing objects are not errors. If it raises, some may be left: call again."""


def list_objects(store: ObjectStore, prefix: str = "", *, start_after: str = "") -> Iterator[ObjectInfo]:
    """Yield the objects of `list_pages` one at a time."""
    for page in store.list_pages(prefix, start_after=start_after):
        yield from page


def exists(store: ObjectStore, key: str) -> bool:
    """Return whether the store has an object with this name."""
    try:
        store.head(key)
    except ObjectNotFound:
        return False
    return True


def check_key(key: str) -> str:
    """Return `key` if every store can hold it under exactly this name; raise `InvalidName` otherwise.

    >>> check_key("00000001/0000002a/base:00000003")
    '00000001/0000002a/base:00000003'
    >>> check_key("../secret")
    Traceback (most recent call last):
        ...
    quire.core.errors.InvalidName: a key may not contain the segment '..' (key='../secret')
    """
    if not key:
        raise InvalidName("a key may not be empty")
    if not key.isprintable():
        # Covers control characters, lone surrogates (not encodable) and line separators in one test.
        raise InvalidName("a key may only contain printable characters", key=key)
    if "\\" in key:
        raise InvalidName("a key may not contain a backslash: some stores treat it as a separator", key=key)
    if len(key.encode()) > KEY_BYTES_MAX:
        raise InvalidName(f"a key may have at most {KEY_BYTES_MAX} bytes", key=key[:64] + "…")
    segments = key.split("/")
    for segment in segments:
        if segment in ("", ".", ".."):
            raise InvalidName(f"a key may not contain the segment {segment!r}", key=key)
        if len(segment.encode()) > SEGMENT_BYTES_MAX:
            raise InvalidName(f"a segment of a key may have at most {SEGMENT_BYTES_MAX} bytes", key=key[:64] + "…")
    if segments[0] == TEMPORARY_SEGMENT:
        raise InvalidName(f"keys under {TEMPORARY_SEGMENT!r} are reserved for writes in progress", key=key)
    return key


def check_prefix(prefix: str) -> str:
    """Return `prefix` without its trailing '/' if a key could begin with it; '' covers every key."""
    prefix = prefix.removesuffix("/")
    return check_key(prefix) if prefix else ""


def key_below(prefix: str, suffix: str) -> str:
    """Return the checked key of an object below the prefix of a namespace.

    >>> key_below("tenant-7/", "00000001/0000002a/base:00000003")
    'tenant-7/00000001/0000002a/base:00000003'
    """
    prefix = check_prefix(prefix)
    return check_key(f"{prefix}/{suffix}" if prefix else suffix)


def check_listing(prefix: str, start_after: str, page_objects: int) -> str:
    """Check the arguments of a listing and return its prefix."""
    if start_after:
        check_key(start_after)
    if page_objects < 1:
        raise OutOfRange("a page holds at least one object", value=page_objects)
    return check_prefix(prefix)


def check_range(key: str, offset: int, length: int) -> None:
    """Refuse a range that no object could satisfy."""
    if offset < 0 or length < 0:
        raise OutOfRange("a range may not start or end below zero", key=key, offset=offset, length=length)


def merge_ranges(ranges: Iterable[Range], *, gap_bytes: int) -> list[Range]:
    """Return the fewest ranges that cover `ranges`: those at most `gap_bytes` apart are joined, empty ones are dropped.

    >>> merge_ranges([Range(offset=90, length=9), Range(offset=0, length=10), Range(offset=12, length=3)], gap_bytes=5)
    [Range(offset=0, length=15), Range(offset=90, length=9)]
    """
    merged: list[Range] = []
    for span in sorted((span for span in ranges if span.length > 0), key=lambda span: span.offset):
        if merged and span.offset <= (last := merged[-1]).offset + last.length + gap_bytes:
            end = max(last.offset + last.length, span.offset + span.length)
            merged[-1] = Range(offset=last.offset, length=end - last.offset)
        else:
            merged.append(span)
    return merged


def past_the_end(key: str, offset: int, length: int, size_bytes: int | None) -> OutOfRange:
    """Return the error for a range that the object does not cover."""
    return OutOfRange(
        "the object ends before the range does",
        hint="if its catalog row records more bytes, the object is truncated: run `quire verify`",
        key=key,
        offset=offset,
        length=length,
        **({} if size_bytes is None else {"size_bytes": size_bytes}),
    )


def check_digest_before_put(key: str, data: Buffer, sha256: bytes | None) -> None:
    """Refuse to store bytes other than those the caller hashed, so that data corrupted in memory is never published."""
    if sha256 is None:
        return
    actual = hashlib.sha256(data).digest()
    if actual != sha256:
        raise ChecksumMismatch(
            "the data changed between hashing and storing it; nothing was stored",
            hint="put it again from its source; if the error persists, test the machine's memory",
            key=key,
            expected=sha256.hex(),
            actual=actual.hex(),
        )


CREATE_ROUNDS = 4
"""How often a name may be found taken and then free before the put gives up. More often means that another process keeps
deleting the object."""


class NameIsTaken(Exception):
    """The store reports that the name is taken. Used inside `objects/` only."""


def create_or_adopt(
    store: ObjectStore, key: str, create: Callable[[], PutResult], identity: Identity | None
) -> PutResult:
    """Create the object, or adopt the existing one if `identity` accepts it (P11)."""
    for _ in range(CREATE_ROUNDS):
        try:
            return create()
        except NameIsTaken:
            pass
        try:
            info = store.head(key)
            same = identity is not None and identity(ExistingObject(store, info))
        except ObjectNotFound:
            # S3 also reports "exists" while another create of the same name is in progress, which may still fail; or the
            # object was deleted meanwhile. The name may be free now.
            continue
        if same:
            return PutResult(key=key, size_bytes=info.size_bytes, etag=info.etag, adopted=True)
        raise AlreadyExists(
            "an object with this name already exists"
            + ("" if identity is None else " and it is not the one being written"),
            hint="nothing was overwritten; two writers share a name or a generation: run `quire verify`",
            store=store.url,
            key=key,
            size_bytes=info.size_bytes,
            etag=info.etag,
        )
    raise ObjectStoreUnavailable(
        "the object kept being created and deleted during the write",
        hint="look for another process that writes to this bucket",
        store=store.url,
        key=key,
    )


def read_verified(store: ObjectStore, key: str, *, size_bytes: int, sha256: bytes | None, crc64: int | None) -> bytes:
    """Return the object if its size and digests match its catalog row."""
    if sha256 is None and crc64 is None:
        raise InvalidInput("a verified read needs a digest: sha256 or crc64", key=key)
    data = store.get(key)
    if _difference(data, size_bytes, sha256, crc64) is None:
        return data
    # Read again: the data may have been corrupted in transit, and a false alarm about stored data is expensive.
    data = store.get(key)
    difference = _difference(data, size_bytes, sha256, crc64)
    if difference is None:
        return data
    what, expected, actual = difference
    raise ChecksumMismatch(
        f"the {what} of the object does not match the recorded one, in two reads",
        hint="run `quire verify` to see what else is damaged, then restore the object from a copy of the store",
        store=store.url,
        key=key,
        expected=expected,
        actual=actual,
    )


def _difference(
    data: bytes, size_bytes: int, sha256: bytes | None, crc64: int | None
) -> tuple[str, int | str, int | str] | None:
    """Return the first difference as (name, expected, actual), cheapest test first; `None` if there is none."""
    if len(data) != size_bytes:
        return "size", size_bytes, len(data)
    if crc64 is not None and (actual_crc := crc64_of(data)) != crc64:
        return "crc64", f"{crc64:016x}", f"{actual_crc:016x}"
    if sha256 is not None and (actual_sha := hashlib.sha256(data).digest()) != sha256:
        return "sha256", sha256.hex(), actual_sha.hex()
    return None
