"""The write-ahead log of a key-value database: a sequence of batches in the order of their lsns.

A batch is one record of a framed log (`durable/log_format.py`), so it is atomic. An append reaches the operating system before
it returns, and survives the death of the process; only `sync` makes it survive power loss. After a failed append or sync the
log refuses writes. A log that belongs to another database, has another number, or is shorter than its recorded end
(witnesses.py) is `Corruption`: damage below the recorded end is never mistaken for a torn tail.

Threads: appends under the engine's write lock; `sync` in any thread. Format page: `docs/formats/lsm-wal.md`.
Raises `StoreUnusable`, `OutOfRange` (a batch above 64 MiB), `Corruption`."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing, suppress
from itertools import accumulate
from typing import NamedTuple

from quire.core.errors import Corruption, InvalidInput, OutOfRange, StorageFault, StoreClosed
from quire.core.limits import KIB, MIB
from quire.durable.failpoints import hit
from quire.durable.files import Disk, DiskLayer, File, FileLayer, drop_cached_pages
from quire.durable.log_format import NAMED_HEADER_BYTES, decode_header
from quire.durable.log_reader import LogContents, LogEnd
from quire.durable.log_writer import LogWriter
from quire.lsm.witnesses import REPAIR, Owner

LOG_KIND = b"lsmw"

HEAD = struct.Struct("<QI")
"""lsn, keys in the batch"""
HEAD_BYTES = 12
ONE = struct.Struct("<QIII")
"""The header of a batch with one key: lsn, 1, bytes of the key, bytes of the value"""
DELETED = 0xFFFFFFFF
"""In place of a value's size: the key is deleted."""
KEYED = 0x80000000
"""Flag in the count: the idempotency key of the call follows the header, as a u64."""
CARRIED = 0x40000000
"""Flag in the count: not a batch, but idempotency keys carried over from earlier logs, which are removed when they are flushed;
pairs of key and lsn."""
KEY = struct.Struct("<Q")
PAIR = struct.Struct("<QQ")

if HEAD.size != HEAD_BYTES or ONE.size != HEAD_BYTES + 8:
    raise AssertionError("the WAL's structs disagree with their literal sizes")

Buffer = bytes | bytearray | memoryview
"""The types accepted for keys and values; any other object with the buffer protocol works too."""
Items = Mapping[bytes, bytes | None]
KEY_BYTES_MAX = 64 * KIB - 1
VALUE_BYTES_MAX = 32 * MIB
"""Limited because a batch is one record of the WAL, at most 64 MiB, and a block of a table holds whole values."""


def as_bytes(key: Buffer) -> bytes:
    """Convert a key or value to bytes. Any object with the buffer protocol is accepted.

    >>> as_bytes(bytearray(b"ab")), as_bytes(memoryview(b"abcd")[::2])
    (b'ab', b'ac')
    """
    if type(key) is bytes:
        return key
    try:
        return bytes(memoryview(key))
    except TypeError:
        text = "keys and values must be bytes"
        raise InvalidInput(text, hint="encode them first", type=type(key).__name__) from None


def checked_batch(batch: Mapping[bytes, Buffer | None]) -> Items:
    """Validate a batch, and copy it to bytes if needed: a caller may modify a bytearray after the call."""
    for key, value in batch.items():
        if type(key) is not bytes or not (value is None or type(value) is bytes):
            owned = {as_bytes(key): None if value is None else as_bytes(value) for key, value in batch.items()}
            return checked_batch(owned)
        if len(key) > KEY_BYTES_MAX:
            raise OutOfRange("a key is too long", size=len(key), max=KEY_BYTES_MAX)
        if value is not None and len(value) > VALUE_BYTES_MAX:
            raise OutOfRange("a value is too long", size=len(value), max=VALUE_BYTES_MAX)
    return batch  # type: ignore[return-value]  # the loop has checked that all are bytes


class WalBatch(NamedTuple):
    """A record of the log."""

    lsn: int
    items: dict[bytes, bytes | None]
    """Empty if the record only carries keys."""
    size: int
    calls: tuple[tuple[int, int], ...] = ()
    """Idempotency keys, with the lsns of their batches."""


def encode_batch(lsn: int, items: Items, key: int = 0) -> bytes:
    """Encode a batch: header, the call's key if it has one, sizes of the keys, sizes of the values, keys, values.

    >>> encode_batch(7, {b"k": b"v", b"old": None}).hex()
    '070000000000000002000000010000000300000001000000ffffffff6b6f6c6476'
    """
    if len(items) == 1 and not key:
        ((only, value),) = items.items()
        if value is None:
            return ONE.pack(lsn, 1, len(only), DELETED) + only
        return ONE.pack(lsn, 1, len(only), len(value)) + only + value
    count = len(items)
    sizes = [DELETED if value is None else len(value) for value in items.values()]
    head = HEAD.pack(lsn, count | KEYED) + KEY.pack(key) if key else HEAD.pack(lsn, count)
    return b"".join(
        (head, struct.pack(f"<{2 * count}I", *map(len, items), *sizes), *items, *filter(None, items.values()))
    )


def encode_carried(lsn: int, calls: Iterable[tuple[int, int]]) -> bytes:
    """Encode the record that carries idempotency keys over into a new log. `lsn`: the last lsn assigned so far."""
    pairs = [PAIR.pack(key, at) for key, at in calls]
    return HEAD.pack(lsn, len(pairs) | CARRIED) + b"".join(pairs)


def decode_batch(record: bytes, path: str, offset: int) -> WalBatch:
    """Decode a record. `path` and `offset` are used in error messages."""
    try:
        lsn, count = HEAD.unpack_from(record)
        if count & CARRIED:
            return _carried(record, lsn, count & ~CARRIED, path, offset)
        start, calls = HEAD_BYTES, tuple[tuple[int, int], ...]()
        if count & KEYED:
            count, start = count & ~KEYED, HEAD_BYTES + KEY.size
            calls = ((KEY.unpack_from(record, HEAD_BYTES)[0], lsn),)
        if 8 * count > len(record):  # before allocating by an untrusted count
            raise _corrupt(path, offset, "its sizes do not fit")
        sizes = struct.unpack_from(f"<{2 * count}I", record, start)
    except struct.error as error:
        raise _corrupt(path, offset, str(error)) from error
    start += 8 * count
    lengths = [*sizes[:count], *(0 if size == DELETED else size for size in sizes[count:])]
    ends = list(accumulate(lengths, initial=start))
    if ends[-1] != len(record) or not count:
        raise _corrupt(path, offset, "its sizes do not fit")
    keys = [record[ends[at] : ends[at + 1]] for at in range(count)]
    values = (None if sizes[at] == DELETED else record[ends[at] : ends[at + 1]] for at in range(count, 2 * count))
    return WalBatch(lsn, dict(zip(keys, values)), len(record), calls)


def _carried(record: bytes, lsn: int, count: int, path: str, offset: int) -> WalBatch:
    if HEAD_BYTES + PAIR.size * count != len(record):
        raise _corrupt(path, offset, "its keys do not fit")
    return WalBatch(lsn, {}, len(record), tuple(PAIR.iter_unpack(record[HEAD_BYTES:])))


AHEAD_BYTES = 256 * KIB
SMALL_BYTES = 8 * KIB
"""Writes above this do not fill ahead."""

_ZEROS = bytes(AHEAD_BYTES)


class AheadFile(FileLayer):
    """An append-only file that is zero-filled ahead of its end, so that syncs after small appends are cheap.

    A sync after an append must also make the file's new size and extents durable, which costs a commit of the file system's
    journal. Over zeros that are already on disk a sync writes data only (measured: about half the time). After a crash a reader
    of the log treats the zeros as a torn tail, like any other bytes after the last record. One writer at a time.
    """

    __slots__ = ("_end", "_filled", "_open")

    def __init__(self, inner: File) -> None:
        super().__init__(inner)
        self._end = self._filled = inner.size()
        self._open = True

    def write_at(self, data: bytes | bytearray | memoryview, offset: int) -> None:
        end = offset + len(data)
        if end > self._filled:
            # Before the data: it may begin below `_filled` and end above it, and the zeros overlap that part.
            if len(data) <= SMALL_BYTES:
                with suppress(StorageFault):  # only an optimisation: on a full disk the write proceeds without it
                    self._inner.write_at(_ZEROS, self._filled)
                    self._filled += AHEAD_BYTES
            self._filled = max(self._filled, end)
        self._inner.write_at(data, offset)
        self._end = max(self._end, end)

    def truncate(self, size: int) -> None:
        self._inner.truncate(size)
        self._end = self._filled = size

    def drop_cached_pages(self) -> None:
        drop_cached_pages(self._inner)

    def close(self) -> None:
        if self._open:
            self._open = False
            try:
                # So that the file ends with the closing mark: zeros after it would look like a torn tail.
                if self._filled > self._end:
                    with suppress(StorageFault):
                        self._inner.truncate(self._end)
            finally:
                self._inner.close()


class AheadDisk(DiskLayer):
    """A disk whose `open` returns an `AheadFile` for an existing file that is opened for writing."""

    def open(self, path: str, *, create: bool = False, exclusive: bool = False, write: bool = True) -> File:
        file = self._inner.open(path, create=create, exclusive=exclusive, write=write)
        # Not for a file that is being created: a log gets its header, is renamed, and only then opened for appending.
        return AheadFile(file) if write and not create and not exclusive else file


class KvWal:
    """One write-ahead log, open for appending."""

    def __init__(self, number: int, log: LogWriter) -> None:
        self.number = number
        self._log = log

    @classmethod
    def create(cls, disk: Disk, path: str, number: int, owner: Owner) -> KvWal:
        """Create an empty log."""
        identity = owner.identity(number)
        # `replace`: a rotation that failed or crashed may have left an empty log with this number.
        return cls(number, LogWriter.create(AheadDisk(disk), path, kind=LOG_KIND, identity=identity, replace=True))

    @classmethod
    def open(
        cls, disk: Disk, path: str, number: int, owner: Owner, recorded: LogEnd | None = None
    ) -> tuple[KvWal, LogContents]:
        """Open an existing log, cut its torn tail, and return it with its contents."""
        try:
            # Before its torn tail is cut: the file may belong to another database.
            require_owner(disk, path, number, owner, recorded)
            log, contents = LogWriter.open(AheadDisk(disk), path, kind=LOG_KIND, vouched=recorded)
        except FileNotFoundError:
            raise Corruption("a write-ahead log is missing", hint=REPAIR, path=path, number=number) from None
        return cls(number, log), contents

    @property
    def path(self) -> str:
        return self._log.path

    @property
    def end(self) -> int:
        """Offset of the next record."""
        return self._log.end

    def durable_end(self) -> LogEnd:
        """Return how far the log is durable, to be recorded in LMDB."""
        return self._log.durable_end()

    def append(self, record: bytes) -> int:
        """Append a record. Return the offset of its end."""
        end = self._log.append_many((record,))
        hit("lsm.wal.appended")
        return end

    def sync(self, upto: int) -> None:
        """Make everything below `upto` durable. Concurrent callers share one sync."""
        log = self._log
        if log.durable < upto:
            try:
                log.sync(upto)
            except StoreClosed:
                if log.durable < upto:  # else the closing thread has synced it
                    raise
            hit("lsm.wal.synced")

    def close(self) -> None:
        """Sync and close."""
        self._log.close()

    def abandon(self) -> None:
        """Close the file without syncing it."""
        self._log.abandon()


def require_owner(disk: Disk, path: str, number: int, owner: Owner, recorded: LogEnd | None) -> None:
    """Raise if the log belongs to another database or has another number. A log with the recorded salt is always accepted."""
    with closing(disk.open(path, write=False)) as file:
        header = decode_header(file.read_at(NAMED_HEADER_BYTES, 0), path, LOG_KIND)
    if recorded is None or recorded.salt != header.salt:
        owner.require(header, number, path)


def batches_of(contents: LogContents) -> Iterator[WalBatch]:
    """Yield the decoded records of a log in order. Raises if lsns of batches do not rise."""
    last = None
    for record, offset in zip(contents.payloads, contents.offsets):
        batch = decode_batch(record, contents.path, offset)
        if batch.items:  # a record of carried keys has no lsn of its own
            if last is not None and batch.lsn <= last:
                raise _corrupt(contents.path, offset, f"lsn {batch.lsn} follows {last}")
            last = batch.lsn
        yield batch


def _corrupt(path: str, offset: int, cause: str) -> Corruption:
    return Corruption("a batch of the write-ahead log is malformed", hint=REPAIR, path=path, offset=offset, cause=cause)
