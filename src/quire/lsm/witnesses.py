"""What a store knows of a key-value database apart from its files, compared at each open.

What LMDB has recorded (rows of tables, ends of logs) was durable in the database's files before, and logs only grow: so files
that have less are damaged, or are not these files. Files that have more are normal: LMDB comes second (S1). What is not
recorded is not checked; files that nothing names are then moved to quarantine, not removed.

Values; any thread."""

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
    follower: KvProjection | None = None
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
