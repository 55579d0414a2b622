"""The packed body of a slot leaf: the chain of each slot, which is a base chunk and the deltas over it.

Terms
  slot     the position of one chunk in a database; its number is the chunk id (M7)
  leaf     256 consecutive slots; slot s is at offset s % 256 of leaf s // 256
  chain    the artifacts that together hold a slot's pages: one base, then distinct deltas of rising covered_lsn
  covered  every artifact carries the highest lsn it holds; a chain's is that of its last artifact (P8)

An entry is 20 bytes, little-endian: offset u8, kind u8, delta_id u16, origin_db_id u32, generation u32, covered_lsn
u64. Entries are sorted by offset, and within a slot in chain order. Part of docs/formats/manifest.md.

Threads: pure functions, callable from any thread. Raises `InvalidInput`, `OutOfRange`, `ManifestDamaged`.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from itertools import chain as chained
from itertools import pairwise

import msgspec

from quire.core.errors import InvalidInput, ManifestDamaged, OutOfRange
from quire.core.ids import ArtifactKey, ArtifactKind
from quire.core.limits import SLOTS_PER_LEAF

ENTRY = struct.Struct("<BBHIIQ")
ENTRY_FIELDS = [
    ("offset", "u1"),
    ("kind", "u1"),
    ("delta_id", "<u2"),
    ("origin_db_id", "<u4"),
    ("generation", "<u4"),
    ("covered_lsn", "<u8"),
]
assert ENTRY.size == 20


class Link(msgspec.Struct, frozen=True):
    """One artifact of a chain."""

    kind: ArtifactKind
    origin_db_id: int
    generation: int
    covered_lsn: int
    delta_id: int = 0

    def artifact(self, slot: int) -> ArtifactKey:
        """Return the artifact's key, given the slot that the chain belongs to."""
        return ArtifactKey(self.origin_db_id, self.kind, slot, self.generation, self.delta_id)


Chain = tuple[Link, ...]
Leaf = dict[int, Chain]
"""Offset in the leaf → chain."""

EMPTY: Chain = ()


def place(slot: int) -> tuple[int, int]:
    """Return (leaf, offset) of a slot."""
    return divmod(slot, SLOTS_PER_LEAF)


def check_chain(chain: Chain, slot: int) -> None:
    """Refuse a caller's chain unless it is one base followed by distinct deltas of rising lsns."""
    if chain[0].kind is not ArtifactKind.BASE or any(link.kind is not ArtifactKind.DELTA for link in chain[1:]):
        raise InvalidInput(
            "a chain is one base followed by deltas", slot=slot, kinds=[link.kind.name for link in chain]
        )
    if any(low.covered_lsn >= high.covered_lsn for low, high in pairwise(chain)):
        raise InvalidInput(
            "a chain's deltas must cover rising lsns", slot=slot, covered=[link.covered_lsn for link in chain]
        )
    if len({link.artifact(slot) for link in chain}) < len(chain):
        # A leaf holds each artifact once: an artifact named twice would be counted once and released twice.
        raise InvalidInput("a chain names one artifact twice", slot=slot)


def pack_leaf(leaf: Leaf) -> bytes:
    """Encode a leaf."""
    try:
        return b"".join(
            ENTRY.pack(offset, link.kind, link.delta_id, link.origin_db_id, link.generation, link.covered_lsn)
            for offset in sorted(leaf)
            for link in leaf[offset]
        )
    except struct.error as error:
        raise OutOfRange("a chain has a number that does not fit its field", leaf=str(leaf)[:200]) from error


def unpack_leaf(entries: bytes) -> Leaf:
    """Decode the chains of a leaf."""
    if len(entries) % ENTRY.size:
        raise ManifestDamaged("a leaf is not a whole number of entries", bytes=len(entries))
    leaf: dict[int, list[Link]] = {}
    try:
        for offset, kind, delta_id, origin, generation, covered in ENTRY.iter_unpack(entries):
            leaf.setdefault(offset, []).append(Link(ArtifactKind(kind), origin, generation, covered, delta_id))
    except ValueError as error:
        raise ManifestDamaged(f"a leaf has an entry of an unknown kind: {error}", bytes=len(entries)) from error
    return {offset: tuple(chain) for offset, chain in leaf.items()}


def artifacts(leaf: Leaf, number: int) -> Iterable[ArtifactKey]:
    """Return every artifact that leaf `number` refers to."""
    first = number * SLOTS_PER_LEAF
    return chained.from_iterable((link.artifact(first + offset) for link in chain) for offset, chain in leaf.items())
