"""A store whose jobs run on Spark."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from quire.jobs.registry import HANDLERS
from quire.jobs.runner import Runners
from quire.jobs.worker import Worker
from quire.manifest.records import JobKind
from quire.spark.runner import SparkRunner
from tests.jobs.checkpoint_child import Owner

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@dataclass
class SparkOwner(Owner):
    """An owner that runs all heavy jobs on Spark."""

    spark: SparkSession | None = None

    @property
    def runners(self) -> Runners:
        assert self.spark is not None
        return Runners(partial(SparkRunner, self.spark, root=self.root, objects_url=self.objects_url), "spark")

    def worker(self, *kinds: JobKind, **more: Any) -> Worker:
        context = replace(self.context(), runners=self.runners)
        return Worker(context, {kind: HANDLERS[kind] for kind in kinds or HANDLERS}, **more)
