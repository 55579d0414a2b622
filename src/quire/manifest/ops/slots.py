"""Operations on the slot map (M7): which artifacts hold which slot of a database.

Every leaf row holds one reference on each artifact of its chains; live databases and snapshots hold leaves. A leaf at
zero keeps its references until `CollectLeaf` releases them, so dropping a snapshot is cheap, and leaves are collected
in commits of any size.
"""

from quire.core.errors import AlreadyExists, InternalError, StalePlan, UnknownArtifact
from quire.core.ids import ArtifactKey, u32
from quire.core.limits import SLOTS_PER_LEAF
from quire.manifest import tables as t
from quire.manifest.ops.base import Component, Op
from quire.manifest.ops.refs import artifact_key, leaf_count_key, release, remove_counts, require_doomed, retain
from quire.manifest.overlay import Overlay
from quire.manifest.records import LeafRecord, LeafRef, UInt
from quire.manifest.slots import Leaf, artifacts, check_chain, pack_leaf, unpack_leaf


def read_leaf(tables: Overlay, origin_db_id: int, leaf: int, generation: int) -> Leaf:
    """Return the chains of a held leaf; a missing row is a bug."""
    row = tables.slot_leaf.get(t.SLOT_LEAF.key.pack(origin_db_id, leaf, generation))
    if row is None:
        raise InternalError("a held leaf has no row", db_id=origin_db_id, leaf=leaf, generation=generation)
    return unpack_leaf(row.entries)


class SetSlots(Op, frozen=True, tag=30):
    """Give slots of one leaf new chains (an empty chain clears the slot).

    `expected` is the generation of the leaf that the change was planned on, 0 for none: the plan of a zombie no longer
    matches (P10). `changes` is packed as in `slots.py`; `cleared` lists offsets that lose their chain.
    """

    component = int(Component.SLOT)
    db_id: UInt
    leaf: UInt
    generation: UInt
    expected_origin_db_id: UInt
    expected_generation: UInt
    changes: bytes
    cleared: bytes = b""

    def apply(self, tables: Overlay, at_ms: int) -> None:
        u32("last slot of the leaf", (self.leaf + 1) * SLOTS_PER_LEAF - 1)
        db = tables.writable(self.db_id, even="read_only")
        # A generation that was not used up beforehand could become the name of a second body (P10).
        if not 0 < self.generation < db.next_generation:
            raise StalePlan(
                "the generation was not reserved", hint="call reserve_generation first", generation=self.generation
            )
        live_key = t.LIVE_LEAF.key.pack(self.db_id, self.leaf)
        held = tables.live_leaf.get(live_key) or LeafRef(0, 0)
        if (held.origin_db_id, held.generation) != (self.expected_origin_db_id, self.expected_generation):
            raise StalePlan(
                "the leaf has changed since the plan was made",
                hint="plan again",
                db_id=self.db_id,
                leaf=self.leaf,
                now=(held.origin_db_id, held.generation),
                planned=(self.expected_origin_db_id, self.expected_generation),
            )
        key = t.SLOT_LEAF.key.pack(self.db_id, self.leaf, self.generation)
        if tables.slot_leaf.has(key):
            raise AlreadyExists("this version of the leaf already exists", leaf=self.leaf, generation=self.generation)
        before = read_leaf(tables, held.origin_db_id, self.leaf, held.generation) if held.generation else {}
        after = self._changed(before)
        self._move_references(tables, held, before, after, at_ms)
        tables.slot_leaf.put(key, LeafRecord(pack_leaf(after)))
        retain(tables, leaf_count_key(self.db_id, self.leaf, self.generation))
        tables.live_leaf.put(live_key, LeafRef(self.db_id, self.generation))

    def _changed(self, before: Leaf) -> Leaf:
        changes = unpack_leaf(self.changes)
        for offset, chain in changes.items():
            check_chain(chain, self.leaf * SLOTS_PER_LEAF + offset)
        after = {**before, **changes}
        for offset in self.cleared:
            after.pop(offset, None)
        return after

    def _move_references(self, tables: Overlay, held: LeafRef, before: Leaf, after: Leaf, at_ms: int) -> None:
        mine: set[ArtifactKey] = set(artifacts(after, self.leaf))
        gone: set[ArtifactKey] = set()
        if held.generation:
            counts_key = leaf_count_key(held.origin_db_id, self.leaf, held.generation)
            counts = tables.gc_refcounts.get(counts_key)
            if counts is not None and counts.in_use == 1 and not counts.pending_upload:
                # Nothing else holds the old version: the new one takes over its references, and only changed slots move
                # counts.
                theirs = set(artifacts(before, self.leaf))
                mine, gone = mine - theirs, theirs - mine
                tables.slot_leaf.delete(t.SLOT_LEAF.key.pack(held.origin_db_id, self.leaf, held.generation))
                remove_counts(tables, counts_key)
            else:
                release(tables, counts_key, at_ms)
        for artifact in sorted(mine):
            view, row_key = tables.catalog(artifact)
            if not view.has(row_key):
                raise UnknownArtifact(
                    "a chain names an artifact that is not in the catalog", hint="put it first", artifact=artifact
                )
            retain(tables, artifact_key(artifact))
        for artifact in sorted(gone):
            release(tables, artifact_key(artifact), at_ms)


class CollectLeaf(Op, frozen=True, tag=31):
    """Remove a leaf that nothing holds, and release what it refers to."""

    component = int(Component.SLOT)
    origin_db_id: UInt
    leaf: UInt
    generation: UInt

    def apply(self, tables: Overlay, at_ms: int) -> None:
        counts_key = leaf_count_key(self.origin_db_id, self.leaf, self.generation)
        require_doomed(tables, counts_key)
        for artifact in artifacts(read_leaf(tables, self.origin_db_id, self.leaf, self.generation), self.leaf):
            release(tables, artifact_key(artifact), at_ms)
        tables.slot_leaf.delete(t.SLOT_LEAF.key.pack(self.origin_db_id, self.leaf, self.generation))
        remove_counts(tables, counts_key)
