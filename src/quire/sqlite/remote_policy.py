"""Restricts the SQL of remote users: everything inside its database is allowed, nothing beyond it (W5).

SQLite calls an authorizer for every action of a statement when it prepares it. Ours refuses actions that would leave the
database (ATTACH of files, VACUUM INTO, `load_extension`), every pragma and virtual table that is not listed here, and changes
to how the connection treats the store (`synchronous`, `cache_size`, `busy_timeout`, `writable_schema`). SQLite's own defences
are enabled too: DEFENSIVE, no TRUSTED_SCHEMA, limits on lengths. A progress handler ends a statement when its time is up.

Rules
  1. Anything not listed is refused: a pragma of a newer SQLite is refused until it is listed.
  2. A refusal is an `apsw.AuthError` that names what was refused; no part of the statement has run.
  3. Databases of the store whose names `may_attach` allows can be attached, for reading, and the nameless temporary database of
     plain VACUUM, to which no other statement can write.
  4. `touched` is true once a statement was prepared that leaves state in the connection: a temporary object, an attached
     database, a pragma that was set. Such a connection is not given to another user.

    policy = restrict(connection, clock)
    with policy.deadline(5.0):
        connection.execute(sql)

Threads: those of its connection, one at a time. Raises apsw's errors.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import apsw
from apsw.ext import generate_series, make_virtual_module

from quire.core.clock import Clock
from quire.sqlite.statements import StatementRunner
from quire.sqlite.vfs import apsw_error

MIB = 1 << 20
CACHE_KIB = 4_096
"""KiB of pages that a remote connection caches: 500 that have scanned a table, with 64 MiB as locally, would take 34 GB."""
READ_ONLY_HINT = (
    "this caller may only read; use a token that may write: the store's admin.token, or one from `quire token create`"
)
PROGRESS_STEPS = 10_000
"""Instructions of SQLite's virtual machine between two checks of the time: well below a millisecond."""


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


READABLE = _words(
    "analysis_limit application_id auto_vacuum automatic_index busy_timeout cache_size cell_size_check collation_list "
    "compile_options data_version database_list defer_foreign_keys encoding foreign_keys freelist_count function_list "
    "ignore_check_constraints journal_mode journal_size_limit legacy_alter_table locking_mode max_page_count mmap_size "
    "module_list page_count page_size pragma_list query_only quire_epoch read_uncommitted recursive_triggers "
    "reverse_unordered_selects schema_version secure_delete synchronous table_list temp_store threads trusted_schema "
    "user_version wal_autocheckpoint writable_schema"
)
"""Pragmas that may be queried, without a value."""
ASKING = _words(
    "foreign_key_check foreign_key_list incremental_vacuum index_info index_list index_xinfo integrity_check optimize "
    "quick_check table_info table_list table_xinfo wal_checkpoint"
)
"""Pragmas whose value is an argument, not a setting."""
OF_DATABASE = _words("application_id auto_vacuum encoding journal_mode page_size user_version")
"""Pragmas that may be set and belong to the database, or that quire answers itself (`journal_mode`, `page_size`)."""
OF_CONNECTION = _words(
    "analysis_limit automatic_index case_sensitive_like cell_size_check defer_foreign_keys foreign_keys "
    "legacy_alter_table read_uncommitted recursive_triggers reverse_unordered_selects"
)
"""Pragmas that may be set and stay with the connection (rule 4)."""
MODULES = _words("dbstat fts3 fts3tokenize fts4 fts4aux fts5 fts5vocab geopoly rtree rtree_i32")
"""Virtual tables that may be created: they keep all their state in the database."""
TEMPORARY = "temp"
"""The database of temporary objects."""
FUNCTIONS_REFUSED = frozenset({"load_extension", "fts3_tokenizer", "sqlite_log"})

_OK = apsw.SQLITE_OK


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteLimits:
    """Resources that one statement of a remote user may use."""

    value_bytes: int = 64 * MIB
    """Bytes of a text, a blob or a row, read or written: SQLite's own limit is 1 GB."""
    sql_bytes: int = 16 * MIB
    pattern_bytes: int = 1_000
    """Bytes of a LIKE or GLOB pattern: matching is quadratic, and no deadline interrupts it."""
    temporary_pages: int = 65_536
    """Pages of all temporary tables and indexes together."""
    attached: int = 4
    """Databases of the store that may be attached at once."""


def nothing_attached(_: str) -> bool:
    """Allow no database to be attached."""
    return False


class RemotePolicy:
    """The permissions of one connection. Created by `restrict`."""

    def __init__(self, connection: apsw.Connection, clock: Clock) -> None:
        self._connection = connection
        self.clock = clock
        self.until = float("inf")
        """When the running statement must end, by the monotonic clock."""
        self._ours = False
        self._read_only = False
        self.may_attach: Callable[[str], bool] = nothing_attached
        """Returns whether a database of the store may be attached, by name (rule 3)."""
        self.touched = False
        """Whether a statement has left state in the connection (rule 4)."""

    # ── reading only ──────────────────────────────────────────────────────────────────────────────────────────────────
    @property
    def read_only(self) -> bool:
        """Whether writing is refused, by SQLite itself (`query_only`); also `BEGIN IMMEDIATE`, which takes the lock."""
        return self._read_only

    @read_only.setter
    def read_only(self, value: bool) -> None:
        if value != self._read_only:
            self._set_pragma("query_only", int(value))
            self._read_only = value

    def _set_pragma(self, name: str, value: int) -> None:
        self._ours = True
        try:
            self._connection.pragma(name, value)
        finally:
            self._ours = False

    # ── time ──────────────────────────────────────────────────────────────────────────────────────────────────────────
    def deadline(self, seconds: float) -> StatementDeadline:
        """Return a context manager in which statements end with `apsw.InterruptError` after `seconds`."""
        return StatementDeadline(self, seconds)

    @property
    def is_overdue(self) -> bool:
        """Whether the time is up: `apsw.InterruptError` then means the deadline, not a call of `interrupt`."""
        return self.clock.monotonic() >= self.until

    # ── the authorizer ────────────────────────────────────────────────────────────────────────────────────────────────
    def authorize(self, action: int, first: str | None, second: str | None, schema: str | None, _: str | None) -> int:
        """Allow or refuse one action of a statement (rule 1). Called by SQLite."""
        if action == apsw.SQLITE_PRAGMA:
            self._pragma((first or "").lower(), second, schema)
        elif action == apsw.SQLITE_FUNCTION:
            if (second or "").lower() in FUNCTIONS_REFUSED:
                raise _refused(f"the function {second}()")
        elif action == apsw.SQLITE_ATTACH:
            if not self._is_attachable(first):
                raise _refused("ATTACH without a grant, or VACUUM INTO,")
            self.touched = True
        elif action == apsw.SQLITE_CREATE_VTABLE and (second or "").lower() not in MODULES:
            raise _refused(f"a virtual table of the module {second}")
        if schema == TEMPORARY:
            self.touched = True
        return _OK

    def _is_attachable(self, name: str | None) -> bool:
        """Return whether a database may be attached (rule 3). `None` is an expression whose value is not known yet; to SQLite
        the other refused names are not databases of the store."""
        if not name or name == ":memory:" or name.startswith("file:"):
            return name == ""
        return self.may_attach(name)

    def _pragma(self, name: str, value: str | None, schema: str | None) -> None:
        if self._ours or name in ASKING or (value is None and name in READABLE):
            return
        if name == "page_size" and (schema or "main").lower() != "main":  # the limit on temporary data is in pages
            raise _refused(f"setting PRAGMA {schema}.page_size")
        if value is None or name not in OF_DATABASE | OF_CONNECTION:
            raise _refused(f"PRAGMA {name}" if value is None else f"setting PRAGMA {name}")
        self.touched |= name in OF_CONNECTION


class StatementDeadline:
    """Bounds what SQLite does inside it. A class rather than a generator, because every statement needs two."""

    __slots__ = ("_before", "_policy", "_seconds")

    def __init__(self, policy: RemotePolicy, seconds: float) -> None:
        self._policy = policy
        self._seconds = seconds

    def __enter__(self) -> None:
        policy = self._policy
        self._before = policy.until
        policy.until = policy.clock.monotonic() + self._seconds

    def __exit__(self, *_: object) -> None:
        self._policy.until = self._before


def restrict(connection: apsw.Connection, clock: Clock, limits: RemoteLimits | None = None) -> RemotePolicy:
    """Restrict a connection to SQL of remote users, for as long as it is open."""
    limits = limits or RemoteLimits()
    connection.pragma("max_page_count", limits.temporary_pages, schema="temp")
    for option, value in (
        (apsw.SQLITE_DBCONFIG_DEFENSIVE, 1),
        (apsw.SQLITE_DBCONFIG_TRUSTED_SCHEMA, 0),
        (apsw.SQLITE_DBCONFIG_WRITABLE_SCHEMA, 0),
        (apsw.SQLITE_DBCONFIG_ENABLE_LOAD_EXTENSION, 0),
        (apsw.SQLITE_DBCONFIG_ENABLE_FTS3_TOKENIZER, 0),
        (apsw.SQLITE_DBCONFIG_ENABLE_ATTACH_CREATE, 0),  # does not affect VACUUM's own
        (apsw.SQLITE_DBCONFIG_ENABLE_ATTACH_WRITE, 0),
    ):
        connection.config(option, value)
    for limit, largest in (
        (apsw.SQLITE_LIMIT_LENGTH, limits.value_bytes),
        (apsw.SQLITE_LIMIT_SQL_LENGTH, limits.sql_bytes),
        (apsw.SQLITE_LIMIT_LIKE_PATTERN_LENGTH, limits.pattern_bytes),
        (apsw.SQLITE_LIMIT_ATTACHED, 1 + limits.attached),  # one for VACUUM
        (apsw.SQLITE_LIMIT_TRIGGER_DEPTH, 100),
        (apsw.SQLITE_LIMIT_WORKER_THREADS, 0),
    ):
        connection.limit(limit, largest)
    # libSQL's and Turso's servers have it, as SQLite's shell does; their clients' tests use it.
    make_virtual_module(connection, "generate_series", cast(Any, generate_series))
    policy = RemotePolicy(connection, clock)
    connection.authorizer = policy.authorize
    connection.set_progress_handler(lambda: policy.is_overdue, PROGRESS_STEPS)
    return policy


def remote_runner(
    connection: apsw.Connection,
    clock: Clock,
    *,
    may_write: bool,
    is_version: bool,
    may_attach: Callable[[str], bool],
    statement_seconds: float,
    lock_seconds: float = 0.0,
    synchronous: str = "FULL",
    on_too_large: Callable[[], None] = lambda: None,
) -> tuple[StatementRunner, RemotePolicy]:
    """Return the runner and the policy for SQL of a remote user on a new connection, for any protocol.

    `is_version` means that the connection is to a version that cannot be written. The connection is closed if this fails.
    """
    try:
        connection.pragma("cache_size", -CACHE_KIB)
        connection.pragma("synchronous", synchronous)
        limits = RemoteLimits()
        policy = restrict(connection, clock, limits)
        policy.read_only = not may_write
        policy.may_attach = may_attach
        runner = StatementRunner(
            connection,
            partial(policy.deadline, statement_seconds),
            read_only_hint="" if may_write or is_version else READ_ONLY_HINT,
            lock_seconds=lock_seconds,
            value_bytes=limits.value_bytes,
            on_too_large=on_too_large,
        )
        return runner, policy
    except BaseException:
        connection.close()
        raise


def limit_heap(size_bytes: int) -> None:
    """Make SQLite, in the whole process, free cached pages before it exceeds `size_bytes`. Never the hard limit: that would
    fail statements of other users."""
    apsw.soft_heap_limit(size_bytes)


def _refused(what: str) -> Exception:
    return apsw_error(apsw.SQLITE_AUTH, f"{what} is refused: remote SQL is confined to its database")
