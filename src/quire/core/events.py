"""Structured events, through structlog, for whoever listens.

Rules
  1. A library is quiet: until the application configures structlog, only warnings and errors are shown, on stderr.
  2. An event nobody listens to costs next to nothing, not even the import of structlog.

Any thread.
"""

from __future__ import annotations

import sys
from typing import Any

_LOUD = frozenset({"warning", "error"})


def emit(level: str, event: str, /, **fields: Any) -> None:
    """Send one event. `level` is debug, info, warning or error; the event is a dotted name like `manifest.commit`."""
    structlog = sys.modules.get("structlog")
    if structlog is not None and structlog.is_configured():
        getattr(structlog.get_logger("quire"), level)(event, **fields)
    elif level in _LOUD:
        details = " ".join(f"{name}={value!r}" for name, value in fields.items())
        sys.stderr.write(f"quire {level}: {event} {details}\n")


def listening() -> bool:
    """Whether quiet events reach anybody: lets hot paths skip gathering fields."""
    structlog = sys.modules.get("structlog")
    return structlog is not None and bool(structlog.is_configured())
