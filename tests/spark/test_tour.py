"""`make run`: the whole tour, jobs and queries on local Spark included."""

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


def is_whole(told: dict[str, Any]) -> None:
    assert told["problems"] == []
    assert told["stream"]["records"] == 50_000
    assert (told["kv"]["before"], told["kv"]["after"]) == (10, 9)
    assert told["spark"]["checkpoints"] == ["succeeded", "succeeded"]
    assert [(each["database"], each["rows"]) for each in told["spark"]["totals"]] == [
        ("shop", 20_000),
        ("shop-experiment", 20_000),
    ]
    assert told["spark"]["changed"] == told["sqlite"]["changed"] == 20
    assert told["spark"]["verify"]["damaged"] == []
    assert told["spark"]["verify"]["verified"] > 3


def test_the_tour_on_spark(lent_spark: SparkSession, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run(["tour", "--spark", "--json", "--store", str(tmp_path / "store")]) == 0
    is_whole(json.loads(capsys.readouterr().out))


@pytest.mark.slow
def test_the_tour_with_a_session_of_its_own(tmp_path: Path) -> None:
    arguments = [sys.executable, "-m", "quire", "tour", "--spark", "--json", "--store", str(tmp_path / "store")]
    ended = subprocess.run(arguments, capture_output=True, text=True, timeout=300, check=True)
    assert ended.stderr == ""
    is_whole(json.loads(ended.stdout))
