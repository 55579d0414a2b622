"""The headers of a request, made once by the edge for all who look at them.

Starlette's own search the list, and raise and catch an error for each header that is absent. Most of those that are asked for
are: a request without a body and a token is asked for nine.
"""

from __future__ import annotations

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.types import Scope

SCOPE_KEY = "quire.headers"


class RequestHeaders(Headers):
    """Starlette's, with a table for `get`. Of several headers with one name the first counts, as there."""

    def __init__(self, scope: Scope) -> None:
        super().__init__(scope=scope)
        self._first = {name.decode("latin-1"): value.decode("latin-1") for name, value in reversed(self._list)}
        scope[SCOPE_KEY] = self

    def get(self, name: str, default: str | None = None) -> str | None:  # type: ignore[override]  # no other types here
        """A header by its name in lower case."""
        return self._first.get(name, default)


class EdgeRequest(Request):
    """A request that has passed the edge."""

    @property
    def headers(self) -> Headers:
        """Those that the edge has read."""
        headers: Headers = self.scope[SCOPE_KEY]
        return headers
