"""A store whose jobs run on Spark."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from quire.jobs.checkpoint.handler import checkpoint_job, merge_job
from quire.jobs.handler import Handler
from quire.jobs.handlers import HANDLERS
from quire.jobs.runner import Runners
from quire.jobs.worker import Worker
from quire.manifest.records import JobKind
from quire.spark.runner import SparkRunner
from tests.jobs.checkpoint_child import Owner

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@dataclass
class SparkOwner(Owner):
    """An owner that gives all heavy work to Spark."""

    spark: SparkSession | None = None

    @property
    def runners(self) -> Runners:
        assert self.spark is not None
        return Runners(partial(SparkRunner, self.spark, root=self.root, objects_url=self.objects_url), "spark")

    def worker(self, *kinds: JobKind, **more: Any) -> Worker:
        handlers: dict[JobKind, Handler] = {
            **HANDLERS,
            JobKind.CHECKPOINT: partial(checkpoint_job, runners=self.runners),
            JobKind.MERGE: partial(merge_job, runners=self.runners),
        }
        return Worker(self.context(), {kind: handlers[kind] for kind in kinds or handlers}, **more)
