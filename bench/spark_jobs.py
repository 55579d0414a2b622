"""Verification on Spark against reading the same files with crc64 and sha256 in as many processes as there are cores.

Both read the same bytes from a warm page cache, in steps of the same size, and have done so twice before: a JVM compiles code
that runs often, on the same cores, for about as long as reading 1 GiB takes. They alternate.
"""

from __future__ import annotations

import hashlib
import multiprocessing
import os
from dataclasses import replace
from pathlib import Path

from awscrt.checksums import crc64nvme

import quire
from bench.job_store import PAGE, QUICK_DIVISOR, fill, new_store, remove, spark_runner, warm_up
from bench.report import GIB, MIB, Report, alternate, seconds
from quire.jobs.copies import FILE_STEP_BYTES
from quire.jobs.runner import Runners
from quire.jobs.verify.job import verify_job
from quire.jobs.worker import Worker


def digest(path: str) -> int:
    """Read a file and compute both checksums. Return its size."""
    sha, crc, size = hashlib.sha256(), 0, 0
    with open(path, "rb") as file:
        while step := file.read(FILE_STEP_BYTES):
            sha.update(step)
            crc = crc64nvme(step, crc)
            size += len(step)
    return size


def one_size(gib: float, report: Report, directory: Path, quick: bool) -> None:
    """Verify every object of a store, `gib` GiB of them. Both contenders have read everything twice before."""
    store = new_store(directory, "verify")
    store.create("bench", "pages")
    fill(store, "bench", range(int(2 * gib * GIB) // (QUICK_DIVISOR if quick else 1) // PAGE))
    runner = spark_runner(store)
    warm_up(runner)
    store.checkpoint("bench", runner="spark")
    store.worker.drain()
    paths = [str(path) for path in Path(store.objects_url).rglob("*:*")]
    size = sum(os.path.getsize(path) for path in paths)

    # `store.heavy.verify` creates a runner for each call, which takes 25 ms: a twentieth of reading 1 GiB.
    context = replace(store.context, runners=Runners(lambda: runner, "spark"))
    worker = Worker(context, {quire.JobKind.VERIFY: verify_job})

    def ours() -> None:
        job_id = store.manifest.jobs.enqueue(quire.JobKind.VERIFY, 0, {"scope": "store"})
        worker.run(job_id)
        job = store.manifest.jobs.get(job_id)
        assert job.state is quire.JobState.SUCCEEDED, job.record.error
        assert job.result["bytes"] == size, "every byte is read"

    with multiprocessing.get_context("spawn").Pool(os.cpu_count() or 1) as pool:

        def by_hand() -> None:
            assert sum(pool.map(digest, paths, chunksize=1)) == size

        for work in (by_hand, ours) * 2:
            work()
        hand, mine = alternate(3 if quick else 5, lambda: seconds(by_hand), lambda: seconds(ours))
    detail = f"{size / mine / MIB:.0f} MiB/s, by hand {size / hand / MIB:.0f} MiB/s of {size / MIB:.0f} MiB"
    report.ratio(f"verify_{gib:g}_gib", hand / mine, 0.8, "higher", detail)
    report.figure(f"verify_{gib:g}_gib_seconds_more", mine - hand)
    remove(store)


def verify_1_gib(report: Report, directory: Path, quick: bool) -> None:
    """Verify 1 GiB of objects."""
    one_size(1.0, report, directory, quick)


def verify_4_gib(report: Report, directory: Path, quick: bool) -> None:
    """Verify 4 GiB of objects, where the fixed cost of a Spark action no longer matters, only the cost per byte."""
    one_size(4.0, report, directory, quick)


PARTS = [verify_1_gib, verify_4_gib]
