"""Writes index entries of a WAL segment: what publication and recovery do with frames that are durable (docs/decisions/008).

The rules are those of segment_file.py: entries are written for frames that a sync has covered (rule 3), and through a handle of
their own, so that their sync takes no news from the sync of a commit (rule 7).

Thread: one at a time. Raises `Corruption` if the file is gone, `OutOfRange`, and what the disk raises.
"""

from __future__ import annotations

from typing import Self

from quire.core.errors import Corruption, OutOfRange
from quire.durable.failpoints import hit
from quire.durable.files import Disk
from quire.pages.segment import ENTRY_BYTES, HINT, SegmentHeader


class IndexWriter:
    """A segment's region of entries, to be written."""

    __slots__ = ("_file", "_header")

    def __init__(self, disk: Disk, path: str, header: SegmentHeader) -> None:
        try:
            self._file = disk.open(path)
        except FileNotFoundError as error:
            raise Corruption(
                "a WAL segment's file is missing",
                hint=HINT,
                path=path,
                db_id=header.db_id,
                segment_id=header.segment_id,
            ) from error
        self._header = header

    def write(self, first_frame: int, entries: bytes) -> None:
        """Write the entries of frames from `first_frame` on; returns when they are durable. REQUIRES that the frames are."""
        geometry = self._header.geometry
        if first_frame < 0 or first_frame + len(entries) // ENTRY_BYTES > geometry.capacity:
            raise OutOfRange("the segment has no such entries", first=first_frame, capacity=geometry.capacity)
        self._file.write_at(entries, geometry.entry_offset(first_frame))
        hit("pages.segment.entries")
        self._file.sync()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()
