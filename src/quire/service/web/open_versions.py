"""Versions of databases that are read as files. They stay open for a moment, because a reader of ranges sends several requests.

Rules
  1. An open version is held by a lease, so that neither a checkpoint nor the collector removes its pages, even if its snapshot
     is dropped; reading renews the lease.
  2. At most `OPEN_MAX` versions are open; an unused one is closed when another needs its place, or after `IDLE_SECONDS`.
  3. A reader belongs to one thread at a time: parts of the same version are read one after another.

Threads: any. Raises what opening raises, and `Overloaded`.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

from quire.core.clock import Clock
from quire.core.errors import InvalidInput, Overloaded, StoreClosed
from quire.manifest.store import ManifestStore
from quire.pages.anchors import lend_reader
from quire.pages.catalog import find_database
from quire.pages.engine import PageEngine
from quire.pages.snapshot import Snapshot
from quire.service.version_address import DatabaseVersion
from quire.sqlite.dbfile import MAGIC
from quire.sqlite.files import read_part

OPEN_MAX = 64
IDLE_SECONDS = 10.0
LEASE_SECONDS = 120.0
RENEW_SECONDS = 30.0
TAGS = {"reader": "http file"}
Key = tuple[int, str, int]
"""(database, kind of version, its number): two databases that had the same name one after the other have different keys."""


@dataclass(slots=True)
class OpenVersion:
    """A version that is open as a file."""

    key: Key
    reader: Snapshot
    lease_id: int
    """0: the reader renews its own lease."""
    is_fixed: bool
    """Whether its address will always name this version."""
    store_id: str
    """A clone and its origin can give the same numbers to different versions."""
    lock: threading.Lock = field(default_factory=threading.Lock)
    # guarded by the lock of `OpenVersions`
    users: int = 0
    used_at: float = 0.0
    # guarded by `lock`
    renewed_at: float = 0.0

    @property
    def size(self) -> int:
        """The size of the file in bytes."""
        return self.reader.size_pages * self.reader.page_size

    @property
    def tag(self) -> str:
        """The `ETag` of the version; another database of the same name has another one, also one of another store."""
        return f'"{self.store_id}-{self.reader.db_id}-{self.reader.lsn}"'


class OpenVersions:
    """The open versions."""

    def __init__(self, manifest: ManifestStore, pages: PageEngine) -> None:
        self._manifest = manifest
        self._pages = pages
        self._clock: Clock = manifest.clock
        with manifest.read() as txn:
            self._store_id = txn.store_id()
        self._lock = threading.Lock()
        # guarded by _lock
        self._open: dict[Key, OpenVersion] = {}
        self._closed = False

    @property
    def now(self) -> int:
        """The number of open versions."""
        return len(self._open)

    def take(self, wanted: DatabaseVersion) -> OpenVersion:
        """Return a version, which is open until it is given back. Blocks for the disk."""
        key = self._key(wanted)
        with self._lock:
            if (version := self._open.get(key)) is not None:
                version.users += 1
                return version
        idle = self._make_room()
        for version in idle:
            self._close(version)
        # Outside the lock, because it reads from the disk: another thread may open the same version meanwhile.
        version = self._opened(key, wanted)
        with self._lock:
            if self._closed:
                other: OpenVersion | None = None
            else:
                other = self._open.setdefault(key, version)
                other.users += 1
        if other is not version:
            self._close(version)  # another thread opened it first, or the server closes
        if other is None:
            raise StoreClosed("the store is closed", hint="open it again")
        return other

    def give_back(self, version: OpenVersion) -> None:
        """Give a version back; it stays open for a moment."""
        with self._lock:
            version.users -= 1
            version.used_at = self._clock.monotonic()

    def read(self, version: OpenVersion, part: range, *, cold: bool) -> bytes:
        """Read some bytes of the file; blocks for the disk. The header states that there is no log next to the file (Q3).
        `cold` bypasses the caches."""
        with version.lock:
            now = self._clock.monotonic()
            if version.lease_id and now - version.renewed_at >= RENEW_SECONDS:
                self._manifest.leases.renew(version.lease_id)
                version.renewed_at = now
            reader, page_size = version.reader, version.reader.page_size
            first, last = part.start // page_size, (part.stop - 1) // page_size
            images = reader.read_pages(range(first, last + 1), cold=cold)
            return read_part(images.__getitem__, page_size, reader.size_pages, len(part), part.start)

    # ── opening and closing ───────────────────────────────────────────────────────────────────────────────────────────
    def _key(self, wanted: DatabaseVersion) -> Key:
        with self._manifest.read() as txn:
            db_id, _ = find_database(txn, wanted.name)
        if isinstance(wanted.at, str):
            return db_id, "snapshot", self._manifest.snapshots.get(db_id, wanted.at).snapshot_id
        if isinstance(wanted.at, int):
            return db_id, "epoch", wanted.at
        # A later commit may still belong to a time that is not over, so the newest lsn is part of the key.
        moment = wanted.at.isoformat() if wanted.at is not None else ""
        return db_id, moment, self._pages.open(db_id).wal.durable.lsn

    def _opened(self, key: Key, wanted: DatabaseVersion) -> OpenVersion:
        lease_id = 0
        if wanted.at is None:
            reader = self._pages.open(key[0]).open_snapshot(tags=TAGS)
        else:
            lease_id, reader = lend_reader(self._pages, key[0], wanted.at, LEASE_SECONDS, tags=TAGS)
        reader.__enter__()  # it renews itself until it is closed
        is_fixed = isinstance(wanted.at, int)
        version = OpenVersion(key, reader, lease_id, is_fixed, self._store_id, renewed_at=self._clock.monotonic())
        try:
            if reader.size_pages and not reader.read_page(0).startswith(MAGIC):
                hint = "`quire sqlite import` makes one"
                raise InvalidInput("this version holds no SQLite database", hint=hint, name=wanted.name)
        except BaseException:
            self._close(version)
            raise
        return version

    def _make_room(self) -> list[OpenVersion]:
        """Remove and return the longest unused version, if there is no free place (rule 2)."""
        with self._lock:
            if len(self._open) < OPEN_MAX:
                return []
            resting = [version for version in self._open.values() if not version.users]
            if not resting:
                raise Overloaded("too many versions are being read", hint="try again later", max=OPEN_MAX)
            oldest = min(resting, key=lambda version: version.used_at)
            return [self._open.pop(oldest.key)]

    def close_idle(self, seconds: float = IDLE_SECONDS) -> None:
        """Close the versions that were not read for this long."""
        before = self._clock.monotonic() - seconds
        with self._lock:
            idle = [version for version in self._open.values() if not version.users and version.used_at <= before]
            for version in idle:
                del self._open[version.key]
        for version in idle:
            self._close(version)

    def close(self) -> None:
        """Close all versions; no more are opened."""
        with self._lock:
            self._closed = True
            versions = list(self._open.values())
            self._open.clear()
        for version in versions:
            self._close(version)

    def _close(self, version: OpenVersion) -> None:
        with version.lock:
            version.reader.close()
            if version.lease_id:
                self._manifest.leases.release(version.lease_id)
