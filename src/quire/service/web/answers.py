"""Answers of the HTTP server: values, and their JSON.

Rules
  1. JSON is what `core.plain` returns for a value, with one difference: an integer that a browser cannot represent (beyond
     2^53) is text, because JavaScript would round it silently.
  2. An error is sent as `{"error", "message", "hint"}` with a status that shows the caller how to react; internal coordinates
     are not sent.

Threads: any; pure functions.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any

import msgspec

from quire.core.errors import (
    AccessDenied,
    Conflict,
    InvalidInput,
    NotFound,
    Overloaded,
    QuireError,
    ReadOnly,
    StoreClosed,
    StoreUnusable,
    TimedOut,
    Unauthenticated,
    Unavailable,
)
from quire.core.json_values import plain

JSON = "application/json; charset=utf-8"

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)

SECURITY_HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "x-frame-options": "DENY",
}
"""Headers of every answer: they keep other sites, caches and type guessing out."""
NUMBER_MAX = 2**53 - 1

_STATUS: tuple[tuple[type[QuireError], HTTPStatus], ...] = (
    (Unauthenticated, HTTPStatus.UNAUTHORIZED),
    (AccessDenied, HTTPStatus.FORBIDDEN),
    (ReadOnly, HTTPStatus.FORBIDDEN),
    (InvalidInput, HTTPStatus.BAD_REQUEST),
    (NotFound, HTTPStatus.NOT_FOUND),
    (Conflict, HTTPStatus.CONFLICT),
    (Overloaded, HTTPStatus.SERVICE_UNAVAILABLE),
    (TimedOut, HTTPStatus.GATEWAY_TIMEOUT),
    (Unavailable, HTTPStatus.SERVICE_UNAVAILABLE),
    (StoreClosed, HTTPStatus.SERVICE_UNAVAILABLE),
    (StoreUnusable, HTTPStatus.SERVICE_UNAVAILABLE),
)


@dataclass(frozen=True, slots=True)
class Response:
    """A whole answer."""

    body: bytes
    content_type: str = JSON
    status: int = HTTPStatus.OK
    headers: dict[str, str] = field(default_factory=dict)


class HttpError(Exception):
    """A request that is refused, with the status that states why. Never leaves the HTTP server."""

    def __init__(self, status: HTTPStatus, error: QuireError) -> None:
        super().__init__(error.what)
        self.status = status
        self.error = error


def json_answer(value: Any, status: int = HTTPStatus.OK) -> Response:
    """Return a value as a JSON answer."""
    return Response(json_bytes(value), status=status)


def json_bytes(value: Any) -> bytes:
    """Encode a value as JSON (rule 1).

    >>> json_bytes({"lsn": 7, "crc64": 2**63})
    b'{"lsn":7,"crc64":"9223372036854775808"}'
    """
    return msgspec.json.encode(_safe(plain(value)))


def error_answer(error: QuireError, status: int | None = None) -> Response:
    """Return the answer for an error (rule 2)."""
    body = {"error": type(error).__name__, "message": error.what, "hint": error.hint}
    return json_answer(body, status_of(error) if status is None else status)


def status_of(error: QuireError) -> HTTPStatus:
    """Return the HTTP status of an error.

    >>> status_of(NotFound("no such thing")).value
    404
    """
    return next((status for kind, status in _STATUS if isinstance(error, kind)), HTTPStatus.INTERNAL_SERVER_ERROR)


def _safe(value: Any) -> Any:
    """Replace integers that JavaScript would round by text (rule 1)."""
    if isinstance(value, dict):
        return {name: _safe(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_safe(item) for item in value]
    if isinstance(value, int) and abs(value) > NUMBER_MAX:
        return str(value)
    return value
