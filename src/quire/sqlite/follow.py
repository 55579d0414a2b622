"""Follows a SQLite database that another program writes: ships its transactions into a page database as they commit (Q4).

A look is one read transaction of SQLite on the file. The program is not disturbed: its files are neither written nor locked
for writing, no transaction is held between two looks, and no checkpoint is made. So the program may restart its log at any
time. Versions between two looks may then be skipped, but never the state at the end of a look. New data is shipped in the
best of three ways:

  exact     the log's transactions one by one: the last frame of the position is still in the log and the log has the same
            header, or the log is new and the file below it is as it was when the file alone was our version
  patch     the pages that can have changed are compared and become one commit: the log was restarted exactly once, and its new
            part is shorter than what we knew, so the rest of its former contents is still there after it
  compare   all pages are compared and those that differ become one commit: in every other case, and always correct. This covers
            a database without a log, and one that is not at the lsn of the position (a crash before it was saved, or another
            writer, also one that commits during a look)

The *position* is the version of our database that equals the file at some moment, and the state of the file at that moment: a
small JSON file of the store, written after the commit it belongs to.

Threads: one at a time. Raises the errors of `dbfile`; `ConfigMismatch` if the file's page size changes (a VACUUM can do
that), `DatabaseTombstoned` if our database is dropped.
"""

from __future__ import annotations

import os
import threading
import time
from dataclasses import asdict, dataclass

import msgspec
import numpy as np

from quire.core.clock import SystemClock
from quire.core.decoding import described
from quire.core.errors import NotFound, QuireError, Unavailable
from quire.core.events import emit
from quire.durable.failpoints import hit
from quire.durable.files import Disk, OsDisk, read_all, write_atomic
from quire.durable.names import FollowFile
from quire.manifest.store import ManifestStore
from quire.pages.engine import PageEngine
from quire.pages.pagestore import PageStore
from quire.pages.transaction import PageGuard, WriteTxn
from quire.sqlite.dbfile import FileSource, Signature, open_or_none, open_source, signature_of, size_and_time
from quire.sqlite.importing import (
    Progress,
    import_pages,
    import_source,
    name_for,
    no_progress,
    require_page_size,
    target_for,
)
from quire.sqlite.walfile import (
    FRAME_HEAD,
    FRAME_HEAD_BYTES,
    HEADER_BYTES,
    FrameBlock,
    ReadAt,
    VerifiedFrame,
    WalHeader,
    blocks,
    parse_header,
)

FORMAT = 1
RACY_NS = 100_000_000
"""A modification time younger than this cannot reveal a later change: clocks of file systems tick every few milliseconds."""
NOWHERE = -1


class FollowPosition(msgspec.Struct, frozen=True, kw_only=True):
    """How far a database has followed a SQLite file. It is valid only while its lsn is the database's."""

    format: int = FORMAT
    path: str
    lsn: int
    inode: int
    size: int
    mtime_ns: int
    change_counter: int
    settled: bool
    """Whether the file alone, without its log, was that version, and its modification time was old enough to reveal changes."""
    wal_header: str = ""
    """The first 32 bytes of the log, in hex."""
    frame: int = NOWHERE
    checksum: tuple[int, int] = (0, 0)
    wal_bytes: int = 0
    wal_mtime_ns: int = 0
    """Size and modification time of the log before it was read, if it was not being written; else 0."""

    @property
    def file(self) -> Signature:
        """The signature of the file."""
        return Signature(self.inode, self.size, self.mtime_ns, self.change_counter)

    @property
    def header(self) -> WalHeader | None:
        """The log's header, if it was valid."""
        header = parse_header(bytes.fromhex(self.wal_header))
        return header if isinstance(header, WalHeader) else None

    @property
    def place(self) -> VerifiedFrame | None:
        """The position after the last frame that is part of it."""
        return None if self.frame == NOWHERE else VerifiedFrame(self.frame, self.checksum)


def position_of(
    source: FileSource, lsn: int, end: VerifiedFrame | None, *, began_ns: int, now_ns: int
) -> FollowPosition:
    """Return the position of a source that equals our version `lsn`; `end` is the last frame that was read, if any.

    `began_ns` is from before the source was opened: its log, unlike the file, may be written while it is read.
    """
    place = end if end is not None else _end_of(source)
    seen, (wal_bytes, wal_mtime_ns) = source.signature, source.wal_seen
    # A log that is still being written may get another commit within the same tick of the file system's clock.
    quiet = began_ns - wal_mtime_ns > RACY_NS
    return FollowPosition(
        path=source.path,
        lsn=lsn,
        inode=seen.inode,
        size=seen.size,
        mtime_ns=seen.mtime_ns,
        change_counter=seen.change_counter,
        settled=source.settled and now_ns - seen.mtime_ns > RACY_NS,
        wal_header=source.wal_raw.hex(),
        frame=place.frame if place is not None else NOWHERE,
        checksum=place.checksum if place is not None else (0, 0),
        wal_bytes=wal_bytes if quiet else 0,
        wal_mtime_ns=wal_mtime_ns if quiet else 0,
    )


def _end_of(source: FileSource) -> VerifiedFrame | None:
    """Return the position after the last committed frame; the log was not read if the file holds all of it."""
    if source.map is not None:
        return source.map.end
    if source.wal is None or source.wal_header is None or source.committed <= 0:
        return None
    frame = frame_at(source.wal.read_at, source.wal_header, source.committed)
    # The log may be restarted at any time now; its frames then no longer match the header that was read.
    return frame[1] if frame is not None and frame[0] == source.wal_header.salts else None


def frame_at(read_at: ReadAt, header: WalHeader, frame: int) -> tuple[bytes, VerifiedFrame] | None:
    """Return (salts, place) of what the log has where a frame is or would be; `None` beyond its end."""
    data = read_at(FRAME_HEAD_BYTES, header.offset(frame))
    if len(data) < FRAME_HEAD_BYTES:
        return None
    _, _, salts, first, second = FRAME_HEAD.unpack(data)
    return salts, VerifiedFrame(frame, (first, second))


def position_is_intact(read_at: ReadAt, position: FollowPosition) -> bool:
    """Return whether the last frame of a position is still where it was."""
    header, place = position.header, position.place
    if header is None or place is None:
        return False
    return place.frame == 0 or frame_at(read_at, header, place.frame) == (header.salts, place)


def load(disk: Disk, root: str, db_id: int) -> FollowPosition | None:
    """Return the position of a database; `None` if there is none or it cannot be decoded."""
    path = os.path.join(root, FollowFile(db_id=db_id).path)
    try:
        position = msgspec.json.decode(read_all(disk, path), type=described(FollowPosition))
        position.header  # noqa: B018 - it must be hex
    except FileNotFoundError:
        return None
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        emit("warning", "sqlite.follow.position_unreadable", path=path, error=str(error))
        return None
    return position if position.format == FORMAT else None


def save(disk: Disk, root: str, db_id: int, position: FollowPosition) -> None:
    """Save the position of a database."""
    path = os.path.join(root, FollowFile(db_id=db_id).path)
    disk.make_dirs(os.path.dirname(path))
    write_atomic(disk, path, msgspec.json.encode(position) + b"\n")


INTERVAL_SECONDS = 0.25
"""Seconds between two looks. A look at a file that has not changed reads a few bytes."""
PAUSE_SECONDS_MAX = 0.1
"""The longest single sleep, in seconds, which bounds how long stopping takes."""


@dataclass(slots=True, kw_only=True)
class Followed:
    """The work of a follower so far."""

    looks: int = 0
    """Looks that found a change."""
    transactions: int = 0
    """Transactions shipped one by one."""
    patches: int = 0
    compares: int = 0
    pages: int = 0
    """Pages written."""
    lsn: int = 0


class Follower:
    """Keeps a page database equal to a SQLite file. See the rules above."""

    def __init__(
        self,
        *,
        manifest: ManifestStore,
        pages: PageEngine,
        root: str,
        path: str | os.PathLike[str],
        name: str = "",
        progress: Progress = no_progress,
    ) -> None:
        """`root` is the store's directory. `name` is the database, created if needed; by default it is named after the file."""
        # constant after construction
        self.path = os.path.abspath(os.fspath(path))
        self.name = name or name_for(self.path)
        self._manifest = manifest
        self._pages = pages
        self._root = root
        self._disk: Disk = OsDisk()
        self._clock = SystemClock()
        self._progress = progress
        # owned by the follower's thread
        self.done = Followed()
        self._target: PageStore | None = None
        self._position: FollowPosition | None = None
        self.trouble = ""
        """Why it makes no progress; empty if it does."""

    # ── looking ───────────────────────────────────────────────────────────────────────────────────────────────────────
    def run(self, stop: threading.Event, interval: float = INTERVAL_SECONDS) -> Followed:
        """Look repeatedly until `stop` is set. Waits for a file that is locked, needs recovery, is empty or does not exist."""
        while not stop.is_set():
            try:
                self.look()
                self.trouble = ""
            except (Unavailable, NotFound) as error:
                self._report(error, "info", "sqlite.follow.waiting")
            _pause(stop, interval)
        return self.done

    def _report(self, error: QuireError, level: str, event: str) -> None:
        """Store and emit an error, once while it stays the same."""
        if str(error) != self.trouble:
            self.trouble = str(error)
            emit(level, event, path=self.path, database=self.name, reason=error.what)

    def look(self) -> bool:
        """Ship what is new and return whether there was anything."""
        try:
            is_empty = not os.path.getsize(self.path)
        except OSError:  # it is missing, or a directory of its path is
            is_empty = True
        if is_empty:
            raise NotFound(
                "the database file does not exist yet or is empty",
                hint="start the program that creates it",
                path=self.path,
            )
        if self._is_unchanged():
            return False
        began_ns = self._clock.now_ms() * 1_000_000
        with open_source(self.path, disk=self._disk) as source:
            target = self._open_target(source)
            before = target.durable_version()[0]
            # Our own commit, not the newest version: another writer's commit after it would become part of the position.
            after, end = self._ship(target, source)
            hit("sqlite.follow.committed")
            now_ns = self._clock.now_ms() * 1_000_000
            # After the commit: if a crash comes in between, the stored position is not at the database's lsn, and pages are
            # compared.
            position = position_of(source, after, end, began_ns=began_ns, now_ns=now_ns)
            save(self._disk, self._root, target.db_id, position)
            hit("sqlite.follow.positioned")
        self._position = position
        self.done.lsn = after
        self.done.looks += after != before
        return after != before

    def _open_target(self, source: FileSource) -> PageStore:
        """Return the database: the first time by name, creating it if needed, then the same database even if it is renamed."""
        if self._target is not None:
            require_page_size(self.name, self._target.page_size, source.page_size)
            self._target = self._pages.open(self._target.db_id)
            return self._target
        target, created = target_for(self._manifest, self._pages, self.name, source.page_size)
        if not created:
            stored = load(self._disk, self._root, target.db_id)
            self._position = stored if stored is not None and stored.path == self.path else None
        self._target = target
        return target

    def _is_unchanged(self) -> bool:
        """Return whether the file is at the position, by a few bytes of it and of its log. No lock is needed for this."""
        position = self._valid_position()
        if position is None:
            return False
        wal = open_or_none(self._disk, self.path + "-wal")
        try:
            raw = wal.read_at(HEADER_BYTES, 0) if wal is not None else b""
            if raw.hex() != position.wal_header:
                return False
            header, place = position.header, position.place
            if wal is not None and header is not None and place is not None:
                # A frame with other salts is left over from an earlier use of the log; one with these salts is new.
                following = frame_at(wal.read_at, header, place.frame + 1)
                return position_is_intact(wal.read_at, position) and (following is None or following[0] != header.salts)
            if raw and size_and_time(wal) != (position.wal_bytes, position.wal_mtime_ns):
                return False  # without a place only size and time reveal a commit after this header
        finally:
            if wal is not None:
                wal.close()
        return position.settled and position.file == signature_of(self.path)

    def _valid_position(self) -> FollowPosition | None:
        """Return the stored position, or `None` if there is a gap and pages must be compared."""
        position, target = self._position, self._target
        if position is None or target is None or target.durable_version()[0] != position.lsn:
            return None
        return position

    # ── shipping ──────────────────────────────────────────────────────────────────────────────────────────────────────
    def _ship(self, target: PageStore, source: FileSource) -> tuple[int, VerifiedFrame | None]:
        """Make our database equal to the source. Return the version that does, and the last frame that is part of it, if known
        from reading."""
        position = self._valid_position()
        if position is not None and (start := self._start_of(position, source)) is not None:
            lsn, end = self._exact(target, source, start, position.lsn)
            if end.frame == source.committed:
                return lsn, end
        elif position is not None and (pages := self._possibly_changed_pages(position, source)) is not None:
            patched = import_pages(target, source, pages, position.lsn)
            if patched is not None:
                self.done.patches += 1
                self.done.pages += patched.changed_pages
                return patched.lsn, None
        written = import_source(target, source, self._progress)
        self.done.compares += 1
        self.done.pages += written.changed_pages
        emit("info", "sqlite.follow.compared", path=self.path, **asdict(written))
        return written.lsn, None

    def _start_of(self, position: FollowPosition, source: FileSource) -> VerifiedFrame | None:
        """Return where an exact look begins; `None` if it cannot be exact."""
        header = source.wal_header
        if header is None or source.wal is None or source.committed <= 0:
            return None
        if header.page_size != source.page_size:
            return None
        if header == position.header:
            place = position.place
            intact = place is not None and position_is_intact(source.wal.read_at, position)
            return place if intact and place is not None and place.frame <= source.committed else None
        if position.settled and position.file == source.signature:
            return header.start
        return None

    def _exact(
        self, target: PageStore, source: FileSource, start: VerifiedFrame, lsn: int
    ) -> tuple[int, VerifiedFrame]:
        """Ship transactions from the log onto our version `lsn`, which is at `start`. Return the version and the last frame
        reached."""
        assert source.wal is not None
        assert source.wal_header is not None
        txn: WriteTxn | None = None
        guard: PageGuard | None = None
        end = start
        try:
            for block in blocks(source.wal.read_at, source.wal_header, start, source.committed):
                first = 0
                for commit in np.flatnonzero(block.sizes).tolist():
                    source.check_size(int(block.sizes[commit]))
                    txn = txn or target.begin()
                    if txn.base_lsn != lsn:
                        return lsn, end  # another writer has committed: frames do not fit onto its pages
                    guard = self._commit(txn, block, first, commit)
                    txn, first, end, lsn = None, commit + 1, block.place(commit), guard.lsn
                if first < len(block):
                    txn = txn or target.begin()
                    self._write(txn, block, first, len(block))
        finally:
            if txn is not None:
                txn.rollback()
            if guard is not None:
                guard.result()  # the last commit: all before it are durable with it
        return lsn, end

    def _commit(self, txn: WriteTxn, block: FrameBlock, first: int, commit: int) -> PageGuard:
        self._write(txn, block, first, commit + 1)
        size = int(block.sizes[commit])
        if txn.size_pages != size:
            txn.truncate(size)
        self.done.transactions += 1
        return txn.commit()

    def _write(self, txn: WriteTxn, block: FrameBlock, first: int, stop: int) -> None:
        """Write frames of a block; of several images of a page the last one counts."""
        images = {page - 1: index for index, page in zip(range(first, stop), block.pages[first:stop].tolist())}
        txn.write_pages({page: block.image(index) for page, index in images.items()})
        self.done.pages += len(images)

    def _possibly_changed_pages(self, position: FollowPosition, source: FileSource) -> set[int] | None:
        """Return all pages that can have changed if the log was restarted exactly once; else `None`."""
        header = source.wal_header
        if header is None or source.wal is None:
            return None
        former, place = position.header, position.place
        if (
            former is None
            or place is None
            or not _follows(header, former)
            or not position_is_intact(source.wal.read_at, position)
        ):
            return None
        if not 0 <= source.committed < place.frame:
            return None
        pages: set[int] = set()
        end = place
        for block in blocks(source.wal.read_at, former, place):
            pages.update(block.pages.tolist())
            end = block.place(len(block) - 1)
        behind = frame_at(source.wal.read_at, former, end.frame + 1)
        if behind is None or behind[0] in (former.salts, header.salts):
            return None  # the log was truncated or overwritten: its former frames are unknown
        frames = 0
        for block in blocks(source.wal.read_at, header, header.start, source.committed):
            pages.update(block.pages.tolist())
            frames += len(block)
        if frames != source.committed or source.wal.read_at(HEADER_BYTES, 0) != source.wal_raw:
            return None  # the log was restarted again during this read
        return {page - 1 for page in pages}


def _pause(stop: threading.Event, seconds: float) -> None:
    """Sleep until `seconds` have passed or `stop` is set.

    Polls instead of waiting for the event: it may be set by a signal handler in this very thread.
    """
    until = time.monotonic() + seconds
    while not stop.is_set() and (left := until - time.monotonic()) > 0:
        time.sleep(min(left, PAUSE_SECONDS_MAX))


def _follows(header: WalHeader, former: WalHeader) -> bool:
    """Return whether a log was restarted exactly once: SQLite then adds one to the first salt and draws a new second one."""
    salt, before = (int.from_bytes(log.salts[:4]) for log in (header, former))
    return salt == (before + 1) % (1 << 32) and header.page_size == former.page_size
