"""The thread runner of a store: its own tools, as many threads as its settings say."""

from __future__ import annotations

from quire.jobs.context import JobContext
from quire.jobs.runner import ThreadRunner, Tools
from quire.pages.cache import PageCache
from quire.pages.sources import Sources


def thread_runner(ctx: JobContext, *, label: str = "quire-run") -> ThreadRunner:
    """Runs tasks of this store's jobs in this process."""
    if ctx.pages is not None:
        sources = ctx.pages.sources
    else:  # a worker without a page engine still moves and verifies bytes
        sources = Sources(root=ctx.root, disk=ctx.disk, open_store=ctx.open_store, cache=PageCache(0))
    return ThreadRunner(Tools(sources, ctx.open_store, ctx.disk, ctx.root), ctx.settings.workers, label=label)
