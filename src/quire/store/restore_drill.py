"""Runs a drill: restores the archive into scratch, without claiming anything, and compares it with the live store (A13).

The live store stays in use. Before the restore, the drill pins a version of every database, so the restored version is at or
above the pinned one. How the two are compared:
  pages     page by page, at exactly the restored version: the pin keeps it readable in the live store
  streams   record by record, up to the restored end: records never change
  sets      key by key. A set has no earlier versions; a key that was overwritten between two scans of the live store is counted
            and skipped, every other key must be equal
  catalog   every database and snapshot that existed both before and after the drill must have been restored

Chunks, warm segments and tables are read from the bucket: a drill downloads the store once.

Threads: the caller's, in the owner. Raises the errors of a restore, which are recorded too; a difference is a problem in the
record, not an error.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from quire.archive.status import DrillRecord, write_drill
from quire.core.errors import QuireError, SnapshotGone
from quire.durable import names
from quire.durable.files import OsDisk, remove_tree
from quire.manifest import tables as t
from quire.manifest.records import DbKind
from quire.store.object_access import options_of

if TYPE_CHECKING:
    from quire.lsm.reading import KvRanges, KvSnapshot
    from quire.service.values import DatabaseInfo
    from quire.store.store import Store
    from quire.stream.stream import Stream

PROBLEMS_MAX = 20
"""Most differences to list."""
WAIT_SECONDS = 600.0
"""How long a drill waits until what was pinned is in the bucket."""


def drill(store: Store) -> DrillRecord:
    """Run a drill in the owner of a store, and record the result in drill.json. A drill that raises is recorded as failed:
    otherwise status, metrics and alerts would go on showing the last one that passed."""
    clock, began = store.manifest.clock, time.monotonic()
    at_ms = clock.now_ms()
    scratch = os.path.join(store.path, names.SCRATCH, f"drill-{os.urandom(4).hex()}")
    record = DrillRecord(at_ms=at_ms, seconds=0.0, restore_seconds=0.0, restored_at_ms=0, databases=0, bytes=0)
    try:
        record = _compared(store, scratch, record)
    except Exception as error:
        record = replace(record, problems=(f"the drill stopped: {error}",))
        raise
    finally:
        with suppress(FileNotFoundError):
            remove_tree(OsDisk(), scratch)
        record = replace(record, seconds=time.monotonic() - began)
        write_drill(OsDisk(), store.path, record)
    return record


def _compared(store: Store, scratch: str, record: DrillRecord) -> DrillRecord:
    """Restore into `scratch`, compare, and return the record with the result."""
    assert store.archive is not None
    with ExitStack() as held:
        pins = _Pins(store, held)
        store.archive.wait(WAIT_SECONDS)
        with store.manifest.read() as txn:
            options, store_id = options_of(txn, store.settings, store.objects_url), txn.store_id()
        restored, copy = store._open_copy(store.objects_url, scratch, store_id=store_id, options=options)
        with copy:
            comparison = _Comparison(store, pins)
            comparison.run(copy)
    return replace(
        record,
        restore_seconds=restored.seconds,
        restored_at_ms=restored.at_ms,
        databases=comparison.databases,
        bytes=comparison.bytes,
        changed_keys=comparison.changed_keys,
        problems=tuple(comparison.problems[:PROBLEMS_MAX]),
    )


class _Pins:
    """Versions of the live store at the start of the drill, held readable until it ends."""

    def __init__(self, store: Store, held: ExitStack) -> None:
        self.databases = {info.db_id: info for info in store.databases()}
        self.snapshots = _snapshots(store)
        self.sets: dict[int, KvSnapshot] = {}
        self.ends: dict[int, int] = {}
        for info in self.databases.values():
            match info.kind:
                case DbKind.PAGES:
                    held.enter_context(store.pages.open(info.db_id).open_snapshot(tags={"by": "drill"}))
                case DbKind.LSM:
                    self.sets[info.db_id] = held.enter_context(store.kv(info.name).snapshot())
                case DbKind.STREAM:
                    self.ends[info.db_id] = _end(store.stream(info.name))


class _Comparison:
    """Compares the live store with the restored copy."""

    def __init__(self, store: Store, pins: _Pins) -> None:
        self._store = store
        self._pins = pins
        self.databases = self.bytes = self.changed_keys = 0
        self.problems: list[str] = []

    def run(self, copy: Store) -> None:
        """Compare every database and snapshot that existed throughout the drill."""
        live = {info.db_id: info for info in self._store.databases()}
        restored = {info.db_id: info for info in copy.databases()}
        for db_id, info in self._pins.databases.items():
            if db_id not in live:
                continue  # dropped during the drill
            if db_id not in restored:
                self.problems.append(f"{info.name}: the restored store lacks this database")
                continue
            try:
                self._database(copy, info)
                self.databases += 1
            except QuireError as error:
                self.problems.append(f"{info.name}: {error}")
        lost = self._pins.snapshots & _snapshots(self._store) - _snapshots(copy)
        self.problems += [f"snapshot {number} of database {db_id} was not restored" for db_id, number in sorted(lost)]
        broken = [problem for problem in copy.manifest.check() if not problem.leak]
        self.problems += [f"the restored manifest breaks rule {problem.rule}: {problem}" for problem in broken]

    def _database(self, copy: Store, info: DatabaseInfo) -> None:
        match info.kind:
            case DbKind.PAGES:
                self._pages(copy, info)
            case DbKind.STREAM:
                self._stream(self._store.stream(info.name), copy.stream(info.name), info)
            case DbKind.LSM:
                with self._store.kv(info.name).snapshot() as now:
                    self._set(self._pins.sets[info.db_id], copy.kv(info.name), now, info)

    def _pages(self, copy: Store, info: DatabaseInfo) -> None:
        live, restored = self._store.pages.open(info.db_id), copy.pages.open(info.db_id)
        with restored.open_snapshot() as there:
            if not there.lsn:
                version: Any = live.open_snapshot()
            else:
                try:
                    version = live.open_snapshot(at=there.lsn)
                except SnapshotGone:  # the drill took longer than a version is kept for a reader
                    self.problems.append(f"{info.name}: the restored version is gone from the live store; run it again")
                    return
            with version as here:
                if not there.lsn and here.lsn:
                    self.problems.append(f"{info.name}: restored empty, and has {here.size_pages} pages")
                elif there.lsn != here.lsn:
                    self.problems.append(
                        f"{info.name}: restored at lsn {there.lsn}, which the live store does not have"
                    )
                elif there.size_pages != here.size_pages:
                    self.problems.append(f"{info.name}: {there.size_pages} pages restored of {here.size_pages}")
                else:
                    self._same(info.name, _page_blocks(here), _page_blocks(there))

    def _stream(self, live: Stream, restored: Stream, info: DatabaseInfo) -> None:
        first, end = max(live.first_record, restored.first_record), _end(restored)
        if end < self._pins.ends[info.db_id]:
            self.problems.append(f"{info.name}: restored up to record {end}, and has {self._pins.ends[info.db_id]}")
        elif first < end:
            self._same(info.name, _record_blocks(live, first, end), _record_blocks(restored, first, end))

    def _set(self, before: KvRanges, restored: KvRanges, now: KvRanges, info: DatabaseInfo) -> None:
        """Merge three scans by key. A value that is equal before and now did not change, and must have been restored."""
        scans = [_Cursor(ranges) for ranges in (before, restored, now)]
        while (key := min((scan.key for scan in scans if scan.key is not None), default=None)) is not None:
            was, there, is_now = (scan.take(key) for scan in scans)
            self.bytes += len(key) + len(there or b"")
            if was != is_now:
                self.changed_keys += there not in (was, is_now)
            elif there != was:
                self.problems.append(f"{info.name}: the key {key!r} has another value")
                return

    def _same(self, name: str, live: Iterator[bytes], restored: Iterator[bytes]) -> None:
        ours, theirs = hashlib.sha256(), hashlib.sha256()
        for digest, blocks in ((ours, live), (theirs, restored)):
            for block in blocks:
                digest.update(block)
                self.bytes += len(block) if digest is theirs else 0
        if ours.digest() != theirs.digest():
            self.problems.append(f"{name}: the restored bytes differ from the live ones")


class _Cursor:
    """A scan with one pair of look-ahead."""

    def __init__(self, ranges: KvRanges) -> None:
        self._pairs = ranges.scan()
        self.key: bytes | None = None
        self._value: bytes = b""
        self._advance()

    def _advance(self) -> None:
        pair = next(self._pairs, None)
        self.key, self._value = pair if pair is not None else (None, b"")

    def take(self, key: bytes) -> bytes | None:
        """Return the value of this key, `None` if the scan does not have it. Keys must be taken in order."""
        if self.key != key:
            return None
        value = self._value
        self._advance()
        return value


def _page_blocks(version: Any) -> Iterator[bytes]:
    for number, page in version.scan():
        yield number.to_bytes(8, "little")
        yield page


def _end(stream: Stream) -> int:
    """Return the end of a stream's records. A copy's next id is in a new range that has no records yet: skip the gap (A10)."""
    end = stream.end_record
    for gap in reversed(stream.gaps):
        if gap.first == end:
            end = gap.last + 1
    return end


def _record_blocks(stream: Stream, first: int, end: int) -> Iterator[bytes]:
    for record in stream.read(first, end):
        yield b"%d:%d:%d:" % (record.id, record.timestamp_ms, len(record.payload))
        yield bytes(record.payload)


def _snapshots(store: Store) -> set[tuple[int, int]]:
    with store.manifest.read() as txn:
        return {(db_id, number) for (db_id, number), _ in txn.scan(t.SNAPSHOT_INDEX)}
