"""A store of databases with retention rules, and the process that is killed while it applies them."""

from __future__ import annotations

import pickle
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from quire.durable.failpoints import arm_from, hits, recording
from quire.jobs.retention import apply_many
from quire.manifest.records import RetentionRecord
from quire.testing.clock import ManualClock
from tests.fork_server import Channel
from tests.jobs.job_store import JobStore

SNAPSHOTS, KEPT_SNAPSHOTS = 4, 2
"""The number of snapshots of a database, and how many of them its rules keep."""

BEGIN_MS = 1_750_000_000_000


def fill(job_store: JobStore, count: int, *, chunks: bool = True) -> list[int]:
    """Create databases whose snapshots each hold a chunk of their own; returns their ids."""

    def make(number: int) -> int:
        db_id = job_store.database(f"db-{number:04}")
        for _ in range(SNAPSHOTS):
            if chunks:
                job_store.chunks(db_id, 1)
            job_store.manifest.snapshots.publish(db_id)
        job_store.manifest.retention.set(db_id, RetentionRecord(keep_last=KEPT_SNAPSHOTS))
        return db_id

    with ThreadPoolExecutor(16) as pool:  # so that the databases share commits
        return sorted(pool.map(make, range(count)))


@dataclass(frozen=True, slots=True)
class ChildTask:
    """What a child process does."""

    root: str
    now_ms: int
    failpoints: str
    """In the syntax of QUIRE_FAILPOINTS."""
    db_ids: list[int]


def run_child(channel: Channel) -> None:
    """Entry point of the child process: an owner that applies all rules, and dies at its failpoint."""
    message = channel.receive()
    assert message is not None
    task: ChildTask = pickle.loads(message)
    job_store = JobStore(task.root, task.root + "/objects", clock=ManualClock(task.now_ms))
    job_store.manifest.jobs.recover()
    with recording():
        arm_from(task.failpoints)
        apply_many(job_store.manifest, task.db_ids)
        channel.send(pickle.dumps(hits()))
    job_store.close()
