"""The objects of one manifest log in tier 2: sealed chunks, snapshots, bundles.

Objects are written once: a second put of the same chunk adopts the existing object; a different chunk under its name is
`AlreadyExists`. Objects are verified like files when they are read. Each owner epoch writes below its own prefix (A1). After a
takeover the log continues in the new epoch where it ended for the directory that took over: objects of an earlier epoch at or
after the first chunk of a later one belong to a deposed owner's history, and are not listed. The first chunk of an epoch is
known before the epoch has an object: the stream records it (`begins` in `stream.json`).

Importable on executors. Threads: any. Format: docs/formats/manifest-log.md.
Raises: `ManifestIntegrityError`, and what the object store raises."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec

from quire.core.checked_read import checked_read
from quire.core.errors import ObjectNotFound
from quire.core.ids import U64_MAX
from quire.durable import object_names
from quire.durable.object_names import manifest_log_key, parse_epoch_key, parse_manifest_log_key
from quire.objects.api import list_objects
from quire.stream.mlog_format import (
    CHUNK_BYTES,
    CHUNK_FILE_BYTES_MAX,
    COPY_BYTES,
    ChunkFacts,
    Identity,
    check_owner,
    damaged,
    decode_copy,
    identity_of,
)
from quire.stream.mlog_reader import Chunk, load_chunk
from quire.stream.mlog_snapshot import LogSnapshot, decode_snapshot

if TYPE_CHECKING:
    from quire.objects.api import ExistingObject, ObjectInfo, ObjectStore, PutResult


SNAPSHOT_BYTES_MAX = 1 << 30
"""At some hundred bytes per segment, more than a stream ever has."""


class EpochBegin(msgspec.Struct, frozen=True):
    """Where a log continues for an owner epoch. Objects of earlier epochs after it were written by a deposed owner."""

    owner_epoch: int
    chunk: int
    """The first chunk that this epoch writes to."""
    snapshot: int
    """The newest snapshot before it; 0 for none."""


class LogListing(msgspec.Struct, frozen=True):
    """The objects of a log by kind."""

    chunks: dict[int, ObjectInfo] = msgspec.field(default_factory=dict)
    bundles: dict[tuple[int, int], ObjectInfo] = msgspec.field(default_factory=dict)
    snapshots: dict[int, ObjectInfo] = msgspec.field(default_factory=dict)

    def bundle_of(self, index: int) -> tuple[int, int] | None:
        """Return the (first, last) chunk of the bundle that contains a chunk; `None` if there is none."""
        return next((span for span in sorted(self.bundles) if span[0] <= index <= span[1]), None)


class LogObjects(msgspec.Struct, frozen=True):
    """The objects of one stream's manifest log: read below several prefixes of a store, written below the first of them."""

    store: ObjectStore
    stream_id: int
    prefixes: tuple[str, ...] = ("",)
    """One for each owner epoch, the current one first."""
    store_id: str = ""
    """The store's id, which the log's chunks carry. Empty if it is unknown: then chunks of any store are accepted."""
    begins: tuple[EpochBegin, ...] = ()
    """The recorded beginnings of epochs."""

    @property
    def owner_epoch(self) -> int:
        """The current owner epoch; 0 if there is none."""
        return _epoch_of(self.prefixes[0])

    @property
    def identity(self) -> Identity:
        return identity_of(self.store_id, self.stream_id)

    def chunk_key(self, index: int) -> str:
        return self._key(manifest_log_key(self.stream_id, index))

    def bundle_key(self, first: int, last: int) -> str:
        return self._key(object_names.bundle_key(self.stream_id, first, last))

    def snapshot_key(self, snapshot_id: int) -> str:
        return self._key(object_names.snapshot_key(self.stream_id, snapshot_id))

    def listing(self) -> LogListing:
        """List the log's objects of all epochs."""
        listing = self.own_listing()
        begins = {begin.owner_epoch: begin for begin in self.begins}
        first = newest = U64_MAX
        for later, prefix in zip(self.prefixes, self.prefixes[1:]):
            if (begin := begins.get(_epoch_of(later))) is not None:
                first, newest = min(first, begin.chunk), min(newest, begin.snapshot)
            # The first object of a later epoch also marks where it began, if `stream.json` does not say.
            first = min([first, *listing.chunks, *(span[0] for span in listing.bundles)])
            earlier = self._listed(prefix)
            for index, info in earlier.chunks.items():
                if index < first:
                    listing.chunks.setdefault(index, info)
            for span, info in earlier.bundles.items():
                if span[1] < first:
                    listing.bundles.setdefault(span, info)
            for snapshot_id, info in earlier.snapshots.items():
                if snapshot_id <= newest:
                    listing.snapshots.setdefault(snapshot_id, info)
        return listing

    def own_listing(self) -> LogListing:
        """List the objects that the current epoch has written."""
        return self._listed(self.prefixes[0])

    def _listed(self, prefix: str) -> LogListing:
        listing = LogListing()
        cut = len(prefix) + 1 if prefix else 0
        for info in list_objects(self.store, _under(prefix, object_names.log_prefix(self.stream_id))):
            key = info.key[cut:]
            if chunk := parse_manifest_log_key(key):
                listing.chunks[chunk[1]] = info
            elif bundle := object_names.parse_bundle_key(key):
                listing.bundles[bundle[1:]] = info
            elif snapshot := object_names.parse_snapshot_key(key):
                listing.snapshots[snapshot[1]] = info
        return listing

    def _find(self, own: str, listed: Callable[[LogListing], ObjectInfo | None]) -> tuple[str, int]:
        """Return key and size of an object: below the current prefix, or where it is listed if it exists only below an earlier
        one."""
        try:
            return own, self.store.head(own).size_bytes
        except ObjectNotFound:
            if len(self.prefixes) == 1 or (info := listed(self.listing())) is None or info.key == own:
                raise
            return info.key, self.store.head(info.key).size_bytes

    def _get(self, own: str, listed: Callable[[LogListing], ObjectInfo | None], limit: int) -> tuple[str, bytes]:
        """Return the key and bytes of an object. Its size is checked against `limit` first: bucket contents are not trusted."""
        key, size = self._find(own, listed)
        if size > limit:
            raise damaged("an object of the log exceeds its maximum size", chunk=0, offset=0, key=key, size=size)
        return key, self.store.get(key)

    # ── chunks ────────────────────────────────────────────────────────────────────────────────────────────────────────
    def put_chunk(self, chunk: Chunk) -> PutResult:
        """Upload a sealed chunk: its committed bytes, and the commit copy as its metadata."""
        data = object_bytes(chunk)

        def same(existing: ExistingObject) -> bool:
            header = decode_copy(existing.read_tail(CHUNK_BYTES + COPY_BYTES))
            return header is not None and is_same(header, chunk.facts) and existing.info.size_bytes == len(data)

        return self.store.put(self.chunk_key(chunk.index), data, create_only=True, identity=same)

    def get_chunk(self, index: int) -> Chunk | None:
        """Read and verify a chunk that has its own object; `None` if it has none."""
        return self._read_chunk(index)

    def get_bundle(self, first: int, last: int) -> Chunk | None:
        """Read and verify a bundle; `None` if it does not exist. Its records do not include its first one, the marker."""
        return self._read_chunk(first, last)

    def _read_chunk(self, first: int, last: int | None = None) -> Chunk | None:
        def read() -> Chunk:
            key, data = self._chunk_data(first, last)
            return load_chunk(data, chunk_index=first, last_index=last, path=key, owner=self.identity)

        try:
            return checked_read(read)
        except ObjectNotFound:
            return None

    def _chunk_data(self, first: int, last: int | None) -> tuple[str, bytes]:
        """Return key and bytes of the object of a chunk, or with `last` of a bundle."""
        if last is None:
            return self._get(self.chunk_key(first), lambda there: there.chunks.get(first), CHUNK_FILE_BYTES_MAX)
        own, span = self.bundle_key(first, last), (first, last)
        return self._get(own, lambda there: there.bundles.get(span), (last - first + 1) * CHUNK_FILE_BYTES_MAX)

    def facts(self, index: int) -> ChunkFacts:
        """Return the facts of a chunk's object, with one small read."""
        return checked_read(lambda: self._read_facts(index))

    def _read_facts(self, index: int) -> ChunkFacts:
        key, size = self._find(self.chunk_key(index), lambda there: there.chunks.get(index))
        length = min(size, CHUNK_BYTES + COPY_BYTES)
        facts = decode_copy(self.store.get_range(key, size - length, length))
        if facts is None or facts.header.committed_len + COPY_BYTES != size or facts.header.chunk_index != index:
            raise damaged("the object's commit copy is damaged", chunk=index, offset=size - COPY_BYTES, key=key)
        check_owner(facts.identity, self.identity, chunk=index, path=key)
        return facts

    def check(self, first: int, last: int | None = None) -> None:
        """Read the object of a chunk, or with `last` of a bundle, and verify every byte including the header: readers fall back
        to the commit copy and would not notice the damage. An object that no longer exists is not an error."""
        checked_read(lambda: self._check(first, last))

    def _check(self, first: int, last: int | None) -> None:
        try:
            key, data = self._chunk_data(first, last)
        except ObjectNotFound:
            return
        load_chunk(data, chunk_index=first, last_index=last, path=key, owner=self.identity)
        copy = decode_copy(data)
        if copy is None or copy.header.committed_len + COPY_BYTES != len(data):
            raise damaged("the object's commit copy is damaged", chunk=first, offset=len(data) - COPY_BYTES, key=key)
        if data[:CHUNK_BYTES] != copy.header.encode():
            raise damaged("the object's header differs from its commit copy", chunk=first, offset=0, key=key)

    def fetch(self, index: int) -> Chunk | None:
        """Return a chunk, or the bundle that contains it; `None` if neither exists."""
        chunk = self.get_chunk(index)
        if chunk is not None:
            return chunk
        span = self.listing().bundle_of(index)
        return None if span is None else self.get_bundle(*span)

    # ── snapshots ─────────────────────────────────────────────────────────────────────────────────────────────────────
    def put_snapshot(self, snapshot_id: int, data: bytes) -> PutResult:
        """Upload a snapshot."""
        key = self.snapshot_key(snapshot_id)
        return self.store.put(key, data, create_only=True, identity=lambda existing: existing.read_all() == data)

    def get_snapshot(self, snapshot_id: int) -> LogSnapshot:
        """Read and verify a snapshot."""
        return self.fetch_snapshot(snapshot_id)[0]

    def fetch_snapshot(self, snapshot_id: int) -> tuple[LogSnapshot, bytes]:
        """Read and verify a snapshot; return it with its bytes."""
        own = self.snapshot_key(snapshot_id)

        def read() -> tuple[LogSnapshot, bytes]:
            key, data = self._get(own, lambda there: there.snapshots.get(snapshot_id), SNAPSHOT_BYTES_MAX)
            return decode_snapshot(data, snapshot_id=snapshot_id, path=key), data

        return checked_read(read)

    def _key(self, suffix: str) -> str:
        return _under(self.prefixes[0], suffix)


def _epoch_of(prefix: str) -> int:
    name = parse_epoch_key(_under(prefix, "0"))
    return name[1] if name is not None else 0


def _under(prefix: str, suffix: str) -> str:
    return f"{prefix}/{suffix}" if prefix else suffix


def object_bytes(chunk: Chunk) -> bytes:
    """Return the bytes that are uploaded for a chunk. The flag `UPLOADED` is cleared: it is set only in the local file."""
    header = chunk.header._replace(flags=chunk.header.flags & 1)
    facts = chunk.facts._replace(header=header)
    return header.encode() + chunk.data[CHUNK_BYTES : header.committed_len] + facts.encode()


def is_same(one: ChunkFacts, other: ChunkFacts) -> bool:
    """Return whether two facts describe the same chunk, regardless of flags."""
    return _contents(one) == _contents(other) and one.identity.fits(other.identity)


def _contents(facts: ChunkFacts) -> tuple[int, ...]:
    header = facts.header
    return header.chunk_index, header.base_record, header.committed_len, header.chunk_crc64, facts.record_count
