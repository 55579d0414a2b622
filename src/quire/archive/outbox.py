"""The outbox: log objects that are encoded and not in the bucket yet, in the order of the log (A4).

Objects wait in memory, and beyond `archive.memory_bytes` in files of the spool. An object is refused if these files, and the
tables and segments that only the archive still needs, exceed `archive.backlog_bytes`, or if the disk is full; the archiver then
breaks the chain.

States of an object
  held       in memory or in a file of the spool, with the files of its artifacts                  `hold`
  first      the uploading thread may have sent it at any time, so a break of the chain keeps it   `first`
  uploaded   in the bucket; its files are removed                                                  `remove_first`
  dropped    by a break, and never uploaded: a base has its changes; its files are removed         `break_chain`

A file of the spool that a killed process leaves is removed at the next opening (`Artifacts.sweep`).

Threads: the cutting thread holds and drops, the uploading thread removes the first. `lock` is the archiver's condition: methods
that say so require it, the others take it; adding an object wakes the threads that wait on it. Files are written and removed
without it. Raises the errors of the disk.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from quire.archive.artifacts import Artifacts
from quire.archive.format import Header
from quire.core.errors import StorageFault
from quire.core.settings import ArchiveSettings
from quire.durable.failpoints import hit
from quire.durable.files import Disk, write_new


@dataclass(slots=True)
class Outgoing:
    """A log object that is encoded and not in the bucket yet."""

    header: Header
    digest: bytes
    end: int
    """The ordinal of its last event in the queue."""
    taken_at: float
    breaks: int = 0
    """How often the chain had been broken when it was encoded."""
    artifacts: list[tuple[str, str]] = field(default_factory=list)
    """(object name, local file) of artifacts that must be uploaded first."""
    data: bytes | None = None
    path: str = ""
    """The file that holds it, if `data` is `None`."""
    size_bytes: int = 0


class Outbox:
    """The outbox of one archiver."""

    def __init__(
        self, disk: Disk, spool: str, artifacts: Artifacts, settings: ArchiveSettings, lock: threading.Condition
    ) -> None:
        # constant after construction
        self._disk = disk
        self._spool = spool
        self._artifacts = artifacts
        self._settings = settings
        self._lock = lock
        # guarded by _lock
        self._waiting: deque[Outgoing] = deque()
        self.breaks = 0
        """How often the chain was broken. A base begun before the last break lacks the dropped events, and does not count."""

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def first(self) -> Outgoing | None:
        """The next object to upload. REQUIRES the lock."""
        return self._waiting[0] if self._waiting else None

    def sizes(self) -> tuple[int, int]:
        """Return how many bytes are in memory, and how many on disk. REQUIRES the lock."""
        spooled = sum(outgoing.size_bytes for outgoing in self._waiting if outgoing.data is None)
        in_memory = sum(outgoing.size_bytes for outgoing in self._waiting) - spooled
        return in_memory, spooled + self._artifacts.only_kept_bytes()

    def hold(self, outgoing: Outgoing, data: bytes, *, queued_bytes: int) -> str:
        """Add an object, in memory or else on disk. Return why it cannot be added, or "". The queue shares the memory, with
        `queued_bytes`. An empty outbox takes any object in memory."""
        with self._lock:
            is_empty = not self._waiting
            in_memory, on_disk = (0, 0) if is_empty else self.sizes()
        is_in_memory = is_empty or in_memory + queued_bytes + len(data) <= self._settings.memory_bytes
        if on_disk + (0 if is_in_memory else len(data)) > self._settings.backlog_bytes:
            return "the backlog exceeds archive.backlog_bytes"
        if is_in_memory:
            outgoing.data = data
        else:
            outgoing.path = os.path.join(self._spool, f"{outgoing.header.position.number:016x}.log")
            try:
                hit("archive.spool.before")
                self._disk.make_dirs(self._spool)
                # The name is not synced: after a crash the file has no use, because a base follows.
                write_new(self._disk, outgoing.path, data, overwrite=True)
            except (StorageFault, OSError) as error:
                # Not the end of the archive: breaking the chain frees the spool, and the base follows when there is space.
                return f"the backlog cannot be written: {error}"
            hit("archive.spool.written")
        with self._lock:
            self._waiting.append(outgoing)
            self._lock.notify_all()
        return ""

    def remove_first(self, outgoing: Outgoing) -> bool:
        """Remove an object that was uploaded; return `False` if it was dropped meanwhile. REQUIRES the lock."""
        if self.first is not outgoing:
            return False
        self._waiting.popleft()
        return True

    def break_chain(self, *, keep_first: bool) -> list[Outgoing]:
        """Drop what waits, except the first object if `keep_first`, and return it. REQUIRES the lock; call `discard` after it
        was released."""
        self.breaks += 1
        kept = [self._waiting.popleft()] if keep_first and self._waiting else []
        dropped = list(self._waiting)
        self._waiting = deque(kept)
        return dropped

    def discard(self, dropped: Iterable[Outgoing]) -> None:
        """Remove the files of objects that were uploaded or dropped."""
        for outgoing in dropped:
            for path in (outgoing.path, *(path for _, path in outgoing.artifacts)):
                if path:
                    self._artifacts.discard(path)
