"""The context of every part of the HTTP server: the store, access control, limits, threads for blocking calls.

A part (`WebPart`) is a package that serves some addresses: the SQL server, the replicas. `server.py` mounts its routes before
those of the dashboard, starts it with the event loop and closes it before the loop ends.

An endpoint checks its caller's rights first, then looks up the database:

    grant = context.gate.grant(request)      # Unauthenticated for a wrong token
    grant.check(name, write=True)            # AccessDenied, Unauthenticated
    answer = await context.call(work, name)  # in a thread; any QuireError becomes an answer

Threads: attributes are constant after construction; `call` and `read_body` in the event loop.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import TYPE_CHECKING, ParamSpec, Protocol, TypeVar

from starlette.requests import ClientDisconnect, HTTPConnection, Request
from starlette.routing import BaseRoute

from quire.core.errors import InvalidInput
from quire.core.settings import ServiceSettings
from quire.service.admission import Refusals
from quire.service.web.access import WebGate
from quire.service.web.answers import HttpError
from quire.service.web.counters import Limits, WebCounts
from quire.service.web.dashboard_state import WebStore

if TYPE_CHECKING:
    from prometheus_client import Metric

NAMESPACE = "x-namespace"
NAME_CHARACTERS_MAX = 300

P = ParamSpec("P")
T = TypeVar("T")


class WebPart(Protocol):
    """A package that serves some addresses."""

    def routes(self) -> list[BaseRoute]:
        """Return the routes; called once, before `start`."""

    async def start(self) -> None:
        """Start the part, in the running event loop."""

    async def close(self) -> None:
        """Answer waiting requests and release resources, within `settings.stop_seconds`; the loop ends after this."""

    def collect(self) -> Iterable[Metric]:
        """Yield the metrics for `/metrics`; called in any thread."""


@dataclass(frozen=True, slots=True)
class WebContext:
    """The shared state of all parts. See above."""

    store: WebStore
    settings: ServiceSettings
    gate: WebGate
    refusals: Refusals
    counts: WebCounts
    calls: ThreadPoolExecutor
    """Threads for blocking calls; they acknowledge changes to callers, so they wait for the archive (A9)."""
    stopping: threading.Event = field(default_factory=threading.Event)
    """Set when the server closes: waiting requests should end."""

    @property
    def limits(self) -> Limits:
        """The counters of refusals by limit: `context.limits.hit("streams")`."""
        return self.counts.limits

    def database(self, connection: HTTPConnection) -> str:
        """Return the database that a request names, with its version (W4)."""
        name = (
            connection.headers.get(NAMESPACE)
            or self.gate.database_label(connection.headers)
            or connection.path_params.get("database")
            or self.settings.sql_default_database
        )
        if not name or len(name) > NAME_CHARACTERS_MAX:
            hint = f"send the header {NAMESPACE}, or use the path /db/NAME"
            raise InvalidInput("the request names no database", hint=hint)
        return str(name)

    async def call(self, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        """Run a blocking function in a thread."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self.calls, lambda: function(*args, **kwargs))

    async def read_body(self, request: Request, bytes_max: int | None = None) -> bytes:
        """Return the whole body of a request, of at most `bytes_max`; by default `service.body_bytes_max`."""
        largest = self.settings.body_bytes_max if bytes_max is None else bytes_max
        length_text = request.headers.get("content-length", "")
        if length_text.isascii() and length_text.isdecimal() and (len(length_text) > 18 or int(length_text) > largest):
            raise self._too_long(largest)
        body, more = bytearray(), True
        while more:
            message = await request.receive()
            if message["type"] == "http.disconnect":
                raise ClientDisconnect
            body += message.get("body", b"")
            more = message.get("more_body", False)
            if len(body) > largest:
                raise self._too_long(largest)
        return bytes(body)

    def _too_long(self, largest: int) -> HttpError:
        self.limits.hit("body_bytes")
        wrong = InvalidInput("the body is too long", hint="send less data per request", max=largest)
        return HttpError(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, wrong)
