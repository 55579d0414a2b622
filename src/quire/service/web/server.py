"""The HTTP side of an owner: metrics, health and the dashboard. Made by `store.serve_http()`.

Terms
  web   what the connections share: the gate, the routes, the hub, the counts

Rules
  1. Loopback unless another address is given; beyond loopback everything but health and the page's own files needs a token.
  2. Bounded: so many connections at once, a thread each; who comes beyond that is told so in a moment, and nobody waits for it.
  3. Closing stops listening, ends live updates, and hangs up on whoever has not gone after `stop_seconds`.
  4. Figures are looked at by one thread every `http_sample_seconds`, for the history a page shows.

Threads: one listens, one samples, one is the hub's, one per connection. `close` from any other.
Raises `InvalidInput` for an address, `InvalidConfig` for tokens and certificates, `ReadOnly` for a store opened for reading.
"""

from __future__ import annotations

import os
import socket
import socketserver
import ssl
import threading
from contextlib import suppress
from functools import cached_property
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, Self
from urllib.parse import urlsplit

import msgspec

from quire.core.errors import InvalidConfig, InvalidInput, Overloaded, QuireError, ReadOnly
from quire.core.events import emit
from quire.durable import names
from quire.service.admission import Refusals
from quire.service.server import Credentials
from quire.service.tokens import Tokens, ensure_token
from quire.service.web.access import WebGate, is_loopback
from quire.service.web.answers import error_answer
from quire.service.web.dashboard_state import Explain, Sight, WebStore
from quire.service.web.hub import Hub
from quire.service.web.metrics import exposition, registry
from quire.service.web.request import IDLE_SECONDS, HttpConnection
from quire.service.web.routes import Routes

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

HTTP, HTTPS = "http", "https"


class WebFigures(msgspec.Struct, frozen=True):
    """What the HTTP side has counted since it started."""

    calls: int
    failed: int
    refused: int
    busy: int
    """Connections that found no place."""
    connections_now: int
    pages_now: int
    pages_dropped: int


class Web:
    """What all connections share."""

    def __init__(self, store: WebStore, explain: Explain, gate: WebGate) -> None:
        self.gate = gate
        self.sight = Sight(store, explain)
        self.hub = Hub(self.sight, store.settings.service.http_events_max)
        self.refusals = Refusals(store.manifest.clock)
        self.routes = Routes(self.sight, lambda: exposition(self.registry), gate.asks_readers)
        # guarded by _lock
        self._lock = threading.Lock()
        self._calls = self._failed = 0
        self.busy = 0
        self.connections: set[socket.socket] = set()

    @cached_property
    def registry(self) -> CollectorRegistry:
        """Made when somebody first scrapes: prometheus-client is loaded only then."""
        return registry(self.sight, self.figures)

    def count(self, *, failed: bool = False) -> None:
        """One request was answered."""
        with self._lock:
            self._calls += 1
            self._failed += failed

    def figures(self) -> WebFigures:
        """See `WebServer.figures`."""
        return WebFigures(
            calls=self._calls,
            failed=self._failed,
            refused=self.refusals.count,
            busy=self.busy,
            connections_now=len(self.connections),
            pages_now=self.hub.now,
            pages_dropped=self.hub.dropped,
        )


class WebServer:
    """A store's HTTP side. Use it as a context manager, or call `close`."""

    def __init__(
        self, store: WebStore, address: str, credentials: Credentials | None = None, *, explain: Explain
    ) -> None:
        if store.mode != "rw":
            raise ReadOnly("only the owner of a store serves it", hint='open it with mode="rw"', path=store.path)
        settings = store.settings.service
        credentials = credentials or Credentials()
        scheme, host, port = parse_address(address)
        context = _tls(scheme, credentials)
        gate = WebGate(
            _tokens(store, credentials),
            asks_readers=settings.http_ask_readers or not is_loopback(host),
            hosts=(*settings.http_hosts, host),
        )
        self._stop_seconds = settings.stop_seconds
        self._sample_seconds = settings.http_sample_seconds
        self._web = Web(store, explain, gate)
        self._listener = _Listener(host, port, self._web, settings.http_connections_max, context)
        shown = f"[{host}]" if ":" in host else host
        self.address = f"{scheme}://{shown}:{self._listener.server_address[1]}"
        self._stopping = threading.Event()
        self._lock = threading.Lock()
        self._closed = False
        self._pid = os.getpid()
        self._threads = [
            threading.Thread(target=self._listener.serve_forever, args=(0.1,), name="quire-web", daemon=True),
            threading.Thread(target=self._sample, name="quire-web-history", daemon=True),
        ]
        for thread in self._threads:
            thread.start()
        emit("info", "web.listening", address=self.address, path=store.path)
        if scheme == HTTP and not is_loopback(host):
            hint = "tokens travel in the clear: use https://"
            emit("warning", "web.plaintext", address=self.address, hint=hint)

    def figures(self) -> WebFigures:
        """What was counted since the server started."""
        return self._web.figures()

    def _sample(self) -> None:
        """Look at the figures every `http_sample_seconds`, for the history that pages show (rule 4)."""
        sight = self._web.sight
        while not self._stopping.is_set():
            try:
                whole = sight.survey()
                counts = ((db_id, one.segments) for db_id, one in whole.databases.items() if one.segments)
                sight.history.sample(sight.clock.now_ms(), counts)
            except QuireError as error:
                emit("info", "web.sample_failed", error=error.what)
            self._stopping.wait(self._sample_seconds)

    def close(self) -> None:
        """Stop listening and hang up on who stays beyond `stop_seconds`. A second time, and in a forked child:
        nothing."""
        if self._pid != os.getpid():
            self._listener.socket.close()  # the child's copy; connections and threads are the parent's
            return
        with self._lock:
            if self._closed:
                return
            self._closed = True
        self._stopping.set()
        self._listener.shutdown()
        self._listener.server_close()
        self._web.hub.close()
        self._listener.end_connections(self._stop_seconds)
        for thread in self._threads:
            thread.join(self._stop_seconds + 1)
        emit("info", "web.closed", address=self.address)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Listener(socketserver.TCPServer):
    """Accepts connections, a bounded number of them (rule 2)."""

    allow_reuse_address = True
    request_queue_size = 64

    def __init__(self, host: str, port: int, web: Web, connections_max: int, context: ssl.SSLContext | None) -> None:
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self.web = web
        self._context = context
        self._connections_max = connections_max
        # guarded by _changed
        self._changed = threading.Condition()
        try:
            super().__init__((host, port), HttpConnection)
        except OSError as error:
            raise InvalidInput(
                f"cannot listen: {error.strerror or error}",
                hint="choose another port; 0 takes a free one",
                address=f"{host}:{port}",
            ) from error

    def process_request(self, request: Any, client_address: Any) -> None:
        """A thread of its own for each connection, if there is a place."""
        with self._changed:
            has_place = len(self.web.connections) < self._connections_max
            if has_place:
                self.web.connections.add(request)
            else:
                self.web.busy += 1
        if not has_place:
            _turn_away(request, is_plain=self._context is None)
            self.shutdown_request(request)
            return
        # Not named "quire-…": it acknowledges what a person asked for, and waits for the archive as a caller does (A9).
        work = threading.Thread(target=self._work, args=(request, client_address), name="web-connection", daemon=True)
        work.start()

    def _work(self, request: socket.socket, client_address: Any) -> None:
        stream: socket.socket = request
        try:
            request.settimeout(IDLE_SECONDS)
            if self._context is not None:
                stream = self._context.wrap_socket(request, server_side=True)
                with self._changed:  # `request` gave its descriptor away
                    self.web.connections.discard(request)
                    self.web.connections.add(stream)
            self.finish_request(stream, client_address)
        except (OSError, ValueError):
            pass  # the other side went away, or does not speak TLS
        finally:
            self.shutdown_request(stream)
            with self._changed:
                self.web.connections -= {request, stream}
                self._changed.notify_all()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Never reached: `_work` is where errors end."""

    def end_connections(self, seconds: float) -> None:
        """Let connections end; after so many seconds hang up on them. Those that say nothing are hung up on at once."""
        with self._changed:
            for connection in self.web.connections:
                with suppress(OSError):
                    connection.shutdown(socket.SHUT_RD)  # an answer under way is still sent
            if not self._changed.wait_for(lambda: not self.web.connections, seconds):
                emit("warning", "web.hung_up", connections=len(self.web.connections))
                for connection in self.web.connections:
                    with suppress(OSError):
                        connection.shutdown(socket.SHUT_RDWR)
                self._changed.wait_for(lambda: not self.web.connections, 1.0)


def _turn_away(request: socket.socket, *, is_plain: bool) -> None:
    """Say in one packet that there is no place; whoever speaks TLS hears only that we hang up."""
    if not is_plain:
        return
    answer = error_answer(Overloaded("all places are taken", hint="try again later"))
    head = f"HTTP/1.1 {HTTPStatus.SERVICE_UNAVAILABLE.value} Busy\r\nContent-Type: {answer.content_type}\r\n"
    head += f"Content-Length: {len(answer.body)}\r\nRetry-After: 1\r\nConnection: close\r\n\r\n"
    request.setblocking(False)
    with suppress(OSError):
        request.send(head.encode() + answer.body)


def parse_address(address: str) -> tuple[str, str, int]:
    """(scheme, host, port) of `HOST:PORT`, `http://HOST:PORT` or `https://HOST:PORT`.

    >>> parse_address("127.0.0.1:7448"), parse_address("https://[::1]:0")
    (('http', '127.0.0.1', 7448), ('https', '::1', 0))
    """
    parts = urlsplit(address if "://" in address else f"{HTTP}://{address}")
    try:
        port = parts.port
    except ValueError:
        port = None
    if parts.scheme not in (HTTP, HTTPS) or not parts.hostname or port is None or parts.path not in ("", "/"):
        raise InvalidInput(
            "cannot listen there", hint="HOST:PORT, http://HOST:PORT or https://HOST:PORT", address=address
        )
    return parts.scheme, parts.hostname, port


def _tokens(store: WebStore, credentials: Credentials) -> Tokens:
    return Tokens(
        admin=ensure_token(credentials.admin_token_file or os.path.join(store.path, names.ADMIN_TOKEN)),
        read=ensure_token(credentials.read_token_file or os.path.join(store.path, names.READ_TOKEN)),
    )


def _tls(scheme: str, credentials: Credentials) -> ssl.SSLContext | None:
    given = bool(credentials.tls_cert_file), bool(credentials.tls_key_file)
    if scheme == HTTP:
        if any(given):
            raise InvalidConfig("a certificate is for https://", hint="listen there, or leave the certificate out")
        return None
    if not all(given):
        raise InvalidConfig("TLS needs a certificate and its key", hint="give tls_cert_file and tls_key_file")
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        context.load_cert_chain(credentials.tls_cert_file, credentials.tls_key_file)
    except (OSError, ssl.SSLError) as error:
        path = credentials.tls_cert_file
        raise InvalidConfig(f"the certificate cannot be read: {error.strerror or error}", path=path) from error
    return context
