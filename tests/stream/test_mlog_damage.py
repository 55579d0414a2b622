"""A flipped bit anywhere in a chunk or a snapshot is detected, or changes nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from quire.core.errors import Corruption, FormatTooNew, ManifestIntegrityError
from quire.durable.checksums import crc64
from quire.stream import mlog_records as r
from quire.stream.mlog_format import CHUNK_BYTES, COPY_BYTES, RECORD_BYTES, SEALED
from quire.stream.mlog_log import ManifestLog
from quire.stream.mlog_reader import Chunk, LogPosition, ManifestLogReader, load_chunk
from quire.stream.mlog_recovery import recover
from quire.stream.mlog_snapshot import decode_snapshot, encode_snapshot
from quire.stream.mlog_tier2 import object_bytes
from quire.testing.clock import ManualClock
from tests.stream.logs import ONE_OF_EACH, SMALL, all_chunks, files_at, open_writer, opened, same_state
from tests.stream.random_history import RandomHistory


def flips(data: bytes, offsets: range | list[int], *, one: bool = False) -> list[tuple[int, int, bytes]]:
    """Copies of the data with one bit flipped: each bit at each offset, or with `one` a single bit per offset."""
    variants = []
    for offset in offsets:
        for bit in [offset * 5 % 8] if one else range(8):
            damaged = bytearray(data)
            damaged[offset] ^= 1 << bit
            variants.append((offset, bit, bytes(damaged)))
    return variants


def written(tmp_path: Path) -> Path:
    """A log of two chunks, the first one sealed."""
    files = files_at(tmp_path)
    with open_writer(files) as writer:
        for value in ONE_OF_EACH[:6]:
            writer.append(value, 3)
        writer.commit()
        for value in ONE_OF_EACH[6:9]:
            writer.append(value, 3)
        writer.rotate()
        writer.append(opened(1), 4)
        writer.commit()
    return Path(files.chunk(0))


def test_every_flipped_bit_of_a_chunk_object_is_detected_or_harmless(tmp_path: Path) -> None:
    written(tmp_path)
    chunk = all_chunks(files_at(tmp_path))[0]
    data = object_bytes(chunk)
    expected = [view.raw for view in chunk.records()]
    detected = harmless = 0
    for offset, bit, damaged in flips(data, range(len(data))):
        try:
            read = load_chunk(damaged, chunk_index=0)
        except (Corruption, FormatTooNew):
            detected += 1
            continue
        assert [view.raw for view in read.records()] == expected, (offset, bit)
        assert read.header == chunk.header, (offset, bit)
        assert offset < CHUNK_BYTES or offset >= len(data) - COPY_BYTES, "a flipped record was accepted"
        harmless += 1
    # A flip in the header is corrected by the copy, and one in the copy by the header; all others are detected.
    assert detected == 8 * (len(data) - CHUNK_BYTES - COPY_BYTES)
    assert harmless == 8 * (CHUNK_BYTES + COPY_BYTES)


@pytest.mark.parametrize("number", [0, 1])
def test_every_damaged_byte_of_a_chunk_file_is_detected_or_harmless(tmp_path: Path, number: int) -> None:
    written(tmp_path)
    files = files_at(tmp_path)
    chunks = all_chunks(files)
    path = Path(files.chunk(number))
    data = path.read_bytes()
    used = chunks[number].header.committed_len
    sampled = list(range(used, len(data) - COPY_BYTES, 509))
    expected = [(chunk.header, [view.raw for view in chunk.records()]) for chunk in chunks]
    detected = 0
    positions = [*range(used), *sampled, *range(len(data) - COPY_BYTES, len(data))]
    for position, bit, damaged in flips(data, positions, one=True):
        path.write_bytes(damaged)
        try:
            read = all_chunks(files)
        except (Corruption, FormatTooNew):
            detected += 1
            continue
        assert [(chunk.header, [view.raw for view in chunk.records()]) for chunk in read] == expected, (position, bit)
    assert detected == used - CHUNK_BYTES


def test_a_header_without_its_copy_is_checked_against_its_name_and_neighbours(tmp_path: Path) -> None:
    """S2: even without the commit copy, no changed header of a sealed chunk is accepted."""
    written(tmp_path)
    files = files_at(tmp_path)
    expected = [view.raw for chunk in all_chunks(files) for view in chunk.records()]
    path = Path(files.chunk(0))
    data = path.read_bytes()[:-COPY_BYTES] + bytes(COPY_BYTES)
    accepted = set()
    for offset, bit, damaged in flips(data, range(CHUNK_BYTES)):
        path.write_bytes(damaged)
        try:
            assert [view.raw for chunk in all_chunks(files) for view in chunk.records()] == expected
            accepted.add((offset, bit))
        except (Corruption, FormatTooNew):
            continue
    assert accepted == {(56, 1)}, "only `uploaded` cannot be checked locally: tier 2 is consulted for it"


def test_every_flipped_bit_of_a_snapshot_is_detected() -> None:
    history = RandomHistory(3, alive=3)
    history.many(60)
    data = encode_snapshot(4, LogPosition(2, 640), history.index, 2)
    for _, _, damaged in flips(data, range(len(data))):
        with pytest.raises(ManifestIntegrityError):
            decode_snapshot(damaged, snapshot_id=4)
    for end in range(len(data)):
        with pytest.raises(ManifestIntegrityError):
            decode_snapshot(data[:end], snapshot_id=4)
    with pytest.raises(ManifestIntegrityError):
        decode_snapshot(data, snapshot_id=5)


def test_a_payload_that_fails_names_chunk_segment_and_offset(tmp_path: Path) -> None:
    """The chunk's checksum matches, the payload's does not: a bug in the writer is detected as well."""
    path = written(tmp_path)
    chunk = all_chunks(files_at(tmp_path))[0]
    data = bytearray(path.read_bytes())
    at = chunk.offsets[1]
    data[at + RECORD_BYTES] ^= 1
    header = chunk.header._replace(chunk_crc64=crc64(data[CHUNK_BYTES : chunk.header.committed_len]))
    data[:CHUNK_BYTES] = header.encode()
    data[-COPY_BYTES:] = chunk.facts._replace(header=header).encode()
    path.write_bytes(data)
    with pytest.raises(ManifestIntegrityError) as caught:
        all_chunks(files_at(tmp_path))
    assert (caught.value.where["chunk"], caught.value.where["segment"], caught.value.where["offset"]) == (0, 3, at)


def altered(chunk: Chunk, at: int, size: int, number: int) -> bytes:
    """The chunk with another number at this offset, and matching checksums."""
    data = bytearray(chunk.data)
    data[at : at + size] = number.to_bytes(size, "little")
    header = chunk.header._replace(chunk_crc64=crc64(data[CHUNK_BYTES : chunk.header.committed_len]))
    data[:CHUNK_BYTES] = header.encode()
    data[-COPY_BYTES:] = chunk.facts._replace(header=header).encode()
    return bytes(data)


@pytest.mark.parametrize(
    ("change", "position", "size", "number"),
    [
        ("a reserved flag", 2, 2, 1),
        ("another reserved flag", 2, 2, 0x8000),
        ("an empty record", 4, 4, 0),
        ("a length that is not aligned", 4, 4, 12),
        ("a record beyond what was committed", 4, 4, 1 << 20),
    ],
)
@pytest.mark.parametrize("record", [0, 3])
def test_invalid_fields_of_a_record_are_refused_although_every_checksum_matches(
    tmp_path: Path, record: int, change: str, position: int, size: int, number: int
) -> None:
    written(tmp_path)
    chunk = all_chunks(files_at(tmp_path))[0]
    offset = chunk.offsets[record]
    assert (
        load_chunk(altered(chunk, offset + 24, 8, 5), chunk_index=0).offsets == chunk.offsets
    )  # any timestamp is valid
    with pytest.raises(ManifestIntegrityError) as caught:
        load_chunk(altered(chunk, offset + position, size, number), chunk_index=0)
    assert caught.value.where["chunk"] == 0
    assert caught.value.where["offset"] >= offset, change


@pytest.mark.parametrize("flags", [4, 1 << 63, SEALED | 8])
def test_reserved_flags_of_a_chunk_are_zero(tmp_path: Path, flags: int) -> None:
    """Header and commit copy agree and every checksum matches, but it is not a chunk of this version."""
    written(tmp_path)
    chunk = all_chunks(files_at(tmp_path))[0]
    header = chunk.header._replace(flags=flags)
    data = header.encode() + chunk.data[CHUNK_BYTES:-COPY_BYTES] + chunk.facts._replace(header=header).encode()
    with pytest.raises(ManifestIntegrityError, match="flags"):
        load_chunk(data, chunk_index=0)


def test_payloads_of_large_chunks_are_checked_too() -> None:
    from tests.stream.test_mlog_index import chunk_of

    chunk = chunk_of(RandomHistory(5).many(900))
    for index in (0, 1, 450, 899):
        data = bytearray(chunk.data)
        data[chunk.offsets[index] + RECORD_BYTES] ^= 4
        header = chunk.header._replace(chunk_crc64=crc64(data[CHUNK_BYTES : chunk.header.committed_len]))
        data[:CHUNK_BYTES] = header.encode()
        data[-COPY_BYTES:] = chunk.facts._replace(header=header).encode()
        with pytest.raises(ManifestIntegrityError) as caught:
            load_chunk(bytes(data), chunk_index=0)
        assert caught.value.where["offset"] == chunk.offsets[index]


@pytest.mark.parametrize("damage", ["missing", "unsealed", "swapped", "truncated", "emptied"])
def test_a_corrupt_middle_quarantines_the_stream(tmp_path: Path, damage: str) -> None:
    files = files_at(tmp_path)
    with open_writer(files) as writer:
        for number in range(3):
            writer.append(opened(number), number + 1)
            writer.rotate()
    middle, last = Path(files.chunk(1)), Path(files.chunk(2))
    if damage == "missing":
        middle.unlink()
    elif damage == "unsealed":
        chunk = ManifestLogReader(files).chunk(1)
        header = chunk.header._replace(flags=0)
        middle.write_bytes(header.encode() + chunk.data[CHUNK_BYTES:-COPY_BYTES] + bytes(COPY_BYTES))
    elif damage == "swapped":
        middle.write_bytes(last.read_bytes())
    elif damage == "truncated":
        middle.write_bytes(middle.read_bytes()[:100])
    else:
        middle.write_bytes(b"")
    before = {path.name: path.read_bytes() for path in Path(files.directory).iterdir()}
    with pytest.raises(ManifestIntegrityError) as caught:
        ManifestLog.open(files, clock=ManualClock(), settings=SMALL)
    assert caught.value.where["chunk"] == 1
    assert caught.value.hint
    after = {path.name: path.read_bytes() for path in Path(files.directory).iterdir()}
    assert {name: data for name, data in after.items() if name != "writer.lock"} == {
        name: data for name, data in before.items() if name != "writer.lock"
    }


def test_a_torn_tail_is_trimmed_and_not_an_error(tmp_path: Path) -> None:
    """Manifest-log document, matrix: payload bytes without the update of the header. Only the committed prefix is read."""
    files = files_at(tmp_path)
    with open_writer(files) as writer:
        writer.append(opened(1), 1)
        writer.commit()
        writer.append(opened(2), 2)
        writer.append(opened(3), 3)
        torn, at = writer.records_from(writer.committed.offset), writer.committed.offset
        writer.abandon()
    with open(files.chunk(0), "r+b") as file:  # an interrupted commit: records without the update of the header
        file.seek(at)
        file.write(torn)
    assert b"".join(r.encode(opened(n)) for n in (2,)) in Path(files.chunk(0)).read_bytes()
    recovered = recover(files, ManualClock())
    assert sorted(recovered.index.entries) == [1]
    with ManifestLog.open(files, clock=ManualClock(), settings=SMALL) as log:
        assert same_state(log.index, recovered.index)
        log.append(opened(7), 2)
    assert [view.value() for chunk in all_chunks(files) for view in chunk.records()] == [opened(1), opened(7)]
