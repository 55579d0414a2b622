"""Accepts connections: each gets a slot before anything is read from it, its TLS handshake included.

Rules
  1. A client that finds no slot is refused in one packet; a TLS connection is only closed: its handshake is not awaited.
  2. A handshake has as much time as the head of a request.
  3. An error of one connection ends that one. If the process is out of file descriptors, accepting pauses.

Threads: the event loop's.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from contextlib import suppress
from http import HTTPStatus

from quire.core.errors import Overloaded
from quire.core.events import emit
from quire.service.web.protocol import LINGER_SECONDS, ConnectionSetup, HttpConnection, raw_answer

PAUSE_SECONDS = 0.1
HELD_MAX = 32
"""Refused connections that are not closed yet, at most."""


async def accept_connections(listener: socket.socket, setup: ConnectionSetup, tls: ssl.SSLContext | None) -> None:
    """Accept connections until cancelled."""
    loop = asyncio.get_running_loop()
    listener.setblocking(False)
    beginning: set[asyncio.Task[None]] = set()
    refused = _RefusedConnections()
    try:
        while True:
            try:
                connection, _ = await loop.sock_accept(listener)
            except OSError as error:
                emit("warning", "web.accept_failed", error=error.strerror or str(error))
                await asyncio.sleep(PAUSE_SECONDS)
                continue
            if not setup.slots.take():
                setup.counts.limits.hit("connections")
                refused.refuse(connection, is_plain=tls is None)
                continue
            task = loop.create_task(_begin(connection, setup, tls))
            beginning.add(task)
            task.add_done_callback(beginning.discard)
    finally:
        for task in beginning:
            task.cancel()
        refused.end()


async def _begin(connection: socket.socket, setup: ConnectionSetup, tls: ssl.SSLContext | None) -> None:
    loop, protocol = asyncio.get_running_loop(), HttpConnection(setup)
    if connection.family != socket.AF_UNIX:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    seconds = setup.settings.http_head_seconds if tls is not None else None
    try:
        await loop.connect_accepted_socket(lambda: protocol, connection, ssl=tls, ssl_handshake_timeout=seconds)
    except (OSError, asyncio.CancelledError) as error:  # an SSLError is an OSError
        setup.counts.limits.hit("tls_handshake")
        protocol.give_slot()
        with suppress(OSError):
            connection.close()
        if isinstance(error, asyncio.CancelledError):
            raise


class _RefusedConnections:
    """Refused connections that may still read the reason: a few, for a moment. A connection that is closed while its client is
    sending is reset, and the client would only see that."""

    def __init__(self) -> None:
        self._held: set[socket.socket] = set()

    def refuse(self, connection: socket.socket, *, is_plain: bool) -> None:
        """Send a refusal for lack of a slot, and close the connection in a moment (rule 1)."""
        if not is_plain or len(self._held) >= HELD_MAX:
            connection.close()
            return
        busy = Overloaded("the limit for connections is reached", hint="try again later")
        with suppress(OSError):
            connection.setblocking(False)
            connection.send(raw_answer(busy, HTTPStatus.SERVICE_UNAVAILABLE, **{"retry-after": "1"}))
            connection.shutdown(socket.SHUT_WR)
        self._held.add(connection)
        asyncio.get_running_loop().call_later(LINGER_SECONDS, self._close, connection)

    def _close(self, connection: socket.socket) -> None:
        self._held.discard(connection)
        connection.close()

    def end(self) -> None:
        """Close all of them."""
        for connection in list(self._held):
            self._close(connection)
