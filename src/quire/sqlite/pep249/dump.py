"""`iterdump`: a database as SQL text that recreates it, statement by statement as sqlite3 writes it.

Threads: as the connection.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from quire.sqlite.pep249.connection import Connection


def dump(connection: Connection, like: str | None) -> Iterator[str]:
    """Yield the statements; `like` is a pattern of names."""
    cursor = connection.cursor()
    cursor.row_factory = None  # the caller's row factory need not return tuples
    where = "" if like is None else "and name like ?"
    names = () if like is None else (like,)
    schema = "select name, sql from sqlite_master where sql not null and type {} " + where
    yield "BEGIN TRANSACTION;"
    sequence: list[str] = []
    writable = False
    for name, sql in cursor.execute(schema.format("== 'table'") + " order by name", names).fetchall():
        if name == "sqlite_sequence":
            sequence = ['DELETE FROM "sqlite_sequence";', *_rows(cursor, name)]
            continue
        if name == "sqlite_stat1":
            yield 'ANALYZE "sqlite_master";'
        elif name.startswith("sqlite_"):
            continue
        elif sql.startswith("CREATE VIRTUAL TABLE"):
            if not writable:
                writable = True
                yield "PRAGMA writable_schema=ON;"
            values = f"'table',{_text(name)},{_text(name)},0,{_text(sql)}"
            yield f"INSERT INTO sqlite_master(type,name,tbl_name,rootpage,sql)VALUES({values});"
            continue  # its rows are in its shadow tables
        else:
            yield f"{sql};"
        yield from _rows(cursor, name)
    for _, sql in cursor.execute(schema.format("in ('index', 'trigger', 'view')"), names).fetchall():
        yield f"{sql};"
    if writable:
        yield "PRAGMA writable_schema=OFF;"
    yield from sequence
    yield "COMMIT;"


def _rows(cursor: Any, table: str) -> Iterator[str]:
    """Yield the INSERT statements of a table's rows; SQLite itself quotes the values."""
    quoted = _name(table)
    columns = [column[1] for column in cursor.execute(f"pragma table_info({quoted})").fetchall()]
    values = " || ',' || ".join(f"quote({_name(column)})" for column in columns)
    for (row,) in cursor.execute(f"select {values} from {quoted}").fetchall():
        yield f"INSERT INTO {quoted} VALUES({row});"


def _name(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


def _text(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"
