"""Finds the process on this machine that owns a store, and connects to it (K8).

Cheap if there is none: neither Arrow nor the client is imported before a process answers at the store's socket.

Threads: any.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from quire.core.errors import Unavailable
from quire.durable import names
from quire.durable.files import OsDisk
from quire.durable.locks import is_held
from quire.service.sockets import SCHEME, is_alive, where_owner_listens

if TYPE_CHECKING:
    from quire.service.client import Client

CALL_SECONDS = 5.0
"""How long a call may take: the owner is on this machine."""


def find_owner(path: str | os.PathLike[str]) -> Client | None:
    """Return a client of the process that owns the store and listens (K8); `None` if there is none, or its socket is stale."""
    root = os.path.abspath(os.fspath(path))
    if not is_held(os.path.join(root, names.LOCK)):
        return None
    socket_path = where_owner_listens(OsDisk(), root)
    if not socket_path or not is_alive(socket_path):
        return None
    from quire.service.client import connect  # imports Arrow

    try:
        return connect(SCHEME + socket_path, timeout=CALL_SECONDS)
    except Unavailable:
        return None  # the owner has just gone
