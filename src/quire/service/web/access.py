"""Who may ask the HTTP side for what.

Terms
  host     the name in the request's `Host`: by which the browser believes to have found us
  origin   the site whose page asks; browsers say it with every POST

Rules
  1. A name that is not ours is refused before anything else: a foreign page whose name was pointed at this machine (DNS
     rebinding) must not be taken for our own. Ours are localhost, every plain address, and `service.http_hosts`.
  2. A page of another origin is refused, whatever it asks for; programs, which name no origin, are not.
  3. The token comes in `Authorization` only: never in an address, which is logged and remembered, and never in a cookie, which
     a browser would add to a foreign page's request.
  4. Changing something needs the admin token, everywhere. Reading needs none on loopback unless `service.http_ask_readers`
     says so, and a token anywhere else.
  5. A token that is wrong is refused even where none is needed: its owner believes to be somebody.

Threads: any; constant after construction. Raises `HttpError`.
"""

from __future__ import annotations

import ipaddress
from http import HTTPStatus
from typing import Protocol
from urllib.parse import urlsplit

from quire.core.errors import AccessDenied
from quire.service.messages import Role
from quire.service.tokens import Tokens
from quire.service.web.answers import HttpError

LOCALHOST = "localhost"


class Headers(Protocol):
    """The headers of a request, whatever the case of their names."""

    def get(self, name: str, /) -> str | None: ...


class WebGate:
    """Looks at the headers of a request."""

    def __init__(self, tokens: Tokens, *, asks_readers: bool, hosts: tuple[str, ...] = ()) -> None:
        self._tokens = tokens
        self._hosts = frozenset({LOCALHOST, *(host.lower().rstrip(".") for host in hosts)})
        self.asks_readers = asks_readers

    def check_site(self, headers: Headers) -> None:
        """Refuse names that are not ours, against DNS rebinding, and pages of other origins (rules 1 and 2)."""
        host = headers.get("Host") or ""
        if not self._is_ours(host):
            hint = "ask by address, or add the name to service.http_hosts in quire.toml"
            raise HttpError(HTTPStatus.FORBIDDEN, AccessDenied("the store is not known by this name", hint=hint))
        origin = headers.get("Origin")
        if origin is not None and urlsplit(origin).netloc.lower() != host.lower():
            raise HttpError(HTTPStatus.FORBIDDEN, AccessDenied("a page of another site may not ask"))
        if (headers.get("Sec-Fetch-Site") or "none") not in ("none", "same-origin"):
            raise HttpError(HTTPStatus.FORBIDDEN, AccessDenied("a page of another site may not ask"))

    def _is_ours(self, host: str) -> bool:
        try:
            name = (urlsplit(f"//{host}").hostname or "").rstrip(".")
        except ValueError:
            return False
        if name in self._hosts:
            return True
        try:
            ipaddress.ip_address(name)
        except ValueError:
            return False
        return True  # a browser shows an address only if that is where it went

    def role(self, headers: Headers) -> Role | None:
        """What the request's token, or the want of one, allows; `None`: nothing (rules 3 to 5)."""
        shown = headers.get("Authorization")
        if shown is None:
            return None if self.asks_readers else Role.READ
        access = self._tokens.access(shown)
        if access is None:
            raise HttpError(HTTPStatus.UNAUTHORIZED, AccessDenied("the token is wrong", hint="see `admin.token`"))
        return access

    def need(self, role: Role | None, wanted: Role | None) -> None:
        """Refuse a request that wants more than its role allows; `None` wants nothing."""
        if wanted is None:
            return
        if role is None:
            hint = "show the token that is in the store's read.token or admin.token"
            raise HttpError(HTTPStatus.UNAUTHORIZED, AccessDenied("this needs a token", hint=hint))
        if wanted is Role.ADMIN and role is not Role.ADMIN:
            status = HTTPStatus.UNAUTHORIZED if not self.asks_readers else HTTPStatus.FORBIDDEN
            hint = "show the token that is in the store's admin.token"
            raise HttpError(status, AccessDenied("this needs the admin token", hint=hint))


def is_loopback(host: str) -> bool:
    """Whether only this machine can come in by an address.

    >>> [is_loopback(each) for each in ("localhost", "127.0.0.1", "::1", "0.0.0.0", "data.lan")]
    [True, True, True, False, False]
    """
    if host == LOCALHOST:
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
