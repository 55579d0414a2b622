"""The differences between two versions of a database, from keys alone: a leaf, a chain or a segment with the same key
is equal without being read. Pages are an upper bound: a rewritten chunk may hold the same bytes as before.

Threads: pure functions over one read transaction. Raises `ManifestDamaged`.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from quire.core.errors import ManifestDamaged
from quire.core.ids import ArtifactKey
from quire.core.limits import CHUNK_BYTES, PAGE_SIZE_MIN, SLOTS_PER_LEAF
from quire.manifest import tables as t
from quire.manifest.reads import ReadTxn
from quire.manifest.records import Pin
from quire.manifest.slots import EMPTY, Chain, Leaf, unpack_leaf


class SlotDiff(msgspec.Struct, frozen=True):
    """A slot whose chains differ."""

    slot: int
    before: Chain
    after: Chain
    pages: tuple[int, ...] | None
    """Offsets of the pages that may differ; `None`: any page of the slot, because the base differs."""


class SnapshotDiff(msgspec.Struct, frozen=True):
    """The differences between two versions. Everything not named here is shared."""

    slots: tuple[SlotDiff, ...]
    removed: tuple[ArtifactKey, ...]
    """Artifacts that only the first version names."""
    added: tuple[ArtifactKey, ...]
    """Artifacts that only the second version names."""
    pages: int
    """Number of pages in chunks that may differ: an upper bound."""
    pins_removed: tuple[Pin, ...]
    pins_added: tuple[Pin, ...]
    """WAL segments that only one version pins; their pages are not counted in `pages`."""

    @property
    def same(self) -> bool:
        """Whether the two versions are the same."""
        return not (self.slots or self.pins_added or self.pins_removed)


class View(msgspec.Struct, frozen=True):
    """One version of a database, by its keys."""

    leaves: dict[int, tuple[int, int]]
    pins: tuple[Pin, ...]
    pages_per_chunk: int
    size_pages: int = 0
    """0 if unknown: then a slot counts as full."""

    def pages_in(self, slot: int) -> int:
        """Return the maximum number of pages of a slot in this version."""
        if not self.size_pages:
            return self.pages_per_chunk
        return min(self.pages_per_chunk, max(self.size_pages - slot * self.pages_per_chunk, 0))


def compare(txn: ReadTxn, first: View, second: View) -> SnapshotDiff:
    """Return the differences from the first version to the second."""
    slots: list[SlotDiff] = []
    names: tuple[set[ArtifactKey], set[ArtifactKey]] = (set(), set())
    for number in sorted(first.leaves.keys() | second.leaves.keys()):
        keys = first.leaves.get(number), second.leaves.get(number)
        if keys[0] == keys[1]:
            continue
        before, after = (_leaf(txn, number, key) for key in keys)
        for offset in sorted(before.keys() | after.keys()):
            chains = before.get(offset, EMPTY), after.get(offset, EMPTY)
            if chains[0] != chains[1]:
                slot = number * SLOTS_PER_LEAF + offset
                slots.append(SlotDiff(slot, *chains, _pages(txn, slot, *chains)))
                for named, chain in zip(names, chains):
                    named.update(link.artifact(slot) for link in chain)
    pins = set(first.pins), set(second.pins)
    return SnapshotDiff(
        tuple(slots),
        tuple(sorted(names[0] - names[1])),
        tuple(sorted(names[1] - names[0])),
        sum(_whole(slot.slot, first, second) if slot.pages is None else len(slot.pages) for slot in slots),
        tuple(pin for pin in first.pins if pin not in pins[1]),
        tuple(pin for pin in second.pins if pin not in pins[0]),
    )


def _whole(slot: int, first: View, second: View) -> int:
    """Return the number of pages of a slot about which nothing better is known: as many as either version has there."""
    known = max(first.pages_in(slot), second.pages_in(slot))
    # 0: the size lags behind the slot map, so it says nothing about this slot.
    return known or max(first.pages_per_chunk, second.pages_per_chunk)


def read_leaves(txn: ReadTxn, keys: list[tuple[int, int, int]]) -> Iterator[tuple[int, Leaf]]:
    """Yield (leaf number, chains) of held leaves."""
    for number, origin, generation in keys:
        row = txn.get(t.SLOT_LEAF, origin, number, generation)
        if row is None:
            what = "a leaf that a version holds is missing"
            hint = "`quire manifest check` names such rows"
            raise ManifestDamaged(what, hint=hint, origin_db_id=origin, leaf=number, generation=generation)
        yield number, unpack_leaf(row.entries)


def _leaf(txn: ReadTxn, number: int, key: tuple[int, int] | None) -> Leaf:
    return next(read_leaves(txn, [(number, *key)]))[1] if key is not None else {}


def _pages(txn: ReadTxn, slot: int, before: Chain, after: Chain) -> tuple[int, ...] | None:
    """Return the pages of a slot that may differ: those of deltas that only one chain has, if both have the same base."""
    if not before or not after or before[0] != after[0]:
        return None
    from pyroaring import BitMap  # needed only to compare

    shared = set(before) & set(after)
    pages = BitMap()
    for link in (*before, *after):
        if link not in shared:
            key = link.artifact(slot)
            row = txn.artifact(key)
            if row is None or not row.dirty_pages:
                return None
            try:
                dirty = BitMap.deserialize(row.dirty_pages)
            except (ValueError, IndexError) as error:
                raise _no_bitmap(key, str(error)) from error
            if dirty and dirty.max() >= CHUNK_BYTES // PAGE_SIZE_MIN:  # a few bytes can encode billions of pages
                raise _no_bitmap(key, f"page {dirty.max()}")
            pages |= dirty
    return tuple(pages)


def _no_bitmap(key: ArtifactKey, cause: str) -> ManifestDamaged:
    what = "the pages of a delta do not decode, or are more than a chunk can hold"
    return ManifestDamaged(what, hint="`quire manifest check` names such rows", key=str(key), cause=cause)
