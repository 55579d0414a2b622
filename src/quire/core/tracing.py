"""Spans for whoever traces: OpenTelemetry if the application has loaded it, nothing at all otherwise.

A span that nobody records costs one look at `sys.modules`; hot paths take that look themselves, for `TRACE_API`. Names are
`Thing.deed`, attributes begin with `quire.`; docs/operations.md lists them, and a test holds the list. The manifest writes
the trace of whoever submits a batch into its change record. Between processes a trace travels as W3C's `traceparent`:
`carried` on one side, `continued` on the other; what cannot be read is no trace, and no error.

Any thread; a span belongs to the thread that opened it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

TRACE_API = "opentelemetry.trace"
"""Somebody may be recording if this module is loaded."""

SPANS = (
    "PageStore.commit",
    "PageStore.read_page",
    "PageStore.read_pages",
    "Manifest.commit",
    "Job.run",
    "CheckpointPlanner.select_mvcc_segments",
    "Checkpoint.plan",
    "Checkpoint.write",
    "Checkpoint.publish",
    "Spark.run",
    "Service.call",
)
"""Every span there is."""


_VERSION = "00"
"""Of `traceparent`; later ones begin with the same fields."""


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


# ── from process to process ───────────────────────────────────────────────────────────────────────────────────────────
def carried() -> str:
    """The trace that this thread is in, as a `traceparent` for another process; empty if it is in none."""
    api: Any = sys.modules.get(TRACE_API)
    if api is None:
        return ""
    context = api.get_current_span().get_span_context()
    if not context.is_valid:
        return ""
    return f"{_VERSION}-{context.trace_id:032x}-{context.span_id:016x}-{int(context.trace_flags):02x}"


def continued(traceparent: str) -> AbstractContextManager[object]:
    """Spans and changes of the block belong to the trace that came from elsewhere; nothing if none came."""
    numbers = _numbers(traceparent) if traceparent else None
    if numbers is None:
        return nullcontext()
    from opentelemetry import trace as api  # a caller traces: its trace goes on here, whether or not we record

    trace, span_id, flags = numbers
    context = api.SpanContext(trace, span_id, is_remote=True, trace_flags=api.TraceFlags(flags))
    return api.use_span(api.NonRecordingSpan(context))


def _numbers(traceparent: str) -> tuple[int, int, int] | None:
    """(trace, span, flags) of a `traceparent`."""
    parts = traceparent.split("-")
    if [len(part) for part in parts[:4]] != [2, 32, 16, 2] or parts[0] == "ff":
        return None
    try:
        trace, span_id, flags = (int(part, 16) for part in parts[1:4])
    except ValueError:
        return None
    return (trace, span_id, flags) if trace and span_id else None
