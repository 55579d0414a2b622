"""Writes a table from sorted Arrow batches. Needs neither manifest nor engine, so it also runs on executors.

The order between batches is checked here; the caller guarantees the order of rows within a batch, and `verify` checks it. The
file is built in memory, then written, synced and durably named before `write` returns; a manifest may name it from then on.

Threads: one for each writer. Format page: `docs/formats/sstable.md`.
Raises `InternalError` (rows out of order), and the disk's errors; a file that was not written completely is removed."""

from __future__ import annotations

import io
import os
from contextlib import closing, suppress
from functools import cache
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from quire.core.errors import InternalError, OutOfRange, StorageFault
from quire.durable.checksums import crc64
from quire.durable.failpoints import hit
from quire.durable.files import Disk
from quire.durable.names import TEMPORARY
from quire.lsm.bloom import build_bloom, hash_keys
from quire.lsm.sst_format import (
    ARROW_END,
    ARROW_END_BYTES,
    BLOCK_ROWS_MAX,
    END_OF_STREAM_BYTES,
    SCHEMA,
    BlockPlace,
    TableMeta,
    encode_section,
)
from quire.lsm.table_options import TableOptions

WRITE_BYTES = 4 << 20
"""Pieces are joined to about this many bytes for one write."""


class TableWriter:
    """Writes one table: `add` sorted batches, then `write`."""

    def __init__(self, sst_id: int, level: int = 0, options: TableOptions | None = None) -> None:
        self._options = options or TableOptions()
        self._sst_id = sst_id
        self._level = level
        self._sink = _Sink()
        codec = None if self._options.compression == "none" else self._options.compression
        # Blocks are small: waking other threads costs more than compressing their buffers.
        options = pa.ipc.IpcWriteOptions(compression=codec, use_threads=False)
        self._arrow = pa.ipc.new_file(self._sink, SCHEMA, options=options)
        self._blocks: list[BlockPlace] = []
        self._hashes: list[NDArray[np.uint64]] = []
        self._pending: pa.RecordBatch | None = None
        """Rows that do not yet fill a block."""
        self._key_min = self._key_max = b""
        self._last_lsn = 0
        self._lsns: tuple[int, int] = (1 << 64, 0)
        self.rows = 0
        self._keys = 0
        self.tombstones = 0
        self.raw_bytes = 0
        """Bytes of keys and values so far, before compression."""

    def add(self, batch: pa.RecordBatch) -> None:
        """Add rows, all of which must sort after those added before."""
        if not batch.num_rows:
            return
        batch = batch.cast(SCHEMA) if batch.schema != SCHEMA else batch
        self._check_seam(batch)
        keys, values, lsns, tombstones = batch.columns
        self._hashes.append(hash_keys(keys))
        numbers = lsns.to_numpy()
        self._lsns = (min(self._lsns[0], int(numbers.min())), max(self._lsns[1], int(numbers.max())))
        self._keys += int(np.count_nonzero(key_changes(keys)))
        self.rows += batch.num_rows
        self.tombstones += tombstones.true_count
        self.raw_bytes += int(_sizes(keys).sum() + _sizes(values).sum())
        if self._pending is not None:
            batch = pa.concat_batches([self._pending, batch])
        cuts = block_cuts(batch, self._options.block_bytes)
        for start, end in pairwise(cuts):
            self._write_block(batch.slice(start, end - start))
        self._pending = batch.slice(cuts[-1])

    def _check_seam(self, batch: pa.RecordBatch) -> None:
        first, lsn = batch.column(0)[0].as_py(), batch.column(2)[0].as_py()
        if not self.rows or first != self._key_max:
            self._keys += 1
        if not self.rows:
            self._key_min = first
        elif not (first > self._key_max or (first == self._key_max and lsn < self._last_lsn)):
            raise InternalError("rows of a table are out of order", sst_id=self._sst_id, key=first[:40])
        self._key_max, self._last_lsn = batch.column(0)[-1].as_py(), batch.column(2)[-1].as_py()

    def _write_block(self, batch: pa.RecordBatch) -> None:
        if not batch.num_rows:
            return
        if batch.num_rows > BLOCK_ROWS_MAX:
            raise OutOfRange("a key has too many versions for a block", rows=batch.num_rows, max=BLOCK_ROWS_MAX)
        offset = self._sink.begin()
        self._arrow.write_batch(batch)
        if not offset:  # Arrow writes its header together with the first batch
            offset = _head_bytes()
            self._sink.crc = crc64(b"".join(self._sink.pieces)[offset:])
        first = batch.column(0)[0].as_py()
        self._blocks.append(BlockPlace(offset, self._sink.size - offset, batch.num_rows, self._sink.crc, first))

    def finish(self) -> tuple[list[bytes], TableMeta]:
        """Return the bytes of the file, in pieces, and its metadata."""
        if not self.rows:
            raise InternalError("a table must have rows", sst_id=self._sst_id)
        if self._pending is not None:
            self._write_block(self._pending)
            self._pending = None
        bloom = build_bloom(np.concatenate(self._hashes), self._options.bloom_bits_per_key)
        meta = TableMeta(
            sst_id=self._sst_id,
            level=self._level,
            rows=self.rows,
            tombstones=self.tombstones,
            key_min=self._key_min,
            key_max=self._key_max,
            lsn_min=self._lsns[0],
            lsn_max=self._lsns[1],
            raw_bytes=self.raw_bytes,
            bloom_bits=bloom.bits,
            blocks=self._blocks,
            compression=self._options.compression,
            keys=self._keys,
        )
        # Before `close`, which writes Arrow's end: a reader finds the section by counting back from there.
        self._sink.write(encode_section(meta, bloom, self._sink.size))
        self._arrow.close()
        return self._sink.pieces, meta

    def write(self, disk: Disk, path: str, stage: str = TEMPORARY) -> TableMeta:
        """Finish the table and write it to `path`. Durable on return.

        The file is written under `path + stage` and renamed: under its own name it is always complete, because a base of the
        archive may read it at any moment. Work that may run twice concurrently needs a `stage` of its own.
        """
        pieces, meta = self.finish()
        hit("lsm.sst.built")
        try:
            with closing(disk.open(path + stage, create=True)) as file:
                file.truncate(0)
                offset = 0
                for piece in _joined(pieces):
                    file.write_at(piece, offset)
                    offset += len(piece)
                hit("lsm.sst.written")
                file.sync()
            hit("lsm.sst.synced")
            disk.rename(path + stage, path)
            disk.sync_dir(os.path.dirname(path))
        except Exception:
            with suppress(StorageFault, FileNotFoundError):
                disk.remove(path + stage)
            raise
        hit("lsm.sst.named")
        return meta


class _Sink(io.RawIOBase):
    """The file object that Arrow writes to: collects pieces, their total size, and a checksum that is reset at each block."""

    def __init__(self) -> None:
        self.pieces: list[bytes] = []
        self.size = 0
        self.crc = 0

    def begin(self) -> int:
        self.crc = 0
        return self.size

    def write(self, data: Any) -> int:
        piece = bytes(data)
        self.pieces.append(piece)
        self.crc = crc64(piece, self.crc)
        self.size += len(piece)
        return len(piece)

    def tell(self) -> int:
        return self.size

    def writable(self) -> bool:
        return True


@cache
def _head_bytes() -> int:
    """Return the bytes before the first batch of a file, measured on a file without batches."""
    sink = _Sink()
    pa.ipc.new_file(sink, SCHEMA).close()
    footer_bytes, _ = ARROW_END.unpack(b"".join(sink.pieces)[-ARROW_END_BYTES:])
    return sink.size - int(footer_bytes) - ARROW_END_BYTES - END_OF_STREAM_BYTES


def block_cuts(batch: pa.RecordBatch, block_bytes: int) -> list[int]:
    """Return the rows at which a batch is cut into blocks, between keys. The rows after the last cut do not fill a block.

    >>> keys = [b"a", b"b", b"b", b"c"]
    >>> columns = [keys, [b"x" * 60] * 4, [9, 8, 7, 6], [False] * 4]
    >>> block_cuts(pa.record_batch([pa.array(c, f.type) for c, f in zip(columns, SCHEMA)], schema=SCHEMA), 100)
    [0, 3]
    """
    keys, values = batch.column(0), batch.column(1)
    ends = np.cumsum(_sizes(keys) + _sizes(values) + 17)
    if ends[-1] < block_bytes:
        return [0]
    # The first row of each key: the only rows at which a block may begin.
    begins = np.flatnonzero(np.concatenate(([True], key_changes(keys))))
    full = np.searchsorted(ends, np.arange(block_bytes, int(ends[-1]) + 1, block_bytes), side="left") + 1
    at = np.searchsorted(begins, full, side="left")
    inside = np.unique(begins[at[at < len(begins)]])
    return [0, *inside[inside > 0].tolist()]


def key_changes(keys: pa.BinaryArray) -> NDArray[np.bool_]:
    """Return for each row except the first whether its key differs from that of the row before."""
    count = len(keys)
    if count < 2:
        return np.zeros(0, np.bool_)
    changed: NDArray[np.bool_] = pc.not_equal(keys.slice(1), keys.slice(0, count - 1)).to_numpy(zero_copy_only=False)
    return changed


def _sizes(column: pa.BinaryArray) -> NDArray[np.int64]:
    """Return the bytes of each value; a null has none."""
    offsets = np.frombuffer(column.buffers()[1], np.int32)[column.offset : column.offset + len(column) + 1]
    return np.diff(offsets).astype(np.int64)


def _joined(pieces: list[bytes]) -> list[bytes]:
    """Join pieces into fewer, larger ones."""
    joined: list[bytes] = []
    group: list[bytes] = []
    size = 0
    for piece in pieces:
        group.append(piece)
        size += len(piece)
        if size >= WRITE_BYTES:
            joined.append(b"".join(group))
            group, size = [], 0
    return [*joined, b"".join(group)] if group else joined
