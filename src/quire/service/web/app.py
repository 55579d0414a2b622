"""The application: the routes of every part, the dashboard behind them, and what holds for all of them around it.

Order: versions as files, the parts (SQL, replicas, calls of quire's own clients), then the dashboard, which answers everything
that nobody else does.
"""

from __future__ import annotations

from collections.abc import Sequence

from starlette.applications import Starlette
from starlette.responses import Response as StarletteResponse
from starlette.types import ASGIApp

from quire.service.replicas.routes import ReplicaPart
from quire.service.sql.routes import SqlPart
from quire.service.web.answers import Response
from quire.service.web.calls import CallPart
from quire.service.web.context import WebContext, WebPart
from quire.service.web.edge import Edge
from quire.service.web.version_files import VersionFiles


def make_parts(context: WebContext) -> tuple[WebPart, ...]:
    """The parts of the HTTP side; the first that has an address answers it."""
    return VersionFiles(context), SqlPart(context), ReplicaPart(context), CallPart(context)


class Application(Starlette):
    """Starlette's routing with nothing but the edge around it: that answers errors, and a layer less is paid by no request."""

    def __init__(self, context: WebContext, parts: Sequence[WebPart], dashboard: ASGIApp) -> None:
        super().__init__(routes=[route for part in parts for route in part.routes()])
        self._context = context
        self.router.redirect_slashes = False
        self.router.default = dashboard

    def build_middleware_stack(self) -> ASGIApp:
        """In place of Starlette's own: its layers for errors find none to answer."""
        return Edge(self.router.app, self._context)


def starlette_answer(answer: Response) -> StarletteResponse:
    """An answer of ours, for endpoints that return Starlette's."""
    headers = {**answer.headers, "content-type": answer.content_type}
    return StarletteResponse(answer.body, int(answer.status), headers)
