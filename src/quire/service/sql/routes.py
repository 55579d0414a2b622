"""The addresses of Hrana over HTTP and WebSocket."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from starlette.routing import BaseRoute

from quire.service.web.context import WebContext

if TYPE_CHECKING:
    from prometheus_client import Metric


class SqlPart:
    """A part of the HTTP side."""

    def __init__(self, context: WebContext) -> None:
        self._context = context

    def routes(self) -> list[BaseRoute]:
        """Its addresses."""
        return []

    async def start(self) -> None:
        """The event loop runs."""

    async def close(self) -> None:
        """Give up what is open."""

    def collect(self) -> Iterable[Metric]:
        """Its figures."""
        return ()
