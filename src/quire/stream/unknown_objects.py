"""Objects of a stream's segments that neither its manifest log nor LMDB knows: found by listing the bucket, for a repair.

Rules
  1. Only what the current owner epoch has sent is taken. What is below the prefix of an earlier one may be the line of an owner
     that was deposed, and names without a store may be another store's: those are told and left.
  2. An object is believed when all of it was read: it is whole, and says that it is this segment of this stream.

Threads: functions without state. Memory: one frame and the table of a segment.
Raises `Corruption`, `FormatTooNew`, and what the object store raises.
"""

from __future__ import annotations

from collections.abc import Container
from typing import NamedTuple

from quire.core.errors import Corruption
from quire.core.ids import ArtifactKind
from quire.durable.names import parse_object_key
from quire.objects.api import ObjectInfo, list_objects
from quire.stream.mlog_modes import SegmentFacts
from quire.stream.mlog_tier2 import LogObjects
from quire.stream.warm import WARM_HEADER_BYTES, WarmReader, check_header, dictionary_of


class Strays(NamedTuple):
    """What a listing has found."""

    objects: dict[int, ObjectInfo]
    """By segment."""
    doubtful: list[str]
    """Keys of earlier epochs, and of the space that belongs to no store (rule 1)."""


def list_strays(objects: LogObjects, known: Container[int]) -> Strays:
    """The objects of segments that are not known."""
    found = Strays({}, [])
    for prefix in objects.prefixes:
        below = f"{prefix}/" if prefix else ""
        for info in list_objects(objects.store, f"{below}{objects.stream_id:08x}/"):
            key = parse_object_key(info.key.removeprefix(below))
            if key is None or key.kind is not ArtifactKind.WAL or key.id in known:
                continue
            if prefix and prefix == objects.prefixes[0]:
                found.objects[key.id] = info
            else:
                found.doubtful.append(info.key)
    return found


def read_stray(objects: LogObjects, segment_id: int, info: ObjectInfo) -> tuple[SegmentFacts, int]:
    """(what the segment is, the id behind it) by its object, read whole (rule 2)."""
    store, key = objects.store, info.key
    head = store.get_range(key, 0, min(WARM_HEADER_BYTES, info.size_bytes))
    reader = WarmReader(lambda offset, size: store.get_range(key, offset, size), info.size_bytes, path=key)
    header, checksum = reader.header(), reader.verify()
    whose = (objects.stream_id, segment_id)
    if check_header(head, path=key) != whose or (header.stream_id, header.segment_id) != whose:
        raise Corruption("it is another segment's", key=key)
    facts = SegmentFacts(
        base_offset=header.base_record,
        sealed=True,
        durable_bytes=reader.raw_bytes,
        segment_crc64=checksum,
        hot=False,
        key=key,
        etag=info.etag or "",
        packed=(info.size_bytes, dictionary_of(head, path=key)),
    )
    return facts, reader.end_record
