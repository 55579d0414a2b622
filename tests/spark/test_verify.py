"""Verification on Spark: every tier is read by executors, and what is damaged comes out with its name."""

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
from tests.jobs.test_verify import ask, damage
from tests.jobs.test_verify_store import fill
from tests.jobs.world import World

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def test_every_tier_is_read_and_damage_is_named(spark: SparkSession, tmp_path: Path) -> None:
    world = World(root=str(tmp_path), objects_url=str(tmp_path / "objects"))
    keys = [key for _ in range(5) for key in fill(world)]
    damage(world, keys[1], "object", "altered")
    damage(world, keys[6], "object", "missing")
    damage(world, keys[0], "file", "missing")
    runners = Runners(partial(SparkRunner, spark, root=world.root, objects_url=world.objects_url), "spark")
    job_id = ask(world)
    Worker(replace(world.ctx, runners=runners), {JobKind.VERIFY: verify_job}).drain()
    result = world.job(job_id).result
    assert (result["verified"], result["missing"], result["altered"]) == (len(keys) - 3, 2, 1)
    assert result["complete"]
    assert world.row(keys[1]).verify_state is VerifyState.ALTERED
    assert all(world.row(key).verified_at_ms for key in keys)
    world.close()
