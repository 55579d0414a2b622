"""The quarantine of a store: the directory to which recovery moves files that it cannot prove to be garbage.

Terms
  entry   one file or directory in quarantine, with a note: the path it had in the store, why it was moved, and when
  number  identifies an entry; `quarantine/<number>.json` is its note, `quarantine/<number>/<original path>` the file itself

A file moves in this order: the note is written and synced, the file is renamed, both directories are synced. A crash before the
rename leaves a note without a file, which is not an entry: the next move removes it. A crash after the rename leaves the entry.
At any time the file is at its old path or in quarantine; after power loss possibly at both, and then it is moved again.

The store itself never removes anything from quarantine: `quire quarantine` lists, restores and removes entries. Quarantined
files are not part of any database: no engine reads them, and repair commands are given them by name.

Threads: one at a time per store, the owner's. Raises `NotFound` for an unknown number, `AlreadyExists` if the path of a file to
be restored is taken, `Corruption` for a note that cannot be read, and what the disk raises.
"""

from __future__ import annotations

import os

import msgspec

from quire.core.decoding import UNDECODABLE, described
from quire.core.errors import AlreadyExists, Corruption, NotFound
from quire.core.events import emit
from quire.durable.failpoints import hit
from quire.durable.files import Disk, read_all, remove_if_exists, remove_tree, write_atomic
from quire.durable.names import QUARANTINE, QuarantinedFile, QuarantineNote, parse_path

NOTE_BYTES_MAX = 64 * 1024
"""A note is a few hundred bytes; a larger file is not a note."""


class Entry(msgspec.Struct, frozen=True, kw_only=True):
    """One entry, as its note describes it; fields are only appended, with defaults."""

    number: int
    path: str
    """The original path, relative to the store."""
    why: str
    moved_ms: int
    database: int = 0
    """The id of the database or stream that it belonged to; 0 if unknown."""
    size_bytes: int = 0
    """Bytes in the file when it was moved; 0 for a directory."""

    @property
    def place(self) -> str:
        """The current path, relative to the store."""
        return QuarantinedFile(number=self.number, original=self.path).path


def move(disk: Disk, root: str, path: str, *, why: str, at_ms: int, database: int = 0) -> Entry:
    """Move the file or directory at `path` (relative to the store at `root`) into quarantine; durable on return."""
    source = os.path.join(root, path)
    home = os.path.join(root, QUARANTINE)
    disk.make_dirs(home)
    numbers = _numbers(disk, root)
    for number in numbers:
        if _is_unfinished(disk, root, number):
            _forget(disk, root, number)
    number = 1 + max(numbers, default=0)
    entry = Entry(number=number, path=path, why=why, moved_ms=at_ms, database=database, size_bytes=_size(disk, source))
    target = os.path.join(root, entry.place)
    # The note first: without one, the file's original path would be lost.
    write_atomic(disk, os.path.join(root, QuarantineNote(number=number).path), msgspec.json.encode(entry))
    hit("quarantine.noted")
    disk.make_dirs(os.path.dirname(target))
    disk.rename(source, target)
    hit("quarantine.renamed")
    disk.sync_dir(os.path.dirname(target))  # the new name first: if neither name were durable, the file could vanish
    disk.sync_dir(os.path.dirname(source))
    hit("quarantine.moved")
    emit("warning", "quarantine.moved", path=path, to=entry.place, why=why, database=database)
    return entry


def entries(disk: Disk, root: str) -> list[Entry]:
    """Return all entries, oldest first. A note that cannot be read becomes an entry whose `why` is the error."""
    listed = []
    for number in sorted(_numbers(disk, root)):
        try:
            entry = _entry(disk, root, number)
        except Corruption as damage:
            entry = Entry(number=number, path="", why=str(damage), moved_ms=0)
        if entry is not None:
            listed.append(entry)
    return listed


def find(disk: Disk, root: str, number: int) -> Entry:
    """Return the entry with this number."""
    entry = _entry(disk, root, number) if number > 0 else None
    if entry is None:
        raise NotFound("no file in quarantine has this number", hint="`quire quarantine ls` lists them", number=number)
    return entry


def restore(disk: Disk, root: str, number: int) -> Entry:
    """Move an entry back to its original path, never replacing another file; durable on return.

    The file is moved before the note is removed: a crash in between leaves a note without a file, which is not an entry.
    """
    entry = find(disk, root, number)
    source, target = os.path.join(root, entry.place), os.path.join(root, entry.path)
    if disk.exists(target):
        raise AlreadyExists(
            "the original path is in use",
            hint="move that file away first, or run `quire quarantine rm`",
            path=entry.path,
        )
    disk.make_dirs(os.path.dirname(target))
    disk.rename(source, target)
    disk.sync_dir(os.path.dirname(target))
    disk.sync_dir(os.path.dirname(source))
    _forget(disk, root, number)
    emit("info", "quarantine.restored", path=entry.path)
    return entry


def remove(disk: Disk, root: str, number: int) -> None:
    """Remove an entry permanently."""
    if number not in _numbers(disk, root):
        find(disk, root, number)  # raises
    _forget(disk, root, number)
    emit("info", "quarantine.removed", number=number)


def _forget(disk: Disk, root: str, number: int) -> None:
    """Remove the files of an entry, then its note: a crash in between leaves a note without a file."""
    remove_tree(disk, os.path.join(root, QUARANTINE, f"{number:08x}"))
    remove_if_exists(disk, os.path.join(root, QuarantineNote(number=number).path))
    disk.sync_dir(os.path.join(root, QUARANTINE))


def _numbers(disk: Disk, root: str) -> set[int]:
    """Return the numbers of all notes and directories."""
    try:
        names = disk.names(os.path.join(root, QUARANTINE))
    except FileNotFoundError:
        return set()
    parsed = (parse_path(f"{QUARANTINE}/{name if name.endswith('.json') else f'{name}/-'}") for name in names)
    return {name.number for name in parsed if isinstance(name, QuarantineNote | QuarantinedFile)}


def _entry(disk: Disk, root: str, number: int) -> Entry | None:
    """Return the entry with this number; `None` if there is none, or only the note of a move that did not complete."""
    path = os.path.join(root, QuarantineNote(number=number).path)
    try:
        if disk.size(path) > NOTE_BYTES_MAX:
            raise Corruption("a note in quarantine is too large", hint=_BY_HAND, path=path)
        entry = msgspec.json.decode(read_all(disk, path), type=described(Entry))
    except FileNotFoundError:
        if number not in _numbers(disk, root):
            return None
        raise Corruption("a file in quarantine has no note", hint=_BY_HAND, number=number) from None
    except UNDECODABLE as error:
        raise Corruption(f"a note in quarantine cannot be read: {error}", hint=_BY_HAND, path=path) from error
    if entry.number != number or not _is_inside(entry.path):
        raise Corruption("a note in quarantine has the wrong number", hint=_BY_HAND, path=path)
    return entry if disk.exists(os.path.join(root, entry.place)) else None


def _is_unfinished(disk: Disk, root: str, number: int) -> bool:
    try:
        return _entry(disk, root, number) is None
    except Corruption:
        return False  # kept, so that an operator can examine it


_BY_HAND = "its path below the number is the original path; inspect it, then run `quire quarantine rm NUMBER`"


def _is_inside(path: str) -> bool:
    """Return whether a note's path is inside the store. A note may be damaged or edited, so its path is not trusted."""
    parts = path.split("/")
    return bool(path) and not path.startswith("/") and not {"", ".", ".."} & set(parts) and parts[0] != QUARANTINE


def _size(disk: Disk, path: str) -> int:
    """Return the size of a file in bytes; 0 for a directory."""
    try:
        return 0 if os.path.isdir(path) else disk.size(path)
    except FileNotFoundError:
        return 0
