"""Files that a restore left in the bucket: read in blocks, and what lies together with one request."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest

from quire.archive.log_reader import base_events, find
from quire.archive.recorder import REMOTE_FILES
from quire.archive.remote_files import BLOCK_BYTES, RemoteFiles
from quire.archive.state_files import RemoteFile
from quire.core.errors import ChecksumMismatch, Corruption
from quire.durable.files import OsDisk
from quire.objects.api import Range
from quire.objects.local import LocalStore
from tests.archive.world import fill, world

BODY = random.Random(21).randbytes(5 * BLOCK_BYTES + 1_000)


class Counting(LocalStore):
    """A store that remembers which ranges were asked for together."""

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self.asked: list[list[tuple[int, int]]] = []

    def get_ranges(self, key: str, ranges: Sequence[Range]) -> list[bytes]:
        self.asked.append([(span.offset, span.length) for span in ranges])
        return super().get_ranges(key, ranges)


@pytest.fixture
def objects(tmp_path: Path) -> Counting:
    store = Counting(str(tmp_path / "bucket"))
    store.put("table", BODY)
    listed = {"sst/1.sst": RemoteFile("table", len(BODY), hashlib.sha256(BODY).digest())}
    (tmp_path / REMOTE_FILES).write_bytes(msgspec.json.encode(listed))
    return store


def test_blocks_that_are_not_here_come_with_one_request(tmp_path: Path, objects: Counting) -> None:
    disk = RemoteFiles(OsDisk(), str(tmp_path), lambda: objects)
    file = disk.open(str(tmp_path / "sst" / "1.sst"), write=False)
    assert file.read_at(10, BLOCK_BYTES + 5) == BODY[BLOCK_BYTES + 5 : BLOCK_BYTES + 15]
    assert objects.asked == [[(BLOCK_BYTES, BLOCK_BYTES)]]
    assert file.read_at(len(BODY), 0) == BODY
    rest = [(number * BLOCK_BYTES, BLOCK_BYTES) for number in (0, 2, 3, 4)]
    assert objects.asked[1:] == [[*rest, (5 * BLOCK_BYTES, 1_000)]]
    assert file.read_at(len(BODY), 7) == BODY[7:]
    assert len(objects.asked) == 2, "all of it was here"


@pytest.mark.parametrize(("size", "offset"), [(0, 0), (0, 100), (1, len(BODY)), (100, len(BODY) - 40), (9, 1 << 40)])
def test_reads_end_with_the_file(tmp_path: Path, objects: Counting, size: int, offset: int) -> None:
    disk = RemoteFiles(OsDisk(), str(tmp_path), lambda: objects)
    file = disk.open(str(tmp_path / "sst" / "1.sst"), write=False)
    assert file.read_at(size, offset) == BODY[offset : offset + size]


def test_an_object_that_was_cut_is_damage(tmp_path: Path, objects: Counting) -> None:
    """It was `OutOfRange`, which blames the caller."""
    objects.put("table", BODY[: 2 * BLOCK_BYTES])
    file = RemoteFiles(OsDisk(), str(tmp_path), lambda: objects).open(str(tmp_path / "sst" / "1.sst"), write=False)
    assert file.read_at(10, 0) == BODY[:10]
    with pytest.raises(Corruption, match="shorter"):
        file.read_at(10, 3 * BLOCK_BYTES)


class Garbling(LocalStore):
    """A store whose first answers have a wrong byte."""

    times = 0

    def get(self, key: str) -> bytes:
        data = super().get(key)
        if not self.times:
            return data
        self.times -= 1
        return data[:-1] + bytes([data[-1] ^ 1])


def test_a_part_of_a_base_that_was_garbled_on_its_way_is_read_again(tmp_path: Path) -> None:
    with world(tmp_path) as here:
        fill(here.store, 0)
        here.archived()
        bucket = Garbling(str(here.bucket))
        base = find(bucket, here.store.feed.store_id()).base
        expected = list(base_events(bucket, base))
    bucket.times = 1
    assert list(base_events(bucket, base)) == expected
    assert not bucket.times
    bucket.times = 2
    with pytest.raises(ChecksumMismatch):
        list(base_events(bucket, base))
