"""What every part of the HTTP side gets: the store, who may do what, the limits, threads for calls that block.

A part (`WebPart`) is a package that answers some addresses: the SQL server, the replicas. `app.py` mounts its routes before
those of the dashboard, starts it with the event loop and closes it before the loop ends.

An endpoint asks for its caller's rights first, then for the database:

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
    """A package that answers some addresses."""

    def routes(self) -> list[BaseRoute]:
        """Its addresses; asked once, before `start`."""

    async def start(self) -> None:
        """The event loop runs."""

    async def close(self) -> None:
        """Answer who waits and give up what is open; the loop ends after this. At most `settings.stop_seconds`."""

    def collect(self) -> Iterable[Metric]:
        """Its figures, for `/metrics`; called in any thread."""


@dataclass(frozen=True, slots=True)
class WebContext:
    """See above."""

    store: WebStore
    settings: ServiceSettings
    gate: WebGate
    refusals: Refusals
    counts: WebCounts
    calls: ThreadPoolExecutor
    """Threads for calls that block; they acknowledge changes to callers, so they wait for the archive (A9)."""
    stopping: threading.Event = field(default_factory=threading.Event)
    """Set when the server closes: what waits should end."""

    @property
    def limits(self) -> Limits:
        """Counts every refusal because something was used up: `context.limits.hit("streams")`."""
        return self.counts.limits

    def database(self, connection: HTTPConnection) -> str:
        """The database that a request names, with its version (W4)."""
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
        """Run something that blocks in a thread."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self.calls, lambda: function(*args, **kwargs))

    async def read_body(self, request: Request, bytes_max: int | None = None) -> bytes:
        """The whole body of a request, bounded before it is read; by default `service.body_bytes_max`."""
        largest = self.settings.body_bytes_max if bytes_max is None else bytes_max
        said = request.headers.get("content-length", "")
        if said.isascii() and said.isdecimal() and (len(said) > 18 or int(said) > largest):
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
        wrong = InvalidInput("the body is too long", hint="send less at a time", max=largest)
        return HttpError(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, wrong)
