"""Every address the HTTP side answers, who may ask for it, and what it answers: the one table.

Rules
  1. GET changes nothing. POST changes something, needs the admin token and a JSON body, and says what it did.
  2. What is not in the table is not there; a known address with another method is told which it has.
  3. Parts in braces are names, percent-encoded: a database's name may contain a slash.

docs/dashboard.md lists the same addresses, and a test holds the two together.
Threads: any. Handlers raise errors of ours, which `answers.py` turns into answers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, Literal
from urllib.parse import parse_qs, unquote

import msgspec

from quire.core.errors import InvalidInput, NotFound, QuireError, StoreUnusable
from quire.service.messages import Role
from quire.service.values import DatabaseFilterOptions
from quire.service.web import database, overview
from quire.service.web.answers import HttpError, Response, json_answer
from quire.service.web.dashboard_state import WatchedStore

Method = Literal["GET", "POST"]


@dataclass(frozen=True, slots=True)
class WebRequest:
    """One request: its names, its query, its body, and who asks."""

    names: tuple[str, ...]
    query: dict[str, str]
    body: bytes
    role: Role | None

    def number(self, name: str, default: int, largest: int) -> int:
        """A whole number of the query."""
        text = self.query.get(name, "")
        if not text:
            return default
        if not (text.isascii() and text.isdecimal() and len(text) <= 18):
            raise InvalidInput(f"`{name}` is a whole number", value=text[:40])
        return min(int(text), largest)


Handler = Callable[[WebRequest], Response]


@dataclass(frozen=True, slots=True)
class Route:
    """One address."""

    method: Method
    path: str
    access: Role | None
    """`None`: for everybody who gets this far."""
    handler: Handler


class NewSnapshot(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The body of a POST that makes a snapshot; without a name it is anonymous."""

    name: str = ""


class Empty(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The body of a POST that needs nothing more than its address."""


class Routes:
    """The table over one store."""

    def __init__(self, sight: WatchedStore, metrics: Callable[[], tuple[bytes, str]], asks_readers: bool) -> None:
        self._sight = sight
        self._metrics = metrics
        self._asks_readers = asks_readers
        read, admin = Role.READ, Role.ADMIN
        self.table = (
            Route("GET", "/healthz", None, self.healthz),
            Route("GET", "/readyz", None, self.readyz),
            Route("GET", "/metrics", read, self.metrics),
            Route("GET", "/api/me", None, self.me),
            Route("GET", "/api/overview", read, self.overview),
            Route("GET", "/api/lineage", read, self.lineage),
            Route("GET", "/api/databases", read, self.databases),
            Route("GET", "/api/databases/{name}", read, self.database),
            Route("GET", "/api/jobs", read, self.jobs),
            Route("GET", "/api/feed", read, self.feed),
            Route("GET", "/api/verification", read, self.verification),
            Route("GET", "/api/why", read, self.why),
            Route("POST", "/api/databases/{name}/snapshots", admin, self.make_snapshot),
            Route("POST", "/api/jobs/{id}/retry", admin, self.retry),
            Route("POST", "/api/jobs/{id}/cancel", admin, self.cancel),
        )

    def find(self, method: str, path: str) -> tuple[Route, tuple[str, ...]]:
        """The route of a request and the names in its address (rule 2)."""
        others = set()
        for route in self.table:
            names = match(route.path, path)
            if names is not None:
                if route.method == method:
                    return route, names
                others.add(route.method)
        if others:
            wrong = InvalidInput(f"this address has {' and '.join(sorted(others))}", method=method)
            raise HttpError(HTTPStatus.METHOD_NOT_ALLOWED, wrong)
        hint = "docs/sql-server.md and docs/dashboard.md list the addresses"
        raise NotFound("there is nothing at this address", hint=hint)

    # ── health ────────────────────────────────────────────────────────────────────────────────────────────────────────
    def healthz(self, _: WebRequest) -> Response:
        """The process answers."""
        return json_answer({"ok": True})

    def readyz(self, _: WebRequest) -> Response:
        """The store can be read and written. What is wrong is for those who may read: `GET /api/overview`, the log."""
        problem = self._problem()
        if problem is None:
            return json_answer({"ready": True})
        return json_answer({"ready": False, "error": type(problem).__name__}, HTTPStatus.SERVICE_UNAVAILABLE)

    def _problem(self) -> QuireError | None:
        manifest = self._sight.manifest
        try:
            manifest.feed.head()
            failure = manifest.writer.failure
        except QuireError as error:
            return error
        return failure if isinstance(failure, QuireError) else StoreUnusable("it fails") if failure else None

    def metrics(self, _: WebRequest) -> Response:
        """For Prometheus."""
        return Response(*self._metrics())

    # ── looking ───────────────────────────────────────────────────────────────────────────────────────────────────────
    def me(self, asked: WebRequest) -> Response:
        """Who asks, and what that allows."""
        role = asked.role.value if asked.role is not None else "none"
        return json_answer({"role": role, "asks_readers": self._asks_readers})

    def overview(self, _: WebRequest) -> Response:
        """See `overview.overview`."""
        return self._sight.cached.get("overview", lambda: json_answer(overview.overview(self._sight)))

    def lineage(self, asked: WebRequest) -> Response:
        """See `overview.lineage`."""
        wanted = _chosen(asked, overview.DATABASES_MAX)
        return self._page("lineage", asked, lambda: overview.lineage(self._sight, **wanted))

    def databases(self, asked: WebRequest) -> Response:
        """See `overview.databases`."""
        return json_answer(overview.databases(self._sight, **_chosen(asked, 100)))

    def _page(self, key: str, asked: WebRequest, make: Callable[[], dict[str, Any]]) -> Response:
        """A page of databases; the first of all is what a hundred open dashboards ask for."""
        return json_answer(make()) if asked.query else self._sight.cached.get(key, lambda: json_answer(make()))

    def database(self, asked: WebRequest) -> Response:
        """See `database.database_page`."""
        (name,) = asked.names
        return self._sight.cached.get(("db", name), lambda: json_answer(database.database_page(self._sight, name)))

    def jobs(self, _: WebRequest) -> Response:
        """See `overview.jobs`."""
        return self._sight.cached.get("jobs", lambda: json_answer(overview.jobs(self._sight)))

    def feed(self, asked: WebRequest) -> Response:
        """See `overview.feed`."""
        limit, before = asked.number("limit", 50, 200), asked.number("before", 0, 2**63)
        return json_answer(overview.feed(self._sight, limit=limit, before=before))

    def verification(self, asked: WebRequest) -> Response:
        """See `overview.verification`."""
        wanted = _chosen(asked, overview.DATABASES_MAX)
        return self._page("verification", asked, lambda: overview.verification(self._sight, **wanted))

    def why(self, asked: WebRequest) -> Response:
        """See `database.why`."""
        subject = asked.query.get("subject", "")
        if not subject:
            raise InvalidInput("`subject` is missing", hint="a database, a file of the store or an object's key")
        return json_answer(database.why(self._sight, subject))

    # ── doing ─────────────────────────────────────────────────────────────────────────────────────────────────────────
    def make_snapshot(self, asked: WebRequest) -> Response:
        """A snapshot of a database as it is now."""
        wanted = _read(asked.body, NewSnapshot)
        return self._done({"snapshot": self._sight.store.snapshot(asked.names[0], wanted.name)}, HTTPStatus.CREATED)

    def retry(self, asked: WebRequest) -> Response:
        """Enqueue a job that failed or was cancelled once more."""
        _read(asked.body, Empty)
        return self._done({"job_id": self._sight.manifest.jobs.retry(_job_id(asked))}, HTTPStatus.CREATED)

    def cancel(self, asked: WebRequest) -> Response:
        """End a job that has not ended."""
        _read(asked.body, Empty)
        self._sight.manifest.jobs.cancel(_job_id(asked))
        return self._done({"job_id": _job_id(asked)})

    def _done(self, value: Any, status: int = HTTPStatus.OK) -> Response:
        self._sight.cached.forget()
        return json_answer(value, status)


def match(pattern: str, path: str) -> tuple[str, ...] | None:
    """The names in an address that has this pattern; `None` if it has not.

    >>> match("/api/jobs/{id}/retry", "/api/jobs/7/retry"), match("/api/jobs", "/api/jobs/7")
    (('7',), None)
    >>> match("/api/databases/{name}", "/api/databases/a%2Fb")
    ('a/b',)
    """
    wanted, given = pattern.split("/"), path.split("/")
    if len(wanted) != len(given):
        return None
    names = []
    for want, part in zip(wanted, given):
        if want.startswith("{"):
            names.append(unquote(part))
        elif want != part:
            return None
    return tuple(names) if all(names) else None


def read_query(text: str) -> dict[str, str]:
    """The first value of each name."""
    try:
        return {name: values[0] for name, values in parse_qs(text, max_num_fields=16).items()}
    except ValueError as error:
        raise InvalidInput("the query has too many fields") from error


def _chosen(asked: WebRequest, limit: int) -> DatabaseFilterOptions:
    """Which databases a page has; `limit` unless the query has one."""
    query = asked.query
    return {
        "prefix": query.get("prefix", ""),
        "kind": query.get("kind", ""),
        "tag": query.get("tag", ""),
        "after": query.get("after", ""),
        "sort": query.get("sort", "name"),
        "limit": asked.number("limit", limit, overview.DATABASES_MAX),
    }


def _read(body: bytes, kind: type[Any]) -> Any:
    try:
        return msgspec.json.decode(body or b"{}", type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidInput(f"the body cannot be read: {error}") from error


def _job_id(asked: WebRequest) -> int:
    text = asked.names[0]
    if not (text.isascii() and text.isdecimal() and len(text) <= 19):
        raise InvalidInput("a job is named by its number", value=text[:40])
    return int(text)
