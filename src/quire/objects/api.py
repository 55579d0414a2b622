"""The one protocol every object store implements, the values that cross it, and what all implementations do the same way.

A key is '/'-separated segments without a leading '/' (`check_key`). A prefix is whole segments: `a/b` covers `a/b/c`, not
`a/bc`. No key may be a prefix of another: a directory cannot also be a file, and a store must be movable from a bucket to a
path and back.

An object is visible whole or not at all, and immutable. When `put` returns it is durable. A *create-only* put never replaces:
either the name was free, or the caller's `identity` says that the object under it is the one being put, and it is *adopted*.
The caller knows the format; bytes are never compared, because two runs of one plan may compress differently and still be the
same artifact (P11). Reads return exactly the bytes asked for or raise. Deleting a missing object is a success. Listings are
sorted by key (byte order of UTF-8), complete for objects that existed throughout, in bounded pages.

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
"""What S3 and GCS allow for a whole name; ours are ~40 bytes, a configured prefix comes on top."""

SEGMENT_BYTES_MAX = 255
"""What Linux file systems allow for one name in a directory."""

TEMPORARY_SEGMENT = ".tmp"
"""The path backend stages its writes under this name, so no key may start with it, in any store."""

PAGE_OBJECTS = 1000
"""Objects per listing page: what S3, GCS and Azure return per request at most (Azure: 5000)."""

Buffer = bytes | bytearray | memoryview


class ObjectInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What a store knows about an object without reading it."""

    key: str
    size_bytes: int
    etag: str | None
    """Changes when the object changes; opaque, and not comparable between stores."""
    modified_ms: int
    """By the *store's* clock: for people and for generous grace periods, never for ordering (M8)."""


class PutResult(msgspec.Struct, frozen=True, kw_only=True):
    """What a put did."""

    key: str
    size_bytes: int
    """Of the object that is now there: for an adopted object its own size, which may differ from the data offered."""
    etag: str | None
    adopted: bool
    """True if the object was there already and the caller's `identity` accepted it."""


class Range(msgspec.Struct, frozen=True, kw_only=True):
    """`length` bytes from `offset`."""

    offset: int
    length: int


class ExistingObject(msgspec.Struct, frozen=True):
    """The object a create-only put found under its key, for the caller's `identity` to look at."""

    store: ObjectStore
    info: ObjectInfo

    def read(self, offset: int, length: int) -> bytes:
        """Some of its bytes, e.g. the footer that holds the identity."""
        return self.store.get_range(self.info.key, offset, length)

    def read_tail(self, length: int) -> bytes:
        """Its last `length` bytes, or all of it if it is shorter."""
        length = min(length, self.info.size_bytes)
        return self.store.get_range(self.info.key, self.info.size_bytes - length, length)

    def read_all(self) -> bytes:
        return self.store.get(self.info.key)


Identity = Callable[[ExistingObject], bool]
"""Says whether the object that is already there is the one we meant to put. It may read; it must not write."""


class ObjectStore(Protocol):
    """Verified, durable, immutable objects by key. See the rules above."""

    @property
    def url(self) -> str:
        """Where the store is, without credentials: for messages and for opening it again."""

    def put(
        self,
        key: str,
        data: Buffer,
        *,
        create_only: bool = False,
        identity: Identity | None = None,
        sha256: bytes | None = None,
    ) -> PutResult:
        """Store `data` under `key`, durable on return. `sha256` is checked against `data` before anything is sent."""

    def put_file(
        self, key: str, path: str, *, create_only: bool = False, identity: Identity | None = None
    ) -> PutResult:
        """Store the contents of a local file, which must not change meanwhile, in bounded memory."""

    def get(self, key: str) -> bytes:
        """The whole object."""

    def get_range(self, key: str, offset: int, length: int) -> bytes:
        """Exactly `length` bytes from `offset`; `OutOfRange` if the object ends before that."""

    def get_ranges(self, key: str, ranges: Sequence[Range]) -> list[bytes]:
        """Several ranges of one object, in the order asked for; neighbours may share a request."""

    def get_verified(
        self, key: str, *, size_bytes: int, sha256: bytes | None = None, crc64: int | None = None
    ) -> bytes:
        """The whole object, if it has this size and these digests; else `ChecksumMismatch`."""

    def head(self, key: str) -> ObjectInfo:
        """Size, etag and time, without the body."""

    def list_pages(
        self, prefix: str = "", *, start_after: str = "", page_objects: int = PAGE_OBJECTS
    ) -> Iterator[Sequence[ObjectInfo]]:
        """The objects under `prefix` whose keys sort after the key `start_after`, in non-empty pages, in key order."""

    def list_prefixes(self, prefix: str = "") -> list[str]:
        """The direct children of `prefix` that have objects below them, sorted: how a sweep is partitioned (O3)."""

    def close(self) -> None:
        """Give back connections and descriptors. Closing twice is fine."""


class DeletableStore(ObjectStore, Protocol):
    """What `open_store` gives. Only the collector uses it as such (A3): everybody else is given an `ObjectStore`."""

    def delete(self, key: str) -> None:
        """Remove an object; a missing one is fine."""

    def delete_many(self, keys: Iterable[str]) -> None:
        """Remove objects in bulk; missing ones are fine. If it raises, some are gone and some are not: call again."""


def list_objects(store: ObjectStore, prefix: str = "", *, start_after: str = "") -> Iterator[ObjectInfo]:
    """`list_pages`, one object at a time."""
    for page in store.list_pages(prefix, start_after=start_after):
        yield from page


def check_key(key: str) -> str:
    """`key`, if every store can hold it under exactly this name.

    >>> check_key("00000001/0000002a/base:00000003")
    '00000001/0000002a/base:00000003'
    >>> check_key("../secret")
    Traceback (most recent call last):
        ...
    quire.core.errors.InvalidName: a key may not have the segment '..' (key='../secret')
    """
    if not key:
        raise InvalidName("a key may not be empty")
    if not key.isprintable():
        # Covers control characters, lone surrogates (not encodable) and line separators in one test.
        raise InvalidName("a key may have printable characters only", key=key)
    if "\\" in key:
        raise InvalidName("a key may not have a backslash: some stores treat it as a separator", key=key)
    if len(key.encode()) > KEY_BYTES_MAX:
        raise InvalidName(f"a key may have at most {KEY_BYTES_MAX} bytes", key=key[:64] + "…")
    segments = key.split("/")
    for segment in segments:
        if segment in ("", ".", ".."):
            raise InvalidName(f"a key may not have the segment {segment!r}", key=key)
        if len(segment.encode()) > SEGMENT_BYTES_MAX:
            raise InvalidName(f"a segment of a key may have at most {SEGMENT_BYTES_MAX} bytes", key=key[:64] + "…")
    if segments[0] == TEMPORARY_SEGMENT:
        raise InvalidName(f"keys under {TEMPORARY_SEGMENT!r} are reserved for writes in progress", key=key)
    return key


def check_prefix(prefix: str) -> str:
    """`prefix` without a trailing '/', if it could be the beginning of a key; '' means everything."""
    prefix = prefix.removesuffix("/")
    return check_key(prefix) if prefix else ""


def key_below(prefix: str, suffix: str) -> str:
    """The key of an object below the prefix of a namespace, checked.

    >>> key_below("tenant-7/", "00000001/0000002a/base:00000003")
    'tenant-7/00000001/0000002a/base:00000003'
    """
    prefix = check_prefix(prefix)
    return check_key(f"{prefix}/{suffix}" if prefix else suffix)


def check_listing(prefix: str, start_after: str, page_objects: int) -> str:
    """The checked prefix of a listing, if its other arguments make sense too."""
    if start_after:
        check_key(start_after)
    if page_objects < 1:
        raise OutOfRange("a page holds at least one object", value=page_objects)
    return check_prefix(prefix)


def check_range(key: str, offset: int, length: int) -> None:
    """Refuse ranges that no object could satisfy."""
    if offset < 0 or length < 0:
        raise OutOfRange("a range may not begin or extend below zero", key=key, offset=offset, length=length)


def merge_ranges(ranges: Iterable[Range], *, gap_bytes: int) -> list[Range]:
    """The fewest ranges that cover these, joining what lies at most `gap_bytes` apart; empty ones vanish.

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
    """The error for a range that the object does not cover."""
    return OutOfRange(
        "the object ends before the range does",
        hint="if its catalog row promises more bytes the object is truncated: run `quire verify`",
        key=key,
        offset=offset,
        length=length,
        **({} if size_bytes is None else {"size_bytes": size_bytes}),
    )


def check_digest_before_put(key: str, data: Buffer, sha256: bytes | None) -> None:
    """Refuse to store bytes that are not the ones the caller hashed: what was garbled in memory is never published."""
    if sha256 is None:
        return
    actual = hashlib.sha256(data).digest()
    if actual != sha256:
        raise ChecksumMismatch(
            "the data changed between hashing and storing it; nothing was stored",
            hint="put it again from its source; if it repeats, test the machine's memory",
            key=key,
            expected=sha256.hex(),
            actual=actual.hex(),
        )


CREATE_ROUNDS = 4
"""How often a name may be taken and then free before the put gives up: more means that somebody deletes what we put."""


class NameIsTaken(Exception):
    """Inside `objects/` only: the store says that the name is not free."""


def create_or_adopt(
    store: ObjectStore, key: str, create: Callable[[], PutResult], identity: Identity | None
) -> PutResult:
    """Create the object, or adopt the one that is there if `identity` says it is the same (P11)."""
    for _ in range(CREATE_ROUNDS):
        try:
            return create()
        except NameIsTaken:
            pass
        try:
            info = store.head(key)
            same = identity is not None and identity(ExistingObject(store, info))
        except ObjectNotFound:
            # S3 also says "exists" while another create of the same name is under way, which may still fail; or the object was
            # deleted meanwhile. The name may be free now.
            continue
        if same:
            return PutResult(key=key, size_bytes=info.size_bytes, etag=info.etag, adopted=True)
        raise AlreadyExists(
            "an object of this name exists" + ("" if identity is None else " and it is not the one being written"),
            hint="nothing was overwritten; two writers share a name or a generation: run `quire verify`",
            store=store.url,
            key=key,
            size_bytes=info.size_bytes,
            etag=info.etag,
        )
    raise ObjectStoreUnavailable(
        "the name kept changing between taken and free", hint="look for a second writer", store=store.url, key=key
    )


def read_verified(store: ObjectStore, key: str, *, size_bytes: int, sha256: bytes | None, crc64: int | None) -> bytes:
    """The object, if size and digests are as its catalog row says."""
    if sha256 is None and crc64 is None:
        raise InvalidInput("a verified read needs a digest: sha256 or crc64", key=key)
    data = store.get(key)
    if _difference(data, size_bytes, sha256, crc64) is None:
        return data
    data = store.get(
        key
    )  # once more: it may have been garbled on the way, and a false alarm about stored data is expensive
    difference = _difference(data, size_bytes, sha256, crc64)
    if difference is None:
        return data
    what, expected, actual = difference
    raise ChecksumMismatch(
        f"the {what} of the object is not the recorded one, in two reads",
        hint="run `quire verify` to see what else is damaged, then restore the object from a copy of the store",
        store=store.url,
        key=key,
        expected=expected,
        actual=actual,
    )


def _difference(
    data: bytes, size_bytes: int, sha256: bytes | None, crc64: int | None
) -> tuple[str, int | str, int | str] | None:
    """What differs first: (name, expected, actual), cheapest test first."""
    if len(data) != size_bytes:
        return "size", size_bytes, len(data)
    if crc64 is not None and (actual_crc := crc64_of(data)) != crc64:
        return "crc64", f"{crc64:016x}", f"{actual_crc:016x}"
    if sha256 is not None and (actual_sha := hashlib.sha256(data).digest()) != sha256:
        return "sha256", sha256.hex(), actual_sha.hex()
    return None
