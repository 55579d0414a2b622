"""SQLite logs with valid checksums and invalid numbers: refused or read, within bounds."""

from __future__ import annotations

import sqlite3
import struct
from contextlib import closing
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.core.errors import Corruption
from quire.core.limits import MIB
from quire.sqlite.dbfile import open_source
from quire.sqlite.follow import Follower
from quire.sqlite.importing import import_file
from quire.sqlite.walfile import (
    HEADER,
    HEADER_BYTES,
    MAGIC,
    VERSION,
    WalHeader,
    checksum_of,
    newest_pages,
    parse_header,
)
from quire.store.store import Store
from tests.hostile import memory_limit, numbers

BOUND = 64 * MIB


def header(*, magic: int, version: int, page_size: int, salts: bytes) -> bytes:
    raw = HEADER.pack(magic, version, page_size, 0, salts, 0, 0)[:-8]
    return raw + struct.pack(">II", *checksum_of(raw, big_endian=bool(magic & 1)))


def log(frames: list[tuple[int, int]], head: bytes, page_size: int) -> bytes:
    """A log with these frames (page, size of the database) and valid checksums."""
    big, salts = bool(head[3] & 1), head[16:24]
    before = struct.unpack(">II", head[-8:])
    data = head
    for page, size in frames:
        start, body = struct.pack(">II", page, size), bytes(page_size // 8 * 8)
        before = checksum_of(start + body, big_endian=big, start=before)
        data += start + salts + struct.pack(">II", *before) + body
    return data


@given(
    magic=st.sampled_from([MAGIC, MAGIC | 1]) | numbers(32),
    version=st.just(VERSION) | numbers(32),
    page_size=st.sampled_from([512, 1024]) | numbers(32),
    frames=st.lists(st.tuples(numbers(32), numbers(32)), max_size=5),
    tail=st.binary(max_size=600),
)
def test_any_log_with_valid_checksums_is_read_within_bounds(
    magic: int, version: int, page_size: int, frames: list[tuple[int, int]], tail: bytes
) -> None:
    head = header(magic=magic, version=version, page_size=page_size, salts=b"saltsalt")
    data = log(frames, head, min(page_size, 1024)) + tail
    with memory_limit(BOUND):
        parsed = parse_header(data[:HEADER_BYTES])
        if isinstance(parsed, WalHeader):
            result = newest_pages(lambda size, offset: data[offset : offset + size], parsed)
            assert result.end.frame <= len(frames) + len(tail) // 536
            assert all(0 < page <= result.size_pages for page in result.frames)


@pytest.fixture
def swollen(tmp_path: Path) -> Path:
    """A database of a few pages whose log declares four billion."""
    path, original = tmp_path / "swollen.db", tmp_path / "made.db"
    with closing(sqlite3.connect(original)) as connection:
        connection.execute("pragma page_size=4096")
        connection.execute("pragma journal_mode=wal")
        connection.execute("create table t(a)")
        path.write_bytes(original.read_bytes())
        data = Path(f"{original}-wal").read_bytes()
    parsed = parse_header(data[:HEADER_BYTES])
    assert isinstance(parsed, WalHeader)
    *_, last = range(HEADER_BYTES, len(data), parsed.frame_bytes)
    body, before = data[last + 24 :], parsed.checksum
    for start in range(HEADER_BYTES, last, parsed.frame_bytes):
        before = struct.unpack_from(">II", data, start + 16)
    head = data[last : last + 4] + struct.pack(">I", 0xFFFF_FFFE)
    after = checksum_of(head + body, big_endian=parsed.big_endian, start=before)
    rest = data[last + 8 : last + 16] + struct.pack(">II", *after) + body
    Path(f"{path}-wal").write_bytes(data[:last] + head + rest)
    return path


def test_a_log_cannot_cause_four_billion_pages_to_be_written(store: Store, swollen: Path) -> None:
    """An import and a follower wrote zeros for all of them until the disk was full."""
    with (
        open_source(str(swollen), lock=False) as source,
        pytest.raises(Corruption, match="an impossible number of pages"),
    ):
        source.size_pages  # noqa: B018 - asking is the test
    with pytest.raises(Corruption, match="an impossible number of pages"):
        import_file(store.manifest, store.pages, str(swollen), "swollen")
    with pytest.raises(Corruption, match="an impossible number of pages"):
        Follower(manifest=store.manifest, pages=store.pages, root=store.path, path=swollen, name="followed").look()


def test_pages_that_were_freed_before_they_were_written_are_accepted(store: Store, tmp_path: Path) -> None:
    path = tmp_path / "freed.db"
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute("pragma journal_mode=wal")
        connection.execute("create table t(a)")
        file_follower = Follower(manifest=store.manifest, pages=store.pages, root=store.path, path=path, name="freed")
        file_follower.look()
        connection.execute("begin")
        connection.execute("create table u(a)")
        count = "with recursive n(i) as (select 1 union all select i + 1 from n where i < 3000)"
        connection.execute(f"{count} insert into u select zeroblob(3900) from n")
        connection.execute("drop table u")
        connection.execute("commit")
        assert connection.execute("pragma freelist_count").fetchone()[0] > 2_000
        file_follower.look()
        copy = store.sqlite("freed")
        assert copy.pragma("integrity_check") == "ok"
        assert copy.pragma("page_count") == connection.execute("pragma page_count").fetchone()[0]
        copy.close()
