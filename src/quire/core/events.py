"""Structured events, emitted through structlog.

A library is quiet: until the application configures structlog, only warnings and errors are shown, on stderr. An event without
a listener costs next to nothing, not even the import of structlog.

Threads: any.
"""

from __future__ import annotations

import sys
from contextlib import suppress
from typing import Any

_LOUD = frozenset({"warning", "error"})


def emit(level: str, event: str, /, **fields: Any) -> None:
    """Emit one event. `level` is debug, info, warning or error; `event` is a dotted name such as `manifest.commit`. A field
    `error` may be an exception, which is shown with its type."""
    structlog = sys.modules.get("structlog")
    if isinstance(error := fields.get("error"), BaseException):
        fields["error"] = f"{type(error).__name__}: {error}"
    if structlog is not None and structlog.is_configured():
        getattr(structlog.get_logger("quire"), level)(event, **fields)
    elif level in _LOUD:
        details = " ".join(f"{name}={value!r}" for name, value in fields.items())
        sys.stderr.write(f"quire {level}: {event} {details}\n")


def emit_safely(level: str, event: str, /, **fields: Any) -> None:
    """Emit one event from a thread that must survive: structlog processors are application code, and one that raises would end
    the thread. The event is then lost, and a line on stderr reports that."""
    try:
        emit(level, event, **fields)
    except Exception as error:
        with suppress(AttributeError, OSError, ValueError):  # stderr may be missing, broken or closed
            sys.stderr.write(f"quire error: event {event} was lost: a log processor raised {error!r}\n")


def listening() -> bool:
    """Return whether debug and info events have a listener; lets hot paths skip gathering fields."""
    structlog = sys.modules.get("structlog")
    return structlog is not None and bool(structlog.is_configured())
