"""The headers of a request, parsed once by the edge for every later use.

Starlette's own headers search a list, and raise and catch an error for each absent header. Most headers that are looked up are
absent: nine of them in a request without a body and a token.
"""

from __future__ import annotations

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.types import Scope

SCOPE_KEY = "quire.headers"


class RequestHeaders(Headers):
    """Starlette's headers with a table for `get`. Of several headers with one name the first is used, as in Starlette."""

    def __init__(self, scope: Scope) -> None:
        super().__init__(scope=scope)
        self._first = {name.decode("latin-1"): value.decode("latin-1") for name, value in reversed(self._list)}
        scope[SCOPE_KEY] = self

    def get(self, name: str, default: str | None = None) -> str | None:  # type: ignore[override]  # no other types here
        """Return a header by its name in lower case."""
        return self._first.get(name, default)


class EdgeRequest(Request):
    """A request that has passed the edge."""

    @property
    def headers(self) -> Headers:
        """The headers that the edge has parsed."""
        headers: Headers = self.scope[SCOPE_KEY]
        return headers
