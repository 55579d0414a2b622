"""What a forked child does with the gRPC servers and clients that it inherits: it never destroys them.

Destroying one stops its threads and waits for them. Only the thread that called fork() exists in the child, so it would wait
forever: in a garbage collection, or when its interpreter ends. A child therefore keeps them, with their few kilobytes, until it
exits or executes another program.

Threads: any.
"""

from __future__ import annotations

import ctypes
import gc
import os
from typing import TypeVar
from weakref import WeakSet, finalize

T = TypeVar("T")

_created: WeakSet[object] = WeakSet()
"""Those of this process that exist, including garbage that was not collected yet."""


def kept_after_fork(created: T) -> T:
    """Register a Flight server or client that was just created, and return it."""
    _created.add(created)
    return created


_held: list[list[object]] = []
"""Those that existed when a fork() began, once for each fork() in progress."""


def _hold() -> None:
    # Before the fork: in the child, hooks of other modules may run first, and collect garbage.
    _held.append(list(_created))


def _release_in_parent() -> None:
    _held.pop()


def _keep_in_child() -> None:
    for inherited in _held[-1]:
        # A list in this module would not do: the interpreter clears modules when it ends, and would destroy them then.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(inherited))
        for referent in gc.get_referents(inherited):
            if isinstance(referent, finalize):  # pyarrow has a server shut down when the interpreter ends
                referent.atexit = False


os.register_at_fork(before=_hold, after_in_parent=_release_in_parent, after_in_child=_keep_in_child)
