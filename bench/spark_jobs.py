"""Verification on Spark against reading the same files with crc64 and sha256 in as many processes as there are cores.

Both read the same bytes from a warm page cache, in steps of the same size, and have done so twice before: a JVM compiles what
it runs often, on the same cores, for about as long as reading 1 GiB takes. They take turns.
"""

from __future__ import annotations

import hashlib
import multiprocessing
import os
from dataclasses import replace
from pathlib import Path

import quire
from bench.checkpoint import QUICK_DIVISOR, SETTINGS, context_of, drain, fill, run, spark_runner, warm_up
from bench.pages import PAGE, World
from bench.report import Report, alternate, seconds
from quire.core.limits import GIB, MIB
from quire.durable.checksums import crc64
from quire.jobs.copies import FILE_STEP_BYTES
from quire.jobs.runner import Runners
from quire.jobs.verify.job import verify_job
from quire.jobs.worker import Worker


def digest(path: str) -> int:
    """Read a file, with both checksums; its size."""
    sha, crc, size = hashlib.sha256(), 0, 0
    with open(path, "rb") as file:
        while step := file.read(FILE_STEP_BYTES):
            sha.update(step)
            crc = crc64(step, crc)
            size += len(step)
    return size


def one_size(gib: float, report: Report, directory: Path, quick: bool) -> None:
    """Every object of a store, so many GiB of them; both have read everything once before."""
    world = World(directory, "verify", SETTINGS)
    store = world.database()
    fill(store, range(int(2 * gib * GIB) // (QUICK_DIVISOR if quick else 1) // PAGE))
    runner = spark_runner(world)
    warm_up(runner)
    run(world, quire.JobKind.CHECKPOINT, [store.db_id], runner)
    drain(world)
    paths = [str(path) for path in Path(world.objects).rglob("*:*")]
    size = sum(os.path.getsize(path) for path in paths)
    worker = Worker(
        replace(context_of(world), runners=Runners(lambda: runner, "spark")), {quire.JobKind.VERIFY: verify_job}
    )

    def ours() -> None:
        job_id = world.manifest.jobs.enqueue(quire.JobKind.VERIFY, 0, {"scope": "store"})
        worker.run(job_id)
        job = world.manifest.jobs.get(job_id)
        assert job.state is quire.JobState.SUCCEEDED, job.record.error
        assert job.result["bytes"] == size, "all of it was read"

    with multiprocessing.get_context("spawn").Pool(os.cpu_count() or 1) as pool:

        def by_hand() -> None:
            assert sum(pool.map(digest, paths, chunksize=1)) == size

        for work in (by_hand, ours) * 2:
            work()
        hand, mine = alternate(3 if quick else 5, lambda: seconds(by_hand), lambda: seconds(ours))
    said = f"{size / mine / MIB:.0f} MiB/s, by hand {size / hand / MIB:.0f} MiB/s of {size / MIB:.0f} MiB"
    report.ratio(f"verify_{gib:g}_gib", hand / mine, 0.8, "higher", said)
    report.figure(f"verify_{gib:g}_gib_seconds_more", mine - hand)
    world.close()


def verify_1_gib(report: Report, directory: Path, quick: bool) -> None:
    """1 GiB of objects."""
    one_size(1.0, report, directory, quick)


def verify_4_gib(report: Report, directory: Path, quick: bool) -> None:
    """4 GiB of objects: what is left of the difference is what each byte costs, not what an action of Spark does."""
    one_size(4.0, report, directory, quick)


PARTS = [verify_1_gib, verify_4_gib]
