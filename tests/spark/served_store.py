"""A store that is served to Spark, and SQLite databases in it, for the tests of the data sources."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pyspark.errors import StreamingQueryException

import quire
from quire.core.settings import MaintenanceSettings, PagesSettings, StoreSettings, StreamSettings
from quire.spark.access import options_of
from quire.store.store import Store
from quire.testing.clock import ManualClock

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.readwriter import DataStreamWriter

QUIET = StoreSettings(
    maintenance=MaintenanceSettings(enabled=False),
    pages=PagesSettings(seal_seconds=3_600.0),
    stream=StreamSettings(seal_seconds=3_600.0),
)
"""Settings of an owner without background work: segments are not sealed by their age, which would change rows in a test."""


@contextmanager
def open_served(path: Path, clock: ManualClock) -> Iterator[Store]:
    """A store with this clock, served to sources, and checked at the end."""
    with quire.open(path, settings=QUIET, clock=clock) as store:
        options_of(store)
        yield store
        assert store.manifest.check() == []


STARTING_SECONDS = 200.0


def run_available(writer: DataStreamWriter) -> None:
    """Run a query on the available data. Spark gives a Python process ten seconds to start, whatever its settings; on a
    busy machine that takes longer, and the query is started again from its checkpoint.
    """
    deadline = time.monotonic() + STARTING_SECONDS
    while True:
        try:
            writer.trigger(availableNow=True).start().awaitTermination()
        except StreamingQueryException as error:
            if "failed to connect back" not in str(error) or time.monotonic() > deadline:
                raise
        else:
            return


@dataclass(frozen=True)
class ServedStore:
    """A store that this process owns and serves."""

    store: Store
    spark: SparkSession
    options: dict[str, str]

    def read(self, source: str, **options: Any) -> DataFrame:
        """The DataFrame of a source."""
        source_options = {name.rstrip("_"): str(value) for name, value in options.items()}
        return self.spark.read.format(source).options(**self.options, **source_options).load()

    def run(self, database: str, *statements: str, rows: Iterable[tuple[Any, ...]] = ()) -> None:
        """Run statements in one transaction of a database, which is created if necessary; `rows` are bound to the last
        statement.
        """
        with closing(self.store.sqlite(database, create=True)) as connection, connection:
            *first, last = statements
            for statement in first:
                connection.execute(statement)
            if rows:
                connection.executemany(last, rows)
            else:
                connection.execute(last)

    def query(self, database: str, sql: str) -> list[tuple[Any, ...]]:
        """The rows that SQLite itself returns."""
        with closing(self.store.sqlite(database)) as connection:
            return list(connection.execute(sql))


@contextmanager
def serve_store(spark: SparkSession, path: Path) -> Iterator[ServedStore]:
    """A new store, served, and checked at the end."""
    with quire.open(path, settings=QUIET) as store:
        yield ServedStore(store, spark, options_of(store))
        assert store.manifest.check() == []


def rows_of(frame: DataFrame, *order: str) -> list[tuple[Any, ...]]:
    """All rows, ordered."""
    return [tuple(row) for row in (frame.orderBy(*order) if order else frame).collect()]


def message_of(error: BaseException) -> str:
    """Spark's message of an error, which contains quire's text."""
    return str(error)
