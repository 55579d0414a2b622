"""Django's database backend: `{"ENGINE": "quire.django", "NAME": "store/shop"}`.

It is Django's own backend for SQLite over `quire.sqlite.dbapi`. `NAME` is a path of a store and a database in it, or a URL
(`quire:///store/shop?at=monday`). The store stays open until the process ends, since Django closes its connections with each
request. If another process owns the store, connections use its server, which defines the functions that Django's queries need
(`django_date_trunc` …), if Django is installed there.

Threads: one per connection, as in Django.
"""

from __future__ import annotations

import datetime as dt
import decimal
import os
from collections.abc import Callable, Iterable, Mapping
from itertools import tee
from typing import Any
from urllib.parse import quote

from django.db.backends.sqlite3 import base
from django.db.backends.sqlite3._functions import register as register_functions
from django.utils.dateparse import parse_date, parse_datetime, parse_time

from quire.django.creation import DatabaseCreation, database_path
from quire.sqlite import dbapi
from quire.sqlite.connect import is_usable
from quire.store.sqlite_urls import hold_store


def _of_text(parse: Callable[[str], Any]) -> Callable[[bytes], Any]:
    return lambda value: parse(value.decode())


for _name, _parse in (("date", parse_date), ("time", parse_time), ("datetime", parse_datetime)):
    dbapi.register_converter(_name, _of_text(_parse))
dbapi.register_converter("timestamp", _of_text(parse_datetime))
dbapi.register_converter("bool", b"1".__eq__)
dbapi.register_adapter(decimal.Decimal, str)
dbapi.register_adapter(dt.date, dt.date.isoformat)


class CursorWrapper(dbapi.Cursor):
    """Translates Django's placeholders `%s` and `%(name)s` to SQLite's `?` and `:name`."""

    def execute(self, query: str, params: Any = None) -> Any:
        """Run one statement."""
        if params is None:
            return super().execute(query)
        return super().execute(_converted(query, params), params)

    def executemany(self, query: str, param_list: Iterable[Any]) -> Any:
        """Run one statement for each set of parameters."""
        first, rows = tee(iter(param_list))
        return super().executemany(_converted(query, next(first, ())), rows)


def _with_functions(database: Any) -> str:
    """Return the URL of a database whose connections have Django's functions.

    >>> _with_functions("/data/my store/shop"), _with_functions("quire:///store/shop?at=monday")
    ('quire:////data/my%20store/shop?functions=django', 'quire:///store/shop?at=monday&functions=django')
    """
    text = os.fspath(database)
    if not text.startswith(("quire:", "file:")):
        text = f"quire:///{quote(text)}"
    return f"{text}{'&' if '?' in text else '?'}functions=django"


def _converted(query: str, params: Any) -> str:
    if isinstance(params, Mapping):
        return query % {name: f":{name}" for name in params}
    return base.FORMAT_QMARK_REGEX.sub("?", query).replace("%%", "%")


class DatabaseWrapper(base.DatabaseWrapper):
    """A connection of Django."""

    display_name = "SQLite on quire"
    Database = dbapi
    creation_class = DatabaseCreation

    def get_new_connection(self, conn_params: dict[str, Any]) -> Any:
        """Open a connection to the store's database, set up for Django."""
        if self.is_in_memory_db():
            connection = dbapi.connect(**conn_params)
            register_functions(connection)
        else:
            path = database_path(conn_params["database"])
            connection = dbapi.connect(**{**conn_params, "database": _with_functions(conn_params["database"])})
            if not path.is_read_only:
                hold_store(path.root)
        connection.execute("PRAGMA foreign_keys = ON")
        for command in filter(None, map(str.strip, self.init_commands)):
            connection.execute(command)
        return connection

    def is_usable(self) -> bool:
        """Return whether the connection can be kept after an error; Django checks this if it is persistent (`CONN_MAX_AGE`)."""
        try:
            return is_usable(self.connection.apsw)
        except dbapi.NotSupportedError:
            return True  # a connection through a server connects again by itself

    def create_cursor(self, name: str | None = None) -> Any:  # noqa: ARG002 - Django's signature
        """Return a cursor that accepts Django's placeholders."""
        return self.connection.cursor(factory=CursorWrapper)
