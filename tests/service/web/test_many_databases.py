"""Views of a store with many databases: one page of them, the largest few, and cached sums. The number of rows read
does not grow with the store (docs/scale.md)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from quire.service.web import changes, metrics, overview
from quire.service.web.dashboard_state import WatchedStore
from quire.service.web.server import WebServer
from quire.store.store import Store
from tests.manifest.rows_read import RowsRead
from tests.service.web.http_client import HttpClient

FEW, MANY = 1_200, 3_600


def _feed(watched: WatchedStore) -> Any:
    with watched.manifest.read() as txn:
        return changes.recent(txn, 10)


VIEWS: dict[str, Callable[[WatchedStore], Any]] = {
    "overview": overview.overview,
    "databases": lambda watched: overview.databases(watched, limit=50),
    "lineage": lambda watched: overview.lineage(watched, limit=50),
    "verification": lambda watched: overview.verification(watched, limit=50),
    "jobs": overview.jobs,
    "feed": _feed,
}


def _scrape(web: WebServer) -> Any:
    return metrics.exposition(metrics.registry(web._web.watched, web.figures, ()))


@pytest.mark.parametrize("view", [*VIEWS, "metrics"])
def test_a_view_reads_only_what_it_shows(
    store: Store, web: WebServer, monkeypatch: pytest.MonkeyPatch, view: str
) -> None:
    store.create("shop", "pages")
    rows, read = RowsRead(monkeypatch), []
    watched = web._web.watched
    shown: Callable[[], Any] = (lambda: _scrape(web)) if view == "metrics" else lambda: VIEWS[view](watched)
    monkeypatch.setattr("quire.service.web.response_cache.KEPT_SECONDS", 600.0)  # only the sums are cached
    last = 0
    for until in (FEW, MANY):
        store.fork_many("shop", [f"tenant-{number:05}" for number in range(last, until)])
        last = until
        store.fork("shop", f"other-{until}")
        watched.cached.forget()
        for total in (watched.survey, watched.info, watched.space, watched.damaged):
            total()
        rows.take()
        assert shown()
        read.append(rows.take())
    assert read[1] <= read[0] + 30, "the page contains one more fork"
    assert read[0] < 10 * FEW if view == "overview" else read[0] < FEW


def test_pages_of_the_lineage_and_of_the_verification(store: Store, anonymous: HttpClient) -> None:
    store.create("shop", "pages")
    store.fork_many("shop", [f"tenant-{number}" for number in range(8)], tags={"plan": "free"})
    response = anonymous.get("/api/lineage?prefix=tenant-&limit=3").json
    assert [row["name"] for row in response["databases"]] == ["shop", "tenant-0", "tenant-1", "tenant-2"], (
        "including the parent"
    )
    assert (response["left_out"], response["after"]) == (5, "tenant-2")
    rest = anonymous.get("/api/lineage?tag=plan%3Dfree&after=tenant-6").json
    assert ([row["name"] for row in rest["databases"]], rest["after"]) == (["shop", "tenant-7"], "")
    assert anonymous.get("/api/lineage?sort=colour").status == 400
    response = anonymous.get("/api/verification?limit=2&after=shop").json
    assert [row["name"] for row in response["databases"]] == ["tenant-0", "tenant-1"]
    assert (response["databases_left_out"], response["after"]) == (7, "tenant-1")
    assert anonymous.get("/api/verification").json["databases_left_out"] == 0
