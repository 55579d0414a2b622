"""Tasks of the bundle job: find the bundles of a manifest log that are due, and make one.

A listing never leaves its task. The same chunks give the same bytes, so a repeated task adopts the existing object
(`stream/mlog_bundle.py`). Safe to run on an executor. Raises `ManifestIntegrityError`, `StalePlan`, and what the object store
raises.
"""

from __future__ import annotations

from dataclasses import dataclass

from quire.durable.failpoints import hit
from quire.jobs.runner import Tools
from quire.stream.mlog_bundle import BundleResult, BundleTask, left_over, plan, run
from quire.stream.mlog_tier2 import LogObjects


@dataclass(frozen=True, slots=True, kw_only=True)
class ListLogTask:
    """A manifest log to list."""

    stream_id: int
    url: str
    now_ms: int
    period_seconds: float
    prefixes: tuple[str, ...] = ("",)


@dataclass(frozen=True, slots=True)
class ListedLog:
    """The bundles of a log that are due, and those that an earlier job has left."""

    stream_id: int
    due: tuple[BundleTask, ...]
    left_over: tuple[BundleTask, ...]
    size_bytes: int
    """Bytes of the chunks that are due."""


@dataclass(frozen=True, slots=True)
class MakeTask:
    """A bundle to make."""

    url: str
    task: BundleTask


def list_log_objects(task: ListLogTask, tools: Tools) -> ListedLog:
    """List the objects of one log and read its newest snapshot."""
    objects = LogObjects(tools.open_store(task.url), task.stream_id, task.prefixes)
    due = plan(objects, now_ms=task.now_ms, period_seconds=task.period_seconds)
    chunks = objects.own_listing().chunks
    size = sum(
        chunks[index].size_bytes for task in due for index in range(task.first, task.last + 1) if index in chunks
    )
    return ListedLog(task.stream_id, tuple(due), tuple(left_over(objects)), size)


def make(task: MakeTask, tools: Tools) -> BundleResult:
    """Read chunks and write one bundle; a repeated task produces the same bytes and adopts the existing object."""
    bundle = run(task.task, tools.open_store(task.url))
    hit("jobs.bundle.made")
    return bundle
