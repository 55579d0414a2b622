"""Verification on Spark against reading the same files with crc64 and sha256 in as many processes as there are cores."""

from __future__ import annotations

import hashlib
import multiprocessing
import os
from functools import partial
from pathlib import Path

from bench.checkpoint import SETTINGS, context_of, drain, fill, run, spark_runner, warm_up
from bench.pages import PAGE, World
from bench.report import Report, seconds
from quire.core.limits import GIB, MIB
from quire.durable.checksums import crc64
from quire.jobs.copies import STEP_BYTES
from quire.jobs.runner import Runners
from quire.jobs.verify.handler import verify_job
from quire.jobs.worker import Worker
from quire.manifest.records import JobKind, JobState


def digest(path: str) -> int:
    """Read a file, with both checksums; its size."""
    sha, crc, size = hashlib.sha256(), 0, 0
    with open(path, "rb") as file:
        while step := file.read(STEP_BYTES):
            sha.update(step)
            crc = crc64(step, crc)
            size += len(step)
    return size


def verify(report: Report, directory: Path, quick: bool) -> None:
    """Every object of a store."""
    world = World(directory, "verify", SETTINGS)
    store = world.database()
    fill(store, range(int((0.125 if quick else 2) * GIB) // PAGE))
    runner = spark_runner(world)
    warm_up(runner)
    run(world, JobKind.CHECKPOINT, [store.db_id], runner)
    drain(world)
    paths = [str(path) for path in Path(world.objects).rglob("*:*")]
    size = sum(os.path.getsize(path) for path in paths)
    worker = Worker(context_of(world), {JobKind.VERIFY: partial(verify_job, runners=Runners(lambda: runner, "spark"))})

    def ours() -> None:
        job_id = world.manifest.jobs.enqueue(JobKind.VERIFY, 0, {"scope": "store"})
        worker.run(job_id)
        job = world.manifest.jobs.get(job_id)
        assert job.state is JobState.SUCCEEDED, job.record.error
        assert job.result["bytes"] == size, "all of it was read"

    with multiprocessing.get_context("spawn").Pool(os.cpu_count() or 1) as pool:
        pool.map(len, ["warm"] * 8)
        hand = [seconds(lambda: pool.map(digest, paths, chunksize=1)) for _ in range(3)]
        taken = [seconds(ours) for _ in range(3)]
        hand += [seconds(lambda: pool.map(digest, paths, chunksize=1)) for _ in range(2)]
    best, mine = sorted(hand)[len(hand) // 2], sorted(taken)[len(taken) // 2]
    said = f"{size / mine / MIB:.0f} MiB/s, by hand {size / best / MIB:.0f} MiB/s of {size / MIB:.0f} MiB"
    report.ratio("verify_vs_reading", best / mine, 0.8, "higher", said)
    world.close()


PARTS = [verify]
