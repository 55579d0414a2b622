"""The application: the routes of every part, the dashboard as the fallback, and the edge around all of them.

Order: versions as files, the parts (SQL, replicas, calls of quire's own clients), then the dashboard, which answers all other
requests.
"""

from __future__ import annotations

from collections.abc import Sequence

from starlette.applications import Starlette
from starlette.types import ASGIApp

from quire.service.replicas.routes import ReplicaPart
from quire.service.sql.routes import SqlPart
from quire.service.web.calls import CallPart
from quire.service.web.context import WebContext, WebPart
from quire.service.web.edge import Edge
from quire.service.web.version_files import VersionFiles


def make_parts(context: WebContext) -> tuple[WebPart, ...]:
    """Create the parts of the HTTP server; the first that has a matching route answers."""
    return VersionFiles(context), SqlPart(context), ReplicaPart(context), CallPart(context)


class Application(Starlette):
    """Starlette's routing with only the edge around it: the edge answers errors, and no request pays for another layer."""

    def __init__(self, context: WebContext, parts: Sequence[WebPart], dashboard: ASGIApp) -> None:
        super().__init__(routes=[route for part in parts for route in part.routes()])
        self._context = context
        self.router.redirect_slashes = False
        self.router.default = dashboard

    def build_middleware_stack(self) -> ASGIApp:
        """Return the edge instead of Starlette's own layers, which would find no errors to handle."""
        return Edge(self.router.app, self._context)
