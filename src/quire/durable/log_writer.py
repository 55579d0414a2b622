"""Appends records to a framed log and makes them durable.

A log is created atomically (header written and synced under a temporary name, renamed, directory synced), so a log without a
good header is corrupt, never incomplete. Opening for append cuts off a torn tail and syncs before anything is appended (P4):
frames after the cut are gone, and would not fit the chain if they reappeared. Each frame records `durable`, the number of
leading bytes that a completed sync covered when the frame was written: the reader's proof (P3). A clean close appends a mark
and syncs it, which distinguishes damage at rest from a torn tail.

After a failed append or sync the state on disk is unknown: every later call raises `StoreUnusable` until the log is reopened;
nothing is retried on the same descriptor.

Threads: any number may append and sync; one lock orders appends, another orders syncs, so appends continue while the disk
syncs. A waiting sync that finds its bytes already covered returns without syncing: that is the group sync. Format page:
`docs/formats/framed-log.md`. Raises `StoreUnusable`, `StoreClosed`, `OutOfRange` (a payload of 0 bytes or too many; the writer
stays usable), `AlreadyExists`, and on opening what the reader raises and `StorageFault`.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress

from quire.core.closing import AbandonedOnError
from quire.core.errors import AlreadyExists, StorageFault, StoreClosed, StoreUnusable
from quire.durable.checksums import Bytes
from quire.durable.files import Disk, File, drop_cached_pages, write_atomic
from quire.durable.log_format import LogIdentity, encode_frames, encode_header, encode_mark
from quire.durable.log_reader import LogContents, LogEnd, scan


class LogWriter(AbandonedOnError):
    """An open framed log; created by `create` or `open`."""

    def __init__(self, file: File, contents: LogContents) -> None:
        # Constant after construction.
        self._file = file
        self.header = contents.header
        self._tag = contents.header.tag
        # Held while the tail moves. Order: the sync lock before the append lock.
        self._append_lock = threading.Lock()
        self._end = contents.end
        self._link = contents.link
        self._marked = contents.ends_with_mark
        # Held while the disk syncs.
        self._sync_lock = threading.Lock()
        self._durable = contents.end
        self._durable_link = contents.link
        # Written under either lock, read without one. Never cleared.
        self._failure: StoreUnusable | StoreClosed | None = None

    @classmethod
    def create(
        cls, disk: Disk, path: str, *, kind: bytes, identity: LogIdentity | None = None, replace: bool = False
    ) -> LogWriter:
        """Create an empty log. `replace` atomically starts a new life of an existing one."""
        if not replace and disk.exists(path):
            raise AlreadyExists("a log already exists", hint="open it instead", path=path)
        # Never an all-zero tag: a scan over zeros left by power loss would stop at every byte.
        tag = int.from_bytes(os.urandom(8), "little") | 1  # not `secrets`: it would load OpenSSL
        write_atomic(disk, path, encode_header(kind, tag, identity))
        return cls.open(disk, path, kind=kind)[0]

    @classmethod
    def open(
        cls,
        disk: Disk,
        path: str,
        *,
        kind: bytes,
        vouched: LogEnd | None = None,
        examine: Callable[[LogContents], None] | None = None,
    ) -> tuple[LogWriter, LogContents]:
        """Recover the log, cut off a torn tail, and continue after it; also return the contents of the log.

        If the log is not the vouched one, or `examine` raises, the file stays unchanged, torn tail included: it may be
        evidence.
        """
        file = disk.open(path)
        try:
            # After an earlier failed sync the page cache may have records that the disk does not.
            file.sync()
            drop_cached_pages(file)
            contents = scan(file.read_at(file.size(), 0), path, kind=kind, vouched=vouched)
            if examine is not None:
                examine(contents)
            if contents.torn_bytes:
                file.truncate(contents.end)
                file.sync()
        except BaseException:
            file.close()
            raise
        return cls(file, contents), contents

    @property
    def path(self) -> str:
        return self._file.path

    @property
    def end(self) -> int:
        """Where the next frame is appended. `end - header.size` is the size of all frames."""
        return self._end

    @property
    def durable(self) -> int:
        """The offset below which everything has been synced."""
        return self._durable

    @property
    def is_empty(self) -> bool:
        """Whether nothing has been appended in this life of the file."""
        return self._end == self.header.size

    def durable_end(self) -> LogEnd:
        """Return the current durable end, to be recorded elsewhere and passed to `open` as `vouched`."""
        with self._sync_lock:
            return LogEnd(salt=self.header.salt, end=self._durable, link=self._durable_link)

    def append(self, payload: Bytes) -> int:
        """Write one record and return the `end` after it. Durable after `sync`."""
        return self.append_many((payload,))

    def append_many(self, payloads: Iterable[Bytes]) -> int:
        """Write records in one step and return the `end` after them. A crash may keep only the first few."""
        with self._append_lock:
            self._check()
            # `_durable` is read without the sync lock: an older value proves less, never something false.
            data, link = encode_frames(payloads, tag=self._tag, link=self._link, synced=self._durable)
            if data:
                self._guard("an append", lambda: self._file.write_at(data, self._end))
                self._end += len(data)
                self._link = link
                self._marked = False
            return self._end

    def sync(self, upto: int | None = None) -> int:
        """Make everything below `upto` (default: all records) durable and return the durable end."""
        if upto is None:
            upto = self._end
        with self._sync_lock:
            self._check()
            if self._durable < upto:
                # Read before the sync starts: it may or may not cover concurrent appends.
                with self._append_lock:
                    target, link = self._end, self._link
                self._guard("a sync", self._file.sync)
                self._durable, self._durable_link = target, link
            return self._durable

    def close(self) -> None:
        """Sync, append a mark and close the file. A writer that has failed is only closed; closing twice is allowed."""
        try:
            if self._failure is None:
                self.sync()
                self._append_mark()
        finally:
            self.abandon()

    def abandon(self) -> None:
        """Close the file without syncing; records that were not synced may be lost."""
        with self._append_lock, suppress(StorageFault):
            if not isinstance(self._failure, StoreClosed):
                self._failure = StoreClosed("the log is closed", hint="open it again", path=self._file.path)
                self._file.close()

    def _append_mark(self) -> None:
        with self._append_lock:
            if not self._marked and self._failure is None:
                mark, link = encode_mark(tag=self._tag, link=self._link, synced=self._durable)
                self._guard("the closing mark", lambda: self._file.write_at(mark, self._end))
                # The mark proves that everything before it was synced; unsynced, power loss could take the proof.
                self._guard("the closing mark", self._file.sync)
                self._end += len(mark)
                self._link, self._marked = link, True
                self._durable, self._durable_link = self._end, link

    def _check(self) -> None:
        if self._failure is not None:
            raise self._failure.copied()

    def _guard(self, doing: str, step: Callable[[], None]) -> None:
        """Run a step whose failure leaves the state on disk unknown."""
        try:
            step()
        except BaseException as error:
            self._failure = StoreUnusable(
                f"{doing} to a log failed, and what reached the disk is unknown",
                hint="fix the cause, then reopen the store",
                path=self._file.path,
                offset=self._end,
                cause=str(error),
            )
            if isinstance(error, Exception):
                raise self._failure from error
            raise
