"""The routes of SQL over HTTP and WebSocket: Hrana 1 to 3 in JSON (W2), and databases as namespaces (W4).

The database is named by the header `x-namespace`, else the first label of the host, else the prefix `/db/NAME` of the path,
else `service.sql_default_database`. Every path of Hrana exists with and without that prefix.

A request's rights are checked before its database is looked up. Refusals of the protocol (a baton, too many streams) are sent
as `{"message", "code"}`, which the clients read; all other errors in the form of the HTTP server.

Threads: the event loop's.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable
from contextlib import aclosing, suppress
from http import HTTPStatus
from typing import TYPE_CHECKING

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from starlette.requests import HTTPConnection, Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route, WebSocketRoute
from starlette.types import Receive, Scope, Send
from starlette.websockets import WebSocket, WebSocketDisconnect, WebSocketDisconnected

from quire.core.errors import InvalidInput
from quire.service.grants import Grant
from quire.service.sql import protocol as p
from quire.service.sql.namespaces import NamespaceRoutes
from quire.service.sql.pool import SqlTarget
from quire.service.sql.service import SqlService, is_one_shot
from quire.service.sql.session import SqlSession, Work
from quire.service.sql.socket import PROTOCOLS, HranaSocket
from quire.service.sql.streams import EXPIRED, TOO_MANY, SqlStream, StreamRefused
from quire.service.version_address import base_name
from quire.service.web.access import NO_TOKEN
from quire.service.web.context import WebContext
from quire.service.web.headers import EdgeRequest
from quire.sqlite.statements import StatementFailed

if TYPE_CHECKING:
    from prometheus_client import Metric

KEY = "idempotency-key"
JSON, LINES = "application/json", "text/plain; charset=utf-8"
Endpoint = Callable[[Request], Awaitable[Response]]


class SqlPart:
    """The SQL part of the HTTP server."""

    def __init__(self, context: WebContext) -> None:
        self._context = context
        self._service: SqlService | None = None

    def routes(self) -> list[BaseRoute]:
        """Return the routes."""
        posts: dict[str, Endpoint] = {
            "/v2/pipeline": self.pipeline,
            "/v3/pipeline": self.pipeline,
            "/v3/cursor": self.cursor,
            "/v1/execute": self.execute,
            "/v1/batch": self.batch,
        }
        gets: dict[str, Endpoint] = {"/v2": _supported, "/v3": _supported}
        routes: list[BaseRoute] = []
        for prefix in ("", "/db/{database}"):
            routes += [
                Route(prefix + path, HranaEndpoint(endpoint), methods=["POST"]) for path, endpoint in posts.items()
            ]
            routes += [Route(prefix + path, endpoint, methods=["GET"]) for path, endpoint in gets.items()]
            routes += [Route(f"{prefix}/v3-protobuf{end}", _unsupported) for end in ("", "/pipeline", "/cursor")]
        # `@libsql/client` and `libsql-client` resolve `v2/pipeline` against http://HOST/db/shop, which loses the name.
        routes += [Route(f"/db{path}", self.nameless, methods=["POST"]) for path in posts]
        routes += [WebSocketRoute(path, self.socket) for path in ("/", "/db/{database}", "/db/{database}/")]
        return [*routes, *NamespaceRoutes(self._context).routes()]

    async def start(self) -> None:
        """Create the service, in the running event loop."""
        self._service = SqlService(self._context.store, lambda: self._context.limits.hit("sql_answers"))

    async def close(self) -> None:
        """Roll back open transactions and stop the service."""
        if self._service is not None:
            await self._service.close()

    @property
    def service(self) -> SqlService:
        """The service, for other protocols over the same sessions."""
        assert self._service is not None, "the event loop runs"
        return self._service

    def collect(self) -> Iterable[Metric]:
        """Yield the metrics."""
        if self._service is None:
            return
        figures = self._service.figures()
        yield GaugeMetricFamily("quire_sql_streams", "open SQL streams", value=figures.streams_now)
        for name, text, value in (
            ("quire_sql_connections", "connections opened for streams", figures.connections_opened),
            ("quire_sql_one_shots", "pipelines that closed their own stream", figures.one_shots),
            ("quire_sql_lane_writes", "one-shot pipelines that shared a sync with others", figures.lane_writes),
            ("quire_sql_streams_refused", "streams refused: too many streams, or an invalid baton", figures.refused),
            ("quire_sql_streams_expired", "streams closed because they were idle", figures.expired),
            ("quire_sql_transactions_expired", "transactions rolled back because they were idle", figures.rolled_back),
        ):
            yield CounterMetricFamily(name, text, value=value)

    # ── rights and databases ──────────────────────────────────────────────────────────────────────────────────────────
    def _target(self, connection: HTTPConnection, grant: Grant) -> SqlTarget:
        text = self._context.database(connection)
        name = base_name(text)
        grant.check(name)
        return SqlTarget.parse(text, writable=grant.may(name, write=True), may_attach=grant.may_attach)

    async def nameless(self, request: Request) -> Response:
        """Explain the missing slash to a client whose URL ends with the name of a database."""
        self._context.gate.grant(request).check_any_access()
        url = f"{request.url.scheme}://{request.headers.get('host', 'HOST')}/db/NAME/"
        message = f"the URL of a database ends with a slash, or its name is lost: {url}"
        return _refusal(p.WireError(message, "DATABASE_NOT_NAMED"), HTTPStatus.NOT_FOUND)

    # ── pipelines ─────────────────────────────────────────────────────────────────────────────────────────────────────
    async def pipeline(self, request: Request) -> Response:
        """`POST /v2/pipeline`, `/v3/pipeline`."""
        grant = self._context.gate.grant(request)
        target = self._target(request, grant)
        body = p.read_pipeline(await self._context.read_body(request))
        if any(isinstance(step, p.CloseRequest) for step in body.requests[:-1]):
            raise InvalidInput("`close` must be the last request of a pipeline")
        if is_one_shot(body):
            key = request.headers.get(KEY, "")
            return Response(await self.service.one_shot(target, body.requests, key=key), media_type=JSON)
        stream = self._stream(body.baton, target, grant)
        async with stream.lock:
            try:
                answer = await self._run_pipeline(stream, body)
            except BaseException:
                # Also if the client has disconnected: the baton for the next request was not sent, so nobody can
                # continue the stream.
                await self.service.streams.close(stream)
                raise
        return Response(answer, media_type=JSON)

    async def _run_pipeline(self, stream: SqlStream, body: p.PipelineBody) -> bytes:
        if stream.is_closed:  # while this request waited for a cursor of the stream
            raise StreamRefused("the stream is closed", EXPIRED)
        ends = bool(body.requests) and isinstance(body.requests[-1], p.CloseRequest)
        results = await self.service.run(stream, lambda session: _answers(session, body.requests))
        if ends:
            await self.service.streams.close(stream)
        baton = None if ends else self.service.streams.baton(stream)
        return p.encode(p.PipelineAnswer(baton, None, results))

    def _stream(self, baton: str | None, target: SqlTarget, grant: Grant) -> SqlStream:
        streams = self.service.streams
        try:
            return streams.open(target, grant) if baton is None else streams.resume(baton, target, grant)
        except StreamRefused as refused:
            self._context.limits.hit("sql_streams" if refused.code == TOO_MANY else "sql_batons")
            raise

    # ── cursors ───────────────────────────────────────────────────────────────────────────────────────────────────────
    async def cursor(self, request: Request) -> Response:
        """`POST /v3/cursor`: send lines as they are produced."""
        grant = self._context.gate.grant(request)
        target = self._target(request, grant)
        body = p.read_cursor(await self._context.read_body(request))
        stream = self._stream(body.baton, target, grant)
        return CursorResponse(self.service, stream, body.batch)

    # ── version 1 ─────────────────────────────────────────────────────────────────────────────────────────────────────
    async def execute(self, request: Request) -> Response:
        """`POST /v1/execute`."""
        target = self._target(request, self._context.gate.grant(request))
        body = p.read_execute(await self._context.read_body(request))
        return await self._single(target, p.ExecuteRequest(body.stmt))

    async def batch(self, request: Request) -> Response:
        """`POST /v1/batch`."""
        target = self._target(request, self._context.gate.grant(request))
        body = p.read_batch(await self._context.read_body(request))
        return await self._single(target, p.BatchRequest(body.batch))

    async def _single(self, target: SqlTarget, request: p.ExecuteRequest | p.BatchRequest) -> Response:
        """Answer as version 1 does: with the result alone, and with a status for an error."""

        def run(session: SqlSession) -> Work[bytes]:
            response = yield from session.respond(request)
            assert isinstance(response, p.ExecuteResponse | p.BatchResponse)
            return p.encode({"result": response.result})

        return Response(await self.service.in_session(target, run), media_type=JSON)

    # ── WebSocket ─────────────────────────────────────────────────────────────────────────────────────────────────────
    async def socket(self, websocket: WebSocket) -> None:
        """Serve a WebSocket with many streams."""
        offered = websocket.scope.get("subprotocols") or []
        chosen = next((name for name in PROTOCOLS if name in offered), None)
        if offered and chosen is None:
            await websocket.close()  # before it is accepted: 403
            return
        await websocket.accept(chosen)

        def admit(jwt: str | None) -> tuple[SqlTarget, Grant]:
            gate = self._context.gate
            grant = gate.grant(websocket) if jwt is None or jwt in NO_TOKEN else gate.grant_of_token(jwt)
            return self._target(websocket, grant), grant

        connection = HranaSocket(self.service, admit, websocket.send_text, self._context.limits.hit)
        try:
            async with asyncio.timeout(self._context.settings.http_head_seconds) as time_for_hello:
                while True:
                    await connection.receive(await _text(websocket))
                    if connection.is_admitted:
                        time_for_hello.reschedule(None)
        except (WebSocketDisconnect, WebSocketDisconnected):
            pass
        except TimeoutError:
            self._context.limits.hit("hello_seconds")
            with suppress(RuntimeError):
                await websocket.close(code=1008, reason="say hello first, with a token that is valid")
        except InvalidInput as error:
            with suppress(RuntimeError):
                await websocket.close(code=1008, reason=error.what[:100])
        finally:
            await connection.close()


def _answers(session: SqlSession, requests: list[p.StreamRequest]) -> Work[list[p.StreamOk | p.StreamError]]:
    results = []
    for request in requests:
        results.append((yield from session.answer(request)))
    return results


async def _text(websocket: WebSocket) -> str:
    message = await websocket.receive()
    if message["type"] == "websocket.disconnect":
        raise WebSocketDisconnect(message.get("code", 1005))
    text: str | None = message.get("text")
    if text is None:
        raise InvalidInput("a message must be JSON text", hint="protobuf is not supported")
    return text


class CursorResponse(Response):
    """The lines of a cursor. One fetch is in memory; the next is produced when the client has taken it."""

    def __init__(self, service: SqlService, stream: SqlStream, batch: p.WireBatch) -> None:
        self._service = service
        self._stream = stream
        self._batch = batch
        super().__init__(media_type=LINES)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the lines. The stream is free when the last line is sent. A client that disconnects earlier may only have read
        enough rows (`libsql` does so, and continues with the stream's baton): if it has vanished, the stream is closed when it
        is idle."""
        stream, streams = self._stream, self._service.streams
        headers = [(name, value) for name, value in self.raw_headers if name != b"content-length"]
        leaving = asyncio.ensure_future(_disconnected(receive))
        async with stream.lock:
            if stream.is_closed:  # while this request waited for another one of the stream
                leaving.cancel()
                await _refusal(p.WireError("the stream is closed", EXPIRED), HTTPStatus.BAD_REQUEST)(
                    scope, receive, send
                )
                return
            try:
                await send({"type": "http.response.start", "status": HTTPStatus.OK, "headers": headers})
                first = p.encode_lines([p.CursorAnswer(streams.baton(stream), None)])
                await send({"type": "http.response.body", "body": first, "more_body": True})
                async with aclosing(self._entries()) as entries:
                    async for lines in entries:
                        await send({"type": "http.response.body", "body": lines, "more_body": True})
                        if leaving.done():
                            return
                await send({"type": "http.response.body", "body": b"", "more_body": False})
            except BaseException:
                await streams.close(stream)
                raise
            finally:
                leaving.cancel()

    async def _entries(self) -> AsyncGenerator[bytes, None]:
        try:
            async with aclosing(self._service.cursor(self._stream, self._batch)) as entries:
                async for lines in entries:
                    yield lines
        except StatementFailed as failed:
            yield p.encode_lines([p.CursorError(p.WireError.of(failed))])


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        continue


class HranaEndpoint:
    """An endpoint as an ASGI application that sends refusals in the protocol's form. It is an object because Starlette would
    wrap a function in layers that look for exception handlers."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""
        try:
            response = await self._endpoint(EdgeRequest(scope, receive))
        except StreamRefused as refused:
            status = HTTPStatus.SERVICE_UNAVAILABLE if refused.code == TOO_MANY else HTTPStatus.BAD_REQUEST
            response = _refusal(p.WireError(str(refused), refused.code), status)
        except StatementFailed as failed:
            response = _refusal(p.WireError.of(failed), HTTPStatus.BAD_REQUEST)
        await response(scope, receive, send)


def _refusal(error: p.WireError, status: int) -> Response:
    return Response(p.encode(error), status, media_type=JSON)


async def _supported(_: Request) -> Response:
    return Response(b"", HTTPStatus.OK)


async def _unsupported(_: Request) -> Response:
    """Refuse protobuf: clients then fall back to JSON."""
    return _refusal(p.WireError("protobuf is not supported: use JSON", "PROTOBUF_NOT_SUPPORTED"), HTTPStatus.NOT_FOUND)
