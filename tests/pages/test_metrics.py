"""Figures under the names of the design document, the Prometheus collector, and spans."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from quire.core.tracing import TRACE_API, span
from quire.pages.metrics import PagesCollector
from tests.pages.engine_harness import Model, Pages, image, write
from tests.pages.test_wal import index


def test_figures_have_the_names_of_the_design_and_correct_values(pages: Pages) -> None:
    store, model = pages.database(), Model()
    write(store, model, {page: image() for page in range(5)})
    with store.open_snapshot():
        write(store, model, {page: image() for page in range(3)})
        store.wal.publish()
        figures = pages.engine.figures().databases[0]
        assert figures.page_index_rows == 8
        assert len(index(pages)) == 8
        assert figures.readers_active == 1
        assert figures.segments_blocked == 0
        store.wal.seal()
        store.wal.publish()
        assert pages.engine.figures().databases[0].segments_blocked == 1
        assert pages.engine.floor(store.db_id) < model.newest.lsn
        pages.clock.advance(1.5)
        assert pages.engine.figures().databases[0].wait_for_floor_ms == 1500
    pages.checkpoint(store)
    pages.clock.advance(100)
    figures = pages.engine.figures().databases[0]
    assert figures.wait_for_floor_ms == 1500, "no checkpoint waits any more"
    assert figures.page_index_rows == len(index(pages)) == 0


def test_the_collector_exports_prometheus_metrics(pages: Pages) -> None:
    store, model = pages.database(), Model()
    write(store, model, {page: image() for page in range(5)})
    with store.open_snapshot() as reader:
        reader.read_page(0)
        reader.read_page(0)
    registry = CollectorRegistry()
    registry.register(PagesCollector(pages.engine.figures))
    text = generate_latest(registry).decode()
    assert 'quire_page_index_rows{db="1",name="shop"} 0.0' in text
    assert 'quire_snapshot_readers_active{db="1",name="shop"} 0.0' in text
    assert 'quire_wal_segments_blocked_by_readers{db="1",name="shop"}' in text
    assert 'quire_checkpoint_wait_for_floor_ms_total{db="1",name="shop"}' in text
    assert "quire_page_cache_hit_ratio 0.5" in text
    assert pages.engine.figures().cache_bytes > 0


class _Recorder(ModuleType):
    """A stand-in for `opentelemetry.trace`."""

    def __init__(self) -> None:
        super().__init__("opentelemetry.trace")
        self.spans: list[tuple[str, dict[str, Any]]] = []

    def get_tracer(self, _: str) -> _Recorder:
        return self

    def get_current_span(self) -> Any:
        return SimpleNamespace(get_span_context=lambda: SimpleNamespace(is_valid=False))

    @contextmanager
    def start_as_current_span(self, name: str) -> Iterator[Any]:
        attributes: dict[str, Any] = {}
        self.spans.append((name, attributes))

        class Inner:
            def set_attribute(self, key: str, value: Any) -> None:
                attributes[key] = value

        yield Inner()


def test_the_reads_of_a_scan_are_spans_with_the_epochs_that_were_read(
    pages: Pages, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Formerly only single reads were spans."""
    store, model = pages.database(), Model()
    for page in range(3):
        write(store, model, {page: image()})
    recorder = _Recorder()
    monkeypatch.setitem(sys.modules, TRACE_API, recorder)
    lsn = model.newest.lsn
    with store.open_snapshot() as reader:
        assert len(list(reader.scan())) == 3
        assert len(reader.read_pages([1, 2])) == 2
    scan_attributes = {"quire.pages": 3, "quire.epoch_min": 1, "quire.epoch_max": lsn}
    read_attributes = {"quire.pages": 2, "quire.epoch_min": 2, "quire.epoch_max": lsn}
    common = {"quire.db_id": 1, "quire.snapshot_lsn": lsn}
    assert recorder.spans == [
        ("PageStore.read_pages", common | scan_attributes),
        ("PageStore.read_pages", common | read_attributes),
    ]


def test_a_read_is_a_span_with_the_epoch_that_was_read(pages: Pages, monkeypatch: pytest.MonkeyPatch) -> None:
    store, model = pages.database(), Model()
    write(store, model, {0: image()})
    write(store, model, {1: image()})
    assert TRACE_API not in sys.modules
    with span("nobody listens") as quiet:
        quiet.set(anything=1)
    recorder = _Recorder()
    monkeypatch.setitem(sys.modules, TRACE_API, recorder)
    with store.open_snapshot() as reader:
        reader.read_page(0)
    assert recorder.spans == [
        (
            "PageStore.read_page",
            {"quire.db_id": 1, "quire.page": 0, "quire.snapshot_lsn": model.newest.lsn, "quire.epoch": 1},
        )
    ]


def test_readers_of_all_kinds_are_counted_and_named(pages: Pages, monkeypatch: pytest.MonkeyPatch) -> None:
    """`snapshot_readers.active` and the blocked segments include memory, rows and files; the planner's span has the
    blocking readers."""
    store, model = pages.database(), Model()
    write(store, model, {0: image()})
    store.wal.publish()
    published = pages.engine.open_published("shop", tags={"who": "report"})
    lease = pages.engine.lease_reader("shop", {"who": "client"})
    local_reader = store.open_snapshot(tags={"who": "here"})
    write(store, model, {0: image()})
    pages.engine.flush(store.db_id)
    write(store, model, {0: image()})
    pages.engine.flush(store.db_id)
    figures = pages.engine.figures().databases[0]
    assert figures.readers_active == 3
    assert figures.segments_blocked == 2, "the first segment is below them all"
    recorder = _Recorder()
    monkeypatch.setitem(sys.modules, TRACE_API, recorder)
    pages.checkpoint(store)
    plans = [attributes for name, attributes in recorder.spans if name == "CheckpointPlanner.select_mvcc_segments"]
    assert {f"who={who}" for who in ("report", "client", "here")} == {
        word
        for reader in plans[0]["quire.blocking_readers"]
        for word in reader.replace(",", "").split()
        if word.startswith("who=")
    }
    pages.engine.close_reader("shop", lease.reader_id)
    local_reader.close()
    published.close()
    figures = pages.engine.figures().databases[0]
    assert figures.readers_active == figures.segments_blocked == 0


def test_a_read_of_a_published_version_is_the_same_span(pages: Pages, monkeypatch: pytest.MonkeyPatch) -> None:
    store, model = pages.database(), Model()
    write(store, model, {0: image()})
    write(store, model, {1: image()})
    store.wal.publish()
    recorder = _Recorder()
    monkeypatch.setitem(sys.modules, TRACE_API, recorder)
    with pages.engine.open_published("shop") as reader:
        reader.read_page(0)
    assert recorder.spans == [
        (
            "PageStore.read_page",
            {"quire.db_id": 1, "quire.page": 0, "quire.snapshot_lsn": model.newest.lsn, "quire.epoch": 1},
        )
    ]
