"""What all connections to one database share: the page engine's handle, whose turn it is to write, and its newest pages.

Rules
  1. The handle is opened when the database has a page size; until then it is unborn, and the first page written decides.
  2. When the engine has given a handle up (a doubtful sync, M12) the next connection to be opened has the database recovered,
     and earlier connections go on with the new handle from their next transaction on. Until then they hear why.

Threads: any.
"""

from __future__ import annotations

import threading

from quire.core.errors import QuireError, UnknownDatabase
from quire.manifest.store import ManifestStore
from quire.pages.engine import PageEngine
from quire.pages.pagestore import PageStore
from quire.pages.readers import program
from quire.sqlite.locks import Turn
from quire.sqlite.shared_pages import NewestPages


def reader_tags() -> dict[str, str]:
    """What leases of SQLite's connections say about themselves; their process and host are the lease's own."""
    return {"by": "sqlite", "program": program(), "thread": threading.current_thread().name[:64]}


class Database:
    """See the rules above."""

    def __init__(self, db_id: int, engine: PageEngine, manifest: ManifestStore) -> None:
        # constant after construction
        self.db_id = db_id
        self.turn = Turn()
        self.newest = NewestPages()
        self._engine = engine
        self._manifest = manifest
        # guarded by _lock
        self._lock = threading.Lock()
        self._store: PageStore | None = None
        # only ever set
        self.closed: QuireError | None = None

    def current(self) -> PageStore | None:
        """The handle; none while the database is unborn. Raises what has made it unusable."""
        if self.closed is not None:
            raise self.closed
        store = self._store
        if store is None:
            return self.open() if self.page_size() else None
        store.wal.require()
        return store

    def open(self, page_size: int = 0) -> PageStore:
        """Open the database in the engine, anew if its former handle was given up."""
        with self._lock:
            store = self._engine.open(self.db_id, page_size=page_size)
            if store is not self._store:
                self._store = store
                self.newest.forget()
            return store

    def page_size(self) -> int:
        """As the manifest has it; 0 for an unborn one."""
        with self._manifest.read() as txn:
            record = txn.database(self.db_id)
        if record is None:
            raise UnknownDatabase("no database has this id", hint="`quire ls` lists the databases", db_id=self.db_id)
        return record.page_size
