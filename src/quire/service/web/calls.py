"""`POST /v1/call/ACTION`: the calls of quire's own clients over HTTP (W8), as docs/formats/wire.md describes them.

Host, origin and token are checked by the HTTP server; actions and rights by the service (`service/server.py`). A call occupies
a thread while it runs, and a statement waits for its lock in it. There are as many threads as concurrent requests, so that the
holder of the lock always finds one for its COMMIT.

Threads: the event loop's, and those of calls.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from http import HTTPStatus
from typing import TYPE_CHECKING

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route
from starlette.types import Receive

from quire.durable.failpoints import hit
from quire.service.admission import Admission, FlightGate, Refusals
from quire.service.http_carrier import CALL_TYPE, PATH
from quire.service.server import Service
from quire.service.sockets import register_server
from quire.service.values import ServiceFigures
from quire.service.web.answers import HttpError
from quire.service.web.context import WebContext
from quire.service.wire import CLIENT_HEADER, TRACE_HEADER, VERSION_HEADER, version_error

if TYPE_CHECKING:
    from prometheus_client import Metric


class _HttpCall:
    """One request, in the shape in which a gate and the service see a Flight call."""

    def __init__(self, admission: Admission, peer: str, leaving: asyncio.Future[None]) -> None:
        self._admission = admission
        self._peer = peer
        self.is_cancelled = leaving.done
        """Returns whether the client has disconnected."""

    def get_middleware(self, _: str) -> Admission:
        """Return the caller's admission."""
        return self._admission

    def peer(self) -> str:
        """Return the caller, for the log."""
        return self._peer


class CallPart:
    """The part of the HTTP server that serves calls."""

    def __init__(self, context: WebContext) -> None:
        # constant after construction
        self._context = context
        refusals = Refusals(context.store.manifest.clock)
        self._gate = FlightGate(context.gate.tokens, refusals, copy_of=context.store.copy_of)
        self.path = context.store.path
        # Not named "quire-…": these threads acknowledge changes to a caller, so they wait for the archive (A9).
        self._threads = ThreadPoolExecutor(context.settings.http_requests_max, thread_name_prefix="http-call")
        self._service = Service(context.store, refusals, context.stopping)

    def routes(self) -> list[BaseRoute]:
        """Return the route."""
        return [Route(PATH + "{action}", self.call, methods=["POST"])]

    async def start(self) -> None:
        """Register with the store's servers."""
        register_server(self)

    async def close(self) -> None:
        """End the clients' holdings."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        await asyncio.to_thread(self._service.close)

    def collect(self) -> Iterable[Metric]:
        """Yield no metrics: calls are counted with those of the other addresses."""
        return ()

    def figures(self) -> ServiceFigures:
        """Return the counters since the server started."""
        return self._service.figures()

    async def call(self, request: Request) -> Response:
        """Handle one call."""
        grant = self._context.gate.grant(request)
        grant.check_any_access()  # any admitted caller may call actions on its own resources; the service checks the rest
        if (wrong := version_error(request.headers.get(VERSION_HEADER, ""))) is not None:
            raise HttpError(HTTPStatus.BAD_REQUEST, wrong)
        body = await self._context.read_body(request)
        headers = request.headers
        admission = Admission(grant, headers.get(TRACE_HEADER, ""), headers.get(CLIENT_HEADER, ""))
        leaving = asyncio.ensure_future(_disconnected(request.receive))
        context = _HttpCall(admission, request.client.host if request.client else "", leaving)
        action = request.path_params["action"]

        def act() -> bytes:
            answer = b"".join(self._service.act(action, body, self._gate, context))
            hit("service.answer")  # tests lose the answer here
            return answer

        try:
            answer = await asyncio.get_running_loop().run_in_executor(self._threads, act)
        finally:
            leaving.cancel()
        return Response(answer, media_type=CALL_TYPE)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        continue
