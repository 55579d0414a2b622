"""Tables with right checksums and wrong contents: what a program that is hostile, or broken, could hand in.

Run as a program it reads crafted tables under a limit of memory: `python -m tests.lsm.crafted DIRECTORY SEED COUNT`. It ends
with 0 if every one of them was read or refused; a signal or a `MemoryError` shows in how it ends.
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
from quire.lsm.compaction import TableOptions
from quire.lsm.sst_reader import SSTable
from tests.lsm.tables import Row, make_table

MEMORY_BYTES = 512 << 20
"""What reading crafted tables of a few KiB may take beyond what the interpreter has."""

ROWS: list[Row] = [(b"key-%04d" % n, n + 1, None if n % 9 == 4 else b"value %d" % n * 4) for n in range(120)]


class Parts(msgspec.Struct):
    """A table taken apart."""

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


def put_together(parts: Parts, path: Path) -> Path:
    """A file of the parts, every checksum as it should be."""
    places = []
    for place in parts.meta.blocks:
        inside = place.offset >= 0 and place.size >= 0 and place.offset + place.size <= len(parts.blocks)
        crc = crc64(parts.blocks[place.offset : place.offset + place.size]) if inside else place.crc64
        places.append(msgspec.structs.replace(place, crc64=crc))
    meta = msgspec.structs.replace(parts.meta, blocks=places)
    path.write_bytes(bytes(parts.blocks) + fmt.encode_section(meta, parts.bloom, len(parts.blocks)) + parts.rest)
    return path


def read_every_way(path: Path) -> str:
    """Open a table and read all of it; what it was refused with, else nothing."""
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


def crafted(parts: Parts, chance: random.Random) -> Parts:
    """A table with one to three things wrong."""
    blocks, meta, bloom = bytearray(parts.blocks), parts.meta, parts.bloom
    for _ in range(chance.randint(1, 3)):
        kind = chance.randrange(6)
        if kind == 0:  # a number in a message: sizes, offsets, counts, bits
            place = chance.choice(parts.meta.blocks)
            at = place.offset + chance.randrange(place.size - 8)
            layout, number = chance.choice((("<I", 32), ("<Q", 64), ("<B", 8)))
            struct.pack_into(layout, blocks, at, chance.choice(NUMBERS) % (1 << number))
        elif kind == 1:
            place = chance.choice(parts.meta.blocks)
            blocks[place.offset + chance.randrange(place.size)] ^= 1 << chance.randrange(8)
        elif kind == 2:  # a number of the index
            field = chance.choice(
                ("sst_id", "level", "rows", "tombstones", "lsn_min", "lsn_max", "raw_bytes", "bloom_bits")
            )
            meta = msgspec.structs.replace(meta, **{field: _number(chance)})
        elif kind == 3:  # a number of a block's place
            field = chance.choice(("offset", "size", "rows"))
            places: list[Any] = list(meta.blocks)
            at = chance.randrange(len(places)) if places else 0
            if places:
                places[at] = msgspec.structs.replace(places[at], **{field: _number(chance)})
            meta = msgspec.structs.replace(meta, blocks=places)
        elif kind == 4:
            data = bloom.data[: chance.choice((0, 1, len(bloom.data) // 2, len(bloom.data)))]
            bloom = Bloom(bloom.bits, chance.choice((0, 1, 7, 64, 2**31)), data)
        else:
            keys = {"key_min": b"", "key_max": b"\xff" * chance.choice((1, 70_000)), "compression": "gzip"}
            name = chance.choice(sorted(keys))
            meta = msgspec.structs.replace(
                meta, **{name: keys[name], **({"blocks": []} if chance.random() < 0.2 else {})}
            )
    return Parts(blocks, meta, bloom, parts.rest)


def _number(chance: random.Random) -> int:
    return min(chance.choice(NUMBERS), 2**64 - 1) * chance.choice((1, 1, 1, -1)) if chance.random() < 0.8 else 3


def many(directory: Path, seed: int, count: int) -> Iterator[str]:
    """What becomes of so many crafted tables."""
    chance = random.Random(seed)
    kinds = [parts_of(directory, compression) for compression in ("lz4", "zstd", "none")]
    for number in range(count):
        made = crafted(chance.choice(kinds), chance)
        yield read_every_way(put_together(made, directory / f"{number % 8}.sst"))


if __name__ == "__main__":
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY_BYTES, used + MEMORY_BYTES))
    answers = list(many(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])))
    print({answer: answers.count(answer) for answer in sorted(set(answers))})
