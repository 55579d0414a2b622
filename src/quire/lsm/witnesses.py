"""Witnesses of a key-value database: the store's own records of it, compared with its files at each open.

Whatever LMDB has recorded (rows of tables, ends of logs) was durable in the database's files before, and logs only grow. So
files that hold less are damaged, or belong to another database. Files that hold more are normal: LMDB is written second (S1).
Without a recorded end nothing is checked against it; files that the manifest does not name are then quarantined, not removed.

Threads: values; any."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import msgspec

from quire.core.errors import Corruption
from quire.durable.log_format import LogHeader, LogIdentity
from quire.durable.log_reader import LogEnd
from quire.manifest.records import LsmEndsRecord, LsmLogEnd, LsmTableRecord

if TYPE_CHECKING:
    from quire.lsm.projection import KvProjection


REPAIR = "`quire kv repair` shows what can be recovered"
"""The hint of every error about inconsistent files."""

NO_STORE = bytes(16)


class Owner(msgspec.Struct, frozen=True):
    """The store and database that own the files; zeros for a database that belongs to no store."""

    store: bytes = NO_STORE
    database: int = 0

    def identity(self, number: int) -> LogIdentity:
        """Return the identity in the header of the log with this number."""
        return LogIdentity(store=self.store, database=self.database, number=number)

    def require(self, header: LogHeader, number: int, path: str) -> None:
        """Raise if a log's header contradicts this owner or `number`. A missing identity, or a zero part of one, matches."""
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
    """The store's records of a database, read before its files are opened."""

    owner: Owner = Owner()
    files_created: bool = False
    """Whether the database's files have been created: if so, a missing manifest is lost, not new."""
    ends: LsmEndsRecord | None = None
    rows: Mapping[int, LsmTableRecord] = {}
    """The table rows in LMDB, by id."""
    quarantine: Callable[[str, str], None] | None = None
    """Moves a file (path, why) to quarantine; with `None`, it is moved to a directory below the database's own."""
    projection: KvProjection | None = None
    """Records later changes of the database in LMDB."""

    def wal_end(self, number: int) -> LogEnd | None:
        """Return the recorded end of a write-ahead log, or `None`."""
        wals = self.ends.wals if self.ends is not None else ()
        return next((log_end(end) for end in wals if end.number == number), None)


def log_end(end: LsmLogEnd) -> LogEnd:
    """Convert a row to the form that the framed log uses."""
    return LogEnd(salt=end.salt, end=end.end, link=end.link)


def end_row(number: int, end: LogEnd) -> LsmLogEnd:
    """Convert the end of a framed log to a row."""
    return LsmLogEnd(number, end.salt, end.end, end.link)
