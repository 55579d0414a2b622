"""Hazards that reviews found, each with a test that reproduces it."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from quire.core.errors import AlreadyExists, InvalidInput, ManifestDamaged, StoreClosed
from quire.core.ids import ArtifactKind
from quire.manifest.ops.artifacts import PutChunk, UpdateArtifact
from quire.manifest.ops.cursors import RegisterCursor
from quire.manifest.ops.local import RecordMetric
from quire.manifest.records import ChunkRecord, DbRecord, DeltaRecord, Residency
from quire.manifest.store import ManifestStore
from quire.testing.manifest import assert_clean
from tests.manifest.batches import outcome
from tests.manifest.helpers import chunk, commit, register, submit_as_group


def test_a_row_that_exists_is_not_replaced_by_writing_it_twice_in_one_group(manifest: ManifestStore) -> None:
    """Hazard: an optimistic insert whose key was put again in the same group escaped the check at flush."""
    commit(manifest, register(1), chunk(1))
    other = PutChunk(1, 1, 1, ChunkRecord(Residency.LOCAL, 99, 99))
    update = UpdateArtifact(1, ArtifactKind.BASE, 1, 1, verified_at_ms=5)
    assert isinstance(outcome(manifest.submit([other, update])), AlreadyExists)


def test_a_failing_batch_does_not_move_the_cursors_registered_before_it(manifest: ManifestStore) -> None:
    """Hazard: when the valid batches of a group were applied again, they saw the head of the feed after all of them."""
    commit(manifest, register(1))
    cursor, invalid = RegisterCursor(1, 2**40, "c"), RecordMetric(1, 1, [])
    guards = submit_as_group(manifest, [[cursor], [chunk(1)], [chunk(2)], [invalid]])
    assert [isinstance(outcome(guard), Exception) for guard in guards] == [False, False, False, True]
    assert manifest.feed.cursor("c").acked_sequence == 1


@pytest.mark.parametrize(
    "wrong",
    [
        {"size_bytes": "oops"},
        {"size_bytes": True},
        {"suffix": 123},
        {"sha256": "abc"},
        {"purge_after_ms": -5},
        {"residency": 99},
        {"record": DeltaRecord(1, Residency.LOCAL, 1, 1)},
        {"chunk_id": True},
    ],
    ids=str,
)
def test_a_field_with_a_wrong_type_is_rejected_in_a_group_too(path: str, wrong: dict[str, Any]) -> None:
    """Hazard: a group was committed with a record that could not be decoded, and the store could not be opened again."""
    fields = wrong if wrong.keys() <= set(PutChunk.__struct_fields__) else {}
    record = ChunkRecord(Residency.LOCAL, 1, 1) if fields else replace(ChunkRecord(Residency.LOCAL, 1, 1), **wrong)
    with ManifestStore.open(path) as manifest:
        commit(manifest, register(1))
        invalid = replace(PutChunk(1, 1, 1, record), **fields)
        guards = submit_as_group(manifest, [[invalid], [chunk(2)], [chunk(3)]])
        assert isinstance(outcome(guards[0]), InvalidInput)
        assert [guard.result().sequence for guard in guards[1:]] == [2, 3]
    ManifestStore.open(path).close()


def test_an_operation_that_is_repeated_in_its_batch_counts_once(manifest: ManifestStore) -> None:
    """Hazard: the second insert of the same object counted as new, and retained the chunk's namespace once more."""
    namespace_id = manifest.put_namespace("s3://bucket", name="elsewhere")
    commit(manifest, register(1))
    put = PutChunk(1, 1, 1, ChunkRecord(Residency.LOCAL, 1, 1, namespace_id=namespace_id))
    commit(manifest, put, put)
    assert_clean(manifest, leaks=True)


def test_a_database_that_is_closed_while_a_batch_is_applied_accepts_no_later_one(
    manifest: ManifestStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hazard: the recount's thread emptied the set of databases known to be writable, to which the writer then added one."""
    commit(manifest, register(1))
    overlay = manifest.writer._overlay
    database = overlay.database

    def look_up_and_close(db_id: int) -> DbRecord:
        record = database(db_id)
        manifest.env.refused = {("database", 1): ("it breaks a rule", "")}
        manifest.writer.watch_refused()
        return record

    with monkeypatch.context() as patch:
        patch.setattr(overlay, "database", look_up_and_close)
        commit(manifest, chunk(1))
    with pytest.raises(ManifestDamaged, match="breaks a rule"):
        commit(manifest, chunk(2))
    manifest.env.refused = {}


def test_an_error_that_is_raised_repeatedly_does_not_accumulate_frames(path: str) -> None:
    manifest = ManifestStore.open(path)
    manifest.close()
    for _ in range(3):
        with pytest.raises(StoreClosed) as caught:
            manifest.submit([register(1)])
    assert len(caught.traceback) < 8
