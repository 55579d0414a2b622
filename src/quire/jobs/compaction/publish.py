"""A compaction that was done elsewhere becomes the database's: one event in its own manifest, after all of its tasks."""

from __future__ import annotations

from collections.abc import Iterable

from quire.durable.failpoints import hit
from quire.jobs.runner import Answer
from quire.lsm.remote_compaction import MajorCompaction


def publish(plan: MajorCompaction, answers: Iterable[Answer[int, tuple[int, ...]]]) -> int:
    """Wait for every answer, then have the new tables live and the old ones not; how many new ones.

    The first task that failed fails all of it, and nothing has changed.
    """
    written = [sst_id for answer in answers for sst_id in answer.result()]
    hit("jobs.compaction.written")
    plan.publish(written)
    hit("jobs.compaction.published")
    return len(written)
