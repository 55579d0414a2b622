"""Databases as namespaces, as in libSQL's server: created, forked, listed and dropped over HTTP (W4).

Threads: the event loop's; calls of the store run in threads.
"""

from __future__ import annotations

from http import HTTPStatus
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from quire.core.decoding import UNDECODABLE, described
from quire.core.errors import InvalidInput
from quire.manifest.records import DbKind
from quire.manifest.snapshots import RolledBack
from quire.service.values import DatabaseInfo
from quire.service.version_address import find_version
from quire.service.web.answers import json_bytes
from quire.service.web.context import WebContext

PAGE_DEFAULT, PAGE_MAX = 100, 1_000
BODY_BYTES_MAX = 64 * 1024
JSON = "application/json"
B = TypeVar("B", bound=msgspec.Struct)


class ForkBody(msgspec.Struct, frozen=True):
    """The body of a fork: the moment, in the syntax of libSQL's server or of quire."""

    timestamp: str | None = None
    at: str | int | None = None


class RollbackBody(msgspec.Struct, frozen=True):
    """The body of a rollback: a snapshot's name, an epoch or a time."""

    to: str | int


class NamespaceRoutes:
    """Endpoints for databases. All but the list need the admin token."""

    def __init__(self, context: WebContext) -> None:
        self._context = context

    def routes(self) -> list[BaseRoute]:
        """Return the routes."""
        return [
            Route("/v1/namespaces", self.list, methods=["GET"]),
            Route("/v1/namespaces/{name}/create", self.create, methods=["POST"]),
            Route("/v1/namespaces/{name}/fork/{new_name}", self.fork, methods=["POST"]),
            Route("/v1/namespaces/{name}/rollback", self.rollback, methods=["POST"]),
            Route("/v1/namespaces/{name}/undrop", self.undrop, methods=["POST"]),
            Route("/v1/namespaces/{name}", self.drop, methods=["DELETE"]),
        ]

    async def create(self, request: Request) -> Response:
        """`POST /v1/namespaces/NAME/create`."""
        self._check_admin(request)
        await self._context.read_body(request, BODY_BYTES_MAX)  # options of libSQL: none of them is needed
        info = await self._context.call(self._context.store.create, request.path_params["name"], "pages")
        return _answer(_shown(info))

    async def fork(self, request: Request) -> Response:
        """`POST /v1/namespaces/NAME/fork/NEW`, as it is now or was at a moment."""
        self._check_admin(request)
        raw = await self._context.read_body(request, BODY_BYTES_MAX)
        body = _decoded(raw, ForkBody, '{"at": "monday"}') if raw.strip() else ForkBody()
        params = request.path_params
        info = await self._context.call(self._fork, params["name"], params["new_name"], body)
        return _answer(_shown(info))

    def _fork(self, name: str, new_name: str, body: ForkBody) -> DatabaseInfo:
        store = self._context.store
        moment = body.at if body.at is not None else body.timestamp
        if moment is None:
            return store.fork(name, new_name)
        store.sqlite(new_name, fork_of=name, fork_at=find_version(store.manifest, name, str(moment))).close()
        return store.database(new_name)

    async def rollback(self, request: Request) -> Response:
        """`POST /v1/namespaces/NAME/rollback`: undo everything since a moment, as a new version."""
        self._check_admin(request)
        raw = await self._context.read_body(request, BODY_BYTES_MAX)
        body = _decoded(raw, RollbackBody, '{"to": "monday"}')
        return _answer(await self._context.call(self._rollback, request.path_params["name"], str(body.to)))

    def _rollback(self, name: str, to: str) -> RolledBack:
        store = self._context.store
        return store.rollback(name, to=find_version(store.manifest, name, to))

    async def drop(self, request: Request) -> Response:
        """`DELETE /v1/namespaces/NAME`; with snapshots only with `?snapshots=true`; not undoable with `?now=true`."""
        self._check_admin(request)
        with_snapshots, now = (request.query_params.get(name) == "true" for name in ("snapshots", "now"))
        info = await self._context.call(self._drop, request.path_params["name"], with_snapshots, not now)
        return _answer(_shown(info))

    def _drop(self, name: str, with_snapshots: bool, undoable: bool) -> DatabaseInfo:
        return self._context.store.drop(name, snapshots=with_snapshots, undoable=undoable)

    async def undrop(self, request: Request) -> Response:
        """`POST /v1/namespaces/NAME/undrop`: restore a dropped database."""
        self._check_admin(request)
        await self._context.read_body(request, BODY_BYTES_MAX)
        return _answer(_shown(await self._context.call(self._context.store.undrop, request.path_params["name"])))

    async def list(self, request: Request) -> Response:
        """`GET /v1/namespaces?after=NAME&limit=100`: the databases that the caller may use, by name."""
        grant = self._context.gate.grant(request)
        grant.check_any_access()
        after, limit = request.query_params.get("after", ""), _limit(request.query_params.get("limit"))
        infos = await self._context.call(self._context.store.databases)
        allowed = [info for info in infos if info.kind is DbKind.PAGES and info.name > after and grant.may(info.name)]
        page = sorted(allowed, key=lambda info: info.name)[:limit]
        following = page[-1].name if len(allowed) > limit else None
        return _answer({"namespaces": [_shown(info) for info in page], "next": following})

    def _check_admin(self, request: Request) -> None:
        self._context.gate.grant(request).check_admin()


def _shown(info: DatabaseInfo) -> dict[str, Any]:
    return {
        "name": info.name,
        "created_at_ms": info.created_at_ms,
        "parent": info.parent,
        "snapshots": info.snapshots,
        "status": info.status.name.lower(),
    }


def _answer(value: Any) -> Response:
    return Response(json_bytes(value), HTTPStatus.OK, media_type=JSON)


def _decoded(raw: bytes, kind: type[B], example: str) -> B:
    try:
        return msgspec.json.decode(raw, type=described(kind))
    except UNDECODABLE as error:
        raise InvalidInput(f"the request cannot be read: {error}", hint=f"as in {example}") from None


def _limit(text: str | None) -> int:
    if text is None:
        return PAGE_DEFAULT
    if not (text.isascii() and text.isdecimal() and len(text) <= 9 and 1 <= int(text) <= PAGE_MAX):
        raise InvalidInput("limit must be a number", hint=f"between 1 and {PAGE_MAX}", limit=text[:20])
    return int(text)
