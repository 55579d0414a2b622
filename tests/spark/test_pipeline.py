"""The example of a declarative pipeline: each file is in the table once, according to the data and to Spark's
checkpoint.

`spark-pipelines run` of Spark 4.3 exits with 1 after a completed run, so its exit code is ignored.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

import quire
from quire.spark.java import find_java, quiet_home
from tests.rules.tree import ROOT
from tests.spark.served_store import QUIET


def run_pipeline(tmp_path: Path) -> str:
    spec = tmp_path / "spark-pipeline.yml"
    example = ROOT / "examples" / "pipeline"
    text = (example / "spark-pipeline.yml").read_text()
    spec.write_text(text.replace("file:///tmp/quire-pipeline", f"file://{tmp_path}/storage"))
    (tmp_path / "storage").mkdir(exist_ok=True)
    if not (tmp_path / "transformations").exists():
        (tmp_path / "transformations").symlink_to(example / "transformations")
    environment = {
        **os.environ,
        "JAVA_HOME": quiet_home(find_java()),
        "PYSPARK_PYTHON": sys.executable,
        "PYSPARK_DRIVER_PYTHON": sys.executable,
        "SPARK_MASTER": "local[2]",
        "QUIRE_STORE": str(tmp_path / "store"),
        "QUIRE_INBOX": str(tmp_path / "inbox"),
    }
    command = [str(Path(sys.executable).with_name("spark-pipelines")), "run", "--spec", str(spec)]
    ran = subprocess.run(
        command, env=environment, cwd=tmp_path, timeout=400, capture_output=True, text=True, check=False
    )
    return ran.stdout + ran.stderr


def put(tmp_path: Path, name: str, *rows: dict[str, Any]) -> None:
    (tmp_path / "inbox").mkdir(exist_ok=True)
    (tmp_path / "inbox" / name).write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_pipeline_of_the_examples_writes_each_file_once(tmp_path: Path) -> None:
    with quire.open(tmp_path / "store", settings=QUIET) as store:
        store.serve()
        put(tmp_path, "1.json", {"id": 1, "who": "ada", "price": 9.5}, {"id": 2, "who": "bob", "price": 3})
        output = run_pipeline(tmp_path)
        put(tmp_path, "2.json", {"id": 1, "gone": True}, {"id": 3, "who": "eve", "price": 1})
        output += run_pipeline(tmp_path)
        with closing(store.sqlite("shop")) as shop:
            assert list(shop.execute("SELECT * FROM orders ORDER BY id")) == [(2, "bob", 3.0), (3, "eve", 1.0)], output
            assert list(shop.execute("SELECT batch FROM quire_sinks")) == [(1,)], output
    commits = sorted(path.name for path in (tmp_path / "storage").rglob("commits/*") if path.name.isdecimal())
    assert commits == ["0", "1"], output
