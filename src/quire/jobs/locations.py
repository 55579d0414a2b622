"""Where an artifact's bytes are: a file below the store's directory, an object, or both.

The object is in the store's own object store or in the namespace its row names, whatever the URL (O2). A location is small
and picklable, and says everything an executor needs: no manifest is asked while bytes move. Names are built in
`durable.names` alone; a row's `suffix` replaces the canonical name below its namespace.

Pure; safe to import on an executor.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from quire.core.errors import AccessDenied, InvalidInput, QuireError, Unavailable
from quire.core.ids import ArtifactKey, ArtifactKind
from quire.durable.names import TEMPORARY, CachedChunkFile, StreamSegmentFile, Tier, WalSegmentFile, object_key
from quire.manifest.records import NamespaceRecord, Residency, WalFormat, WalRecord
from quire.objects.api import ObjectStore, key_below

OpenStore = Callable[[str], ObjectStore]
"""Opens (or has open) the object store at a URL."""


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
        """Close them all."""
        with self._lock:
            opened, self._open = self._open, {}
        for store in opened.values():
            store.close()


class ArtifactRow(Protocol):
    """What chunk, delta and WAL rows have in common."""

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
    """Where one artifact's bytes may be."""

    key: ArtifactKey
    residency: Residency
    local: str
    """Path of the file, absolute."""
    url: str
    """Of the object store."""
    object_key: str
    size_bytes: int
    sha256: bytes
    """Of the object; empty if it was never computed."""
    crc64: int = 0
    """Of a WAL segment's `size_bytes` bytes; 0 if it was never computed."""
    is_announced: bool = False
    """An upload has begun, however it ended: set before its first byte is sent, so that a deletion looks for the object,
    too."""

    @property
    def has_local(self) -> bool:
        """Whether the catalog says that there is a file."""
        return self.residency in (Residency.LOCAL, Residency.LOCAL_AND_REMOTE)

    @property
    def has_remote(self) -> bool:
        """Whether the catalog says that there is an object."""
        return self.residency is not Residency.LOCAL

    @property
    def may_have_remote(self) -> bool:
        """Whether there may be an object that the catalog does not promise."""
        return self.has_remote or self.is_announced

    @property
    def staged(self) -> str:
        """Where the file is written before it gets its name."""
        return self.local + TEMPORARY

    @property
    def is_page_segment(self) -> bool:
        """Whether it is a segment of a page database's WAL; those of streams have other names."""
        return self.key.kind is ArtifactKind.WAL and self.local.endswith(
            WalSegmentFile(db_id=self.key.origin_db_id, segment_id=self.key.id).path
        )

    @property
    def may_be_longer(self) -> bool:
        """Whether the file may have more bytes than the artifact: WAL segments are preallocated (P1)."""
        return self.key.kind is ArtifactKind.WAL


def local_name(key: ArtifactKey, row: ArtifactRow) -> str:
    """The path of an artifact's file, relative to the store."""
    if key.kind is not ArtifactKind.WAL:
        return CachedChunkFile(db_id=key.origin_db_id, key=key).path
    if isinstance(row, WalRecord) and row.format is WalFormat.APPEND_ONLY:
        return StreamSegmentFile(stream_id=key.origin_db_id, tier=Tier.HOT, segment_id=key.id).path
    return WalSegmentFile(db_id=key.origin_db_id, segment_id=key.id).path


def remote_name(key: ArtifactKey, row: ArtifactRow, namespace: NamespaceRecord | None, own_url: str) -> tuple[str, str]:
    """(URL of the object store, key in it) of an artifact's object."""
    suffix = row.suffix or object_key(key)
    if not row.namespace_id:
        return own_url, suffix
    if namespace is None:
        raise InvalidInput("the artifact's namespace is not in the manifest", namespace_id=row.namespace_id)
    return namespace.url or own_url, key_below(namespace.prefix, suffix)


# ── what could not be reached ─────────────────────────────────────────────────────────────────────────────────────────
@dataclass(slots=True)
class AttemptFailures:
    """The artifacts and object stores that one attempt leaves alone: it goes on with the rest, and fails at its end."""

    keys: set[ArtifactKey] = field(default_factory=set)
    urls: set[str] = field(default_factory=set)
    first: QuireError | None = None

    def add(self, place: ArtifactLocation, error: QuireError) -> None:
        """Leave this artifact alone; and its object store, if it is that which cannot be reached."""
        self.first = self.first or error
        self.keys.add(place.key)
        if isinstance(error, (Unavailable, AccessDenied)):
            self.urls.add(place.url)

    def spares(self, place: ArtifactLocation) -> bool:
        """Whether to leave an artifact alone."""
        return place.key in self.keys or (place.may_have_remote and place.url in self.urls)

    def settle(self) -> None:
        """At the end of the attempt: fail with the first error, if there was one."""
        if self.first is not None:
            raise self.first
