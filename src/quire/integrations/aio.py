"""aiosqlite on databases of a store: `async with connect("store/shop") as db`.

The connection is aiosqlite's own class: a thread with a connection of `quire.sqlite.dbapi` in it.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from typing import Any

import aiosqlite

from quire.sqlite import dbapi


def connect(database: str | os.PathLike[str], *, iter_chunk_size: int = 64, **options: Any) -> aiosqlite.Connection:
    """Open a connection as `aiosqlite.connect` does, with the options of `quire.sqlite.dbapi.connect`."""
    connector: Callable[[], Any] = partial(dbapi.connect, database, **options)  # aiosqlite takes it for sqlite3's
    return aiosqlite.Connection(connector, iter_chunk_size)


def connect_daemon(*arguments: Any, **options: Any) -> Any:
    """Open a connection whose thread does not keep the interpreter from exiting."""
    connection = connect(*arguments, **options)
    thread: Any = getattr(connection, "_thread", connection)  # before aiosqlite 0.22 the connection was the thread
    thread.daemon = True
    return connection
