"""Recovers the state of a manifest log from its files, and compares its chunks with tier 2.

Recovery reads the newest valid snapshot and the chunks from its position on, so its cost does not depend on the length of the
history. A chunk that is no longer on disk is read from tier 2. A damaged snapshot is skipped. A damaged chunk, or a log that
ends before its newest snapshot, ends recovery with `ManifestIntegrityError`: nothing is changed, and nothing after the damage
is used.

Threads: any (functions without state). Raises: `ManifestIntegrityError`, and what disk and object store raise."""

from __future__ import annotations

from contextlib import closing

import msgspec

from quire.core.clock import Clock
from quire.core.errors import AlreadyExists, ManifestIntegrityError, ObjectNotFound
from quire.core.events import emit
from quire.durable.files import Disk, write_atomic
from quire.durable.names import ManifestLogFile
from quire.durable.quarantine import move
from quire.stream.files import LogFiles
from quire.stream.metrics import count_crc_error
from quire.stream.mlog_format import (
    CHUNK_BYTES,
    COPY_BYTES,
    UPLOADED,
    ChunkFacts,
    check_owner,
    damaged,
    decode_copy,
    log_fields,
)
from quire.stream.mlog_index import ManifestIndex, replay
from quire.stream.mlog_reader import START, Chunk, Fetch, LogPosition, ManifestLogReader, load_chunk
from quire.stream.mlog_snapshot import LogSnapshot, newest_snapshots
from quire.stream.mlog_tier2 import LogObjects, is_same, object_bytes
from quire.stream.mlog_writer import SHRINK_BYTES_MIN, shrink, write_header


class RecoveredLog(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """The recovered state of a log."""

    index: ManifestIndex
    snapshot_id: int
    """The snapshot from which it was rebuilt; 0 for none."""
    snapshot_position: LogPosition
    end: LogPosition
    """The position after the last committed record, or of the first record of an empty log."""
    replayed: int
    """Records folded after the snapshot."""
    seconds: float
    uploaded_upto: int


def recover(files: LogFiles, clock: Clock, fetch: Fetch | None = None) -> RecoveredLog:
    """Recover the state of a log. Modifies nothing."""
    began = clock.monotonic()
    base: LogSnapshot | None = None
    for snapshot in newest_snapshots(files):
        if not isinstance(snapshot, ManifestIntegrityError):
            base = snapshot
            break
        count_crc_error(files.stream_id)
        emit("warning", "stream.mlog.snapshot_damaged", stream=files.stream_id, **log_fields(snapshot))
    index = base.index if base is not None else ManifestIndex()
    before = index.records
    position = base.position if base is not None else START
    end = _replay_from(files, fetch, index, base)
    return RecoveredLog(
        index=index,
        snapshot_id=base.snapshot_id if base is not None else 0,
        snapshot_position=position,
        end=end,
        replayed=index.records - before,
        seconds=clock.monotonic() - began,
        uploaded_upto=base.uploaded_upto if base is not None else 0,
    )


def _replay_from(files: LogFiles, fetch: Fetch | None, index: ManifestIndex, base: LogSnapshot | None) -> LogPosition:
    start = base.position if base is not None else START
    last: Chunk | None = None
    for chunk in ManifestLogReader(files, fetch).chunks(start.chunk_index):
        if base is not None and last is None and chunk.index == chunk.last_index == start.chunk_index:
            ordinal = chunk.header.base_record + chunk.place(start.offset)
            if ordinal != index.records:
                raise damaged(
                    "the snapshot's position is not that of its last record",
                    chunk=chunk.index,
                    offset=start.offset,
                    snapshot=base.snapshot_id,
                )
        replay(index, [chunk])
        last = chunk
    if last is not None:
        return LogPosition(last.index + 1, CHUNK_BYTES) if last.header.sealed else last.end
    # A snapshot at the beginning of a chunk may be all there is: a chunk's file is created with its first record.
    if start.offset != CHUNK_BYTES:
        raise damaged("the log ends before its newest snapshot", chunk=start.chunk_index, offset=start.offset)
    return start


# ── chunks in tier 2 ──────────────────────────────────────────────────────────────────────────────────────────────────
def local_facts(disk: Disk, files: LogFiles, index: int) -> ChunkFacts:
    """Return the facts of a local chunk, with one small read if its commit copy is valid."""
    path = files.chunk(index)
    with closing(disk.open(path, write=False)) as file:
        size = file.size()
        tail = file.read_at(CHUNK_BYTES + COPY_BYTES, max(size - CHUNK_BYTES - COPY_BYTES, 0))
        copy = decode_copy(tail)
        if copy is not None and file.read_at(CHUNK_BYTES, 0) == copy.header.encode():
            check_owner(copy.identity, files.identity, chunk=index, path=path)
            return copy
        return load_chunk(file.read_at(size, 0), chunk_index=index, path=path, owner=files.identity).facts


def mark_uploaded(files: LogFiles, index: int) -> None:
    """Set bit 1 of the header: the chunk's object is durable (S3)."""
    with closing(files.disk.open(files.chunk(index))) as file:
        size = file.size()
        chunk = load_chunk(file.read_at(size, 0), chunk_index=index, path=file.path, owner=files.identity)
        if not chunk.header.uploaded:
            header = chunk.header._replace(flags=chunk.header.flags | UPLOADED)
            facts = chunk.facts._replace(header=header)
            write_header(file, size, facts)
            if header.sealed and size - COPY_BYTES - header.committed_len >= SHRINK_BYTES_MIN:
                shrink(file, facts)  # it was sealed by a version that did not shrink sealed chunks


def restore_chunk(files: LogFiles, objects: LogObjects, index: int) -> None:
    """Replace the damaged or missing file of a sealed chunk with its object; raise `ObjectNotFound` if it has none."""
    chunk = objects.get_chunk(index)
    if chunk is None:
        raise ObjectNotFound(
            "the chunk has no object in tier 2", hint="restore the file from a copy", key=objects.chunk_key(index)
        )
    write_atomic(files.disk, files.chunk(index), object_bytes(chunk))
    mark_uploaded(files, index)


def restore_log(files: LogFiles, objects: LogObjects, *, at_ms: int) -> list[int]:
    """Restore from tier 2 the chunks that the log lacks at its end, and the snapshot before them if there is no local one;
    return the chunks.

    A local chunk that is not sealed although its object is, is moved to quarantine: the uploaded one is newer.
    """
    listing, here = objects.listing(), files.chunks()
    start = here[-1] if here else 0
    if not here and not files.snapshots() and listing.snapshots:
        newest = max(listing.snapshots)
        snapshot, data = objects.fetch_snapshot(newest)
        start = snapshot.position.chunk_index
        write_atomic(files.disk, files.snapshot(newest), data)
    restored = []
    for index in sorted(index for index in listing.chunks if index >= start):
        if index in here:
            if local_facts(files.disk, files, index).header.sealed:
                continue
            path = ManifestLogFile(stream_id=files.stream_id, chunk_index=index).path
            why = "the chunk is not sealed here, but was uploaded sealed"
            move(files.disk, files.root, path, why=why, at_ms=at_ms, database=files.stream_id)
        restore_chunk(files, objects, index)
        restored.append(index)
    return restored


class Reconciled(msgspec.Struct):
    """The result of a comparison with tier 2."""

    present: list[int] = msgspec.field(default_factory=list)
    """Sealed chunks on disk whose objects exist and are the same."""
    rebuilt: list[int] = msgspec.field(default_factory=list)
    """Chunks whose objects were missing and have been uploaded again."""
    chunks_needing_repair: dict[int, str] = msgspec.field(default_factory=dict)
    """Chunks whose object is a different one or damaged, with the reason."""


def reconcile(files: LogFiles, objects: LogObjects, start: int) -> Reconciled:
    """Compare the sealed chunks on disk from `start` on with their objects, and upload missing ones.

    The cost depends on the chunks on this disk, not on the length of the history: tier 2 is not listed.
    """
    result = Reconciled()
    for number in files.chunks():
        if number < start or not (local := local_facts(files.disk, files, number)).header.sealed:
            continue
        try:
            what = _differs(objects, number, local)
        except ObjectNotFound:
            _rebuild(files, objects, number, result)
            continue
        if what is not None:
            result.chunks_needing_repair[number] = what
            continue
        result.present.append(number)
        if not local.header.uploaded:
            mark_uploaded(files, number)
    for number, what in result.chunks_needing_repair.items():
        emit("error", "stream.mlog.needs_repair", stream=files.stream_id, chunk_index=number, what=what)
    return result


def objects_apart(files: LogFiles, objects: LogObjects) -> dict[int, str]:
    """Return the chunks of the whole history whose objects are missing or different, with the reason. Chunks that are not
    uploaded yet are not included.

    Lists tier 2 and changes nothing. For a chunk that is not on disk, it is enough that its object or its bundle is listed.
    """
    listing = objects.listing()
    local = {number: local_facts(files.disk, files, number) for number in files.chunks()}
    apart: dict[int, str] = {}
    for number in range(max([*local, *listing.chunks, *(last for _, last in listing.bundles)], default=-1) + 1):
        facts = local.get(number)
        if facts is not None and not facts.header.sealed:
            continue
        what: str | None = None
        if number in listing.chunks:
            what = _differs(objects, number, facts) if facts is not None else None
        elif listing.bundle_of(number) is None:
            if facts is None:
                what = "it is neither on disk nor in tier 2"
            elif facts.header.uploaded:
                what = "its object is missing; it can be uploaded again from here"
        if what is not None:
            apart[number] = what
    return apart


def _differs(objects: LogObjects, number: int, local: ChunkFacts) -> str | None:
    try:
        facts = objects.facts(number)
    except ManifestIntegrityError as error:
        return f"its object is damaged: {error.what}"
    return None if is_same(facts, local) else "its object belongs to a different chunk"


def _rebuild(files: LogFiles, objects: LogObjects, number: int, result: Reconciled) -> None:
    chunk = ManifestLogReader(files).chunk(number)
    try:
        objects.put_chunk(chunk)
    except AlreadyExists as error:  # created since the lookup, with other contents
        result.chunks_needing_repair[number] = error.what
        return
    mark_uploaded(files, number)
    result.rebuilt.append(number)
