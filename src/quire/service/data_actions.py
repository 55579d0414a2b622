"""The actions of streams and key-value sets: the requests that a client's `stream(name)` and `kv(name)` send to the owner.

Records and pairs are sent in pages of about `PAGE_BYTES`, however much a client reads: neither side holds more. Appends and
writes carry an idempotency key that is written with the data (`core/recent_keys.py`); all other actions may be repeated.
"""

from __future__ import annotations

from quire.core.limits import MIB
from quire.lsm.kv import Stats
from quire.service.tickets import Action, DatabaseRequest, OfConsumer, Role, Scope, on_database
from quire.service.values import Request
from quire.stream.spans import StreamRecord
from quire.stream.state import Consumer, Retention
from quire.stream.stream import StreamInfo

PAGE_BYTES = MIB
PAGE_ROWS = 16_384
PAIR_BYTES = 64
"""The least that a pair or a record counts: many small ones take memory, too."""


class OfName(DatabaseRequest, frozen=True):
    """Names a stream or a key-value set."""


class OfHolding(Request, frozen=True):
    """A resource that the client holds open at the owner."""

    holding_id: str


# ── streams ───────────────────────────────────────────────────────────────────────────────────────────────────────────
class AppendRecords(DatabaseRequest, frozen=True):
    """Append records that become durable together or not at all."""

    records: list[bytes]


class StreamMarks(Request, frozen=True):
    """The first record and the end of a stream."""

    first_record: int
    end_record: int


class ReadRecords(DatabaseRequest, frozen=True):
    """Read the records of [start, stop), in pages; `None` is the first record, and the current end.

    `wait_seconds`: if there are none yet, wait this long for one; `stop` is then the end of the stream.
    """

    start: int | None = None
    stop: int | None = None
    wait_seconds: float = 0.0


class RecordPage(Request, frozen=True):
    """Some of the requested records, and where to continue; at `stop` there are no more."""

    records: list[StreamRecord]
    next_record: int
    stop: int


class SeekRecord(DatabaseRequest, frozen=True):
    timestamp_ms: int


class Retain(DatabaseRequest, frozen=True):
    retention: Retention | None = None


# ── keys and values ───────────────────────────────────────────────────────────────────────────────────────────────────
class GetValues(DatabaseRequest, frozen=True):
    """Read the values of keys, from the current version or from a snapshot that the client holds."""

    keys: list[bytes]
    snapshot: str = ""


class WritePairs(DatabaseRequest, frozen=True):
    """Write a batch; `None` deletes a key."""

    pairs: dict[bytes, bytes | None]
    sync: bool = True


class ScanPairs(DatabaseRequest, frozen=True):
    """Read the pairs of [low, high), from either end, in pages. Without a snapshot the owner takes one if there are more."""

    low: bytes
    high: bytes | None = None
    reverse: bool = False
    snapshot: str = ""


class PairPage(Request, frozen=True):
    """Some of the requested pairs. The next request names `snapshot`; it is empty if there are no more pairs."""

    keys: list[bytes]
    values: list[bytes]
    snapshot: str = ""


class HeldSnapshot(Request, frozen=True):
    """A snapshot that the client holds."""

    snapshot: str
    lsn: int


def _read(name: str, request: type[DatabaseRequest], answer: object) -> Action:
    return on_database(name, request, answer, Role.READ)


STREAM_TAIL = "stream.tail"

DATA_ACTIONS = (
    Action("holding.renew", OfHolding, None, Role.READ, scope=Scope.HELD),
    Action("holding.release", OfHolding, None, Role.READ, scope=Scope.HELD),
    on_database("stream.append", AppendRecords, int, keyed=True),
    _read("stream.marks", OfName, StreamMarks),
    _read("stream.read", ReadRecords, RecordPage),
    _read(STREAM_TAIL, ReadRecords, RecordPage),
    _read("stream.seek", SeekRecord, int),
    _read("stream.info", OfName, StreamInfo),
    _read("stream.consumers", OfName, dict[str, Consumer]),
    on_database("stream.drop_consumer", OfConsumer, None),
    on_database("stream.sync", OfName, int),
    on_database("stream.seal", OfName, bool),
    _read("stream.retention", OfName, Retention),
    on_database("stream.retain", Retain, None),
    on_database("stream.retire", OfName, int),
    _read("kv.stats", OfName, Stats),
    _read("kv.get", GetValues, list[bytes | None]),
    on_database("kv.write", WritePairs, int, keyed=True),
    on_database("kv.sync", OfName, None),
    on_database("kv.flush", OfName, None),
    on_database("kv.compact", OfName, None),
    _read("kv.scan", ScanPairs, PairPage),
    _read("kv.snapshot", OfName, HeldSnapshot),
)
