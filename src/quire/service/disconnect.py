"""Hanging up: ends the connections of this process's own server, for clients that neither read nor go away.

The transport waits for every call to end before it closes, and a call whose client has stopped reading never ends. The
connections are found among the process's descriptors by the address they were accepted at; nobody else's have it.

Linux only, as the rest of quire. Any thread.
"""

from __future__ import annotations

import os
import socket
from contextlib import suppress

DESCRIPTORS = "/proc/self/fd"


def hang_up(bound: str | int) -> int:
    """Shut down the connections accepted at a socket's path or at a TCP port; how many."""
    ended = 0
    for name in os.listdir(DESCRIPTORS):
        with suppress(OSError, ValueError):
            copy = socket.socket(fileno=os.dup(int(name)))
            with copy:
                if _is_ours(copy, bound):
                    copy.shutdown(socket.SHUT_RDWR)
                    ended += 1
    return ended


def _is_ours(connection: socket.socket, bound: str | int) -> bool:
    """Whether it was accepted there: listening sockets have no peer."""
    here = connection.getsockname()
    if isinstance(bound, str):
        if connection.family != socket.AF_UNIX or here != bound:
            return False
    elif connection.family not in (socket.AF_INET, socket.AF_INET6) or here[1] != bound:
        return False
    connection.getpeername()
    return True
