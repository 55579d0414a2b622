"""Tracing spans: OpenTelemetry if the application has loaded it, no-ops otherwise.

An unrecorded span costs one lookup in `sys.modules`; hot paths look up `TRACE_API` themselves. Span names have the form
`Noun.verb`, attributes begin with `quire.`; docs/operations.md lists them, and a test checks the list. The manifest writes
the trace id of the thread that submits a batch into its change record. Between processes a trace travels as a W3C
`traceparent`: `current_traceparent` produces it, `attached_trace` consumes it. One that cannot be parsed is ignored.

Threads: any; a span belongs to the thread that opened it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

TRACE_API = "opentelemetry.trace"
"""If this module is not loaded, nothing records spans."""

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
"""The names of all spans."""


_VERSION = "00"
"""The version of `traceparent`; later versions begin with the same fields."""


class Span:
    """The span of a traced block; takes its attributes."""

    __slots__ = ("_inner",)

    def __init__(self, inner: Any = None) -> None:
        self._inner = inner

    def set(self, **attributes: Any) -> None:
        """Add attributes, prefixed with `quire.`."""
        if self._inner is not None:
            for name, value in attributes.items():
                self._inner.set_attribute(f"quire.{name}", value)


_NO_SPAN = Span()


@contextmanager
def span(name: str, **attributes: Any) -> Iterator[Span]:
    """Trace the block as a span of this name."""
    api: Any = sys.modules.get(TRACE_API)
    if api is None:
        yield _NO_SPAN
        return
    with api.get_tracer("quire").start_as_current_span(name) as inner:
        traced = Span(inner)
        traced.set(**attributes)
        yield traced


def trace_id() -> str:
    """Return this thread's trace id as 32 hexadecimal digits; empty outside a trace."""
    api: Any = sys.modules.get(TRACE_API)
    if api is None:
        return ""
    context = api.get_current_span().get_span_context()
    return f"{context.trace_id:032x}" if context.is_valid else ""


# ── propagation between processes ─────────────────────────────────────────────────────────────────────────────────────
def current_traceparent() -> str:
    """Return this thread's trace as a `traceparent` for another process; empty outside a trace."""
    api: Any = sys.modules.get(TRACE_API)
    if api is None:
        return ""
    context = api.get_current_span().get_span_context()
    if not context.is_valid:
        return ""
    return f"{_VERSION}-{context.trace_id:032x}-{context.span_id:016x}-{int(context.trace_flags):02x}"


def attached_trace(traceparent: str) -> AbstractContextManager[object]:
    """Attach the spans and changes of the block to the trace of another process; do nothing if `traceparent` has none."""
    numbers = _numbers(traceparent) if traceparent else None
    if numbers is None:
        return nullcontext()
    from opentelemetry import trace as api  # the caller traces: continue its trace whether or not this process records

    trace, span_id, flags = numbers
    context = api.SpanContext(trace, span_id, is_remote=True, trace_flags=api.TraceFlags(flags))
    return api.use_span(api.NonRecordingSpan(context))


def _numbers(traceparent: str) -> tuple[int, int, int] | None:
    """Return (trace, span, flags) of a `traceparent`, or `None` if it is not valid."""
    parts = traceparent.split("-")
    if [len(part) for part in parts[:4]] != [2, 32, 16, 2] or parts[0] == "ff":
        return None
    try:
        trace, span_id, flags = (int(part, 16) for part in parts[1:4])
    except ValueError:
        return None
    return (trace, span_id, flags) if trace and span_id else None
