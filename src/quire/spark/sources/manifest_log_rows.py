"""Records of a manifest log as rows: what `quire manifest inspect` shows, for Spark.

Rules
  1. `fields` names what the format page names; bytes are hexadecimal. A record of a type that is not known keeps its payload.
  2. The marker that a bundle starts with has no ordinal and is no row: what it says is the bundle's own.

Importable on executors.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

import msgspec
import pyarrow as pa

from quire.stream.mlog_reader import Chunk, RecordView
from quire.stream.mlog_records import UnknownRecord

BATCH_ROWS = 8_192


def log_batches(stream: str, stream_id: int, chunk: Chunk, tier: str, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    """The records of a chunk or bundle, with the columns of `schema`."""
    ordinal, views = chunk.header.base_record, iter(chunk.records())
    while taken := list(islice(views, BATCH_ROWS)):
        told = [_told(view) for view in taken]
        columns: dict[str, Any] = {
            "stream": [stream] * len(taken),
            "stream_id": [stream_id] * len(taken),
            "chunk": [chunk.index] * len(taken),
            "offset": [view.offset for view in taken],
            "ordinal": range(ordinal, ordinal + len(taken)),
            "type": [name for name, _ in told],
            "segment_id": [view.segment_id for view in taken],
            "logical_offset": [view.logical_offset for view in taken],
            "timestamp": [view.timestamp_ms * 1_000 for view in taken],
            "fields": [fields for _, fields in told],
            "tier": [tier] * len(taken),
            "last_chunk": [chunk.last_index] * len(taken),
        }
        yield pa.RecordBatch.from_arrays([pa.array(columns[each.name], each.type) for each in schema], schema=schema)
        ordinal += len(taken)


def _told(view: RecordView) -> tuple[str, str]:
    """(type, fields as JSON) of a record (rule 1)."""
    value = view.value()
    if isinstance(value, UnknownRecord):
        return f"unknown {value.record_type}", msgspec.json.encode({"payload": value.payload.hex()}).decode()
    fields = msgspec.structs.asdict(value)
    plain = {key: each.hex() if isinstance(each, bytes) else each for key, each in fields.items()}
    return type(value).__name__, msgspec.json.encode(plain).decode()
