"""Making a directory of an archive's events: for a restore, and for a standby that goes on (A10, A11).

Terms
  file      known by the inode it had in the owner's directory; here a file in `.files/`, linked to each of its names
  remote    an artifact that stays in the bucket and is read from there on demand

Rules
  1. Events are applied in order; applying one twice does no harm. Until the object that names the base is reached, events may
     speak of files that were gone when the base was read: those are passed over. After it, that is `Corruption`.
  2. Files are synced before the manifest's rows are committed, as the owner did it (S1); `position` is written last.
  3. Paths come from a bucket: one that leaves the directory is refused.

Threads: one. Raises `Corruption`, and what disk and manifest raise.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import suppress
from typing import Self

import msgspec

from quire.archive.format import (
    NO_DIGEST,
    AnyEvent,
    ArtifactEvent,
    BaseEvent,
    CommitEvent,
    CreateEvent,
    DirectoryEvent,
    LinkEvent,
    Position,
    RemoveEvent,
    RenameEvent,
    ReserveEvent,
    TruncateEvent,
    WriteEvent,
    ZeroEvent,
)
from quire.archive.recorder import REMOTE_FILES, Shipping, shipping
from quire.core.errors import Corruption
from quire.core.limits import MIB
from quire.durable import names
from quire.durable.files import Disk, File, read_all, write_atomic
from quire.manifest.overlay import TableRows
from quire.manifest.row_image import RowImage

FILES = ".files"
"""In a directory that is being made: its files by number."""
ORIGIN = "restored.json"
"""In a store's directory: what it was restored from."""
OPEN_FILES_MAX = 64
ZERO_STEP = MIB


class Origin(msgspec.Struct, frozen=True, kw_only=True):
    """restored.json: what a directory was restored from."""

    store_id: str
    url: str
    position: Position
    digest: bytes
    """SHA-256 of the last object that was applied."""
    at_ms: int


class RemoteFile(msgspec.Struct, frozen=True):
    """An artifact in the bucket."""

    key: str
    size: int
    sha256: bytes


class Replay:
    """A directory that events are applied to. `finish` it to get rid of what only replaying needs."""

    def __init__(self, disk: Disk, root: str) -> None:
        self._disk = disk
        self._root = os.path.abspath(root)
        self._files = os.path.join(self._root, FILES)
        disk.make_dirs(self._files)
        self._rows = RowImage(os.path.join(self._root, names.MANIFEST))
        self._names: dict[str, int] = {}
        self._open: dict[int, File] = {}
        self._dirty: set[int] = set()
        self._commits: list[tuple[TableRows, ...]] = []
        self.remote: dict[str, RemoteFile] = {}
        """Artifacts by path."""
        self.is_lenient = True
        """Whether the object that names the base is still to come (rule 1)."""
        self.bytes_written = 0

    # ── events ────────────────────────────────────────────────────────────────────────────────────────────────────────
    def apply(self, events: Iterable[AnyEvent]) -> None:
        """Apply events in order. Files first, then rows, each durable."""
        for event in events:
            self._apply(event)
        for number in list(self._dirty):
            if (file := self._open.get(number)) is not None:
                file.sync()
        self._dirty.clear()
        commits, self._commits = self._commits, []
        if commits:
            self._rows.apply(commits)

    def _apply(self, event: AnyEvent) -> None:
        match event:
            case WriteEvent():
                if (file := self._file(event.file)) is not None:
                    file.write_at(event.data, event.offset)
                    self.bytes_written += len(event.data)
            case ZeroEvent():
                if (file := self._file(event.file)) is not None:
                    _write_zeros(file, event.offset, event.length)
            case TruncateEvent():
                if (file := self._file(event.file)) is not None:
                    file.truncate(event.size)
            case ReserveEvent():
                if (file := self._file(event.file)) is not None and file.size() < event.size:
                    file.truncate(event.size)
            case CreateEvent():
                self._create(event.file, event.path)
            case RenameEvent():
                self._bind(event.file, event.path)
                if self._names.get(event.former) == event.file and event.former != event.path:
                    self._unbind(event.former)
            case LinkEvent():
                self._bind(event.file, event.path)
            case RemoveEvent():
                if self._names.get(event.path) == event.file:
                    self._unbind(event.path)
            case ArtifactEvent():
                self._unbind(event.path)
                self._names[self._checked(event.path)] = event.file
                self.remote[event.path] = RemoteFile(event.key, event.size, event.sha256)
            case CommitEvent():
                self._commits.append(event.tables)
            case DirectoryEvent():
                self._disk.make_dirs(os.path.join(self._root, self._checked(event.path)))
            case BaseEvent():
                self.is_lenient = False

    def _file(self, number: int) -> File | None:
        if (file := self._open.get(number)) is None:
            path = self._content(number)
            if not self._disk.exists(path):
                if self.is_lenient:
                    return None
                raise Corruption("the archive writes to a file that it never made", file=number)
            if len(self._open) >= OPEN_FILES_MAX:
                self._close_one()
            file = self._open[number] = self._disk.open(path)
        self._dirty.add(number)
        return file

    def _close_one(self) -> None:
        number, file = next(iter(self._open.items()))
        file.sync()
        file.close()
        del self._open[number]
        self._dirty.discard(number)

    def _content(self, number: int) -> str:
        return os.path.join(self._files, f"{number:x}")

    def _create(self, number: int, path: str) -> None:
        """A number that was used before belongs to a new file now."""
        if (file := self._open.pop(number, None)) is not None:
            file.close()
        for name in [name for name, bound in self._names.items() if bound == number]:
            self._unbind(name)
        with suppress(FileNotFoundError):
            self._disk.remove(self._content(number))
        self._disk.open(self._content(number), create=True).close()
        self._bind(number, path)

    def _bind(self, number: int, path: str) -> None:
        target = os.path.join(self._root, self._checked(path))
        if self._names.get(path) == number:
            return
        if not self._disk.exists(self._content(number)):
            if self.is_lenient:
                return
            raise Corruption("the archive names a file that it never made", file=number, path=path)
        self._unbind(path)
        self._disk.make_dirs(os.path.dirname(target))
        self._disk.link(self._content(number), target)
        self._names[path] = number

    def _unbind(self, path: str) -> None:
        number = self._names.pop(path, None)
        if number is None:
            return
        if self.remote.pop(path, None) is None:
            with suppress(FileNotFoundError):
                self._disk.remove(os.path.join(self._root, self._checked(path)))

    def _checked(self, path: str) -> str:
        parts = path.split("/")
        if shipping(path) is Shipping.NOT and parts[0] not in (names.PAGES, names.STREAMS, names.LSM, names.QUARANTINE):
            raise Corruption("the archive has a file that no store has", path=path)
        if any(part in ("", ".", "..") for part in parts) or "\0" in path:
            raise Corruption("the archive has a path that leaves the store", path=path)
        return path

    # ── the end ───────────────────────────────────────────────────────────────────────────────────────────────────────
    @property
    def files(self) -> int:
        """How many names there are."""
        return len(self._names)

    def rows(self) -> RowImage:
        """The manifest so far, for corrections."""
        return self._rows

    def finish(self) -> None:
        """Write down what stayed in the bucket; remove what only replaying needs; have all names durable."""
        write_atomic(self._disk, os.path.join(self._root, REMOTE_FILES), msgspec.json.encode(self.remote))
        self.close()
        for name in self._disk.names(self._files):
            self._disk.remove(os.path.join(self._files, name))
        self._disk.remove_dir(self._files)
        folders = {os.path.dirname(os.path.join(self._root, path)) for path in self._names if path not in self.remote}
        for folder in sorted(folders | {self._root}):
            self._disk.sync_dir(folder)

    def close(self) -> None:
        for file in self._open.values():
            file.sync()
            file.close()
        self._open.clear()
        self._rows.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def read_remote_files(disk: Disk, root: str) -> dict[str, RemoteFile]:
    """The artifacts that a restore left in the bucket, by path."""
    try:
        return msgspec.json.decode(read_all(disk, os.path.join(root, REMOTE_FILES)), type=dict[str, RemoteFile])
    except FileNotFoundError:
        return {}
    except msgspec.MsgspecError as error:
        hint = "restore the store again"
        raise Corruption("remote_files.json is damaged", hint=hint, path=root, cause=str(error)) from error


def read_origin(disk: Disk, root: str) -> Origin | None:
    """What the directory was restored from; `None` if it was not."""
    try:
        return msgspec.json.decode(read_all(disk, os.path.join(root, ORIGIN)), type=Origin)
    except (FileNotFoundError, msgspec.MsgspecError):
        return None


def parent_of_epoch(disk: Disk, root: str, store_id: str, epoch: int) -> tuple[bytes, Position]:
    """(digest, position) of the last object of the owner before this epoch, as far as the directory knows it."""
    origin = read_origin(disk, root)
    if origin is None or origin.store_id != store_id or origin.position.epoch >= epoch:
        return NO_DIGEST, Position(0, 0)
    return origin.digest, origin.position


def write_origin(disk: Disk, root: str, origin: Origin) -> None:
    """Note what the directory was restored from."""
    write_atomic(disk, os.path.join(root, ORIGIN), msgspec.json.encode(origin))


def _write_zeros(file: File, offset: int, length: int) -> None:
    zeros = bytes(min(length, ZERO_STEP))
    for at in range(offset, offset + length, ZERO_STEP):
        file.write_at(memoryview(zeros)[: offset + length - at], at)
