"""An owner that applies batches of a streaming query, and can be killed at a failpoint.

    QUIRE_FAILPOINTS=stream.batch.appended=1*off->kill python -m tests.service.killed_batches PATH stream 0 1

Each batch has two rows, which contain its number.
"""

from __future__ import annotations

import sys

import pyarrow as pa

import quire
from quire.core.settings import MaintenanceSettings, StoreSettings
from quire.service.loads import Loads
from quire.service.messages import LoadRows
from quire.service.tickets import LoadPairs, LoadRecords, PutPart

QUERY = "a-query"
QUIET = StoreSettings(maintenance=MaintenanceSettings(enabled=False))


def stream_of(**columns: list[str]) -> bytes:
    """Columns as the bytes of an Arrow stream."""
    sink = pa.BufferOutputStream()
    batch = pa.RecordBatch.from_pydict(columns)
    with pa.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch)
    return bytes(sink.getvalue())


def take(loads: Loads, kind: str, load: int, batch: int) -> None:
    """Have a store apply a batch."""
    names = [f"{batch}-0", f"{batch}-1"]
    if kind == "sqlite":
        loads.put(PutPart(load, "0-0", 0, stream_of(name=names)))
        options = {"create": True, "create_database": True, "query": QUERY, "batch": batch}
        loads.insert(LoadRows(load, "sqlite", "t", ("0-0",), (("name", "TEXT"),), **options))  # type: ignore[arg-type]
    elif kind == "kv":
        loads.put(PutPart(load, "0-0", 0, stream_of(key=names, value=[f"by load {load}"] * 2)))
        loads.write_pairs(LoadPairs(load, "kv", ("0-0",), ("key", "value"), QUERY, batch, create=True))
    else:
        loads.put(PutPart(load, "0-0", 0, stream_of(payload=names)))
        loads.append_records(LoadRecords(load, "stream", ("0-0",), QUERY, batch, True))


def main(path: str, kind: str, *batches: str) -> None:
    """Apply the batches that the command line names."""
    with quire.open(path, settings=QUIET) as store:
        loads = Loads(store)
        for batch in map(int, batches):
            load = batch + 1 + 1_000 * len(batches)
            take(loads, kind, load, batch)


if __name__ == "__main__":
    main(*sys.argv[1:])
