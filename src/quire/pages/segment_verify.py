"""Looks at every byte of a WAL segment that was promised, and says what is wrong: identity, index region, frames.

Terms
  promised   of a sealed segment all of its frames; of one that is being written those up to an lsn that had been synced

Rules
  1. The header is that of this database and segment. Every promised frame is valid in its place, and its entry in the region is
     the one that the frame makes: entries and frames are each other's witnesses.
  2. Bytes behind the promised frames are nobody's: zeros, or frames that nobody was told of.

Reads only; a segment that is being written may be looked at. Pure functions over a reader of bytes, any thread; importable on
executors. Format page: `docs/formats/segment.md`. Raises what reading raises; damage is the answer.
"""

from __future__ import annotations

from collections.abc import Callable

from quire.core.errors import Corruption, FormatTooNew
from quire.durable.checksums import Bytes
from quire.pages.segment import ENTRY_BYTES, HEADER_BYTES, SegmentHeader, decode_header
from quire.pages.segment_scan import parse_entries, scan_segment

ReadAt = Callable[[int, int], Bytes]
"""(offset, bytes) → so many bytes, or fewer at the end."""


def sealed_damage(read: ReadAt, used_bytes: int, *, path: str, db_id: int, segment_id: int) -> str:
    """What is wrong with a sealed segment of so many bytes; empty if nothing is."""
    try:
        header = decode_header(read(0, HEADER_BYTES), path, db_id=db_id, segment_id=segment_id)
        geometry = header.geometry
        frames, rest = divmod(used_bytes - geometry.frames_offset, geometry.stride)
        if frames < 0 or rest:
            return f"{used_bytes} bytes are no whole number of its frames"
        return _damage(read, header, frames, path)
    except (Corruption, FormatTooNew) as error:
        return error.what


def open_damage(read: ReadAt, *, path: str, db_id: int, segment_id: int, synced_lsn: int) -> str:
    """What is wrong with a segment that is being written, up to an lsn that was synced and published; empty if nothing is."""
    try:
        header = decode_header(read(0, HEADER_BYTES), path, db_id=db_id, segment_id=segment_id)
        frames = min(max(synced_lsn - header.first_lsn + 1, 0), header.geometry.capacity)
        return _damage(read, header, frames, path)
    except (Corruption, FormatTooNew) as error:
        return error.what


def _damage(read: ReadAt, header: SegmentHeader, frames: int, path: str) -> str:
    geometry = header.geometry

    def read_frames(first: int, count: int) -> Bytes:
        data = read(geometry.frame_offset(first), count * geometry.stride)
        return data[: len(data) // geometry.stride * geometry.stride]

    index = read(geometry.entry_offset(0), frames * ENTRY_BYTES)
    if len(index) < frames * ENTRY_BYTES:
        return "the file ends within its index"
    region = parse_entries(index)
    found = scan_segment(header, index, read_frames, path=path, proven_lsn=header.lsn(frames - 1), limit=frames)
    made = b"".join((found.entries.tobytes(), found.unfinished.tobytes()))
    if made != region.tobytes():
        place = next(at for at in range(frames) if made[at * ENTRY_BYTES :][:ENTRY_BYTES] != region[at].tobytes())
        return f"the index entry of frame {place} is not that of the frame"
    return ""
