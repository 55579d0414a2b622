"""Tables with valid checksums and invalid contents, as a hostile or broken program could write them.

As a program, it reads crafted tables with limited memory: `python -m tests.lsm.crafted DIRECTORY SEED COUNT`. The exit
status is
0 if each of them was read or refused; a signal or a `MemoryError` changes it.
"""

from __future__ import annotations

import random
import resource
import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from quire.core.errors import QuireError
from quire.durable.checksums import crc64
from quire.durable.files import OsDisk
from quire.lsm import sst_format as fmt
from quire.lsm.bloom import Bloom
from quire.lsm.sst_reader import SSTable
from quire.lsm.table_options import TableOptions
from tests.lsm.tables import Row, make_table

MEMORY_BYTES = 512 << 20
"""The memory that reading crafted tables of a few KiB may use, in addition to the interpreter's."""

ROWS: list[Row] = [(b"key-%04d" % n, n + 1, None if n % 9 == 4 else b"value %d" % n * 4) for n in range(120)]


class Parts(msgspec.Struct):
    """The parts of a table file."""

    blocks: bytearray
    meta: fmt.TableMeta
    bloom: Bloom
    rest: bytes


def parts_of(path: Path, compression: str) -> Parts:
    table = make_table(path, ROWS, options=TableOptions(block_bytes=512, compression=compression))
    raw = Path(table.path).read_bytes()
    footer_bytes, _ = fmt.ARROW_END.unpack(raw[-fmt.ARROW_END_BYTES :])
    end = len(raw) - fmt.ARROW_END_BYTES - footer_bytes - fmt.END_OF_STREAM_BYTES
    start = int.from_bytes(raw[end - fmt.TAIL_BYTES : end - fmt.TAIL_BYTES + 8], "little")
    parts = Parts(bytearray(raw[:start]), table.meta, table.bloom, raw[end:])
    table.close()
    return parts


def assemble(parts: Parts, path: Path) -> Path:
    """Write a file with these parts and valid checksums."""
    blocks = []
    for block in parts.meta.blocks:
        is_inside = block.offset >= 0 and block.size >= 0 and block.offset + block.size <= len(parts.blocks)
        crc = crc64(parts.blocks[block.offset : block.offset + block.size]) if is_inside else block.crc64
        blocks.append(msgspec.structs.replace(block, crc64=crc))
    meta = msgspec.structs.replace(parts.meta, blocks=blocks)
    path.write_bytes(bytes(parts.blocks) + fmt.encode_section(meta, parts.bloom, len(parts.blocks)) + parts.rest)
    return path


def read_every_way(path: Path) -> str:
    """Open a table and read all of it. Returns the name of the error, or an empty string."""
    try:
        table = SSTable.open(OsDisk(), str(path), 1)
    except QuireError as error:
        return type(error).__name__
    try:
        for key, _, _ in ROWS[::7]:
            table.get(key, 2**64 - 1)
        for batch in table.batches():
            batch.to_pylist()
        table.rows_between(b"key-0003", b"key-0090")
        problems = list(table.verify())
    except QuireError as error:
        return type(error).__name__
    finally:
        table.close()
    return "problems" if problems else ""


NUMBERS = (
    0,
    1,
    2,
    7,
    8,
    63,
    64,
    255,
    2**15,
    2**16,
    2**24 + 1,
    2**31 - 1,
    2**31,
    2**32 - 1,
    2**40,
    2**62,
    2**63 - 1,
    2**63,
)


def crafted(parts: Parts, rng: random.Random) -> Parts:
    """A table with one to three invalid values."""
    blocks, meta, bloom = bytearray(parts.blocks), parts.meta, parts.bloom
    for _ in range(rng.randint(1, 3)):
        kind = rng.randrange(6)
        if kind == 0:  # a number in a message: sizes, offsets, counts, bits
            block = rng.choice(parts.meta.blocks)
            at = block.offset + rng.randrange(block.size - 8)
            layout, number = rng.choice((("<I", 32), ("<Q", 64), ("<B", 8)))
            struct.pack_into(layout, blocks, at, rng.choice(NUMBERS) % (1 << number))
        elif kind == 1:
            block = rng.choice(parts.meta.blocks)
            blocks[block.offset + rng.randrange(block.size)] ^= 1 << rng.randrange(8)
        elif kind == 2:  # a number in the metadata
            field = rng.choice(
                ("sst_id", "level", "rows", "tombstones", "lsn_min", "lsn_max", "raw_bytes", "bloom_bits")
            )
            meta = msgspec.structs.replace(meta, **{field: _number(rng)})
        elif kind == 3:  # a number in the index entry of a block
            field = rng.choice(("offset", "size", "rows"))
            index: list[Any] = list(meta.blocks)
            at = rng.randrange(len(index)) if index else 0
            if index:
                index[at] = msgspec.structs.replace(index[at], **{field: _number(rng)})
            meta = msgspec.structs.replace(meta, blocks=index)
        elif kind == 4:
            data = bloom.data[: rng.choice((0, 1, len(bloom.data) // 2, len(bloom.data)))]
            bloom = Bloom(bloom.bits, rng.choice((0, 1, 7, 64, 2**31)), data)
        else:
            keys = {"key_min": b"", "key_max": b"\xff" * rng.choice((1, 70_000)), "compression": "gzip"}
            name = rng.choice(sorted(keys))
            meta = msgspec.structs.replace(meta, **{name: keys[name], **({"blocks": []} if rng.random() < 0.2 else {})})
    return Parts(blocks, meta, bloom, parts.rest)


def _number(rng: random.Random) -> int:
    return min(rng.choice(NUMBERS), 2**64 - 1) * rng.choice((1, 1, 1, -1)) if rng.random() < 0.8 else 3


def read_crafted_tables(directory: Path, seed: int, count: int) -> Iterator[str]:
    """Read `count` crafted tables, and yield the outcome of each."""
    rng = random.Random(seed)
    kinds = [parts_of(directory, compression) for compression in ("lz4", "zstd", "none")]
    for number in range(count):
        parts = crafted(rng.choice(kinds), rng)
        yield read_every_way(assemble(parts, directory / f"{number % 8}.sst"))


if __name__ == "__main__":
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY_BYTES, used + MEMORY_BYTES))
    outcomes = list(read_crafted_tables(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])))
    print({outcome: outcomes.count(outcome) for outcome in sorted(set(outcomes))})
