"""archive.json: where a store that was closed well left its archive, so that the next opening continues without a base (A7).

The file is one line of JSON and a line with its SHA-256. It is removed at opening: a life that does not end well leaves none.

Threads: the opener's and the closer's. Raises what the disk raises.
"""

from __future__ import annotations

import hashlib
import os
from contextlib import suppress

import msgspec

from quire.archive.format import Position
from quire.archive.recorder import ARCHIVE_STATE, SPOOL
from quire.archive.status import ArchiveStatus, read_drill
from quire.core.settings import ArchiveSettings
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


def read_state(disk: Disk, root: str) -> ArchiveState | None:
    """What the last life left, if it ended well."""
    try:
        line, _, check = read_all(disk, os.path.join(root, ARCHIVE_STATE)).partition(b"\n")
        return msgspec.json.decode(line, type=ArchiveState) if check == _check(line) else None
    except (FileNotFoundError, msgspec.MsgspecError):
        return None


def take_state(disk: Disk, root: str) -> ArchiveState | None:
    """What the last life left, if it ended well. Taken away: this life has to end well too."""
    path = os.path.join(root, ARCHIVE_STATE)
    if not disk.exists(path):
        return None
    state = read_state(disk, root)
    disk.remove(path)
    disk.sync_dir(root)
    return state


def write_state(disk: Disk, root: str, state: ArchiveState) -> None:
    """Leave the archive so that the next opening continues it."""
    line = msgspec.json.encode(state)
    write_atomic(disk, os.path.join(root, ARCHIVE_STATE), line + b"\n" + _check(line))


def _check(line: bytes) -> bytes:
    return hashlib.sha256(line).hexdigest().encode() + b"\n"


def status_beside(
    disk: Disk,
    root: str,
    settings: ArchiveSettings,
    *,
    store_id: str,
    epoch: int,
    transaction: int,
    is_fenced: bool,
    is_owned: bool,
) -> ArchiveStatus:
    """The status of an archive by its store's directory alone: for a process that does not own the store."""
    state = read_state(disk, root)
    is_clean = state is not None and state.continues(store_id, epoch, transaction)
    at_ms = state.at_ms if state is not None else 0
    return ArchiveStatus(
        mode=settings.mode,
        state="fenced" if is_fenced else "owned" if is_owned else "closed" if is_clean else "not closed cleanly",
        interval_seconds=settings.interval_seconds,
        retain_seconds=settings.retain_seconds,
        backlog_bytes=_spooled_bytes(disk, os.path.join(root, SPOOL)),
        last_cut_at_ms=at_ms,
        restorable_at_ms=at_ms if is_clean else 0,
        fenced=is_fenced,
        last_drill=read_drill(disk, root),
    )


def _spooled_bytes(disk: Disk, spool: str) -> int:
    total = 0
    with suppress(FileNotFoundError):
        for name in disk.names(spool):
            with suppress(FileNotFoundError):  # uploaded meanwhile
                total += disk.size(os.path.join(spool, name))
    return total
