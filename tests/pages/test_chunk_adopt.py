"""A create-only put adopts an existing chunk if it is the same artifact of the same plan, whatever its bytes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import msgspec
import pytest

from quire.core.errors import AlreadyExists, Corruption
from quire.objects.api import ExistingObject, ObjectStore
from quire.objects.open import open_store
from quire.pages.chunk_reader import ChunkReader, identity_of, same_artifact
from quire.pages.chunk_verify import describe
from tests.pages.chunks import identity, some_pages, write_chunk

PAGES = some_pages(4096, range(0, 200, 3), seed=8)
WANTED = identity(4096, plan_digest=b"p" * 32)
KEY = WANTED.name


@pytest.fixture(params=["path", "memory"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[ObjectStore]:
    store = open_store(
        str(tmp_path / "objects") if request.param == "path" else f"memory://{request.node.originalname}"
    )
    yield store
    store.close()


def test_two_runs_that_compress_differently_are_one_artifact(store: ObjectStore) -> None:
    first, first_info = write_chunk(PAGES, WANTED, level=1)
    second, second_info = write_chunk(PAGES, WANTED, level=9)
    assert first != second
    assert not store.put(KEY, first, create_only=True, identity=same_artifact(WANTED)).adopted
    result = store.put(KEY, second, create_only=True, identity=same_artifact(WANTED))
    assert result.adopted
    assert result.size_bytes == first_info.size_bytes != second_info.size_bytes
    # The row of an adopted object must describe its bytes, not ours.
    assert describe(partial(store.get_range, KEY), result.size_bytes) == first_info
    reader = ChunkReader(partial(store.get_range, KEY), result.size_bytes, expect=WANTED.key)
    assert dict(reader.iter_pages()) == PAGES


def test_another_plan_under_the_name_is_not_adopted_and_not_overwritten(store: ObjectStore) -> None:
    other, _ = write_chunk(PAGES, replace(WANTED, plan_digest=b"o" * 32))
    store.put(KEY, other, create_only=True)
    ours, _ = write_chunk(PAGES, WANTED)
    with pytest.raises(AlreadyExists):
        store.put(KEY, ours, create_only=True, identity=same_artifact(WANTED))
    assert store.get(KEY) == other


def test_identity_is_read_from_the_object(store: ObjectStore) -> None:
    data, _ = write_chunk(PAGES, WANTED)
    store.put(KEY, data)
    existing = ExistingObject(store, store.head(KEY))
    assert identity_of(existing) == WANTED
    assert same_artifact(WANTED)(existing)
    assert not same_artifact(replace(WANTED, key=msgspec.structs.replace(WANTED.key, generation=2)))(existing)


def test_one_plan_with_two_outcomes_is_reported(store: ObjectStore) -> None:
    data, _ = write_chunk(PAGES, WANTED)
    store.put(KEY, data)
    with pytest.raises(Corruption):
        same_artifact(replace(WANTED, covered_lsn=101))(ExistingObject(store, store.head(KEY)))


def test_damaged_or_foreign_objects_are_not_adopted(store: ObjectStore) -> None:
    data, _ = write_chunk(PAGES, WANTED)
    for foreign in (b"hello", data[:-1], data[:-20] + bytes(20)):
        store.put(KEY, foreign)
        with pytest.raises(Corruption) as raised:
            store.put(KEY, data, create_only=True, identity=same_artifact(WANTED))
        assert raised.value.where["object"] == KEY
        assert store.get(KEY) == foreign
