"""Builds a `SnapshotView` from a snapshot's row, or of a version between two checkpoints; this side needs a manifest.

A view is read in one transaction, so its links and pins are consistent. A view of an earlier version than its snapshot's (time
travel, P14) has the same leaves, and the pins cut at that version. That is correct only if the leaves cover no more than the
version: the caller has checked that.

Only reads. Raises `UnknownSnapshot`, `UnknownDatabase`, `Corruption` for missing rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

import numpy as np

from quire.core.errors import Corruption, SnapshotGone, UnknownDatabase
from quire.core.ids import ArtifactKey
from quire.core.limits import CHUNK_BYTES, SLOTS_PER_LEAF
from quire.durable.names import object_key
from quire.manifest import tables as t
from quire.manifest.reads import ReadTxn
from quire.manifest.records import WINDOW_TAG, DbRecord, Pin, SnapshotKind, SnapshotRecord
from quire.manifest.slots import unpack_leaf
from quire.manifest.store import ManifestStore
from quire.pages.catalog import chunk_row, segment_place, space_of
from quire.pages.framemap import PinnedSegment, Regions
from quire.pages.page_source import Mark
from quire.pages.readers import is_kept
from quire.pages.sources import Sources
from quire.pages.view import LINK_DTYPE, SnapshotView, ViewReader, ViewSource

KEPT_FOR_READER = "reader"
"""The value of `WINDOW_TAG` on a snapshot that keeps versions for readers."""
FROM_TAG = "from-lsn"
"""The tag with the lowest version of such a snapshot: the lsn that the preceding checkpoint covers."""


def view_of(
    txn: ReadTxn, db_id: int, snapshot_id: int, record: SnapshotRecord, objects_url: str, *, at: Mark | None = None
) -> SnapshotView:
    """Return the view of a snapshot, or of an earlier version that its pins reach back to."""
    database = txn.database(db_id)
    if database is None:
        raise UnknownDatabase("no database has this id", hint="`quire ls` lists the databases", db_id=db_id)
    mark = at or Mark(record.anchor_lsn, record.size_pages, record.anchor_segment_id, record.anchor_time_ms)
    links, spaces, names = _links(txn, record, objects_url)
    return SnapshotView(
        db_id=db_id,
        snapshot_id=snapshot_id,
        name=record.name,
        page_size=record.page_size or database.page_size,
        pages_per_chunk=_pages_per_chunk(database),
        lsn=mark.lsn,
        size_pages=mark.size_pages,
        time_ms=mark.commit_ms or record.created_at_ms,
        segment_id=mark.segment_id,
        links=links,
        spaces=spaces,
        names=names,
        pins=tuple(pinned(txn, record.pins, objects_url, upto_lsn=mark.lsn)),
    )


def open_kept(manifest: ManifestStore, view: SnapshotView, sources: Sources, regions: Regions) -> ViewReader:
    """Return a reader of a view that a snapshot's row keeps; reading raises `SnapshotGone` after the snapshot is dropped."""

    is_gone = _dropped(manifest.read, view)
    try:
        return ViewReader(view, sources, regions=regions, is_gone=is_gone)
    except Corruption as error:
        for pin in view.pins:
            sources.forget_segment(pin.origin_db_id, pin.segment_id)  # its handle may be of a file since recycled
        if is_gone():
            what = "the snapshot was dropped while it was opened"
            where = {"db_id": view.db_id, "snapshot_id": view.snapshot_id, "cause": str(error)}
            raise SnapshotGone(what, hint="open another one", **where) from error
    return ViewReader(view, sources, regions=regions, is_gone=is_gone)


def reader_snapshots(txn: ReadTxn, db_id: int) -> Iterator[tuple[int, SnapshotRecord]]:
    """Yield (id, row) of the snapshots that keep versions for readers that were set aside (`jobs/checkpoint/plan.py`)."""
    for (_, snapshot_id), row in txn.scan(t.SNAPSHOT_INDEX, db_id):
        if row.tags.get(WINDOW_TAG) == KEPT_FOR_READER and row.kind is SnapshotKind.ANONYMOUS:
            yield snapshot_id, row


def kept_range(row: SnapshotRecord) -> tuple[int, int]:
    """Return the (lowest, highest) version that can be read from such a snapshot."""
    lowest = row.tags.get(FROM_TAG, "")
    return int(lowest) if lowest.isdecimal() else row.anchor_lsn, row.anchor_lsn


def kept_source(
    begin_read: Callable[[], AbstractContextManager[ReadTxn]],
    sources: Sources,
    db_id: int,
    mark: Mark,
    objects_url: str,
) -> ViewSource | None:
    """Return a source of a version that was set aside; `None` if no snapshot keeps it."""
    with begin_read() as txn:
        for snapshot_id, row in reader_snapshots(txn, db_id):
            if is_kept(mark.lsn, [kept_range(row)]):
                view = view_of(txn, db_id, snapshot_id, row, objects_url, at=mark)
                break
        else:
            return None

    return ViewSource(view, sources, is_gone=_dropped(begin_read, view))


def _dropped(begin_read: Callable[[], AbstractContextManager[ReadTxn]], view: SnapshotView) -> Callable[[], bool]:
    """Return a function that returns whether the snapshot's row behind a view is gone."""

    def is_gone() -> bool:
        with begin_read() as txn:
            return txn.snapshot(view.db_id, view.snapshot_id) is None

    return is_gone


def pinned(txn: ReadTxn, pins: list[Pin], objects_url: str, *, upto_lsn: int) -> list[PinnedSegment]:
    """Return pins with their places, sorted by first lsn and cut at an lsn."""
    segments: list[tuple[int, PinnedSegment]] = []
    for pin in pins:
        row = txn.get(t.WAL_CATALOG, pin.origin_db_id, pin.segment_id)
        if row is None:
            raise Corruption(
                "a pinned WAL segment has no row",
                hint="run `quire manifest check`",
                db_id=pin.origin_db_id,
                segment_id=pin.segment_id,
            )
        if row.first_lsn <= upto_lsn:
            place = segment_place(txn, pin.origin_db_id, pin.segment_id, objects_url)
            upto = min(pin.upto_lsn, upto_lsn)
            segments.append((row.first_lsn, PinnedSegment(pin.origin_db_id, pin.segment_id, upto, place)))
    return [segment for _, segment in sorted(segments, key=lambda item: item[0])]


def _links(
    txn: ReadTxn, record: SnapshotRecord, objects_url: str
) -> tuple[bytes, tuple[tuple[str, str], ...], tuple[str, ...]]:
    rows: list[tuple[int, ...]] = []
    spaces: dict[tuple[str, str], int] = {}
    names: dict[str, int] = {"": 0}
    of_namespace: dict[int, tuple[str, str]] = {}
    for number, origin, generation in sorted(record.leaves):
        leaf = txn.get(t.SLOT_LEAF, origin, number, generation)
        if leaf is None:
            raise Corruption("a leaf of the slot map is missing", hint="run `quire manifest check`", leaf=number)
        for offset, chain in sorted(unpack_leaf(leaf.entries).items()):
            slot = number * SLOTS_PER_LEAF + offset
            for link in chain:
                key = link.artifact(slot)
                row = chunk_row(txn, key)
                if row.namespace_id not in of_namespace:
                    of_namespace[row.namespace_id] = space_of(txn, row.namespace_id, objects_url)
                space = spaces.setdefault(of_namespace[row.namespace_id], len(spaces))
                name = names.setdefault(_own_name(key, row.suffix), len(names))
                rows.append(
                    (
                        slot,
                        link.origin_db_id,
                        link.generation,
                        link.delta_id,
                        link.kind,
                        0,
                        link.covered_lsn,
                        row.size_bytes,
                        space,
                        name,
                    )
                )
    return np.array(rows, LINK_DTYPE).tobytes(), tuple(spaces), tuple(names)


def _own_name(key: ArtifactKey, suffix: str) -> str:
    """Return the suffix of a row; empty if it follows from the artifact's key."""
    return "" if suffix == object_key(key) else suffix


def _pages_per_chunk(database: DbRecord) -> int:
    return database.pages_per_chunk or (CHUNK_BYTES // database.page_size if database.page_size else 1)
