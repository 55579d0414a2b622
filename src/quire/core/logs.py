"""What `core/events` tells, written for people or for machines: structlog, set up for a program of ours.

A library sets up nothing: an application that uses quire configures structlog as it likes. The command line calls `configure`
when it is asked to (`--log`, QUIRE_LOG). One event is one line on stderr. `json`: an object with `timestamp` (UTC, ISO 8601),
`level`, `event`, the event's fields, and `trace_id` inside a trace. `console`: the same for people, coloured on a terminal.

Thread: the main one, before others write.
"""

from __future__ import annotations

import sys
from typing import Any

from quire.core.errors import InvalidInput
from quire.core.tracing import trace_id

STYLES = ("json", "console")


def configure(style: str, *, level: str = "info") -> None:
    """Write events of this level and above in this style from now on."""
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
        ),  # what stderr is by then: tests and services replace it
        cache_logger_on_first_use=False,
    )


def _trace(_: Any, __: str, event: dict[str, Any]) -> dict[str, Any]:
    if trace := trace_id():
        event["trace_id"] = trace
    return event
