"""How far a database has followed a SQLite file: a small JSON file of the store, and what it allows to conclude (Q4).

Terms
  position  the version of our database (lsn) that equals the file at some moment, and how the file looked then
  place     the last frame of the -wal that is part of it, with its checksum; frame -1 if that is not known
  settled   the file alone, without its log, was that version, and its time of change was old enough to tell later changes
  quiet     the time of change of the log was old enough for that, too. It counts where there is no place: SQLite may begin a
            log with frames that it rolls back, and what is committed behind them changes neither file nor header

Rules
  1. It is written after the commit it belongs to, by an atomic rename. A crash between the two leaves a position whose lsn is
     not the database's: it is then worth nothing, and the follower compares all pages, which repeats nothing and loses
     nothing. The same holds if somebody else has written to the database.
  2. A file that cannot be understood counts as none: comparing is always right, only slower.

Values, and functions over a `Disk`; any thread.
"""

from __future__ import annotations

import os

import msgspec

from quire.core.events import emit
from quire.durable.files import Disk, read_all, write_atomic
from quire.durable.names import FollowFile
from quire.sqlite.dbfile import Signature, Source
from quire.sqlite.walfile import FRAME_HEAD, FRAME_HEAD_BYTES, Place, ReadAt, WalHeader, parse_header

FORMAT = 1
RACY_NS = 100_000_000
"""A time of change younger than this does not tell the next one: clocks of file systems tick every few milliseconds."""
NOWHERE = -1


class Position(msgspec.Struct, frozen=True, kw_only=True):
    """See the terms above."""

    format: int = FORMAT
    path: str
    lsn: int
    inode: int
    size: int
    mtime_ns: int
    change_counter: int
    settled: bool
    wal_header: str = ""
    """The 32 bytes at the beginning of the log, in hex."""
    frame: int = NOWHERE
    checksum: tuple[int, int] = (0, 0)
    wal_bytes: int = 0
    wal_mtime_ns: int = 0
    """How the log looked before it was read, if it was quiet; else 0."""

    @property
    def file(self) -> Signature:
        """How the file looked."""
        return Signature(self.inode, self.size, self.mtime_ns, self.change_counter)

    @property
    def header(self) -> WalHeader | None:
        """The log's header, if it was one."""
        found = parse_header(bytes.fromhex(self.wal_header))
        return found if isinstance(found, WalHeader) else None

    @property
    def place(self) -> Place | None:
        """Behind the last frame that is part of it."""
        return None if self.frame == NOWHERE else Place(self.frame, self.checksum)


def position_of(source: Source, lsn: int, end: Place | None, *, began_ns: int, now_ns: int) -> Position:
    """The position of a source that is our version `lsn` now; `end` is the last frame that was read, if one was.

    `began_ns` is from before the source was opened: its log, unlike the file, may be written to while it is read.
    """
    place = end if end is not None else _end_of(source)
    seen, (wal_bytes, wal_mtime_ns) = source.signature, source.wal_seen
    quiet = began_ns - wal_mtime_ns > RACY_NS
    return Position(
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


def _end_of(source: Source) -> Place | None:
    """Behind the last committed frame, where the log was not read because the file holds all of it."""
    if source.map is not None:
        return source.map.end
    if source.wal is None or source.wal_header is None or source.committed <= 0:
        return None
    found = frame_at(source.wal.read_at, source.wal_header, source.committed)
    # The log may be begun anew at any time now; then its frames are others than its header, as we read it, says.
    return found[1] if found is not None and found[0] == source.wal_header.salts else None


def frame_at(read_at: ReadAt, header: WalHeader, frame: int) -> tuple[bytes, Place] | None:
    """(salts, place) of what stands in the log where a frame is or would be; `None` beyond its end."""
    data = read_at(FRAME_HEAD_BYTES, header.offset(frame))
    if len(data) < FRAME_HEAD_BYTES:
        return None
    _, _, salts, first, second = FRAME_HEAD.unpack(data)
    return salts, Place(frame, (first, second))


def stands_at(read_at: ReadAt, position: Position) -> bool:
    """Whether the last frame of a position is still where it was."""
    header, place = position.header, position.place
    if header is None or place is None:
        return False
    return place.frame == 0 or frame_at(read_at, header, place.frame) == (header.salts, place)


def load(disk: Disk, root: str, db_id: int) -> Position | None:
    """The position of a database; `None` if there is none, or none that can be understood (rule 2)."""
    path = os.path.join(root, FollowFile(db_id=db_id).path)
    try:
        found = msgspec.json.decode(read_all(disk, path), type=Position)
        found.header  # noqa: B018 - it must be hex
    except FileNotFoundError:
        return None
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        emit("warning", "sqlite.follow.position_unreadable", path=path, error=str(error))
        return None
    return found if found.format == FORMAT else None


def save(disk: Disk, root: str, db_id: int, position: Position) -> None:
    """Remember it (rule 1)."""
    path = os.path.join(root, FollowFile(db_id=db_id).path)
    disk.make_dirs(os.path.dirname(path))
    write_atomic(disk, path, msgspec.json.encode(position) + b"\n")
