"""manifest tables, dump."""

from __future__ import annotations

from pathlib import Path

import pytest

import quire
from quire.cli.output import STEP_ROWS
from quire.manifest import tables as t
from quire.manifest.ops.base import Op
from quire.manifest.ops.local import RecordMetric
from quire.manifest.records import ChunkRecord, DeltaRecord, LeafRecord, Residency
from tests.cli.conftest import Damage, Run
from tests.manifest.checkpoints import DeltaChunk, FullChunk, WalChunkUpdate, append_wal_chunk, checkpoint_apply


def test_tables_lists_every_table(run: Run) -> None:
    data = run("manifest", "tables", "--json").data
    assert {row["table"]: row["rows"] for row in data}["db"] == 2
    assert [row["table"] for row in data] == list(t.TABLES)
    assert {row["policy"] for row in data} == {"logged", "local", "derived"}


def test_dump_decodes_rows(run: Run) -> None:
    (row,) = run("manifest", "dump", "db", "--limit", "1", "--json").data
    assert (row["db_id"], row["record"]["name"], row["record"]["kind"]) == (1, "shop", "pages")
    assert "db_id=1  name=shop kind=pages" in run("manifest", "dump", "db").out
    assert run("manifest", "dump", "metrics").out == "metrics is empty\n"


@pytest.mark.parametrize("name", list(t.TABLES))
def test_every_table_dumps(run: Run, name: str) -> None:
    assert run("manifest", "dump", name, "--json").code == 0
    assert run("manifest", "dump", name).code == 0


def test_dump_of_an_unknown_table_lists_the_tables(run: Run) -> None:
    result = run("manifest", "dump", "nonsense")
    assert result.code == 2
    assert "`quire manifest tables` describes them" in result.err
    assert "chunk_catalog" in result.err


@pytest.mark.parametrize("limit", [0, 1, STEP_ROWS, STEP_ROWS + 1, 10 * STEP_ROWS])
def test_dump_continues_where_the_last_page_ended(run: Run, path: Path, limit: int) -> None:
    rows = 2 * STEP_ROWS + 5
    with quire.open(path) as store:
        ops: list[Op] = [RecordMetric(number, 1, [1.0]) for number in range(rows)]
        store.manifest.submit(ops).result()
    data = run("manifest", "dump", "metrics", "--limit", str(limit), "--json").data
    assert [row["scope"] for row in data] == list(range(min(limit or rows, rows)))


def test_slot_leaves_are_shown_as_chains(run: Run, path: Path) -> None:
    with quire.open(path) as store:
        manifest, shop = store.manifest, store.database("shop").db_id
        first, second = (manifest.reserve_generation(shop) for _ in range(2))
        chunk = ChunkRecord(Residency.LOCAL, 8192, 0)
        sealed = WalChunkUpdate(segment_id=1, first_lsn=1, last_lsn=9, used_bytes=4096)
        append_wal_chunk(manifest, shop, sealed).result()
        slots = [FullChunk(slot=slot, record=chunk) for slot in (256, 257, 258, 300)]
        checkpoint_apply(manifest, shop, first, slots, covered_lsn=5).result()
        delta = DeltaChunk(slot=257, delta_id=3, record=DeltaRecord(first, Residency.LOCAL, 100, 0))
        checkpoint_apply(manifest, shop, second, [delta], covered_lsn=9).result()
    text = run("manifest", "dump", "slot_leaf").out
    base = f"base:{first}@5"
    assert f"256 {base}; 257 {base} + delta-3:{second}@9; 258 {base}; 300 {base}" in text
    (row,) = run("manifest", "dump", "slot_leaf", "--json").data
    assert [link["kind"] for link in row["chains"]["257"]] == ["base", "delta"]
    assert set(row["chains"]) == {"256", "257", "258", "300"}
    assert row["record"]["entries"], "the other rows are unchanged"


def test_an_undecodable_leaf_is_shown_raw(run: Run, damage: Damage) -> None:
    damage((t.SLOT_LEAF, (1, 0, 1), t.SLOT_LEAF.codec.encode(LeafRecord(b"\x07"))))
    result = run("manifest", "dump", "slot_leaf")
    assert (result.code, "entries=07" in result.out) == (0, True)
