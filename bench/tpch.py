"""Queries 1 and 3 of TPC-H through Spark, over SQLite databases of quire and over the same rows in Parquet.

Both have the same rows (`tpchgen-cli`), the same session and the same text of the query, and each query has run once before.
The tables of the database `declared` declare types; those of `bare` declare none, as many Python programs create them. Dates
are text in both. The queries go through `register(…).sql`, which reads only the columns that they need. Results are compared
with SQLite's.

`floor` is the least that any data source in Python takes: it has the same columns as Arrow batches in memory, and passes them
to Spark unchanged. The rest of a query's time is spent by quire.
"""

from __future__ import annotations

import math
import os
import subprocess
import sysconfig
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition
from pyspark.sql.pandas.types import from_arrow_schema
from pyspark.sql.types import StructType

import quire
from bench.report import GIB, Report, alternate, seconds
from quire.spark import register, session

SETTINGS = quire.StoreSettings(
    maintenance=quire.MaintenanceSettings(enabled=False),
    pages=quire.PagesSettings(wal_bytes_max=64 * GIB, store_wal_bytes_max=64 * GIB),
)

TABLES = ("customer", "orders", "lineitem")

Q1 = """
SELECT l_returnflag, l_linestatus, sum(l_quantity) AS sum_qty, sum(l_extendedprice) AS sum_base_price,
       sum(l_extendedprice * (1 - l_discount)) AS sum_disc_price,
       sum(l_extendedprice * (1 - l_discount) * (1 + l_tax)) AS sum_charge,
       avg(l_quantity) AS avg_qty, avg(l_extendedprice) AS avg_price, avg(l_discount) AS avg_disc, count(*) AS count_order
FROM {db}lineitem WHERE l_shipdate <= '1998-09-02'
GROUP BY l_returnflag, l_linestatus ORDER BY l_returnflag, l_linestatus
"""
Q3 = """
SELECT l_orderkey, sum(l_extendedprice * (1 - l_discount)) AS revenue, o_orderdate, o_shippriority
FROM {db}customer, {db}orders, {db}lineitem
WHERE c_mktsegment = 'BUILDING' AND c_custkey = o_custkey AND l_orderkey = o_orderkey
  AND o_orderdate < '1995-03-15' AND l_shipdate > '1995-03-15'
GROUP BY l_orderkey, o_orderdate, o_shippriority ORDER BY revenue DESC, o_orderdate LIMIT 10
"""
QUERIES = {"q1": Q1, "q3": Q3}

FLOOR_ROWS = 10_000
"""Rows in a batch of the floor."""


def generate(directory: Path, scale: float) -> None:
    """Write the tables as Parquet, with decimals as doubles and dates as text, as SQLite stores them."""
    program = os.path.join(sysconfig.get_path("scripts"), "tpchgen-cli")
    command = [program, "parquet", "-s", str(scale), f"--tables={','.join(TABLES)}", f"--output-dir={directory}"]
    subprocess.run(command, check=True, capture_output=True)
    for table in TABLES:
        path = directory / f"{table}.parquet"
        rows = pq.read_table(path)
        pq.write_table(pa.table([_plain(column) for column in rows.columns], names=rows.column_names), path)


def _plain(column: pa.ChunkedArray) -> pa.ChunkedArray:
    if pa.types.is_decimal(column.type):
        return column.cast(pa.float64())
    if pa.types.is_integer(column.type):
        return column.cast(pa.int64())
    return column.cast(pa.string())


def fill(store: quire.Store, name: str, directory: Path, *, declared: bool) -> None:
    """Create a database with the same rows."""
    kinds = {pa.int64(): "INTEGER", pa.float64(): "REAL", pa.string(): "TEXT"}
    with closing(store.sqlite(name, create=True)) as connection:
        for table in TABLES:
            file = pq.ParquetFile(directory / f"{table}.parquet")
            columns = [f"{field.name} {kinds[field.type] if declared else ''}" for field in file.schema_arrow]
            connection.execute(f"CREATE TABLE {table}({', '.join(columns)})")
            places = ", ".join("?" * len(columns))
            for batch in file.iter_batches():
                with connection:
                    rows = zip(*(column.to_pylist() for column in batch.columns))
                    connection.executemany(f"INSERT INTO {table} VALUES ({places})", rows)
    store.checkpoint(name)


def native(store: quire.Store, name: str, query: str) -> list[tuple[Any, ...]]:
    """Return SQLite's result of a query."""
    with closing(store.sqlite(name)) as connection:
        return list(connection.execute(query.format(db="")))


def agree(ours: Iterable[Any], theirs: Iterable[Any]) -> None:
    """Assert that rows are equal, except for rounding: the order in which doubles are added differs."""
    for mine, other in zip([tuple(row) for row in ours], theirs, strict=True):
        for value, expected in zip(mine, other, strict=True):
            same = math.isclose(value, expected, rel_tol=1e-9) if isinstance(expected, float) else value == expected
            assert same, (mine, other)


# ── the floor ─────────────────────────────────────────────────────────────────────────────────────────────────────────
class BatchesReader(DataSourceReader):
    """Reads files of Arrow batches, one per task, mapped into memory."""

    def __init__(self, directory: str) -> None:
        self.directory = directory

    def partitions(self) -> list[InputPartition]:
        return [InputPartition(str(path)) for path in sorted(Path(self.directory).iterdir())]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        with pa.memory_map(partition.value) as mapped:
            file = pa.ipc.open_file(mapped)
            for number in range(file.num_record_batches):
                yield file.get_batch(number)


class BatchesSource(DataSource):
    """A data source that does no work for its rows."""

    @classmethod
    def name(cls) -> str:
        return "bench.batches"

    def schema(self) -> StructType:
        with pa.memory_map(str(sorted(Path(self.options["directory"]).iterdir())[0])) as mapped:
            return from_arrow_schema(pa.ipc.open_file(mapped).schema)

    def reader(self, schema: StructType) -> BatchesReader:  # noqa: ARG002 - Spark gives it
        return BatchesReader(self.options["directory"])


def batches_of(spark: SparkSession, files: Path, query: str, parts: int) -> None:
    """Register the columns that a query names as views of the floor."""
    for table in TABLES:
        source = pq.ParquetFile(files / f"{table}.parquet")
        columns = [name for name in source.schema_arrow.names if name in query]
        directory = files / f"floor-{table}-{len(columns)}"
        if columns and not directory.exists():
            directory.mkdir()
            rows = source.read(columns).combine_chunks()
            step = -(-rows.num_rows // parts)
            for number in range(parts):
                with pa.ipc.new_file(str(directory / f"{number}.arrow"), rows.schema) as writer:
                    writer.write_table(rows.slice(number * step, step), FLOOR_ROWS)
        if columns:
            loaded = spark.read.format(BatchesSource.name()).option("directory", str(directory)).load()
            loaded.createOrReplaceTempView(f"floor_{table}")


def _collect(sql: Callable[[str], DataFrame], query: str) -> list[Any]:
    return sql(query).collect()


def tpch(report: Report, directory: Path, quick: bool) -> None:
    scale, rounds = (0.01, 1) if quick else (0.5, 3)
    files = directory / "tpch"
    files.mkdir()
    generate(files, scale)
    cores = os.cpu_count() or 1
    spark = session(f"local[{cores}]", app="quire-bench")
    spark.dataSource.register(BatchesSource)
    for table in TABLES:
        spark.read.parquet(str(files / f"{table}.parquet")).createOrReplaceTempView(f"parquet_{table}")
    with quire.open(directory / "store", settings=SETTINGS) as store:
        for kind in ("declared", "bare"):
            fill(store, kind, files, declared=kind == "declared")
            store.snapshot(kind, "loaded")
            with register(store, kind, at="loaded") as registered:
                for name, query in QUERIES.items():
                    # Each run plans the query again: a DataFrame that is collected twice reuses its shuffle files.
                    on_quire = partial(_collect, registered.sql, query.format(db=f"{kind}."))
                    on_parquet = partial(_collect, spark.sql, query.format(db="parquet_"))
                    batches_of(spark, files, query, 2 * cores)
                    on_floor = partial(_collect, spark.sql, query.format(db="floor_"))
                    expected = native(store, kind, query)
                    for contender in (on_quire, on_parquet, on_floor):
                        agree(contender(), expected)
                    ours, parquet, floor, sqlite = alternate(
                        rounds,
                        partial(seconds, on_quire),
                        partial(seconds, on_parquet),
                        partial(seconds, on_floor),
                        partial(seconds, partial(native, store, kind, query)),
                    )
                    report.figure(f"{name}_{kind}_seconds", ours)
                    detail = f"{ours:.2f} s; Parquet {parquet:.2f} s, floor {floor:.2f} s, SQLite itself {sqlite:.2f} s"
                    report.ratio(f"{name}_{kind}_vs_parquet", ours / parquet, 1.3, "lower", detail)
                    report.ratio(f"{name}_{kind}_floor_vs_parquet", floor / parquet, None, "lower", "any Python source")


PARTS = (tpch,)
