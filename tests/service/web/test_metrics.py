"""`/metrics`; and alerts, the Grafana dashboard and the documentation name only exported metrics."""

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
from tests.service.web.http_client import HttpClient

BOARD = ROOT / "deploy" / "grafana" / "quire.json"
ALERTS = ROOT / "deploy" / "prometheus" / "alerts.yml"
PAGE = ROOT / "docs" / "dashboard.md"
NAME = re.compile(r"\bquire_[a-z0-9_]+")


def _with_tag(store: Store, tag: str, largest: int = 20) -> StoreSettings:
    service = msgspec.structs.replace(store.settings.service, metrics_databases=largest, metrics_tag=tag)
    return msgspec.structs.replace(store.settings, service=service)


@pytest.fixture
def samples(anonymous: HttpClient, populated: Store) -> list[Sample]:
    """All samples of a populated store."""
    populated.settings = _with_tag(populated, "plan")
    populated.create("tagged", "pages", tags={"plan": "free"})
    populated.pages.open("shop")
    populated.stream("clicks").register("billing")
    populated.kv("cart", create=True).write({b"ann": b"1"})
    populated.kv("cart").flush()
    response = anonymous.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain")
    families = text_string_to_metric_families(response.body.decode())
    return [sample for family in families for sample in family.samples]


@pytest.fixture
def exported(samples: list[Sample]) -> set[str]:
    """The names of all samples."""
    return {sample.name for sample in samples}


def test_the_metrics_match_the_store(anonymous: HttpClient, populated: Store, web: WebServer) -> None:
    populated.pages.open("shop")
    text = anonymous.get("/metrics").body.decode()
    values = {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
    assert values["quire_databases", (("kind", "pages"),)] == 3
    assert values["quire_jobs", (("kind", "compaction"), ("state", "failed_permanent"))] == 1
    assert values["quire_artifacts_damaged", ()] == 1
    assert values["quire_feed_lag", (("cursor", "search"),)] == populated.feed.lag()["search"]
    assert values["quire_feed_head_sequence", ()] == populated.feed.head()
    assert values["quire_http_requests_total", ()] == web.figures().calls - 1
    assert values["quire_manifest_commits_total", ()] > 0
    assert ("quire_wal_bytes", (("db", "1"), ("name", "shop"))) in values


def test_the_engines_and_the_service_are_exported(anonymous: HttpClient, populated: Store) -> None:
    cart = populated.kv("cart", create=True)
    cart.write({b"ann": b"1", b"bob": b"2"})
    clicks = populated.stream("clicks")
    before = clicks.end_record
    clicks.append([b"one", b"two"]).result()
    clicks.register("billing", before)
    with populated.serve() as server, quire.connect(populated.path) as client:
        client.databases()
        text = anonymous.get("/metrics").body.decode()
        calls = server.figures().calls
    values = {
        (
            sample.name,
            sample.labels.get("name", ""),
            sample.labels.get("tier") or sample.labels.get("consumer", ""),
        ): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
    assert values["quire_flight_calls_total", "", ""] == calls >= 2
    assert values["quire_flight_servers", "", ""] == 2, "the Unix socket and this address"
    assert values["quire_kv_last_lsn", "cart", ""] == cart.stats().last_lsn
    assert values["quire_kv_memtable_bytes", "cart", ""] > 0
    assert values["quire_stream_records_total", "clicks", ""] == before - 1 + 2, "ids begin at 1"
    assert values["quire_stream_consumer_lag", "clicks", "billing"] == 2
    assert values["quire_stream_segments", "clicks", "hot"] >= 1


def test_a_mirror_reports_the_lag_of_its_target(anonymous: HttpClient, populated: Store, web: WebServer) -> None:
    def figures() -> dict[str, float]:
        web._web.watched.cached.forget()
        families = text_string_to_metric_families(anonymous.get("/metrics").body.decode())
        samples = [
            sample for family in families for sample in family.samples if sample.name.startswith("quire_mirror_")
        ]
        assert {sample.labels["mirror"] for sample in samples} == {"lake"}
        return {sample.name.removeprefix("quire_mirror_"): sample.value for sample in samples}

    before = figures()
    assert (before["databases_behind"], before["rows"], before["synced_timestamp_seconds"]) == (1, 0, 0)
    assert before["lag_seconds"] > 0
    populated.mirrors.run("lake", runner="threads")
    synced = figures()
    assert (synced["databases_behind"], synced["lag_seconds"], synced["lag_frames"]) == (0, 0, 0)
    assert (synced["databases"], synced["rows"], synced["every_seconds"]) == (1, 2, 3600)
    assert synced["synced_timestamp_seconds"] >= synced["started_timestamp_seconds"] > 1_700_000_000
    with closing(populated.sqlite("shop")) as shop:
        shop.execute("insert into item(name) values ('quince')")
    assert figures()["lag_frames"] > 0


def test_two_stores_of_one_process_do_not_mix(path: Path, tmp_path: Path) -> None:
    from tests.service.web.http_client import web_served

    with web_served(path) as (one, first), web_served(tmp_path / "other") as (_, second):
        one.create("shop", "pages")
        assert b'quire_databases{kind="pages"} 1.0' in HttpClient(first.address).get("/metrics").body
        assert b'quire_databases{kind="pages"} 0.0' in HttpClient(second.address).get("/metrics").body


@pytest.mark.parametrize("file", [BOARD, ALERTS, PAGE], ids=lambda file: file.name)
def test_every_metric_that_is_used_is_exported(file: Path, exported: set[str]) -> None:
    named = set(NAME.findall(file.read_text("utf-8")))
    assert len(named) > 10
    assert {name for name in named if not name.startswith("quire_rolling_")} - exported == set()


def test_every_metric_that_is_exported_is_described(exported: set[str]) -> None:
    text = PAGE.read_text("utf-8")
    histogram_names = {
        re.sub(r"_(bucket|sum|count)$", "_bucket", name)
        for name in exported
        if name.startswith("quire_manifest_commit_s")
    }
    histogram_names |= {
        name
        for name in exported
        if name.startswith("quire_") and not name.startswith(("quire_manifest_commit_s", "quire_rolling_"))
    }
    assert [name for name in sorted(histogram_names) if f"`{name}`" not in text] == []
    # A rolling metric is exported once it was observed; the page has the names without `_bucket`, `_sum`, `_count`,
    # `_last`.
    assert [kind.name for kind in MetricKind if f"`quire_rolling_{kind.name.lower()}`" not in text] == []


def test_the_alerts_are_valid_rules() -> None:
    groups = yaml.safe_load(ALERTS.read_text("utf-8"))["groups"]
    rules = [rule for group in groups for rule in group["rules"]]
    assert len({rule["alert"] for rule in rules}) == len(rules) > 8
    for rule in rules:
        assert rule["expr"].count("(") == rule["expr"].count(")")
        assert rule["labels"]["severity"] in ("info", "warning", "critical")
        assert rule["annotations"]["summary"]


PROMETHEUS_LABELS = {"instance", "job"}
"""Labels that Prometheus adds to every sample."""


def alert_rules() -> list[dict[str, Any]]:
    groups = yaml.safe_load(ALERTS.read_text("utf-8"))["groups"]
    return [rule for group in groups for rule in group["rules"]]


@pytest.mark.parametrize("rule", alert_rules(), ids=lambda rule: rule["alert"])
def test_alerts_use_only_labels_of_their_metrics(rule: dict[str, Any], samples: list[Sample]) -> None:
    """Hazard: a rule that can never be true, or a message with empty placeholders."""
    labels = {label for name in NAME.findall(rule["expr"]) for label in labels_of(samples, name)} | PROMETHEUS_LABELS
    groupings = [set(re.split(r",\s*", names)) for names in re.findall(r"by \(([^)]*)\)", rule["expr"])]
    for names in groupings:
        assert names - labels == set()
    for name, matchers in re.findall(r"\b(quire_[a-z0-9_]+)\{([^}]*)\}", rule["expr"]):
        for label, value in re.findall(r'(\w+)="([^"]*)"', matchers):
            assert value in {sample.labels.get(label) for sample in samples if sample.name == name}
    shown = set(re.findall(r"\$labels\.(\w+)", " ".join(rule["annotations"].values())))
    assert shown - (set.intersection(*groupings) if groupings else labels) == set()


def labels_of(samples: list[Sample], name: str) -> set[str]:
    label_sets = [set(sample.labels) for sample in samples if sample.name == name]
    assert label_sets, f"{name} has no sample"
    return set.intersection(*label_sets)


def test_the_stall_alert_fires_for_a_waiting_writer(anonymous: HttpClient, populated: Store) -> None:
    """Its threshold was above the number of frozen memtables at which a writer waits."""
    (rule,) = [rule for rule in alert_rules() if rule["alert"] == "QuireKeyValueStalls"]
    entered, release = threading.Event(), threading.Event()

    def stall(_: str) -> None:
        entered.set()
        release.wait()

    def stalled() -> float:
        text = anonymous.get("/metrics").body.decode()
        families = {family.name: family for family in text_string_to_metric_families(text)}
        return sum(sample.value for sample in families["quire_kv_stalled_writers"].samples)

    cart = populated.kv("cart", create=True)
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
            release.set()
            writer.join()
    assert stalled() == 0
    assert cart.stats().stall_seconds > 0


def test_the_dashboard_is_valid_for_grafana() -> None:
    board = json.loads(BOARD.read_text("utf-8"))
    assert {variable["name"] for variable in board["templating"]["list"]} == {"datasource", "instance"}
    places = [tuple(panel["gridPos"].values()) for panel in board["panels"]]
    assert len(set(places)) == len(places) == len({panel["id"] for panel in board["panels"]})
    for panel in board["panels"]:
        assert panel["targets"]
        assert all("$instance" in target["expr"] for target in panel["targets"])
        assert panel["gridPos"]["x"] + panel["gridPos"]["w"] <= 24


def test_only_the_largest_databases_have_series_and_a_tag_sums_the_rest(
    anonymous: HttpClient, populated: Store
) -> None:
    """Hazard: 100,000 databases would be millions of series."""
    populated.create_many(["tenant-1", "tenant-2"], tags={"plan": "free"})
    populated.settings = _with_tag(populated, "plan", largest=1)
    families = list(text_string_to_metric_families(anonymous.get("/metrics").body.decode()))
    all_samples = [sample for family in families for sample in family.samples]
    assert len({sample.labels["db"] for sample in all_samples if "db" in sample.labels}) == 1
    sums = {sample.name: sample.value for sample in all_samples if sample.labels.get("value") == "free"}
    assert sums == {"quire_tag_databases": 2.0, "quire_tag_disk_bytes": 0.0}
