"""The dashboard as an ASGI application: its static files, its table of routes, its live updates.

Rules
  1. The static files contain no secret and need no token: they must load before the user can enter one.
  2. The token is checked before the address: a client that is refused does not learn what exists.
  3. A body is JSON, of a declared length of at most `BODY_BYTES_MAX`.

Threads: the event loop's; handlers run in the context's threads.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from http import HTTPStatus

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.types import Message, Receive, Scope, Send

from quire.core.errors import InvalidInput, NotFound, Overloaded, Unauthenticated
from quire.service.grants import Grant
from quire.service.tickets import Role
from quire.service.web.answers import HttpError, Response
from quire.service.web.assets import asset_answer
from quire.service.web.context import WebContext
from quire.service.web.edge import send_answer
from quire.service.web.hub import Hub, Subscriber
from quire.service.web.routes import Routes, WebRequest, read_query

BODY_BYTES_MAX = 64 * 1024
EVENTS = "/api/events"
INDEX = "index.html"
METHODS = frozenset({"GET", "HEAD", "POST"})


class Dashboard:
    """The dashboard of one store. See the rules above."""

    def __init__(self, context: WebContext, routes: Routes, hub: Hub) -> None:
        self._context = context
        self._routes = routes
        self._hub = hub

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request; WebSockets are refused."""
        if scope["type"] != "http":
            raise NotFound("there is no WebSocket at this address", hint="docs/sql-server.md lists the addresses")
        if scope["method"] not in METHODS:
            raise HttpError(HTTPStatus.NOT_IMPLEMENTED, InvalidInput("this method is not allowed at this address"))
        path = scope["raw_path"].decode("ascii", errors="replace")
        if path == EVENTS and scope["method"] == "GET":
            await self._events(scope, receive, send)
        else:
            await send_answer(await self._respond(Request(scope, receive), path), send)

    # ── requests ──────────────────────────────────────────────────────────────────────────────────────────────────────
    async def _respond(self, request: Request, path: str) -> Response:
        is_post = request.method == "POST"
        if not is_post and (asset := _asset(path, request.headers)) is not None:
            return asset  # rule 1
        grant = self._context.gate.grant(request)
        try:
            route, names = self._routes.find("POST" if is_post else "GET", path)
        except NotFound:
            grant.check_read_all()  # rule 2
            raise
        self._check_role(grant, route.access)
        body = await self._body(request) if is_post else b""
        web_request = WebRequest(names, read_query(request.url.query), body, role_of(grant))
        return await self._context.call(route.handler, web_request)

    def _check_role(self, grant: Grant, wanted: Role | None) -> None:
        """Raise if a request needs more than its grant allows; `None` needs nothing."""
        if wanted is Role.READ:
            grant.check_read_all()
        elif wanted is Role.ADMIN:
            if not grant.is_admin and not self._context.gate.asks_readers:
                # No token was required so far: the page asks the user for one on this error.
                hint = "use the token in the store's admin.token"
                raise Unauthenticated("this needs the admin token", hint=hint)
            grant.check_admin()

    async def _body(self, request: Request) -> bytes:
        """Return the body: JSON of a declared, bounded length (rule 3)."""
        headers = request.headers
        kind = headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":
            wrong = InvalidInput("the body is not JSON", hint="send `Content-Type: application/json`")
            raise HttpError(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, wrong)
        if "transfer-encoding" in headers or "content-length" not in headers:
            raise HttpError(HTTPStatus.LENGTH_REQUIRED, InvalidInput("the request has no Content-Length"))
        return await self._context.read_body(request, BODY_BYTES_MAX)

    # ── live updates ──────────────────────────────────────────────────────────────────────────────────────────────────
    async def _events(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the hub's events until the page is closed, its token expires or the server stops."""
        grant = self._context.gate.grant(Request(scope))
        grant.check_read_all()
        loop, news = asyncio.get_running_loop(), asyncio.Event()
        try:
            place = await self._context.call(self._hub.join, _from_other_threads(loop, news))
        except Overloaded:
            self._context.limits.hit("events")
            raise
        leaving = loop.create_task(_left(receive, news))
        try:
            headers = [(b"content-type", b"text/event-stream"), (b"connection", b"close")]
            await send({"type": "http.response.start", "status": int(HTTPStatus.OK), "headers": headers})
            await _send_events(place, news, lambda: leaving.done() or grant.is_expired, send)
            await send({"type": "http.response.body"})
        finally:
            leaving.cancel()
            self._hub.leave(place)


async def _send_events(place: Subscriber, news: asyncio.Event, is_over: Callable[[], bool], send: Send) -> None:
    while not is_over() and (events := place.take()) is not None:
        if events:
            message: Message = {"type": "http.response.body", "body": events, "more_body": True}
            await send(message)
        else:
            await news.wait()
            news.clear()


async def _left(receive: Receive, news: asyncio.Event) -> None:
    """Wait until the page is closed."""
    while (await receive())["type"] != "http.disconnect":
        pass
    news.set()


def _from_other_threads(loop: asyncio.AbstractEventLoop, news: asyncio.Event) -> Callable[[], None]:
    def notify() -> None:
        loop.call_soon_threadsafe(news.set)

    return notify


def _asset(path: str, headers: Headers) -> Response | None:
    name = INDEX if path == "/" else path.removeprefix("/static/") if path.startswith("/static/") else ""
    return asset_answer(name, headers.get("if-none-match")) if name else None


def role_of(grant: Grant) -> Role | None:
    """Return the role of a grant in the dashboard, which shows the whole store."""
    if grant.is_admin:
        return Role.ADMIN
    return Role.READ if grant.everywhere else None
