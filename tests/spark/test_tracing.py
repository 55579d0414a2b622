"""A run on Spark is a span of its caller."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from quire.core.tracing import TRACE_API
from quire.spark.runner import SparkRunner

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def length(task: str, _: object) -> int:
    return len(task)


def test_a_run_is_a_span(spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spans: list[tuple[str, dict[str, Any]]] = []

    @contextmanager
    def start(name: str) -> Iterator[Any]:
        attributes: dict[str, Any] = {}
        spans.append((name, attributes))
        yield SimpleNamespace(set_attribute=attributes.__setitem__)

    tracer = SimpleNamespace(start_as_current_span=start)
    runner = SparkRunner(spark, root=str(tmp_path), objects_url=str(tmp_path))
    monkeypatch.setitem(sys.modules, TRACE_API, SimpleNamespace(get_tracer=lambda _: tracer))
    assert sorted(result.result() for result in runner.map(length, ["a", "bb"])) == [1, 2]
    assert spans == [("Spark.run", {"quire.tasks": 2})]
