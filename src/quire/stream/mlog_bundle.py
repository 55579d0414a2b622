"""Bundles old chunks of a manifest log: one object instead of thousands, without losing history.

A bundle has the records of the chunks `first` to `last`, unchanged, in one object of the chunk format. It starts with a
`SnapshotMarker` that names its first chunk and the newest snapshot taken before it, 0 for none; the marker has no ordinal. A
period is a week (`bundle_seconds`) by the object store's clock.

plan → run → publish (K1). `plan` reads names and times, and the newest snapshot; `run` reads objects and writes one, needs
neither disk nor manifest, and may be killed or repeated: the same chunks give the same bytes, and a repeated run adopts them.
`publish` queues the chunks for deletion, after the whole bundle has been read back.

Threads: any (functions without state); `run` is importable on executors.
Raises: `ManifestIntegrityError`, `StalePlan`, and what the object store raises."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from quire.core.errors import StalePlan
from quire.durable.checksums import crc64
from quire.stream.mlog_format import (
    CHUNK_BYTES,
    NO_IDENTITY,
    NO_SEGMENT,
    SEALED,
    ChunkFacts,
    check_owner,
    damaged,
    encode_record,
    new_header,
)
from quire.stream.mlog_log import ManifestLog
from quire.stream.mlog_reader import Chunk, check_sequence
from quire.stream.mlog_records import SnapshotMarker
from quire.stream.mlog_tier2 import LogListing, LogObjects

if TYPE_CHECKING:
    from quire.objects.api import ObjectStore


class BundleTask(msgspec.Struct, frozen=True, kw_only=True):
    """The input of `run`: small and picklable."""

    stream_id: int
    first: int
    last: int
    prefix: str = ""


class BundleResult(msgspec.Struct, frozen=True, kw_only=True):
    """The result of `run`."""

    task: BundleTask
    key: str
    record_count: int
    size_bytes: int


def plan(objects: LogObjects, *, now_ms: int, period_seconds: float) -> list[BundleTask]:
    """Return the bundles that are due: runs of consecutive chunks of one period that has ended."""
    listing = objects.own_listing()
    before = _needed_from(objects, listing)
    period_ms = max(int(period_seconds * 1000), 1)
    runs: list[list[int]] = []
    last_period = None
    for index in sorted(index for index in listing.chunks if index < before and listing.bundle_of(index) is None):
        period = listing.chunks[index].modified_ms // period_ms
        # The current period may get further chunks, and the name of a bundle contains its last one.
        if period >= now_ms // period_ms:
            break
        if runs and runs[-1][-1] == index - 1 and period == last_period:
            runs[-1].append(index)
        else:
            runs.append([index])
        last_period = period
    return [
        BundleTask(stream_id=objects.stream_id, first=run[0], last=run[-1], prefix=objects.prefixes[0])
        for run in runs
        if len(run) > 1
    ]


def left_over(objects: LogObjects) -> list[BundleTask]:
    """Return the bundles of which some or all chunks still exist."""
    listing = objects.own_listing()
    return [
        BundleTask(stream_id=objects.stream_id, first=first, last=last, prefix=objects.prefixes[0])
        for first, last in sorted(listing.bundles)
        if any(first <= index <= last for index in listing.chunks)
    ]


def run(task: BundleTask, store: ObjectStore) -> BundleResult:
    """Read the chunks, write the bundle, and read it back."""
    objects = LogObjects(store, task.stream_id, (task.prefix,))
    chunks: list[Chunk] = []
    for index in range(task.first, task.last + 1):
        chunk = objects.get_chunk(index)
        if chunk is None:
            raise StalePlan("a chunk of the bundle is missing", hint="plan again", stream=task.stream_id, chunk=index)
        check_sequence(chunk.header, chunks[-1].facts.next_record if chunks else None, is_last=False)
        chunks.append(chunk)
    data = bundle_bytes(chunks, snapshot_id=_snapshot_before(objects, chunks[0]))
    key = objects.bundle_key(task.first, task.last)
    store.put(key, data, create_only=True, identity=lambda existing: existing.read_all() == data)
    written = objects.get_bundle(task.first, task.last)
    count = sum(len(chunk.offsets) for chunk in chunks)
    if written is None or len(written.offsets) != count:
        raise damaged("the stored bundle differs from what was written", chunk=task.first, offset=0, key=key)
    return BundleResult(task=task, key=key, record_count=count, size_bytes=len(data))


def publish(log: ManifestLog, result: BundleResult) -> list[str]:
    """Queue the chunks of a bundle for deletion, and return their keys. `tick` deletes them, then records `Tier2Deleted` for
    each."""
    assert log.objects is not None
    task = result.task
    if log.objects.get_bundle(task.first, task.last) is None:
        raise StalePlan("the bundle is missing", hint="run it again", key=result.key)
    chunks = log.objects.own_listing().chunks
    keys = [log.objects.chunk_key(index) for index in range(task.first, task.last + 1) if index in chunks]
    log.queue_own_deletes(keys)
    return keys


def bundle_bytes(chunks: list[Chunk], *, snapshot_id: int) -> bytes:
    """Return the bytes of the bundle of these chunks."""
    first, last = chunks[0], chunks[-1]
    marker = encode_record(
        SnapshotMarker.TYPE,
        NO_SEGMENT,
        SnapshotMarker(first.index, CHUNK_BYTES, snapshot_id).encode(),
        timestamp_ms=next(first.records()).timestamp_ms,
    )
    body = marker + b"".join(chunk.data[CHUNK_BYTES : chunk.header.committed_len] for chunk in chunks)
    header = new_header(
        chunk_index=first.index,
        base_record=first.header.base_record,
        committed_len=CHUNK_BYTES + len(body),
        chunk_crc64=crc64(body),
        flags=SEALED,
    )
    count = 1 + sum(len(chunk.offsets) for chunk in chunks)
    identity = next((chunk.identity for chunk in chunks if chunk.identity != NO_IDENTITY), NO_IDENTITY)
    for chunk in chunks:
        check_owner(chunk.identity, identity, chunk=chunk.index, path="")
    return header.encode() + body + ChunkFacts(header, count, last.snapshot_id, identity).encode()


def _needed_from(objects: LogObjects, listing: LogListing) -> int:
    """Return the first chunk that a reader needs if it starts from the newest snapshot in tier 2; 0 without a snapshot."""
    newest = max(listing.snapshots, default=None)
    return 0 if newest is None else objects.get_snapshot(newest).position.chunk_index


def _snapshot_before(objects: LogObjects, first: Chunk) -> int:
    """Return the snapshot id of the newest marker before a chunk, as stated in the preceding chunk or bundle."""
    if first.index == 0:
        return 0
    before = objects.fetch(first.index - 1)
    return 0 if before is None else before.snapshot_id
