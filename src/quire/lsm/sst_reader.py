"""Reads a table: one key at a time, or ranges of rows as Arrow batches.

The file stays open while anybody can reach the table, and is closed with the last reference to it: a reader never meets a
descriptor that has become another file. Bytes that are not what was written raise, whoever reads them.

Threads: any. Importable on executors. Format page: `docs/formats/sstable.md`.
Raises `Corruption` (also for a file that is missing), `ChecksumMismatch`, `FormatTooNew`, `StorageFault`."""

from __future__ import annotations

import weakref
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator
from itertools import count, pairwise

import numpy as np
import pyarrow as pa

from quire.core.cache import ByteCache
from quire.core.errors import Corruption
from quire.core.limits import MIB
from quire.durable.files import Disk, File
from quire.durable.open_files import open_to_read
from quire.lsm.bloom import Bloom, hash_keys
from quire.lsm.sst_format import SCHEMA, TableMeta, decode_blocks, read_section
from quire.lsm.sst_writer import key_changes

VersionedValue = tuple[int, bytes | None]

READ_AHEAD_BYTES = 1 * MIB
"""Neighbouring blocks are read together, up to this much."""
CACHED_BLOCKS = 4
"""Ranges of no more blocks go through the cache: a long scan must not drive out what point reads need."""
ROW_OVERHEAD_BYTES = 96
"""What a row costs beyond its bytes, once point reads have made Python objects of its key and place."""


class TableBlock:
    """The rows of a block, and what point reads need of them."""

    __slots__ = ("_keys", "_lsns", "_values", "batch", "charge")

    def __init__(self, batch: pa.RecordBatch) -> None:
        self.batch = batch
        self.charge = batch.nbytes + batch.num_rows * ROW_OVERHEAD_BYTES
        self._keys: list[bytes] | None = None
        self._lsns: memoryview | None = None
        self._values: tuple[memoryview, memoryview, bytes] | None = None

    def find(self, key: bytes, lsn: int) -> VersionedValue | None:
        """The newest version of a key at or below an lsn."""
        keys = self._keys
        if keys is None:
            keys = self._prepare()
        at = bisect_left(keys, key)
        lsns = self._lsns
        assert lsns is not None
        assert self._values is not None
        while at < len(keys) and keys[at] == key:
            if lsns[at] <= lsn:
                offsets, data, tombstones = self._values
                if tombstones[at >> 3] >> (at & 7) & 1:
                    return lsns[at], None
                return lsns[at], bytes(data[offsets[at] : offsets[at + 1]])
            at += 1
        return None

    def _prepare(self) -> list[bytes]:
        keys, values, lsns, tombstones = self.batch.columns
        _, offsets, data = keys.buffers()
        whole = data.to_pybytes() if data is not None else b""
        ends = memoryview(offsets).cast("i")[: len(keys) + 1].tolist()
        key_list = [whole[start:end] for start, end in pairwise(ends)]
        _, offsets, data = values.buffers()
        body = memoryview(data) if data is not None else memoryview(b"")
        self._values = (memoryview(offsets).cast("i"), body.cast("B"), tombstones.buffers()[1].to_pybytes())
        self._lsns = memoryview(lsns.buffers()[1]).cast("Q")
        self._keys = key_list
        return key_list


BlockCache = ByteCache[tuple[int, int], TableBlock]
"""Decoded blocks by (number of an open table, number of the block): the key is never used for other bytes."""
_NUMBERS = count(1)


class SSTable:
    """An open table; made by `SSTable.open`."""

    __slots__ = (
        "__weakref__",
        "_cache",
        "_file",
        "_first_keys",
        "_number",
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
        """Of the section, which has the checksums of all blocks: tables that have the same are the same."""
        self.meta = meta
        self.bloom = bloom
        self.size_bytes = file.size()
        self._file = file
        self._cache = cache
        self._number = next(_NUMBERS)
        self._first_keys = [block.first_key for block in meta.blocks]

    @classmethod
    def open(cls, disk: Disk, path: str, sst_id: int | None = None, cache: BlockCache | None = None) -> SSTable:
        """The table at `path`, which must be number `sst_id` if one is given."""
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

    def on_last(self, action: Callable[[], None]) -> None:
        """Have something done when nobody can reach the table any more."""
        weakref.finalize(self, action).atexit = False

    def close(self) -> None:
        """Close the file now: reads raise from here on."""
        if self._cache is not None:
            for number in range(len(self.meta.blocks)):
                self._cache.forget((self._number, number))
        self._file.close()

    # ── one key ───────────────────────────────────────────────────────────────────────────────────────────────────────
    def get(self, key: bytes, key_hash: int, lsn: int) -> VersionedValue | None:
        """The newest version of a key at or below an lsn."""
        meta = self.meta
        if key < meta.key_min or key > meta.key_max or not self.bloom.may_contain(key_hash):
            return None
        return self.block(bisect_right(self._first_keys, key) - 1).find(key, lsn)

    def block(self, number: int) -> TableBlock:
        """A block, from the cache if it is there."""
        cache = self._cache
        if cache is None:
            return TableBlock(self._read(number, number + 1)[0])
        block = cache.get((self._number, number))
        if block is None:
            block = TableBlock(self._read(number, number + 1)[0])
            cache.put((self._number, number), block, block.charge)
        return block

    # ── ranges ────────────────────────────────────────────────────────────────────────────────────────────────────────
    def block_range(self, low: bytes, high: bytes | None) -> tuple[int, int]:
        """The blocks [first, last) that may have keys in [low, high)."""
        first = max(0, bisect_right(self._first_keys, low) - 1)
        last = len(self._first_keys) if high is None else bisect_left(self._first_keys, high)
        if low > self.meta.key_max:
            first = last
        return first, max(first, last)

    def marks(self, low: bytes, high: bytes | None) -> list[tuple[bytes, int]]:
        """The first keys of the blocks in a range, and the bytes of each, roughly."""
        first, last = self.block_range(low, high)
        block_bytes = self.meta.raw_bytes // len(self._first_keys) + 1
        return [(key, block_bytes) for key in self._first_keys[first:last]]

    def rows_between(self, low: bytes, high: bytes | None) -> list[pa.RecordBatch]:
        """The rows with keys in [low, high), in order."""
        first, last = self.block_range(low, high)
        if first == last:
            return []
        if self._cache is not None and last - first <= CACHED_BLOCKS:
            batches = [self.block(number).batch for number in range(first, last)]
        else:
            batches = self._read(first, last)
        batches[0] = _from(batches[0], low)
        if high is not None:
            batches[-1] = _below(batches[-1], high)
        return [batch for batch in batches if batch.num_rows]

    def batches(self) -> Iterator[pa.RecordBatch]:
        """Every block, in order, not kept."""
        for number in range(len(self.meta.blocks)):
            yield self._read(number, number + 1)[0]

    def _read(self, first: int, last: int) -> list[pa.RecordBatch]:
        """Decode blocks [first, last), neighbours in one read."""
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
        """Everything that is wrong with the table, each as a sentence; damage to a block raises as reading it would."""
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
        """Whether other Arrow readers find the same rows."""
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
    """The rows with keys at or above `low`."""
    return batch.slice(lower_bound(batch.column(0), low)) if low else batch


def _below(batch: pa.RecordBatch, high: bytes) -> pa.RecordBatch:
    """The rows with keys below `high`."""
    return batch.slice(0, lower_bound(batch.column(0), high))


def lower_bound(keys: pa.BinaryArray, key: bytes) -> int:
    """The first row whose key is not below `key`, of sorted keys."""
    return bisect_left(range(len(keys)), key, key=lambda at: keys[at].as_py())


def _is_sorted(batch: pa.RecordBatch) -> bool:
    keys, lsns = batch.column(0), batch.column(2).to_numpy()
    order = pa.compute.array_sort_indices(keys).to_numpy()
    same = ~key_changes(keys)
    falling = lsns[1:] < lsns[:-1]
    return bool((order == np.arange(len(keys))).all() and falling[same].all())
