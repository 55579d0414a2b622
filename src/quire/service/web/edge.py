"""The outermost layer of the application: what applies to every request, whichever part answers it.

Rules
  1. Host and origin are checked first; a client that is refused there does not learn what exists.
  2. At most `service.http_requests_max` requests are processed at once; more are refused with a hint to retry.
  3. Every answer carries the headers that keep other sites, caches and type guessing out.
  4. An error that a part raises becomes an answer here, and only here. A bug becomes `InternalError`; tracebacks are not sent.
  5. A request whose body was not read ends its connection.
  6. Several slashes count as one: some clients append `/info` to an address, so that `/db/shop/` becomes `/db/shop//info`, and
     others need the slash at its end, because they resolve `v2/pipeline` against it.

Threads: the event loop's.
"""

from __future__ import annotations

import re
from http import HTTPStatus

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from starlette.websockets import WebSocketDisconnect

from quire.core.errors import (
    AccessDenied,
    InternalError,
    InvalidInput,
    NotFound,
    Overloaded,
    QuireError,
    Unauthenticated,
)
from quire.core.events import emit
from quire.service.web.answers import SECURITY_HEADERS, HttpError, Response, error_answer
from quire.service.web.context import WebContext
from quire.service.web.headers import RequestHeaders

WEBSOCKET_BUG = 1011
WITHOUT_PLACE = frozenset({"/healthz", "/readyz"})
"""Health checks must be answered even if the server is busy."""
DEFAULTS = [
    (name.encode("latin-1"), value.encode("latin-1"))
    for name, value in (SECURITY_HEADERS | {"cache-control": "no-store"}).items()
]
"""Headers of every answer that has none of that name (rule 3), encoded."""
_SLASHES = re.compile("//+")


class Edge:
    """An ASGI application around another one."""

    def __init__(self, app: ASGIApp, context: WebContext) -> None:
        self._app = app
        self._context = context
        self._working = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request, or one WebSocket."""
        if "//" in scope.get("path", ""):
            scope = {**scope, "path": _SLASHES.sub("/", scope["path"])}
        if scope["type"] == "websocket":
            await self._websocket(scope, receive, send)
        elif scope["type"] == "http":
            await self._http(scope, receive, send)

    async def _http(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = RequestHeaders(scope)
        exchange = _Exchange(headers, receive, send, self._context)
        try:
            self._context.gate.check_site(headers, scope["path"] if scope["method"] in ("GET", "HEAD") else "")
            if self._working >= self._context.settings.http_requests_max and scope["path"] not in WITHOUT_PLACE:
                self._context.limits.hit("requests")
                raise Overloaded("the limit for requests is reached", hint="try again later")
            self._working += 1
            try:
                await self._app(scope, exchange.receive, exchange.send)
            finally:
                self._working -= 1
        except ClientDisconnect:
            return
        except Exception as error:
            await exchange.fail(self._answer(scope, error))

    async def _websocket(self, scope: Scope, receive: Receive, send: Send) -> None:
        accepted = False

        async def watched(message: Message) -> None:
            nonlocal accepted
            accepted |= message["type"] == "websocket.accept"
            await send(message)

        try:
            self._context.gate.check_site(RequestHeaders(scope))
            await self._app(scope, receive, watched)
        except WebSocketDisconnect:
            return
        except Exception as error:
            answer = self._answer(scope, error)
            self._context.counts.add(failed=True)
            if accepted:
                await send({"type": "websocket.close", "code": WEBSOCKET_BUG, "reason": "the server failed"})
                return
            headers = [(b"content-type", answer.content_type.encode())]
            await send({"type": "websocket.http.response.start", "status": int(answer.status), "headers": headers})
            await send({"type": "websocket.http.response.body", "body": answer.body})

    def _answer(self, scope: Scope, error: Exception) -> Response:
        """Return the answer for an error (rule 4)."""
        peer = (scope.get("client") or ("",))[0]
        if isinstance(error, HttpError):
            self._context.refusals.add(error.error, status=int(error.status), peer=peer)
            return error_answer(error.error, error.status)
        if isinstance(error, HTTPException):
            return _not_routed(error)
        if isinstance(error, QuireError):
            answer = error_answer(error)
            if isinstance(error, (AccessDenied, Unauthenticated)):
                self._context.refusals.add(error, status=int(answer.status), peer=peer)
            return answer
        emit("error", "web.bug", where=scope["path"][:80], error=error)
        return error_answer(InternalError(f"a bug at the owner: {type(error).__name__}"))


class _Exchange:
    """One request and its answer, as the application's `receive` and `send`."""

    def __init__(self, headers: RequestHeaders, receive: Receive, send: Send, context: WebContext) -> None:
        self._receive = receive
        self._send = send
        self._context = context
        self._body_is_read = headers.get("content-length", "0") == "0" and headers.get("transfer-encoding") is None
        self._started = False

    async def receive(self) -> Message:
        """Return the next part of the body."""
        message = await self._receive()
        if message["type"] == "http.request" and not message.get("more_body", False):
            self._body_is_read = True
        return message

    async def send(self, message: Message) -> None:
        """Send a part of the answer (rules 3 and 5)."""
        if message["type"] == "http.response.start":
            self._started = True
            self._context.counts.add(failed=message["status"] >= HTTPStatus.BAD_REQUEST)
            headers = list(message.get("headers", ()))
            names = {name for name, _ in headers}
            headers += [default for default in DEFAULTS if default[0] not in names]
            if message["status"] == HTTPStatus.UNAUTHORIZED:
                headers.append((b"www-authenticate", b'Bearer realm="quire"'))
            if not self._body_is_read:
                headers.append((b"connection", b"close"))
            message = {**message, "headers": headers}
        await self._send(message)

    async def fail(self, answer: Response) -> None:
        """Answer with an error; if an answer has begun, abort the connection."""
        if self._started:
            raise ConnectionAbortedError  # uvicorn disconnects
        await send_answer(answer, self.send)


def _not_routed(error: HTTPException) -> Response:
    """Return the answer to a request that Starlette refuses, in the same form as all others."""
    headers = dict(error.headers or {})
    wrong: QuireError = InvalidInput("this method is not allowed at this address", hint=headers.get("Allow", ""))
    if error.status_code == HTTPStatus.NOT_FOUND:
        wrong = NotFound("there is nothing at this address", hint="docs/sql-server.md lists the addresses")
    status = HTTPStatus(error.status_code)
    answer = error_answer(wrong, status)
    return Response(answer.body, answer.content_type, status, headers)


async def send_answer(answer: Response, send: Send) -> None:
    """Send a whole answer as ASGI messages."""
    fields = {**answer.headers, "content-type": answer.content_type}
    if answer.status != HTTPStatus.NOT_MODIFIED:
        fields["content-length"] = str(len(answer.body))
    headers = [(name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in fields.items()]
    await send({"type": "http.response.start", "status": int(answer.status), "headers": headers})
    await send({"type": "http.response.body", "body": answer.body})
