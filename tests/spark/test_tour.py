"""`make run`: the whole tour, including jobs and queries on local Spark."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from quire.cli import main

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def assert_complete_tour(report: dict[str, Any]) -> None:
    assert report["problems"] == []
    assert report["stream"]["records"] == 50_000
    assert (report["kv"]["before"], report["kv"]["after"]) == (10, 9)
    assert report["spark"]["checkpoints"] == ["succeeded", "succeeded"]
    assert [(row["database"], row["rows"]) for row in report["spark"]["totals"]] == [
        ("shop", 20_000),
        ("shop-experiment", 20_000),
    ]
    assert report["spark"]["changed"] == report["sqlite"]["changed"] == 20
    assert report["spark"]["verify"]["damaged"] == []
    assert report["spark"]["verify"]["verified"] > 3


def test_the_tour_on_spark(shared_spark: SparkSession, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run(["tour", "--spark", "--json", "--store", str(tmp_path / "store")]) == 0
    assert_complete_tour(json.loads(capsys.readouterr().out))


@pytest.mark.slow
def test_the_tour_with_its_own_session(tmp_path: Path) -> None:
    arguments = [sys.executable, "-m", "quire", "tour", "--spark", "--json", "--store", str(tmp_path / "store")]
    result = subprocess.run(arguments, capture_output=True, text=True, timeout=300, check=True)
    assert result.stderr == ""
    assert_complete_tour(json.loads(result.stdout))
