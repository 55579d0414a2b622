"""Views of a store with many databases: a page of them, the largest few, and sums that are kept; rows read do not grow with the
store (docs/scale.md)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from quire.service.web import changes, metrics, overview
from quire.service.web.dashboard_state import WatchedStore
from quire.service.web.server import WebServer
from quire.store.store import Store
from tests.manifest.rows_read import RowsRead
from tests.service.web.world import Asker

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
def test_a_view_reads_what_it_shows(store: Store, web: WebServer, monkeypatch: pytest.MonkeyPatch, view: str) -> None:
    store.create("shop", "pages")
    rows, read = RowsRead(monkeypatch), []
    watched = web._web.watched
    shown: Callable[[], Any] = (lambda: _scrape(web)) if view == "metrics" else lambda: VIEWS[view](watched)
    monkeypatch.setattr("quire.service.web.response_cache.KEPT_SECONDS", 600.0)  # sums are kept; nothing else is
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
    assert read[1] <= read[0] + 30, "a fork more in the page"
    assert read[0] < 10 * FEW if view == "overview" else read[0] < FEW


def test_pages_of_the_lineage_and_of_the_verification(store: Store, anybody: Asker) -> None:
    store.create("shop", "pages")
    store.fork_many("shop", [f"tenant-{number}" for number in range(8)], tags={"plan": "free"})
    told = anybody.get("/api/lineage?prefix=tenant-&limit=3").json
    assert [each["name"] for each in told["databases"]] == ["shop", "tenant-0", "tenant-1", "tenant-2"], (
        "with the parent"
    )
    assert (told["left_out"], told["after"]) == (5, "tenant-2")
    rest = anybody.get("/api/lineage?tag=plan%3Dfree&after=tenant-6").json
    assert ([each["name"] for each in rest["databases"]], rest["after"]) == (["shop", "tenant-7"], "")
    assert anybody.get("/api/lineage?sort=colour").status == 400
    told = anybody.get("/api/verification?limit=2&after=shop").json
    assert [each["name"] for each in told["databases"]] == ["tenant-0", "tenant-1"]
    assert (told["databases_left_out"], told["after"]) == (7, "tenant-1")
    assert anybody.get("/api/verification").json["databases_left_out"] == 0
