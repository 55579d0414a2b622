"""Stores of this process that connections share by path: opened with the first, closed with the last.

A store that the program has opened itself (`quire.open`) is used as it is, and stays the program's to close. A path means
the directory it leads to, whatever it is called.

Threads: any. Raises what `quire.open` raises.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass

from quire.store.store import Mode, Store

Opener = Callable[[str, Mode, bool], Store]
"""Given a path, the mode, and whether a store is made where there is none."""


@dataclass(slots=True)
class _Shared:
    store: Store
    users: int


_Key = tuple[str, Mode]
# An RLock: a dropped connection is released by the garbage collector, which may run in a thread that is in here.
_lock = threading.RLock()
_shared: dict[_Key, _Shared] = {}
_opened: weakref.WeakValueDictionary[_Key, Store] = weakref.WeakValueDictionary()


def note_opened(store: Store, mode: Mode) -> Store:
    """Have connections share a store that the program has opened."""
    with _lock:
        _opened[os.path.realpath(store.path), mode] = store
    return store


def acquire(path: str, mode: Mode, opener: Opener, *, create: bool) -> tuple[Store, Callable[[], None]]:
    """The store at a path, and what to call when it is no longer needed."""
    key: _Key = (os.path.realpath(path), mode)
    with _lock:
        entry = _shared.get(key)
        if entry is not None and entry.store.is_open:
            entry.users += 1
        elif (own := _opened.get(key)) is not None and own.is_open:
            return own, lambda: None
        else:
            entry = _shared[key] = _Shared(opener(path, mode, create), 1)
    return entry.store, lambda: _release(key, entry)


def acquire_for_reading(path: str, opener: Opener) -> tuple[Store, Callable[[], None]]:
    """The same for who only reads: the store as this process has it open, else beside whoever owns it, or will."""
    with _lock:
        mode: Mode = "rw" if _is_open((os.path.realpath(path), "rw")) else "r"
        return acquire(path, mode, opener, create=False)


def _is_open(key: _Key) -> bool:
    entry, own = _shared.get(key), _opened.get(key)
    return (entry is not None and entry.store.is_open) or (own is not None and own.is_open)


def _release(key: _Key, entry: _Shared) -> None:
    with _lock:
        entry.users -= 1
        if entry.users:
            return
        if _shared.get(key) is entry:
            del _shared[key]
        entry.store.close()  # inside the lock: whoever opens it next must not meet its lock file
