"""Applies an archive's events to a directory: for a restore, and for a standby, which continues to follow (A10, A11).

Terms
  file      identified by the inode it had in the owner's directory; here a file in `.files/`, linked to each of its names
  remote    an artifact that stays in the bucket and is read from there on demand

Rules
  1. Events are applied in order; applying one twice is harmless. Until the object that names the base is reached, events may
     refer to files that did not exist any more when the base was read: those are skipped, but a file that they replaced has
     lost its name. After that object, such an event is `Corruption`.
  2. Files are synced before the manifest's rows are committed, as by the owner (S1); `position` is written last.
  3. Paths come from a bucket: one that leads out of the directory is refused.
  4. A standby's directory has readers. Rows that release a file are committed before the file is lost, and what readers still
     need of it is kept (`kept_files.py`). A name that passes to another file always names one of the two. Names are durable
     before rows are committed.

Between two objects, the directory itself holds a standby's state: names in `.files/` are the numbers of files, their hard links
are the names of files, remote_files.json has the rest. An object that was applied in part is applied again from its beginning.

Threads: one. Raises `Corruption`, and the errors of disk and manifest.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress

import msgspec

from quire.archive.format import (
    AnyEvent,
    ArtifactEvent,
    BaseEvent,
    CommitEvent,
    CreateEvent,
    DirectoryEvent,
    LinkEvent,
    RemoveEvent,
    RenameEvent,
    ReserveEvent,
    TruncateEvent,
    WriteEvent,
    ZeroEvent,
)
from quire.archive.kept_files import KeptFiles, is_kept_kind
from quire.archive.recorder import REMOTE_FILES, Shipping, shipping
from quire.archive.state_files import RemoteFile, read_remote_files
from quire.core.closing import ClosedOnExit
from quire.core.errors import Corruption
from quire.core.limits import MIB
from quire.durable import names
from quire.durable.failpoints import hit
from quire.durable.files import Disk, File, remove_if_exists, write_atomic, write_new
from quire.manifest.overlay import TableRows
from quire.manifest.row_image import RowImage

STAGED = "staged"
"""In `.files/`: a temporary link to a file that is about to replace another."""
OPEN_FILES_MAX = 64
ZERO_STEP = MIB
HEADER_LOOK_BYTES = 8
"""Bytes read at the beginning of a file to see whether it has a header; they are zero in a preallocated file."""


Adapt = Callable[[str, list[tuple[bytes, bytes]]], list[tuple[bytes, bytes]]]
"""Called with (table, stored rows). Returns the rows to put instead."""


def _unchanged(_: str, rows: list[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    return rows


class Replay(ClosedOnExit):
    """A directory to which events are applied. `finish` removes what only the replay needs."""

    def __init__(
        self,
        disk: Disk,
        root: str,
        *,
        adapt: Adapt = _unchanged,
        kept: KeptFiles | None = None,
    ) -> None:
        """Prepare a directory. `adapt` is called with the rows of every commit. `kept`: set if readers have the directory open
        (rule 4)."""
        # constant after construction
        self._disk = disk
        self._root = os.path.abspath(root)
        self._files = os.path.join(self._root, names.REPLAYED)
        self._adapt = adapt
        self._kept = kept
        disk.make_dirs(self._files)
        self._rows = RowImage(os.path.join(self._root, names.MANIFEST))
        self._names: dict[str, int] = {}
        self._paths: dict[int, set[str]] = {}
        """The inverse of `_names`."""
        self._open: dict[int, File] = {}
        self._dirty: set[int] = set()
        self._folders: set[str] = set()
        """Directories with changed names that are not durable yet."""
        self._nameless: set[int] = set()
        """Files that have lost their last name, or have no bytes here. `sweep` removes them, after the object is applied."""
        self._swept: set[int] = set()
        self._replaced: set[int] = set()
        """Files that the current object creates, if it may have been applied in part before."""
        self._commits: list[tuple[TableRows, ...]] = []
        self.remote: dict[str, RemoteFile] = {}
        """Artifacts in the bucket, by path."""
        self._is_remote_saved = False
        self.is_lenient = True
        """Whether the object that names the base is still to come (rule 1)."""
        self.base: BaseEvent | None = None
        """The base that is replayed; `None`: the first one that the log names."""
        self.touched: set[str] = set()
        """Paths in the top directory (quire.toml) whose bytes or file have changed since the last `apply` began."""
        self.bytes_written = 0

    @classmethod
    def resume(
        cls,
        disk: Disk,
        root: str,
        *,
        kept: KeptFiles,
        adapt: Adapt = _unchanged,
    ) -> Replay:
        """Continue in a directory that was `settle`d. The names of files are read from the directory itself."""
        replay = cls(disk, root, adapt=adapt, kept=kept)
        numbers = {
            os.stat(os.path.join(replay._files, name)).st_ino: int(name, 16)
            for name in disk.names(replay._files)
            if name != STAGED
        }
        # Those that get no name below lost it in the last object, and the process ended before `sweep`.
        replay._nameless.update(numbers.values())
        for path in _walk(replay._root):
            number = numbers.get(os.stat(path).st_ino)
            if number is not None:
                replay._name(os.path.relpath(path, replay._root), number)
        without_bytes = set(replay._nameless)
        for path, file in read_remote_files(disk, root).items():
            replay._name(path, file.file)
            replay.remote[path] = file
        replay._nameless |= without_bytes
        replay._is_remote_saved = True
        replay.is_lenient = False
        return replay

    # ── events ────────────────────────────────────────────────────────────────────────────────────────────────────────
    def apply(self, events: Sequence[AnyEvent], *, again: bool = False) -> None:
        """Apply events in order: files first, then rows, each durable.

        `again`: an interrupted process may have applied some of the events before; a file that it had begun to replace may be
        missing until its `CreateEvent`. Any other missing file is `Corruption`: its bytes would be lost silently."""
        self.touched.clear()
        self._replaced = {event.file for event in events if isinstance(event, CreateEvent)} if again else set()
        for event in events:
            if isinstance(event, BaseEvent):
                if self.base in (None, event):  # a base that began earlier may be named while this one was read
                    self.is_lenient = False
            else:
                self._apply(event)
        self._flush()

    def _flush(self) -> None:
        """Make files and their names durable, then commit rows, in the owner's order (S1)."""
        for number in list(self._dirty):
            if (file := self._open.get(number)) is not None:
                file.sync()
        self._dirty.clear()
        hit("archive.replay.synced")
        # A restore syncs its directories once, in `settle`: until then its directory is refused as incomplete.
        if self._kept is not None:
            for folder in sorted(self._folders):
                with suppress(FileNotFoundError):
                    self._disk.sync_dir(folder)
            self._folders.clear()
            self._save_remote()
        hit("archive.replay.files")
        commits, self._commits = self._commits, []
        if commits:
            self._rows.apply(commits)
            hit("archive.replay.rows")

    def _apply(self, event: AnyEvent) -> None:
        match event:
            case WriteEvent():
                if self._kept is not None and not event.offset:
                    self._before_header(event.file, self._kept)
                if (file := self._file(event.file)) is not None:
                    file.write_at(event.data, event.offset)
                    self.bytes_written += len(event.data)
            case ZeroEvent():
                if (file := self._file(event.file)) is not None:
                    _write_zeros(file, event.offset, event.length)
            case TruncateEvent():
                self._commit_rows_before_loss()
                if (file := self._file(event.file)) is not None:
                    file.truncate(event.size)
            case ReserveEvent():
                if (file := self._file(event.file)) is not None and file.size() < event.size:
                    file.truncate(event.size)
            case CreateEvent():
                self._commit_rows_before_loss()
                self._create(event.file, event.path)
            case RenameEvent():
                self._commit_rows_before_loss()
                self._bind(event.file, event.path)
                if self._names.get(event.former) == event.file and event.former != event.path:
                    self._unbind(event.former)
            case LinkEvent():
                self._bind(event.file, event.path)
            case RemoveEvent():
                self._commit_rows_before_loss()
                if self._names.get(event.path) == event.file:
                    self._unbind(event.path)
            case ArtifactEvent():
                self._unbind(event.path)
                for name in [name for name in self._paths.get(event.file, ()) if name not in self.remote]:
                    self._unbind(name)  # a name of the file that had this number before
                self._name(self._checked(event.path), event.file)
                self._nameless.add(event.file)  # it has no bytes here, so `sweep` removes any older file of this number
                self.remote[event.path] = RemoteFile(event.key, event.size, event.sha256, event.file)
                self._is_remote_saved = False
            case CommitEvent():
                self._commits.append(
                    tuple((name, self._adapt(name, puts), deletes) for name, puts, deletes in event.tables)
                )
            case DirectoryEvent():
                self._disk.make_dirs(os.path.join(self._root, self._checked(event.path)))
            case _:
                """Events that change neither files nor rows: heartbeats, breaks."""

    def _commit_rows_before_loss(self) -> None:
        """Commit pending rows before a file or its bytes are lost: readers find files by rows (rule 4)."""
        if self._kept is not None and self._commits:
            self._flush()

    def _before_header(self, number: int, kept: KeptFiles) -> None:
        """Keep a copy of a WAL segment whose header is about to be overwritten: the owner is recycling the file, and renames
        it afterwards."""
        paths = [path for path in self._paths.get(number, ()) if is_kept_kind(path)]
        if paths and (file := self._file(number)) is not None and any(file.read_at(HEADER_LOOK_BYTES, 0)):
            self._commit_rows_before_loss()
            for path in paths:
                kept.keep(path, copied=True)

    def _file(self, number: int) -> File | None:
        if (file := self._open.get(number)) is None:
            path = self._content(number)
            if not self._disk.exists(path):
                if self._may_be_missing(number):
                    return None
                raise Corruption("the archive writes to a file that it never created", file=number)
            if len(self._open) >= OPEN_FILES_MAX:
                self._close_one()
            file = self._open[number] = self._disk.open(path)
        self._dirty.add(number)
        self.touched.update(path for path in self._paths.get(number, ()) if "/" not in path)
        return file

    def _may_be_missing(self, number: int) -> bool:
        return self.is_lenient or number in self._swept or number in self._replaced

    def _close_one(self) -> None:
        number, file = next(iter(self._open.items()))
        # Synced before it leaves `_open`: `_flush` syncs only files that are open.
        file.sync()
        file.close()
        del self._open[number]
        self._dirty.discard(number)

    def _content(self, number: int) -> str:
        return os.path.join(self._files, f"{number:x}")

    def _create(self, number: int, path: str) -> None:
        """Create a file. A file that had the same number before loses its names and bytes."""
        if (file := self._open.pop(number, None)) is not None:
            file.close()
        for name in list(self._paths.get(number, ())):
            self._unbind(name)
        remove_if_exists(self._disk, self._content(number))
        hit("archive.replay.replaced")
        # A new file, not a truncated one: `.kept/` may hold a link to the old one.
        self._disk.open(self._content(number), create=True).close()
        self._folders.add(self._files)
        self._swept.discard(number)
        self._bind(number, path)

    def _bind(self, number: int, path: str) -> None:
        target = os.path.join(self._root, self._checked(path))
        if self._names.get(path) == number:
            return
        if not self._disk.exists(self._content(number)):
            if self._may_be_missing(number):
                if self._kept is None:
                    # The file that the base has under this name was replaced; if the name is used later, its event follows.
                    self._unbind(path)
                return
            raise Corruption("the archive names a file that it never created", file=number, path=path)
        self._disk.make_dirs(os.path.dirname(target))
        if self._kept is not None:
            self._kept.replace(path)
        if self._kept is not None and path not in self.remote and self._disk.exists(target):
            # By rename, so that readers always find one of the two files under this name.
            staged = os.path.join(self._files, STAGED)
            remove_if_exists(self._disk, staged)
            self._disk.link(self._content(number), staged)
            self._disk.rename(staged, target)
            self._unname(path)
        else:
            self._unbind(path)
            self._disk.link(self._content(number), target)
        self._folders.add(os.path.dirname(target))
        self._name(path, number)

    def _unbind(self, path: str) -> None:
        if self._names.get(path) is None:
            return
        if self.remote.pop(path, None) is None:
            target = os.path.join(self._root, self._checked(path))
            if self._kept is not None:
                self._kept.keep(path)
            remove_if_exists(self._disk, target)
            self._folders.add(os.path.dirname(target))
        else:
            self._is_remote_saved = False
        self._unname(path)

    def _name(self, path: str, number: int) -> None:
        self._names[path] = number
        self._paths.setdefault(number, set()).add(path)
        self._nameless.discard(number)
        if "/" not in path:
            self.touched.add(path)

    def _unname(self, path: str) -> None:
        number = self._names.pop(path, None)
        if number is not None:
            paths = self._paths[number]
            paths.discard(path)
            if not paths:
                del self._paths[number]
                self._nameless.add(number)

    def _checked(self, path: str) -> str:
        parts = path.split("/")
        if shipping(path) is Shipping.NOT and parts[0] not in (names.PAGES, names.STREAMS, names.LSM, names.QUARANTINE):
            raise Corruption("the archive contains a file that does not belong to a store", path=path)
        if any(part in ("", ".", "..") for part in parts) or "\0" in path:
            raise Corruption("the archive contains a path outside the store", path=path)
        return path

    # ── between two objects ───────────────────────────────────────────────────────────────────────────────────────────
    def sweep(self) -> None:
        """Remove files without a name. Call it after the position is durable: before, the object may be applied again."""
        for number in self._nameless:
            if (file := self._open.pop(number, None)) is not None:
                file.close()
            self._dirty.discard(number)
            remove_if_exists(self._disk, self._content(number))
            self._swept.add(number)
        self._nameless.clear()
        if self._kept is not None:
            self._kept.release()

    def settle(self) -> None:
        """Make everything durable, so that `resume` can continue here."""
        self._save_remote()
        for file in self._open.values():
            file.sync()
        self.sweep()
        self._sync_folders()

    def _save_remote(self) -> None:
        if not self._is_remote_saved:
            write_atomic(self._disk, os.path.join(self._root, REMOTE_FILES), msgspec.json.encode(self.remote))
            self._is_remote_saved = True

    def _sync_folders(self) -> None:
        folders = {os.path.dirname(os.path.join(self._root, path)) for path in self._names if path not in self.remote}
        # `.files/` too: later objects name a file only by its number.
        for folder in sorted(folders | {self._root, self._files}):
            self._disk.sync_dir(folder)

    def place(self, path: str, data: bytes) -> None:
        """Store the bytes of a remote file in the directory."""
        target = os.path.join(self._root, self._checked(path))
        self._disk.make_dirs(os.path.dirname(target))
        write_new(self._disk, target, data, overwrite=True)
        del self.remote[path]
        self._is_remote_saved = False

    # ── finishing ─────────────────────────────────────────────────────────────────────────────────────────────────────
    @property
    def files(self) -> int:
        """Number of file names."""
        return len(self._names)

    def rows(self) -> RowImage:
        """Return the manifest's rows so far, for corrections."""
        return self._rows

    def finish(self) -> None:
        """Make the directory durable and complete, and remove what only the replay needs."""
        self._is_remote_saved = False
        self.settle()
        self.close()
        for name in self._disk.names(self._files):
            self._disk.remove(os.path.join(self._files, name))
        # Last: while it exists, a directory without restored.json is refused as incomplete (layout.py).
        self._disk.remove_dir(self._files)
        self._disk.sync_dir(self._root)

    def close(self) -> None:
        for file in self._open.values():
            file.sync()
            file.close()
        self._open.clear()
        self._rows.close()


def _walk(root: str) -> Iterator[str]:
    """Yield the files of a store's directory that an archive may name."""
    yield from (path for name in (names.CONFIG,) if os.path.isfile(path := os.path.join(root, name)))
    for part in (names.PAGES, names.STREAMS, names.LSM, names.QUARANTINE):
        for folder, _, present in os.walk(os.path.join(root, part)):
            yield from (os.path.join(folder, name) for name in present)


def _write_zeros(file: File, offset: int, length: int) -> None:
    """Write zeros. Beyond the end of the file, only its size is extended: such zeros were half of what a restore wrote."""
    size, end = file.size(), offset + length
    if end > size:
        file.truncate(end)
    zeros = bytes(min(length, ZERO_STEP))
    for at in range(offset, min(end, size), ZERO_STEP):
        file.write_at(memoryview(zeros)[: min(end, size) - at], at)
