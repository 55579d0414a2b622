"""Spans for whoever traces: OpenTelemetry if the application has loaded it, nothing at all otherwise.

Rules
  1. A span that nobody records costs one look at `sys.modules`; hot paths take that look themselves, for `TRACE_API`.
  2. Names are the seed's: `PageStore.read_page` with the epoch that satisfied it, whoever reads;
     `CheckpointPlanner.select_mvcc_segments` (in `jobs/checkpoint`) with the chosen segments and the readers in the way.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

TRACE_API = "opentelemetry.trace"
"""Somebody may be recording if this module is loaded."""


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
