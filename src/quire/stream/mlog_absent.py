"""What stands in for a manifest log that is not open: one that is off, or a shadow's that failed.

Threads: as `ManifestLog`. Raises `StoreLocked` when it is made, `StoreClosed` from `append`.
"""

from __future__ import annotations

from collections.abc import Callable

from quire.core.clock import Clock
from quire.core.errors import StoreClosed
from quire.durable.locks import CoveredLock, FileLock
from quire.stream.mlog_files import LogFiles
from quire.stream.mlog_format import NO_SEGMENT
from quire.stream.mlog_index import ManifestIndex
from quire.stream.mlog_log import ManifestLog, Ticked
from quire.stream.mlog_metrics import LogFigures, crc_errors
from quire.stream.mlog_reader import START, Position
from quire.stream.mlog_records import Payload
from quire.stream.mlog_tier2 import LogObjects
from quire.stream.mlog_writer import lock_log


class AbsentLog(ManifestLog):
    """Stands in for a log that is not open, because it is off or because a shadow's failed: nothing of it is read or written.

    It holds the log's lock, so the stream still has one writer.
    """

    def __init__(
        self, files: LogFiles, objects: LogObjects | None, clock: Clock, reopen: Callable[[], ManifestLog]
    ) -> None:
        self.files = files
        self.objects = objects
        self.index = ManifestIndex()
        self._reopen = reopen
        self._file_lock: FileLock | CoveredLock = lock_log(files, clock)

    def open_again(self) -> ManifestLog:
        """The log itself, in place of this one."""
        self._file_lock.close()
        return self._reopen()

    @property
    def committed(self) -> Position:
        return START

    def append(self, value: Payload, segment_id: int = NO_SEGMENT, *, logical_offset: int = 0) -> Position:
        raise StoreClosed(
            "the manifest log is not open",
            hint="switch it on first",
            record=value,
            segment=segment_id,
            offset=logical_offset,
        )

    def commit(self) -> Position:
        return START

    def reserve(self) -> None:
        """Nothing is written."""

    def snapshot(self) -> int:
        return self.index.snapshot_id

    def rotate(self) -> int | None:
        return None

    def rotate_when_due(self) -> float | None:
        return None

    def upload(self) -> list[int]:
        return []

    def tick(self) -> Ticked:
        return Ticked()

    def count_retry(self) -> None:
        """Nobody is told of it."""

    def figures(self) -> LogFigures:
        return LogFigures(stream_id=self.files.stream_id, manifest_crc_error_count=crc_errors(self.files.stream_id))

    def close(self) -> None:
        self._file_lock.close()

    def abandon(self) -> None:
        self._file_lock.close()
