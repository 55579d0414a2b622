"""Leases on versions, for readers that read files and objects directly: nothing they need is deleted while they read.

Terms
  lease    one query's claim on a version of each of several databases; its id is a reader id, and its rows are rows of
           `snapshot_readers` with the tag `quire.view`: the length of the lease in ms, and the number of a copy
  copy     a version of a key-value set on disk: a directory of links (`lsm/snapshots.py`)
  horizon  the expiry in the rows; a renewal moves it only if the lease itself would reach beyond it
  label    the name of the database, in rows that also have the version as a value: for leases whose readers request it
           later
  holder   a named client that returns for its versions: a consumer of row changes. Its leases are renewed and end
           together, so that none is missing alone

Rows are local. A lease is not a snapshot, a reference or a change, so lists, counts, retention and the feed do not
include it. It holds no floor: checkpoints continue, and the version's segments stay as files until the lease ends.

The rows are committed before the version is looked up. Everything the version needs has a reference at that moment, so
it can reach zero only later, by the manifest's own time, which never goes back (`writer.py`). Therefore an artifact
that reached zero at or after the opening of a live lease is not deleted, nor its file reused, if a database made it
whose artifacts the version uses; until those databases are known, and after a restart, whichever database made it.
Artifacts that reached zero before are deleted as usual. Copies are not shared: they only have to be left alone.

While the owner runs, its memory decides which leases are live. A crash between the commit of the rows and the answer
leaves a lease that is never renewed, and so expires.

Threads: any. Raises `LeaseExpired`, `InvalidInput`.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections import Counter as Counts
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

import msgspec
from msgspec import field
from msgspec.structs import replace

from quire.core.errors import InvalidInput, LeaseExpired, ManifestDamaged
from quire.durable.failpoints import hit
from quire.manifest import tables as t
from quire.manifest.ops.base import Counter
from quire.manifest.ops.local import DropReader, PutReader
from quire.manifest.records import LABEL_TAG

if TYPE_CHECKING:
    from quire.manifest.guard import ManifestGuard
    from quire.manifest.ops.base import Op
    from quire.manifest.reads import ReadTxn
    from quire.manifest.records import ReaderRecord
    from quire.manifest.store import ManifestStore

VIEW_TAG = "quire.view"
HOLDER_TAG = "quire.holder"

LEASE_SECONDS_MAX = 7 * 24 * 3_600.0
DOUBT_SECONDS = 3_600.0

ROWS_AT_ONCE = 16_384
"""Rows per batch, somewhat below the limit of a batch: a lease on a hundred thousand databases takes several."""


class LentVersion(msgspec.Struct, frozen=True):
    """The part of a lease that concerns one database."""

    db_id: int
    lsn: int
    copy: int = 0
    """Number of the directory with the version of a key-value set."""
    label: str = ""
    """Name under which a reader requests the version later."""


class HeldVersion(msgspec.Struct, frozen=True):
    """A version that a holder returns for."""

    label: str
    db_id: int
    lease_id: int
    lsn: int
    """0 for a placeholder: the database was dropped."""


class _Lease(msgspec.Struct):
    """A lease, in memory."""

    ttl_ms: int
    deadline: float
    """In monotonic time."""
    horizon_ms: int
    tags: dict[str, str]
    lent: dict[int, LentVersion] = field(default_factory=dict)
    opened_ms: int = 0
    """When its first row was written, in the manifest's time."""
    origins: dict[int, frozenset[int]] = field(default_factory=dict)
    """By leased database: the other databases that made artifacts its version needs. Lacks the databases in `unknown`."""
    unknown: set[int] = field(default_factory=set)
    """Leased databases whose version has not been looked up yet."""
    needing: Counts[int] = field(default_factory=Counts)
    """How many versions need artifacts of each other database: for forks of one template, a hundred thousand."""
    shared: dict[frozenset[int], frozenset[int]] = field(default_factory=dict)
    """Interned values of `origins`."""
    by_label: list[tuple[str, int]] | None = None
    """(label, database) in order; built on first use."""

    @property
    def holder(self) -> str:
        return self.tags.get(HOLDER_TAG, "")

    def add(self, part: LentVersion, opened_ms: int) -> None:
        self.lent[part.db_id], self.by_label = part, None
        self.opened_ms = min(self.opened_ms or opened_ms, opened_ms)
        if not part.copy and (part.lsn or not part.label):  # a holder's placeholder needs nothing
            self.unknown.add(part.db_id)

    def needs(self, origin: int) -> bool:
        return bool(self.unknown) or origin in self.origins or origin in self.needing

    def set_origins(self, db_id: int, origins: Iterable[int]) -> None:
        """Record the databases that made what the version of a database needs, as found by looking it up."""
        self.forget(db_id)
        others = frozenset(origins) - {db_id}
        self.origins[db_id] = self.shared.setdefault(others, others)
        self.needing.update(others)

    def forget(self, db_id: int) -> None:
        """Discard what is recorded about the needs of a database's version."""
        self.unknown.discard(db_id)
        for origin in self.origins.pop(db_id, ()):
            self.needing[origin] -= 1
            if not self.needing[origin]:
                del self.needing[origin]


class VersionLeases:
    """The leases of one manifest: `manifest.leases`."""

    def __init__(self, manifest: ManifestStore) -> None:
        # constant after construction
        self._manifest = manifest
        self._clock = manifest.clock
        # guarded by _lock
        self._lock = threading.Lock()
        self._leases: dict[int, _Lease] = {}
        self._doubt_until = 0.0
        """In monotonic time. A damaged row may be a lease on anything: until then nothing is deleted, and its reader
        would have renewed it by then."""

    def load(self) -> None:
        """Load the stored leases at the start of an owner; each is live for one more full length (M10).

        Renewals may have been lost with the previous owner, while its readers continue to read.
        """
        with self._manifest.read() as txn:
            rows = list(reader_rows(txn))
        if any(row is None for _, row in rows):
            self._doubt_until = self._clock.monotonic() + DOUBT_SECONDS
        # The writer knows the times of logged commits only, and these rows are local.
        self._manifest.writer.commit_not_before(
            max([row.heartbeat_at_ms for _, row in rows if row is not None], default=0)
        )
        now = self._clock.monotonic()  # read once: leases of one holder end together
        for (db_id, lease_id), row in rows:
            if row is None or not is_view(row):
                continue
            ttl_ms, copy = _mark(row)
            lease = self._leases.get(lease_id)
            if lease is None:
                tags = {name: value for name, value in row.tags.items() if name not in (VIEW_TAG, LABEL_TAG)}
                lease = self._leases[lease_id] = _Lease(ttl_ms, now + ttl_ms / 1000, 0, tags)
            lease.add(LentVersion(db_id, row.snapshot_lsn, copy, row.tags.get(LABEL_TAG, "")), row.opened_at_ms)
        for lease_id, lease in self._leases.items():  # leases of one holder may differ in length
            lease.deadline = max(other.deadline for _, other in self._leases_of_holder(lease_id, lease))

    # ── for the service ───────────────────────────────────────────────────────────────────────────────────────────────
    def hold(
        self, lent: Iterable[LentVersion], seconds: float, *, lease_id: int = 0, tags: dict[str, str] | None = None
    ) -> int:
        """Lease these versions, in a new lease or as part of an existing one; return its id. Durable on return."""
        if not 0 < seconds <= LEASE_SECONDS_MAX:
            raise InvalidInput("a version can be held for at most seven days", seconds=seconds)
        self.expire()
        parts = {part.db_id: part for part in lent}
        if lease_id:
            self.renew(lease_id)
        else:
            lease_id = self._manifest.allocate(Counter.READER)
        ttl_ms = int(seconds * 1000)
        with self._lock:
            existing = self._leases.get(lease_id)
        given = existing or _Lease(ttl_ms, 0.0, 0, dict(tags or {}))
        # Twice the length, so that renewals during the first length need no commit.
        horizon = self._clock.now_ms() + 2 * given.ttl_ms
        guard = self._manifest.submit(self._rows(lease_id, given, parts.values(), horizon))
        # Durable before the caller looks up the version: what is referenced then reaches zero later than this commit.
        guard.result()
        hit("manifest.lease.held")
        with self._lock:
            lease = self._leases.setdefault(lease_id, given)
            lease.deadline = self._clock.monotonic() + lease.ttl_ms / 1000
            lease.horizon_ms = lease.horizon_ms or horizon
            for part in parts.values():
                lease.add(part, guard.committed_at_ms)
        if lease.holder:
            self.renew(lease_id)
        return lease_id

    def record_origins(self, lease_id: int, db_id: int, origins: Iterable[int]) -> None:
        """Record the databases that made what the version of a database needs, as found by looking it up."""
        with self._lock:
            if (lease := self._leases.get(lease_id)) is not None:
                lease.set_origins(db_id, origins)

    def keep_views(self, lease_id: int, views: dict[int, bytes]) -> None:
        """Store versions as values with a lease, by database. Durable on return. Raises `LeaseExpired`."""
        with self._lock:
            lease = self._leases.get(lease_id)
            if lease is None or not views.keys() <= lease.lent.keys():
                raise _ended(lease_id)
            rows = self._rows(lease_id, lease, [lease.lent[db_id] for db_id in views], lease.horizon_ms)
        self._manifest.submit([replace(row, view=views[row.db_id]) for row in rows]).result()

    def labelled(self, lease_id: int, after: str, last: str, limit: int) -> list[tuple[str, int]]:
        """Return the first (label, database) of a lease with labels above `after`, up to `last`. Raises `LeaseExpired`."""
        with self._lock:
            lease = self._leases.get(lease_id)
            if lease is None or not self._is_live(lease):
                raise _ended(lease_id)
            if lease.by_label is None:
                lease.by_label = sorted((part.label, part.db_id) for part in lease.lent.values())
            start = bisect_right(lease.by_label, after, key=lambda item: item[0])
            return [item for item in lease.by_label[start : start + limit] if item[0] <= last]

    def view(self, lease_id: int, db_id: int) -> bytes:
        """Return a version that was stored as a value. Raises `LeaseExpired`."""
        with self._manifest.read() as txn:
            row = txn.get(t.SNAPSHOT_READERS, db_id, lease_id)
        if row is None or not row.view:
            raise _ended(lease_id)
        return row.view

    def held(self, holder: str) -> list[HeldVersion]:
        """Return the versions that a holder has, oldest first."""
        with self._lock:
            leases = [(key, lease) for key, lease in self._leases.items() if lease.holder == holder]
            return sorted(
                (
                    HeldVersion(part.label, part.db_id, lease_id, part.lsn)
                    for lease_id, lease in leases
                    if self._is_live(lease)
                    for part in lease.lent.values()
                ),
                key=lambda version: version.lease_id,
            )

    def release_versions(self, versions: Iterable[tuple[int, int]]) -> None:
        """End leases on versions that are no longer needed, as (lease, database); ended ones are ignored. Durable on return."""
        dropped: list[Op] = []
        with self._lock:
            for lease_id, db_id in versions:
                lease = self._leases.get(lease_id)
                if lease is None or lease.lent.pop(db_id, None) is None:
                    continue
                lease.forget(db_id)
                lease.by_label = None
                if not lease.lent:
                    del self._leases[lease_id]
                dropped.append(DropReader(db_id, lease_id))
        for guard in self._submit(dropped):
            guard.result()

    def renew(self, lease_id: int) -> None:
        """Renew a lease and all others of its holder; raises `LeaseExpired` if it has ended."""
        with self._lock:
            lease = self._leases.get(lease_id)
            if lease is None or not self._is_live(lease):
                raise _ended(lease_id)
            rows: list[Op] = []
            now, now_ms = self._clock.monotonic(), self._clock.now_ms()
            for key, also in self._leases_of_holder(lease_id, lease):
                # The same for all leases of a holder, so that none is missing alone (decision 072).
                also.deadline = now + lease.ttl_ms / 1000
                if now_ms + lease.ttl_ms > also.horizon_ms:
                    also.horizon_ms = now_ms + 2 * lease.ttl_ms
                    rows += self._rows(key, also, list(also.lent.values()), also.horizon_ms)
        self._submit(rows)  # not awaited: if the rows are lost, the next open extends the lease (`load`)

    def _leases_of_holder(self, lease_id: int, lease: _Lease) -> list[tuple[int, _Lease]]:
        """Return the leases that are renewed with this one: all leases of its holder."""
        if not lease.holder:
            return [(lease_id, lease)]
        return [(key, other) for key, other in self._leases.items() if other.holder == lease.holder]

    def release(self, lease_id: int) -> None:
        """End a lease; a lease that has ended already is ignored."""
        with self._lock:
            lease = self._leases.pop(lease_id, None)
        if lease is not None:
            self._drop({lease_id: lease})

    def expire(self) -> int:
        """Drop the rows of expired leases; return how many leases expired."""
        with self._lock:
            late = {lease_id: lease for lease_id, lease in self._leases.items() if not self._is_live(lease)}
            for lease_id in late:
                del self._leases[lease_id]
        if late:
            self._drop(late)
        return len(late)

    def _drop(self, leases: dict[int, _Lease]) -> None:
        for guard in self._submit(
            [DropReader(db_id, lease_id) for lease_id, lease in leases.items() for db_id in lease.lent]
        ):
            guard.result()

    def _submit(self, ops: Sequence[Op]) -> list[ManifestGuard]:
        """Submit operations in one batch, or in several if a batch cannot have as many."""
        return [self._manifest.submit(ops[at : at + ROWS_AT_ONCE]) for at in range(0, len(ops), ROWS_AT_ONCE)]

    def _rows(self, lease_id: int, lease: _Lease, parts: Iterable[LentVersion], horizon_ms: int) -> list[PutReader]:
        return [
            PutReader(
                part.db_id,
                lease_id,
                part.lsn,
                horizon_ms,
                {**lease.tags, **_label(part), VIEW_TAG: f"{lease.ttl_ms}:{part.copy}"},
            )
            for part in parts
        ]

    # ── for deletion ──────────────────────────────────────────────────────────────────────────────────────────────────
    def kept_since(self, origin: int) -> tuple[int, int] | None:
        """Return (manifest time, wall time) of what leases keep of a database, or `None`.

        Artifacts it made that reached zero at or after the first are kept at least until the second.
        """
        now, now_ms = self._clock.monotonic(), self._clock.now_ms()
        with self._lock:
            needed = [
                (lease.opened_ms, now_ms + int((lease.deadline - now) * 1000) + 1)
                for lease in self._leases.values()
                if self._is_live(lease) and lease.needs(origin)
            ]
            if self._doubt_until > now:
                needed.append((0, now_ms + int((self._doubt_until - now) * 1000) + 1))
        # The earliest opening and the latest end, also of different leases: more is kept than needed, never less.
        return (min(needed)[0], max(until for _, until in needed)) if needed else None

    def copies(self, db_id: int) -> set[int]:
        """Return the numbers of the directories that live leases on a key-value set read."""
        with self._lock:
            leases = [lease for lease in self._leases.values() if self._is_live(lease)]
            return {lease.lent[db_id].copy for lease in leases if db_id in lease.lent} - {0}

    def is_lent(self, db_id: int) -> bool:
        """Return whether a live lease is on a version of a database: its row is needed to load the lease after a restart."""
        with self._lock:
            leases = [lease for lease in self._leases.values() if self._is_live(lease)]
            return any((part := lease.lent.get(db_id)) is not None and part.lsn for lease in leases)

    def count(self) -> int:
        """Return the number of live leases."""
        with self._lock:
            return sum(map(self._is_live, self._leases.values()))

    def _is_live(self, lease: _Lease) -> bool:
        return lease.deadline > self._clock.monotonic()


def reader_rows(txn: ReadTxn, *prefix: int) -> Iterator[tuple[tuple[int, int], ReaderRecord | None]]:
    """Yield ((database, reader), row) of every reader's row; `None` for a damaged row, which affects only that reader."""
    table = t.SNAPSHOT_READERS
    for key, raw in txn.raw_scan(table, *prefix):
        try:
            row: ReaderRecord | None = table.rows.decode(key, raw)
        except ManifestDamaged:
            row = None
        db_id, reader_id = table.key.unpack(key)
        yield (db_id, reader_id), row


def is_view(row: ReaderRecord) -> bool:
    """Return whether a reader's row belongs to a lease, which holds no floor."""
    return VIEW_TAG in row.tags


def _label(part: LentVersion) -> dict[str, str]:
    return {LABEL_TAG: part.label} if part.label else {}


def _ended(lease_id: int) -> LeaseExpired:
    hint = "request the version again; create a snapshot to keep one for longer"
    return LeaseExpired("the leased version is no longer kept", hint=hint, lease_id=lease_id)


def _mark(row: ReaderRecord) -> tuple[int, int]:
    """Return (length in ms, number of the copy) from a row's tag; an unreadable tag gives a minute."""
    try:
        ttl_ms, copy = map(int, row.tags[VIEW_TAG].split(":"))
    except ValueError:
        return 60_000, 0
    return min(max(ttl_ms, 1), int(LEASE_SECONDS_MAX * 1000)), copy
