"""Access control of the HTTP server.

Terms
  host     the name in the request's `Host` header: the name by which the browser found the server
  origin   the site whose page sends the request; browsers send it with every POST

Rules
  1. A host that is not ours is refused before anything else: a foreign page whose name was pointed at this machine (DNS
     rebinding) must not pass as our own. Our hosts are localhost, every IP address, `service.http_hosts`, and such a name with
     one more label in front, which is a database (W4).
  2. A page of another origin is refused, whatever it requests; programs, which send no origin, are not. A link that a user
     follows there is answered if it leads to the dashboard or to a version as a file: no page sees the answer, and nothing is
     changed. Other addresses are for programs, and some of them record what they answer, also to a GET.
  3. The token is accepted in `Authorization` only: not in a URL, which is logged and remembered, and not in a cookie, which a
     browser would add to a foreign page's request.
  4. Without a token: everything through a Unix socket, whose file permissions admit the caller; on loopback reading, unless
     `service.http_ask_readers` forbids it, and writing, if `service.http_anonymous_writes` allows it; nothing elsewhere.
  5. An invalid token is refused even where none is needed: its bearer expects to be authenticated.

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
"""What clients send instead of a token that they were not given: `libsql-client` sends `Bearer None`, the Go client an empty
one in the hello of a WebSocket."""
LOOPBACK_WRITES = Grant(holder="loopback", everywhere=Access.WRITE, is_anonymous=True)
LOOPBACK_READS = Grant(holder="loopback", everywhere=Access.READ, is_anonymous=True)


class Headers(Protocol):
    """The headers of a request; names are case-insensitive."""

    def get(self, name: str, /) -> str | None: ...


class HasHeaders(Protocol):
    """A request or a WebSocket."""

    @property
    def headers(self) -> Headers: ...


class WebGate:
    """Checks the headers of requests."""

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
        """Off for a Unix socket: no browser reaches it, so its host does not matter."""

    @property
    def asks_readers(self) -> bool:
        """Whether reading needs a token."""
        return self._anonymous.everywhere < Access.READ

    # ── authentication ────────────────────────────────────────────────────────────────────────────────────────────────
    def grant(self, connection: HasHeaders) -> Grant:
        """Return what a request may do by its token, or without one (rules 3 to 5)."""
        shown = connection.headers.get("authorization")
        if shown is None:
            return self._anonymous
        token = bearer(shown)
        is_empty = token in NO_TOKEN and shown.lower().startswith("bearer")
        return self._anonymous if is_empty else self.grant_of_token(token)

    def grant_of_token(self, token: str | None) -> Grant:
        """Return what a token allows, however it was received; `None`: there is none."""
        if token is None:
            return self._anonymous
        return self.tokens.grant(token)

    # ── host and origin ───────────────────────────────────────────────────────────────────────────────────────────────
    def check_site(self, headers: Headers, linked_path: str = "") -> None:
        """Refuse hosts that are not ours, against DNS rebinding, and pages of other origins (rules 1 and 2). `linked_path`: the
        path of a request that reads."""
        host = headers.get("host") or ""
        if self._checks_host and not self._is_ours(host):
            hint = "use an IP address, or add the name to service.http_hosts in quire.toml"
            raise HttpError(HTTPStatus.FORBIDDEN, AccessDenied("this host name is not allowed", hint=hint))
        origin = headers.get("origin")
        if origin is not None and _site(origin) != host.lower():
            raise HttpError(HTTPStatus.FORBIDDEN, AccessDenied("requests from pages of other sites are not allowed"))
        if (headers.get("sec-fetch-site") or "none") not in ("none", "same-origin") and not (
            is_linked(linked_path) and _follows_link(headers)
        ):
            raise HttpError(HTTPStatus.FORBIDDEN, AccessDenied("requests from pages of other sites are not allowed"))

    def database_label(self, headers: Headers) -> str:
        """Return the database that the name in `Host` begins with, as in shop.localhost; empty if it has none (W4)."""
        name = _host_name(headers.get("host") or "")
        label, _, rest = name.partition(".")
        return label if rest in self._hosts and name not in self._hosts else ""

    def _is_ours(self, host: str) -> bool:
        if not host.strip():
            return True  # no browser sends an empty host; some clients do, and HTTP allows it
        name = _host_name(host)
        if not name:
            return False
        if name in self._hosts or name.partition(".")[2] in self._hosts:
            return True
        try:
            ipaddress.ip_address(name)
        except ValueError:
            return False
        return True  # a browser sends an address only if it connected to that address


def is_linked(path: str) -> bool:
    """Return whether pages of other sites may have links to an address.

    >>> [is_linked(path) for path in ("/", "/db/shop@monday.sqlite", "/info", "/db/shop/info", "")]
    [True, True, False, False, False]
    """
    return path == "/" or (path.startswith("/db/") and path.endswith(".sqlite"))


def _follows_link(headers: Headers) -> bool:
    """Return whether a browser will show the answer as a separate page, as after a click on a link."""
    return headers.get("sec-fetch-mode") == "navigate" and headers.get("sec-fetch-dest") == "document"


@lru_cache(maxsize=64)  # few distinct names; bounded because each may be as long as a request's head
def _host_name(host: str) -> str:
    """Return the name in `Host`, without its port; empty if it is invalid."""
    try:
        return (urlsplit(f"//{host}").hostname or "").rstrip(".")
    except ValueError:
        return ""


def _site(origin: str) -> str | None:
    """Return the host and port in `Origin`; `None` if it has none."""
    try:
        return urlsplit(origin).netloc.lower() or None
    except ValueError:
        return None


def is_loopback(host: str) -> bool:
    """Return whether an address is reachable from this machine only.

    >>> [is_loopback(host) for host in ("localhost", "127.0.0.1", "::1", "0.0.0.0", "data.lan")]
    [True, True, True, False, False]
    """
    if host == LOCALHOST:
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
