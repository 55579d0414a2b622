"""Tables of a SQLite database by their names, for Spark's SQL.

    shop = quire.spark.register(store, "shop", at="monday")
    spark.sql("SELECT count(*) FROM shop.orders")
    shop.sql("SELECT who, sum(price) FROM shop.orders GROUP BY who")     # reads the columns `who` and `price` alone

A data source in Python has no catalog, and a table created with CREATE TABLE … USING is read without its options. So each
table is two entries of Spark's catalog, in a schema with the database's name: a table that has only columns, and a view of it
that adds the options. Both last as long as Spark's catalog does: without a metastore, as long as the application.

Spark prunes no columns for a data source in Python. `RegisteredDatabase.sql` does: the query is planned over empty JSON files
with the same columns, and the plan shows which ones Spark would read; then it is planned again over tables of these columns.

Threads: any. Raises `NotFound`, `UnknownSnapshot`, and Spark's errors.
"""

from __future__ import annotations

import atexit
import io
import os
import re
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, redirect_stdout
from typing import TYPE_CHECKING, Any

from quire.core.errors import NotFound
from quire.spark.access import StoreLike, access_of, options_of
from quire.spark.sessions import attach, session
from quire.spark.sources.sqlite import SqliteSource
from quire.spark.sources.views import VersionRequest, opened
from quire.sqlite.bulk_insert import LOADS, SINKS
from quire.sqlite.tables import connected

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.types import StructType

OWN_TABLES = (LOADS, SINKS, "quire_idempotency")
"""Tables that quire itself keeps in databases. They are not registered."""

SOURCE = "__source"
"""Suffix of the name of a view's table."""

LONG_PLANS = {"spark.sql.maxMetadataStringLength": "1000000", "spark.sql.debug.maxToStringFields": "10000"}
"""Settings that let a plan name all of its columns."""

_TABLES = "SELECT name FROM sqlite_schema WHERE type IN ('table', 'view') AND name NOT GLOB 'sqlite_*' ORDER BY name"
_SCAN = re.compile(r"Location: \w+ \[file:(?P<path>[^\]]*)\](?:.*\n)*?ReadSchema: struct<(?P<columns>.*)>\n")
_FIELD = re.compile(r"(?:^|,)(c\d+):")
_LITERAL = r"'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\"|--[^\n]*|/\*.*?\*/"


class RegisteredDatabase:
    """A database whose tables are known to Spark's SQL as `name.table`. Created by `register`."""

    def __init__(
        self, spark: SparkSession, name: str, options: Mapping[str, str], schemas: Mapping[str, StructType]
    ) -> None:
        self.name = name
        """Name of the schema in Spark's catalog."""
        self.schemas = dict(schemas)
        """The schema of each table."""
        self._spark = spark
        self._options = dict(options)
        self._home = tempfile.mkdtemp(prefix="quire-catalog-")
        self._made: list[str] = []
        self._planned: dict[str, str] = {}
        """Queries rewritten to tables of their columns. Finding the columns of a query takes as long as some queries do."""
        atexit.register(shutil.rmtree, self._home, ignore_errors=True)
        self._make(name, self.schemas)

    @property
    def tables(self) -> list[str]:
        """The names of its tables and views."""
        return list(self.schemas)

    def sql(self, query: str) -> DataFrame:
        """Return a query that reads only the columns it needs. Tables are named as `name.table`, as in `spark.sql`."""
        if query not in self._planned:
            named = self._named(query)
            needed = self._needed(query, named) if named else {}
            schema = f"{self.name}_{len(self._planned) + 1}"
            if needed:
                self._make(schema, {table: _only(self.schemas[table], columns) for table, columns in needed.items()})
            self._planned[query] = self._moved(query, schema) if needed else query
        return self._spark.sql(self._planned[query])

    def drop(self) -> None:
        """Remove the tables from the catalog; the database is left alone."""
        for schema in self._made:
            self._spark.sql(f"DROP SCHEMA IF EXISTS {quoted(schema)} CASCADE")
        self._made.clear()
        self._planned.clear()
        shutil.rmtree(self._home, ignore_errors=True)

    def __enter__(self) -> RegisteredDatabase:
        return self

    def __exit__(self, *_: object) -> None:
        self.drop()

    # ── helpers ───────────────────────────────────────────────────────────────────────────────────────────────────────
    def _make(self, schema: str, tables: Mapping[str, StructType]) -> None:
        """Create a schema of these tables, replacing one with the same name."""
        self._make_schema(schema)
        for table, columns in tables.items():
            source, view = (f"{quoted(schema)}.{quoted(name)}" for name in (table + SOURCE, table))
            given = {**self._options, "table": table}
            options = ", ".join(f"{quoted(name)} = {literal(value)}" for name, value in given.items())
            self._spark.sql(f"CREATE TABLE {source} ({_declared(columns)}) USING `quire.sqlite`")
            self._spark.sql(f"CREATE VIEW {view} AS SELECT * FROM {source} WITH ({options})")

    def _make_schema(self, schema: str) -> None:
        self._spark.sql(f"DROP SCHEMA IF EXISTS {quoted(schema)} CASCADE")
        location = literal("file:" + tempfile.mkdtemp(dir=self._home))
        self._spark.sql(f"CREATE SCHEMA {quoted(schema)} LOCATION {location}")
        if schema not in self._made:
            self._made.append(schema)

    def _named(self, query: str) -> list[str]:
        """Return the tables that a query may read: those whose names occur in it."""
        words = {word.lower() for word in re.findall(r"\w+", query)}
        return [table for table in self.schemas if set(re.findall(r"\w+", table.lower())) <= words]

    def _needed(self, query: str, named: Iterable[str]) -> dict[str, list[int]]:
        """Return the columns of each table that the query would read, by position."""
        schema = f"{self.name}_columns"
        self._make_schema(schema)
        places: dict[str, str] = {}
        for number, table in enumerate(named):
            path = os.path.join(self._home, f"{schema}-{number}")
            os.makedirs(path, exist_ok=True)
            places[path] = table
            # Columns have plain names in the plan: with unusual names the text of a struct would be ambiguous.
            fields = self.schemas[table].fields
            plain = ", ".join(f"c{place} {field.dataType.simpleString()}" for place, field in enumerate(fields))
            renamed = ", ".join(f"c{place} AS {quoted(field.name)}" for place, field in enumerate(fields))
            source, view = (f"{quoted(schema)}.{quoted(name)}" for name in (table + SOURCE, table))
            self._spark.sql(f"CREATE TABLE {source} ({plain}) USING json LOCATION {literal('file:' + path)}")
            self._spark.sql(f"CREATE VIEW {view} AS SELECT {renamed} FROM {source}")
        plan = self._plan(self._moved(query, schema))
        needed: dict[str, set[int]] = {}
        for scan in _SCAN.finditer(plan):
            if (read := places.get(scan["path"])) is not None:
                columns = {int(name[1:]) for name in _FIELD.findall(scan["columns"])}
                needed.setdefault(read, set()).update(columns)
        return {table: sorted(columns) or [0] for table, columns in needed.items()}

    def _plan(self, query: str) -> str:
        with _set(self._spark, LONG_PLANS), redirect_stdout(io.StringIO()) as printed:
            self._spark.sql(query).explain("formatted")
        return printed.getvalue()

    def _moved(self, query: str, schema: str) -> str:
        """Return the query with another schema instead of ours; literals and comments stay unchanged."""
        names = rf"(?<![\w.`])(?:{re.escape(self.name)}|`{re.escape(self.name)}`)(?=\s*\.)"
        pattern = re.compile(f"({_LITERAL})|{names}", re.IGNORECASE | re.DOTALL)
        return pattern.sub(lambda match: match[1] or quoted(schema), query)


def register(
    store: StoreLike,
    database: str,
    *,
    at: str = "",
    name: str = "",
    tables: Iterable[str] = (),
    spark: SparkSession | None = None,
) -> RegisteredDatabase:
    """Register the tables of a SQLite database in Spark's SQL, as `database.table`.

    `store`: one that this process owns, the path or address of one that is served, or the options of a source. `at`: a
    snapshot; without it, each query reads the newest version. `name`: of the schema, by default the database's. `tables`: the
    tables to register, by default all.
    """
    spark = attach(spark) if spark is not None else session()
    options = {**options_of(store), "database": database, **({"snapshot": at} if at else {})}
    table_names = list(tables) or _tables(options, database)
    if not table_names:
        raise NotFound("the database has no tables", hint="create one, then register again", database=database)
    schemas = {table: SqliteSource({**options, "table": table}).schema() for table in table_names}
    return RegisteredDatabase(spark, name or database, options, schemas)


def _tables(options: Mapping[str, str], database: str) -> list[str]:
    """Return the tables and views of a database in the requested version."""
    request = VersionRequest(SqliteSource.parse(options))
    with access_of(options).connect() as client, ExitStack() as stack:
        if request.snapshot:
            source: Any = stack.enter_context(opened(request.version(client, database)))
        else:
            source = stack.enter_context(client.reader(database))
        connection = stack.enter_context(connected(source))
        names = [str(name) for (name,) in connection.execute(_TABLES)]
    return [name for name in names if name not in OWN_TABLES]


@contextmanager
def _set(spark: SparkSession, settings: Mapping[str, str]) -> Iterator[None]:
    before = {name: spark.conf.get(name) for name in settings}  # Spark's defaults where they are not set
    for name, value in settings.items():
        spark.conf.set(name, value)
    try:
        yield
    finally:
        for name, earlier in before.items():
            if earlier is not None:
                spark.conf.set(name, earlier)


def _only(schema: StructType, places: Iterable[int]) -> StructType:
    return type(schema)([schema.fields[place] for place in places])


def _declared(schema: StructType) -> str:
    return ", ".join(f"{quoted(field.name)} {field.dataType.simpleString()}" for field in schema.fields)


def quoted(name: str) -> str:
    """Return a name quoted for Spark's SQL.

    >>> quoted("odd`name")
    '`odd``name`'
    """
    return "`" + name.replace("`", "``") + "`"


def literal(text: str) -> str:
    r"""Return a text as a literal of Spark's SQL.

    >>> literal("it's")
    "'it\\'s'"
    """
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"
