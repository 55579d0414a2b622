"""Namespaces of objects: registers places, begins owner epochs in all of them, and determines which names may be deleted.
Terms: see `quire.manifest.ops.artifacts`.

A store begins its first epoch with its first object: a store that keeps nothing remotely has none. If beginning an
epoch fails before its commit, ids of namespaces may stay unused, and the epoch is begun again.

Threads: any. Raises `ReadOnly`, `InvalidInput`, `StalePlan`.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple

from quire.core.errors import ManifestDamaged, StalePlan
from quire.core.events import emit
from quire.core.timeline import range_start, restored_start
from quire.durable.names import parse_object_key
from quire.durable.object_names import (
    archive_epoch_prefix,
    epoch_prefix,
    is_log_key,
    kv_backups_prefix,
    parse_epoch_key,
)
from quire.manifest import tables as t
from quire.manifest.change import CHANGE_LOG
from quire.manifest.ops.artifacts import BeginOwnerEpoch, DropNamespace, PutNamespace, RetireObjects
from quire.manifest.ops.base import Counter, Op, ReserveLocalIds
from quire.manifest.ops.plans import AbandonPlan
from quire.manifest.ops.timeline import SKIPPED_IDS, Timeline
from quire.manifest.reads import ReadTxn
from quire.manifest.records import NamespaceRecord, RetiredRecord
from quire.objects.api import PAGE_OBJECTS
from quire.objects.collector import Collector, Owned

if TYPE_CHECKING:
    from quire.manifest.store import ManifestStore
    from quire.objects.collector import Confirm

NAMESPACES = 0
"""The delete job of database 0 is for namespaces."""


def put_namespace(manifest: ManifestStore, place: NamespaceRecord) -> int:
    """Register a place, with its namespace of the current epoch; return the place's id."""
    place_id = manifest.allocate(Counter.NAMESPACE)
    ops: list[Op] = [PutNamespace(place_id, place)]
    with manifest.read() as txn:
        epoch = txn.owner_epoch()
        if epoch:
            line = txn.current_namespace()[1].ancestors
            record = _of_epoch(txn, epoch, place_id, place, manifest.clock.now_ms(), line)
            ops.append(PutNamespace(manifest.allocate(Counter.NAMESPACE), record))
    manifest.submit(ops).result()
    return place_id


def drop_namespace(manifest: ManifestStore, place_id: int) -> None:
    """Drop a place that no database uses; its rows are deleted after the grace period."""
    manifest.submit([DropNamespace(place_id), *manifest.jobs.deletions({NAMESPACES})]).result()


class Parent(NamedTuple):
    """Where the owner before a takeover ended, as far as the directory records it."""

    number: int = 0
    """Number of the last object of its archive; 0 for a directory that was not restored from one."""
    ended_at_ms: int = 0
    """0: at the last commit of this directory."""


def begin_owner_epoch(manifest: ManifestStore, at_least: int = 1, parent: Parent | None = None) -> int:
    """Begin the next owner epoch, in which new objects get names that no other owner writes; return its number.

    With a `parent` it is a takeover: numbers continue in a new range (A10).
    """
    for _ in range(ATTEMPTS - 1):
        with suppress(StalePlan):  # a job stored or published a plan meanwhile
            return _begin(manifest, at_least, parent)
    return _begin(manifest, at_least, parent)


def _begin(manifest: ManifestStore, at_least: int, parent: Parent | None) -> int:
    now = manifest.clock.now_ms()
    with manifest.read() as txn:
        epoch = max(txn.owner_epoch() + 1, at_least)
        current = txn.current_namespace()[1]
        line = (*current.ancestors, current.owner_epoch) if current.owner_epoch else ()
        own = NamespaceRecord("", legacy=current.legacy)
        places = [(0, own)]
        rows = [(key[0], row) for key, row in txn.scan(t.REMOTE_NAMESPACE) if not row.owner_epoch]
        places += [(place_id, row) for place_id, row in rows if not row.dropped_at_ms]
        records = [_of_epoch(txn, epoch, place_id, place, now, line) for place_id, place in places]
        plans = [key for key, _ in txn.scan(t.CHECKPOINT_PLAN)]
        origins = {key[0] for key in plans} | {NAMESPACES}
        timeline = _timeline(txn, epoch, parent) if parent is not None else []
    namespaces = [(manifest.allocate(Counter.NAMESPACE), record) for record in records]
    # A former epoch's namespace may be empty, and what abandoned plans wrote is garbage: delete jobs handle both (M8).
    deletions = manifest.jobs.deletions(origins) if line or len(origins) > 1 else []
    abandons = [AbandonPlan(*key) for key in plans]
    # Plans before the epoch, which refuses to begin while one is stored; delete jobs last, when the counts have fallen.
    manifest.submit([*timeline, *abandons, BeginOwnerEpoch(epoch, namespaces), *deletions]).result()
    if timeline:
        manifest.skip_ids()
    return epoch


def begin_restored(manifest: ManifestStore, parent: Parent) -> None:
    """Begin a new range before a restored directory is recovered: its next changes differ from those the owner made."""
    with manifest.read() as txn:
        _, head = txn.feed_bounds()
        epoch = txn.owner_epoch()
    first = restored_start(head, secrets.randbits(38))
    manifest.submit([Timeline(epoch, epoch, parent.number, parent.ended_at_ms, head, first)]).result()


def _timeline(txn: ReadTxn, epoch: int, parent: Parent) -> list[Op]:
    """Return the operations of a takeover. Local counters are not in the feed, so they need operations of their own."""
    _, head = txn.feed_bounds()
    last = txn.get(CHANGE_LOG, head)
    ended_at_ms = parent.ended_at_ms or (last.committed_at_ms if last is not None else 0)
    local = [
        ReserveLocalIds(counter, txn.next_id(counter) - 1 + SKIPPED_IDS[counter])
        for counter in (Counter.CURSOR, Counter.READER)
    ]
    return [
        Timeline(epoch, txn.owner_epoch(), parent.number, ended_at_ms, head, range_start(epoch, head)),
        *local,
    ]


ATTEMPTS = 8
_beginning = threading.Lock()
"""Held while the first epoch begins: two threads that each have a first object must begin only one."""


def ensure_owner_epoch(manifest: ManifestStore) -> None:
    """Begin the first epoch of a store that has none: a new store, or one that is older than epochs."""
    with _beginning:
        with manifest.read() as txn:
            begun = txn.owner_epoch()
        if not begun:
            begin_owner_epoch(manifest)


def _of_epoch(
    txn: ReadTxn, epoch: int, place_id: int, place: NamespaceRecord, now_ms: int, line: tuple[int, ...]
) -> NamespaceRecord:
    """Return the namespace of an epoch in a place. Without a URL it is wherever the store's objects are, as the place is."""
    below = epoch_prefix(txn.store_id(), epoch)
    prefix = f"{place.prefix.removesuffix('/')}/{below}" if place.prefix else below
    return NamespaceRecord(place.url, prefix, place.encryption_profile, now_ms, epoch, place_id, line, place.legacy)


def owned_names(txn: ReadTxn, objects_url: str) -> Owned:
    """Return the names that the store at `objects_url` may delete: those of its own epochs (A3).

    A store that is older than epochs may also delete names without one.
    """
    _, space = txn.current_namespace()
    line = {prefix for prefix in txn.object_prefixes() if prefix}
    current = {(objects_url, kv_backups_prefix(txn.store_id()))}
    ancestors = {(objects_url, prefix) for prefix in line}
    if space.owner_epoch:
        current.add((objects_url, archive_epoch_prefix(txn.store_id(), space.owner_epoch)))
        ancestors |= {
            (objects_url, archive_epoch_prefix(txn.store_of_epoch(epoch), epoch)) for epoch in space.ancestors
        }
    former = {(objects_url, "")} if space.legacy or not space.owner_epoch else set()
    for _, row in txn.scan(t.REMOTE_NAMESPACE):
        if row.name:  # streams and backups of key-value databases: their rows name the place, not an epoch of it
            current.add((row.url, kv_backups_prefix(txn.store_id())))
            ancestors |= {(row.url, prefix) for prefix in line}
        place = (row.url or objects_url, row.prefix.removesuffix("/"))
        if not row.owner_epoch:
            former.add(place)
        elif row.owner_epoch == space.owner_epoch:
            current.add(place)
        else:
            ancestors.add(place)
    ancestors -= current
    parents = tuple(f"{parent.store_id}/" for parent in txn.parents())
    foreign = {place for place in ancestors if f"{place[1]}/".startswith(parents)} if parents else set()
    urls = {url for url, _ in current | ancestors}
    foreign |= {(url, parent.rstrip("/")) for url in urls for parent in parents}
    return Owned(
        current=frozenset(current),
        ancestors=frozenset(ancestors - foreign),
        former=frozenset(former),
        foreign=frozenset(foreign),
    )


def collector_of(
    manifest: ManifestStore,
    objects_url: str,
    open_store: Callable[[str], Any],
    *,
    confirm: Confirm | None = None,
    claims_former: Callable[[], bool] = lambda: True,
    retires: Callable[[], bool] = lambda: False,
) -> Collector:
    """Return the collector of a store whose own object store is at `objects_url`; what `open_store` returns can delete.

    While `retires` returns true, it retires objects instead of deleting them.
    """

    def owned() -> Owned:
        with manifest.read() as txn:
            return owned_names(txn, objects_url)

    def retire(url: str, names: list[str]) -> bool:
        if not retires():
            return False
        place = "" if url == objects_url else url  # a directory may move, and its own object store moves with it
        for start in range(0, len(names), PAGE_OBJECTS):
            some = [(name, database_of(name)) for name in names[start : start + PAGE_OBJECTS]]
            manifest.submit([RetireObjects(place, some)]).result()
        return True

    return Collector(open_store, owned, confirm=confirm, claims_former=claims_former, retire=retire)


def database_of(name: str) -> int:
    """Return the database that an object's name belongs to; 0 if the name does not contain one.

    >>> database_of("1f0c0c1e-7d4e-4c5e-9f50-0d6d1c3b2a19/e/00000001/00000007/00000002/base:00000003")
    7
    """
    in_epoch = parse_epoch_key(name)
    suffix = in_epoch[2] if in_epoch is not None else name
    artifact = parse_object_key(suffix)
    if artifact is not None:
        return artifact.origin_db_id
    return int(suffix.split("/")[1]) if is_log_key(suffix) else 0


def retired_objects(txn: ReadTxn) -> Iterator[tuple[bytes, RetiredRecord]]:
    """Yield (digest, row) of every retired object; a damaged row is skipped, and its object stays."""
    for key, value in txn.raw_scan(t.RETIRED):
        try:
            yield t.RETIRED.key.unpack(key)[0], t.RETIRED.rows.decode(key, value)
        except ManifestDamaged as error:
            emit("warning", "archive.damaged_row", error=str(error))
