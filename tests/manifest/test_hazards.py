"""Hazards found by review, each with the test that would have shown it."""

from __future__ import annotations

from typing import Any

import pytest

from quire.core.errors import AlreadyExists, InvalidInput, StoreClosed
from quire.core.ids import ArtifactKind
from quire.manifest.ops.artifacts import PutChunk, UpdateArtifact
from quire.manifest.ops.cursors import RegisterCursor
from quire.manifest.ops.local import RecordMetric
from quire.manifest.records import ChunkRecord, Residency
from quire.manifest.store import ManifestStore
from tests.manifest.batches import outcome
from tests.manifest.helpers import chunk, does, register, together


def test_a_row_that_exists_is_not_replaced_by_writing_it_twice_in_one_group(manifest: ManifestStore) -> None:
    """Hazard: an optimistic insert whose key was put again in the same group escaped the check at flush."""
    does(manifest, register(1), chunk(1))
    other = PutChunk(1, 1, 1, ChunkRecord(Residency.LOCAL, 99, 99))
    update = UpdateArtifact(1, ArtifactKind.BASE, 1, 1, verified_at_ms=5)
    assert isinstance(outcome(manifest.submit([other, update])), AlreadyExists)


def test_a_failing_batch_does_not_move_the_cursors_registered_before_it(manifest: ManifestStore) -> None:
    """Hazard: when the good batches of a group were applied again, they saw the head of the feed after all of them."""
    does(manifest, register(1))
    cursor, bad = RegisterCursor(1, 2**40, "c"), RecordMetric(1, 1, [])
    guards = together(manifest, [[cursor], [chunk(1)], [chunk(2)], [bad]])
    assert [isinstance(outcome(guard), Exception) for guard in guards] == [False, False, False, True]
    assert manifest.feed.cursor("c").acked_sequence == 1


def test_a_field_of_the_wrong_type_is_refused_in_a_group_alike_too(path: str) -> None:
    """Hazard: the short way committed a record that could not be decoded, and the store did not open again."""
    bad: Any = "oops"
    with ManifestStore.open(path) as manifest:
        does(manifest, register(1))
        wrong = PutChunk(1, 1, 1, ChunkRecord(Residency.LOCAL, bad, 0))
        guards = together(manifest, [[wrong], [chunk(2)], [chunk(3)]])
        assert isinstance(outcome(guards[0]), InvalidInput)
        assert [guard.result().sequence for guard in guards[1:]] == [2, 3]
    ManifestStore.open(path).close()


def test_errors_told_to_many_do_not_collect_their_frames(path: str) -> None:
    manifest = ManifestStore.open(path)
    manifest.close()
    for _ in range(3):
        with pytest.raises(StoreClosed) as caught:
            manifest.submit([register(1)])
    assert len(caught.traceback) < 8
