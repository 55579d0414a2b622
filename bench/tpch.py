"""TPC-H's first and third query through Spark, over SQLite databases of quire and over the same rows in Parquet.

What is the same for both: the rows (`tpchgen-cli`), the session, the text of the query, and that each has run once. `declared`
is a database whose tables declare types, `bare` one that declares none, as many Python programs make them; dates are text in
both. The queries go through `register(…).sql`, which reads the columns that they need. Answers are compared with SQLite's.

`floor` is the least that any data source in Python takes: it has the same columns as Arrow batches in memory, and hands them to
Spark as they are. What a query takes beyond it is ours.
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
from bench.report import Report, alternate, seconds
from quire.core.limits import GIB
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
"""In a batch of the floor."""


def generate(directory: Path, scale: float) -> None:
    """The tables as Parquet, with decimals as doubles and dates as text, as SQLite has them."""
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
    """The same rows in a database."""
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
    """SQLite's own answer."""
    with closing(store.sqlite(name)) as connection:
        return list(connection.execute(query.format(db="")))


def agree(ours: Iterable[Any], theirs: Iterable[Any]) -> None:
    """Rows are the same but for the order in which doubles were added."""
    for mine, other in zip([tuple(row) for row in ours], theirs, strict=True):
        for value, wanted in zip(mine, other, strict=True):
            same = math.isclose(value, wanted, rel_tol=1e-9) if isinstance(wanted, float) else value == wanted
            assert same, (mine, other)


# ── the floor ─────────────────────────────────────────────────────────────────────────────────────────────────────────
class BatchesReader(DataSourceReader):
    """Files of Arrow batches, one for each task, mapped into memory."""

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
    """A source that does nothing for its rows."""

    @classmethod
    def name(cls) -> str:
        return "bench.batches"

    def schema(self) -> StructType:
        with pa.memory_map(str(sorted(Path(self.options["directory"]).iterdir())[0])) as mapped:
            return from_arrow_schema(pa.ipc.open_file(mapped).schema)

    def reader(self, schema: StructType) -> BatchesReader:  # noqa: ARG002 - Spark gives it
        return BatchesReader(self.options["directory"])


def batches_of(spark: SparkSession, files: Path, query: str, parts: int) -> None:
    """The columns that a query names, as views of the floor."""
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
                    # Planned anew for each run: what is collected again has its shuffles on disk already.
                    here = partial(_collect, registered.sql, query.format(db=f"{kind}."))
                    there = partial(_collect, spark.sql, query.format(db="parquet_"))
                    batches_of(spark, files, query, 2 * cores)
                    least = partial(_collect, spark.sql, query.format(db="floor_"))
                    wanted = native(store, kind, query)
                    for way in (here, there, least):
                        agree(way(), wanted)
                    ours, parquet, floor, sqlite = alternate(
                        rounds,
                        partial(seconds, here),
                        partial(seconds, there),
                        partial(seconds, least),
                        partial(seconds, partial(native, store, kind, query)),
                    )
                    report.figure(f"{name}_{kind}_seconds", ours)
                    detail = f"{ours:.2f} s; Parquet {parquet:.2f} s, floor {floor:.2f} s, SQLite itself {sqlite:.2f} s"
                    report.ratio(f"{name}_{kind}_vs_parquet", ours / parquet, 1.3, "lower", detail)
                    report.ratio(f"{name}_{kind}_floor_vs_parquet", floor / parquet, None, "lower", "any Python source")


PARTS = (tpch,)
