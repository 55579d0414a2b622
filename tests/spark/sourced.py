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
from quire.core.settings import MaintenanceSettings, StoreSettings
from quire.spark.access import options_of
from quire.store.store import Store
from quire.testing.clock import ManualClock

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.readwriter import DataStreamWriter

QUIET = StoreSettings(maintenance=MaintenanceSettings(enabled=False))
"""Of an owner that does nothing by itself."""


@contextmanager
def opened(path: Path, clock: ManualClock) -> Iterator[Store]:
    """A store on this clock, served to sources, and in order at the end."""
    with quire.open(path, settings=QUIET, clock=clock) as store:
        options_of(store)
        yield store
        assert store.manifest.check() == []


STARTING_SECONDS = 200.0


def run_available(writer: DataStreamWriter) -> None:
    """Run a query over what is there now. Spark gives a Python process ten seconds to start, whatever its settings say, and
    a busy machine takes longer: then the query starts again from its checkpoint."""
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
class Owned:
    """A store that this process owns and serves."""

    store: Store
    spark: SparkSession
    options: dict[str, str]

    def read(self, source: str, **options: Any) -> DataFrame:
        """What a source has."""
        given = {name.rstrip("_"): str(value) for name, value in options.items()}
        return self.spark.read.format(source).options(**self.options, **given).load()

    def run(self, database: str, *statements: str, rows: Iterable[tuple[Any, ...]] = ()) -> None:
        """Run statements in one transaction of a database, which is made if need be; `rows` are for the last of them."""
        with closing(self.store.sqlite(database, create=True)) as connection, connection:
            *first, last = statements
            for each in first:
                connection.execute(each)
            if rows:
                connection.executemany(last, rows)
            else:
                connection.execute(last)

    def query(self, database: str, sql: str) -> list[tuple[Any, ...]]:
        """What SQLite itself says."""
        with closing(self.store.sqlite(database)) as connection:
            return list(connection.execute(sql))


@contextmanager
def owned(spark: SparkSession, path: Path) -> Iterator[Owned]:
    """A new store, served; sound when the block ends."""
    with quire.open(path, settings=QUIET) as store:
        yield Owned(store, spark, options_of(store))
        assert store.manifest.check() == []


def rows_of(frame: DataFrame, *order: str) -> list[tuple[Any, ...]]:
    """All rows, in an order."""
    return [tuple(row) for row in (frame.orderBy(*order) if order else frame).collect()]


def said(error: BaseException) -> str:
    """What Spark says of an error, with the text of ours in it."""
    return str(error)
