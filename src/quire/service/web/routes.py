"""The table of the dashboard's addresses: method, path, required role and handler of each.

Rules
  1. GET changes nothing. POST changes something, needs the admin token and a JSON body, and returns what it did.
  2. An address that is not in the table does not exist; for a known address with another method the error names the methods.
  3. Parts in braces are names, percent-encoded: a database's name may contain a slash.

docs/dashboard.md lists the same addresses, and a test compares the two.
Threads: any. Handlers raise errors of ours, which `answers.py` turns into answers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, Literal
from urllib.parse import parse_qs, unquote

import msgspec

from quire.core.decoding import described
from quire.core.errors import InvalidInput, NotFound, QuireError, StoreUnusable
from quire.service.tickets import Role
from quire.service.values import DatabaseFilterOptions
from quire.service.web import database, overview
from quire.service.web.answers import HttpError, Response, json_answer
from quire.service.web.dashboard_state import WatchedStore

Method = Literal["GET", "POST"]


@dataclass(frozen=True, slots=True)
class WebRequest:
    """One request: its names, query, body, and the caller's role."""

    names: tuple[str, ...]
    query: dict[str, str]
    body: bytes
    role: Role | None

    def number(self, name: str, default: int, largest: int) -> int:
        """Return a whole number of the query."""
        text = self.query.get(name, "")
        if not text:
            return default
        if not (text.isascii() and text.isdecimal() and len(text) <= 18):
            raise InvalidInput(f"`{name}` must be a whole number", value=text[:40])
        return min(int(text), largest)


Handler = Callable[[WebRequest], Response]


@dataclass(frozen=True, slots=True)
class Route:
    """One address."""

    method: Method
    path: str
    access: Role | None
    """`None`: for every caller that gets this far."""
    handler: Handler


class NewSnapshot(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The body of a POST that creates a snapshot; without a name it is anonymous."""

    name: str = ""


class Empty(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The body of a POST that has no parameters."""


class Routes:
    """The table, for one store."""

    def __init__(self, watched: WatchedStore, metrics: Callable[[], tuple[bytes, str]], asks_readers: bool) -> None:
        self._watched = watched
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
        """Return the route of a request and the names in its address (rule 2)."""
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
        """Answer that the process is alive."""
        return json_answer({"ok": True})

    def readyz(self, _: WebRequest) -> Response:
        """Answer whether the store can be read and written. Details are for readers: `GET /api/overview`, the log."""
        problem = self._problem()
        if problem is None:
            return json_answer({"ready": True})
        return json_answer({"ready": False, "error": type(problem).__name__}, HTTPStatus.SERVICE_UNAVAILABLE)

    def _problem(self) -> QuireError | None:
        manifest = self._watched.manifest
        try:
            manifest.feed.head()
            failure = manifest.writer.failure
        except QuireError as error:
            return error
        return failure if isinstance(failure, QuireError) else StoreUnusable("it fails") if failure else None

    def metrics(self, _: WebRequest) -> Response:
        """Return the metrics for Prometheus."""
        return Response(*self._metrics())

    # ── views ─────────────────────────────────────────────────────────────────────────────────────────────────────────
    def me(self, request: WebRequest) -> Response:
        """Return the caller's role, and whether reading needs a token."""
        role = request.role.value if request.role is not None else "none"
        return json_answer({"role": role, "asks_readers": self._asks_readers})

    def overview(self, _: WebRequest) -> Response:
        """See `overview.overview`."""
        return self._watched.cached.get("overview", lambda: json_answer(overview.overview(self._watched)))

    def lineage(self, request: WebRequest) -> Response:
        """See `overview.lineage`."""
        wanted = _chosen(request, overview.DATABASES_MAX)
        return self._page("lineage", request, lambda: overview.lineage(self._watched, **wanted))

    def databases(self, request: WebRequest) -> Response:
        """See `overview.databases`."""
        return json_answer(overview.databases(self._watched, **_chosen(request, 100)))

    def _page(self, key: str, request: WebRequest, make: Callable[[], dict[str, Any]]) -> Response:
        """Return a page of databases; cached without a query, which is what a hundred open dashboards request."""
        return json_answer(make()) if request.query else self._watched.cached.get(key, lambda: json_answer(make()))

    def database(self, request: WebRequest) -> Response:
        """See `database.database_page`."""
        (name,) = request.names
        return self._watched.cached.get(("db", name), lambda: json_answer(database.database_page(self._watched, name)))

    def jobs(self, _: WebRequest) -> Response:
        """See `overview.jobs`."""
        return self._watched.cached.get("jobs", lambda: json_answer(overview.jobs(self._watched)))

    def feed(self, request: WebRequest) -> Response:
        """See `overview.feed`."""
        limit, before = request.number("limit", 50, 200), request.number("before", 0, 2**63)
        return json_answer(overview.feed(self._watched, limit=limit, before=before))

    def verification(self, request: WebRequest) -> Response:
        """See `overview.verification`."""
        wanted = _chosen(request, overview.DATABASES_MAX)
        return self._page("verification", request, lambda: overview.verification(self._watched, **wanted))

    def why(self, request: WebRequest) -> Response:
        """See `database.why`."""
        subject = request.query.get("subject", "")
        if not subject:
            raise InvalidInput("`subject` is missing", hint="name a database, a file of the store or an object's key")
        return json_answer(database.why(self._watched, subject))

    # ── changes ───────────────────────────────────────────────────────────────────────────────────────────────────────
    def make_snapshot(self, request: WebRequest) -> Response:
        """Create a snapshot of the current version of a database."""
        wanted = _read(request.body, NewSnapshot)
        return self._done({"snapshot": self._watched.store.snapshot(request.names[0], wanted.name)}, HTTPStatus.CREATED)

    def retry(self, request: WebRequest) -> Response:
        """Enqueue again a job that failed or was cancelled."""
        _read(request.body, Empty)
        return self._done({"job_id": self._watched.manifest.jobs.retry(_job_id(request))}, HTTPStatus.CREATED)

    def cancel(self, request: WebRequest) -> Response:
        """Cancel a job that has not ended."""
        _read(request.body, Empty)
        self._watched.manifest.jobs.cancel(_job_id(request))
        return self._done({"job_id": _job_id(request)})

    def _done(self, value: Any, status: int = HTTPStatus.OK) -> Response:
        self._watched.cached.forget()
        return json_answer(value, status)


def match(pattern: str, path: str) -> tuple[str, ...] | None:
    """Return the names in an address that matches a pattern; `None` if it does not match.

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
    """Return the first value of each name."""
    try:
        return {name: values[0] for name, values in parse_qs(text, max_num_fields=16).items()}
    except ValueError as error:
        raise InvalidInput("the query has too many fields") from error


def _chosen(request: WebRequest, limit: int) -> DatabaseFilterOptions:
    """Return the filter of a page of databases; `limit` applies unless the query has one; 0 is the maximum."""
    query = request.query
    return {
        "prefix": query.get("prefix", ""),
        "kind": query.get("kind", ""),
        "tag": query.get("tag", ""),
        "after": query.get("after", ""),
        "sort": query.get("sort", "name"),
        "limit": request.number("limit", limit, overview.DATABASES_MAX) or overview.DATABASES_MAX,
    }


def _read(body: bytes, kind: type[Any]) -> Any:
    try:
        return msgspec.json.decode(body or b"{}", type=described(kind))
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidInput(f"the body cannot be read: {error}") from error


def _job_id(request: WebRequest) -> int:
    text = request.names[0]
    if not (text.isascii() and text.isdecimal() and len(text) <= 19):
        raise InvalidInput("the job id must be a number", value=text[:40])
    return int(text)
