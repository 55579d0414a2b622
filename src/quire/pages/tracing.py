"""Spans of the page engine: those of `quire.core.tracing`, by the names of the design document.

`PageStore.read_page` has the epoch that satisfied it, whoever reads; `CheckpointPlanner.select_mvcc_segments` (in
`jobs/checkpoint`) the chosen segments and the readers in the way.
"""

from __future__ import annotations

from quire.core.tracing import TRACE_API as TRACE_API
from quire.core.tracing import Span as Span
from quire.core.tracing import span as span
