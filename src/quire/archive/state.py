"""archive.json: where a store that was closed well left its archive, so that the next opening continues without a base (A7).

The file is one line of JSON and a line with its SHA-256. It is removed at opening: a life that does not end well leaves none.

Threads: the opener's and the closer's. Raises what the disk raises.
"""

from __future__ import annotations

import hashlib
import os

import msgspec

from quire.archive.format import Position
from quire.archive.recorder import ARCHIVE_STATE
from quire.durable.files import Disk, read_all, write_atomic


class ArchiveState(msgspec.Struct, kw_only=True):
    """archive.json: where a store that was closed left its archive."""

    format: int = 1
    store_id: str
    position: Position
    """The last log object."""
    digest: bytes
    restorable: int
    base: int
    base_bytes: int = 0
    log_bytes: int = 0
    transaction: int
    """The last transaction of the manifest: another one means that somebody changed the store without its archive."""

    at_ms: int = 0
    """Of the last header: moments never fall in a log."""
    base_at_ms: int = 0
    """When the last base began: the next one is due by its age, not because the store was opened."""

    def continues(self, store_id: str, epoch: int, transaction: int) -> bool:
        """Whether it is about this store, and nothing was changed since."""
        return (self.store_id, self.position.epoch, self.transaction) == (store_id, epoch, transaction)


def take_state(disk: Disk, root: str) -> ArchiveState | None:
    """What the last life left, if it ended well. Taken away: this life has to end well too."""
    path = os.path.join(root, ARCHIVE_STATE)
    try:
        line, _, check = read_all(disk, path).partition(b"\n")
        state = msgspec.json.decode(line, type=ArchiveState) if check == _check(line) else None
    except FileNotFoundError:
        return None
    except msgspec.MsgspecError:
        state = None
    disk.remove(path)
    disk.sync_dir(root)
    return state


def write_state(disk: Disk, root: str, state: ArchiveState) -> None:
    """Leave the archive so that the next opening continues it."""
    line = msgspec.json.encode(state)
    write_atomic(disk, os.path.join(root, ARCHIVE_STATE), line + b"\n" + _check(line))


def _check(line: bytes) -> bytes:
    return hashlib.sha256(line).hexdigest().encode() + b"\n"
