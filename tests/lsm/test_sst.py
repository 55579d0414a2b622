"""Tables: rows are read by key and by range; altered bytes are an error; Arrow can read the files."""

from __future__ import annotations

import gc
import os
import re
import tempfile
from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.core.errors import ChecksumMismatch, Corruption, FormatTooNew, InternalError, StorageFault
from quire.core.limits import MIB
from quire.durable.failpoints import armed
from quire.durable.files import OsDisk
from quire.durable.names import TEMPORARY
from quire.lsm import sst_format as fmt
from quire.lsm.block_cache import BlockCache
from quire.lsm.sst_reader import SSTable
from quire.lsm.sst_writer import TableWriter
from quire.lsm.table_options import TableOptions
from quire.testing.faults import Fault, each_fault
from tests.lsm.tables import KEYS, ROWS, SMALL, Row, batch_of, in_order, make_table, newest, rows_of
from tests.rules.tree import ROOT

PAGE = (ROOT / "docs" / "formats" / "sstable.md").read_text("utf-8")


def numbered(count: int) -> list[Row]:
    return [(b"key-%05d" % n, n + 1, None if n % 7 == 3 else b"value %d " % n * 3) for n in range(count)]


@given(ROWS, st.integers(1, 5), st.sampled_from(["lz4", "zstd", "none"]), st.booleans())
def test_rows_round_trip(rows: list[Row], pieces: int, compression: str, cached: bool) -> None:
    options = TableOptions(block_bytes=128, compression=compression)
    cache: BlockCache | None = BlockCache(20_000) if cached else None
    with tempfile.TemporaryDirectory() as directory:
        table = make_table(directory, rows, options=options, pieces=pieces, cache=cache)
        assert rows_of(table.batches()) == rows
        assert list(table.verify()) == []
        meta = table.meta
        assert (meta.rows, meta.tombstones) == (len(rows), sum(value is None for _, _, value in rows))
        assert (meta.key_min, meta.key_max) == (rows[0][0], rows[-1][0])
        assert (meta.lsn_min, meta.lsn_max) == (min(r[1] for r in rows), max(r[1] for r in rows))
        for key, lsn, _ in rows:
            for at in (lsn, lsn - 1, 2**64 - 1):
                if at >= 0:
                    assert table.get(key, at) == newest(rows, key, at)
        table.close()


@given(ROWS, KEYS, st.one_of(st.none(), KEYS))
def test_a_range_has_exactly_its_rows(rows: list[Row], low: bytes, high: bytes | None) -> None:
    with tempfile.TemporaryDirectory() as directory:
        for cache in (None, BlockCache(64 * MIB)):
            table = make_table(directory, rows, options=TableOptions(block_bytes=64), cache=cache)
            expected = [row for row in rows if low <= row[0] and (high is None or row[0] < high)]
            assert rows_of(table.rows_between(low, high)) == expected
            table.close()


@given(ROWS, KEYS)
def test_a_key_that_is_not_there_is_not_found(rows: list[Row], key: bytes) -> None:
    with tempfile.TemporaryDirectory() as directory:
        table = make_table(directory, rows)
        assert table.get(key, 2**64 - 1) == newest(rows, key, 2**64 - 1)
        table.close()


def test_no_key_spans_two_blocks(tmp_path: Path) -> None:
    rows = in_order((b"k%d" % (n // 40), n, b"v" * 30) for n in range(400))
    table = make_table(tmp_path, rows, pieces=13)
    assert len(table.meta.blocks) == 10
    keys_of_blocks = [{key for key, _, _ in rows_of([batch])} for batch in table.batches()]
    assert all(not a & b for a, b in zip(keys_of_blocks, keys_of_blocks[1:]))  # noqa: RUF007
    assert list(table.verify()) == []


def test_arrow_reads_the_file_as_its_own(tmp_path: Path) -> None:
    rows = numbered(300)
    table = make_table(tmp_path, rows)
    with pa.ipc.open_file(table.path) as reader:
        assert reader.schema == fmt.SCHEMA
        assert rows_of(reader.get_batch(n) for n in range(reader.num_record_batches)) == rows
    assert pa.ipc.open_file(pa.memory_map(table.path)).read_all().num_rows == 300


def test_rows_out_of_order_are_refused() -> None:
    writer = TableWriter(1)
    writer.add(batch_of([(b"b", 5, b"")]))
    for row in ((b"a", 9, b""), (b"b", 5, b""), (b"b", 6, b"")):
        with pytest.raises(InternalError, match="out of order"):
            writer.add(batch_of([row]))
    with pytest.raises(InternalError, match="must have rows"):
        TableWriter(1).finish()


# ── damage ────────────────────────────────────────────────────────────────────────────────────────────────────────────
def everything(path: str) -> list[Row]:
    table = SSTable.open(OsDisk(), path, 1)
    rows = rows_of(table.batches())
    table.close()
    return rows


def test_a_table_cut_anywhere_is_an_error(tmp_path: Path) -> None:
    path = make_table(tmp_path, numbered(60)).path
    original = Path(path).read_bytes()
    for size in range(0, len(original), 7):
        Path(path).write_bytes(original[:size])
        with pytest.raises(Corruption):
            everything(path)


def test_an_altered_byte_never_gives_other_rows(tmp_path: Path) -> None:
    """A reader gets the rows that were written, or an error; never other rows."""
    rows = numbered(60)
    path = make_table(tmp_path, rows).path
    original = Path(path).read_bytes()
    unnoticed = 0
    for position in range(0, len(original), 19):
        damaged = bytearray(original)
        damaged[position] ^= 0x10
        Path(path).write_bytes(damaged)
        try:
            assert everything(path) == rows
            unnoticed += 1
        except Corruption:
            pass
    # Not read here: Arrow's first bytes and its footer, which `verify` checks.
    assert unnoticed < len(original) / 19 / 2


def test_a_missing_and_a_swapped_table_are_reported(tmp_path: Path) -> None:
    path = make_table(tmp_path, numbered(5), sst_id=2).path
    with pytest.raises(Corruption, match="a different table than its name says"):
        SSTable.open(OsDisk(), path, 3)
    os.remove(path)
    with pytest.raises(Corruption, match="missing") as caught:
        SSTable.open(OsDisk(), path, 2)
    assert caught.value.where["sst_id"] == 2


def test_a_damaged_block_names_file_and_offset(tmp_path: Path) -> None:
    table = make_table(tmp_path, numbered(100))
    block = table.meta.blocks[1]
    data = bytearray(Path(table.path).read_bytes())
    data[block.offset + block.size // 2] ^= 1
    Path(table.path).write_bytes(data)
    with pytest.raises(ChecksumMismatch) as caught:
        list(table.verify())
    assert (caught.value.where["path"], caught.value.where["offset"]) == (table.path, block.offset)


def test_a_newer_table_is_reported_as_a_newer_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fmt, "VERSION", 2)
    path = f"{tmp_path}/1.sst"
    writer = TableWriter(1)
    writer.add(batch_of(numbered(3)))
    writer.write(OsDisk(), path)
    monkeypatch.undo()
    with pytest.raises(FormatTooNew):
        SSTable.open(OsDisk(), path)


@pytest.mark.parametrize("fault", [Fault.ENOSPC, Fault.EIO, Fault.SHORT_WRITE])
def test_a_table_that_cannot_be_written_leaves_no_file(tmp_path: Path, fault: Fault) -> None:
    for disk in each_fault(OsDisk, fault, path="*.sst*"):
        writer = TableWriter(1, options=SMALL)
        writer.add(batch_of(numbered(50)))
        path = f"{tmp_path}/1.sst"
        try:
            writer.write(disk, path)
        except StorageFault:
            assert not os.path.exists(path)
            assert disk.fired
        else:
            os.remove(path)


# ── cache and files ───────────────────────────────────────────────────────────────────────────────────────────────────
def test_a_table_has_its_name_only_when_it_is_complete(tmp_path: Path) -> None:
    """Hazard: a base of the archive that was read meanwhile uploaded the unfinished file under the name of the table."""
    path = tmp_path / "1.sst"
    seen: list[list[str]] = []
    with armed("lsm.sst.written", lambda _: seen.append([entry.name for entry in tmp_path.iterdir()])):
        writer = TableWriter(1, options=SMALL)
        writer.add(batch_of(numbered(100)))
        writer.write(OsDisk(), str(path))
    assert seen == [[f"1.sst{TEMPORARY}"]]
    assert [entry.name for entry in tmp_path.iterdir()] == ["1.sst"]


def test_the_cache_stays_within_its_limit(tmp_path: Path) -> None:
    cache: BlockCache = BlockCache(30_000)
    table = make_table(tmp_path, numbered(2000), cache=cache)
    for key, _, _ in numbered(2000):
        table.get(key, 2**64 - 1)
        assert cache.used_bytes <= 30_000
    assert 0 < len(cache) < len(table.meta.blocks)
    assert cache.admitted == len(table.meta.blocks)
    table.close()
    assert (len(cache), cache.used_bytes) == (0, 0)


def test_ranges_of_batches_bypass_the_cache(tmp_path: Path) -> None:
    cache: BlockCache = BlockCache(64 * MIB)
    table = make_table(tmp_path, numbered(500), cache=cache)
    table.rows_between(b"", None)
    table.rows_between(b"key-00100", b"key-00104")
    assert len(cache) == 0


def test_the_file_stays_open_while_a_reader_needs_it(tmp_path: Path) -> None:
    table = make_table(tmp_path, numbered(50))
    removed = list[str]()
    table.call_when_unreferenced(lambda: removed.append("gone"))
    reader = table.batches()
    next(reader)
    os.remove(table.path)
    del table
    gc.collect()
    assert not removed
    assert len(list(reader)) > 0
    del reader
    gc.collect()
    assert removed == ["gone"]


# ── the page ──────────────────────────────────────────────────────────────────────────────────────────────────────────
def test_the_page_describes_the_index_and_the_tail() -> None:
    listed = re.findall(r"^\| index \| `(\w+)` \|", PAGE, re.MULTILINE)
    assert tuple(listed) == fmt.TableMeta.__struct_fields__
    listed = re.findall(r"^\| block \| `(\w+)` \|", PAGE, re.MULTILINE)
    assert tuple(listed) == fmt.BlockPlace.__struct_fields__
    sizes = [int(size) for size in re.findall(r"^\| tail \| [^|]+ \| (\d+) \|", PAGE, re.MULTILINE)]
    assert sum(sizes) == fmt.TAIL_BYTES
    assert f"tail: {fmt.TAIL_BYTES} bytes" in PAGE
    columns = re.findall(r"^\| column \| `(\w+)` \| (\w+) \|", PAGE, re.MULTILINE)
    assert columns == [(field.name, str(field.type)) for field in fmt.SCHEMA]
