"""Events of threads that must not die of them.

The processors of structlog are the application's own code. One that raises would stop the writer, or keep it from telling its
waiters that it has stopped; so here its error goes to stderr (if there is one), and the event is lost.

Any thread; the writer's own events all go through here.
"""

from __future__ import annotations

import sys
from contextlib import suppress
from typing import Any

from quire.core.events import emit


def report(level: str, event: str, /, **fields: Any) -> None:
    """`emit`, whatever becomes of it."""
    try:
        emit(level, event, **fields)
    except Exception as error:
        with suppress(AttributeError, OSError, ValueError):  # stderr may be missing, broken or closed: nobody to tell
            sys.stderr.write(f"quire error: the event {event} was lost: a log processor raised {error!r}\n")
