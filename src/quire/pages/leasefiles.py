"""Lease files, by which a read-only process informs the owner which version it reads (M10).

Terms
  lease    `readers/<uuid>.lease`: database, version and reader. Its reader holds an exclusive `flock` on it while it reads
  stamp    the part that the reader rewrites with every heartbeat; nothing else in the file ever changes
  dead     the lock is free. A lease gets its final name complete and locked, and its reader never locks it again, so a dead
           lease stays dead
  silent   the lock is held, but the stamp has not changed for a whole lease period

Only the owner decides, and by its own monotonic clock alone: a lease that is dead or silent is retired (removed, with a
warning). Its reader then finds that the path no longer names its file, and raises `LeaseExpired`. A lease that is held but
cannot be read (of a newer quire, for example) holds every database at version 0 until it is silent.

Why an opening reader and a floor computation cannot miss each other
  The reader writes its lease, then reads the floor's row in the manifest. The owner commits the floor's row, then reads the
  leases (`floors.py`). Whichever comes first, the other one sees it:
    lease written before the owner reads      the owner sees the lease and stays at or below it
    owner reads before the lease is written   the row was committed before that, and the reader sees a floor above its
                                              version: it takes a newer version and starts again (`published.py`)

Nothing here is synced: a lease protects while its process lives, and after a power failure there are none.

Threads: any; a `FileLease` belongs to one at a time. Local file systems only: elsewhere `flock` guarantees what the file system
does. Format page: `docs/formats/lease.md`. Raises `NotWritable` if a reader may not write to the store's `readers/`,
`InvalidInput` for tags that are too long.
"""

from __future__ import annotations

import fcntl
import itertools
import os
import struct
import threading
import uuid
import weakref
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import dataclass, field
from functools import cached_property

import msgspec

from quire.core.clock import Clock
from quire.core.decoding import UNDECODABLE, described
from quire.core.errors import (
    Corruption,
    FormatTooNew,
    InvalidInput,
    LeaseExpired,
    StorageFault,
    TimedOut,
    UnknownReader,
)
from quire.core.events import emit
from quire.core.ids import some_u32, u64
from quire.core.reader_info import ReaderInfo
from quire.durable.checksums import crc64
from quire.durable.failpoints import hit
from quire.durable.files import Disk, File, OsDisk, remove_if_exists
from quire.durable.names import READERS, TEMPORARY, LeaseFile, parse_path
from quire.pages.readers import HEARTBEAT_SECONDS, HOST, LEASE_SECONDS

MAGIC = b"QREADER1"
VERSION = 1

HEAD = struct.Struct("<8sHHIQQIIQ")
"""magic, version, reserved (0), db_id, lsn, opened_ms, pid, tags_bytes, crc64"""
STAMP = struct.Struct("<QQ")
"""renewed_ms, crc64"""
HEAD_BYTES = 48
STAMP_BYTES = 16
TAGS_OFFSET = 64
CRC_BYTES = 8
TAGS_BYTES_MAX = 4_032
FILE_BYTES_MAX = 4_096
"""A lease fits one block; tags are meant to be short."""

if (HEAD.size, STAMP.size) != (HEAD_BYTES, STAMP_BYTES) or HEAD_BYTES + STAMP_BYTES != TAGS_OFFSET:
    raise AssertionError("the lease's structs disagree with their literal sizes")
if TAGS_OFFSET + TAGS_BYTES_MAX != FILE_BYTES_MAX:
    raise AssertionError("the longest lease is not the longest file")

TAKE_TRIES = 16
"""How often a new name is tried. An attempt fails only if the owner sweeps the unfinished file just before it is locked."""

HOST_TAG = "quire.host"
"""The tag with the host name of the reader's machine."""

UNREADABLE = 0
"""The database id of a lease that cannot be read, which holds all databases."""


# ── the bytes ─────────────────────────────────────────────────────────────────────────────────────────────────────────
@dataclass(frozen=True, kw_only=True)
class LeaseRecord:
    """The contents of a lease."""

    reader: uuid.UUID
    db_id: int
    lsn: int
    pid: int
    opened_ms: int
    tags: dict[str, str] = field(default_factory=dict)

    @property
    def host(self) -> str:
        """The host of its process; empty if an older quire wrote the lease."""
        return self.tags.get(HOST_TAG, "")

    @property
    def shown_tags(self) -> dict[str, str]:
        """The tags set by its reader."""
        return {name: value for name, value in self.tags.items() if name != HOST_TAG}

    @property
    def info(self) -> ReaderInfo:
        """The reader as a `ReaderInfo`."""
        return ReaderInfo(
            reader=str(self.pid),
            lsn=self.lsn,
            pid=self.pid,
            host=self.host,
            since_ms=self.opened_ms,
            tags=self.shown_tags,
        )

    @cached_property
    def _parts(self) -> tuple[bytes, bytes, int]:
        """(head without its checksum, tags, checksum); seeded with the uuid, so that a copied file is not a valid lease."""
        tags = msgspec.msgpack.encode(self.tags)
        if len(tags) > TAGS_BYTES_MAX:
            raise InvalidInput("the tags of a reader are too long", size=len(tags), max=TAGS_BYTES_MAX)
        db_id, lsn = some_u32("db_id", self.db_id), u64("lsn", self.lsn)
        head = HEAD.pack(MAGIC, VERSION, 0, db_id, lsn, self.opened_ms, self.pid, len(tags), 0)[:-CRC_BYTES]
        return head, tags, crc64(tags, crc64(head, crc64(self.reader.bytes)))

    def encode(self, renewed_ms: int) -> bytes:
        """Return the bytes of the file."""
        head, tags, crc = self._parts
        return head + crc.to_bytes(CRC_BYTES, "little") + self.stamp(renewed_ms) + tags

    def stamp(self, renewed_ms: int) -> bytes:
        """Return the bytes that a heartbeat writes at `HEAD_BYTES`."""
        word = renewed_ms.to_bytes(8, "little")
        return word + crc64(word, self._parts[2]).to_bytes(CRC_BYTES, "little")


def decode(reader: uuid.UUID, data: bytes, path: str = "") -> LeaseRecord:
    """Return the record in a lease file. The stamp is not checked, because it may be being written."""
    if len(data) < TAGS_OFFSET or data[: len(MAGIC)] != MAGIC:
        raise Corruption("not a reader's lease", path=path, size=len(data))
    _, version, _, db_id, lsn, opened_ms, pid, tags_bytes, crc = HEAD.unpack_from(data)
    if version > VERSION:
        raise FormatTooNew("a newer quire is reading this store", hint="upgrade quire", path=path, version=version)
    tags = data[TAGS_OFFSET : TAGS_OFFSET + tags_bytes]
    head = data[: HEAD_BYTES - CRC_BYTES]
    if len(tags) != tags_bytes or crc64(tags, crc64(head, crc64(reader.bytes))) != crc:
        raise Corruption("a reader's lease is damaged", path=path, size=len(data))
    try:
        named = msgspec.msgpack.decode(tags, type=described(dict[str, str]))
    except UNDECODABLE as error:
        raise Corruption(f"the tags of a lease are invalid: {error}", path=path) from error
    return LeaseRecord(reader=reader, db_id=db_id, lsn=lsn, pid=pid, opened_ms=opened_ms, tags=named)


def renewed_ms(record: LeaseRecord, stamp: bytes) -> int:
    """Return the time in a stamp; 0 if the stamp is incomplete, or its lease cannot be read."""
    if len(stamp) != STAMP_BYTES or record.db_id == UNREADABLE:
        return 0
    ms: int = STAMP.unpack(stamp)[0]
    return ms if record.stamp(ms) == stamp else 0


# ── the reader's side ─────────────────────────────────────────────────────────────────────────────────────────────────
class FileLease:
    """A lease that this process holds for a published snapshot; created by `take`."""

    __slots__ = (
        "__weakref__",
        "_clock",
        "_disk",
        "_file",
        "_lock",
        "_on_close",
        "_renewed_ms",
        "_was_lost",
        "open",
        "path",
        "reader_id",
        "record",
        "tags",
    )

    def __init__(self, disk: Disk, clock: Clock, file: File, path: str, record: LeaseRecord) -> None:
        # constant after construction
        self._disk = disk
        self._clock = clock
        self.path = path
        self.record = record
        self.reader_id = next(_ids)
        self.tags = record.shown_tags
        # guarded by _lock: another thread writes heartbeats while the holder reads, and must not use a file that is closed
        self._lock = threading.Lock()
        self._file: File | None = file
        self._renewed_ms = record.opened_ms
        # used by the holder's thread
        self._on_close: Callable[[], None] | None = None
        # `open` only becomes false, `_was_lost` only true
        self.open = True
        self._was_lost = False
        _held.add(self)

    @classmethod
    def take(cls, disk: Disk, clock: Clock, root: str, *, db_id: int, lsn: int, tags: dict[str, str]) -> FileLease:
        """Take a lease on this version of a database: every floor computed from here on sees it."""
        disk.make_dirs(os.path.join(root, READERS))
        tags = {**tags, HOST_TAG: HOST[:64]}
        for _ in range(TAKE_TRIES):
            record = LeaseRecord(
                reader=uuid.uuid4(), db_id=db_id, lsn=lsn, pid=os.getpid(), opened_ms=clock.now_ms(), tags=dict(tags)
            )
            body, path = record.encode(record.opened_ms), os.path.join(root, LeaseFile(reader=record.reader).path)
            file = disk.open(path + TEMPORARY, exclusive=True)
            try:
                # Complete and locked before it gets its final name: a named file with a free lock is dead.
                fcntl.flock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
                file.write_at(body, 0)
                hit("pages.lease.written")
                disk.rename(path + TEMPORARY, path)
            except (BlockingIOError, FileNotFoundError):  # the owner took it for the unfinished file of a dead process
                file.close()
                continue
            except BaseException:
                file.close()
                with suppress(FileNotFoundError, StorageFault):
                    disk.remove(path + TEMPORARY)
                raise
            hit("pages.lease.taken")
            return cls(disk, clock, file, path, record)
        raise TimedOut("the owner removed the lease file before it was complete", hint="try again", tries=TAKE_TRIES)

    def when_closed(self, on_close: Callable[[], None]) -> None:
        """Call `on_close` when the lease is closed, but not when it is garbage-collected."""
        self._on_close = on_close

    @property
    def is_held(self) -> bool:
        """Whether it still protects its version: not closed, not retired, and under the name that owners read."""
        with self._lock:
            return self._is_held()

    def _is_held(self) -> bool:
        if self._file is None:
            return False
        try:
            return os.path.samestat(os.stat(self.path), os.fstat(self._file.fileno()))
        except FileNotFoundError:
            return False

    def require(self) -> None:
        """Raise `LeaseExpired` if the owner has retired the lease."""
        if self.open and not self.is_held:
            self._lose()
        if self.open:
            return
        where = {"reader_id": self.reader_id, "db_id": self.record.db_id}
        if self._was_lost:
            raise LeaseExpired("the reader's lease has expired", hint="open a new snapshot", **where)
        raise UnknownReader("this reader is closed", hint="open a new snapshot", **where)

    def beat(self) -> bool:
        """Write a heartbeat; return whether the lease is still held. The stamp changes even if the clock does not advance."""
        with self._lock:
            if not self.open:
                return False
            if self._file is None or not self._is_held():
                self._lose()
                return False
            self._renewed_ms = max(self._renewed_ms + 1, self._clock.now_ms())
            self._file.write_at(self.record.stamp(self._renewed_ms), HEAD_BYTES)
            return True

    @property
    def was_lost(self) -> bool:
        """Whether the owner has retired it."""
        return self._was_lost

    def renew(self) -> None:
        """Renew the lease now; `PublishedReaders` does so every few seconds."""
        if not self.beat():
            self.require()

    def keep_alive(self, _: object) -> None:
        """Raise if the lease has ended. Nothing else to do: `PublishedReaders` keeps it alive while it is referenced."""
        self.require()

    def _lose(self) -> None:
        self.open, self._was_lost = False, True

    def close(self) -> None:
        """End the lease. Does nothing if it is closed, or in a forked child."""
        self.open = False
        on_close, self._on_close = self._on_close, None
        if on_close is not None:
            on_close()
        with self._lock:
            file, self._file = self._file, None
        if file is None:
            return
        # Removed while it is still locked: the owner would take a name with a free lock for a dead process.
        with suppress(FileNotFoundError, StorageFault):  # already retired; or left for the owner to remove
            self._disk.remove(self.path)
        file.close()

    def _forget(self) -> None:
        self._lock = threading.Lock()  # a thread of the parent may have held it
        if self.open:
            self._lose()
        if self._file is not None:
            file, self._file = self._file, None
            file.close()

    def __del__(self) -> None:
        with suppress(AttributeError, TypeError):  # not fully constructed, or the interpreter is shutting down
            self._on_close = None  # it takes locks, and a finalizer may run at any line
            self.close()


_held: weakref.WeakSet[FileLease] = weakref.WeakSet()
_ids = itertools.count(1)


def _forget_after_fork() -> None:
    for lease in list(_held):
        lease._forget()
    _held.clear()


os.register_at_fork(after_in_child=_forget_after_fork)


# ── the owner's side ──────────────────────────────────────────────────────────────────────────────────────────────────
class LeaseFiles:
    """The leases of all processes that read a store, as its owner sees them."""

    def __init__(self, root: str, disk: Disk, clock: Clock) -> None:
        # constant after construction
        self._folder = os.path.join(root, READERS)
        self._disk = disk
        self._clock = clock
        # used by the ticker
        self._ticked_at = 0.0
        # guarded by _lock
        self._lock = threading.Lock()
        self._stamps: dict[str, tuple[bytes, float]] = {}
        """Name → its stamp, and when that stamp was first seen."""
        self._unreadable: set[str] = set()
        """Names that were reported as unreadable."""

    def of(self, db_id: int) -> list[LeaseRecord]:
        """Return the live leases that hold this database."""
        return [lease for lease in self.look() if lease.db_id in (db_id, UNREADABLE)]

    def tick(self) -> None:
        """Check the leases every few seconds, so that dead ones are removed even if no floor is computed."""
        now = self._clock.monotonic()
        if now - self._ticked_at >= HEARTBEAT_SECONDS:
            self._ticked_at = now
            try:
                self.look()
            except StorageFault as fault:
                emit("warning", "reader.leases_unseen", error=str(fault))

    def look(self) -> list[LeaseRecord]:
        """Return all live leases, and retire those that are dead or silent."""
        try:
            names = self._disk.names(self._folder)
        except FileNotFoundError:
            return []
        with self._lock:
            live = [lease for name in names if (lease := self._read_lease(name)) is not None]
            for gone in self._stamps.keys() - set(names):
                del self._stamps[gone]
                self._unreadable.discard(gone)
        return live

    def _read_lease(self, name: str) -> LeaseRecord | None:
        """Return the lease in one file, `None` if it is not a live lease. REQUIRES the lock."""
        path, parsed = os.path.join(self._folder, name), parse_path(f"{READERS}/{name.removesuffix(TEMPORARY)}")
        if not isinstance(parsed, LeaseFile):
            return None
        try:
            file = self._disk.open(path, write=False)
        except FileNotFoundError:
            return None  # closed in the meantime
        with closing(file):
            is_dead = _is_free(file)
            if name.endswith(TEMPORARY):
                if is_dead:
                    self._remove(path)
                return None
            if is_dead and os.fstat(file.fileno()).st_nlink == 0:
                return None  # closed by its reader
            return self._lease_if_live(name, path, file, parsed.reader, is_dead=is_dead)

    def _lease_if_live(
        self, name: str, path: str, file: File, reader: uuid.UUID, *, is_dead: bool
    ) -> LeaseRecord | None:
        data, now = file.read_at(FILE_BYTES_MAX, 0), self._clock.monotonic()
        try:
            lease = decode(reader, data, path)
        except (Corruption, FormatTooNew) as error:
            lease = LeaseRecord(reader=reader, db_id=UNREADABLE, lsn=0, pid=0, opened_ms=0)
            if not is_dead and name not in self._unreadable:
                self._unreadable.add(name)
                emit("warning", "reader.lease_unreadable", path=path, error=str(error))
        stamp = data[HEAD_BYTES:TAGS_OFFSET]
        seen, since = self._stamps.get(name, (b"", now))
        # The owner's clock, from when it first saw the stamp. The reader's time in the stamp is not compared with
        # anything: its clock may differ.
        if seen != stamp or name not in self._stamps:
            since = now
            self._stamps[name] = (stamp, now)
        if not is_dead and now - since < LEASE_SECONDS:
            return lease
        self._remove(path)
        why = "its process has ended" if is_dead else "it was silent"
        where = {"db_id": lease.db_id, "reader_id": str(reader), "lsn": lease.lsn, "pid": lease.pid, "tags": lease.tags}
        emit("warning", "reader.heartbeat_lost", why=why, renewed_ms=renewed_ms(lease, stamp), **where)
        return None

    def _remove(self, path: str) -> None:
        remove_if_exists(self._disk, path)


def _is_free(file: File) -> bool:
    """Return whether the file's lock is free. Takes a shared lock, which closing the file releases."""
    try:
        fcntl.flock(file.fileno(), fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def live_leases(root: str) -> list[LeaseRecord]:
    """Return the live leases of the store at `root`, without retiring or removing any.

    A lease that cannot be read holds every database and is returned with database 0.
    """
    disk, folder = OsDisk(), os.path.join(root, READERS)
    try:
        names = disk.names(folder)
    except FileNotFoundError:
        return []
    live: list[LeaseRecord] = []
    for name in names:
        parsed = parse_path(f"{READERS}/{name}")
        if not isinstance(parsed, LeaseFile):
            continue
        try:
            file = disk.open(os.path.join(folder, name), write=False)
        except FileNotFoundError:
            continue
        try:
            if not _is_free(file):
                live.append(decode(parsed.reader, file.read_at(FILE_BYTES_MAX, 0), name))
        except (Corruption, FormatTooNew):
            live.append(LeaseRecord(reader=parsed.reader, db_id=UNREADABLE, lsn=0, pid=0, opened_ms=0))
        finally:
            file.close()
    return live
