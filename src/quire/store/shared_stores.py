"""Shares opened stores between the connections of this process: opened with the first connection, closed with the last.

A store that the program has opened itself (`quire.open`) is shared too, and remains the program's to close. Paths are compared
after symbolic links are resolved.

Threads: any. Raises the errors of `quire.open`.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass

from quire.store.store import Mode, Store

Opener = Callable[[str, Mode, bool], Store]
"""Opens a store, given its path, the mode, and whether to create it if it does not exist."""


@dataclass(slots=True)
class _Shared:
    store: Store
    users: int


_Key = tuple[str, Mode]
# An RLock: the garbage collector releases dropped connections, and may run in a thread that already holds the lock.
_lock = threading.RLock()
_shared: dict[_Key, _Shared] = {}
_opened: weakref.WeakValueDictionary[_Key, Store] = weakref.WeakValueDictionary()


def register_opened(store: Store, mode: Mode) -> Store:
    """Register a store that the program has opened, so that connections share it."""
    with _lock:
        _opened[os.path.realpath(store.path), mode] = store
    return store


def acquire(path: str, mode: Mode, opener: Opener, *, create: bool) -> tuple[Store, Callable[[], None]]:
    """Return the store at a path, opening it if necessary, and a function to call when it is no longer needed."""
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
    """Do the same for a reader: share this process's store if it is open, else open it with mode "r", alongside any owner."""
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
        entry.store.close()  # inside the lock: the next open must not find the store's own lock still held
