"""The driver that the fault tests start and kill: databases of known content, checkpointed in one run on Spark.

    python -m tests.spark.faults_child BASE MASTER EXECUTOR_FAILPOINTS [kill-executor]

It prints `ran` and the states of the jobs at the end of the run. A restarted driver resumes the jobs.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import threading
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from quire.jobs.checkpoint.many import run_many
from quire.jobs.runner import Runners
from quire.manifest.records import JobKind
from quire.spark.runner import SparkRunner
from quire.spark.sessions import session
from tests.jobs.checkpoint_child import Owner
from tests.pages.engine_harness import Model, image, write

DATABASES, PAGES = 6, 40

SPECULATION = {
    "spark.speculation": "true",
    "spark.speculation.interval": "50ms",
    "spark.speculation.quantile": "0.1",
    "spark.speculation.multiplier": "1.01",
    "spark.speculation.minTaskRuntime": "50ms",
}


def content(db: int) -> Model:
    """The content of a database after `fill`."""
    model = Model()
    pages = {page: image(f"{db}-{page}") for page in range(PAGES)}
    model.commit(1, PAGES, pages)
    return model


def fill(owner: Owner) -> None:
    """Create the databases."""
    for db in range(DATABASES):
        write(owner.database(f"db-{db}"), Model(), content(db).newest.pages)


def executors() -> list[psutil.Process]:
    """The executor processes of our JVM."""
    processes = []
    for process in psutil.Process().children(recursive=True):
        try:
            if any("CoarseGrainedExecutorBackend" in word for word in process.cmdline()):
                processes.append(process)
        except psutil.Error:
            continue  # the process has ended
    return processes


def kill_one_when_busy(base: str) -> None:
    """Wait for the first object, then kill an executor while it runs tasks."""
    objects = Path(base, "objects")
    while not any(objects.rglob("base:*")):
        time.sleep(0.02)
    os.kill(executors()[0].pid, signal.SIGKILL)
    print("killed", flush=True)


def main(base: str, master: str, failpoints: str, *more: str) -> None:
    """Run the driver; see the module's docstring."""
    config = {"spark.executor.memory": "800m", "spark.task.maxFailures": "8", "spark.default.parallelism": "4"}
    if failpoints:
        config["spark.executorEnv.QUIRE_FAILPOINTS"] = failpoints
    if master.startswith("local-cluster"):
        config |= SPECULATION | {"spark.shuffle.io.retryWait": "500ms"}  # a killed executor does not return
    spark: Any = session(master, memory="700m", config=config)
    owner = Owner(Path(base))
    owner.manifest.jobs.recover()
    owner.clock.advance(1_000)
    with owner.manifest.read() as txn:
        known = len(list(txn.databases()))
    if not known:
        fill(owner)
    else:
        for db in range(DATABASES):
            owner.database(f"db-{db}")
    if "kill-executor" in more:
        threading.Thread(target=kill_one_when_busy, args=(base,), daemon=True).start()
    runners = Runners(partial(SparkRunner, spark, root=owner.root, objects_url=owner.objects_url), "spark")
    jobs = run_many(replace(owner.context(), runners=runners), JobKind.CHECKPOINT, range(1, DATABASES + 1))
    print("ran", *(job.state.name for job in jobs), flush=True)
    owner.stop()
    work = Path(os.environ.get("SPARK_HOME", "") or Path(sys.modules["pyspark"].__file__ or "").parent, "work")
    app = spark.conf.get("spark.app.id")
    spark.stop()
    shutil.rmtree(work / app, ignore_errors=True)  # executors of a local cluster leave their logs there


if __name__ == "__main__":
    main(*sys.argv[1:])
