"""Calls over HTTP, to the address that `quire serve --http` listens at: `POST /v1/call/ACTION` (docs/formats/wire.md).

An error of the HTTP server itself arrives as its JSON and becomes the error that it names. A server that is busy or closing,
and a proxy that cannot reach it, are tried again.

Threads: as in `carrier.py`. Raises what `carrier.py` raises, `InvalidInput` for a certificate that is not trusted, and
`Incompatible` for a server that is not an owner's.
"""

from __future__ import annotations

import os
import ssl
from http import HTTPStatus
from http.client import HTTPConnection, HTTPSConnection

import msgspec

from quire.core.decoding import UNDECODABLE, described
from quire.core.errors import Incompatible, InvalidInput
from quire.durable.files import translated
from quire.service.carrier import CallBroken, Carrier
from quire.service.frames import ANSWER_BYTES_MAX, CLIENT_BYTES
from quire.service.wire import CLIENT_HEADER, TRACE_HEADER, ErrorForm, RemoteError

PATH = "/v1/call/"
SCHEMES = {"http": 80, "https": 443}
CALL_TYPE = "application/msgpack"
REFUSAL_BYTES_MAX = 64 * 1024
AGAIN = frozenset({HTTPStatus.BAD_GATEWAY, HTTPStatus.SERVICE_UNAVAILABLE, HTTPStatus.GATEWAY_TIMEOUT})


class Refusal(msgspec.Struct, frozen=True):
    """An error in the form of the HTTP server (`web/answers.py`)."""

    error: str
    message: str
    hint: str = ""


class HttpCarrier(Carrier[HTTPConnection]):
    """Calls over HTTP or HTTPS."""

    def __init__(self, scheme: str, host: str, port: int | None, headers: dict[str, str], tls_ca_file: str) -> None:
        """`headers` are sent with every call: the client's id, its token, its wire version."""
        super().__init__()
        self._host = host
        self._port = port or SCHEMES[scheme]
        self._headers = {**headers, "content-type": CALL_TYPE}
        self._tls = _tls(tls_ca_file) if scheme == "https" else None

    def _after_fork(self) -> None:
        # The child is another client: as the same one it would use, and close, what the parent holds at the owner.
        self._headers[CLIENT_HEADER] = os.urandom(CLIENT_BYTES).hex()

    def _connect(self, seconds: float) -> HTTPConnection:
        if self._tls is None:
            connection = HTTPConnection(self._host, self._port, timeout=seconds)
        else:
            connection = HTTPSConnection(self._host, self._port, timeout=seconds, context=self._tls)
        try:
            connection.connect()
        except ssl.SSLCertVerificationError as error:
            connection.close()
            hint = "pass the CA certificate with tls_ca_file=…"
            raise InvalidInput(f"the server's certificate is not trusted: {error.verify_message}", hint=hint) from None
        except OSError as error:
            connection.close()
            raise CallBroken(str(error)) from None
        return connection

    def _exchange(self, connection: HTTPConnection, name: str, trace: str, body: bytes, seconds: float) -> bytes:
        if connection.sock is None:  # the server closed it with its last response
            connection.connect()
        connection.sock.settimeout(seconds)
        headers = {**self._headers, TRACE_HEADER: trace} if trace else self._headers
        connection.request("POST", PATH + name, body, headers)
        with connection.getresponse() as answer:
            is_ours = answer.status == HTTPStatus.OK and answer.headers.get_content_type() == CALL_TYPE
            bytes_max = ANSWER_BYTES_MAX if is_ours else REFUSAL_BYTES_MAX
            whole = answer.read(bytes_max + 1)
        if len(whole) > bytes_max:
            raise CallBroken(f"an answer of more than {bytes_max:,} bytes")
        if answer.length:  # a read with a limit returns what there is, without an error
            raise CallBroken("the connection broke during the answer")
        if is_ours:
            return whole
        raise _refused(answer.status, whole)


def _refused(status: int, body: bytes) -> Exception:
    """Return the error for a response that does not answer the call."""
    again = status in AGAIN
    try:
        refusal = msgspec.json.decode(body, type=described(Refusal))
        return RemoteError(ErrorForm(refusal.error, refusal.message, refusal.hint, {}, again))
    except UNDECODABLE:
        if again:
            return CallBroken(f"status {status}")
    hint = "check that this is the address of `quire serve --http`"
    return Incompatible("the server is not the owner of a quire store", hint=hint, status=status)


def _tls(ca_file: str) -> ssl.SSLContext:
    with translated(ca_file, "reading a certificate"):
        return ssl.create_default_context(cafile=ca_file or None)
