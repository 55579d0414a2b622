"""What a step of a delete job tells the manifest, once the bytes are gone."""

from __future__ import annotations

from collections.abc import Iterable

from quire.core.ids import ArtifactKey, ArtifactKind
from quire.jobs.delete.plan import DeletePlan
from quire.manifest import tables as t
from quire.manifest.namespaces import NAMESPACES
from quire.manifest.ops.base import Op
from quire.manifest.ops.corrections import CorrectRefcount
from quire.manifest.ops.pageindex import ForgetPages
from quire.manifest.ops.plans import AbandonPlan
from quire.manifest.ops.refs import RemoveArtifact, artifact_key
from quire.manifest.ops.slots import CollectLeaf
from quire.manifest.reads import ReadTxn
from quire.manifest.slots import artifacts, unpack_leaf

STEP_PAGE_ROWS = 4_096
"""Rows of a dropped database's page index that go in one commit: a few milliseconds."""


def deletion_ops(plan: DeletePlan, gone: Iterable[ArtifactKey], db_id: int) -> list[Op]:
    """The rows that go now: those of artifacts whose bytes are gone, and those that have none."""
    ops: list[Op] = [CollectLeaf(leaf.origin_db_id, leaf.id, leaf.generation) for leaf in plan.leaves]
    for key in (*gone, *plan.rowless):
        ops.append(RemoveArtifact(key.origin_db_id, key.kind, key.id, key.generation, key.delta_id))
    ops += [CorrectRefcount(artifact_key(key), 0, 0) for key in plan.orphans]
    ops += [AbandonPlan(db_id, generation) for generation in plan.plans]
    if plan.stale_pages:
        ops.append(ForgetPages(db_id, STEP_PAGE_ROWS))
    return ops


def next_origins(txn: ReadTxn, plan: DeletePlan, db_id: int) -> set[int]:
    """The databases whose delete jobs may have work after this step: those whose artifacts the leaves held, and namespaces."""
    origins = {db_id}
    if plan.task.places:
        origins.add(NAMESPACES)
    for leaf in plan.leaves:
        row = txn.get(t.SLOT_LEAF, leaf.origin_db_id, leaf.id, leaf.generation)
        if row is not None:
            origins.update(each.origin_db_id for each in _held(row.entries, leaf))
    return origins


def _held(entries: bytes, leaf: ArtifactKey) -> list[ArtifactKey]:
    assert leaf.kind is ArtifactKind.LEAF
    return list(artifacts(unpack_leaf(entries), leaf.id))
