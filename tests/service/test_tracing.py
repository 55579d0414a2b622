"""The trace of a client goes with its calls: into the owner's spans, and into the change records that it led to."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from quire.core.tracing import attached_trace, current_traceparent, span, trace_id
from tests.service.world import end, line, process

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
        {"name": each.name, "trace": f"{each.context.trace_id:032x}", "attributes": dict(each.attributes or {}),
         "parent": f"{each.parent.span_id:016x}" if each.parent else ""}
        for each in exporter.get_finished_spans()
    ]
print(json.dumps({"changes": changes, "spans": spans}), flush=True)
"""

CLIENT = """
import json, sys
import quire
from quire.manifest.ops.base import Counter, ReserveIds
tracer = trace.get_tracer("app")
told = {}
with quire.connect(sys.argv[1], **({"token_file": sys.argv[2]} if sys.argv[2:] else {})) as client:
    client.create("untraced", "pages")
    for name in ("one", "two"):
        with tracer.start_as_current_span(name) as request:
            context = request.get_span_context()
            told[name] = [f"{context.trace_id:032x}", f"{context.span_id:016x}"]
            client.create(name, "pages")
            client.submit([ReserveIds(Counter.JOB, 100 + len(told))]).result()
    with tracer.start_as_current_span("three") as request:
        told["three"] = [f"{request.get_span_context().trace_id:032x}", ""]
        client.checkpoint("one")
print(json.dumps(told), flush=True)
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
        told = json.loads(line(owner))
    finally:
        end(owner)
    expect_changes(told["changes"], traces)
    if recording:
        expect_spans(told["spans"], traces)


def expect_changes(changes: list[Any], traces: dict[str, list[str]]) -> None:
    found = [(ops[0], trace) for trace, ops in changes if ops[0] in ("RegisterDb", "ReserveIds")]
    one, two = traces["one"][0], traces["two"][0]
    registered = [trace for op, trace in found if op == "RegisterDb"]
    assert registered[1:] == [one, two]
    assert registered[0] not in (one, two), "nobody traced that, unless the owner does by itself"
    assert [trace for op, trace in found if op == "ReserveIds" and trace in (one, two)] == [one, two], (
        "each batch by itself"
    )
    of_the_job = {op for trace, ops in changes for op in ops if trace == traces["three"][0]}
    assert {"EnqueueJob", "CompleteJob"} <= of_the_job, "a job belongs to who asked for it"


def expect_spans(spans: list[dict[str, Any]], traces: dict[str, list[str]]) -> None:
    for trace, parent in (traces["one"], traces["two"]):
        (call,) = [
            each for each in spans if each["trace"] == trace and each["attributes"].get("quire.action") == "create"
        ]
        assert (call["name"], call["parent"], call["attributes"]["quire.role"]) == ("Service.call", parent, "admin")
    assert {"Service.call", "Job.run"} <= {each["name"] for each in spans if each["trace"] == traces["three"][0]}


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
def test_what_is_no_trace_is_none(text: str) -> None:
    with attached_trace(text):
        assert (trace_id(), current_traceparent()) == ("", "")


def test_a_trace_that_came_is_the_one_that_goes_on() -> None:
    text = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    with attached_trace(text):
        assert current_traceparent() == text
        with span("Service.call"):
            assert trace_id() == "0af7651916cd43dd8448eb211c80319c"
    assert current_traceparent() == ""
