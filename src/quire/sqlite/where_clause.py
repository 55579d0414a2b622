"""Checks a condition written by a user, with SQLite itself, before it is used to read anything.

It must be one expression over the columns of its table. It must read no other table, have no parameters, and call only
functions that always return the same result: a second read must find the same rows. A name in double quotes is a column.

    >>> connection = apsw.Connection(":memory:")
    >>> _ = connection.execute("create table t(id)")
    >>> check_condition(connection, "t", "id < 5")
    >>> check_condition(connection, "t", "id < 5) or (1")
    Traceback (most recent call last):
        ...
    quire.core.errors.InvalidInput: not a condition on this table: near ")": syntax error...

Executor-safe. Raises `InvalidInput`.
"""

from __future__ import annotations

from contextlib import closing

import apsw

from quire.core.errors import InvalidInput

CONDITION_BYTES_MAX = 64 * 1024
"""SQLite accepts a thousand times as much, but conditions are kept in Spark's plans."""

_DETERMINISTIC, _DIRECT_ONLY = 0x800, 0x80000
"""SQLite's flags of functions."""

_MATCH = "match"
"""The function that queries full-text tables. Each such table brings its own, so SQLite lists it without flags."""


def bracketed(condition: str) -> str:
    """Return a condition as part of a larger one; on separate lines, because it may end in a comment."""
    return f"(\n{condition}\n)"


def check_condition(connection: apsw.Connection, table: str, condition: str, **where: object) -> None:
    """Raise unless the text is a condition on this table of the main database; `where` is added to the error.

    The connection must be the caller's alone: from here on it treats double quotes as column names.
    """
    if not condition.strip() or "\0" in condition or len(condition.encode()) > CONDITION_BYTES_MAX:
        raise _refused("it is empty, longer than 64 KiB, or contains NUL", condition, table, where)
    rules = _Rules()
    try:
        with closing(_scratch(connection, table)) as scratch:
            rules.functions = _steady_functions(scratch)
            scratch.authorizer = rules
            # The text could break out of either context, but text that closes one (`1) OR (1`) is no expression in the other.
            for text in (bracketed(condition), f"CASE WHEN\n{condition}\nTHEN 1 END"):
                rules.selects = 0
                _prepare(scratch, table, text)
        _prepare(connection, table, bracketed(condition))  # the real table has collations, and may have no rowids
    except apsw.BindingsError as error:
        raise _refused("it has parameters", condition, table, where) from error
    except apsw.Error as error:
        raise _refused(rules.why or str(error), condition, table, where) from error


def _scratch(connection: apsw.Connection, table: str) -> apsw.Connection:
    """Open a database in memory with an empty table of this name and columns."""
    columns = [row[0] for row in connection.execute("SELECT name FROM pragma_table_xinfo(?)", (table,))]
    scratch = apsw.Connection(":memory:")
    try:
        scratch.execute(f"CREATE TABLE main.{quoted(table)}({', '.join(map(quoted, columns))})")
    except BaseException:
        scratch.close()
        raise
    return scratch


def _prepare(connection: apsw.Connection, table: str, text: str) -> None:
    connection.config(apsw.SQLITE_DBCONFIG_DQS_DML, 0)  # otherwise "prcie" > 5 would compare a text and find nothing
    # EXPLAIN makes SQLite prepare the statement without running it.
    connection.execute(f"EXPLAIN SELECT 1 FROM main.{quoted(table)} WHERE {text}").fetchall()


def quoted(name: str) -> str:
    """Return a name quoted for SQL.

    >>> quoted('odd"name')
    '"odd""name"'
    """
    return '"' + name.replace('"', '""') + '"'


class _Rules:
    """SQLite's authorizer: called while a statement is prepared, for everything it would access."""

    def __init__(self) -> None:
        self.functions: frozenset[str] = frozenset()
        self.selects = 0
        self.why = ""

    def __call__(self, action: int, _: str | None, name: str | None, __: str | None, ___: str | None) -> int:
        if action == apsw.SQLITE_READ:  # there is no other table
            return apsw.SQLITE_OK
        if action == apsw.SQLITE_SELECT:
            self.selects += 1
            return self._answer(self.selects == 1, "it has a subselect")
        if action == apsw.SQLITE_FUNCTION:
            steady = (name or "").lower() in self.functions
            return self._answer(steady, f"the function {name} is not deterministic")
        return self._answer(False, "it is not a plain comparison")

    def _answer(self, allowed: bool, why: str) -> int:
        if allowed:
            return apsw.SQLITE_OK
        self.why = self.why or why
        return apsw.SQLITE_DENY


def _steady_functions(connection: apsw.Connection) -> frozenset[str]:
    """Return the names of functions whose every form is deterministic. Aggregates are refused by SQLite itself."""
    steady: dict[str, bool] = {}
    for name, kind, flags in connection.execute("SELECT lower(name), type, flags FROM pragma_function_list"):
        fits = kind != "s" or (bool(flags & _DETERMINISTIC) and not flags & _DIRECT_ONLY)
        steady[name] = steady.get(name, True) and fits
    return frozenset([_MATCH, *(name for name, fits in steady.items() if fits)])


def _refused(why: str, condition: str, table: str, where: dict[str, object]) -> InvalidInput:
    hint = "use one SQLite expression over the columns of the table, like id < 5 AND who = 'ada'"
    return InvalidInput(
        f"not a condition on this table: {why}", hint=hint, condition=condition[:200], table=table, **where
    )
