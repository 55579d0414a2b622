"""Versions as files: `GET /db/NAME@VERSION.sqlite`, whole or in ranges, for programs that read SQLite files over HTTP (W7).

Rules
  1. VERSION is a snapshot's name, an epoch or a time; without one it is the newest version of the database.
  2. `ETag` identifies the version. A client can revalidate its copy (`If-None-Match`), and gets further parts only of the
     version that it began with (`If-Range`).
  3. An epoch always names the same version, so it may be cached forever; a name or a time is revalidated each time.
  4. An answer is read and sent in pieces of `PIECE_BYTES`; the version is held until the last one is sent.

Threads: the event loop's; reading in the context's.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Iterable
from contextlib import suppress
from email.utils import formatdate
from http import HTTPStatus
from typing import TYPE_CHECKING
from urllib.parse import quote

from starlette.requests import Request
from starlette.responses import Response as StarletteResponse
from starlette.routing import BaseRoute, Route
from starlette.types import Receive, Scope, Send

from quire.core.errors import OutOfRange
from quire.core.events import emit
from quire.service.version_address import DatabaseVersion, base_name, parse_version
from quire.service.web.answers import error_answer
from quire.service.web.context import WebContext
from quire.service.web.open_versions import OpenVersion, OpenVersions
from quire.service.web.ranges import UnsatisfiableRange, parse_ranges

if TYPE_CHECKING:
    from prometheus_client import Metric

PIECE_BYTES = 256 * 1024
WARM_BYTES = 1 << 20
"""Ranges up to this size are read through the caches: a program reads its index pages repeatedly."""
SWEEP_SECONDS = 2.0
CONTENT_TYPE = "application/vnd.sqlite3"
FOR_GOOD = "private, max-age=31536000, immutable"
ASK_AGAIN = "private, no-cache"


class VersionFiles:
    """The part of the HTTP server that serves versions as files."""

    def __init__(self, context: WebContext) -> None:
        self._context = context
        self.versions = OpenVersions(context.store.manifest, context.store.pages)
        self._sweeper: asyncio.Task[None] | None = None

    def routes(self) -> list[BaseRoute]:
        """Return the only route."""
        return [Route("/db/{name}.sqlite", self._endpoint, methods=["GET", "HEAD"])]

    async def start(self) -> None:
        """Start the task that closes idle versions."""
        self._sweeper = asyncio.get_running_loop().create_task(self._sweep())

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(SWEEP_SECONDS)
            try:
                if self.versions.now:
                    await self._context.call(self.versions.close_idle)
            except Exception as error:  # if the loop ended, versions would stay open
                emit("error", "web.bug", where="versions", error=error)

    async def close(self) -> None:
        """Close every version."""
        if self._sweeper is not None:
            self._sweeper.cancel()
            with suppress(asyncio.CancelledError):
                await self._sweeper
        await self._context.call(self.versions.close)

    def collect(self) -> Iterable[Metric]:
        """Yield no metrics: requests are counted with all others."""
        return ()

    # ── requests ──────────────────────────────────────────────────────────────────────────────────────────────────────
    async def _endpoint(self, request: Request) -> StarletteResponse:
        name: str = request.path_params["name"]
        self._context.gate.grant(request).check(base_name(name))
        return _FileAnswer(self._context, self.versions, name)


class _FileAnswer(StarletteResponse):
    """Opens a version, sends the requested parts, and gives it back in any case."""

    def __init__(self, context: WebContext, versions: OpenVersions, name: str) -> None:
        super().__init__()
        self._context = context
        self._versions = versions
        self._name = name

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the whole answer."""
        version = await self._context.call(self._take)
        try:
            request = Request(scope, receive)
            headers = self._file_headers(version)
            if _is_known(request.headers.get("if-none-match"), version.tag):
                await self._send(send, HTTPStatus.NOT_MODIFIED, headers)
                return
            try:
                parts = self._parts(request, version)
            except UnsatisfiableRange as error:
                await self._refuse(send, error, version)
                return
            status, pieces, length = self._plan(version, parts, headers)
            headers["content-length"] = str(length)
            await self._send(send, status, headers, more=request.method != "HEAD")
            if request.method != "HEAD":
                await self._send_pieces(request, send, pieces)
        finally:
            self._versions.give_back(version)

    def _take(self) -> OpenVersion:
        wanted: DatabaseVersion = parse_version(self._context.store.manifest, self._name)
        return self._versions.take(wanted)

    def _file_headers(self, version: OpenVersion) -> dict[str, str]:
        return {
            "content-type": CONTENT_TYPE,
            "etag": version.tag,
            "cache-control": FOR_GOOD if version.is_fixed else ASK_AGAIN,
            "accept-ranges": "bytes",
            "last-modified": formatdate(version.reader.time_ms / 1000, usegmt=True),
            "content-disposition": f"attachment; filename*=UTF-8''{quote(self._name, safe='')}.sqlite",
            "x-quire-epoch": str(version.reader.lsn),
        }

    def _parts(self, request: Request, version: OpenVersion) -> list[range]:
        """Return the requested ranges of this version; none for the whole file (rule 2)."""
        range_header, if_range = request.headers.get("range"), request.headers.get("if-range")
        if range_header is None or (if_range is not None and if_range.strip() != version.tag):
            return []
        return parse_ranges(range_header, version.size)

    def _plan(
        self, version: OpenVersion, parts: list[range], headers: dict[str, str]
    ) -> tuple[HTTPStatus, AsyncIterator[bytes], int]:
        """Return (status, pieces to send, their length)."""
        if not parts:
            return HTTPStatus.OK, self._read(version, range(version.size)), version.size
        if len(parts) == 1:
            headers["content-range"] = _content_range(parts[0], version.size)
            return HTTPStatus.PARTIAL_CONTENT, self._read(version, parts[0]), len(parts[0])
        boundary = secrets.token_hex(16)
        headers["content-type"] = f"multipart/byteranges; boundary={boundary}"
        heads = [
            f"\r\n--{boundary}\r\nContent-Type: {CONTENT_TYPE}\r\n"
            f"Content-Range: {_content_range(part, version.size)}\r\n\r\n".encode()
            for part in parts
        ]
        end = f"\r\n--{boundary}--\r\n".encode()
        length = sum(len(head) + len(part) for head, part in zip(heads, parts)) + len(end)
        return HTTPStatus.PARTIAL_CONTENT, self._read_many(version, heads, parts, end), length

    async def _read(self, version: OpenVersion, part: range) -> AsyncIterator[bytes]:
        for start in range(part.start, part.stop, PIECE_BYTES):
            piece = range(start, min(start + PIECE_BYTES, part.stop))
            yield await self._context.call(self._versions.read, version, piece, cold=len(part) > WARM_BYTES)

    async def _read_many(
        self, version: OpenVersion, heads: list[bytes], parts: list[range], end: bytes
    ) -> AsyncIterator[bytes]:
        for head, part in zip(heads, parts):
            yield head
            async for piece in self._read(version, part):
                yield piece
        yield end

    # ── sending ───────────────────────────────────────────────────────────────────────────────────────────────────────
    async def _refuse(self, send: Send, error: UnsatisfiableRange, version: OpenVersion) -> None:
        answer = error_answer(OutOfRange(str(error), hint=f"the file has {version.size} bytes"))
        headers = {"content-type": answer.content_type, "content-range": f"bytes */{version.size}"}
        headers["content-length"] = str(len(answer.body))
        await self._send(send, HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE, headers, more=True)
        await send({"type": "http.response.body", "body": answer.body})

    async def _send(self, send: Send, status: HTTPStatus, headers: dict[str, str], *, more: bool = False) -> None:
        raw = [(name.encode(), value.encode("latin-1")) for name, value in headers.items()]
        await send({"type": "http.response.start", "status": int(status), "headers": raw})
        if not more:
            await send({"type": "http.response.body"})

    async def _send_pieces(self, request: Request, send: Send, pieces: AsyncIterator[bytes]) -> None:
        async for piece in pieces:
            await send({"type": "http.response.body", "body": piece, "more_body": True})
            if await request.is_disconnected():
                return  # the client is gone: do not read the rest
        await send({"type": "http.response.body"})


def _content_range(part: range, size: int) -> str:
    return f"bytes {part.start}-{part.stop - 1}/{size}"


def _is_known(header: str | None, tag: str) -> bool:
    """Return whether a client already has this version."""
    if header is None:
        return False
    return header.strip() == "*" or tag in (listed_tag.strip().removeprefix("W/") for listed_tag in header.split(","))
