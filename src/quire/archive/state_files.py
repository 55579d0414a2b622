"""Small files in a store's directory that relate the directory to its archive. None of them is shipped.

  archive.json        where a cleanly closed store left its archive, so that the next opening continues without a base (A7). One
                      line of JSON and a line with its SHA-256. Removed at opening, so a crash leaves none
  restored.json       what the directory was restored from (A10)
  remote_files.json   artifacts that a restore left in the bucket, by path (remote_files.py)
  standby.json        the position of a standby, and whether it is being promoted to owner (A11)

Each file is replaced as a whole, durably, after everything it refers to is durable. While standby.json exists, the directory
can be opened for writing only by a promotion. What is on disk in each phase of a standby: store/standby.py.

Threads: the opening, the closing, and a standby's. Raises `Corruption`, `FormatTooNew`, and the disk's errors.
"""

from __future__ import annotations

import hashlib
import os
from contextlib import suppress
from enum import StrEnum

import msgspec

from quire.archive.format import NO_DIGEST, Position
from quire.archive.recorder import ARCHIVE_STATE, REMOTE_FILES, SPOOL
from quire.archive.status import ArchiveStatus, read_drill
from quire.core.decoding import UNDECODABLE, decode_with_digest, described, encode_with_digest
from quire.core.errors import Corruption, FormatTooNew
from quire.core.settings import ArchiveSettings
from quire.durable import names
from quire.durable.files import Disk, read_all, write_atomic

STANDBY_FORMAT = 1


# ── archive.json ──────────────────────────────────────────────────────────────────────────────────────────────────────
KnownFile = tuple[int, int, int, str, bytes]
"""(inode, size, time of last change, object name, SHA-256) of a file"""


class ArchiveState(msgspec.Struct, kw_only=True):
    """archive.json: where a cleanly closed store left its archive."""

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
    """The last transaction of the manifest. If it differs at opening, the store was changed without its archive."""

    at_ms: int = 0
    """Time of the last header: times never decrease in a log."""
    base_at_ms: int = 0
    """When the last base began: the next one becomes due by its age, not by an opening."""
    config_digest: bytes = b""
    """SHA-256 of quire.toml, which may be edited while the store is closed. Empty if unknown, or if there is no such file."""
    files: list[KnownFile] = msgspec.field(default_factory=list)
    """Immutable files and their objects, which stay the same (`artifacts.py`)."""

    def continues(self, store_id: str, epoch: int, transaction: int) -> bool:
        """Return whether the state belongs to this store and epoch, and nothing has changed since."""
        return (self.store_id, self.position.epoch, self.transaction) == (store_id, epoch, transaction)


def read_archive_state(disk: Disk, root: str) -> ArchiveState | None:
    """Return the state that the last clean close left, or `None`."""
    try:
        return decode_with_digest(read_all(disk, os.path.join(root, ARCHIVE_STATE)), ArchiveState)
    except (FileNotFoundError, *UNDECODABLE):
        return None


def take_archive_state(disk: Disk, root: str) -> ArchiveState | None:
    """Return the state that the last clean close left, and remove it: this opening must end with a clean close too."""
    path = os.path.join(root, ARCHIVE_STATE)
    if not disk.exists(path):
        return None
    state = read_archive_state(disk, root)
    # Durably, before the first change: most changes of files commit nothing to the manifest, so the number of its last
    # transaction would not reveal them after a crash.
    disk.remove(path)
    disk.sync_dir(root)
    return state


def write_archive_state(disk: Disk, root: str, state: ArchiveState) -> None:
    """Write the state with which the next opening continues the archive."""
    write_atomic(disk, os.path.join(root, ARCHIVE_STATE), encode_with_digest(state))


def config_digest(disk: Disk, root: str) -> bytes:
    """Return the SHA-256 of a store's quire.toml; empty if there is none."""
    try:
        return hashlib.sha256(read_all(disk, os.path.join(root, names.CONFIG))).digest()
    except FileNotFoundError:
        return b""


# ── restored.json, remote_files.json ──────────────────────────────────────────────────────────────────────────────────
class Origin(msgspec.Struct, frozen=True, kw_only=True):
    """restored.json: what a directory was restored from."""

    store_id: str
    url: str
    position: Position
    digest: bytes
    """SHA-256 of the last object that was applied."""
    at_ms: int
    epoch: int = 0
    """The owner epoch that a takeover of this directory began; 0 before that. The origin is ignored in later epochs."""


class RemoteFile(msgspec.Struct, frozen=True):
    """An artifact in the bucket."""

    key: str
    size: int
    sha256: bytes
    file: int = 0
    """The inode it had in the owner's directory, by which later events refer to it."""


def read_remote_files(disk: Disk, root: str) -> dict[str, RemoteFile]:
    """Return the artifacts that a restore left in the bucket, by path."""
    try:
        return msgspec.json.decode(
            read_all(disk, os.path.join(root, REMOTE_FILES)), type=described(dict[str, RemoteFile])
        )
    except FileNotFoundError:
        return {}
    except UNDECODABLE as error:
        hint = "restore the store again"
        raise Corruption("remote_files.json is damaged", hint=hint, path=root, cause=str(error)) from error


def read_origin(disk: Disk, root: str) -> Origin | None:
    """Return what the directory was restored from, or `None` if it was not restored."""
    try:
        return msgspec.json.decode(read_all(disk, os.path.join(root, names.ORIGIN)), type=described(Origin))
    except (FileNotFoundError, *UNDECODABLE):
        return None


def write_origin(disk: Disk, root: str, origin: Origin) -> None:
    """Record what the directory was restored from."""
    write_atomic(disk, os.path.join(root, names.ORIGIN), msgspec.json.encode(origin))


# ── standby.json ──────────────────────────────────────────────────────────────────────────────────────────────────────
class StandbyPhase(StrEnum):
    """The phase of a standby's directory; see the table at the top of store/standby.py."""

    BEGUN = "begun"
    SWAPPING = "swapping"
    FOLLOWING = "following"
    PROMOTING = "promoting"
    SEALED = "sealed"


class StandbyState(msgspec.Struct, frozen=True, kw_only=True):
    """The contents of standby.json."""

    format: int = STANDBY_FORMAT
    store_id: str
    url: str
    phase: StandbyPhase = StandbyPhase.BEGUN
    position: Position = Position(0, 0)
    """The last log object that was applied."""
    digest: bytes = NO_DIGEST
    """SHA-256 of that object, which the next one contains."""
    at_ms: int = 0
    """The owner's clock when that object was cut."""
    oldest_change: int = 0
    """First sequence of the change feed: earlier changes were not in the base."""
    owner_epoch: int = 0
    """During a promotion, the epoch that is claimed."""
    swaps: int = 0
    """Number of rebuilds whose files were swapped in, including one in progress: it shows readers that files were replaced."""


def read_standby_state(disk: Disk, root: str) -> StandbyState | None:
    """Return the state of the standby in this directory, or `None` if it is not a standby."""
    path = os.path.join(root, names.STANDBY)
    try:
        state = msgspec.json.decode(read_all(disk, path), type=described(StandbyState))
    except FileNotFoundError:
        return None
    except UNDECODABLE as error:
        hint = "remove the directory and run `quire standby` again"
        raise Corruption("standby.json is damaged", hint=hint, path=path, cause=str(error)) from error
    if state.format > STANDBY_FORMAT:
        raise FormatTooNew("standby.json was written by a newer quire", hint="upgrade quire", path=path)
    return state


def write_standby_state(disk: Disk, root: str, state: StandbyState) -> None:
    """Replace standby.json, durably."""
    write_atomic(disk, os.path.join(root, names.STANDBY), msgspec.json.encode(state))


# ── status ────────────────────────────────────────────────────────────────────────────────────────────────────────────
def status_from_directory(
    disk: Disk,
    root: str,
    settings: ArchiveSettings,
    *,
    store_id: str,
    epoch: int,
    transaction: int,
    owner_state: str,
    is_owned: bool,
) -> ArchiveStatus:
    """Return the status of an archive from its store's directory alone, for a process that does not own the store."""
    state = read_archive_state(disk, root)
    is_clean = state is not None and state.continues(store_id, epoch, transaction)
    at_ms = state.at_ms if state is not None else 0
    is_other = owner_state in ("fenced", "standby", "restored")  # nothing is archived from this directory
    return ArchiveStatus(
        mode=settings.mode,
        state=owner_state if is_other else "owned" if is_owned else "closed" if is_clean else "not closed cleanly",
        interval_seconds=settings.interval_seconds,
        retain_seconds=settings.retain_seconds,
        backlog_bytes=_spooled_bytes(disk, os.path.join(root, SPOOL)),
        last_cut_at_ms=at_ms,
        restorable_at_ms=at_ms if is_clean else 0,
        fenced=owner_state == "fenced",
        last_drill=read_drill(disk, root),
    )


def _spooled_bytes(disk: Disk, spool: str) -> int:
    total = 0
    with suppress(FileNotFoundError):
        for name in disk.names(spool):
            with suppress(FileNotFoundError):  # uploaded meanwhile
                total += disk.size(os.path.join(spool, name))
    return total
