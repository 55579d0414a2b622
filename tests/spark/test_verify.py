"""Verification on Spark: executors read every tier, and damage is reported by name."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from quire.jobs.runner import Runners
from quire.jobs.verify.job import verify_job
from quire.jobs.worker import Worker
from quire.manifest.records import JobKind, VerifyState
from quire.spark.runner import SparkRunner
from tests.jobs.job_store import JobStore
from tests.jobs.test_verify import damage, request_verification
from tests.jobs.test_verify_store import fill

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def test_every_tier_is_read_and_damage_is_named(spark: SparkSession, tmp_path: Path) -> None:
    job_store = JobStore(root=str(tmp_path), objects_url=str(tmp_path / "objects"))
    keys = [key for _ in range(5) for key in fill(job_store)]
    damage(job_store, keys[1], "object", "altered")
    damage(job_store, keys[6], "object", "missing")
    damage(job_store, keys[0], "file", "missing")
    runners = Runners(partial(SparkRunner, spark, root=job_store.root, objects_url=job_store.objects_url), "spark")
    job_id = request_verification(job_store)
    Worker(replace(job_store.ctx, runners=runners), {JobKind.VERIFY: verify_job}).drain()
    result = job_store.job(job_id).result
    assert (result["verified"], result["missing"], result["altered"]) == (len(keys) - 3, 2, 1)
    assert result["complete"]
    assert job_store.row(keys[1]).verify_state is VerifyState.ALTERED
    assert all(job_store.row(key).verified_at_ms for key in keys)
    job_store.close()
