"""Arguments with a wrong type or range are rejected by the typed methods, and the store can be opened again."""

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
from tests.manifest.helpers import commit, register


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
def test_a_field_with_a_wrong_type_is_rejected_and_the_store_opens_again(path: str, arguments: dict[str, Any]) -> None:
    """Hazard: records do not check their fields; a row that cannot be decoded prevents the store from ever opening
    again."""
    with ManifestStore.open(path) as manifest, pytest.raises(InvalidInput):
        manifest.register_db("x", **{"kind": DbKind.PAGES, **arguments})
    with ManifestStore.open(path) as manifest:
        assert manifest.register_db("x", DbKind.PAGES) == 1


@pytest.mark.parametrize("status", [7, "ACTIVE", None])
def test_an_invalid_status_is_rejected(manifest: ManifestStore, status: Any) -> None:
    commit(manifest, register(1))
    with pytest.raises(InvalidInput):
        manifest.update_db_status(1, status)


def test_a_raw_operation_with_a_field_of_a_wrong_type_is_rejected(path: str) -> None:
    with ManifestStore.open(path) as manifest:
        text: Any = "pages"
        assert isinstance(outcome(manifest.submit([RegisterDb(1, DbRecord("x", text, 0))])), InvalidInput)
    ManifestStore.open(path).close()


def test_a_negative_size_is_rejected(path: str) -> None:
    with ManifestStore.open(path) as manifest:
        commit(manifest, register(1))
        result = outcome(manifest.submit([PutChunk(1, 1, 1, ChunkRecord(Residency.LOCAL, -5, 0))]))
        with manifest.read() as txn:
            txn.to_arrow(t.CHUNK_CATALOG)
    assert isinstance(result, InvalidInput)


@pytest.mark.parametrize("db_id", [0, 77, U32_MAX])
def test_an_unknown_id_is_rejected_by_every_typed_method(manifest: ManifestStore, db_id: int) -> None:
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
