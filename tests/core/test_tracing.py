"""Spans and trace ids, recorded by OpenTelemetry's own SDK: in a process of its own, because a provider is set once."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from quire.core.tracing import SPANS
from tests.rules.tree import ROOT, SRC

PROGRAM = """
import json, sys
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

exporter = InMemorySpanExporter()
provider = TracerProvider()
provider.add_span_processor(SimpleSpanProcessor(exporter))
trace.set_tracer_provider(provider)
import quire

with quire.open(sys.argv[1]) as store:
    store.create("shop", "pages")
    with trace.get_tracer("app").start_as_current_span("request") as request:
        mine = f"{request.get_span_context().trace_id:032x}"
        with store.sqlite("shop") as db:
            db.execute("create table t(x)")
            db.execute("insert into t values(1)")
        with store.pages.open("shop").open_snapshot() as reader:
            reader.read_page(0)
            list(reader.scan())
        store.snapshot("shop", "kept")
        store.checkpoint("shop", runner="threads")
    with store.manifest.read() as txn:
        changes = [(change.trace_id, [type(op).__name__ for op in change.operations]) for change in txn.changes()]
spans = [
    {"name": each.name, "trace": f"{each.context.trace_id:032x}", "attributes": dict(each.attributes or {}),
     "parent": bool(each.parent)}
    for each in exporter.get_finished_spans()
]
print(json.dumps({"mine": mine, "changes": changes, "spans": spans}))
"""


def test_spans_and_the_change_records_that_lead_back_to_them(tmp_path: Path) -> None:
    env = {**os.environ, "PYTHONPATH": str(SRC)}
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path / "store")], capture_output=True, text=True, timeout=120, env=env
    )
    assert ended.returncode == 0, ended.stderr
    told = json.loads(ended.stdout)
    mine, spans = told["mine"], told["spans"]
    names = {each["name"] for each in spans}
    assert names - {"request"} <= set(SPANS)
    assert set(SPANS) - names == {"Spark.run", "Service.call"}, "tests/spark and tests/service have those"
    in_request = {each["name"] for each in spans if each["trace"] == mine}
    assert {"PageStore.commit", "Job.run", "Checkpoint.plan", "Checkpoint.write", "Checkpoint.publish"} <= in_request
    written = next(each for each in spans if each["name"] == "Checkpoint.write")
    assert (written["attributes"]["quire.runner"], written["attributes"]["quire.slots"]) == ("threads", 1)
    by_op = {op: trace for trace, ops in told["changes"] for op in ops}
    assert by_op["RegisterDb"] == "", "nobody traced that"
    assert by_op["PublishSnapshot"] == mine
    assert by_op["BeginPlan"] == by_op["CompleteJob"] == mine, "a job that somebody starts is part of the trace"


def test_without_opentelemetry_nothing_is_loaded(tmp_path: Path) -> None:
    code = (
        "import sys, quire\n"
        f"with quire.open({str(tmp_path / 'store')!r}) as store: store.create('shop', 'pages')\n"
        "from quire.core.tracing import span, trace_id\n"
        "with span('x', a=1) as quiet: quiet.set(b=2)\n"
        "assert trace_id() == ''\n"
        "assert not [each for each in sys.modules if each.startswith('opentelemetry')]"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60, env={**os.environ, "PYTHONPATH": str(SRC)})


def test_the_page_lists_every_span() -> None:
    page = (ROOT / "docs" / "operations.md").read_text("utf-8")
    assert [each for each in SPANS if f"| `{each}` |" not in page] == []
