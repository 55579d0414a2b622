"""The application: the routes of every part, the dashboard behind them, and what holds for all of them around it.

Order: versions as files, the parts (SQL, replicas), then the dashboard, which answers everything that nobody else does.
"""

from __future__ import annotations

from collections.abc import Sequence
from http import HTTPStatus

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response as StarletteResponse
from starlette.types import ASGIApp

from quire.core.errors import InvalidInput, NotFound, QuireError
from quire.service.replicas.routes import ReplicaPart
from quire.service.sql.routes import SqlPart
from quire.service.web.answers import Response, error_answer
from quire.service.web.context import WebContext, WebPart
from quire.service.web.edge import Edge
from quire.service.web.version_files import VersionFiles


def make_parts(context: WebContext) -> tuple[WebPart, ...]:
    """The parts of the HTTP side; the first that has an address answers it."""
    return VersionFiles(context), SqlPart(context), ReplicaPart(context)


def build_app(context: WebContext, parts: Sequence[WebPart], dashboard: ASGIApp) -> Starlette:
    """The application over one store."""
    app = Starlette(
        routes=[route for part in parts for route in part.routes()],
        middleware=[Middleware(Edge, context)],
        exception_handlers={HTTPException: _not_routed},
    )
    app.router.redirect_slashes = False
    app.router.default = dashboard
    return app


def starlette_answer(answer: Response) -> StarletteResponse:
    """An answer of ours, for endpoints that return Starlette's."""
    headers = {**answer.headers, "content-type": answer.content_type}
    return StarletteResponse(answer.body, int(answer.status), headers)


async def _not_routed(_: Request, error: Exception) -> StarletteResponse:
    """What Starlette refuses, told as everything else is."""
    status = error.status_code if isinstance(error, HTTPException) else HTTPStatus.BAD_REQUEST
    headers = dict(error.headers or {}) if isinstance(error, HTTPException) else {}
    wrong: QuireError = InvalidInput("this address has another method", hint=headers.get("Allow", ""))
    if status == HTTPStatus.NOT_FOUND:
        wrong = NotFound("there is nothing at this address", hint="docs/sql-server.md lists the addresses")
    answer = error_answer(wrong, status)
    return starlette_answer(Response(answer.body, answer.content_type, status, headers))
