"""Where the HTTP server listens: an address, its socket, its certificate.

Addresses: `PORT` (on loopback), `HOST:PORT`, `http://HOST:PORT`, `https://HOST:PORT` (an IPv6 address in brackets; port 0 is a
free one), and `http+unix:///PATH`, a Unix socket of mode 0600: a process that can open it may do everything.

Raises `InvalidInput` for an address, `InvalidConfig` for certificates.
"""

from __future__ import annotations

import socket
import ssl
from dataclasses import dataclass
from urllib.parse import urlsplit

from quire.core.errors import InvalidConfig, InvalidInput
from quire.service.sockets import SocketPath, binding
from quire.service.tokens import Credentials

HTTP, HTTPS, UNIX = "http", "https", "http+unix"
LOOPBACK = "127.0.0.1"
BACKLOG = 128
TLS_MINIMUM = ssl.TLSVersion.TLSv1_2


@dataclass(frozen=True, slots=True)
class WebAddress:
    """An address to listen at."""

    scheme: str
    host: str = ""
    port: int = 0
    path: str = ""
    """The path of a Unix socket."""


def parse_address(address: str) -> WebAddress:
    """Parse an address.

    >>> parse_address("7448")
    WebAddress(scheme='http', host='127.0.0.1', port=7448, path='')
    >>> parse_address("https://[::1]:0")
    WebAddress(scheme='https', host='::1', port=0, path='')
    >>> parse_address("http+unix:///run/quire/web.sock").path
    '/run/quire/web.sock'
    """
    if address.isascii() and address.isdecimal():
        address = f"{LOOPBACK}:{address}"
    try:
        parts = urlsplit(address if "://" in address else f"{HTTP}://{address}")
        port = parts.port
    except ValueError:
        parts, port = urlsplit(""), None
    if parts.scheme == UNIX and not parts.netloc and parts.path.startswith("/"):
        return WebAddress(UNIX, path=parts.path)
    if parts.scheme not in (HTTP, HTTPS) or not parts.hostname or port is None or parts.path not in ("", "/"):
        hint = "PORT, HOST:PORT, http://HOST:PORT, https://HOST:PORT or http+unix:///PATH"
        raise InvalidInput("cannot listen on this address", hint=hint, address=address)
    return WebAddress(parts.scheme, parts.hostname, port)


def bind(address: WebAddress) -> tuple[socket.socket, str]:
    """Bind an address; return (the listening socket, its address as clients write it)."""
    if address.scheme == UNIX:
        place = SocketPath(address.path, "")
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            with binding(place) as path:
                listener.bind(path)
                listener.listen(BACKLOG)
        except BaseException:
            listener.close()
            raise
        return listener, f"{UNIX}://{address.path}"
    listener = _bind_tcp(address)
    shown = f"[{address.host}]" if ":" in address.host else address.host
    return listener, f"{address.scheme}://{shown}:{listener.getsockname()[1]}"


def _bind_tcp(address: WebAddress) -> socket.socket:
    listener = socket.socket(socket.AF_INET6 if ":" in address.host else socket.AF_INET, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((address.host, address.port))
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise InvalidInput(
            f"cannot listen: {error.strerror or error}",
            hint="choose another port; 0 picks a free one",
            address=f"{address.host}:{address.port}",
        ) from error
    return listener


def tls_context(address: WebAddress, credentials: Credentials) -> ssl.SSLContext | None:
    """Return the TLS context of an https address; `None` for others."""
    given = bool(credentials.tls_cert_file), bool(credentials.tls_key_file)
    if address.scheme != HTTPS:
        if any(given):
            raise InvalidConfig(
                "a certificate can only be used with https://", hint="listen on https://, or omit the certificate"
            )
        return None
    if not all(given):
        raise InvalidConfig(
            "TLS needs a certificate and its key",
            hint="give tls_cert_file and tls_key_file, on the command line `--tls-cert` and `--tls-key`",
        )
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.minimum_version = TLS_MINIMUM
    context.set_alpn_protocols(["http/1.1"])
    try:
        context.load_cert_chain(credentials.tls_cert_file, credentials.tls_key_file)
    except (OSError, ssl.SSLError) as error:
        hint = "name a certificate and its key, as PEM files that this user may read"
        what = f"the certificate or its key cannot be read: {error.strerror or error}"
        raise InvalidConfig(what, hint=hint, path=credentials.tls_cert_file) from error
    return context
