"""What every implementation does the same way: adopting an existing object, and reading against a digest.

Terms: see `quire.objects.api`.

Rules
  1. `create_or_adopt` never overwrites: `create` must be the store's atomic "only if the name is free".
  2. "Exists" is believed only after the object was seen: S3 also answers 409 while another create of the same name is
     under way, and that one may still fail. Then the create is tried again, a bounded number of times.
  3. A digest that does not match is read once more before it is called corruption: the bytes may have been garbled on
     the way, and a false alarm about stored data is expensive.

Threads: functions without state.

Raises: `AlreadyExists`, `ObjectStoreUnavailable`, `ChecksumMismatch`, and what the store raises.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable

from quire.core.errors import (
    AlreadyExists,
    ChecksumMismatch,
    InvalidInput,
    ObjectNotFound,
    ObjectStoreUnavailable,
)
from quire.durable.checksums import crc64 as crc64_of
from quire.objects.api import ExistingObject, Identity, ObjectStore, PutResult

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
            continue  # rule 2, or it was deleted under our eyes: the name may be free now
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
    """The object, if size and digests are as its catalog row says (rule 3)."""
    if sha256 is None and crc64 is None:
        raise InvalidInput("a verified read needs a digest: sha256 or crc64", key=key)
    data = store.get(key)
    if _difference(data, size_bytes, sha256, crc64) is None:
        return data
    data = store.get(key)
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
