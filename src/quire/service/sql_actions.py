"""The actions of SQL connections: the requests that a client's `sqlite(name)` sends to the owner (W8).

A connection is held at the owner for its client (`client_holdings.py`). Its calls are numbered: a repeated call gets the same
answer and is not executed again (`sqlite/served.py`), so every action may be repeated.
"""

from __future__ import annotations

from typing import Any

from quire.service.tickets import Action, DatabaseRequest, Role, Scope, on_database
from quire.service.values import Request
from quire.sqlite.served import SqlAnswer

Values = list[Any] | dict[str, Any]
"""Parameters of a statement: by position, or by name."""


class OpenSql(DatabaseRequest, frozen=True):
    """Open a connection. `version` is `["at", snapshot]`, `["epoch", lsn]` or `["time", ISO]`, or nothing for the newest."""

    version: tuple[str, str] | None = None
    create: bool = False
    timeout: float = 5.0
    """How long a statement waits for the lock, in seconds."""
    read_only: bool = False
    functions: tuple[str, ...] = ()
    """Packs of functions (`sqlite/function_packs.py`) that its statements use. Packs that the owner lacks are left out."""


class PrepareSql(Request, frozen=True):
    connection: str
    number: int
    sql: str


class ExecuteSql(Request, frozen=True):
    """`begin` is run before the statement if no transaction is open; `closed` are cursors that are no longer needed."""

    connection: str
    number: int
    cursor: int
    sql: str
    values: Values
    begin: str = ""
    closed: tuple[int, ...] = ()


class FetchSql(Request, frozen=True):
    connection: str
    number: int
    cursor: int


class ManySql(Request, frozen=True):
    connection: str
    number: int
    sql: str
    rows: list[Values]
    begin: str = ""
    closed: tuple[int, ...] = ()


class ScriptSql(Request, frozen=True):
    connection: str
    number: int
    sql: str
    closed: tuple[int, ...] = ()


class OfSql(Request, frozen=True):
    connection: str


def _sql(name: str, request: type[Request], answer: object = SqlAnswer) -> Action:
    """Return an action on a connection that the caller has opened."""
    return Action(name, request, answer, Role.READ, scope=Scope.HELD)


SQL_ACTIONS = (
    on_database("sql.open", OpenSql, str, Role.READ),  # a caller that may only read gets a read-only connection
    _sql("sql.prepare", PrepareSql),
    _sql("sql.execute", ExecuteSql),
    _sql("sql.fetch", FetchSql),
    _sql("sql.many", ManySql),
    _sql("sql.script", ScriptSql),
    _sql("sql.interrupt", OfSql, None),
)
