"""What the child of a fork() does with the queues and threads of the clients that it inherits: it starts with empty ones.

Only the thread that called fork() exists in the child, locks of the others stay locked, and what is queued is sent by the
parent: sent by both, it would happen twice.

Threads: any.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

_resets: WeakKeyDictionary[Any, Callable[[Any], None]] = WeakKeyDictionary()
"""Object → the function that gives it empty state."""


def reset_after_fork(created: Any, reset: Callable[[Any], None]) -> None:
    """Give an object that was just created its empty state, now and in the child of each fork()."""
    reset(created)
    _resets[created] = reset


def _reset_in_child() -> None:
    for inherited, reset in list(_resets.items()):
        reset(inherited)


os.register_at_fork(after_in_child=_reset_in_child)
