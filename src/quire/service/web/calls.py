"""`POST /v1/call/ACTION`: the calls of quire's own clients over HTTP (W8), as docs/formats/wire.md describes them.

Host, origin and token are the HTTP side's; what an action is and who may do it, the service's (`service/server.py`). A call has
a thread while it runs, and a statement waits for its lock there: there are as many threads as connections may ask at once, so
that whoever holds the lock always finds one for its COMMIT.

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
from quire.service.sockets import listens
from quire.service.values import ServiceFigures
from quire.service.web.answers import HttpError
from quire.service.web.context import WebContext
from quire.service.wire import CLIENT_HEADER, TRACE_HEADER, VERSION_HEADER, version_error

if TYPE_CHECKING:
    from prometheus_client import Metric


class _HttpCall:
    """One request, as a gate and the service see a call of Flight."""

    def __init__(self, admission: Admission, peer: str, leaving: asyncio.Future[None]) -> None:
        self._admission = admission
        self._peer = peer
        self.is_cancelled = leaving.done
        """Whether the client has hung up."""

    def get_middleware(self, _: str) -> Admission:
        """What this caller may do."""
        return self._admission

    def peer(self) -> str:
        """Who called, for the log."""
        return self._peer


class CallPart:
    """A part of the HTTP side."""

    def __init__(self, context: WebContext) -> None:
        # constant after construction
        self._context = context
        refusals = Refusals(context.store.manifest.clock)
        self._gate = FlightGate(context.gate.tokens, refusals, copy_of=context.store.copy_of)
        self.path = context.store.path
        # Not named "quire-…": they acknowledge what a caller asked for, and wait for the archive as a caller does (A9).
        self._threads = ThreadPoolExecutor(context.settings.http_requests_max, thread_name_prefix="http-call")
        self._service = Service(context.store, refusals, context.stopping)

    def routes(self) -> list[BaseRoute]:
        """Its address."""
        return [Route(PATH + "{action}", self.call, methods=["POST"])]

    async def start(self) -> None:
        """The event loop runs."""
        listens(self)

    async def close(self) -> None:
        """What clients hold ends."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        await asyncio.to_thread(self._service.close)

    def collect(self) -> Iterable[Metric]:
        """None of its own: calls are counted with those of the other addresses."""
        return ()

    def figures(self) -> ServiceFigures:
        """What was counted since the server started."""
        return self._service.figures()

    async def call(self, request: Request) -> Response:
        """One call."""
        grant = self._context.gate.grant(request)
        grant.check_somebody()  # everybody who is let in may ask for what concerns only itself
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
            hit("service.answer")  # where tests lose it
            return answer

        try:
            answer = await asyncio.get_running_loop().run_in_executor(self._threads, act)
        finally:
            leaving.cancel()
        return Response(answer, media_type=CALL_TYPE)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        continue
