"""A pool of connections of remote programs to the databases of a store (W2).

A connection is reused only if nothing of its last program is left on it: the policy of remote SQL has seen no temporary object,
no ATTACH and no pragma that was set; an open transaction is rolled back, and `last_insert_rowid`, `changes` and
`total_changes` are reset to 0. It keeps its cached pages. The cache is small, because a server has hundreds of connections
where a program has a few.

A version is looked up for each stream: a snapshot's name can be given to another one, and `2h` names another moment later. A
connection is only reused for the version that it reads.

Threads: any; a connection belongs to one at a time.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime

from quire.core.errors import InvalidInput, QuireError
from quire.service.api import StoreApi
from quire.service.sql.session import AnswerLimits, SqlSession, StoredSqls
from quire.service.version_address import attachable, find_or_create, find_version
from quire.sqlite.connect import is_usable
from quire.sqlite.remote_policy import RemotePolicy, nothing_attached, remote_runner
from quire.sqlite.statements import StatementRunner

IDLE_MAX, IDLE_SECONDS = 64, 10.0
"""Idle connections that are kept, over all databases, and for how long."""


@dataclass(frozen=True, slots=True)
class SqlTarget:
    """A database, or a version of it, as a client names it: `shop`, `shop@monday`, `shop@4711`, `shop@2026-01-31T12:00Z`."""

    name: str
    version: str = ""
    writable: bool = True
    may_attach: Callable[[str], bool] = field(default=nothing_attached, compare=False, repr=False)
    """Returns whether its SQL may attach another database, for reading."""

    @classmethod
    def parse(
        cls, text: str, *, writable: bool = True, may_attach: Callable[[str], bool] = nothing_attached
    ) -> SqlTarget:
        """Parse a name.

        >>> SqlTarget.parse("shop@monday")
        SqlTarget(name='shop', version='monday', writable=False)
        """
        name, sign, version = text.partition("@")
        if not name or (sign and not version):
            raise InvalidInput("invalid database name: use NAME or NAME@VERSION, as in shop@monday", name=text[:80])
        return cls(name, version, writable and not version, may_attach)


PoolKey = tuple[int, int, int | datetime | None, bool]
"""(database, the id of a snapshot or 0, an epoch or a time, whether it may write)"""


class SqlConnection:
    """A connection for a stream. Created by the pool."""

    __slots__ = ("_policy", "idle_since", "is_broken", "key", "runner", "target")

    def __init__(self, runner: StatementRunner, policy: RemotePolicy, target: SqlTarget, key: PoolKey) -> None:
        self._policy = policy
        self.runner = runner
        self.target = target
        self.key = key
        self.idle_since = 0.0
        self.is_broken = False
        """Whether an unexpected error occurred on it."""

    def lend(self, target: SqlTarget, may_attach: Callable[[str], bool]) -> None:
        """Give the connection the rights of a target."""
        self.target = target
        self._policy.may_attach = may_attach

    @property
    def is_clean(self) -> bool:
        """Whether nothing of its last program is left on it, and its database is still usable."""
        return not self._policy.touched and not self.is_broken and is_usable(self.runner.connection)

    def close(self) -> None:
        """Close the connection; uncommitted changes are lost."""
        self.runner.close()


class ConnectionPool:
    """All connections of remote programs."""

    def __init__(
        self,
        store: StoreApi,
        limits: AnswerLimits,
        *,
        default_database: str = "",
        statement_seconds: float = 60.0,
        on_too_large: Callable[[], None] = lambda: None,
    ) -> None:
        # constant after construction
        self._on_too_large = on_too_large
        self._store = store
        self._limits = limits
        self._default = default_database
        self._statement_seconds = statement_seconds
        # shared: replaced as a whole
        self._ids: tuple[int, dict[str, int]] = 0, {}
        """The last change of the manifest, and the ids of databases looked up since then."""
        # guarded by _lock
        self._lock = threading.Lock()
        self._idle: dict[PoolKey, list[SqlConnection]] = {}
        self._idle_count = 0
        self.opened = 0
        self.closed = False

    def take(self, target: SqlTarget) -> SqlConnection:
        """Return a connection for a stream: an idle one that is clean, or a new one."""
        key = self._key(target)
        while (waiting := self._take_idle(key)) is not None:
            # Checked again: its database may have been closed or dropped while the connection was idle.
            if waiting.is_clean:
                return self.lend(waiting, target)
            waiting.close()
        return self._open(target, key)

    def _take_idle(self, key: PoolKey) -> SqlConnection | None:
        with self._lock:
            if not (waiting := self._idle.get(key)):
                return None
            self._idle_count -= 1
            return waiting.pop()

    def take_unsynced(self, target: SqlTarget) -> SqlConnection:
        """Open a connection whose commits do not wait for the disk: the caller waits for them before it answers."""
        return self._open(target, self._key(target), synchronous="NORMAL")

    def lend(self, connection: SqlConnection, target: SqlTarget) -> SqlConnection:
        """Hand out an open connection with the rights of a target: it may have been opened for another caller."""
        connection.lend(target, attachable(self._store, target.may_attach))
        return connection

    def give(self, connection: SqlConnection) -> None:
        """Take a connection back from a stream."""
        if not connection.is_clean or self.closed or not self._forgets(connection) or self._is_past(connection):
            connection.close()
            return
        connection.idle_since = time.monotonic()
        with self._lock:
            if self._idle_count < IDLE_MAX:
                self._idle_count += 1
                self._idle.setdefault(connection.key, []).append(connection)
                return
        connection.close()

    def _is_past(self, connection: SqlConnection) -> bool:
        """Return whether the target of a connection now names another version, so that it would not be reused."""
        try:
            return bool(connection.target.version) and self._key(connection.target) != connection.key
        except QuireError:
            return True  # its database or snapshot was dropped

    @staticmethod
    def _forgets(connection: SqlConnection) -> bool:
        try:
            connection.runner.reset()
        except Exception:
            return False  # its database was closed or lost: the next request opens a new one, and gets the error
        return True

    def session_on(self, connection: SqlConnection, sqls: StoredSqls | None = None) -> SqlSession:
        """Return a session on a connection."""
        return SqlSession(connection.runner, self._limits, sqls)

    def sweep(self, now: float | None = None) -> None:
        """Close connections that were idle for too long, so that they keep no database open and hold no version."""
        before = (time.monotonic() if now is None else now) - IDLE_SECONDS
        self._ids = 0, {}
        old: list[SqlConnection] = []
        with self._lock:
            for key, waiting in [*self._idle.items()]:
                old += [connection for connection in waiting if connection.idle_since <= before]
                if left := [connection for connection in waiting if connection.idle_since > before]:
                    self._idle[key] = left
                else:
                    del self._idle[key]
            self._idle_count -= len(old)
        for connection in old:
            connection.close()

    def close(self) -> None:
        """Close the idle connections; others are closed when they are given back."""
        self.closed = True
        self.sweep(float("inf"))

    # ── opening ───────────────────────────────────────────────────────────────────────────────────────────────────────
    def find(self, target: SqlTarget) -> int:
        """Return the id of a database; the default one is created if it does not exist. A name is looked up again when the
        manifest has changed; commits of a page database do not change it."""
        manifest = self._store.manifest
        head = manifest.writer.head  # read before the lookup, which then sees this state or a later one
        known_at, ids = self._ids
        if head != known_at:
            ids = {}
            self._ids = head, ids
        if (db_id := ids.get(target.name)) is None:
            is_made = target.writable and target.name == self._default  # it serves clients that name none
            db_id = ids[target.name] = find_or_create(self._store, target.name, create=is_made)
        manifest.env.require_not_refused("database", db_id)
        return db_id

    def _key(self, target: SqlTarget) -> PoolKey:
        """Return what a target names now."""
        db_id = self.find(target)
        if not target.version:
            return db_id, 0, None, target.writable
        at = find_version(self._store.manifest, db_id, target.version)
        if isinstance(at, str):
            return db_id, self._store.manifest.snapshots.get(db_id, at).snapshot_id, None, target.writable
        return db_id, 0, at, target.writable

    def _open(self, target: SqlTarget, key: PoolKey, *, synchronous: str = "FULL") -> SqlConnection:
        _, snapshot_id, at, _ = key
        connection = self._store.sqlite(target.name, at=target.version if snapshot_id else at, timeout=0)
        try:
            now = self._key(target)
        except BaseException:
            connection.close()
            raise
        if now[:2] != key[:2]:  # the name was given to another database or snapshot meanwhile
            connection.close()
            return self._open(target, now, synchronous=synchronous)
        runner, policy = remote_runner(
            connection,
            self._store.manifest.clock,
            may_write=target.writable,
            is_version=bool(target.version),
            may_attach=attachable(self._store, target.may_attach),
            statement_seconds=self._statement_seconds,
            synchronous=synchronous,
            on_too_large=self._on_too_large,
        )
        self.opened += 1
        return SqlConnection(runner, policy, target, key)
