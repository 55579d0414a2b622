"""The life cycle of a segment in the change feed: every step is an operation in a change record, and the steps are in
order."""

from __future__ import annotations

from quire.manifest.change import Start
from quire.manifest.ops.plans import BeginPlan, FinishPlan
from quire.manifest.ops.wal import AppendWalChunk, MoveWalState, OpenSegment
from quire.manifest.records import WalState
from tests.pages.engine_harness import Model, Pages, image, write


def steps(operation: object) -> list[WalState]:
    """The states to which an operation moves segments."""
    match operation:
        case OpenSegment():
            return [WalState.OPEN]
        case AppendWalChunk():
            return [WalState.SEALED]
        case MoveWalState():
            return [operation.state]
        case BeginPlan():
            return [WalState.CHECKPOINT_READY]
        case FinishPlan():
            return [WalState.CHECKPOINTED]
    return []


def test_every_step_is_a_record_of_the_feed(pages: Pages) -> None:
    cursor = pages.manifest.feed.register(Start.LATEST)
    store, model = pages.database(), Model()
    write(store, model, {0: image()})
    store.wal.seal()
    store.wal.publish()
    pages.checkpoint(store)
    changes = pages.manifest.feed.fetch(cursor.cursor_id, 1000).changes
    recorded = [
        (record.sequence, step) for record in changes for operation in record.operations for step in steps(operation)
    ]
    assert [step for _, step in recorded] == list(WalState)
    assert len({sequence for sequence, step in recorded if step is not WalState.INDEXED}) == len(WalState) - 1, (
        "only the end of publication shares its commit with sealing"
    )
