"""Bulk loads of a DataFrame in any order: partitioned by ranges of keys, then sorted and written as tables by each task.

    from quire.spark.sources.kv_load import bulk_load

    bulk_load(df.selectExpr("user_id AS key", "to_json(struct(*)) AS value"), store, "users")

Why not the plain writer: its tasks would each have keys from everywhere, so that their tables overlap and a compaction has to
read all of it again. Here each task has a range of its own: tables are disjoint, and stay where they are. Tasks sort with
Arrow (`lsm/bulk.py`), which takes a fraction of what `sortWithinPartitions` does.

Threads: any. Raises what Spark raises, with our errors in it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING

from quire.spark.access import Served, options_of
from quire.spark.sources.shapes import default_partitions

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


def bulk_load(
    frame: DataFrame,
    store: Served | str | os.PathLike[str] | Mapping[str, str],
    database: str,
    *,
    key: str = "key",
    value: str = "value",
    partitions: int = 0,
    create: bool = True,
) -> None:
    """Load two columns of a DataFrame into a key-value database, all of it in one step.

    `store`: one that this process owns, or the path or address of one that is served, or the options of a source.
    `partitions`: how many tasks write; eight for each core unless told. One that has at most 128 MiB writes them once.
    """
    if isinstance(store, Mapping):
        given = dict(store)
    else:
        given = {"store": os.fspath(store)} if isinstance(store, str | os.PathLike) else options_of(store)
    pairs = frame.select(frame[key].alias("key"), frame[value].alias("value"))
    ranged = pairs.repartitionByRange(partitions or 4 * default_partitions(), "key")
    options = {**given, "database": database, "create": str(create).lower()}
    ranged.write.format("quire.kv").mode("append").options(**options).save()
