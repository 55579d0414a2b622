"""`/metrics`, and that alerts, the Grafana board and the page about them name only what is exported."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import yaml  # type: ignore[import-untyped]
from prometheus_client.parser import text_string_to_metric_families

import quire
from quire.service.web.server import WebServer
from quire.store.store import Store
from tests.house.tree import ROOT
from tests.service.web.world import Asker

BOARD = ROOT / "deploy" / "grafana" / "quire.json"
ALERTS = ROOT / "deploy" / "prometheus" / "alerts.yml"
PAGE = ROOT / "docs" / "dashboard.md"
NAME = re.compile(r"\bquire_[a-z0-9_]+")


@pytest.fixture
def exported(anybody: Asker, furnished: Store) -> set[str]:
    """The names of all samples of a store that has something of everything."""
    furnished.pages.open("shop")
    furnished.stream("clicks").register("billing")
    furnished.kv("cart", create=True).write({b"ann": b"1"})
    furnished.kv("cart").flush()
    told = anybody.get("/metrics")
    assert told.headers["content-type"].startswith("text/plain")
    families = text_string_to_metric_families(told.body.decode())
    return {sample.name for family in families for sample in family.samples}


def test_the_figures_are_those_of_the_store(anybody: Asker, furnished: Store, web: WebServer) -> None:
    furnished.pages.open("shop")
    text = anybody.get("/metrics").body.decode()
    found = {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
    assert found["quire_databases", (("kind", "pages"),)] == 3
    assert found["quire_jobs", (("kind", "compaction"), ("state", "failed_permanent"))] == 1
    assert found["quire_artifacts_damaged", ()] == 1
    assert found["quire_feed_lag", (("cursor", "search"),)] == furnished.feed.lag()["search"]
    assert found["quire_feed_head_sequence", ()] == furnished.feed.head()
    assert found["quire_http_requests_total", ()] == web.figures().calls - 1
    assert found["quire_manifest_commits_total", ()] > 0
    assert ("quire_wal_bytes", (("db", "1"), ("name", "shop"))) in found


def test_the_engines_and_the_service_are_exported(anybody: Asker, furnished: Store) -> None:
    cart = furnished.kv("cart", create=True)
    cart.write({b"ann": b"1", b"bob": b"2"})
    clicks = furnished.stream("clicks")
    before = clicks.end_record
    clicks.append([b"one", b"two"]).result()
    clicks.register("billing", before)
    with furnished.serve() as server, quire.connect(furnished.path) as client:
        client.databases()
        text = anybody.get("/metrics").body.decode()
        calls = server.figures().calls
    found = {
        (
            sample.name,
            sample.labels.get("name", ""),
            sample.labels.get("tier") or sample.labels.get("consumer", ""),
        ): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
    assert found["quire_flight_calls_total", "", ""] == calls >= 2
    assert found["quire_flight_servers", "", ""] == 1
    assert found["quire_kv_last_lsn", "cart", ""] == cart.stats().last_lsn
    assert found["quire_kv_memtable_bytes", "cart", ""] > 0
    assert found["quire_stream_records_total", "clicks", ""] == before - 1 + 2, "ids begin at 1"
    assert found["quire_stream_consumer_lag", "clicks", "billing"] == 2
    assert found["quire_stream_segments", "clicks", "hot"] >= 1


def test_two_stores_of_one_process_do_not_mix(path: Path, tmp_path: Path) -> None:
    from tests.service.web.world import web_served

    with web_served(path) as (one, first), web_served(tmp_path / "other") as (_, second):
        one.create("shop", "pages")
        assert b'quire_databases{kind="pages"} 1.0' in Asker(first.address).get("/metrics").body
        assert b'quire_databases{kind="pages"} 0.0' in Asker(second.address).get("/metrics").body


@pytest.mark.parametrize("file", [BOARD, ALERTS, PAGE], ids=lambda file: file.name)
def test_every_metric_that_is_named_is_exported(file: Path, exported: set[str]) -> None:
    named = set(NAME.findall(file.read_text("utf-8")))
    assert len(named) > 10
    assert named - exported == set()


def test_every_metric_that_is_exported_is_described(exported: set[str]) -> None:
    text = PAGE.read_text("utf-8")
    own = {
        re.sub(r"_(bucket|sum|count)$", "_bucket", name)
        for name in exported
        if name.startswith("quire_manifest_commit_s")
    }
    own |= {name for name in exported if name.startswith("quire_") and not name.startswith("quire_manifest_commit_s")}
    assert [name for name in sorted(own) if f"`{name}`" not in text] == []


def test_the_alerts_are_rules() -> None:
    groups = yaml.safe_load(ALERTS.read_text("utf-8"))["groups"]
    rules = [rule for group in groups for rule in group["rules"]]
    assert len({rule["alert"] for rule in rules}) == len(rules) > 8
    for rule in rules:
        assert rule["expr"].count("(") == rule["expr"].count(")")
        assert rule["labels"]["severity"] in ("info", "warning", "critical")
        assert rule["annotations"]["summary"]


def test_the_board_is_one_that_grafana_reads() -> None:
    board = json.loads(BOARD.read_text("utf-8"))
    assert {each["name"] for each in board["templating"]["list"]} == {"datasource", "instance"}
    places = [tuple(panel["gridPos"].values()) for panel in board["panels"]]
    assert len(set(places)) == len(places) == len({panel["id"] for panel in board["panels"]})
    for panel in board["panels"]:
        assert panel["targets"]
        assert all("$instance" in target["expr"] for target in panel["targets"])
        assert panel["gridPos"]["x"] + panel["gridPos"]["w"] <= 24
