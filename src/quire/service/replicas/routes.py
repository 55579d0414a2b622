"""The routes of embedded replicas (W6): Turso's sync engine pulls, libSQL's replicas sync.

  POST /pull-updates                     Turso: protobuf in, a stream of protobuf messages out
  GET  /info                             libSQL: the generation that a new replica begins with
  GET  /export/GENERATION                libSQL: the database as a file
  GET  /sync/GENERATION/FROM/TO          libSQL: frames of a write-ahead log

Each also exists below `/db/NAME`. Reading needs a grant for the database. Both kinds of replicas write by sending SQL to the
server (`/v2/pipeline`, `/v3/pipeline`), which needs a grant for writing. libSQL's offline writes (`POST /sync/…`) are refused.

Answers are streamed, `BATCH_PAGES` at a time, from a version that a lease holds. Their length is not announced: a chunked body
that ends early is an error to every client, one that is shorter than announced is not. At most `STREAMS_MAX` are in progress.

Threads: the event loop's; blocking calls run in threads.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from http import HTTPStatus
from typing import TYPE_CHECKING

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import BaseRoute, Route
from starlette.types import Receive, Scope, Send

from quire.core.errors import InvalidInput, Overloaded
from quire.durable.failpoints import hit
from quire.pages.pagestore import PageStore
from quire.pages.snapshot import Snapshot
from quire.service.replicas import pull_messages as messages
from quire.service.replicas.frames import EndOfFrames, FrameAnswers, FramesPlan, encode_frames, with_log
from quire.service.replicas.held_versions import HeldVersions
from quire.service.replicas.positions import Positions
from quire.service.replicas.pulls import PullPlan, history_of, open_replicated, plan_pull
from quire.service.version_address import base_name, find_or_create
from quire.service.web.answers import json_bytes
from quire.service.web.context import WebContext

if TYPE_CHECKING:
    from prometheus_client import Metric

BATCH_PAGES = 256
"""Pages that are read and sent at a time: 1 MiB."""
STREAMS_MAX = 64
POLL_SECONDS = 0.1
JSON, BINARY = "application/json", "application/octet-stream"

Encode = Callable[[dict[int, bytes], int, int], Iterable[bytes]]
"""(page → image, first, count) → the bytes for `count` of the pages."""


class ReplicaPart:
    """The part of the HTTP server that serves replicas."""

    def __init__(self, context: WebContext) -> None:
        manifest = context.store.manifest
        # constant after construction
        self._context = context
        self._held = HeldVersions()
        self._positions = Positions(manifest)
        self._frames = FrameAnswers(manifest, self._held, self._positions)
        # used in the event loop only
        self._streams = 0
        self._resyncs = 0
        self._pages_sent = 0
        self._bytes_sent = 0

    def routes(self) -> list[BaseRoute]:
        """Return the routes."""
        routes: list[BaseRoute] = []
        for prefix in ("", "/db/{database}"):
            routes += [
                Route(f"{prefix}/pull-updates", self.pull, methods=["POST"]),
                Route(f"{prefix}/info", self.info, methods=["GET"]),
                Route(f"{prefix}/export/{{generation:int}}", self.export, methods=["GET"]),
                Route(f"{prefix}/sync/{{generation:int}}/{{first:int}}/{{last:int}}", self.sync, methods=["GET"]),
                Route(f"{prefix}/sync/{{position:path}}", _refuse_push, methods=["POST"]),
            ]
        return routes

    async def start(self) -> None:
        """Do nothing: there is nothing to start."""

    async def close(self) -> None:
        """Release the held versions."""
        await self._context.call(self._held.close)

    def collect(self) -> Iterable[Metric]:
        """Yield the metrics."""
        yield GaugeMetricFamily("quire_replica_streams", "responses to replicas in progress", value=self._streams)
        for name, text, value in (
            ("quire_replica_pages_sent", "pages sent to replicas", self._pages_sent),
            ("quire_replica_bytes_sent", "bytes sent to replicas", self._bytes_sent),
            ("quire_replica_resyncs", "replicas with another history that were sent every page", self._resyncs),
        ):
            yield CounterMetricFamily(name, text, value=value)

    # ── rights and databases ──────────────────────────────────────────────────────────────────────────────────────────
    async def _name(self, request: Request) -> str:
        """Return the database that a request names, which its caller may read. The default one is created for a caller that may
        write it: a replica is often opened before anything was written."""
        grant = self._context.gate.grant(request)
        name = self._context.database(request)
        grant.check(base_name(name))
        if "@" in name:
            raise InvalidInput(
                "a replica follows a database, not one of its versions", hint="omit the @ and what follows it"
            )
        if name == self._context.settings.sql_default_database and grant.may(name, write=True):
            await self._context.call(find_or_create, self._context.store, name, create=True)
        return name

    def _open(self, name: str) -> PageStore:
        return open_replicated(self._context.store.pages, name)

    # ── Turso ─────────────────────────────────────────────────────────────────────────────────────────────────────────
    async def pull(self, request: Request) -> Response:
        """`POST /pull-updates`."""
        name = await self._name(request)
        asked = messages.read_request(await self._context.read_body(request, messages.REQUEST_BYTES_MAX))
        plan = await self._context.call(self._plan_pull, name, asked)
        if asked.long_poll_ms and asked.since and not asked.at and not plan.pages:
            plan = await self._wait_for_more(name, asked, plan)
        self._resyncs += plan.is_resync
        header = messages.header_message(plan.revision, plan.reader.size_pages)
        pages = plan.pages.to_array()

        def encode(images: dict[int, bytes], first: int, count: int) -> Iterable[bytes]:
            return [messages.page_message(page, images[page]) for page in pages[first : first + count]]

        return self._stream(plan.reader, pages, encode, messages.CONTENT_TYPE, header)

    def _plan_pull(self, name: str, asked: messages.PullRequest) -> PullPlan:
        return plan_pull(self._open(name), self._context.store.manifest, self._held, asked)

    async def _wait_for_more(self, name: str, asked: messages.PullRequest, plan: PullPlan) -> PullPlan:
        """Wait until there is a newer version, the client's time is over, or the server stops; return the new plan."""
        loop = asyncio.get_running_loop()
        try:
            store, until = await self._context.call(self._open, name), loop.time() + asked.long_poll_ms / 1000
            lsn = plan.reader.lsn
            while loop.time() < until and not self._context.stopping.is_set() and store.durable_version()[0] == lsn:
                await asyncio.sleep(POLL_SECONDS)
        finally:
            plan.reader.close()
        return await self._context.call(self._plan_pull, name, asked)

    # ── libSQL ────────────────────────────────────────────────────────────────────────────────────────────────────────
    async def info(self, request: Request) -> Response:
        """`GET /info`."""
        generation = await self._context.call(self._info, await self._name(request))
        return Response(json_bytes({"current_generation": generation}), media_type=JSON)

    def _info(self, name: str) -> int:
        store = self._open(name)
        history = history_of(self._context.store.manifest, store.db_id)
        return self._positions.exported(history, store.durable_version()[0])

    async def export(self, request: Request) -> Response:
        """`GET /export/GENERATION`."""
        reader = await self._context.call(self._export, await self._name(request), request.path_params["generation"])
        pages = range(reader.size_pages)

        def encode(images: dict[int, bytes], first: int, count: int) -> Iterable[bytes]:
            return [images[page] for page in range(first, first + count)]

        return self._stream(reader, pages, encode, BINARY, patch=True)

    def _export(self, name: str, generation: int) -> Snapshot:
        store = self._open(name)
        history = history_of(self._context.store.manifest, store.db_id)
        if not self._positions.is_export(history, generation):
            raise InvalidInput("this generation is not exported", hint="request /info again", generation=generation)
        return self._held.newest(store, hold=False)

    async def sync(self, request: Request) -> Response:
        """`GET /sync/GENERATION/FROM/TO`."""
        params = request.path_params
        plan = await self._context.call(self._sync, await self._name(request), params["generation"], params["first"])
        if isinstance(plan, EndOfFrames):
            self._resyncs += plan.generation != params["generation"]
            return Response(json_bytes({"generation": plan.generation}), HTTPStatus.BAD_REQUEST, media_type=JSON)

        def encode(images: dict[int, bytes], first: int, count: int) -> Iterable[bytes]:
            return encode_frames(plan, images, first, count)

        return self._stream(plan.reader, plan.pages, encode, BINARY, patch=True)

    def _sync(self, name: str, generation: int, first: int) -> FramesPlan | EndOfFrames:
        return self._frames.plan(self._open(name), generation, first)

    # ── sending ───────────────────────────────────────────────────────────────────────────────────────────────────────
    def _stream(
        self,
        reader: Snapshot,
        pages: Sequence[int],
        encode: Encode,
        media_type: str,
        header: bytes = b"",
        *,
        patch: bool = False,
    ) -> Response:
        """Return an answer with these pages of a version, which is released at its end."""
        if self._streams >= STREAMS_MAX:
            reader.close()
            self._context.limits.hit("replica_streams")
            raise Overloaded("too many replicas are syncing", hint="try again later", max=STREAMS_MAX)
        self._streams += 1

        def ended() -> None:
            self._streams -= 1
            reader.close()

        return _PagesAnswer(self._send(reader, pages, encode, header, patch), media_type, ended)

    async def _send(
        self, reader: Snapshot, pages: Sequence[int], encode: Encode, header: bytes, patch: bool
    ) -> AsyncGenerator[bytes]:
        with reader:
            hit("replicas.header")
            if header or not pages:
                yield header
            for first in range(0, len(pages), BATCH_PAGES):
                wanted = pages[first : first + BATCH_PAGES]
                body = await self._context.call(self._batch, reader, wanted, encode, first, patch)
                hit("replicas.batch")
                self._pages_sent += len(wanted)
                self._bytes_sent += len(body)
                yield body
            hit("replicas.sent")

    def _batch(self, reader: Snapshot, wanted: Sequence[int], encode: Encode, first: int, patch: bool) -> bytes:
        images = reader.read_pages(wanted, cold=True)
        if patch and 0 in images:
            images[0] = with_log(images[0])
        return b"".join(encode(images, first, len(wanted)))


class _PagesAnswer(StreamingResponse):
    """A stream of pages that calls `ended` when it is over. The generator cannot do that: if the client disconnects before the
    first byte, Starlette never starts it."""

    def __init__(self, content: AsyncGenerator[bytes], media_type: str, ended: Callable[[], None]) -> None:
        super().__init__(content, media_type=media_type)
        self._ended = ended

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the response."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._ended()


async def _refuse_push(_: Request) -> Response:
    """Refuse libSQL's offline writes: they are pages of the replica's log, which do not state what they are based on."""
    what = "offline writes are not accepted: connect without `offline`, then writes go to this server as SQL"
    return Response(json_bytes({"error": "NotSupported", "message": what}), HTTPStatus.NOT_IMPLEMENTED, media_type=JSON)
