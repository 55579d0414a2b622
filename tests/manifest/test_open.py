"""Arguments of the wrong type or range at the typed door: refused, and the store opens again."""

from __future__ import annotations

from typing import Any

import pytest

from quire.core.errors import InvalidInput, OutOfRange, UnknownDatabase
from quire.core.ids import U32_MAX
from quire.manifest import tables as t
from quire.manifest.ops.artifacts import PutChunk
from quire.manifest.ops.databases import RegisterDb
from quire.manifest.records import ChunkRecord, DbKind, DbRecord, Residency
from quire.manifest.store import ManifestStore
from tests.manifest.batches import outcome
from tests.manifest.checkpoints import checkpoint_apply
from tests.manifest.helpers import does, register


@pytest.mark.parametrize(
    "arguments",
    [
        {"kind": "pages"},
        {"kind": 9},
        {"kind": None},
        {"tags": {"a": 1}},
        {"page_size": "4096"},
        {"page_size": 2**70},
        {"compression": 77},
        {"config_hash": "text"},
    ],
    ids=str,
)
def test_a_field_of_the_wrong_type_is_refused_and_the_store_opens_again(path: str, arguments: dict[str, Any]) -> None:
    """Hazard: records do not look at their fields; a row that cannot be read again shuts the store for good."""
    with ManifestStore.open(path) as manifest, pytest.raises(InvalidInput):
        manifest.register_db("x", **{"kind": DbKind.PAGES, **arguments})
    with ManifestStore.open(path) as manifest:
        assert manifest.register_db("x", DbKind.PAGES) == 1


@pytest.mark.parametrize("status", [7, "ACTIVE", None])
def test_a_status_that_is_none_is_refused(manifest: ManifestStore, status: Any) -> None:
    does(manifest, register(1))
    with pytest.raises(InvalidInput):
        manifest.update_db_status(1, status)


def test_a_raw_operation_with_a_field_of_the_wrong_type_is_refused(path: str) -> None:
    with ManifestStore.open(path) as manifest:
        bad: Any = "pages"
        assert isinstance(outcome(manifest.submit([RegisterDb(1, DbRecord("x", bad, 0))])), InvalidInput)
    ManifestStore.open(path).close()


def test_a_negative_size_is_refused(path: str) -> None:
    with ManifestStore.open(path) as manifest:
        does(manifest, register(1))
        result = outcome(manifest.submit([PutChunk(1, 1, 1, ChunkRecord(Residency.LOCAL, -5, 0))]))
        with manifest.read() as txn:
            txn.to_arrow(t.CHUNK_CATALOG)
    assert isinstance(result, InvalidInput)


@pytest.mark.parametrize("db_id", [0, 77, U32_MAX])
def test_an_unknown_id_is_refused_by_every_typed_method(manifest: ManifestStore, db_id: int) -> None:
    for call in (
        lambda: manifest.rename_db(db_id, "x").result(),
        lambda: manifest.drop_db(db_id).result(),
        lambda: manifest.reserve_generation(db_id),
        lambda: checkpoint_apply(manifest, db_id, 1, [], covered_lsn=1).result(),
    ):
        with pytest.raises(UnknownDatabase):
            call()


@pytest.mark.parametrize("db_id", [-1, U32_MAX + 1])
def test_an_id_outside_u32_is_out_of_range_in_every_typed_method(manifest: ManifestStore, db_id: int) -> None:
    for call in (
        lambda: manifest.rename_db(db_id, "x").result(),
        lambda: manifest.drop_db(db_id).result(),
        lambda: manifest.reserve_generation(db_id),
    ):
        with pytest.raises(OutOfRange):
            call()
