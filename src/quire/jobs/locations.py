"""Locations of an artifact's bytes: a file below the store's directory, an object, or both.

The object is in the store's own object store or in the namespace that its row names, whatever the URL (O2). A location is small
and picklable and has everything that an executor needs: the manifest is not read while bytes move. Only `durable.names` builds
names; a row's `suffix` replaces the canonical name below its namespace.

Pure; safe to import on an executor.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Protocol

from quire.core.errors import AccessDenied, InvalidInput, QuireError, Unavailable
from quire.core.ids import ArtifactKey, ArtifactKind
from quire.durable.names import TEMPORARY, CachedChunkFile, StreamSegmentFile, Tier, WalSegmentFile, object_key
from quire.manifest.records import NamespaceRecord, Residency, WalFormat, WalRecord
from quire.objects.api import ObjectStore, key_below

OpenStore = Callable[[str], ObjectStore]
"""Returns the object store at a URL, opened if necessary."""


@dataclass(slots=True)
class StorePool:
    """Object stores by URL, each opened once. `pool` is an `OpenStore`."""

    opener: OpenStore
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _open: dict[str, ObjectStore] = field(default_factory=dict)

    def __call__(self, url: str) -> ObjectStore:
        with self._lock:
            if url not in self._open:
                self._open[url] = self.opener(url)
            return self._open[url]

    def close(self) -> None:
        """Close all object stores."""
        with self._lock:
            opened, self._open = self._open, {}
        with ExitStack() as closing:
            for store in opened.values():
                closing.callback(store.close)


class ArtifactRow(Protocol):
    """The attributes that chunk, delta and WAL rows have in common."""

    @property
    def residency(self) -> Residency: ...
    @property
    def namespace_id(self) -> int: ...
    @property
    def suffix(self) -> str: ...
    @property
    def sha256(self) -> bytes: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ArtifactLocation:
    """The possible locations of one artifact's bytes."""

    key: ArtifactKey
    residency: Residency
    local: str
    """Absolute path of the file."""
    url: str
    """URL of the object store."""
    object_key: str
    size_bytes: int
    sha256: bytes
    """SHA-256 of the object; empty if it was never computed."""
    crc64: int = 0
    """crc64 of the first `size_bytes` bytes of a WAL segment; 0 if it was never computed."""
    is_announced: bool = False
    """Whether an upload has begun, whatever its outcome. Set before the first byte is sent, so that a deletion looks for the
    object, too."""

    @property
    def has_local(self) -> bool:
        """Whether the file exists according to the catalog."""
        return self.residency in (Residency.LOCAL, Residency.LOCAL_AND_REMOTE)

    @property
    def has_remote(self) -> bool:
        """Whether the object exists according to the catalog."""
        return self.residency is not Residency.LOCAL

    @property
    def may_have_remote(self) -> bool:
        """Whether an object may exist, even if the catalog does not guarantee it."""
        return self.has_remote or self.is_announced

    @property
    def staged(self) -> str:
        """Path under which the file is written before it is renamed to `local`."""
        return self.local + TEMPORARY

    @property
    def is_page_segment(self) -> bool:
        """Whether it is a segment of a page database's WAL; segments of streams have other names."""
        return self.key.kind is ArtifactKind.WAL and self.local.endswith(
            WalSegmentFile(db_id=self.key.origin_db_id, segment_id=self.key.id).path
        )

    @property
    def may_be_longer(self) -> bool:
        """Whether the file may have more bytes than the artifact: WAL segments are preallocated (P1)."""
        return self.key.kind is ArtifactKind.WAL


def local_name(key: ArtifactKey, row: ArtifactRow) -> str:
    """Return the path of an artifact's file, relative to the store."""
    if key.kind is not ArtifactKind.WAL:
        return CachedChunkFile(db_id=key.origin_db_id, key=key).path
    if isinstance(row, WalRecord) and row.format is WalFormat.APPEND_ONLY:
        return StreamSegmentFile(stream_id=key.origin_db_id, tier=Tier.HOT, segment_id=key.id).path
    return WalSegmentFile(db_id=key.origin_db_id, segment_id=key.id).path


def remote_name(key: ArtifactKey, row: ArtifactRow, namespace: NamespaceRecord | None, own_url: str) -> tuple[str, str]:
    """Return (URL of the object store, key in it) of an artifact's object."""
    suffix = row.suffix or object_key(key)
    if not row.namespace_id:
        return own_url, suffix
    if namespace is None:
        raise InvalidInput("the artifact's namespace is not in the manifest", namespace_id=row.namespace_id)
    return namespace.url or own_url, key_below(namespace.prefix, suffix)


# ── failures of one attempt ───────────────────────────────────────────────────────────────────────────────────────────
@dataclass(slots=True)
class AttemptFailures:
    """The artifacts and object stores that an attempt skips after an error: it continues with the rest and fails at its end."""

    keys: set[ArtifactKey] = field(default_factory=set)
    urls: set[str] = field(default_factory=set)
    first: QuireError | None = None

    def add(self, place: ArtifactLocation, error: QuireError) -> None:
        """Skip this artifact from now on, and its whole object store if that cannot be reached."""
        self.first = self.first or error
        self.keys.add(place.key)
        if isinstance(error, (Unavailable, AccessDenied)):
            self.urls.add(place.url)

    def should_skip(self, place: ArtifactLocation) -> bool:
        """Return whether to skip an artifact."""
        return place.key in self.keys or (place.may_have_remote and place.url in self.urls)

    def settle(self) -> None:
        """Raise the first error, if there was one. Called at the end of the attempt."""
        if self.first is not None:
            raise self.first
