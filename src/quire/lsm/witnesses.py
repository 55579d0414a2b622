"""What a store knows of a key-value database apart from its files (compared at each open), and who is told of its changes.

Terms
  owner      the store and the database that files carry in their headers
  recorded   what LMDB has of the database: rows of its tables, and how far its logs were durable (`LsmEndsRecord`)

Rules
  1. What is recorded was durable in the database's files before it was recorded, and logs only grow: so files that have less
     are damaged, or are not these files. Files that have more are normal: LMDB comes second (S1).
  2. A WAL is removed, and a table that a compaction has replaced, only after LMDB has recorded the event that makes it garbage.
  3. What is not recorded is not checked: databases that belong to no store, and those that were last open before there were
     records. Files that nothing names are then moved to quarantine, not removed.

Values; any thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from quire.core.errors import Corruption
from quire.durable.log_format import LogHeader, LogIdentity
from quire.durable.log_reader import LogEnd
from quire.manifest.records import LsmEndsRecord, LsmLogEnd, LsmTableRecord

if TYPE_CHECKING:
    from quire.lsm.compaction import MergeJob
    from quire.lsm.sst_reader import SSTable
    from quire.manifest.records import LsmEndsRecord


class CompactionLedger(Protocol):
    """Who writes down what is compacted."""

    def begin(self, job: MergeJob) -> None:
        """A compaction begins, or is tried again."""

    def done(self, result: dict[str, Any]) -> None:
        """It is published."""

    def close(self) -> None:
        """None will be tried again."""


class TableFollower(Protocol):
    """Who follows a database's tables: the store's manifest (projection.py)."""

    def fold(self, tables: Callable[[], Iterable[SSTable]], ends: Callable[[], LsmEndsRecord]) -> bool:
        """They may have changed, and the logs have come so far; whether that is recorded now."""

    def record(self, ends: LsmEndsRecord) -> None:
        """The logs have come so far."""

    def differences(self, tables: Iterable[SSTable]) -> Iterator[str]:
        """What it knows otherwise."""


class NoLedger:
    """Of a database that belongs to no store."""

    def begin(self, job: MergeJob) -> None:
        pass

    def done(self, result: dict[str, Any]) -> None:
        pass

    def close(self) -> None:
        pass


REPAIR = "`quire kv repair` shows what can be recovered"
"""The hint of every error about files that do not fit together."""

NO_STORE = bytes(16)


class Owner(msgspec.Struct, frozen=True):
    """Whose files these are; zeros for a database that belongs to no store."""

    store: bytes = NO_STORE
    database: int = 0

    def identity(self, number: int) -> LogIdentity:
        """What the log with this number has in its header."""
        return LogIdentity(store=self.store, database=self.database, number=number)

    def require(self, header: LogHeader, number: int, path: str) -> None:
        """Raise if a log says that it is another file; one that says nothing, or not all, is taken for what its name says."""
        identity = header.identity
        if identity is None:
            return
        same_store = NO_STORE in (identity.store, self.store) or identity.store == self.store
        same_database = 0 in (identity.database, self.database) or identity.database == self.database
        if not (same_store and same_database and identity.number == number):
            raise Corruption(
                "the file belongs to another database, or its number does not match its name",
                hint=REPAIR,
                path=path,
                database=identity.database,
                number=identity.number,
            )


class StoreFacts(msgspec.Struct, frozen=True):
    """What is known of a database before its files are opened."""

    owner: Owner = Owner()
    is_made: bool = False
    """Whether the database's files were on disk once: then a manifest that is not there is lost, not new."""
    ends: LsmEndsRecord | None = None
    rows: Mapping[int, LsmTableRecord] = {}
    """Of the tables that LMDB knows, by id."""
    quarantine: Callable[[str, str], None] | None = None
    """Moves a file (path, why); `None`: into a directory beside the database's own."""
    follower: TableFollower | None = None
    """Records what the database does from now on."""

    def wal_end(self, number: int) -> LogEnd | None:
        """What is recorded of a write-ahead log."""
        wals = self.ends.wals if self.ends is not None else ()
        return next((log_end(end) for end in wals if end.number == number), None)


def log_end(end: LsmLogEnd) -> LogEnd:
    """The row, as the framed log takes it."""
    return LogEnd(salt=end.salt, end=end.end, link=end.link)


def end_row(number: int, end: LogEnd) -> LsmLogEnd:
    """The other way."""
    return LsmLogEnd(number, end.salt, end.end, end.link)
