"""No input crashes a decoder of the key-value engine, or makes it use more memory than was declared.

Checksums are recomputed after every change: a valid checksum does not prove that the content is valid.
"""

from __future__ import annotations

import json
import struct
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import msgspec
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

import quire
from quire.core.errors import Corruption, QuireError
from quire.core.settings import MaintenanceSettings, StoreSettings
from quire.durable.checksums import crc32, crc64
from quire.lsm import manifest_format as mf
from quire.lsm.backup import back_up, read_backup, restore
from quire.lsm.load_records import LoadRecord
from quire.lsm.sst_format import BLOCK_ROWS_MAX, SCHEMA, BlockPlace, TableMeta, check_message, decode_blocks
from quire.lsm.wal import decode_batch
from quire.objects.api import list_objects
from tests.lsm.crafted import assemble, parts_of, read_every_way
from tests.lsm.kv_helpers import TINY
from tests.lsm.tables import Row, batch_of
from tests.programs import run_program
from tests.rules.tree import ROOT

SMALL_BYTES = 16 << 20
U32 = st.one_of(st.integers(0, 40), st.sampled_from([2**31 - 1, 2**32 - 1, 2**24, 70_000]), st.integers(0, 2**32 - 1))
U64 = st.one_of(st.integers(0, 40), st.sampled_from([2**63, 2**64 - 1, 2**40]), st.integers(0, 2**64 - 1))


@contextmanager
def little_memory() -> Iterator[None]:
    """Raises if Python allocated more than these small inputs can need."""
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < SMALL_BYTES
    finally:
        tracemalloc.stop()


def only_refuses(decode: Callable[[], object]) -> None:
    with little_memory():
        try:
            decode()
        except QuireError:
            pass


# ── tables ────────────────────────────────────────────────────────────────────────────────────────────────────────────
@pytest.mark.parametrize("seed", range(4))
def test_crafted_tables_are_read_or_refused(tmp_path: Path, seed: int) -> None:
    command = ["-m", "tests.lsm.crafted", str(tmp_path), str(seed), "400"]
    result = run_program(command, cwd=ROOT, capture_output=True, timeout=300)
    assert result.returncode == 0, (result.returncode, result.stderr[-2000:])
    assert "'Corruption'" in result.stdout


def test_offsets_beyond_the_data_are_refused(tmp_path: Path) -> None:
    """Valid checksums, invalid Arrow offsets: this ended in SIGSEGV, so the table is read by another process."""
    parts = parts_of(tmp_path, "none")
    block = parts.meta.blocks[0]
    message = parts.blocks[block.offset : block.offset + block.size]
    body = 8 + int.from_bytes(message[4:8], "little")
    for at in range(body, len(message) - 4, 4):  # at every possible position of the offsets
        if struct.unpack_from("<3i", message, at) == (0, 8, 16):
            struct.pack_into("<i", parts.blocks, block.offset + at + 4, 0x7FFFFFF0)
            break
    else:
        raise AssertionError("no offsets of keys of eight bytes")
    assemble(parts, tmp_path / "000001.sst")
    program = "import sys, pathlib, tests.lsm.crafted as c; print(c.read_every_way(pathlib.Path(sys.argv[1])))"
    command = ["-c", program, str(tmp_path / "000001.sst")]
    result = run_program(command, cwd=ROOT, capture_output=True, timeout=60)
    assert (result.returncode, result.stdout.strip()) == (0, "Corruption")


@pytest.mark.parametrize("compression", ["lz4", "zstd"])
def test_a_buffer_that_would_inflate_beyond_its_declared_size_is_refused_before_decompression(
    tmp_path: Path, compression: str
) -> None:
    parts = parts_of(tmp_path, compression)
    block = parts.meta.blocks[0]
    message = parts.blocks[block.offset : block.offset + block.size]
    body = 8 + int.from_bytes(message[4:8], "little")
    sizes = [at for at in range(body, len(message) - 8, 8) if 0 < struct.unpack_from("<q", message, at)[0] < 4096]
    assert sizes
    for at in sizes:
        was = bytes(parts.blocks)
        struct.pack_into("<q", parts.blocks, block.offset + at, 3 << 30)
        with little_memory():
            assert read_every_way(assemble(parts, tmp_path / "000001.sst")) == "Corruption"
        parts.blocks[:] = was


@pytest.mark.parametrize("hidden", ["after a message", "between blocks", "in a table without compression"])
def test_a_message_that_the_index_does_not_declare_is_not_decoded(hidden: str) -> None:
    """Hazard: Arrow's stream continued with a hidden message, or decompressed one of a table that declares no compression."""
    first, bomb, last = (message_of(row) for row in ((b"a", 1, b"1"), (b"b", 2, bytes(32 << 20)), (b"c", 3, b"3")))
    assert len(bomb) < 64 << 10
    blocks = [first + bomb, last] if hidden == "after a message" else [first, last]
    gap = bomb if hidden == "between blocks" else b""
    compression, raw_bytes = "zstd", 4
    if hidden == "in a table without compression":
        blocks, compression, raw_bytes = [bomb], "none", len(bomb)
    places, offset = list[BlockPlace](), 0
    for block in blocks:
        places.append(BlockPlace(offset, len(block), 1, crc64(block), b""))
        offset += len(block) + len(gap)
    meta = TableMeta(1, 0, len(places), 0, b"a", b"c", 1, 3, raw_bytes, 64, places, compression)
    if gap:
        batches = decode_blocks(gap.join(blocks), places, meta, "table")
        assert [batch.column(0)[0].as_py() for batch in batches] == [b"a", b"c"]
    else:
        with pytest.raises(Corruption, match="cannot be decoded"):
            decode_blocks(b"".join(blocks), places, meta, "table")


def message_of(row: Row) -> bytes:
    """The message of a block with one row."""
    options, sink = pa.ipc.IpcWriteOptions(compression="zstd"), pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, SCHEMA, options=options) as writer:
        writer.write_batch(batch_of([row]))
    end_of_stream = 8
    return bytes(sink.getvalue())[len(SCHEMA.serialize()) : -end_of_stream]


@given(st.binary(max_size=400), st.integers(-5, BLOCK_ROWS_MAX + 2), st.integers(0, 2**40))
def test_any_bytes_are_refused_as_a_message(data: bytes, rows: int, raw_bytes: int) -> None:
    with little_memory(), pytest.raises(ValueError, match=r"\w"):
        check_message(memoryview(data), rows, raw_bytes)


# ── logs and manifests ────────────────────────────────────────────────────────────────────────────────────────────────
@given(U64, U32, st.lists(U32, max_size=12), st.binary(max_size=60))
def test_batches_of_a_log_are_read_or_refused(lsn: int, count: int, sizes: list[int], data: bytes) -> None:
    record = struct.pack(f"<QI{len(sizes)}I", lsn, count, *sizes) + data
    only_refuses(lambda: decode_batch(record, "x", 0))


@given(st.integers(0, 12), U32, U32, st.binary(max_size=60))
def test_events_of_a_manifest_are_read_or_refused(tag: int, first: int, second: int, data: bytes) -> None:
    for record in (
        struct.pack("<BII", tag, first, second) + data,
        struct.pack("<BQH", tag, first, second & 0xFFFF) + data,
        data,
    ):
        only_refuses(partial(mf.decode_event, record))


@given(st.tuples(U64, U64, U64, U64), U32, U32, st.binary(max_size=80), st.integers(0, 3))
def test_snapshots_of_a_manifest_are_read_or_refused(
    numbers: tuple[int, int, int, int], frozen: int, tables: int, data: bytes, version: int
) -> None:
    head = mf.SNAPSHOT.pack(mf.SNAPSHOT_MAGIC, version, 0, 0, 1, 2, 3)
    zeroed = head + mf.DATA.pack(*numbers, frozen, tables) + data
    at = mf.CHECKSUM_OFFSET
    file = zeroed[:at] + crc32(zeroed).to_bytes(4, "little") + zeroed[at + 4 :]
    only_refuses(lambda: mf.decode_snapshot(file))


@given(
    st.dictionaries(
        st.sampled_from(["number", "at_ms", "rows", "ids", "done"]), st.integers() | st.text() | st.lists(U64)
    )
)
def test_records_of_loads_are_read_or_refused(fields: dict[str, object]) -> None:
    try:
        msgspec.json.decode(msgspec.json.encode(fields), type=LoadRecord)
    except msgspec.MsgspecError:
        pass


# ── backups ───────────────────────────────────────────────────────────────────────────────────────────────────────────
def list_of(*tables: tuple[int, int], lsn: int = 1, next_sst_id: int = 9) -> bytes:
    rows = [{"sst_id": sst_id, "key": "k", "size_bytes": size, "sha256": ""} for sst_id, size in tables]
    return json.dumps(
        {"label": "cart", "lsn": lsn, "created_at_ms": 0, "next_sst_id": next_sst_id, "tables": rows}
    ).encode()


LISTS = [
    b"",
    b"[]",
    b"{",
    list_of(lsn=-1),
    list_of((5, 1), next_sst_id=1),
    list_of((5, 99_999_999_999)),
    list_of((5, 1), (5, 1)),
    list_of((-5, 1)),
    list_of((5, 1)),
]


@pytest.mark.parametrize("content", LISTS)
def test_crafted_lists_of_backups_are_refused(tmp_path: Path, content: bytes) -> None:
    settings = StoreSettings(lsm=TINY, maintenance=MaintenanceSettings(enabled=False))
    with quire.open(tmp_path / "store", settings=settings) as store:
        store.kv("cart", create=True).put(b"a", b"1")
        backup = back_up(store.kv("cart"), store.objects, "cart")
        key = next(info.key for info in list_objects(store.objects) if info.key.endswith(".json"))
        store.objects.put(key, content)
        store.objects.put("k", b"?")
        with pytest.raises(Corruption):
            restore(store.objects, read_backup(store.objects, "cart", backup.lsn), store._disk, str(tmp_path / "again"))
