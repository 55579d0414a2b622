"""Versions lent to readers that read files and objects by themselves: what they need is not deleted while they read.

Terms
  lease    one query's claim on a version of each of some databases; its id is a reader's, and its rows are rows of
           `snapshot_readers` with the tag `quire.view`: the length of the lease in ms, and the number of a copy
  copy     what a version of a key-value set is on disk: a directory of links (`lsm/snapshots.py`)
  horizon  the moment in the rows; a renewal moves it only when the lease itself would reach beyond it
  label    the name of the database, in rows that also have the version as a value: of leases whose readers ask for it later
  holder   who comes back for versions, by a name of its own: a consumer of row changes. Its leases are renewed and end
           together, so that none is missing alone

Rows are local: a lease is no snapshot, no reference and no change, so lists, counts, retention and the feed do not know it.
It holds no floor: checkpoints go on, and the version's segments stay as files until the lease ends.

The rows are committed before the version is looked up. Whatever the version needs was referred to at that moment, so if it
falls to zero, it does so later: by the manifest's own time, which never goes back (`writer.py`). So nothing that fell to zero
at or after the opening of a living lease is deleted, nor its file used again, if a database made it that the version has
artifacts of; before that is known, and after a restart, if any did. What fell to zero before goes as ever. Copies are not
shared: they need nothing but to be left alone.

While the owner lives its memory decides which leases do. A crash between the rows and the answer leaves a lease that nobody
renews: it ends by itself.

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

if TYPE_CHECKING:
    from quire.manifest.guard import ManifestGuard
    from quire.manifest.ops.base import Op
    from quire.manifest.reads import ReadTxn
    from quire.manifest.records import ReaderRecord
    from quire.manifest.store import ManifestStore

VIEW_TAG = "quire.view"
HOLDER_TAG, LABEL_TAG = "quire.holder", "quire.label"

LEASE_SECONDS_MAX = 7 * 24 * 3_600.0
DOUBT_SECONDS = 3_600.0

ROWS_AT_ONCE = 16_384
"""Rows of one batch, which can have some more: a lease on a hundred thousand databases takes several."""


class LentVersion(msgspec.Struct, frozen=True):
    """One database's part of a lease."""

    db_id: int
    lsn: int
    copy: int = 0
    """The number of the directory that holds a key-value set's version."""
    label: str = ""
    """What whoever asks for it later calls it."""


class HeldVersion(msgspec.Struct, frozen=True):
    """A version that a holder comes back for."""

    label: str
    db_id: int
    lease_id: int
    lsn: int
    """0 if it stands for nothing: the database was dropped."""


class _Lease(msgspec.Struct):
    """A lease, in memory."""

    ttl_ms: int
    deadline: float
    """By the monotonic clock."""
    horizon_ms: int
    tags: dict[str, str]
    lent: dict[int, LentVersion] = field(default_factory=dict)
    opened_ms: int = 0
    """When its first row was written, by the manifest's time."""
    origins: dict[int, frozenset[int]] = field(default_factory=dict)
    """Databases that made what its versions need, beside the version's own, by that …"""
    unknown: set[int] = field(default_factory=set)
    """… but for those of these databases, which have not been looked up yet."""
    needing: Counts[int] = field(default_factory=Counts)
    """How many versions need what other databases made: forks of one template need it a hundred thousand times."""
    shared: dict[frozenset[int], frozenset[int]] = field(default_factory=dict)
    """Equal values of `origins`, once."""
    by_label: list[tuple[str, int]] | None = None
    """(label, database) in order, once somebody has asked."""

    @property
    def holder(self) -> str:
        return self.tags.get(HOLDER_TAG, "")

    def add(self, part: LentVersion, opened_ms: int) -> None:
        self.lent[part.db_id], self.by_label = part, None
        self.opened_ms = min(self.opened_ms or opened_ms, opened_ms)
        if not part.copy and (part.lsn or not part.label):  # a mark of a holder's stands for nothing
            self.unknown.add(part.db_id)

    def needs(self, origin: int) -> bool:
        return bool(self.unknown) or origin in self.origins or origin in self.needing

    def found(self, db_id: int, origins: Iterable[int]) -> None:
        """The version of a database has been looked up: these made what it needs."""
        self.forget(db_id)
        others = frozenset(origins) - {db_id}
        self.origins[db_id] = self.shared.setdefault(others, others)
        self.needing.update(others)

    def forget(self, db_id: int) -> None:
        """Nothing is known of the version of a database, and nothing needed for it."""
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
        """By the monotonic clock. A damaged row may be a lease on anything: until then nothing is deleted, and whoever reads
        would have renewed it by then."""

    def load(self) -> None:
        """At the start of an owner: every lease in the rows is alive for one more length (M10). Renewals may have been lost
        with the former owner, and its readers go on reading meanwhile."""
        with self._manifest.read() as txn:
            rows = list(reader_rows(txn))
        if any(row is None for _, row in rows):
            self._doubt_until = self._clock.monotonic() + DOUBT_SECONDS
        now = self._clock.monotonic()  # once: leases of one holder end together
        for (db_id, lease_id), row in rows:
            if row is None or not is_view(row):
                continue
            ttl_ms, copy = _mark(row)
            lease = self._leases.get(lease_id)
            if lease is None:
                tags = {name: value for name, value in row.tags.items() if name not in (VIEW_TAG, LABEL_TAG)}
                lease = self._leases[lease_id] = _Lease(ttl_ms, now + ttl_ms / 1000, 0, tags)
            lease.add(LentVersion(db_id, row.snapshot_lsn, copy, row.tags.get(LABEL_TAG, "")), row.opened_at_ms)
        for lease_id, lease in self._leases.items():  # a holder may have asked for another length meanwhile
            lease.deadline = max(other.deadline for _, other in self._together(lease_id, lease))

    # ── for the service ───────────────────────────────────────────────────────────────────────────────────────────────
    def hold(
        self, lent: Iterable[LentVersion], seconds: float, *, lease_id: int = 0, tags: dict[str, str] | None = None
    ) -> int:
        """Lend these versions, as a lease of their own or as part of another; its id. Durable on return."""
        if not 0 < seconds <= LEASE_SECONDS_MAX:
            raise InvalidInput("a version is lent for up to seven days", seconds=seconds)
        self.expire()
        parts = {part.db_id: part for part in lent}
        if lease_id:
            self.renew(lease_id)
        else:
            lease_id = self._manifest.allocate(Counter.READER)
        ttl_ms = int(seconds * 1000)
        with self._lock:
            known = self._leases.get(lease_id)
        given = known or _Lease(ttl_ms, 0.0, 0, dict(tags or {}))
        horizon = self._clock.now_ms() + 2 * given.ttl_ms
        guard = self._manifest.submit(self._rows(lease_id, given, parts.values(), horizon))
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

    def narrow(self, lease_id: int, db_id: int, origins: Iterable[int]) -> None:
        """The version of a database has been looked up: these databases made what it needs."""
        with self._lock:
            if (lease := self._leases.get(lease_id)) is not None:
                lease.found(db_id, origins)

    def keep_views(self, lease_id: int, views: dict[int, bytes]) -> None:
        """Keep versions as values with a lease, by database. Durable on return."""
        with self._lock:
            lease = self._leases.get(lease_id)
            parts = [] if lease is None else [lease.lent[db_id] for db_id in views if db_id in lease.lent]
            rows = [] if lease is None else self._rows(lease_id, lease, parts, lease.horizon_ms)
        self._manifest.submit([replace(row, view=views[row.db_id]) for row in rows]).result()

    def labelled(self, lease_id: int, after: str, last: str, limit: int) -> list[tuple[str, int]]:
        """(label, database) of the first versions of a lease behind one label, up to another. Raises `LeaseExpired`."""
        with self._lock:
            lease = self._leases.get(lease_id)
            if lease is None or not self._lives(lease):
                raise _ended(lease_id)
            if lease.by_label is None:
                lease.by_label = sorted((part.label, part.db_id) for part in lease.lent.values())
            start = bisect_right(lease.by_label, after, key=lambda item: item[0])
            return [item for item in lease.by_label[start : start + limit] if item[0] <= last]

    def view(self, lease_id: int, db_id: int) -> bytes:
        """A version that was kept as a value. Raises `LeaseExpired`."""
        with self._manifest.read() as txn:
            row = txn.get(t.SNAPSHOT_READERS, db_id, lease_id)
        if row is None or not row.view:
            raise _ended(lease_id)
        return row.view

    def held(self, holder: str) -> list[HeldVersion]:
        """The versions that a holder has, the oldest first."""
        with self._lock:
            leases = [(key, lease) for key, lease in self._leases.items() if lease.holder == holder]
            return sorted(
                (
                    HeldVersion(part.label, part.db_id, lease_id, part.lsn)
                    for lease_id, lease in leases
                    if self._lives(lease)
                    for part in lease.lent.values()
                ),
                key=lambda version: version.lease_id,
            )

    def let_go(self, versions: Iterable[tuple[int, int]]) -> None:
        """Versions that nobody comes back for, as (lease, database); what has ended is fine. Durable on return."""
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
        """The reader is alive; `LeaseExpired` if the lease has ended."""
        with self._lock:
            lease = self._leases.get(lease_id)
            if lease is None or not self._lives(lease):
                raise _ended(lease_id)
            rows: list[Op] = []
            now, now_ms = self._clock.monotonic(), self._clock.now_ms()
            for key, also in self._together(lease_id, lease):
                also.deadline = now + lease.ttl_ms / 1000
                if now_ms + lease.ttl_ms > also.horizon_ms:
                    also.horizon_ms = now_ms + 2 * lease.ttl_ms
                    rows += self._rows(key, also, list(also.lent.values()), also.horizon_ms)
        self._submit(rows)  # nobody waits: should it be lost, an opening gives the rows their time

    def _together(self, lease_id: int, lease: _Lease) -> list[tuple[int, _Lease]]:
        """The leases that are renewed with one: all of its holder."""
        if not lease.holder:
            return [(lease_id, lease)]
        return [(key, other) for key, other in self._leases.items() if other.holder == lease.holder]

    def release(self, lease_id: int) -> None:
        """The reader is done; a lease that has ended is fine."""
        with self._lock:
            lease = self._leases.pop(lease_id, None)
        if lease is not None:
            self._drop({lease_id: lease})

    def expire(self) -> int:
        """Drop the rows of leases that have ended; how many have."""
        with self._lock:
            late = {lease_id: lease for lease_id, lease in self._leases.items() if not self._lives(lease)}
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
        """Submit rows: in one batch, unless they are more than a batch can have."""
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

    # ── for whoever deletes ───────────────────────────────────────────────────────────────────────────────────────────
    def kept_since(self, origin: int) -> tuple[int, int] | None:
        """(manifest's time, wall time): what this database made and what fell to zero at or after the first is kept, at least
        until the second; `None` if nothing is lent."""
        now, now_ms = self._clock.monotonic(), self._clock.now_ms()
        with self._lock:
            needed = [
                (lease.opened_ms, now_ms + int((lease.deadline - now) * 1000) + 1)
                for lease in self._leases.values()
                if self._lives(lease) and lease.needs(origin)
            ]
            if self._doubt_until > now:
                needed.append((0, now_ms + int((self._doubt_until - now) * 1000) + 1))
        return (min(needed)[0], max(until for _, until in needed)) if needed else None

    def copies(self, db_id: int) -> set[int]:
        """Numbers of the directories that living leases on a key-value set read."""
        with self._lock:
            leases = [lease for lease in self._leases.values() if self._lives(lease)]
            return {lease.lent[db_id].copy for lease in leases if db_id in lease.lent} - {0}

    def count(self) -> int:
        """Living leases."""
        with self._lock:
            return sum(map(self._lives, self._leases.values()))

    def _lives(self, lease: _Lease) -> bool:
        return lease.deadline > self._clock.monotonic()


def reader_rows(txn: ReadTxn, *prefix: int) -> Iterator[tuple[tuple[int, int], ReaderRecord | None]]:
    """((database, reader), row) of readers that have one; `None` for a row that is damaged: it concerns one reader, not all."""
    table = t.SNAPSHOT_READERS
    for key, raw in txn.raw_scan(table, *prefix):
        try:
            row: ReaderRecord | None = table.rows.decode(key, raw)
        except ManifestDamaged:
            row = None
        db_id, reader_id = table.key.unpack(key)
        yield (db_id, reader_id), row


def is_view(row: ReaderRecord) -> bool:
    """Whether a reader's row is a lease's: it holds no floor."""
    return VIEW_TAG in row.tags


def _label(part: LentVersion) -> dict[str, str]:
    return {LABEL_TAG: part.label} if part.label else {}


def _ended(lease_id: int) -> LeaseExpired:
    hint = "ask for the version again; a snapshot keeps one for longer"
    return LeaseExpired("the version that was lent is no longer kept", hint=hint, lease_id=lease_id)


def _mark(row: ReaderRecord) -> tuple[int, int]:
    """(length in ms, number of a copy) of a row; one that cannot be read ends after a minute."""
    try:
        ttl_ms, copy = map(int, row.tags[VIEW_TAG].split(":"))
    except ValueError:
        return 60_000, 0
    return min(max(ttl_ms, 1), int(LEASE_SECONDS_MAX * 1000)), copy
