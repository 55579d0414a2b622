"""Spans for whoever traces: OpenTelemetry if the application has loaded it, nothing at all otherwise.

Rules
  1. A span that nobody records costs one look at `sys.modules`; hot paths take that look themselves, for `TRACE_API`.
  2. Names are `Thing.deed`, attributes begin with `quire.`; docs/operations.md lists them, and a test holds the list.
  3. The manifest writes the trace of whoever submits a batch into its change record: a change in the feed leads back to the
     request that made it.

Any thread; a span belongs to the thread that opened it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

TRACE_API = "opentelemetry.trace"
"""Somebody may be recording if this module is loaded."""

SPANS = (
    "PageStore.commit",
    "PageStore.read_page",
    "Manifest.commit",
    "Job.run",
    "CheckpointPlanner.select_mvcc_segments",
    "Checkpoint.plan",
    "Checkpoint.write",
    "Checkpoint.publish",
    "Spark.run",
)
"""Every span there is."""


class Span:
    """What a traced block may say about itself."""

    __slots__ = ("_inner",)

    def __init__(self, inner: Any = None) -> None:
        self._inner = inner

    def set(self, **attributes: Any) -> None:
        """Add attributes."""
        if self._inner is not None:
            for name, value in attributes.items():
                self._inner.set_attribute(f"quire.{name}", value)


_NOBODY = Span()


@contextmanager
def span(name: str, **attributes: Any) -> Iterator[Span]:
    """Trace a block."""
    api: Any = sys.modules.get(TRACE_API)
    if api is None:
        yield _NOBODY
        return
    with api.get_tracer("quire").start_as_current_span(name) as inner:
        traced = Span(inner)
        traced.set(**attributes)
        yield traced


def trace_id() -> str:
    """The trace that this thread is in, as 32 hexadecimal digits; empty if it is in none."""
    api: Any = sys.modules.get(TRACE_API)
    if api is None:
        return ""
    context = api.get_current_span().get_span_context()
    return f"{context.trace_id:032x}" if context.is_valid else ""
