"""Which store of a shared bucket is meant: clones do not make the parent ambiguous, and the rest is described."""

from __future__ import annotations

from pathlib import Path

import pytest

import quire
from tests.archive.archived_store import settings


def create(bucket: Path, root: Path) -> str:
    with quire.open(root, settings=settings(bucket)) as store:
        store.kv("cart", create=True).put(b"in", str(root).encode())
        return store.info().store_id


@pytest.fixture
def bucket(tmp_path: Path) -> Path:
    return tmp_path / "bucket"


def test_a_clone_does_not_make_its_parent_ambiguous(tmp_path: Path, bucket: Path) -> None:
    parent = create(bucket, tmp_path / "parent")
    cloned = quire.clone(str(bucket), tmp_path / "copy")
    with quire.open(tmp_path / "copy", settings=settings(bucket)) as store:
        store.kv("cart").put(b"in", b"the clone")  # its own archive is in the same bucket
    assert quire.restore(str(bucket), tmp_path / "restored").store_id == parent
    with quire.Standby(str(bucket), tmp_path / "standby") as standby:
        assert standby.status.store_id == parent
    assert quire.clone(str(bucket), tmp_path / "second").parent_id == parent
    assert quire.restore(str(bucket), tmp_path / "named", store_id=cloned.store_id[:8]).store_id == cloned.store_id


def test_other_stores_are_described(tmp_path: Path, bucket: Path) -> None:
    ids = [create(bucket, tmp_path / name) for name in ("one", "two")]
    clone = quire.clone(str(bucket), tmp_path / "copy", store_id=ids[0]).store_id
    with quire.open(tmp_path / "copy", settings=settings(bucket)):
        pass
    with pytest.raises(quire.InvalidInput, match="several stores share this bucket") as refused:
        quire.restore(str(bucket), tmp_path / "restored")
    described = " ".join(refused.value.where["stores"])
    assert all(store_id in described for store_id in ids)
    assert clone not in described, "a clone is not a candidate"
    assert "last upload 20" in described
    assert "owned on" in described
    with pytest.raises(quire.InvalidInput, match="no store in this bucket has this id") as refused:
        quire.restore(str(bucket), tmp_path / "restored", store_id="zz")
    assert f"a clone of {ids[0]}, created at" in " ".join(refused.value.where["stores"])


def test_a_standby_accepts_the_beginning_of_its_id(tmp_path: Path, bucket: Path) -> None:
    store_id = create(bucket, tmp_path / "parent")
    for _ in range(2):
        with quire.Standby(str(bucket), tmp_path / "standby", store_id=store_id[:6]) as standby:
            assert standby.status.store_id == store_id
    with pytest.raises(quire.InvalidInput, match="follows another store"):
        quire.Standby(str(bucket), tmp_path / "standby", store_id="zz")
