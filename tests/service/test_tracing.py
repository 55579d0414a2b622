"""The trace of a client travels with its calls, into the owner's spans and into the change records that result from
them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from quire.core.tracing import attached_trace, current_traceparent, span, trace_id
from tests.service.owners import end, line, process

RECORDING = """
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
exporter = InMemorySpanExporter()
provider = TracerProvider()
provider.add_span_processor(SimpleSpanProcessor(exporter))
trace.set_tracer_provider(provider)
"""

OWNER = """
import json, sys
import quire
from quire.core.settings import MaintenanceSettings, StoreSettings
# Without upkeep: it may be quicker than the caller, and then the job is run for nobody.
alone = StoreSettings(maintenance=MaintenanceSettings(enabled=False))
with quire.open(sys.argv[1], settings=alone) as store, store.serve(*sys.argv[2:3]) as server:
    print(server.address, flush=True)
    sys.stdin.readline()
    with store.manifest.read() as txn:
        changes = [(change.trace_id, [type(op).__name__ for op in change.operations]) for change in txn.changes()]
spans = []
if "exporter" in globals():
    spans = [
        {"name": span.name, "trace": f"{span.context.trace_id:032x}", "attributes": dict(span.attributes or {}),
         "parent": f"{span.parent.span_id:016x}" if span.parent else ""}
        for span in exporter.get_finished_spans()
    ]
print(json.dumps({"changes": changes, "spans": spans}), flush=True)
"""

CLIENT = """
import json, sys
import quire
from quire.manifest.ops.base import Counter, ReserveIds
tracer = trace.get_tracer("app")
traces = {}
with quire.connect(sys.argv[1], **({"token_file": sys.argv[2]} if sys.argv[2:] else {})) as client:
    client.create("untraced", "pages")
    for name in ("one", "two"):
        with tracer.start_as_current_span(name) as request:
            context = request.get_span_context()
            traces[name] = [f"{context.trace_id:032x}", f"{context.span_id:016x}"]
            client.create(name, "pages")
            client.submit([ReserveIds(Counter.JOB, 100 + len(traces))]).result()
    with tracer.start_as_current_span("three") as request:
        traces["three"] = [f"{request.get_span_context().trace_id:032x}", ""]
        client.checkpoint("one")
print(json.dumps(traces), flush=True)
"""


@pytest.mark.parametrize("address", [(), ("grpc://127.0.0.1:0",)], ids=["socket", "network"])
@pytest.mark.parametrize("recording", [RECORDING, ""], ids=["recording", "not recording"])
def test_a_change_record_has_the_trace_of_the_client(tmp_path: Path, recording: str, address: tuple[str, ...]) -> None:
    owner = process(recording + OWNER, str(tmp_path / "store"), *address)
    try:
        token = [str(tmp_path / "store" / "admin.token")] if address else []
        client = process(RECORDING + CLIENT, line(owner), *token)
        traces = json.loads(client.communicate(timeout=120)[0])
        assert owner.stdin is not None
        print(file=owner.stdin, flush=True)
        recorded = json.loads(line(owner))
    finally:
        end(owner)
    expect_changes(recorded["changes"], traces)
    if recording:
        expect_spans(recorded["spans"], traces)


def expect_changes(changes: list[Any], traces: dict[str, list[str]]) -> None:
    traced = [(ops[0], trace) for trace, ops in changes if ops[0] in ("RegisterDb", "ReserveIds")]
    one, two = traces["one"][0], traces["two"][0]
    registered = [trace for op, trace in traced if op == "RegisterDb"]
    assert registered[1:] == [one, two]
    assert registered[0] not in (one, two), "not traced by the client, only perhaps by the owner"
    assert [trace for op, trace in traced if op == "ReserveIds" and trace in (one, two)] == [one, two], (
        "each batch has its own trace"
    )
    of_the_job = {op for trace, ops in changes for op in ops if trace == traces["three"][0]}
    assert {"EnqueueJob", "CompleteJob"} <= of_the_job, "a job has the trace of its requester"


def expect_spans(spans: list[dict[str, Any]], traces: dict[str, list[str]]) -> None:
    for trace, parent in (traces["one"], traces["two"]):
        (call,) = [
            span for span in spans if span["trace"] == trace and span["attributes"].get("quire.action") == "create"
        ]
        assert (call["name"], call["parent"], call["attributes"]["quire.role"]) == ("Service.call", parent, "admin")
    assert {"Service.call", "Job.run"} <= {span["name"] for span in spans if span["trace"] == traces["three"][0]}


@pytest.mark.parametrize(
    "text",
    [
        "",
        "nonsense",
        "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331",
        "00-0af7651916cd43dd8448eb211c80319c-0000000000000000-01",
        "00-00000000000000000000000000000000-b7ad6b7169203331-01",
        "00-0af7651916cd43dd8448eb211c8031ag-b7ad6b7169203331-01",
        "ff-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
    ],
)
def test_an_invalid_trace_is_ignored(text: str) -> None:
    with attached_trace(text):
        assert (trace_id(), current_traceparent()) == ("", "")


def test_a_received_trace_is_passed_on() -> None:
    text = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    with attached_trace(text):
        assert current_traceparent() == text
        with span("Service.call"):
            assert trace_id() == "0af7651916cd43dd8448eb211c80319c"
    assert current_traceparent() == ""
