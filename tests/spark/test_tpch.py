"""Queries 1 and 3 of TPC-H give the same results on Spark as on SQLite."""

from __future__ import annotations

import shutil
import sysconfig
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from bench.tpch import QUERIES, agree, fill, generate, native
from quire.spark.catalog import register
from tests.spark.served_store import serve_store

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

needs_generator = pytest.mark.skipif(
    shutil.which("tpchgen-cli", path=sysconfig.get_path("scripts")) is None, reason="tpchgen-cli is not installed"
)


@needs_generator
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["declared", "bare"])
def test_queries_agree_with_sqlite(spark: SparkSession, tmp_path: Path, kind: str) -> None:
    files = tmp_path / "tpch"
    files.mkdir()
    generate(files, 0.002)
    with serve_store(spark, tmp_path / "store") as owner:
        fill(owner.store, kind, files, declared=kind == "declared")
        with register(owner.store, kind) as registered:
            for query in QUERIES.values():
                expected = native(owner.store, kind, query)
                assert expected
                agree(registered.sql(query.format(db=f"{kind}.")).collect(), expected)
