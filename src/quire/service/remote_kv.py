"""A key-value set of a store that another process owns: the API of `quire.lsm.kv.Kv`, over a channel.

A write is sent until it is answered, with an idempotency key that is written with it: it happens once. A scan reads pages of
one snapshot, which the owner holds for this client until the scan ends. A snapshot ends with its client, with its server, or
when it is closed; a read after that raises `LeaseExpired` and never returns another version.

Threads: any; a scan belongs to one thread. Raises what a set in this process raises, and what the channel raises.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from quire.core.closing import ClosedOnExit
from quire.core.errors import InvalidInput, LeaseExpired, QuireError, StoreClosed
from quire.lsm.kv import Stats
from quire.lsm.reading import KvIterator, KvRanges
from quire.lsm.short_scan import Pair
from quire.lsm.wal import Buffer, as_bytes, checked_batch
from quire.service import data_actions as d
from quire.service.channel import Channel
from quire.service.lease_renewal import LeaseRenewal

if TYPE_CHECKING:
    import pyarrow as pa

UPKEEP_SECONDS = 3_600.0
"""The timeout of a flush or a compaction."""


class RemoteRanges(KvRanges):
    """Ranges of a set, or of a snapshot of it, read in pages."""

    def __init__(self, channel: Channel, name: str, renewing: LeaseRenewal) -> None:
        self._channel = channel
        self._renewing = renewing
        self.name = name
        self._snapshot = ""

    def _require(self) -> None:
        """Raise if reading is no longer possible."""

    def get(self, key: Buffer) -> bytes | None:
        """Return the value of a key, `None` if there is none."""
        return self.get_many((key,))[0]

    def get_many(self, keys: Sequence[Buffer]) -> list[bytes | None]:
        """Return the values of several keys as of one moment, in their order; `None` for a key that does not exist."""
        self._require()
        wanted = [as_bytes(key) for key in keys]
        return self._channel.call("kv.get", d.GetValues(self.name, wanted, self._snapshot)) if wanted else []

    def _pages(self, low: bytes, high: bytes | None, reverse: bool) -> Iterator[d.PairPage]:
        """Yield the pages of a range as of one moment. The owner's snapshot is released when the iteration ends."""
        self._require()
        snapshot = own = self._snapshot
        try:
            while True:
                page: d.PairPage = self._channel.call("kv.scan", d.ScanPairs(self.name, low, high, reverse, snapshot))
                if page.snapshot and not snapshot:
                    self._renewing.add(page.snapshot)
                snapshot = page.snapshot or snapshot
                yield page
                if not page.snapshot:
                    return
                self._require()
                low, high = (low, page.keys[-1]) if reverse else (page.keys[-1] + b"\0", high)
        finally:
            if snapshot and snapshot != own:
                self._release(snapshot)

    def _release(self, snapshot: str) -> None:
        self._renewing.discard(snapshot)
        with suppress(QuireError):  # if the owner cannot be reached, the snapshot expires
            self._channel.call("holding.release", d.OfHolding(snapshot))

    def batches(self, low: bytes, high: bytes | None, reverse: bool) -> Iterator[pa.RecordBatch]:
        """Yield the keys and values of a range as Arrow batches."""
        from quire.lsm.merge import pairs_batch  # imports Arrow, which gets, puts and scans of pairs do not need

        for page in self._pages(low, high, reverse):
            if page.keys:
                yield pairs_batch(page.keys, page.values)

    def pairs(self, low: bytes, high: bytes | None, reverse: bool) -> Iterator[Iterable[Pair]]:
        """Yield the keys and values of a range as pairs, a page at a time."""
        return (zip(page.keys, page.values) for page in self._pages(low, high, reverse))


class RemoteKv(RemoteRanges):
    """A remote key-value set. Created by `client.kv(name)`."""

    # ── writing ───────────────────────────────────────────────────────────────────────────────────────────────────────
    def put(self, key: Buffer, value: Buffer, *, sync: bool = True) -> None:
        """Set the value of a key."""
        if value is None:
            raise InvalidInput("a value must be bytes, not None", hint="`delete` removes a key", key=key)
        self.write({as_bytes(key): value}, sync=sync)

    def delete(self, key: Buffer, *, sync: bool = True) -> None:
        """Remove a key; do nothing if it does not exist."""
        self.write({as_bytes(key): None}, sync=sync)

    def write(self, batch: Mapping[bytes, Buffer | None], *, sync: bool = True, key: bytes = b"") -> int:
        """Apply changes together: new values of keys, `None` for a key to delete; return their lsn (0 for an empty batch).

        They are applied once, however often a response is lost. With your own `key`, 16 random bytes, you may also repeat the
        call.
        """
        items = checked_batch(batch)
        if not items:
            return 0
        return self._channel.call("kv.write", d.WritePairs(self.name, dict(items), sync), key=key)

    def sync(self) -> None:
        """Make everything that was written durable."""
        self._channel.call("kv.sync", d.OfName(self.name))

    def flush(self) -> None:
        """Write the memtable into tables."""
        self._upkeep("kv.flush")

    def compact(self) -> None:
        """Flush, and merge all tables into one level."""
        self._upkeep("kv.compact")

    def _upkeep(self, action: str) -> None:
        self._channel.call(action, d.OfName(self.name), timeout=UPKEEP_SECONDS, attempt_seconds=UPKEEP_SECONDS)

    # ── reading ───────────────────────────────────────────────────────────────────────────────────────────────────────
    def snapshot(self) -> RemoteKvSnapshot:
        """Return a snapshot of the set as it is now; it lasts until it is closed or its client is gone."""
        held: d.HeldSnapshot = self._channel.call("kv.snapshot", d.OfName(self.name))
        return RemoteKvSnapshot(self._channel, self.name, self._renewing, held)

    def iterator(self) -> KvIterator:
        """Return a cursor over the set as it is now."""
        return KvIterator(self.snapshot())

    @property
    def last_lsn(self) -> int:
        """The lsn of the newest batch."""
        return self.stats().last_lsn

    def stats(self) -> Stats:
        """Return the current figures of the set."""
        return self._channel.call("kv.stats", d.OfName(self.name))


class RemoteKvSnapshot(RemoteRanges, ClosedOnExit):
    """A snapshot of a set. Created by `RemoteKv.snapshot`."""

    def __init__(self, channel: Channel, name: str, renewing: LeaseRenewal, held: d.HeldSnapshot) -> None:
        super().__init__(channel, name, renewing)
        self.lsn = held.lsn
        self._snapshot = held.snapshot
        self._open = True
        renewing.add(held.snapshot)

    def _require(self) -> None:
        if not self._open:
            raise StoreClosed("the snapshot is closed", hint="take a new one")
        if not self._renewing.holds(self._snapshot):
            raise LeaseExpired("the owner has released the snapshot", hint="take a new one")

    def close(self) -> None:
        """Release the versions that only this snapshot needs. Idempotent."""
        if self._open:
            self._open = False
            self._release(self._snapshot)

    def __del__(self) -> None:
        if getattr(self, "_open", False):
            self._renewing.forget(self._snapshot)
