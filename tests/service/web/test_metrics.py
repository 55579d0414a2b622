"""`/metrics`, and that alerts, the Grafana board and the page about them name only what is exported."""

from __future__ import annotations

import json
import re
import threading
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml  # type: ignore[import-untyped]
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

import quire
from quire.core.settings import StoreSettings
from quire.durable.failpoints import armed
from quire.manifest.metrics import MetricKind
from quire.service.web.server import WebServer
from quire.store.store import Store
from tests.manifest.helpers import eventually
from tests.rules.tree import ROOT
from tests.service.web.world import Asker

BOARD = ROOT / "deploy" / "grafana" / "quire.json"
ALERTS = ROOT / "deploy" / "prometheus" / "alerts.yml"
PAGE = ROOT / "docs" / "dashboard.md"
NAME = re.compile(r"\bquire_[a-z0-9_]+")


def _with_tag(store: Store, tag: str, largest: int = 20) -> StoreSettings:
    service = msgspec.structs.replace(store.settings.service, metrics_databases=largest, metrics_tag=tag)
    return msgspec.structs.replace(store.settings, service=service)


@pytest.fixture
def samples(anybody: Asker, furnished: Store) -> list[Sample]:
    """All samples of a store that has something of everything."""
    furnished.settings = _with_tag(furnished, "plan")
    furnished.create("tagged", "pages", tags={"plan": "free"})
    furnished.pages.open("shop")
    furnished.stream("clicks").register("billing")
    furnished.kv("cart", create=True).write({b"ann": b"1"})
    furnished.kv("cart").flush()
    told = anybody.get("/metrics")
    assert told.headers["content-type"].startswith("text/plain")
    families = text_string_to_metric_families(told.body.decode())
    return [sample for family in families for sample in family.samples]


@pytest.fixture
def exported(samples: list[Sample]) -> set[str]:
    """Their names."""
    return {sample.name for sample in samples}


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
    assert found["quire_flight_servers", "", ""] == 2, "the socket, and this address"
    assert found["quire_kv_last_lsn", "cart", ""] == cart.stats().last_lsn
    assert found["quire_kv_memtable_bytes", "cart", ""] > 0
    assert found["quire_stream_records_total", "clicks", ""] == before - 1 + 2, "ids begin at 1"
    assert found["quire_stream_consumer_lag", "clicks", "billing"] == 2
    assert found["quire_stream_segments", "clicks", "hot"] >= 1


def test_a_mirror_says_how_far_its_target_is_behind(anybody: Asker, furnished: Store, web: WebServer) -> None:
    def figures() -> dict[str, float]:
        web._web.watched.cached.forget()
        families = text_string_to_metric_families(anybody.get("/metrics").body.decode())
        samples = [
            sample for family in families for sample in family.samples if sample.name.startswith("quire_mirror_")
        ]
        assert {sample.labels["mirror"] for sample in samples} == {"lake"}
        return {sample.name.removeprefix("quire_mirror_"): sample.value for sample in samples}

    before = figures()
    assert (before["databases_behind"], before["rows"], before["synced_timestamp_seconds"]) == (1, 0, 0)
    assert before["lag_seconds"] > 0
    furnished.mirrors.run("lake", runner="threads")
    synced = figures()
    assert (synced["databases_behind"], synced["lag_seconds"], synced["lag_frames"]) == (0, 0, 0)
    assert (synced["databases"], synced["rows"], synced["every_seconds"]) == (1, 2, 3600)
    assert synced["synced_timestamp_seconds"] >= synced["started_timestamp_seconds"] > 1_700_000_000
    with closing(furnished.sqlite("shop")) as shop:
        shop.execute("insert into item(name) values ('quince')")
    assert figures()["lag_frames"] > 0


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
    assert {name for name in named if not name.startswith("quire_rolling_")} - exported == set()


def test_every_metric_that_is_exported_is_described(exported: set[str]) -> None:
    text = PAGE.read_text("utf-8")
    own = {
        re.sub(r"_(bucket|sum|count)$", "_bucket", name)
        for name in exported
        if name.startswith("quire_manifest_commit_s")
    }
    own |= {
        name
        for name in exported
        if name.startswith("quire_") and not name.startswith(("quire_manifest_commit_s", "quire_rolling_"))
    }
    assert [name for name in sorted(own) if f"`{name}`" not in text] == []
    # A rolling metric is exported once it was observed; the page has the names without `_bucket`, `_sum`, `_count`, `_last`.
    assert [kind.name for kind in MetricKind if f"`quire_rolling_{kind.name.lower()}`" not in text] == []


def test_the_alerts_are_rules() -> None:
    groups = yaml.safe_load(ALERTS.read_text("utf-8"))["groups"]
    rules = [rule for group in groups for rule in group["rules"]]
    assert len({rule["alert"] for rule in rules}) == len(rules) > 8
    for rule in rules:
        assert rule["expr"].count("(") == rule["expr"].count(")")
        assert rule["labels"]["severity"] in ("info", "warning", "critical")
        assert rule["annotations"]["summary"]


SCRAPED = {"instance", "job"}
"""Labels that Prometheus gives to every sample."""


def alert_rules() -> list[dict[str, Any]]:
    groups = yaml.safe_load(ALERTS.read_text("utf-8"))["groups"]
    return [rule for group in groups for rule in group["rules"]]


@pytest.mark.parametrize("rule", alert_rules(), ids=lambda rule: rule["alert"])
def test_an_alert_asks_for_labels_that_its_metrics_have(rule: dict[str, Any], samples: list[Sample]) -> None:
    """A rule that can never be true, or a message with empty places, is no alert."""
    labels = {label for name in NAME.findall(rule["expr"]) for label in labels_of(samples, name)} | SCRAPED
    kept = [set(re.split(r",\s*", names)) for names in re.findall(r"by \(([^)]*)\)", rule["expr"])]
    for names in kept:
        assert names - labels == set()
    for name, matchers in re.findall(r"\b(quire_[a-z0-9_]+)\{([^}]*)\}", rule["expr"]):
        for label, value in re.findall(r'(\w+)="([^"]*)"', matchers):
            assert value in {sample.labels.get(label) for sample in samples if sample.name == name}
    shown = set(re.findall(r"\$labels\.(\w+)", " ".join(rule["annotations"].values())))
    assert shown - (set.intersection(*kept) if kept else labels) == set()


def labels_of(samples: list[Sample], name: str) -> set[str]:
    found = [set(sample.labels) for sample in samples if sample.name == name]
    assert found, f"{name} has no sample"
    return set.intersection(*found)


def test_the_alert_of_stalls_sees_a_writer_that_waits(anybody: Asker, furnished: Store) -> None:
    """It asked for more frozen memtables than a writer ever waits for."""
    (rule,) = [rule for rule in alert_rules() if rule["alert"] == "QuireKeyValueStalls"]
    entered, go_on = threading.Event(), threading.Event()

    def stall(_: str) -> None:
        entered.set()
        go_on.wait()

    def stalled() -> float:
        text = anybody.get("/metrics").body.decode()
        families = {family.name: family for family in text_string_to_metric_families(text)}
        return sum(sample.value for sample in families["quire_kv_stalled_writers"].samples)

    cart = furnished.kv("cart", create=True)
    cart.settings = msgspec.structs.replace(cart.settings, memtable_bytes=1_024)

    def write() -> None:
        for n in range(12):
            cart.put(b"%d" % n, bytes(600), sync=False)

    with armed("lsm.flush.begun", stall):
        writer = threading.Thread(target=write)
        writer.start()
        try:
            entered.wait()
            assert eventually(lambda: stalled() == 1)
            assert "quire_kv_stalled_writers > 0" in rule["expr"]
        finally:
            go_on.set()
            writer.join()
    assert stalled() == 0
    assert cart.stats().stall_seconds > 0


def test_the_board_is_one_that_grafana_reads() -> None:
    board = json.loads(BOARD.read_text("utf-8"))
    assert {each["name"] for each in board["templating"]["list"]} == {"datasource", "instance"}
    places = [tuple(panel["gridPos"].values()) for panel in board["panels"]]
    assert len(set(places)) == len(places) == len({panel["id"] for panel in board["panels"]})
    for panel in board["panels"]:
        assert panel["targets"]
        assert all("$instance" in target["expr"] for target in panel["targets"])
        assert panel["gridPos"]["x"] + panel["gridPos"]["w"] <= 24


def test_only_the_largest_databases_have_series_and_a_tag_adds_them_up(anybody: Asker, furnished: Store) -> None:
    """A hundred thousand databases would be millions of series."""
    furnished.create_many(["tenant-1", "tenant-2"], tags={"plan": "free"})
    furnished.settings = _with_tag(furnished, "plan", largest=1)
    families = list(text_string_to_metric_families(anybody.get("/metrics").body.decode()))
    told = [sample for family in families for sample in family.samples]
    assert len({sample.labels["db"] for sample in told if "db" in sample.labels}) == 1
    sums = {sample.name: sample.value for sample in told if sample.labels.get("value") == "free"}
    assert sums == {"quire_tag_databases": 2.0, "quire_tag_disk_bytes": 0.0}
