"""Tables of a SQLite database by their names, for Spark's SQL.

    shop = quire.spark.register(store, "shop", at="monday")
    spark.sql("SELECT count(*) FROM shop.orders")
    shop.sql("SELECT who, sum(price) FROM shop.orders GROUP BY who")     # reads the columns `who` and `price` alone

A data source in Python has no catalog, and a table created with CREATE TABLE … USING is read without its options. So each
table is two entries of Spark's catalog: a table that has only columns, in a schema of quire's, and a view of it that adds the
options, in a schema with the database's name. Both last as long as Spark's catalog does: without a metastore, as long as the
application.

1. Nothing is dropped that a registration did not create. Schemas and views carry a mark as their comment. A schema without it
   is refused; tables and views without it stay, and so does a schema that has some.
2. Schemas of quire's begin with `quire_` and a random number, so no other schema has their names.
3. No file is deleted, only empty directories: a table that a user creates in a registered schema has its files there.

Spark prunes no columns for a data source in Python. `RegisteredDatabase.sql` does: the query is planned over empty JSON files
with the same columns, and the plan shows which ones Spark would read; then it is planned again over tables of these columns.
The views of these tables have the other columns too, in their places, because the query may name them, or count on their
order. Spark leaves them out of its plan; one that it computes after all is an error.

Threads: any. Raises `NotFound`, `UnknownSnapshot`, `AlreadyExists`, `InvalidInput`, and Spark's errors.
"""

from __future__ import annotations

import atexit
import os
import re
import secrets
import tempfile
import threading
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from itertools import chain, count
from typing import TYPE_CHECKING, Any

from quire.core.errors import AlreadyExists, InvalidInput, NotFound
from quire.spark.access import StoreLike, access_of, options_of
from quire.spark.sessions import attach, session
from quire.spark.sources.sqlite import SqliteSource
from quire.spark.sources.views import VersionRequest, opened
from quire.sqlite.bulk_insert import OWN_TABLES
from quire.sqlite.tables import connected

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.types import StructField, StructType

MARK = "registered by quire"
"""Comments of schemas and views that a registration created begin with this."""

LONG_PLANS = {"spark.sql.maxMetadataStringLength": "1000000", "spark.sql.debug.maxToStringFields": "10000"}
"""Settings that let a plan name all of its columns."""

_planning = threading.Lock()
"""Held while a query is planned for its columns: `LONG_PLANS` are settings of the session, for all of its threads."""

_TABLES = "SELECT name FROM sqlite_schema WHERE type IN ('table', 'view') AND name NOT GLOB 'sqlite_*' ORDER BY name"
_SCAN = re.compile(r"Location: \w+ \[file:(?P<path>[^\]]*)\](?:.*\n)*?ReadSchema: struct<(?P<columns>.*)>\n")
_FIELD = re.compile(r"(?:^|,)(c\d+):")
_PLAIN_NAME = re.compile(r"[A-Za-z0-9_]+")
"""The names that Spark's catalog takes for schemas, tables and views."""
_LITERAL = r"'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\"|--[^\n]*|/\*.*?\*/"


class RegisteredDatabase:
    """A database whose tables are known to Spark's SQL as `name.table`. Created by `register`."""

    def __init__(
        self,
        spark: SparkSession,
        name: str,
        options: Mapping[str, str],
        schemas: Mapping[str, StructType],
        *,
        tables: Mapping[str, str] | None = None,
        skipped: Mapping[str, str] | None = None,
    ) -> None:
        self.name = name
        """Name of the schema in Spark's catalog."""
        self.schemas = dict(schemas)
        """The schema of each table, by its name in Spark."""
        self.skipped = dict(skipped or {})
        """Tables and views that cannot be read, and why: a view of a table that was dropped, for example."""
        self._spark = spark
        self._options = dict(options)
        self._tables = dict(tables) if tables is not None else {table: table for table in schemas}
        """Spark's name → the table's name in the database."""
        self._own = f"quire_{secrets.token_hex(6)}"
        """Schema of the tables that views refer to; the schemas for queries have names that begin with it."""
        self._mark = f"{MARK}: {self._own}"
        self._home = tempfile.mkdtemp(prefix="quire-catalog-")
        self._made: list[str] = []
        """Schemas of quire's, which are dropped with everything in them."""
        self._numbers = count(1)
        self._planned: dict[str, str] = {}
        """Queries rewritten to tables of their columns. Finding the columns of a query takes as long as some queries do."""
        atexit.register(_remove_empty, self._home)
        self._claim(name)
        try:
            self._make_schema(self._own)
            self._make_views(name, {table: range(len(columns)) for table, columns in self.schemas.items()})
        except BaseException:
            self.drop()
            raise

    @property
    def tables(self) -> list[str]:
        """The names of its tables and views in Spark."""
        return list(self.schemas)

    def sql(self, query: str) -> DataFrame:
        """Return a query that reads only the columns it needs. Tables are named as `name.table`, as in `spark.sql`."""
        with _planning:
            if query not in self._planned:
                named = self._named(query)
                needed = self._needed(query, named) if named else {}
                self._planned[query] = self._moved(query, self._narrow(needed)) if needed else query
        return self._spark.sql(self._planned[query])

    def drop(self) -> None:
        """Remove the views from the catalog, and the schema unless it has tables of others; the database is left alone."""
        self._release(self.name)
        for schema in self._made:
            self._spark.sql(f"DROP SCHEMA IF EXISTS {quoted(schema)} CASCADE")
        self._made.clear()
        self._planned.clear()
        _remove_empty(self._home)

    def __enter__(self) -> RegisteredDatabase:
        return self

    def __exit__(self, *_: object) -> None:
        self.drop()

    # ── helpers ───────────────────────────────────────────────────────────────────────────────────────────────────────
    def _claim(self, schema: str) -> None:
        """Create the schema of the database's name, or take over one that an earlier registration created."""
        if not self._spark.catalog.databaseExists(quoted(schema)):
            self._create_schema(schema)
            return
        if not self._is_marked(schema):
            raise AlreadyExists(
                "Spark's catalog already has a schema with this name, and quire did not create it",
                hint=f'register under another name: name="{schema}_quire"',
                schema=schema,
            )
        self._drop_views(schema, MARK)

    def _release(self, schema: str) -> None:
        """Remove our views from a schema, then the schema if a registration created it and nothing else is in it."""
        if not self._spark.catalog.databaseExists(quoted(schema)) or not self._is_marked(schema):
            return
        self._drop_views(schema, self._mark)
        if not [table for table in self._spark.catalog.listTables(quoted(schema)) if not table.isTemporary]:
            self._spark.sql(f"DROP SCHEMA {quoted(schema)}")

    def _is_marked(self, schema: str) -> bool:
        return (self._spark.catalog.getDatabase(quoted(schema)).description or "").startswith(MARK)

    def _drop_views(self, schema: str, mark: str) -> None:
        """Drop the views whose comments begin with a mark."""
        for table in self._spark.catalog.listTables(quoted(schema)):
            if not table.isTemporary and (table.description or "").startswith(mark):
                self._spark.sql(f"DROP VIEW {quoted(schema)}.{quoted(table.name)}")

    def _make_schema(self, schema: str) -> str:
        """Create a schema of quire's and return its name."""
        self._create_schema(schema)
        self._made.append(schema)
        return schema

    def _create_schema(self, schema: str) -> None:
        location = literal("file:" + tempfile.mkdtemp(dir=self._home))
        self._spark.sql(f"CREATE SCHEMA {quoted(schema)} COMMENT {literal(self._mark)} LOCATION {location}")

    def _make_views(self, schema: str, tables: Mapping[str, Collection[int]]) -> None:
        """Create a view of each table, which reads the columns at these places."""
        for table, places in tables.items():
            given = {**self._options, "table": self._tables[table]}
            options = ", ".join(f"{quoted(name)} = {literal(value)}" for name, value in given.items())
            fields = self.schemas[table].fields
            declared = ", ".join(
                f"{quoted(fields[place].name)} {fields[place].dataType.simpleString()}" for place in places
            )
            source = self._make_table(f"({declared}) USING `quire.sqlite`")
            columns = ", ".join(
                quoted(field.name) if place in places else _unread(field) for place, field in enumerate(fields)
            )
            self._make_view(schema, table, f"SELECT {columns} FROM {source} WITH ({options})")

    def _make_table(self, definition: str) -> str:
        """Create a table of quire's and return its name."""
        source = f"{quoted(self._own)}.`t{next(self._numbers)}`"
        self._spark.sql(f"CREATE TABLE {source} {definition}")
        return source

    def _make_view(self, schema: str, table: str, query: str) -> None:
        view = f"{quoted(schema)}.{quoted(table)}"
        self._spark.sql(f"CREATE VIEW {view} COMMENT {literal(self._mark)} AS {query}")

    def _narrow(self, needed: Mapping[str, list[int]]) -> str:
        """Create a schema of quire's with views that read these columns, and return its name."""
        schema = self._make_schema(f"{self._own}_{next(self._numbers)}")
        self._make_views(schema, needed)
        return schema

    def _named(self, query: str) -> list[str]:
        """Return the tables that a query may read: those whose names occur in it."""
        words = {word.lower() for word in re.findall(r"\w+", query)}
        return [table for table in self.schemas if set(re.findall(r"\w+", table.lower())) <= words]

    def _needed(self, query: str, named: Iterable[str]) -> dict[str, list[int]]:
        """Return the columns of each table that the query would read, by position."""
        schema = self._make_schema(f"{self._own}_{next(self._numbers)}")
        places: dict[str, str] = {}
        for table in named:
            path = tempfile.mkdtemp(dir=self._home)
            places[path] = table
            # Columns have plain names in the plan: with unusual names the text of a struct would be ambiguous.
            fields = self.schemas[table].fields
            plain = ", ".join(f"c{place} {field.dataType.simpleString()}" for place, field in enumerate(fields))
            renamed = ", ".join(f"c{place} AS {quoted(field.name)}" for place, field in enumerate(fields))
            source = self._make_table(f"({plain}) USING json LOCATION {literal('file:' + path)}")
            self._make_view(schema, table, f"SELECT {renamed} FROM {source}")
        plan = self._plan(self._moved(query, schema))
        read: dict[str, set[int]] = {}
        for scan in _SCAN.finditer(plan):
            if table := places.get(scan["path"], ""):
                read.setdefault(table, set()).update(int(name[1:]) for name in _FIELD.findall(scan["columns"]))
        # The query still names a table that Spark has removed from the plan.
        every = {table: list(range(len(self.schemas[table]))) for table in places.values()}
        return {**every, **{table: sorted(columns) or [0] for table, columns in read.items()}}

    def _plan(self, query: str) -> str:
        # A statement, because `DataFrame.explain` would execute a command such as CREATE VIEW, and print the plan.
        with _set(self._spark, LONG_PLANS):
            return str(self._spark.sql(f"EXPLAIN FORMATTED {query}").collect()[0][0])

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
    snapshot; without it, each query reads the newest version. `name`: of the schema, by default the database's; a schema that
    quire did not create is refused. `tables`: the tables to register, by default all that can be read; the others are in
    `skipped`. Spark's catalog takes only letters, digits and `_` in names: `my table` is registered as `my_table`.
    """
    schema = _checked_name(name or database)
    spark = attach(spark) if spark is not None else session()
    options = {**options_of(store), "database": database, **({"snapshot": at} if at else {})}
    wanted = list(tables)
    table_names = wanted or _tables(options, database)
    if not table_names:
        raise NotFound("the database has no tables", hint="create one, then register again", database=database)
    named = spark_names(table_names)
    schemas, skipped = _schemas(options, named, is_required=bool(wanted))
    if not schemas:
        raise NotFound("no table of the database can be read", hint=next(iter(skipped.values())), database=database)
    return RegisteredDatabase(spark, schema, options, schemas, tables=named, skipped=skipped)


def _schemas(
    options: Mapping[str, str], named: Mapping[str, str], *, is_required: bool
) -> tuple[dict[str, StructType], dict[str, str]]:
    """Return the schemas of tables by their names in Spark, and the tables that cannot be read, with the reason."""
    schemas: dict[str, StructType] = {}
    skipped: dict[str, str] = {}
    for given, table in named.items():
        try:
            schemas[given] = _schema(options, table)
        except (InvalidInput, NotFound) as error:
            if is_required:
                raise
            skipped[table] = str(error)
    return schemas, skipped


def _schema(options: Mapping[str, str], table: str) -> StructType:
    """Return the schema of a table, if Spark's catalog takes it."""
    schema = SqliteSource({**options, "table": table}).schema()
    if not all(schema.names):
        raise InvalidInput(
            "a column has no name",
            hint="register a view that omits it: Spark SQL does not allow this name",
            table=table,
        )
    return schema


def _checked_name(name: str) -> str:
    """Return the name of a schema, if Spark's catalog takes it."""
    if not _PLAIN_NAME.fullmatch(name):
        raise InvalidInput(
            "Spark's catalog takes only letters, digits and _ in the name of a schema",
            hint=f'pass a name of your own: name="{_plain(name)}"',
            name=name,
        )
    return name


def _plain(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9_]", "_", name) or "_"


def spark_names(tables: Iterable[str]) -> dict[str, str]:
    """Return a name that Spark's catalog takes for each table. Tables that have such a name keep it.

    >>> spark_names(["my table", "my_table", "orders"])
    {'my_table_2': 'my table', 'my_table': 'my_table', 'orders': 'orders'}
    """
    names = list(tables)
    taken = {name.lower() for name in names if _PLAIN_NAME.fullmatch(name)}
    given: dict[str, str] = {}
    for name in names:
        plain = name
        if not _PLAIN_NAME.fullmatch(name):
            numbered = (f"{_plain(name)}_{number}" for number in count(2))
            plain = next(free for free in chain([_plain(name)], numbered) if free.lower() not in taken)
            taken.add(plain.lower())
        given[plain] = name
    return given


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


def _remove_empty(directory: str) -> None:
    """Remove a directory and those in it, as far as they are empty."""
    for path, _, _ in os.walk(directory, topdown=False):
        with suppress(OSError):  # not empty: it has other files
            os.rmdir(path)


def _unread(field: StructField) -> str:
    """Return a column that a query names and Spark does not read; computing it would return wrong rows."""
    error = literal(f"the column {field.name} was left out of the plan of this query; use spark.sql")
    return f"CAST(raise_error({error}) AS {field.dataType.simpleString()}) AS {quoted(field.name)}"


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
