"""SQLite's log: whatever is cut off or flipped, we read what SQLite itself reads."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.sqlite import walfile
from quire.sqlite.dbfile import open_source
from quire.sqlite.walfile import (
    FRAME_HEAD,
    FRAME_HEAD_BYTES,
    HEADER,
    HEADER_BYTES,
    VerifiedFrame,
    WalHeader,
    WalMap,
    blocks,
    checksum_of,
    newest_pages,
    parse_header,
    verified,
)
from tests.rules.tree import ROOT
from tests.sqlite.sqlite_files import as_sqlite_reads, copy_of, in_big_endian, writing


@pytest.fixture(scope="module")
def logged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A database with nine transactions in its log, the last one a VACUUM; after them are frames of the log's previous
    use.
    """
    folder = tmp_path_factory.mktemp("logged")
    with writing(folder / "live.db") as connection:
        connection.execute("CREATE TABLE t (x)")
        for _ in range(30):
            connection.execute("INSERT INTO t VALUES (randomblob(2000))")
        connection.execute("PRAGMA wal_checkpoint(RESTART)")
        for number in range(1, 8):
            connection.execute("UPDATE t SET x = randomblob(700) WHERE rowid = ?", (number,))
        connection.execute("DELETE FROM t WHERE rowid > 9")
        connection.execute("VACUUM")
        return copy_of(folder / "live.db", folder / "copy")


def wal_of(path: Path) -> bytes:
    return Path(f"{path}-wal").read_bytes()


def read(wal: bytes) -> WalMap | str:
    header = parse_header(wal[:HEADER_BYTES])
    return header if isinstance(header, str) else newest_pages(lambda size, at: wal[at : at + size], header)


def commits_of(wal: bytes) -> list[tuple[int, int]]:
    """(end offset, size of the database) of each commit, by a deliberately simple parser."""
    header = parse_header(wal)
    assert isinstance(header, WalHeader)
    commits, running, offset = [], header.checksum, HEADER_BYTES
    while offset + header.frame_bytes <= len(wal):
        page, size, salts, *stored = FRAME_HEAD.unpack_from(wal, offset)
        body = wal[offset : offset + 8] + wal[offset + FRAME_HEAD_BYTES : offset + header.frame_bytes]
        running = checksum_of(body, big_endian=header.big_endian, start=running)
        if not page or salts != header.salts or list(running) != stored:
            break
        offset += header.frame_bytes
        if size:
            commits.append((offset, size))
    return commits


def test_a_log_cut_at_any_byte_ends_with_its_last_complete_commit(logged: Path) -> None:
    wal = wal_of(logged)
    commits = commits_of(wal)
    assert len(commits) == 9
    assert commits[-1][1] < commits[-2][1], "the last commit shrinks the database"
    assert len(wal) > commits[-1][0] + 2 * 536, "frames of the previous use follow"
    for length in range(commits[-1][0] + 600):
        result = read(wal[:length])
        if length < HEADER_BYTES:
            assert result == ("it is shorter than its header" if length else "it is empty")
            continue
        assert isinstance(result, WalMap)
        end, size = max((commit for commit in commits if commit[0] <= length), default=(HEADER_BYTES, 0))
        assert result.header.offset(result.end.frame + 1) == end
        assert result.size_pages == size
        assert max(result.frames, default=0) <= size


@given(data=st.data())
def test_a_flipped_or_cut_log_is_read_as_sqlite_reads_it(logged: Path, data: st.DataObject) -> None:
    wal = bytearray(wal_of(logged))
    for _ in range(data.draw(st.integers(0, 2), "flips")):
        at = data.draw(st.one_of(st.integers(0, 40), st.integers(0, len(wal) - 1)), "byte")
        wal[at] ^= 1 << data.draw(st.integers(0, 7), "bit")
    length = data.draw(st.one_of(st.just(len(wal)), st.integers(0, len(wal))), "length")
    assert_as_sqlite(copy_of(logged, logged.parent / "damaged", bytes(wal[:length])))


@pytest.mark.parametrize("page_size", [512, 1024, 4096, 65536])
def test_both_byte_orders_and_all_page_sizes_are_read(tmp_path: Path, page_size: int) -> None:
    with writing(tmp_path / "live.db", page_size=page_size) as connection:
        connection.execute("CREATE TABLE t (x)")
        for number in range(20):
            connection.execute("INSERT INTO t VALUES (randomblob(?))", (number * page_size // 3,))
        little = copy_of(tmp_path / "live.db", tmp_path / "little")
    swapped = in_big_endian(wal_of(little), page_size)
    header = parse_header(swapped)
    assert isinstance(header, WalHeader)
    assert (header.big_endian, header.page_size) == (True, page_size)
    assert_as_sqlite(copy_of(little, tmp_path / "big", swapped))
    assert_as_sqlite(little)


def assert_as_sqlite(path: Path) -> None:
    with open_source(str(path), lock=False) as source:
        images = source.read(0, source.size_pages)
    content = b"".join(images[page] for page in sorted(images))
    assert content == as_sqlite_reads(path)  # last, because SQLite checkpoints when it closes the file


def test_reading_resumes_at_a_position(logged: Path) -> None:
    wal = wal_of(logged)
    header = parse_header(wal)
    assert isinstance(header, WalHeader)

    def read_at(size: int, at: int) -> bytes:
        return wal[at : at + size]

    (all_frames,) = blocks(read_at, header, header.start)
    assert all_frames.place(len(all_frames) - 1).frame == len(all_frames)
    for frame in range(1, len(all_frames)):
        position = all_frames.place(frame - 1)
        (rest,) = blocks(read_at, header, position)
        assert (rest.first, len(rest)) == (frame + 1, len(all_frames) - frame)
        assert rest.image(0) == all_frames.image(frame)
        wrong_position = VerifiedFrame(frame, (position.checksum[0] ^ 1, position.checksum[1]))
        assert not list(blocks(read_at, header, wrong_position)), "the checksum of the previous frame is included"
    assert [len(block) for block in blocks(read_at, header, header.start, 3)] == [3]


def test_blocks_of_one_frame_equal_one_block(logged: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wal = wal_of(logged)
    expected = read(wal)
    monkeypatch.setattr(walfile, "BLOCK_BYTES", 1)
    assert read(wal) == expected


@given(
    words=st.binary(min_size=520, max_size=520), start=st.tuples(*[st.integers(0, 2**32 - 1)] * 2), big=st.booleans()
)
def test_the_fast_checksum_equals_the_plain_one(words: bytes, start: tuple[int, int], big: bool) -> None:
    salts = b"saltsalt"
    header = WalHeader(big_endian=big, page_size=512, sequence=0, salts=salts, checksum=start)
    page = b"\x00\x00\x00\x01" + words[4:8]
    right = checksum_of(page + words[8:], big_endian=big, start=start)
    frame = page + salts + struct.pack(">II", *right) + words[8:]
    assert len(verified(frame, header, VerifiedFrame(0, start))) == 1
    assert verified(frame, header, VerifiedFrame(0, start)).image(0) == words[8:]
    assert len(verified(frame, header, VerifiedFrame(0, (start[0] ^ 1, start[1])))) == 0
    nowhere = bytes(4) + words[4:8]
    right = checksum_of(nowhere + words[8:], big_endian=big, start=start)
    frame = nowhere + salts + struct.pack(">II", *right) + words[8:]
    assert len(verified(frame, header, VerifiedFrame(0, start))) == 0, "page 0 does not exist"


def test_invalid_headers_are_refused_with_a_reason(logged: Path) -> None:
    wal = wal_of(logged)[:HEADER_BYTES]
    fields = list(HEADER.unpack(wal))

    def reason_for(number: int, value: int) -> str:
        values = [*fields]
        values[number] = value
        reason = parse_header(HEADER.pack(*values))
        assert isinstance(reason, str)
        return reason

    assert reason_for(0, 1) == "it does not start like a write-ahead log"
    assert reason_for(1, 3_007_001) == "its format has version 3007001, not 3007000"
    assert reason_for(2, 1000) == "its page size is 1000"
    assert reason_for(3, 77) == "the checksum of its header is wrong"


def test_the_page_agrees_with_the_code() -> None:
    page = (ROOT / "docs" / "formats" / "sqlite-wal.md").read_text("utf-8")
    for words in (
        f"`{walfile.MAGIC:08x}`",
        f"{walfile.VERSION}",
        "| salts | 16 | 8 |",
        "| salts | 8 | 8 |",
        "| checksum | 16 | 8 |",
    ):
        assert words in page
