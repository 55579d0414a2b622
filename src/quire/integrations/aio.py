"""aiosqlite on databases of a store: `async with connect("store/shop") as db`.

The connection is aiosqlite's own class, a thread with a connection of `quire.sqlite.dbapi` in it.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from typing import Any

import aiosqlite

from quire.sqlite import dbapi


def connect(database: str | os.PathLike[str], *, iter_chunk_size: int = 64, **options: Any) -> aiosqlite.Connection:
    """As `aiosqlite.connect`, with what `quire.sqlite.dbapi.connect` takes."""
    connector: Callable[[], Any] = partial(
        dbapi.connect, database, **options
    )  # what aiosqlite believes to be sqlite3's
    return aiosqlite.Connection(connector, iter_chunk_size)


def connect_daemon(*arguments: Any, **options: Any) -> Any:
    """One whose thread does not keep the interpreter from ending."""
    connection = connect(*arguments, **options)
    thread: Any = getattr(connection, "_thread", connection)  # before aiosqlite 0.22 the connection was the thread
    thread.daemon = True
    return connection
