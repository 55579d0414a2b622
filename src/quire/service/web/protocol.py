"""One connection: uvicorn's HTTP and WebSocket protocols, with a limit on everything that a client can use up.

Terms
  slot     a place for a connection; there are `service.http_connections_max`
  head     a request's line and headers
  linger   to keep reading for a moment after answering a request whose body was not read: a connection that is closed with
           unread bytes is reset, and the client would not see the answer

Rules
  1. A connection has a slot from when it is accepted, before TLS, until it is closed. A client that finds none is refused in
     one packet.
  2. At every moment something limits a connection's time: the head, the body, the pause between requests, the part of an answer
     that the client does not read, or the work of the server itself.
  3. A head is bounded while it is read, in one header or in many. A body is bounded by its reader; at most 64 KiB are buffered
     before they are read, then the connection is not read from.
  4. Every refusal is counted by the name of its limit, and answered if the client can still receive an answer.

Threads: the event loop's.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, cast

import httptools
from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from uvicorn.server import ServerState

from quire.core.errors import InvalidInput, QuireError, TimedOut
from quire.core.settings import ServiceSettings
from quire.service.web.answers import SECURITY_HEADERS, error_answer
from quire.service.web.counters import WebCounts

HEAD = b"HTTP/1."
LINGER_SECONDS = 2.0
LINGER_BYTES_MAX = 4 << 20
BODY_HEADERS = (b"content-length", b"transfer-encoding")

_silent = logging.getLogger("quire.web.uvicorn")
_silent.propagate = False  # uvicorn would log URLs with their queries; events and counters cover the rest
_silent.addHandler(logging.NullHandler())


class ConnectionSlots:
    """Slots for connections (rule 1)."""

    def __init__(self, places: int) -> None:
        self._places = places
        self.now = 0
        self.busy = 0

    def take(self) -> bool:
        """Take a slot; return False if there is none."""
        if self.now >= self._places:
            self.busy += 1
            return False
        self.now += 1
        return True

    def give(self) -> None:
        """Release a slot: its connection is closed."""
        self.now -= 1


@dataclass(frozen=True, slots=True)
class ConnectionSetup:
    """The state that all connections share."""

    config: Config
    state: ServerState
    settings: ServiceSettings
    counts: WebCounts
    slots: ConnectionSlots


def raw_answer(error: QuireError, status: HTTPStatus, **headers: str) -> bytes:
    """Return a whole answer that ends the connection, for a client that has not reached the application."""
    answer = error_answer(error, status)
    fields = {
        "server": "quire",
        **SECURITY_HEADERS,
        "cache-control": "no-store",
        "content-type": answer.content_type,
        "content-length": str(len(answer.body)),
        "connection": "close",
        **headers,
    }
    head = f"HTTP/1.1 {status.value} {status.phrase}\r\n" + "".join(f"{k}: {v}\r\n" for k, v in fields.items())
    return head.encode() + b"\r\n" + answer.body


class _SendTimer(asyncio.Protocol):
    """Disconnects a client that does not read its answer (rule 2)."""

    loop: asyncio.AbstractEventLoop
    transport: asyncio.Transport
    _setup: ConnectionSetup
    _send_timer: asyncio.TimerHandle | None = None

    def pause_writing(self) -> None:
        """Start the timer: the client does not read its answer."""
        super().pause_writing()
        self._stop_send_timer()
        self._send_timer = self.loop.call_later(self._setup.settings.http_send_seconds, self._on_send_timeout)

    def resume_writing(self) -> None:
        """Stop the timer: the client reads again."""
        self._stop_send_timer()
        super().resume_writing()

    def _stop_send_timer(self) -> None:
        if self._send_timer is not None:
            self._send_timer.cancel()
            self._send_timer = None

    def _on_send_timeout(self) -> None:
        self._send_timer = None
        self._setup.counts.limits.hit("send_seconds")
        self.transport.abort()


class HttpConnection(_SendTimer, HttpToolsProtocol):
    """One HTTP connection."""

    def __init__(self, setup: ConnectionSetup) -> None:
        super().__init__(setup.config, setup.state, {}, asyncio.get_running_loop())
        self.logger = _silent
        self.access_log = False
        self.ws_protocol_class = cast(Any, lambda **_: WebSocketConnection(setup))
        self._setup = setup
        self._settings = setup.settings
        self.has_slot = True
        """The slot is released when the connection is lost, or passed on to a WebSocket."""
        self._timer: asyncio.TimerHandle | None = None
        self._in_head = True
        self._head_bytes = 0
        self._body_is_complete = True
        self._refusal: tuple[QuireError, HTTPStatus, str] | None = None
        self._lingered = -1
        """Bytes that were read and discarded; -1: not lingering."""

    # ── lifecycle ─────────────────────────────────────────────────────────────────────────────────────────────────────
    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn's
        """Start the idle timer; the TLS handshake is done."""
        super().connection_made(transport)
        self._cycle_transport = cast(Any, _CycleTransport(self))
        self._arm(self._settings.http_head_seconds, "idle_seconds")

    def connection_lost(self, exc: Exception | None) -> None:
        """Release timers and the slot."""
        self._disarm()
        self._stop_send_timer()
        self.give_slot()
        super().connection_lost(exc)

    def give_slot(self) -> None:
        """Release the slot, once."""
        if self.has_slot:
            self.has_slot = False
            self._setup.slots.give()

    def handle_websocket_upgrade(self) -> None:
        """Hand the connection, and its slot, over to a WebSocket."""
        self._disarm()
        self._stop_send_timer()
        self.has_slot = False
        super().handle_websocket_upgrade()

    def shutdown(self) -> None:
        """Close the connection at once if it has no complete head, otherwise after the current request."""
        if self._in_head:
            self.transport.close()
        else:
            super().shutdown()

    # ── timers ────────────────────────────────────────────────────────────────────────────────────────────────────────
    def _arm(self, seconds: float, limit: str) -> None:
        self._disarm()
        self._timer = self.loop.call_later(seconds, self._on_timeout, limit)

    def _disarm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _on_timeout(self, limit: str) -> None:
        self._timer = None
        if self._lingered >= 0 or (limit == "idle_seconds" and not self._head_bytes):
            self.transport.close()  # the connection sent no request
            return
        error = TimedOut("the request timed out", hint="send the whole request at once")
        self._refuse(error, HTTPStatus.REQUEST_TIMEOUT, limit)

    # ── reading ───────────────────────────────────────────────────────────────────────────────────────────────────────
    def data_received(self, data: bytes) -> None:
        """Parse bytes of requests (rule 3)."""
        if self._lingered >= 0:
            self._lingered += len(data)
            if self._lingered > LINGER_BYTES_MAX:
                self.transport.abort()
            return
        self._unset_keepalive_if_required()
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            self._upgrade()
        except httptools.HttpParserError:
            invalid = InvalidInput("this is not an HTTP request", hint="check the port, and whether it should be https")
            self._refuse(*(self._refusal or (invalid, HTTPStatus.BAD_REQUEST, "")))
        else:
            if not self.transport.is_closing():
                self._wait_for_rest(len(data))

    def _wait_for_rest(self, size: int) -> None:
        """Bound the time of the rest of the request, if there is one. A request that arrived whole needs no timer."""
        if self._in_head:
            self._head_bytes += size  # of a header that has not ended, which the parser has not reported yet
            if self._head_bytes > self._settings.http_head_bytes_max:
                self._refuse(*self._head_too_long())
                return
        if self._timer is None and not self._body_is_complete:
            if self._in_head:
                self._arm(self._settings.http_head_seconds, "head_seconds")
            else:
                self._arm(self._settings.http_body_seconds, "body_seconds")

    def _upgrade(self) -> None:
        if self._should_upgrade() and any(name in BODY_HEADERS for name, _ in self.headers):
            # The WebSocket's own parser takes no body, and would leave the client, and its slot, without an answer.
            self._refuse(InvalidInput("an upgrade to a WebSocket must not have a body"), HTTPStatus.BAD_REQUEST, "")
        elif self._should_upgrade():
            self.handle_websocket_upgrade()
        else:
            wrong = InvalidInput("the connection can only become a WebSocket", hint="omit `Upgrade`")
            self._refuse(wrong, HTTPStatus.BAD_REQUEST, "")

    def on_message_begin(self) -> None:
        """Start a request at its first byte."""
        super().on_message_begin()
        self._in_head, self._head_bytes, self._body_is_complete = True, 0, False
        self._disarm()  # the connection is no longer idle

    def on_url(self, url: bytes) -> None:
        """Count a part of the URL."""
        super().on_url(url)
        self._count_head(len(url))

    def on_header(self, name: bytes, value: bytes) -> None:
        """Handle a complete header. After a body it is a trailer, which is ignored: the request was admitted without it."""
        if not self._in_head:
            self._count_head(len(name) + len(value) + 4)
            return
        if name.lower() == b"host" and any(known == b"host" for known, _ in self.headers):
            error = InvalidInput("the request has two hosts", hint="send one `Host` header")
            self._refusal = error, HTTPStatus.BAD_REQUEST, ""
            raise ValueError  # ends the parsing
        super().on_header(name, value)
        self._count_head(len(name) + len(value) + 4)

    def _count_head(self, size: int) -> None:
        self._head_bytes += size
        if self._head_bytes > self._settings.http_head_bytes_max:
            self._refusal = self._head_too_long()
            raise ValueError  # ends the parsing

    def _head_too_long(self) -> tuple[QuireError, HTTPStatus, str]:
        error = InvalidInput("the head of the request is too long", max=self._settings.http_head_bytes_max)
        return error, HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, "head_bytes"

    def on_headers_complete(self) -> None:
        """Start the application: the head is complete."""
        self._in_head = False
        self._disarm()  # the body has its own time limit
        super().on_headers_complete()
        if self.cycle is not None:
            self.cycle.transport = self._cycle_transport

    def on_message_complete(self) -> None:
        """Stop the body's timer: the body is complete."""
        self._disarm()
        self._body_is_complete = True
        super().on_message_complete()

    def on_response_complete(self) -> None:
        """Start the idle timer: the answer is sent, and the next request has its own time limits."""
        super().on_response_complete()
        if self._body_is_complete and not self.pipeline and not self.transport.is_closing():
            self._in_head, self._head_bytes = True, 0
            self._arm(self._settings.http_idle_seconds, "idle_seconds")

    # ── closing ───────────────────────────────────────────────────────────────────────────────────────────────────────
    def _refuse(self, error: QuireError, status: HTTPStatus, limit: str) -> None:
        """Answer instead of the application, unless it has begun to, and disconnect (rule 4)."""
        if limit:
            self._setup.counts.limits.hit(limit)
        self._setup.counts.add(failed=True)
        cycle = self.cycle
        is_working = cycle is not None and not cycle.response_complete
        if is_working:
            cycle.disconnected = True
            cycle.message_event.set()
        if is_working and cycle.response_started:
            self.transport.abort()
            return
        self.transport.write(raw_answer(error, status))
        self._body_is_complete = False  # bytes that follow are not a request
        self.close_gently()

    def close_gently(self) -> None:
        """Close the connection so that the client can read the answer: linger if it is still sending."""
        if self.transport.is_closing() or self._lingered >= 0:
            return
        if self._body_is_complete or not self.transport.can_write_eof():
            self.transport.close()
            return
        self._lingered = 0
        self.transport.write_eof()
        self.flow.resume_reading()
        self._arm(LINGER_SECONDS, "")

    def eof_received(self) -> None:
        """Close the half-open connection, unless an answer is in progress: the client has sent everything."""
        if self._lingered >= 0 or self._in_head:
            self.transport.close()


class _CycleTransport:
    """The transport as a request's cycle sees it: the head of an answer is sent together with the first part of its body, which
    saves a system call per request, and closing it lingers."""

    def __init__(self, connection: HttpConnection) -> None:
        self._connection = connection
        self._transport = connection.transport
        self._loop = connection.loop
        self._head = b""
        self.is_closing = connection.transport.is_closing

    def write(self, data: bytes) -> None:
        """Send bytes; a head is sent with the bytes that follow it at once."""
        if self._head:
            head, self._head = self._head, b""
            self._transport.writelines((head, data))
        elif data.startswith(HEAD):
            self._head = data
            self._loop.call_soon(self._send_head)  # for an answer whose body is not ready yet
        else:
            self._transport.write(data)

    def _send_head(self) -> None:
        if self._head:
            head, self._head = self._head, b""
            self._transport.write(head)

    def close(self) -> None:
        """See `HttpConnection.close_gently`."""
        self._send_head()
        self._connection.close_gently()


class WebSocketConnection(_SendTimer, WebSocketsSansIOProtocol):
    """One connection that has become a WebSocket; pings detect that its client is gone."""

    def __init__(self, setup: ConnectionSetup) -> None:
        super().__init__(setup.config, setup.state, {}, asyncio.get_running_loop())
        self.logger = _silent
        self.conn.logger = _silent
        self._setup = setup

    def connection_lost(self, exc: Exception | None) -> None:
        """Release the slot."""
        self._stop_send_timer()
        self._setup.slots.give()
        super().connection_lost(exc)
