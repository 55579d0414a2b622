"""SQLAlchemy dialects: `quire:///store/shop?at=monday`, `quire+http://host:8080/shop`, `quire+aiosqlite:///store/shop`.

To SQLAlchemy and Alembic they are SQLite (`dialect.name`), so types, DDL, `INSERT … ON CONFLICT` and batch migrations are
those of SQLite. After three slashes a path is relative, after four it is absolute. URL parameters of sqlite3 (`timeout`,
`isolation_level` …) are passed to `connect`; `at`, `epoch`, `time` and `mode` select the version to open.

SQLAlchemy finds them by entry points; nothing of quire is loaded before that.
"""

from __future__ import annotations

from typing import Any
from urllib.parse import quote, urlencode

import aiosqlite
from sqlalchemy import util
from sqlalchemy.dialects.sqlite.aiosqlite import AsyncAdapt_aiosqlite_dbapi, SQLiteDialect_aiosqlite
from sqlalchemy.dialects.sqlite.pysqlite import SQLiteDialect_pysqlite
from sqlalchemy.engine.url import URL
from sqlalchemy.exc import ArgumentError

from quire.integrations import aio
from quire.sqlite import dbapi
from quire.sqlite.pep249.errors import ends_connection

_OPTIONS = {
    "timeout": float,
    "isolation_level": str,
    "detect_types": int,
    "check_same_thread": bool,
    "cached_statements": int,
}
"""URL parameters that are arguments of `connect`."""

SERVER_SCHEMES = ("http", "https")


def connect_arguments(url: URL) -> tuple[list[str], dict[str, Any]]:
    """Return the arguments of `connect` for a URL."""
    options: dict[str, Any] = {}
    for name, kind in _OPTIONS.items():
        util.coerce_kw_type(dict(url.query), name, kind, dest=options)
    rest = {name: value for name, value in url.query.items() if name not in _OPTIONS}
    query = f"?{urlencode(rest)}" if rest else ""
    scheme = url.get_driver_name()
    if scheme in SERVER_SCHEMES:
        options.setdefault("check_same_thread", False)
        address = URL.create(scheme, host=url.host, port=url.port, username=url.username, password=url.password)
        return [f"{address.render_as_string(False)}/{quote(url.database or '')}{query}"], options
    if url.host:
        raise ArgumentError(
            f"a URL names a path, not the host {url.host!r}: quire:///store/shop; a server is quire+http://{url.host}/shop"
        )
    if not url.database or url.database == ":memory:":
        return [":memory:"], options
    options.setdefault("check_same_thread", False)  # a pool hands a connection from thread to thread, one at a time
    return [f"quire:///{quote(url.database)}{query}"], options


class QuireDialect(SQLiteDialect_pysqlite):
    """`quire://`: a database of a store."""

    driver = "quire"
    supports_statement_cache = True

    @classmethod
    def import_dbapi(cls) -> Any:
        """Return the module of PEP 249."""
        return dbapi

    def create_connect_args(self, url: URL) -> Any:
        """Return the arguments of `connect` for the engine's URL."""
        return connect_arguments(url)

    def is_disconnect(self, e: Any, connection: Any, cursor: Any) -> bool:
        """Return whether the pool must replace its connections after an error."""
        return ends_connection(e) or super().is_disconnect(e, connection, cursor)


class QuireHttpDialect(QuireDialect):
    """`quire+http://`: a database of a server, `quire serve --http`."""

    driver = "http"
    supports_statement_cache = True


class QuireHttpsDialect(QuireDialect):
    """`quire+https://`: the same with TLS."""

    driver = "https"
    supports_statement_cache = True


class _AsyncModule(AsyncAdapt_aiosqlite_dbapi):
    """aiosqlite with quire's connections."""

    def _init_dbapi_attributes(self) -> None:
        names = (
            "DatabaseError",
            "Error",
            "IntegrityError",
            "NotSupportedError",
            "OperationalError",
            "ProgrammingError",
        )
        versions = ("sqlite_version", "sqlite_version_info", "PARSE_COLNAMES", "PARSE_DECLTYPES", "Binary")
        for name in (*names, *versions):
            setattr(self, name, getattr(dbapi, name))

    def connect(self, *arguments: Any, **options: Any) -> Any:
        """Open a connection that runs in its own thread."""
        options.setdefault("async_creator_fn", aio.connect_daemon)
        return super().connect(*arguments, **options)


class QuireAsyncDialect(SQLiteDialect_aiosqlite):
    """`quire+aiosqlite://`: the same for asyncio."""

    driver = "aiosqlite"
    supports_statement_cache = True

    @classmethod
    def import_dbapi(cls) -> Any:
        """Return the module of PEP 249, as SQLAlchemy adapts it."""
        return _AsyncModule(aiosqlite, dbapi)

    def create_connect_args(self, url: URL) -> Any:
        """Return the arguments of `connect` for the engine's URL."""
        return connect_arguments(url)

    def is_disconnect(self, e: Any, connection: Any, cursor: Any) -> bool:
        """Return whether the pool must replace its connections after an error."""
        return ends_connection(e) or super().is_disconnect(e, connection, cursor)
