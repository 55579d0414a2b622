"""The audit of an archive, for people: by the URL of its bucket alone, or of an opened store (A8). What it does:
jobs/archive_audit.

Threads: the caller's, and the runner's. Raises `ObjectNotFound` if there is no store, `InvalidInput` if there are several, and
what the object store raises.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from quire.archive.chain import the_store
from quire.core.clock import SystemClock
from quire.durable.files import OsDisk
from quire.jobs.archive_audit.audit import ArchiveAudit, audit_archive
from quire.jobs.locations import StorePool
from quire.jobs.runner import Runner, Runners, ThreadRunner, Tick, Tools, no_tick
from quire.objects.open import open_store
from quire.pages.cache import PageCache
from quire.pages.sources import Sources
from quire.spark.sessions import session

if TYPE_CHECKING:
    from quire.objects.options import StoreOptions

THREADS = 8
"""What takes time is the way to the bucket and back."""


def audit_bucket(
    url: str,
    *,
    store_id: str = "",
    options: StoreOptions | None = None,
    runner: str = "",
    now_ms: int | None = None,
    progress: Tick = no_tick,
) -> ArchiveAudit:
    """Whether every moment that the archive in a bucket has can be restored; reads nothing but the bucket.

    `runner` is "threads", "spark" or "auto", as of `store.heavy`; `store_id` names one of several stores.
    """
    url = url if "://" in url else os.path.abspath(url)
    stores = StorePool(lambda place: open_store(place, options=options if place == url else None))
    disk = OsDisk()
    tools = Tools(Sources(root="", disk=disk, open_store=stores, cache=PageCache(0)), stores, disk, "")

    def spark() -> Runner:
        from quire.spark.runner import SparkRunner

        named = {url: options} if options is not None else {}
        return SparkRunner(session(), root="", objects_url=url, options=named)

    def choose(size_bytes: int) -> Runner:
        threads = ThreadRunner(tools, THREADS, label="quire-archive-audit")
        return Runners(spark).choose(runner, size_bytes, lambda: threads)

    try:
        bucket = stores(url)
        now = SystemClock().now_ms() if now_ms is None else now_ms
        return audit_archive(bucket, store_id or the_store(bucket), choose, now_ms=now, progress=progress)
    finally:
        stores.close()
