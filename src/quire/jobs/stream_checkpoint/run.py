"""Seeing that the segments which are to be published are there: nothing is written, and no body is read.

Rules
  1. A copy is enough: the file as it was written, the compressed one, or the object. Which bytes it has is verification's
     business (`jobs/stream_verify`).
  2. A segment of which no copy is seen is told, and not published: it may have moved between two looks, or is damage that
     whoever reads the stream hears of.

Safe to run on an executor. Raises what disk and object store raise.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from quire.core.errors import ObjectNotFound
from quire.durable.failpoints import hit
from quire.durable.files import Disk
from quire.jobs.locations import OpenStore


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentToSee:
    """Where copies of a segment may be."""

    segment_id: int
    hot: str
    warm: str
    url: str
    object_key: str
    """Empty: there is no object."""
    used_bytes: int


def see(segments: Iterable[SegmentToSee], *, disk: Disk, open_store: OpenStore) -> set[int]:
    """Those of which a copy is there."""
    found = {each.segment_id for each in segments if _is_there(each, disk, open_store)}
    hit("jobs.stream_checkpoint.seen")
    return found


def _is_there(segment: SegmentToSee, disk: Disk, open_store: OpenStore) -> bool:
    if _size(disk, segment.hot) >= segment.used_bytes or _size(disk, segment.warm) > 0:
        return True
    if not segment.object_key:
        return False
    try:
        open_store(segment.url).head(segment.object_key)
    except ObjectNotFound:
        return False
    return True


def _size(disk: Disk, path: str) -> int:
    try:
        file = disk.open(path, write=False)
    except FileNotFoundError:
        return 0
    try:
        return file.size()
    finally:
        file.close()
