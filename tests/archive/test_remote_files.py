"""Files that a restore left in the bucket: read in blocks, with one request for adjacent blocks."""

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
from tests.archive.archived_store import archived_store, fill

BODY = random.Random(21).randbytes(5 * BLOCK_BYTES + 1_000)


class CountingStore(LocalStore):
    """A store that records which ranges were requested together."""

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self.requests: list[list[tuple[int, int]]] = []

    def get_ranges(self, key: str, ranges: Sequence[Range]) -> list[bytes]:
        self.requests.append([(span.offset, span.length) for span in ranges])
        return super().get_ranges(key, ranges)


@pytest.fixture
def objects(tmp_path: Path) -> CountingStore:
    store = CountingStore(str(tmp_path / "bucket"))
    store.put("table", BODY)
    listed = {"sst/1.sst": RemoteFile("table", len(BODY), hashlib.sha256(BODY).digest())}
    (tmp_path / REMOTE_FILES).write_bytes(msgspec.json.encode(listed))
    return store


def test_blocks_that_are_not_cached_are_read_with_one_request(tmp_path: Path, objects: CountingStore) -> None:
    disk = RemoteFiles(OsDisk(), str(tmp_path), lambda: objects)
    file = disk.open(str(tmp_path / "sst" / "1.sst"), write=False)
    assert file.read_at(10, BLOCK_BYTES + 5) == BODY[BLOCK_BYTES + 5 : BLOCK_BYTES + 15]
    assert objects.requests == [[(BLOCK_BYTES, BLOCK_BYTES)]]
    assert file.read_at(len(BODY), 0) == BODY
    other_blocks = [(number * BLOCK_BYTES, BLOCK_BYTES) for number in (0, 2, 3, 4)]
    assert objects.requests[1:] == [[*other_blocks, (5 * BLOCK_BYTES, 1_000)]]
    assert file.read_at(len(BODY), 7) == BODY[7:]
    assert len(objects.requests) == 2, "everything was cached"


@pytest.mark.parametrize(("size", "offset"), [(0, 0), (0, 100), (1, len(BODY)), (100, len(BODY) - 40), (9, 1 << 40)])
def test_reads_end_with_the_file(tmp_path: Path, objects: CountingStore, size: int, offset: int) -> None:
    disk = RemoteFiles(OsDisk(), str(tmp_path), lambda: objects)
    file = disk.open(str(tmp_path / "sst" / "1.sst"), write=False)
    assert file.read_at(size, offset) == BODY[offset : offset + size]


def test_a_truncated_object_is_corruption(tmp_path: Path, objects: CountingStore) -> None:
    """It was `OutOfRange`, which blames the caller."""
    objects.put("table", BODY[: 2 * BLOCK_BYTES])
    file = RemoteFiles(OsDisk(), str(tmp_path), lambda: objects).open(str(tmp_path / "sst" / "1.sst"), write=False)
    assert file.read_at(10, 0) == BODY[:10]
    with pytest.raises(Corruption, match="shorter"):
        file.read_at(10, 3 * BLOCK_BYTES)


class GarblingStore(LocalStore):
    """A store whose first responses have a wrong byte."""

    garbled_reads = 0

    def get(self, key: str) -> bytes:
        data = super().get(key)
        if not self.garbled_reads:
            return data
        self.garbled_reads -= 1
        return data[:-1] + bytes([data[-1] ^ 1])


def test_a_part_of_a_base_garbled_in_transit_is_read_again(tmp_path: Path) -> None:
    with archived_store(tmp_path) as archived:
        fill(archived.store, 0)
        archived.wait_archived()
        bucket = GarblingStore(str(archived.bucket))
        base = find(bucket, archived.store.feed.store_id()).base
        expected = list(base_events(bucket, base))
    bucket.garbled_reads = 1
    assert list(base_events(bucket, base)) == expected
    assert not bucket.garbled_reads
    bucket.garbled_reads = 2
    with pytest.raises(ChecksumMismatch):
        list(base_events(bucket, base))
