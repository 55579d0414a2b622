"""One connection: requests in, answers out, by the rules of the gate.

Rules
  1. Host and origin are looked at first, then the token, then the address: who is refused learns nothing of what is there.
  2. A body is at most `BODY_BYTES_MAX`, of a length that is said ahead, and JSON; a request whose body was not read ends its
     connection.
  3. Every answer carries the headers that keep other sites, caches and type guessing out.
  4. A bug is told as `InternalError`; tracebacks stay here.
  5. Who is silent for `IDLE_SECONDS`, or takes longer than that to be sent something, is hung up on.

Threads: one per connection, made by the server.
"""

from __future__ import annotations

import socket
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from typing import TYPE_CHECKING, Any, cast
from urllib.parse import urlsplit

from quire.core.errors import InternalError, InvalidInput, NotFound, QuireError
from quire.core.events import emit
from quire.service.messages import Role
from quire.service.web.answers import HttpError, Response, error_answer
from quire.service.web.assets import POLICY, asset_answer
from quire.service.web.hub import SEND_SECONDS
from quire.service.web.routes import WebRequest, read_query

if TYPE_CHECKING:
    from quire.service.web.server import Web

BODY_BYTES_MAX = 64 * 1024
IDLE_SECONDS = 30.0
EVENTS = "/api/events"
INDEX = "index.html"

HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "X-Frame-Options": "DENY",
}


class HttpConnection(BaseHTTPRequestHandler):
    """The standard library reads the request; everything else is here."""

    protocol_version = "HTTP/1.1"
    timeout = IDLE_SECONDS
    server_version = "quire"
    sys_version = ""

    @property
    def web(self) -> Web:
        return cast("Web", cast(Any, self.server).web)

    def do_GET(self) -> None:
        self._answer("GET")

    def do_HEAD(self) -> None:
        self._answer("GET")

    def do_POST(self) -> None:
        self._answer("POST")

    # ── requests ──────────────────────────────────────────────────────────────────────────────────────────────────────
    def _answer(self, method: str) -> None:
        parts = urlsplit(self.path)
        try:
            if method == "GET" and parts.path == EVENTS and self.command == "GET":
                self._events()
                return
            answer = self._respond(method, parts.path, parts.query)
        except HttpError as refused:
            self.web.refusals.add(refused.error, status=int(refused.status), peer=self.client_address[0])
            answer = error_answer(refused.error, refused.status)
        except QuireError as error:
            answer = error_answer(error)
        except Exception as error:
            emit("error", "web.bug", where=parts.path[:80], error=f"{type(error).__name__}: {error}")
            answer = error_answer(InternalError(f"a bug at the owner: {type(error).__name__}"))
        self._send(answer)

    def _respond(self, method: str, path: str, query: str) -> Response:
        gate = self.web.gate
        gate.check_site(self.headers)
        if method == "GET" and (asset := self._asset(path)) is not None:
            return asset  # the page itself holds no secret: it must load before somebody can show a token
        role = gate.role(self.headers)
        try:
            route, names = self.web.routes.find(method, path)
        except NotFound:
            gate.need(role, Role.READ)  # rule 1
            raise
        gate.need(role, route.access)
        body = self._body() if method == "POST" else b""
        return route.handler(WebRequest(names, read_query(query), body, role))

    def _asset(self, path: str) -> Response | None:
        name = INDEX if path == "/" else path.removeprefix("/static/") if path.startswith("/static/") else ""
        return asset_answer(name, self.headers.get("If-None-Match")) if name else None

    def _body(self) -> bytes:
        """The body: JSON of a declared, bounded length (rule 2)."""
        kind = (self.headers.get("Content-Type") or "").partition(";")[0].strip().lower()
        if kind != "application/json":
            wrong = InvalidInput("the body is not JSON", hint="Content-Type: application/json")
            raise HttpError(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, wrong)
        length = self.headers.get("Content-Length") or ""
        if self.headers.get("Transfer-Encoding") or not (length.isascii() and length.isdecimal() and len(length) < 10):
            raise HttpError(HTTPStatus.LENGTH_REQUIRED, InvalidInput("the length of the body is not said ahead"))
        if int(length) > BODY_BYTES_MAX:
            wrong = InvalidInput("the body is too long", max=BODY_BYTES_MAX)
            raise HttpError(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, wrong)
        body = self.rfile.read(int(length))
        self._body_read = True
        return body

    # ── live updates ──────────────────────────────────────────────────────────────────────────────────────────────────
    def _events(self) -> None:
        """Send what the hub tells until the page, or the store, is gone."""
        gate = self.web.gate
        gate.check_site(self.headers)
        gate.need(gate.role(self.headers), Role.READ)
        place = self.web.hub.join()
        self.web.count()
        self.close_connection = True
        dropped = False
        try:
            # A small buffer, or the kernel would keep megabytes for a page that does not read.
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 64 * 1024)
            self.connection.settimeout(SEND_SECONDS)
            self.send_response(HTTPStatus.OK)
            self._send_headers(
                {"Content-Type": "text/event-stream", "Cache-Control": "no-store", "Connection": "close"}
            )
            while (events := place.take()) is not None:
                self.wfile.write(events)
        except TimeoutError:
            dropped = True  # it does not read
        except OSError:
            pass  # the page is closed
        finally:
            self.web.hub.leave(place, dropped=dropped)

    # ── answers ───────────────────────────────────────────────────────────────────────────────────────────────────────
    def _send(self, answer: Response) -> None:
        self.web.count(failed=answer.status >= HTTPStatus.BAD_REQUEST)
        has_body = bool(self.headers.get("Content-Length") or self.headers.get("Transfer-Encoding"))
        if has_body and not getattr(self, "_body_read", False):
            self.close_connection = True
        self._body_read = False
        headers = {"Cache-Control": "no-store", **answer.headers, "Content-Type": answer.content_type}
        if answer.status == HTTPStatus.UNAUTHORIZED:
            headers["WWW-Authenticate"] = 'Bearer realm="quire"'
        if answer.status != HTTPStatus.NOT_MODIFIED:
            headers["Content-Length"] = str(len(answer.body))
        if self.close_connection:
            headers["Connection"] = "close"
        self.send_response(answer.status)
        self._send_headers(headers)
        if self.command != "HEAD":
            self.wfile.write(answer.body)

    def _send_headers(self, headers: dict[str, str]) -> None:
        for name, value in (HEADERS | headers).items():
            self.send_header(name, value)
        self.end_headers()

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:  # noqa: ARG002
        """What the standard library refuses (a line too long, an unknown method) is told as everything else is."""
        self.close_connection = True
        if not hasattr(self, "headers"):
            self.headers = cast(Any, {})
        if not getattr(self, "request_version", ""):
            self.request_version = "HTTP/1.0"
        self.command = self.command or "GET"
        self._send(error_answer(InvalidInput(message or "the request cannot be read"), code))

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the name is the standard library's
        """Requests are counted, not logged: an address may be long, and a log is not asked for."""
