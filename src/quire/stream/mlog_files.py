"""Where the files of one manifest log are: its chunks, its snapshots, its lock.

A log is named by the store's root and the stream's id; a follower's mirror is the same under another root. All names are
`quire.durable.names`' business; this module joins them to a root and lists what is there.

Rules
  1. `.tmp` files are never read: what they hold was acknowledged to nobody. The writer sweeps them when it opens.

Values, any thread. Raises what the disk raises.
"""

from __future__ import annotations

import os
from contextlib import suppress

import msgspec

from quire.durable.files import Disk
from quire.durable.names import (
    TEMPORARY,
    ManifestLogFile,
    ManifestLogLock,
    ManifestLogSnapshotFile,
    parse_path,
    stream_dir,
)
from quire.stream.mlog_format import Identity, identity_of


class LogFiles(msgspec.Struct, frozen=True):
    """The files of one stream's manifest log."""

    disk: Disk
    root: str
    stream_id: int
    store_locked: bool = False
    """Whether the caller owns the store: its lock covers that of the log."""
    store_id: str = ""
    """The store's, which its chunks carry; empty if it is not known, and then any store's will do."""

    @property
    def identity(self) -> Identity:
        return identity_of(self.store_id, self.stream_id)

    @property
    def directory(self) -> str:
        return os.path.join(self.root, stream_dir(self.stream_id, "manifest"))

    @property
    def lock(self) -> str:
        return os.path.join(self.root, ManifestLogLock(stream_id=self.stream_id).path)

    def chunk(self, index: int, *, temporary: bool = False) -> str:
        """The path of a chunk."""
        name = ManifestLogFile(stream_id=self.stream_id, chunk_index=index, temporary=temporary)
        return os.path.join(self.root, name.path)

    def snapshot(self, snapshot_id: int) -> str:
        """The path of a snapshot."""
        return os.path.join(self.root, ManifestLogSnapshotFile(stream_id=self.stream_id, snapshot_id=snapshot_id).path)

    def chunks(self) -> list[int]:
        """The indexes of the chunks that are here, in order."""
        found = [parse_path(self._relative(name)) for name in self._names()]
        return sorted(each.chunk_index for each in found if isinstance(each, ManifestLogFile) and not each.temporary)

    def snapshots(self) -> list[int]:
        """The ids of the snapshots that are here, newest first."""
        found = [parse_path(self._relative(name)) for name in self._names()]
        return sorted((each.snapshot_id for each in found if isinstance(each, ManifestLogSnapshotFile)), reverse=True)

    def sweep(self) -> int:
        """Remove what a dead writer left half made (rule 1); how many files."""
        left = [name for name in self._names() if name.endswith(TEMPORARY)]
        for name in left:
            with suppress(FileNotFoundError):
                self.disk.remove(os.path.join(self.directory, name))
        if left:
            self.disk.sync_dir(self.directory)
        return len(left)

    def _names(self) -> list[str]:
        try:
            return self.disk.names(self.directory)
        except FileNotFoundError:
            return []

    def _relative(self, name: str) -> str:
        return f"{stream_dir(self.stream_id, 'manifest')}/{name}"
