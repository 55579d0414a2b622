"""Handlers for the actions of `sql_actions.py`: SQLite connections that are held for clients.

Rules
  1. Through the Unix socket SQL may do everything that a connection in this process may do. Over the network SQL passes the
     policy of remote users (W5), and a caller that may only read gets a read-only connection.
  2. A statement waits for its lock in the thread of its caller, and takes no place from other calls meanwhile (`server.py`):
     the holder of the lock always finds a thread for its COMMIT.
  3. When a client's last connection ends, its SQL connections are closed at once: uncommitted changes are rolled back. On the
     owner's machine its running statements are interrupted. Over a network a statement runs on, for the time that it has at
     most: a client whose connection broke sends its call again, and gets the answer.

Threads: any; one call is one thread.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from functools import partial

from quire.core.clock import SystemClock
from quire.core.errors import AccessDenied, InvalidInput, UnknownDatabase
from quire.core.time_parsing import parse_epoch_or_time, requested_version
from quire.service import sql_actions as s
from quire.service.api import CallContext, StoreApi
from quire.service.client_holdings import Holdings
from quire.service.version_address import attachable
from quire.sqlite.function_packs import define_functions
from quire.sqlite.remote_policy import remote_runner
from quire.sqlite.served import ServedConnection, SqlAnswer, define_regexp
from quire.sqlite.statements import StatementRunner

SQL = "SQL connection"
"""The kind of a holding: a SQL connection."""
TIMEOUT_SECONDS_MAX = 300.0
PACKS_MAX = 8
"""The most packs of functions for one connection."""


class SqlHandlers:
    """Handlers for the SQL connections of one server."""

    def __init__(self, store: StoreApi, holdings: Holdings) -> None:
        self._store = store
        self._holdings = holdings

    def do_sql_open(self, request: s.OpenSql, call: CallContext) -> str:
        may_write = call.grant.may(request.name, write=True)
        timeout = min(max(request.timeout, 0.0), TIMEOUT_SECONDS_MAX)
        version = None if request.version is None else _version(*request.version)
        creates = request.create and call.grant.is_admin
        try:
            connection = self._store.sqlite(request.name, at=version, create=creates, timeout=timeout)
        except UnknownDatabase:
            if request.create and not creates:
                hint = "use the token in the store's admin.token, or create the database with `quire create`"
                raise AccessDenied("creating a database needs the admin token", hint=hint, name=request.name) from None
            raise
        reads_only = version is None and (request.read_only or not may_write)
        settings = self._store.settings.service
        if call.is_local:
            define_regexp(connection)
            for pack in request.functions[:PACKS_MAX]:
                define_functions(connection, pack)
            if reads_only:
                connection.pragma("query_only", True)
            runner = StatementRunner(connection, lock_seconds=timeout)
        else:
            runner, _ = remote_runner(
                connection,
                self._store.manifest.clock,
                may_write=not reads_only,
                is_version=version is not None,
                may_attach=attachable(self._store, call.grant.may_attach),
                statement_seconds=settings.sql_statement_seconds,
                lock_seconds=timeout,
            )
        return self._holdings.add(call.client, SQL, ServedConnection(runner, settings.sql_transaction_seconds))

    @contextmanager
    def _connection(self, connection: str, call: CallContext) -> Iterator[ServedConnection]:
        has_left = call.has_left if call.is_local else None
        with self._holdings.use(call.client, connection, SQL, has_left) as served:
            yield served

    def do_sql_prepare(self, request: s.PrepareSql, call: CallContext) -> SqlAnswer:
        with self._connection(request.connection, call) as served:
            return served.answered(request.number, partial(served.prepare, request.sql))

    def do_sql_execute(self, request: s.ExecuteSql, call: CallContext) -> SqlAnswer:
        with self._connection(request.connection, call) as served:
            run = partial(served.execute, request.cursor, request.sql, request.values, request.begin, request.closed)
            return served.answered(request.number, run)

    def do_sql_fetch(self, request: s.FetchSql, call: CallContext) -> SqlAnswer:
        with self._connection(request.connection, call) as served:
            return served.answered(request.number, partial(served.fetch, request.cursor))

    def do_sql_many(self, request: s.ManySql, call: CallContext) -> SqlAnswer:
        with self._connection(request.connection, call) as served:
            run = partial(served.many, request.sql, request.rows, request.begin, request.closed)
            return served.answered(request.number, run)

    def do_sql_script(self, request: s.ScriptSql, call: CallContext) -> SqlAnswer:
        with self._connection(request.connection, call) as served:
            return served.answered(request.number, partial(served.script, request.sql, request.closed))

    def do_sql_interrupt(self, request: s.OfSql, call: CallContext) -> None:
        served: ServedConnection | None = self._holdings.peek(call.client, request.connection, SQL)
        if served is not None:
            served.interrupt()


def _version(kind: str, text: str) -> str | int | datetime:
    """Return a version in the form that `store.sqlite` takes."""
    if requested_version({kind: text}) is None:
        raise InvalidInput("unknown way to name a version", hint="use at, epoch or time", version=f"{kind} {text[:40]}")
    return text if kind == "at" else parse_epoch_or_time(kind, text, now_ms=SystemClock().now_ms())
