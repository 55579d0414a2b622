"""`quire.changes` in batch mode: ranges of the feed, complete or an error."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from quire.core.errors import CursorLost
from quire.core.timeline import Gap
from quire.manifest.change import change_from_json
from quire.spark.access import access_of
from quire.spark.sources import changes
from quire.spark.sources.base import arrow_schema
from quire.spark.sources.changes import SCHEMA, ChangeRange, read_changes, split
from tests.service.owners import reserve
from tests.spark.served_store import ServedStore, serve_store

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@pytest.fixture(scope="module")
def owner(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedStore]:
    with serve_store(spark, tmp_path_factory.mktemp("changes") / "store") as owner:
        owner.store.feed.register(name="keeps")
        owner.run("shop", "CREATE TABLE t(a)", "INSERT INTO t VALUES (1)")
        owner.store.snapshot("shop", "monday")
        for number in range(30):
            owner.store.manifest.submit(reserve(1_000 + number)).result()
        yield owner


def test_every_change_is_read_completely(owner: ServedStore) -> None:
    local = owner.store.feed.fetch("keeps", 10_000).changes
    rows = owner.read("quire.changes").orderBy("sequence").collect()
    assert [row.sequence for row in rows] == [change.sequence for change in local]
    for row, change in zip(rows, local):
        changes_read = {
            "sequence": row.sequence,
            "committed_at_ms": change.committed_at_ms,
            "operations": json.loads(row.operations),
            "generations": row.generations,
            "trace_id": row.trace_id,
        }
        assert change_from_json(changes_read) == change
        assert row.kinds == [type(op).__name__ for op in change.operations]
        assert round(row.committed_at.timestamp() * 1000) == change.committed_at_ms


def test_a_range_includes_both_ends(owner: ServedStore) -> None:
    frame = owner.read("quire.changes", first=3, last=9, partitions=2)
    assert sorted(row.sequence for row in frame.collect()) == list(range(3, 10))


def test_only_the_requested_columns_are_read(owner: ServedStore) -> None:
    frame = owner.read("quire.changes", columns="kinds, sequence", last=2)
    assert frame.columns == ["kinds", "sequence"]
    local = owner.store.feed.fetch("keeps", 2, after=0).changes
    expected = [([type(op).__name__ for op in change.operations], change.sequence) for change in local]
    assert [tuple(row) for row in frame.orderBy("sequence").collect()] == expected
    with pytest.raises(Exception, match="no such column"):
        owner.read("quire.changes", columns="nope").collect()


def test_no_part_of_a_range_spans_a_takeover(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(changes, "PARTITION_CHANGES_MIN", 1)
    gaps = (Gap(9, 2 << 40),)
    parts = split(ChangeRange(5, (2 << 40) + 9), 3, gaps)
    assert len(parts) <= 4
    read = [number for part in parts for number in range(part.first, part.last + 1)]
    assert read == [*range(5, 10), *range(2 << 40, (2 << 40) + 10)]


def test_the_parts_of_a_range_cover_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(changes, "PARTITION_CHANGES_MIN", 1)
    assert split(ChangeRange(5, 4), 3) == []
    for last in range(5, 30):
        parts = split(ChangeRange(5, last), 4)
        assert len(parts) <= 4
        assert [number for part in parts for number in range(part.first, part.last + 1)] == list(range(5, last + 1))


def test_trimmed_changes_are_an_error_and_not_a_gap(spark: SparkSession, tmp_path: Path) -> None:
    with serve_store(spark, tmp_path / "store") as owner:
        owner.store.feed.register(name="one")
        for number in range(20):
            owner.store.manifest.submit(reserve(1_000 + number)).result()
        owner.store.feed.acknowledge("one", 10)
        with pytest.raises(Exception, match=r"CursorLost.*no longer kept"):
            owner.read("quire.changes", first=1).collect()
        access = access_of(owner.options)
        with pytest.raises(CursorLost):  # trimmed between planning and reading
            list(read_changes(access, ChangeRange(1, 20), arrow_schema(SCHEMA)))
        with pytest.raises(Exception, match="has not reached this sequence"):
            owner.read("quire.changes", last=10_000).collect()


@pytest.mark.parametrize("name", ["cursor", "start", "max_changes"])
def test_streaming_options_are_refused(owner: ServedStore, name: str) -> None:
    with pytest.raises(Exception, match="is for streams"):
        owner.read("quire.changes", **{name: "1"}).collect()


def test_another_schema_is_refused(owner: ServedStore) -> None:
    frame = owner.spark.read.format("quire.changes").options(**owner.options).schema("a int").load()
    with pytest.raises(Exception, match=r"the schema of quire\.changes is fixed"):
        frame.collect()
