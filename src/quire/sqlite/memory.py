"""In-memory databases: SQLite's own, in no store, for programs that use both kinds.

Threads: any; a connection belongs to one at a time.
"""

from __future__ import annotations

from urllib.parse import parse_qsl

import apsw

_FLAGS = apsw.SQLITE_OPEN_READWRITE | apsw.SQLITE_OPEN_CREATE


def connect(database: str, *, uri: bool, timeout: float) -> apsw.Connection:
    """Open a database that lives as long as its last connection: `:memory:`, or `file:name?mode=memory&cache=shared`."""
    name, _, query = database.partition("?")
    if uri and dict(parse_qsl(query)).get("cache") == "shared":
        # apsw's SQLite has no shared cache. Its purpose, one database in memory for several connections, is served by the VFS
        # `memdb` for names with a leading slash.
        database = f"file:/{name.removeprefix('file:').strip('/')}?vfs=memdb"
    connection = apsw.Connection(database, flags=_FLAGS | (apsw.SQLITE_OPEN_URI if uri else 0))
    connection.set_busy_timeout(int(timeout * 1000))
    return connection
