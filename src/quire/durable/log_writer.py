"""Appends to a framed log, and makes what was appended durable.

A log is born whole (header written and synced under a temporary name, renamed, directory synced), so one without a good header
is corrupt, never half made. Opening for append cuts a torn tail off and syncs before anything is appended (P4): frames behind
the cut are gone, and would not fit the chain if they came back. Each frame records `durable`, how many leading bytes a
returned sync covers, at the time it is written: the reader's proof (P3). A clean close ends the log with a mark, synced, so
that damage at rest is told from a torn tail.

After a failed append or sync nobody knows what is on disk: every later call raises `StoreUnusable` until the log is reopened;
nothing is retried on the same descriptor.

Threads: any number may append and sync; appends are ordered by one lock, syncs by another, so appending goes on while the disk
syncs. A waiting sync that finds its bytes already covered returns without one: that is the group sync. Format page:
`docs/formats/framed-log.md`. Raises `StoreUnusable`, `StoreClosed`, `OutOfRange` (a payload of 0 bytes or too many: nothing is
poisoned), `AlreadyExists`, and on opening what the reader raises and `StorageFault`.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress

from quire.core.closing import AbandonedOnError
from quire.core.errors import AlreadyExists, StorageFault, StoreClosed, StoreUnusable
from quire.durable.checksums import Bytes
from quire.durable.files import Disk, File, forget_cached, write_atomic
from quire.durable.log_format import LogIdentity, encode_frames, encode_header, encode_mark
from quire.durable.log_reader import LogContents, LogEnd, scan


class LogWriter(AbandonedOnError):
    """An open framed log; made by `create` or `open`."""

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
        # Written under either lock, read by all: only ever set.
        self._trouble: StoreUnusable | StoreClosed | None = None

    @classmethod
    def create(
        cls, disk: Disk, path: str, *, kind: bytes, identity: LogIdentity | None = None, replace: bool = False
    ) -> LogWriter:
        """Make a new, empty log. `replace` starts a new life of an existing one, in one atomic step."""
        if not replace and disk.exists(path):
            raise AlreadyExists("there is a log already", hint="open it instead", path=path)
        # Never an all-zero tag: a scan over the zeros that power loss leaves would stop at every byte.
        tag = int.from_bytes(os.urandom(8), "little") | 1  # `secrets` would do the same, and load OpenSSL
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
        """Recover the log, cut its torn tail, and go on behind it; also returns what the log holds.

        A log that is not what was vouched for, or that `examine` raises about, stays as it is, torn tail included: it may be
        evidence.
        """
        file = disk.open(path)
        try:
            file.sync()
            forget_cached(file)
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
        """Where the next frame goes. `end - header.size` is the size of what was logged."""
        return self._end

    @property
    def durable(self) -> int:
        """Everything below this offset has been synced."""
        return self._durable

    @property
    def is_empty(self) -> bool:
        """Whether nothing was ever appended in this life of the file."""
        return self._end == self.header.size

    def durable_end(self) -> LogEnd:
        """What is durable now: to be recorded elsewhere, and given to `open` as what was vouched for."""
        with self._sync_lock:
            return LogEnd(salt=self.header.salt, end=self._durable, link=self._durable_link)

    def append(self, payload: Bytes) -> int:
        """Write one record; returns the `end` behind it. Durable after `sync`."""
        return self.append_many((payload,))

    def append_many(self, payloads: Iterable[Bytes]) -> int:
        """Write records in one step; returns the `end` behind them. A crash may keep only the first few."""
        with self._append_lock:
            self._check()
            data, link = encode_frames(payloads, tag=self._tag, link=self._link, synced=self._durable)
            if data:
                self._guard("an append", lambda: self._file.write_at(data, self._end))
                self._end += len(data)
                self._link = link
                self._marked = False
            return self._end

    def sync(self, upto: int | None = None) -> int:
        """Make everything below `upto` (default: all that was appended) durable; returns the durable end."""
        if upto is None:
            upto = self._end
        with self._sync_lock:
            self._check()
            if self._durable < upto:
                # Read before the sync starts: what is appended meanwhile may or may not be covered.
                with self._append_lock:
                    target, link = self._end, self._link
                self._guard("a sync", self._file.sync)
                self._durable, self._durable_link = target, link
            return self._durable

    def close(self) -> None:
        """Sync, end with a mark and close the file. Closing twice, or a poisoned writer, is fine."""
        try:
            if self._trouble is None:
                self.sync()
                self._append_mark()
        finally:
            self.abandon()

    def abandon(self) -> None:
        """Close the file and nothing else; what was appended but not synced may be lost."""
        with self._append_lock, suppress(StorageFault):
            if not isinstance(self._trouble, StoreClosed):
                self._trouble = StoreClosed("the log is closed", hint="open it again", path=self._file.path)
                self._file.close()

    def _append_mark(self) -> None:
        with self._append_lock:
            if not self._marked and self._trouble is None:
                mark, link = encode_mark(tag=self._tag, link=self._link, synced=self._durable)
                self._guard("the closing mark", lambda: self._file.write_at(mark, self._end))
                self._guard("the closing mark", self._file.sync)
                self._end += len(mark)
                self._link, self._marked = link, True
                self._durable, self._durable_link = self._end, link

    def _check(self) -> None:
        if self._trouble is not None:
            raise type(self._trouble)(self._trouble.what, hint=self._trouble.hint, **self._trouble.where)

    def _guard(self, doing: str, step: Callable[[], None]) -> None:
        """Run a step whose failure leaves the disk in doubt."""
        try:
            step()
        except BaseException as error:
            self._trouble = StoreUnusable(
                f"{doing} to a log failed, and what reached the disk is unknown",
                hint="repair the cause, then reopen the store",
                path=self._file.path,
                offset=self._end,
                cause=str(error),
            )
            if isinstance(error, Exception):
                raise self._trouble from error
            raise
