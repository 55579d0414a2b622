"""Reads a table: single keys, or ranges of rows as Arrow batches.

The file stays open until the last reference to the table is gone, so a reader never uses a descriptor that has been reused for
another file. Every read verifies checksums, and raises if bytes differ from what was written.

Threads: any. Importable on executors. Format page: `docs/formats/sstable.md`.
Raises `Corruption` (also for a file that is missing), `ChecksumMismatch`, `FormatTooNew`, `StorageFault`."""

from __future__ import annotations

import weakref
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import pyarrow as pa

from quire.core.errors import Corruption
from quire.core.limits import MIB
from quire.durable.files import Disk, File
from quire.durable.open_files import open_to_read
from quire.lsm.block_cache import BlockCache, Slots, TableBlock, VersionedValue
from quire.lsm.bloom import Bloom, hash_key, hash_keys
from quire.lsm.short_scan import RowWindows, span, span_before
from quire.lsm.sst_format import SCHEMA, TableMeta, decode_blocks, read_section
from quire.lsm.sst_writer import key_changes

READ_AHEAD_BYTES = 1 * MIB
"""Adjacent blocks are read with one call, up to this many bytes."""


class SSTable:
    """An open table; made by `SSTable.open`."""

    __slots__ = (
        "__weakref__",
        "_cache",
        "_file",
        "_first_keys",
        "_key_max",
        "_slots",
        "bloom",
        "checksum",
        "meta",
        "path",
        "size_bytes",
    )

    def __init__(
        self, file: File, path: str, meta: TableMeta, bloom: Bloom, checksum: int, cache: BlockCache | None
    ) -> None:
        self.path = path
        self.checksum = checksum
        """Checksum of the section, which contains the checksums of all blocks: it identifies the table's contents."""
        self.meta = meta
        self.bloom = bloom
        self.size_bytes = file.size()
        self._file = file
        self._cache = cache
        self._first_keys = [block.first_key for block in meta.blocks]
        self._key_max = meta.key_max
        self._slots: Slots = [None] * len(meta.blocks)
        """The blocks in memory; written only by the cache."""

    @classmethod
    def open(cls, disk: Disk, path: str, sst_id: int | None = None, cache: BlockCache | None = None) -> SSTable:
        """Open the table at `path`. Raises if its id is not `sst_id`, if one is given."""
        try:
            file = open_to_read(disk, path)
        except FileNotFoundError:
            hint = "restore the database from a backup: `quire kv restore`"
            raise Corruption("a table is missing", hint=hint, path=path, sst_id=sst_id) from None
        try:
            meta, bloom, checksum = read_section(file, path)
            if sst_id is not None and meta.sst_id != sst_id:
                raise Corruption(
                    "the file holds a different table than its name says", path=path, sst_id=sst_id, found=meta.sst_id
                )
            table = cls(file, path, meta, bloom, checksum, cache)
        except BaseException:
            file.close()
            raise
        weakref.finalize(table, file.close)
        return table

    def call_when_unreferenced(self, action: Callable[[], None]) -> None:
        """Call `action` when the last reference to the table is gone."""
        weakref.finalize(self, action).atexit = False

    def close(self) -> None:
        """Close the file. Later reads raise."""
        if self._cache is not None:
            self._cache.forget(self._slots)
        self._file.close()

    # ── one key ───────────────────────────────────────────────────────────────────────────────────────────────────────
    def get(self, key: bytes, lsn: int) -> VersionedValue | None:
        """Return the newest version of a key at or below `lsn`, or `None`."""
        number = bisect_right(self._first_keys, key) - 1
        if number < 0 or key > self._key_max:
            return None
        block = self._slots[number]
        if block is None:
            # Only for blocks not in memory: hashing the key alone takes longer than a bisection.
            if not self.bloom.may_contain(hash_key(key)):
                return None
            block = self.block(number)
        else:
            block.used = True
        return block.find(key, lsn)

    def find_many(self, keys: Sequence[bytes], lsn: int, best: dict[bytes, VersionedValue]) -> None:
        """Put the newest versions of keys at or below `lsn` into `best`, unless it has a newer one."""
        first_keys, slots, key_max, lsn_max = self._first_keys, self._slots, self._key_max, self.meta.lsn_max
        for key in keys:
            former = best.get(key)
            if former is not None and former[0] >= lsn_max:
                continue
            number = bisect_right(first_keys, key) - 1
            if number < 0 or key > key_max:
                continue
            block = slots[number]
            if block is None:
                version = self.get(key, lsn)
            else:
                block.used = True
                version = block.find(key, lsn)
            if version is not None and (former is None or version[0] > former[0]):
                best[key] = version

    def block(self, number: int) -> TableBlock:
        """Return a block, from memory if possible."""
        block = self._slots[number]
        if block is not None:
            block.used = True
            return block
        block = TableBlock(self.batch(number))
        return block if self._cache is None else self._cache.admit(self._slots, number, block)

    # ── short ranges ──────────────────────────────────────────────────────────────────────────────────────────────────
    def window(self, windows: RowWindows, low: bytes, high: bytes | None, rows: int) -> bytes | None:
        """Add the first `rows` rows of [low, high), from one block. Return the edge (short_scan.py)."""
        first_keys = self._first_keys
        number = max(0, bisect_right(first_keys, low) - 1)
        if low > self._key_max or (number == 0 and high is not None and high <= first_keys[0]):
            return None
        while True:
            block = self.block(number)
            start, end, is_more = span(block.keys, low, high, rows)
            if start < end:
                self._add(windows, block, start, end)
            if is_more:
                return block.keys[end]
            number += 1
            if number == len(first_keys) or (high is not None and first_keys[number] >= high):
                return None
            if start < end:
                return first_keys[number]
            # Every key of this block is below `low`: continue with the next block.

    def window_before(self, windows: RowWindows, low: bytes, high: bytes | None, rows: int) -> bytes | None:
        """Add the last `rows` rows of [low, high), from one block. Return the edge.

        No loop is needed: the last block that begins below `high` has a row below `high`."""
        first_keys = self._first_keys
        number = (len(first_keys) if high is None else bisect_left(first_keys, high)) - 1
        if number < 0 or low > self._key_max:
            return None
        block = self.block(number)
        start, end, is_more = span_before(block.keys, low, high, rows)
        if start < end:
            self._add(windows, block, start, end)
        if is_more:
            return block.keys[start]
        return first_keys[number] if number and first_keys[number] > low else None

    def _add(self, windows: RowWindows, block: TableBlock, start: int, end: int) -> None:
        rows = (block.keys[start:end], block.lsns[start:end], block.values[start:end])
        windows.add(*rows, self.meta.lsn_max, block.is_plain)

    # ── ranges ────────────────────────────────────────────────────────────────────────────────────────────────────────
    def block_range(self, low: bytes, high: bytes | None) -> tuple[int, int]:
        """Return the blocks [first, last) that may have keys in [low, high)."""
        first = max(0, bisect_right(self._first_keys, low) - 1)
        last = len(self._first_keys) if high is None else bisect_left(self._first_keys, high)
        if low > self.meta.key_max:
            first = last
        return first, max(first, last)

    def marks(self, low: bytes, high: bytes | None) -> list[tuple[bytes, int]]:
        """Return the first keys of the blocks in a range, each with the block's approximate bytes."""
        first, last = self.block_range(low, high)
        block_bytes = self.meta.raw_bytes // len(self._first_keys) + 1
        return [(key, block_bytes) for key in self._first_keys[first:last]]

    def rows_between(self, low: bytes, high: bytes | None) -> list[pa.RecordBatch]:
        """Return the rows with keys in [low, high), in order."""
        first, last = self.block_range(low, high)
        if first == last:
            return []
        batches = self._read(first, last)  # bypasses the cache: a long scan must not evict the blocks of point reads
        batches[0] = _from(batches[0], low)
        if high is not None:
            batches[-1] = _below(batches[-1], high)
        return [batch for batch in batches if batch.num_rows]

    def batches(self) -> Iterator[pa.RecordBatch]:
        """Yield every block in order, bypassing the cache."""
        for number in range(len(self.meta.blocks)):
            yield self.batch(number)

    def batch(self, number: int) -> pa.RecordBatch:
        """Return a block as it is stored, bypassing the cache."""
        return self._read(number, number + 1)[0]

    def _read(self, first: int, last: int) -> list[pa.RecordBatch]:
        """Read and decode blocks [first, last), adjacent ones with one call."""
        places, batches = self.meta.blocks, list[pa.RecordBatch]()
        while first < last:
            start, end = places[first].offset, first
            while end < last and (end == first or places[end].offset + places[end].size - start <= READ_AHEAD_BYTES):
                end += 1
            size = places[end - 1].offset + places[end - 1].size - start
            data = self._file.read_at(size, start)
            batches += decode_blocks(data, places[first:end], self.meta, self.path)
            first = end
        return batches

    # ── checking ──────────────────────────────────────────────────────────────────────────────────────────────────────
    def verify(self) -> Iterator[str]:
        """Yield each problem of the table as a sentence. Damage to a block raises, as in a read."""
        meta = self.meta
        rows = tombstones = different = 0
        last: tuple[bytes, int] | None = None
        for number, batch in enumerate(self.batches()):
            keys, values, lsns, dead = batch.columns
            if keys[0].as_py() != meta.blocks[number].first_key:
                yield f"block {number} begins with a different key than the index says"
            if last is not None and not last[0] < keys[0].as_py():
                yield f"block {number} does not begin behind the block before it"
            if not _is_sorted(batch):
                yield f"block {number} is not in order"
            if not all(map(self.bloom.may_contain, hash_keys(keys).tolist())):
                yield f"the bloom filter denies a key of block {number}"
            if not values.is_null().equals(dead):
                yield f"block {number} has a tombstone with a value, or a null value without a tombstone"
            numbers = lsns.to_numpy()
            if not meta.lsn_min <= int(numbers.min()) <= int(numbers.max()) <= meta.lsn_max:
                yield f"block {number} has an lsn outside the table's range"
            last = (keys[-1].as_py(), int(numbers[-1]))
            different += 1 + int(np.count_nonzero(key_changes(keys)))  # no key is in two blocks
            rows, tombstones = rows + batch.num_rows, tombstones + dead.true_count
        if (rows, tombstones) != (meta.rows, meta.tombstones):
            yield f"{rows} rows and {tombstones} tombstones, where the index says {meta.rows} and {meta.tombstones}"
        if meta.keys not in (0, different):
            yield f"{different} keys, where the index says {meta.keys}"
        if last is None or (meta.key_min, meta.key_max) != (self._first_keys[0], last[0]):
            yield "the key range is not the one that the index says"
        yield from self._verify_footer()

    def _verify_footer(self) -> Iterator[str]:
        """Yield a problem if other Arrow readers would find different blocks."""
        data = pa.py_buffer(self._file.read_at(self.size_bytes, 0))
        try:
            with pa.ipc.open_file(data) as reader:
                actual = (reader.schema.equals(SCHEMA), reader.num_record_batches)
        except (pa.ArrowException, OSError) as error:
            yield f"Arrow cannot read the file: {error}"
            return
        if actual != (True, len(self.meta.blocks)):
            yield "Arrow's footer lists different batches than the index"


def _from(batch: pa.RecordBatch, low: bytes) -> pa.RecordBatch:
    """Return the rows with keys at or above `low`."""
    return batch.slice(lower_bound(batch.column(0), low)) if low else batch


def _below(batch: pa.RecordBatch, high: bytes) -> pa.RecordBatch:
    """Return the rows with keys below `high`."""
    return batch.slice(0, lower_bound(batch.column(0), high))


def lower_bound(keys: pa.BinaryArray, key: bytes) -> int:
    """Return the first row of sorted keys whose key is not below `key`."""
    return bisect_left(range(len(keys)), key, key=lambda at: keys[at].as_py())


def _is_sorted(batch: pa.RecordBatch) -> bool:
    keys, lsns = batch.column(0), batch.column(2).to_numpy()
    order = pa.compute.array_sort_indices(keys).to_numpy()
    same = ~key_changes(keys)
    falling = lsns[1:] < lsns[:-1]
    return bool((order == np.arange(len(keys))).all() and falling[same].all())
