"""Finds the pages of a database that may have changed between two versions, without reading either (W6).

The result is a superset of the pages that differ, from the manifest and index regions:

  unpublished      pages in the WAL's memory (`PageStore.changed`)
  live segments    index regions, as far as they are published (P2)
  deltas           the bitmap in a delta's row, if the delta covers more than the first version
  bases            the kept history in a base's row, else the whole slot

A base that replaces a chain would hide which pages its deltas had. So its row keeps their bitmaps, and that of the pages that
the rewrite itself absorbed, for `KEPT_MS`: the *history* of the base. It is `(after, entries)`: an entry (covered lsn, time in
milliseconds, bitmap) has the slot's pages that changed above the covered lsn of the entry before it; `after` is the lsn before
the first entry. Older changes are unknown, and mean the whole slot. `ChunkRecord.changes`, docs/formats/manifest.md.

If a database shrinks and grows again, the pages in between are logged again when it grows (P15), so they are in the result.

Threads: any; pure functions over one transaction. Raises `Corruption` if a segment was released while its region was read: the
caller should try again.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence

import msgspec
import numpy as np
from pyroaring import BitMap

from quire.core.ids import ArtifactKey, ArtifactKind
from quire.core.limits import SLOTS_PER_LEAF
from quire.manifest import tables as t
from quire.manifest.reads import ReadTxn
from quire.manifest.records import ChunkRecord, DeltaRecord, WalState
from quire.manifest.slots import ENTRY_FIELDS, Chain
from quire.pages.catalog import chunk_row, segment_place
from quire.pages.framemap import PinnedSegment, Regions
from quire.pages.page_source import Mark
from quire.pages.timetravel import live_segments

KEPT_MS = 7 * 24 * 3600 * 1000
"""Seven days: a replica that was offline for a week gets only the changed pages, whatever was merged in the meantime."""

HISTORY_BYTES_MAX = 16 << 10
"""Total size of the bitmaps in one history, 0.02 % of the slot's 64 MiB; above it, the oldest two are united."""

HISTORY_ENTRIES_MAX = 64

_LEAF_DTYPE = np.dtype(ENTRY_FIELDS)

Entry = tuple[int, int, bytes]
"""(covered lsn, time in milliseconds, bitmap of offsets in the slot)."""
History = tuple[int, list[Entry]]
"""(after, entries): see the module."""

_decode = msgspec.msgpack.Decoder(History).decode


def changed_pages(
    txn: ReadTxn, regions: Regions, db_id: int, pages_per_chunk: int, objects_url: str, since: int, upto: Mark
) -> BitMap:
    """Return a superset of the published pages that changed above `since` and at or below `upto`."""
    pages = BitMap()
    for pin in _unabsorbed(txn, db_id, objects_url, since, upto.lsn):
        entries = regions.of(pin).entries
        pages |= BitMap(array("I", entries["page"][entries["lsn"] > since].astype("<u4").tobytes()))
    for key, covered in _artifacts_above(txn, db_id, since):
        row, first = chunk_row(txn, key), key.id * pages_per_chunk
        offsets = _offsets_of(row, covered, since)
        if offsets is None:
            pages.add_range(first, first + pages_per_chunk)
        else:
            pages |= offsets.shift(first)
    pages &= BitMap(range(upto.size_pages))
    return pages


def _unabsorbed(txn: ReadTxn, db_id: int, objects_url: str, since: int, upto_lsn: int) -> Iterator[PinnedSegment]:
    """Yield the segments that no checkpoint has absorbed, as far as their regions are written and within (since, upto]."""
    wal = txn.wal_state(db_id)
    end = min(upto_lsn, wal.indexed_upto_lsn if wal is not None else 0)
    for pin in live_segments(txn, db_id, end, lambda row: row.state < WalState.CHECKPOINTED):
        if pin.upto_lsn > since:
            yield pin._replace(place=segment_place(txn, pin.origin_db_id, pin.segment_id, objects_url))


def _artifacts_above(txn: ReadTxn, db_id: int, since: int) -> Iterator[tuple[ArtifactKey, int]]:
    """Yield (artifact, covered lsn) of the artifacts in live chains that cover more than an lsn."""
    for (_, number), held in txn.scan(t.LIVE_LEAF, db_id):
        leaf = txn.get(t.SLOT_LEAF, held.origin_db_id, number, held.generation)
        if leaf is None:
            continue  # `quire manifest check` reports it; reading the slot raises
        links = np.frombuffer(leaf.entries, _LEAF_DTYPE)
        for link in links[links["covered_lsn"] > since]:
            slot = number * SLOTS_PER_LEAF + int(link["offset"])
            kind, origin = ArtifactKind(int(link["kind"])), int(link["origin_db_id"])
            key = ArtifactKey(origin, kind, slot, int(link["generation"]), int(link["delta_id"]))
            yield key, int(link["covered_lsn"])


def _offsets_of(row: ChunkRecord | DeltaRecord, covered: int, since: int) -> BitMap | None:
    """Return the pages of a slot that an artifact may have changed above an lsn; `None` if unknown."""
    if isinstance(row, DeltaRecord):
        return BitMap.deserialize(row.dirty_pages) if row.dirty_pages else None
    after, entries = history_of(row, covered)
    if since < after:
        return None
    return BitMap.union(BitMap(), *(BitMap.deserialize(bitmap) for lsn, _, bitmap in entries if lsn > since))


# ── histories ─────────────────────────────────────────────────────────────────────────────────────────────────────────
def history_of(row: ChunkRecord, covered: int) -> History:
    """Return the history of a base; for one without a history, an empty one that starts at its covered lsn."""
    return _decode(row.changes) if row.changes else (covered, [])


def history_after(
    before: Sequence[tuple[int, ChunkRecord | DeltaRecord]], covered: int, fresh: bytes, now_ms: int
) -> bytes:
    """Return the encoded history of a base that replaces the chain `before`, (covered lsn, row) of each, and absorbs `fresh`.

    `fresh` is the bitmap of absorbed pages.
    """
    after, entries = 0, list[Entry]()
    for lsn, row in before:
        if isinstance(row, ChunkRecord):
            after, entries = history_of(row, lsn)
        elif row.dirty_pages:
            entries.append((lsn, row.created_at_ms, row.dirty_pages))
        else:
            after, entries = lsn, []
    if fresh:
        entries.append((covered, now_ms, fresh))
    return msgspec.msgpack.encode(_bounded(after, entries, now_ms))


def _bounded(after: int, entries: list[Entry], now_ms: int) -> History:
    """Return the history without entries that are too old, the oldest ones united until it is small enough."""
    kept = list(entries)
    # `after` rises with each dropped entry, so a version older than the history gets the whole slot.
    while kept and kept[0][1] < now_ms - KEPT_MS:
        after = kept.pop(0)[0]
    while len(kept) > 1 and (
        len(kept) > HISTORY_ENTRIES_MAX or sum(len(bitmap) for _, _, bitmap in kept) > HISTORY_BYTES_MAX
    ):
        # The union gets the later lsn: for a version between the two it names too many pages, never too few.
        (_, _, first), (lsn, at_ms, second) = kept[:2]
        kept[:2] = [(lsn, at_ms, (BitMap.deserialize(first) | BitMap.deserialize(second)).serialize())]
    return after, kept


def rows_of(txn: ReadTxn, slot: int, chain: Chain) -> list[tuple[int, ChunkRecord | DeltaRecord]]:
    """Return (covered lsn, row) of each artifact of a chain, the input of `history_after`."""
    return [(link.covered_lsn, chunk_row(txn, link.artifact(slot))) for link in chain]
