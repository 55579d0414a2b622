"""Configuration of structlog for quire's own programs: the events of `core/events`, as JSON or as console text.

The library configures nothing: an application that uses quire configures structlog as it likes. The command line calls
`configure` on request (`--log`, QUIRE_LOG). One event is one line on stderr. `json`: an object with `timestamp` (UTC, ISO
8601), `level`, `event`, the event's fields, and `trace_id` inside a trace. `console`: the same as text, coloured on a terminal.

Threads: call `configure` on the main thread, before other threads emit events.
"""

from __future__ import annotations

import sys
from typing import Any

from quire.core.errors import InvalidInput
from quire.core.tracing import trace_id

STYLES = ("json", "console")


def configure(style: str, *, level: str = "info") -> None:
    """Write events of this level and above in this style."""
    if style not in STYLES:
        raise InvalidInput("unknown log style", hint=f"one of: {', '.join(STYLES)}", given=style)

    import structlog

    steps: list[Any] = [
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        _trace,
    ]
    if style == "json":
        steps += [structlog.processors.format_exc_info, structlog.processors.JSONRenderer(default=str)]
    else:
        steps.append(structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty()))
    structlog.configure(
        processors=steps,
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=lambda *_: structlog.PrintLogger(
            sys.stderr
        ),  # the current stderr: tests and services replace it
        cache_logger_on_first_use=False,
    )


def _trace(_: Any, __: str, event: dict[str, Any]) -> dict[str, Any]:
    if trace := trace_id():
        event["trace_id"] = trace
    return event
