"""The write-ahead log of a key-value database: batches go in, in the order of their lsns.

One batch is one record of a framed log (`durable/log_format.py`): there whole or not at all. An append reaches the operating
system before it returns, and survives the death of the process; only `sync` makes it survive the loss of power. After a
failed append or sync nothing more is taken. A log that belongs to another database, has another number, or has less than was
recorded of it (witnesses.py) is `Corruption`: a damaged end never passes for a torn one once it is recorded.

Threads: appends under the engine's write lock; `sync` by any. Format page: `docs/formats/lsm-wal.md`.
Raises `StoreUnusable`, `OutOfRange` (a batch above 64 MiB), `Corruption`."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from itertools import accumulate
from typing import NamedTuple

from quire.core.errors import Corruption, InvalidInput, OutOfRange, StorageFault, StoreClosed
from quire.core.limits import KIB, MIB
from quire.durable.failpoints import hit
from quire.durable.files import Disk, DiskLayer, File, FileLayer, forget_cached
from quire.durable.log_format import NAMED_HEADER_BYTES, decode_header
from quire.durable.log_reader import LogContents, LogEnd
from quire.durable.log_writer import LogWriter
from quire.lsm.witnesses import REPAIR, Owner

LOG_KIND = b"lsmw"

HEAD = struct.Struct("<QI")
"""lsn, keys in the batch"""
HEAD_BYTES = 12
ONE = struct.Struct("<QIII")
"""The head of a batch of one: lsn, 1, bytes of the key, bytes of the value"""
DELETED = 0xFFFFFFFF
"""In place of a value's size: the key was deleted."""
KEYED = 0x80000000
"""Flag of the count: the idempotency key of the call follows the head, as a u64."""
CARRIED = 0x40000000
"""Flag of the count: no batch, but keys of calls in earlier logs, which end when they are flushed: pairs of key and lsn."""
KEY = struct.Struct("<Q")
PAIR = struct.Struct("<QQ")

if HEAD.size != HEAD_BYTES or ONE.size != HEAD_BYTES + 8:
    raise AssertionError("the WAL's structs disagree with their literal sizes")

Buffer = bytes | bytearray | memoryview
"""What callers may give for keys and values; anything else with the buffer protocol works too."""
Items = Mapping[bytes, bytes | None]
KEY_BYTES_MAX = 64 * KIB - 1
VALUE_BYTES_MAX = 32 * MIB
"""A batch is one record of the WAL, at most 64 MiB, and a block holds whole values."""


def as_bytes(key: Buffer) -> bytes:
    """A key or value that a caller gave, as bytes; anything with the buffer protocol is taken.

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
    """What a caller wants to write, in bytes of our own: who passes a bytearray may change it afterwards."""
    for key, value in batch.items():
        if type(key) is not bytes or not (value is None or type(value) is bytes):
            owned = {as_bytes(key): None if value is None else as_bytes(value) for key, value in batch.items()}
            return checked_batch(owned)
        if len(key) > KEY_BYTES_MAX:
            raise OutOfRange("a key is too long", size=len(key), max=KEY_BYTES_MAX)
        if value is not None and len(value) > VALUE_BYTES_MAX:
            raise OutOfRange("a value is too long", size=len(value), max=VALUE_BYTES_MAX)
    return batch  # type: ignore[return-value]  # the loop has seen that all are bytes


class WalBatch(NamedTuple):
    """A record of the log."""

    lsn: int
    items: dict[bytes, bytes | None]
    """Empty if the record only carries keys."""
    size: int
    calls: tuple[tuple[int, int], ...] = ()
    """Idempotency keys, with the lsns of their batches."""


def encode_batch(lsn: int, items: Items, key: int = 0) -> bytes:
    """The record of a batch: head, the call's key if it has one, sizes of the keys, sizes of the values, keys, values.

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
    """The record that takes keys of calls over into a new log, whose last lsn is this."""
    pairs = [PAIR.pack(key, at) for key, at in calls]
    return HEAD.pack(lsn, len(pairs) | CARRIED) + b"".join(pairs)


def decode_batch(record: bytes, path: str, offset: int) -> WalBatch:
    """The batch of a record."""
    try:
        lsn, count = HEAD.unpack_from(record)
        if count & CARRIED:
            return _carried(record, lsn, count & ~CARRIED, path, offset)
        start, calls = HEAD_BYTES, tuple[tuple[int, int], ...]()
        if count & KEYED:
            count, start = count & ~KEYED, HEAD_BYTES + KEY.size
            calls = ((KEY.unpack_from(record, HEAD_BYTES)[0], lsn),)
        if 8 * count > len(record):  # before anything of that size is made
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
"""Larger writes do not fill ahead."""

_ZEROS = bytes(AHEAD_BYTES)


class AheadFile(FileLayer):
    """A file for appending that is kept filled with zeros a little ahead of its end, so that syncing small appends is cheap.

    A sync after an append must also make the file's new size and extents durable, which costs the file system a commit of its
    journal. Over zeros that are on disk already it moves data only (measured: about half the time). After a crash the zeros are
    a torn end to whoever reads the log, like any other bytes behind it. One writer at a time.
    """

    __slots__ = ("_end", "_filled", "_open")

    def __init__(self, inner: File) -> None:
        super().__init__(inner)
        self._end = self._filled = inner.size()
        self._open = True

    def write_at(self, data: bytes | bytearray | memoryview, offset: int) -> None:
        end = offset + len(data)
        if end > self._filled:
            if len(data) <= SMALL_BYTES:
                with suppress(StorageFault):  # it is a help, never a need: without space the write goes on without it
                    self._inner.write_at(_ZEROS, self._filled)
                    self._filled += AHEAD_BYTES
            self._filled = max(self._filled, end)
        self._inner.write_at(data, offset)
        self._end = max(self._end, end)

    def truncate(self, size: int) -> None:
        self._inner.truncate(size)
        self._end = self._filled = size

    def forget_cached(self) -> None:
        forget_cached(self._inner)

    def close(self) -> None:
        if self._open:
            self._open = False
            try:
                if self._filled > self._end:
                    with suppress(StorageFault):
                        self._inner.truncate(self._end)
            finally:
                self._inner.close()


class AheadDisk(DiskLayer):
    """A disk whose `open` gives such files."""

    def open(self, path: str, *, create: bool = False, exclusive: bool = False, write: bool = True) -> File:
        file = self._inner.open(path, create=create, exclusive=exclusive, write=write)
        return AheadFile(file) if write and not create and not exclusive else file


class KvWal:
    """One write-ahead log, open for appending."""

    def __init__(self, number: int, log: LogWriter) -> None:
        self.number = number
        self._log = log

    @classmethod
    def create(cls, disk: Disk, path: str, number: int, owner: Owner) -> KvWal:
        """A new, empty log."""
        identity = owner.identity(number)
        return cls(number, LogWriter.create(AheadDisk(disk), path, kind=LOG_KIND, identity=identity, replace=True))

    @classmethod
    def open(
        cls, disk: Disk, path: str, number: int, owner: Owner, recorded: LogEnd | None = None
    ) -> tuple[KvWal, LogContents]:
        """A log that was left, its torn end cut off, and what it holds."""
        try:
            require_owner(
                disk, path, number, owner, recorded
            )  # before its torn end is cut off: it may be somebody else's
            log, contents = LogWriter.open(AheadDisk(disk), path, kind=LOG_KIND, vouched=recorded)
        except FileNotFoundError:
            raise Corruption("a write-ahead log is missing", hint=REPAIR, path=path, number=number) from None
        return cls(number, log), contents

    @property
    def path(self) -> str:
        return self._log.path

    @property
    def end(self) -> int:
        """Where the next record goes."""
        return self._log.end

    def durable_end(self) -> LogEnd:
        """What is durable now, to be recorded elsewhere."""
        return self._log.durable_end()

    def append(self, record: bytes) -> int:
        """Write a record; where it ends."""
        end = self._log.append_many((record,))
        hit("lsm.wal.appended")
        return end

    def sync(self, upto: int) -> None:
        """Have everything below `upto` durable; one sync serves all who wait."""
        log = self._log
        if log.durable < upto:
            try:
                log.sync(upto)
            except StoreClosed:
                if log.durable < upto:  # else the one who closed it had synced it
                    raise
            hit("lsm.wal.synced")

    def close(self) -> None:
        """Sync and close."""
        self._log.close()

    def abandon(self) -> None:
        """Close the file and nothing else."""
        self._log.abandon()


def require_owner(disk: Disk, path: str, number: int, owner: Owner, recorded: LogEnd | None) -> None:
    """Raise if the log is another database's, or has another number. One in the life that was recorded is ours in any case."""
    file = disk.open(path, write=False)
    try:
        header = decode_header(file.read_at(NAMED_HEADER_BYTES, 0), path, LOG_KIND)
    finally:
        file.close()
    if recorded is None or recorded.salt != header.salt:
        owner.require(header, number, path)


def batches_of(contents: LogContents) -> Iterator[WalBatch]:
    """The records of a log, in order."""
    last = None
    for record, offset in zip(contents.payloads, contents.offsets):
        batch = decode_batch(record, contents.path, offset)
        if batch.items:  # keys that are carried bring no lsn of their own
            if last is not None and batch.lsn <= last:
                raise _corrupt(contents.path, offset, f"lsn {batch.lsn} follows {last}")
            last = batch.lsn
        yield batch


def _corrupt(path: str, offset: int, cause: str) -> Corruption:
    return Corruption("a batch of the write-ahead log is malformed", hint=REPAIR, path=path, offset=offset, cause=cause)
