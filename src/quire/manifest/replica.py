"""A replica: another environment that follows a manifest's feed and becomes byte-identical in everything the feed contains.

Terms
  source     the manifest that is followed
  position   the last change that the replica has applied: the end of its own change log
  local      rows about the source's environment, not about its data: cursors, leases, readers, answers, metrics
             (`tables.py`)

A change and the position after it are one transaction of the replica; the change is acknowledged to the source after
that. So a replica that is killed at any moment continues where it was: nothing is missed, and repeated changes are
skipped. A gap is refused.

A closed replica is an ordinary manifest: `ManifestStore.open` makes it the next owner, and it is no longer a replica.
Answers to keyed batches (M11) were local to the source: a batch repeated across the failover is a new one.

    >>> import tempfile
    >>> from quire.manifest.records import DbKind
    >>> from quire.manifest.store import ManifestStore
    >>> directory = tempfile.mkdtemp()
    >>> with ManifestStore.open(directory + "/manifest.lmdb") as manifest:
    ...     with Replica.from_copy(manifest, directory + "/replica.lmdb", name="replica") as replica:
    ...         db_id = manifest.register_db("shop", DbKind.PAGES)
    ...         print(replica.position, replica.catch_up(manifest.feed, "replica"))
    ...         replica.verify_against(manifest)
    0 1

Threads: one at a time; one process writes a replica (`StalePlan` if two do). Raises `CursorLost` and `OutOfRange` (the
feed does not connect), `InvalidInput` (a gap), `StalePlan`, `ManifestDamaged`, `AlreadyExists`, and the errors of
opening a manifest.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from contextlib import closing, suppress
from functools import partial
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

from quire.core.clock import SystemClock
from quire.core.closing import ClosedOnExit
from quire.core.errors import AlreadyExists, CursorLost, ManifestDamaged, ReadOnly, StalePlan, UnknownCursor
from quire.core.settings import ManifestSettings
from quire.core.timeline import preceding, step_back
from quire.durable.files import OsDisk
from quire.manifest import tables as t
from quire.manifest.change import CHANGE_LOG, ChangeRecord, Start
from quire.manifest.env import ManifestEnv
from quire.manifest.feed import PAGE_RECORDS, ChangeFeed
from quire.manifest.migrations import SCHEMA, STORE_ID, migrate
from quire.manifest.ops.base import LOCAL_COUNTERS
from quire.manifest.ops.cursors import settle_oldest
from quire.manifest.overlay import OLDEST_SEQUENCE, Overlay
from quire.manifest.reads import ReadTxn
from quire.manifest.records import MetaRecord
from quire.manifest.replay import position_of, replay

if TYPE_CHECKING:
    from quire.manifest.store import ManifestStore

STAGING = ".copying"
"""Appended to a path while a copy is made; the next copy removes an incomplete one."""

INDEXES_OF_LOCAL = frozenset({t.CURSOR_NAMES.name})
"""Derived tables that index a local one."""

CLEARED = tuple(
    table
    for table in t.TABLES.values()
    if (table.policy is t.Policy.LOCAL and table not in (CHANGE_LOG, t.META, t.MIGRATIONS))
    or table.name in INDEXES_OF_LOCAL
)
"""The source's local rows, which a copy starts without. The log, its bounds and the watermarks of ids stay: sequences
and ids continue along the line, so no name has two meanings after a failover. The ledger of migrations is about the
file, so it stays."""

KEPT_META = frozenset({SCHEMA, STORE_ID, OLDEST_SEQUENCE, *map(t.META.key.pack, LOCAL_COUNTERS.values())})

COMPARED = tuple(
    table for table in t.TABLES.values() if table.policy is not t.Policy.LOCAL and table.name not in INDEXES_OF_LOCAL
)
"""Everything the feed contains: logged tables and the indexes derived from them."""

_COPY_AGAIN = "create a new replica with Replica.from_copy"


class Replica(ClosedOnExit):
    """An environment that follows a feed. Make one with `open` or `from_copy`."""

    def __init__(self, env: ManifestEnv) -> None:
        self._env = env

    # ── opening and closing ───────────────────────────────────────────────────────────────────────────────────────────
    @classmethod
    def open(cls, path: str, *, settings: ManifestSettings | None = None) -> Replica:
        """Open the replica at `path`; if there is none, a new and empty one at position 0."""
        env = ManifestEnv(path, settings or ManifestSettings(), write=True)
        try:
            with ReadTxn(env) as txn:
                fresh = txn.get(t.META, "schema") is None
            migrate(env, SystemClock())
            replica = cls(env)
            if fresh:
                replica._set_store_id("")  # a new manifest's own store id is not that of the store it will follow
        except BaseException:
            env.close()
            raise
        return replica

    @classmethod
    def from_copy(
        cls, manifest: ManifestStore, path: str, *, name: str = "", settings: ManifestSettings | None = None
    ) -> Replica:
        """Make a replica that begins as a copy of the manifest, which stays in use meanwhile.

        With `name`, a cursor is registered before the copy is made; otherwise the next changes may be trimmed before
        `catch_up`.
        """
        if os.path.exists(path):
            raise AlreadyExists("the target already exists", hint="remove it, or copy to another path", path=path)
        # Before the copy: changes after the cursor are kept, and those that the copy already has are skipped.
        is_registered = bool(name) and _register(manifest.feed, name)
        disk, staging = OsDisk(), path + STAGING
        try:
            _discard(disk, staging)
            manifest.env.copy(staging)
            with closing(ManifestEnv(staging, settings or ManifestSettings(), write=True, create=False)) as env:
                _clear_local(env)  # its commit also syncs the copy
            disk.rename(staging, path)
            # The lock file that opening the copy has left under its staging name.
            _discard(disk, staging)
            disk.sync_dir(os.path.dirname(os.path.abspath(path)))
            return cls.open(path, settings=settings)
        except BaseException:
            if is_registered:
                manifest.feed.drop(name)
            raise

    def close(self) -> None:
        """Close the environment; further use raises `StoreClosed`."""
        self._env.close()

    # ── state ─────────────────────────────────────────────────────────────────────────────────────────────────────────
    @property
    def position(self) -> int:
        """The last change applied; 0 before the first."""
        return position_of(self._env)

    @property
    def store_id(self) -> str:
        """The store this is a replica of, once it has followed its feed."""
        with self.read() as txn:
            return txn.store_id()

    def read(self) -> ReadTxn:
        """Return a snapshot of the replica; keep it short."""
        return ReadTxn(self._env)

    # ── following ─────────────────────────────────────────────────────────────────────────────────────────────────────
    def apply(self, changes: Iterable[ChangeRecord]) -> int:
        """Apply changes in order, skipping those already applied; return the position afterwards. A gap is refused."""
        return replay(changes, self._env)

    def catch_up(self, feed: ChangeFeed, name: str, *, limit: int = PAGE_RECORDS) -> int:
        """Follow the feed up to its head, page by page, under this cursor's name; return the position afterwards.

        A process that has the source open read-only cannot acknowledge: the owner does it, with `replica.position`.
        """
        acked = self._join(feed, name)
        position = self.position
        while True:
            page = feed.fetch(name, limit, after=position)
            position = self.apply(page.changes)
            if position > acked:
                with suppress(ReadOnly):
                    # After the replica's own commit: the source may trim what is acknowledged.
                    feed.acknowledge(name, position)
                acked = position
            if page.at_head:
                return position

    def _join(self, feed: ChangeFeed, name: str) -> int:
        """Refuse the feed of another store, or of one that has diverged, before anything is applied; return the
        acknowledged position.

        Divergence is detected as far as both logs still show it.
        """
        position = self.position
        if (theirs := feed.store_id()) != self.store_id:
            if position and self.store_id:
                raise StalePlan(
                    "this is a replica of another store", hint=_COPY_AGAIN, ours=self.store_id, theirs=theirs
                )
            self._set_store_id(theirs)
        try:
            cursor = feed.cursor(name)
        except UnknownCursor:
            cursor = feed.register(position, name=name)
            if cursor.acked_sequence != position:
                feed.drop(name)
                raise CursorLost(
                    "the feed does not connect to this replica",
                    hint=_COPY_AGAIN,
                    position=position,
                    oldest_sequence=cursor.oldest_sequence,
                    head_sequence=cursor.head_sequence,
                ) from None
        self._refuse_diverged(feed, name, position)
        return cursor.acked_sequence

    def _refuse_diverged(self, feed: ChangeFeed, name: str, position: int) -> None:
        """Refuse if the last change applied differs from the source's change of that number, if both still have it."""
        with self.read() as txn:
            ours, before = txn.get(CHANGE_LOG, position), preceding(txn.gaps(), position)
        if ours is None:
            return
        with suppress(CursorLost):  # the source has trimmed it: there is nothing to compare
            theirs = feed.fetch(name, 1, after=before).changes
            if theirs and theirs[0] != ours:
                raise StalePlan("the replica and its source have diverged", hint=_COPY_AGAIN, sequence=position)

    def trim(self, keep: int = PAGE_RECORDS) -> None:
        """Remove all but the last `keep` changes of the replica's own log, which otherwise grows with every change."""
        overlay = Overlay(self._env.handles)
        overlay.head = self.position
        while True:
            with self.read() as txn:
                first = next(txn.scan(CHANGE_LOG), None)
                target = step_back(txn.gaps(), overlay.head, keep) + 1
            if first is None or first[0][0] >= target:
                return
            self._commit(overlay, partial(settle_oldest, overlay, requested=target))

    def _set_store_id(self, store_id: str) -> None:
        overlay = Overlay(self._env.handles)
        self._commit(overlay, lambda: overlay.meta.put(STORE_ID, MetaRecord(text=store_id)))

    def _commit(self, overlay: Overlay, change: Callable[[], None]) -> None:
        def write(txn: Any) -> None:
            overlay.discard()
            overlay.begin(txn)
            change()
            overlay.flush()

        self._env.transact(write)
        overlay.settle()

    # ── verifying ─────────────────────────────────────────────────────────────────────────────────────────────────────
    def verify_against(self, manifest: ManifestStore) -> None:
        """Compare every row that the feed covers, byte for byte; `ManifestDamaged` names the first that differs.

        Both must be at the same position: catch up while nothing is written.
        """
        with self.read() as ours, manifest.read() as theirs:
            positions = ours.feed_bounds()[1], theirs.feed_bounds()[1]
            if positions[0] != positions[1]:
                raise StalePlan(
                    "the replica and its source are at different changes",
                    hint="stop writes to the source and catch up first",
                    replica=positions[0],
                    source=positions[1],
                )
            for table in COMPARED:
                for mine, source in zip_longest(ours.raw_scan(table), theirs.raw_scan(table)):
                    if mine != source:
                        raise _difference(table, mine, source, positions[0])


Row = tuple[bytes, bytes] | None


def _difference(table: t.Table[Any], mine: Row, source: Row, position: int) -> ManifestDamaged:
    key = min(row[0] for row in (mine, source) if row is not None)
    ours = mine[1].hex() if mine is not None and mine[0] == key else None
    theirs = source[1].hex() if source is not None and source[0] == key else None
    what = "has no" if ours is None else "has another" if theirs is not None else "has a"
    return ManifestDamaged(
        f"the replica {what} row of {table.name}" + (" that its source lacks" if theirs is None else ""),
        hint=_COPY_AGAIN,
        table=table.name,
        key=table.key.unpack(key),
        replica=ours and ours[:128],
        source=theirs and theirs[:128],
        position=position,
    )


def _register(feed: ChangeFeed, name: str) -> bool:
    """Register a cursor of this name unless it exists; return whether it was registered."""
    try:
        feed.cursor(name)
    except UnknownCursor:
        feed.register(Start.LATEST, name=name)
        return True
    return False


def _clear_local(env: ManifestEnv) -> None:
    """Remove the source's local rows from a copy; log, bounds and watermarks of ids stay."""

    def clear(txn: Any) -> None:
        for table in CLEARED:
            txn.drop(env.handles[table.name], delete=False)
        with txn.cursor(db=env.handles[t.META.name]) as cursor:
            strange = [key for key in cursor.iternext(keys=True, values=False) if key not in KEPT_META]
        for key in strange:
            txn.delete(key, db=env.handles[t.META.name])

    env.transact(clear)


def _discard(disk: OsDisk, staging: str) -> None:
    for leftover in (staging, staging + "-lock"):
        if disk.exists(leftover):
            disk.remove(leftover)
