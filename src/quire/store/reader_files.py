"""The disk of a reader, whose files another process writes: an owner, or a standby.

A standby and a restored owner have some files only in the bucket (`archive/remote_files.py`), and may change the list of them
at any time. A reader checks before each use of a name whether the list was replaced: the name may refer to another file now.

A standby that rebuilds swaps files and rows one after the other; standby.json records this, and counts the swaps.
A caller that needs files and rows of the same state reads both again if they were swapped in between (`directories_id`).

Threads: any. Raises `Unavailable`, and the errors of the disk and the object store."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import suppress

from quire.archive.kept_files import is_kept_kind, kept_path
from quire.archive.recorder import REMOTE_FILES
from quire.archive.remote_files import RemoteFiles
from quire.archive.state_files import StandbyPhase, read_remote_files, read_standby_state
from quire.core.errors import Unavailable
from quire.durable.files import Disk, File
from quire.objects.api import ObjectStore

EXCHANGE_SECONDS = 30.0
"""How long to wait for a standby that is swapping its files: renames, and one transaction with all its rows."""
PAUSE_SECONDS = 0.01


class ReaderFiles(RemoteFiles):
    """A read-only `Disk` that follows changes of remote_files.json."""

    def __init__(self, inner: Disk, root: str, objects: Callable[[], ObjectStore]) -> None:
        self._list = os.path.join(os.path.abspath(root), REMOTE_FILES)
        self._seen = self._stamp()
        super().__init__(inner, root, objects)

    def _stamp(self) -> tuple[int, int, int]:
        """Return a value that changes whenever the list is replaced, which is always done by a rename."""
        try:
            status = os.stat(self._list)
        except FileNotFoundError:
            return 0, 0, 0
        return status.st_ino, status.st_mtime_ns, status.st_size

    def _refresh(self) -> None:
        stamp = self._stamp()
        if stamp != self._seen:
            with self._lock:
                listed = read_remote_files(self._inner, self._root)
                self._remote = {os.path.join(self._root, path): file for path, file in listed.items()}
                self._seen = stamp  # taken before the list was read: a list that replaced it since is read next time

    def directories_id(self) -> int:
        """Return the number of swaps so far, after waiting for one in progress (`ReplaceableDisk`).

        Number and phase come from one read of one file. An identity of the directories themselves, read after the phase, could
        already be that of a swap that has begun in between."""
        ends = time.monotonic() + EXCHANGE_SECONDS
        while (state := read_standby_state(self._inner, self._root)) is not None:
            if state.phase is not StandbyPhase.SWAPPING:
                return state.swaps
            if time.monotonic() > ends:
                hint = "run `quire standby` again to complete it"
                raise Unavailable("the standby is replacing its files", hint=hint, path=self._root)
            time.sleep(PAUSE_SECONDS)
        return 0

    def open(self, path: str, *, create: bool = False, exclusive: bool = False, write: bool = True) -> File:
        self._refresh()
        relative = os.path.relpath(path, self._root)
        if is_kept_kind(relative):
            with suppress(FileNotFoundError):  # exists only if the standby has lost the segment while readers need it
                return self._inner.open(kept_path(self._root, relative), write=False)
        return super().open(path, create=create, exclusive=exclusive, write=write)

    def exists(self, path: str) -> bool:
        self._refresh()
        return super().exists(path)

    def size(self, path: str) -> int:
        self._refresh()
        return super().size(path)

    def names(self, path: str) -> list[str]:
        self._refresh()
        return super().names(path)
