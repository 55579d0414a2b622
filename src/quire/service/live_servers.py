"""The servers that are listening in this process, by the store they serve: for whoever shows their figures.

Imports nothing of Arrow. Threads: any.
"""

from __future__ import annotations

import threading
from typing import Any
from weakref import WeakSet

_lock = threading.Lock()
_servers: WeakSet[Any] = WeakSet()


def listens(server: Any) -> None:
    """A server, with a `path` and `figures()`, has begun to listen."""
    with _lock:
        _servers.add(server)


def serving(path: str) -> list[Any]:
    """The servers of a store."""
    with _lock:
        return [each for each in _servers if each.path == path]
