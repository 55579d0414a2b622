"""Who may ask the HTTP side for what.

Terms
  host     the name in the request's `Host`: by which the browser believes to have found us
  origin   the site whose page asks; browsers say it with every POST

Rules
  1. A name that is not ours is refused before anything else: a foreign page whose name was pointed at this machine (DNS
     rebinding) must not be taken for our own. Ours are localhost, every plain address, and `service.http_hosts`, and what has
     one more label before such a name: it is a database's (W4).
  2. A page of another origin is refused, whatever it asks for; programs, which name no origin, are not.
  3. The token comes in `Authorization` only: never in an address, which is logged and remembered, and never in a cookie, which
     a browser would add to a foreign page's request.
  4. Without a token: everything through a Unix socket, whose file permissions let the caller in; on loopback reading, unless
     `service.http_ask_readers` says otherwise, and writing, if `service.http_anonymous_writes` says so; nothing anywhere else.
  5. A token that is wrong is refused even where none is needed: its owner believes to be somebody.

Threads: any; constant after construction. Raises `HttpError`, `Unauthenticated`.
"""

from __future__ import annotations

import ipaddress
from functools import lru_cache
from http import HTTPStatus
from typing import Protocol
from urllib.parse import urlsplit

from quire.core.errors import AccessDenied
from quire.service.grants import Access, Grant
from quire.service.signed_tokens import AcceptedTokens
from quire.service.tokens import bearer
from quire.service.web.answers import HttpError

LOCALHOST = "localhost"
NO_TOKEN = frozenset({"", "None", "null", "undefined"})
"""What clients send in the place of a token that they were not given: `libsql-client` sends `Bearer None`, that of Go an empty
one in the hello of a WebSocket."""
LOOPBACK_WRITES = Grant(holder="loopback", everywhere=Access.WRITE, is_anonymous=True)
LOOPBACK_READS = Grant(holder="loopback", everywhere=Access.READ, is_anonymous=True)


class Headers(Protocol):
    """The headers of a request, whatever the case of their names."""

    def get(self, name: str, /) -> str | None: ...


class HasHeaders(Protocol):
    """A request or a WebSocket."""

    @property
    def headers(self) -> Headers: ...


class WebGate:
    """Looks at the headers of a request."""

    def __init__(
        self,
        tokens: AcceptedTokens,
        *,
        anonymous: Grant = Grant.NOTHING,
        hosts: tuple[str, ...] = (),
        checks_host: bool = True,
    ) -> None:
        self.tokens = tokens
        self._anonymous = anonymous
        self._hosts = frozenset({LOCALHOST, *(host.lower().rstrip(".") for host in hosts)})
        self._checks_host = checks_host
        """A browser does not reach a Unix socket, so what the name there is does not matter."""

    @property
    def asks_readers(self) -> bool:
        """Whether reading needs a token here."""
        return self._anonymous.everywhere < Access.READ

    # ── who asks ──────────────────────────────────────────────────────────────────────────────────────────────────────
    def grant(self, connection: HasHeaders) -> Grant:
        """What the token of a request, or the want of one, allows (rules 3 to 5)."""
        shown = connection.headers.get("authorization")
        if shown is None:
            return self._anonymous
        token = bearer(shown)
        is_empty = token in NO_TOKEN and shown.lower().startswith("bearer")
        return self._anonymous if is_empty else self.grant_of_token(token)

    def grant_of_token(self, token: str | None) -> Grant:
        """What a token allows, however it came here; `None`: none was shown."""
        if token is None:
            return self._anonymous
        return self.tokens.grant(token)

    # ── from where ────────────────────────────────────────────────────────────────────────────────────────────────────
    def check_site(self, headers: Headers) -> None:
        """Refuse names that are not ours, against DNS rebinding, and pages of other origins (rules 1 and 2)."""
        host = headers.get("host") or ""
        if self._checks_host and not self._is_ours(host):
            hint = "ask by address, or add the name to service.http_hosts in quire.toml"
            raise HttpError(HTTPStatus.FORBIDDEN, AccessDenied("the store is not known by this name", hint=hint))
        origin = headers.get("origin")
        if origin is not None and _site(origin) != host.lower():
            raise HttpError(HTTPStatus.FORBIDDEN, AccessDenied("a page of another site may not ask"))
        if (headers.get("sec-fetch-site") or "none") not in ("none", "same-origin"):
            raise HttpError(HTTPStatus.FORBIDDEN, AccessDenied("a page of another site may not ask"))

    def database_label(self, headers: Headers) -> str:
        """The database that the name in `Host` begins with, as in shop.localhost; empty if it has none (W4)."""
        name = _host_name(headers.get("host") or "")
        label, _, rest = name.partition(".")
        return label if rest in self._hosts and name not in self._hosts else ""

    def _is_ours(self, host: str) -> bool:
        if not host.strip():
            return True  # no browser sends an empty one; some clients do, and HTTP allows it
        name = _host_name(host)
        if not name:
            return False
        if name in self._hosts or name.partition(".")[2] in self._hosts:
            return True
        try:
            ipaddress.ip_address(name)
        except ValueError:
            return False
        return True  # a browser shows an address only if that is where it went


@lru_cache(maxsize=64)  # few names, and each may be as long as a head
def _host_name(host: str) -> str:
    """The name in `Host`, without its port; empty if it is none."""
    try:
        return (urlsplit(f"//{host}").hostname or "").rstrip(".")
    except ValueError:
        return ""


def _site(origin: str) -> str | None:
    """The host and port in `Origin`; `None` if it names none."""
    try:
        return urlsplit(origin).netloc.lower() or None
    except ValueError:
        return None


def is_loopback(host: str) -> bool:
    """Whether only this machine can come in by an address.

    >>> [is_loopback(host) for host in ("localhost", "127.0.0.1", "::1", "0.0.0.0", "data.lan")]
    [True, True, True, False, False]
    """
    if host == LOCALHOST:
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
