"""Bulk loads of a DataFrame in any order: partitioned by ranges of keys, then sorted and written as tables by each task.

    bulk_load(df.selectExpr("user_id AS key", "to_json(struct(*)) AS value"), store, "users")

Why not the plain writer: each of its tasks would have keys from the whole range, so their tables would overlap and a
compaction would have to read everything again. Here each task has its own range: tables are disjoint and stay where they are.
Tasks sort with Arrow (`lsm/bulk.py`), which takes a fraction of the time of `sortWithinPartitions`.

Why not `repartitionByRange`: to find its ranges it runs the whole query a second time, with all columns. Here the ranges are
found from a sample of the keys alone, and each row is sent to its range by comparisons that Spark compiles. Whatever the
sample contains, each key is in exactly one range; a frame that returns other rows the second time loses only balance. The
driver holds at most `2 * KEYS_MAX` keys of each task.

Threads: any. Raises Spark's errors, with quire's inside them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import pyarrow as pa
from pyspark.sql import Column, DataFrame
from pyspark.sql.functions import col, lit, when

from quire.spark.access import StoreLike, options_of
from quire.spark.active_session import job_description
from quire.spark.sessions import attach
from quire.spark.sources.base import default_partitions

RANGES_MAX = 256
"""Ranges, at most. More would make the expression large, which was not tried; Spark finds the ranges in that case."""

SAMPLE = 1 / 16
KEYS_MAX = 256
"""A task contributes between this many and twice as many keys to the sample, if it has them."""


def bulk_load(
    frame: DataFrame,
    store: StoreLike,
    database: str,
    *,
    key: str = "key",
    value: str = "value",
    partitions: int = 0,
    create: bool = True,
) -> None:
    """Load two columns of a DataFrame into a key-value database, all in one step.

    `store`: one that this process owns, or the path or address of one that is served, or the options of a source.
    `partitions`: how many tasks write; by default eight per core. A task with at most 128 MiB writes its rows once.
    """
    pairs = frame.select(frame[key].alias("key"), frame[value].alias("value"))
    options = {**options_of(store), "database": database, "create": str(create).lower()}
    attach(frame.sparkSession)
    with job_description(frame.sparkSession, f"quire bulk load: {database}"):
        ranged = in_ranges(pairs, partitions or 4 * default_partitions())
        ranged.write.format("quire.kv").mode("append").options(**options).save()


def in_ranges(pairs: DataFrame, partitions: int) -> DataFrame:
    """Return the same rows, in partitions with disjoint ranges of keys of about the same size."""
    if not 2 <= partitions <= RANGES_MAX:
        return pairs.repartitionByRange(partitions, "key")
    key = col("key").cast("binary")
    sampled = (
        pairs.select(key.alias("key"))
        .sample(fraction=SAMPLE, seed=0)
        .mapInArrow(_thinned, "key binary, stands_for bigint")
    )
    cuts = even_cuts(sampled.toArrow(), partitions)
    return pairs.repartitionById(partitions, _range_of(key, cuts, 0))


def even_cuts(sample: pa.Table, parts: int) -> list[bytes]:
    """Return the first key of each range except the first range.

    >>> import pyarrow as pa
    >>> even_cuts(pa.table({"key": [b"d", b"a", b"b", b"c"], "stands_for": [1, 1, 1, 1]}), 2)
    [b'c']
    >>> even_cuts(pa.table({"key": [b"a", b"b"], "stands_for": [1, 9]}), 4)
    [b'b']
    """
    sample = sample.sort_by("key")
    if not sample.num_rows:
        return []
    behind = np.cumsum(sample["stands_for"].to_numpy())
    at = np.searchsorted(behind, behind[-1] * np.arange(1, parts) / parts, side="right")
    cuts = sample["key"].take(np.minimum(at, sample.num_rows - 1)).to_pylist()
    return sorted(set(cuts) - {sample["key"][0].as_py()})


def _range_of(key: Column, cuts: Sequence[bytes], first: int) -> Column:
    """Return the number of a key's range, from `first` on, by binary search."""
    if not cuts:
        return lit(first)
    middle = len(cuts) // 2
    below = _range_of(key, cuts[:middle], first)
    return when(key < lit(cuts[middle]), below).otherwise(_range_of(key, cuts[middle + 1 :], first + middle + 1))


def _thinned(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Yield every n-th key of a task, with n as large as necessary. Runs on executors."""
    kept, step, seen = list[pa.Array](), 1, 0
    for batch in batches:
        keys = batch.column(0).drop_null()
        kept.append(keys.take(pa.array(range(-seen % step, len(keys), step), pa.int64())))
        seen += len(keys)
        while sum(map(len, kept)) > 2 * KEYS_MAX:
            merged = pa.concat_arrays(kept)
            kept, step = [merged.take(pa.array(range(0, len(merged), 2), pa.int64()))], 2 * step
    if kept:
        keys = pa.concat_arrays(kept)
        yield pa.RecordBatch.from_arrays([keys, pa.array([step] * len(keys), pa.int64())], ["key", "stands_for"])
