"""The HTTP server of an owner: SQL, replicas, versions as files, metrics, health and the dashboard (W1). Created by
`store.serve_http()`.

It is a Starlette application on uvicorn's protocols, in its own event loop (uvloop) in its own thread.

Rules
  1. It listens on loopback unless another address is given; beyond loopback all but health and the static files needs a token.
  2. Nothing blocks the event loop: blocking calls run in the context's threads.
  3. Closing stops listening, ends live updates, lets requests end for `stop_seconds`, then disconnects; parts are closed last.
  4. One thread samples figures every `http_sample_seconds`, for the history that a page shows.

Threads: the loop's, the sampler, the hub's, the context's for calls. `close` from any other.
Raises `InvalidInput` for an address, `InvalidConfig` for tokens and certificates, `ReadOnly` for a store opened for reading.
"""

from __future__ import annotations

import asyncio
import os
import socket
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from email.utils import formatdate
from functools import cached_property
from typing import TYPE_CHECKING, Self

import uvloop
from starlette.applications import Starlette
from starlette.types import ASGIApp
from uvicorn.config import Config
from uvicorn.server import ServerState

from quire.core.errors import QuireError, ReadOnly
from quire.core.events import emit
from quire.service.admission import Refusals
from quire.service.grants import Grant
from quire.service.replicas.routes import ReplicaPart
from quire.service.signed_tokens import accepted_tokens
from quire.service.sql.routes import SqlPart
from quire.service.tokens import Credentials
from quire.service.web.accepting import accept_connections
from quire.service.web.access import LOOPBACK_READS, LOOPBACK_WRITES, WebGate, is_loopback
from quire.service.web.calls import CallPart
from quire.service.web.context import WebContext, WebPart
from quire.service.web.counters import WebCounts, WebFigures
from quire.service.web.dashboard import Dashboard
from quire.service.web.dashboard_state import Explain, WatchedStore, WebStore
from quire.service.web.edge import Edge
from quire.service.web.hub import Hub
from quire.service.web.listening import HTTP, UNIX, WebAddress, bind, parse_address, tls_context
from quire.service.web.metrics import exposition, registry
from quire.service.web.protocol import ConnectionSetup, ConnectionSlots
from quire.service.web.routes import Routes
from quire.service.web.version_files import VersionFiles
from quire.sqlite.remote_policy import limit_heap

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

DATE_SECONDS = 1.0
END_SECONDS = 0.02
"""How often a closing server checks whether its connections have ended."""
PING_SECONDS = 20.0
"""The interval of pings of a WebSocket, and the time limit of a pong: detects a client that is gone."""


class Application(Starlette):
    """The routes of every part, the dashboard as the fallback, and only the edge around them: the edge answers errors, and no
    request pays for another layer."""

    def __init__(self, context: WebContext, parts: Sequence[WebPart], dashboard: ASGIApp) -> None:
        super().__init__(routes=[route for part in parts for route in part.routes()])
        self._context = context
        self.router.redirect_slashes = False
        self.router.default = dashboard

    def build_middleware_stack(self) -> ASGIApp:
        """Return the edge instead of Starlette's own layers, which would find no errors to handle."""
        return Edge(self.router.app, self._context)


class Web:
    """The application over one store, and its counters."""

    def __init__(self, store: WebStore, explain: Explain, gate: WebGate) -> None:
        settings = store.settings.service
        self.watched = WatchedStore(store, explain)
        self.hub = Hub(self.watched, settings.http_events_max)
        self.slots = ConnectionSlots(settings.http_connections_max)
        self.context = WebContext(
            store=store,
            settings=settings,
            gate=gate,
            refusals=Refusals(store.manifest.clock),
            counts=WebCounts(),
            # Not named "quire-…": these threads acknowledge changes to a caller, so they wait for the archive (A9).
            calls=ThreadPoolExecutor(settings.http_threads, thread_name_prefix="web-call"),
        )
        self.routes = Routes(self.watched, lambda: exposition(self.registry), gate.asks_readers)
        # The first part that has a matching route answers.
        self.parts = (
            VersionFiles(self.context),
            SqlPart(self.context),
            ReplicaPart(self.context),
            CallPart(self.context),
        )
        self.app = Application(self.context, self.parts, Dashboard(self.context, self.routes, self.hub))

    @cached_property
    def registry(self) -> CollectorRegistry:
        """The registry of metrics, created by the first scrape."""
        return registry(self.watched, self.figures, self.parts)

    def figures(self) -> WebFigures:
        """Return the counters; see `WebServer.figures`."""
        counts = self.context.counts
        return WebFigures(
            calls=counts.calls,
            failed=counts.failed,
            refused=self.context.refusals.count,
            busy=self.slots.busy,
            connections_now=self.slots.now,
            pages_now=self.hub.now,
            pages_dropped=self.hub.dropped,
            limited=counts.limits.counts(),
        )


class WebServer:
    """The HTTP server of a store. Use it as a context manager, or call `close`."""

    def __init__(
        self, store: WebStore, address: str, credentials: Credentials | None = None, *, explain: Explain
    ) -> None:
        if store.mode != "rw":
            raise ReadOnly("only the owner can serve a store", hint='open it with mode="rw"', path=store.path)
        credentials = credentials or Credentials()
        place = parse_address(address)
        self._tls = tls_context(place, credentials)
        gate = _gate(store, place, credentials)
        self._place = place
        self._listener, self.address = bind(place)
        self._settings = store.settings.service
        self._clock = store.manifest.clock
        limit_heap(self._settings.sql_heap_bytes)
        self._web = Web(store, explain, gate)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop: asyncio.Event | None = None
        self._started = threading.Event()
        self._failure: BaseException | None = None
        self._lock = threading.Lock()
        self._closed = False
        self._pid = os.getpid()
        self._threads = [
            threading.Thread(target=self._run, name="quire-web", daemon=True),
            threading.Thread(target=self._sample, name="quire-web-history", daemon=True),
        ]
        for thread in self._threads:
            thread.start()
        self._wait_for_start()
        emit("info", "web.listening", address=self.address, path=store.path)
        if place.scheme == HTTP and not is_loopback(place.host):
            hint = "tokens are sent unencrypted: use https://"
            emit("warning", "web.plaintext", address=self.address, hint=hint)

    def figures(self) -> WebFigures:
        """Return the counters since the server started."""
        return self._web.figures()

    def _wait_for_start(self) -> None:
        self._started.wait()
        if self._failure is not None:
            self.close()
            raise self._failure

    # ── the event loop's thread ───────────────────────────────────────────────────────────────────────────────────────
    def _run(self) -> None:
        try:
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                runner.run(self._serve())
        except BaseException as error:
            self._failure = error
            if self._started.is_set():
                emit("error", "web.bug", where="server", error=error)
        finally:
            self._started.set()

    async def _serve(self) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        state, parts = ServerState(), self._web.parts
        setup = ConnectionSetup(
            self._uvicorn_config(), state, self._settings, self._web.context.counts, self._web.slots
        )
        for part in parts:
            await part.start()
        accepting = self._loop.create_task(accept_connections(self._listener, setup, self._tls))
        self._started.set()
        while not self._stop.is_set():
            date = formatdate(self._clock.now_ms() / 1000, usegmt=True)
            state.default_headers = [(b"date", date.encode()), (b"server", b"quire")]
            with suppress(TimeoutError):
                await asyncio.wait_for(self._stop.wait(), DATE_SECONDS)
        accepting.cancel()
        await asyncio.wait([accepting])
        self._listener.close()
        await self._end_connections(state)
        for part in parts:
            try:
                await asyncio.wait_for(part.close(), self._settings.stop_seconds + 1)
            except Exception as error:
                emit("error", "web.bug", where=type(part).__name__, error=error)

    def _uvicorn_config(self) -> Config:
        config = Config(
            self._web.app,
            lifespan="off",
            interface="asgi3",
            http="httptools",
            ws="websockets-sansio",
            ws_max_size=self._settings.body_bytes_max,
            ws_ping_interval=PING_SECONDS,
            ws_ping_timeout=PING_SECONDS,
            ws_per_message_deflate=False,  # costs more than it saves on loopback, and a window per connection
            log_config=None,
            proxy_headers=False,  # callers are identified by the token, never by what a header claims
            server_header=False,
            date_header=False,
            timeout_keep_alive=max(1, int(self._settings.http_idle_seconds)),
        )
        config.load()
        return config

    async def _end_connections(self, state: ServerState) -> None:
        """Let requests end, and disconnect after `stop_seconds`. Idle connections are closed at once."""
        for connection in list(state.connections):
            connection.shutdown()
        await asyncio.to_thread(self._web.hub.close)
        deadline = self._clock.monotonic() + self._settings.stop_seconds
        while (self._web.slots.now or state.tasks) and self._clock.monotonic() < deadline:
            await asyncio.sleep(END_SECONDS)
        if self._web.slots.now or state.tasks:
            emit("warning", "web.hung_up", connections=self._web.slots.now)
        for connection in list(state.connections):
            connection.transport.abort()
        for task in list(state.tasks):
            task.cancel()
        await asyncio.sleep(0)  # lets them notice

    # ── the sampler's thread ──────────────────────────────────────────────────────────────────────────────────────────
    def _sample(self) -> None:
        """Sample the figures every `http_sample_seconds`, for the history that pages show (rule 4)."""
        watched, stopping = self._web.watched, self._web.context.stopping
        while not stopping.is_set():
            try:
                watched.sample()
            except QuireError as error:
                emit("info", "web.sample_failed", error=error.what)
            except Exception as error:  # if the loop ended, the history would stand still
                emit("error", "web.bug", where="history", error=error)
            stopping.wait(self._settings.http_sample_seconds)

    # ── closing ───────────────────────────────────────────────────────────────────────────────────────────────────────
    def close(self) -> None:
        """Stop listening, and disconnect clients that stay beyond `stop_seconds`. Idempotent; in a forked child it only closes
        the child's copy of the listener."""
        if self._pid != os.getpid():
            socket.socket.close(self._listener)  # connections and threads belong to the parent
            return
        with self._lock:
            if self._closed:
                return
            self._closed = True
        self._web.context.stopping.set()
        if self._loop is not None and self._stop is not None:
            with suppress(RuntimeError):  # the loop has already ended
                self._loop.call_soon_threadsafe(self._stop.set)
        for thread in self._threads:
            thread.join(3 * self._settings.stop_seconds + 10)
        self._listener.close()
        if self._place.scheme == UNIX:
            with suppress(FileNotFoundError):
                os.unlink(self._place.path)
        self._web.context.calls.shutdown(wait=False, cancel_futures=True)
        emit("info", "web.closed", address=self.address)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _gate(store: WebStore, place: WebAddress, credentials: Credentials) -> WebGate:
    settings = store.settings.service
    tokens = accepted_tokens(
        store.path,
        settings.jwt_keys,
        store.manifest.clock,
        admin_file=credentials.admin_token_file,
        read_file=credentials.read_token_file,
    )
    if place.scheme == UNIX:
        return WebGate(tokens, anonymous=Grant.ADMIN, checks_host=False)
    anonymous = Grant.NOTHING
    if is_loopback(place.host) and not settings.http_ask_readers:
        anonymous = LOOPBACK_WRITES if settings.http_anonymous_writes else LOOPBACK_READS
    return WebGate(tokens, anonymous=anonymous, hosts=(*settings.http_hosts, place.host))
