"""The messages of `POST /pull-updates`, as in Turso's sync engine.

A request is one message. An answer is a stream of messages, each prefixed with its length: a header, then one for each page.
The client applies everything it gets as one transaction. A body that ends early is an error to it, because the body is chunked.
Pages are numbered from 0, as in quire.

Threads: any; pure functions. Raises `InvalidInput`.
"""

from __future__ import annotations

from dataclasses import dataclass

from pyroaring import BitMap

from quire.core.errors import InvalidInput
from quire.service.replicas.protobuf import bytes_field, delimited, number_field, read_message

CONTENT_TYPE = "application/protobuf"
REQUEST_BYTES_MAX = 1 << 20
"""The longest request: only its bitmap of pages is long. 1 MiB selects any pages of a 32 GiB database."""
REVISION_BYTES_MAX = 256
LONG_POLL_MS_MAX = 60_000

SERVER_REVISION, CLIENT_REVISION, LONG_POLL_MS, PAGES, QUERY = 2, 3, 4, 5, 7
"""Field numbers of a request."""
PAGES_PROTOCOL = 1
"""States that pages are sent, not a logical log."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PullRequest:
    """A replica's request."""

    at: str = ""
    """The revision whose pages it wants; empty: the newest."""
    since: str = ""
    """The revision it has; empty: none, or pages of `at` regardless of what it has."""
    long_poll_ms: int = 0
    pages: BitMap | None = None
    """Only these pages; `None`: all that changed."""
    query: str = ""
    """Only pages that this statement reads."""


def read_request(data: bytes) -> PullRequest:
    """Decode the body of a request."""
    fields = read_message(data)
    selector = fields.get(PAGES, b"")
    return PullRequest(
        at=_text(fields, SERVER_REVISION),
        since=_text(fields, CLIENT_REVISION),
        long_poll_ms=min(_number(fields, LONG_POLL_MS), LONG_POLL_MS_MAX),
        pages=_bitmap(selector) if selector else None,
        query=_text(fields, QUERY, REQUEST_BYTES_MAX),
    )


def header_message(revision: str, size_pages: int) -> bytes:
    """Return the first message of an answer. Its field 6, "replace what you have", stays unset: clients refuse it with pages. A
    replica that gets every page and the size has replaced what it had."""
    return delimited(
        bytes_field(1, revision.encode())
        + number_field(2, size_pages)
        + bytes_field(3, b"")  # pages are sent unencoded: the client supports no encoding
        + number_field(8, PAGES_PROTOCOL)
    )


def page_message(page: int, image: bytes) -> bytes:
    """Return the message of one page."""
    return delimited(number_field(1, page) + bytes_field(2, image))


def _number(fields: dict[int, int | bytes], number: int) -> int:
    value = fields.get(number, 0)
    if not isinstance(value, int):
        raise InvalidInput("a field of the request has the wrong type", hint="upgrade the client", field=number)
    return value


def _text(fields: dict[int, int | bytes], number: int, bytes_max: int = REVISION_BYTES_MAX) -> str:
    value = fields.get(number, b"")
    if not isinstance(value, bytes) or len(value) > bytes_max:
        raise InvalidInput("a field of the request has the wrong type or is too long", field=number)
    try:
        return value.decode()
    except UnicodeDecodeError:
        raise InvalidInput("a field of the request is not text", field=number) from None


def _bitmap(value: int | bytes) -> BitMap:
    try:
        return BitMap.deserialize(value) if isinstance(value, bytes) else BitMap()
    except (ValueError, IndexError) as error:
        raise InvalidInput("the selected pages are not a roaring bitmap", cause=str(error)) from None
