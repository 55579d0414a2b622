"""Spans and trace ids, recorded by OpenTelemetry's SDK: in a separate process, because a provider can be set only
once."""

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
        request_trace = f"{request.get_span_context().trace_id:032x}"
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
    {"name": span.name, "trace": f"{span.context.trace_id:032x}", "attributes": dict(span.attributes or {}),
     "parent": bool(span.parent)}
    for span in exporter.get_finished_spans()
]
print(json.dumps({"request_trace": request_trace, "changes": changes, "spans": spans}))
"""


def test_spans_are_recorded_and_change_records_have_their_trace_id(tmp_path: Path) -> None:
    env = {**os.environ, "PYTHONPATH": str(SRC)}
    result = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path / "store")], capture_output=True, text=True, timeout=120, env=env
    )
    assert result.returncode == 0, result.stderr
    output = json.loads(result.stdout)
    request_trace, spans = output["request_trace"], output["spans"]
    names = {span["name"] for span in spans}
    assert names - {"request"} <= set(SPANS)
    assert set(SPANS) - names == {"Spark.run", "Service.call"}, "tests/spark and tests/service cover those"
    in_request = {span["name"] for span in spans if span["trace"] == request_trace}
    assert {"PageStore.commit", "Job.run", "Checkpoint.plan", "Checkpoint.write", "Checkpoint.publish"} <= in_request
    written = next(span for span in spans if span["name"] == "Checkpoint.write")
    assert (written["attributes"]["quire.runner"], written["attributes"]["quire.slots"]) == ("threads", 1)
    by_op = {op: trace for trace, ops in output["changes"] for op in ops}
    assert by_op["RegisterDb"] == "", "not within a trace"
    assert by_op["PublishSnapshot"] == request_trace
    assert by_op["BeginPlan"] == by_op["CompleteJob"] == request_trace, (
        "a job is part of the trace of the call that starts it"
    )


def test_without_opentelemetry_nothing_is_loaded(tmp_path: Path) -> None:
    code = (
        "import sys, quire\n"
        f"with quire.open({str(tmp_path / 'store')!r}) as store: store.create('shop', 'pages')\n"
        "from quire.core.tracing import span, trace_id\n"
        "with span('x', a=1) as disabled: disabled.set(b=2)\n"
        "assert trace_id() == ''\n"
        "assert not [name for name in sys.modules if name.startswith('opentelemetry')]"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60, env={**os.environ, "PYTHONPATH": str(SRC)})


def test_the_page_lists_every_span() -> None:
    page = (ROOT / "docs" / "operations.md").read_text("utf-8")
    assert [name for name in SPANS if f"| `{name}` |" not in page] == []
