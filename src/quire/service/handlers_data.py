"""Handlers for the actions of `data_actions.py`: records, keys and values, for clients that have no access to the files.

Pages are not kept between calls: a client that stops reading costs only the snapshot that it holds (`client_holdings.py`).

Threads: any; one call is one thread.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice
from typing import Any

from quire.core.errors import OutOfRange
from quire.lsm.kv import Kv, Stats
from quire.lsm.reading import KvSnapshot
from quire.service import data_actions as d
from quire.service.api import CallContext, StoreApi
from quire.service.client_holdings import Holdings
from quire.service.frames import ANSWER_BYTES_MAX
from quire.service.tickets import OfConsumer
from quire.stream.spans import StreamRecord
from quire.stream.state import Consumer, Retention
from quire.stream.stream import Stream, StreamInfo

SNAPSHOT = "snapshot"
"""The kind of a holding: a snapshot of a key-value set."""
KEYS_MAX = 65_536
"""The most keys per call."""
KEYS_AT_ONCE = 64
"""The keys that are read before the size of their values is compared with the limit."""
VALUES_BYTES_MAX = ANSWER_BYTES_MAX // 2
"""The most bytes of values per call: a key may be requested many times, and no client takes a longer answer."""
WAIT_PIECE_SECONDS = 0.25
"""How often a long poll checks whether the server stops or its client has left; a new record wakes it at once."""


class DataHandlers:
    """Handlers for the streams and key-value sets of one store."""

    def __init__(self, store: StoreApi, holdings: Holdings) -> None:
        self._store = store
        self._holdings = holdings

    # ── holdings ──────────────────────────────────────────────────────────────────────────────────────────────────────
    def do_holding_renew(self, request: d.OfHolding, call: CallContext) -> None:
        self._holdings.renew(call.client, request.holding_id)

    def do_holding_release(self, request: d.OfHolding, call: CallContext) -> None:
        self._holdings.release(call.client, request.holding_id)

    # ── streams ───────────────────────────────────────────────────────────────────────────────────────────────────────
    def _stream(self, name: str) -> Stream:
        stream: Stream = self._store.stream(name)
        return stream

    def do_stream_append(self, request: d.AppendRecords, call: CallContext) -> int:
        return self._stream(request.name).append(request.records, key=call.key).result()

    def do_stream_marks(self, request: d.OfName, _: CallContext) -> d.StreamMarks:
        stream = self._stream(request.name)
        return d.StreamMarks(stream.first_record, stream.end_record)

    def do_stream_read(self, request: d.ReadRecords, _: CallContext) -> d.RecordPage:
        stream = self._stream(request.name)
        start = stream.first_record if request.start is None else request.start
        stop = stream.end_record if request.stop is None else min(request.stop, stream.end_record)
        return _page(stream, start, stop)

    def do_stream_tail(self, request: d.ReadRecords, call: CallContext) -> d.RecordPage:
        """Return records from `start` on; wait if there are none yet."""
        stream = self._stream(request.name)
        start = stream.end_record if request.start is None else request.start
        self._wait(stream, start, request.wait_seconds, call.is_over)
        return _page(stream, start, max(stream.end_record, start))

    def _wait(self, stream: Stream, record: int, seconds: float, is_over: Callable[[], bool]) -> None:
        clock, hot = self._store.manifest.clock, stream.hot
        deadline = clock.monotonic() + min(max(seconds, 0.0), self._store.settings.service.wait_seconds_max)
        while hot.durable <= record:
            hot.require()
            rest = deadline - clock.monotonic()
            if rest <= 0 or is_over():
                return
            hot.waiters.sleep_until(
                lambda: hot.durable > record or hot.failure is not None, min(rest, WAIT_PIECE_SECONDS)
            )

    def do_stream_seek(self, request: d.SeekRecord, _: CallContext) -> int:
        return self._stream(request.name).seek(request.timestamp_ms)

    def do_stream_info(self, request: d.OfName, _: CallContext) -> StreamInfo:
        return self._stream(request.name).info()

    def do_stream_consumers(self, request: d.OfName, _: CallContext) -> dict[str, Consumer]:
        return self._stream(request.name).consumers

    def do_stream_drop_consumer(self, request: OfConsumer, _: CallContext) -> None:
        self._stream(request.name).drop_consumer(request.consumer)

    def do_stream_sync(self, request: d.OfName, _: CallContext) -> int:
        return self._stream(request.name).sync()

    def do_stream_seal(self, request: d.OfName, _: CallContext) -> bool:
        return self._stream(request.name).seal()

    def do_stream_retention(self, request: d.OfName, _: CallContext) -> Retention:
        return self._stream(request.name).retention

    def do_stream_retain(self, request: d.Retain, _: CallContext) -> None:
        self._stream(request.name).retain(request.retention)

    def do_stream_retire(self, request: d.OfName, _: CallContext) -> int:
        return self._stream(request.name).retire()

    # ── keys and values ───────────────────────────────────────────────────────────────────────────────────────────────
    def _kv(self, name: str) -> Kv:
        return self._store.kvs.open(name)

    def do_kv_stats(self, request: d.OfName, _: CallContext) -> Stats:
        return self._kv(request.name).stats()

    def do_kv_get(self, request: d.GetValues, call: CallContext) -> list[bytes | None]:
        if request.snapshot:
            with self._holdings.use(call.client, request.snapshot, SNAPSHOT) as snapshot:
                return _values(snapshot, request.keys)
        return _values(self._kv(request.name), request.keys)

    def do_kv_write(self, request: d.WritePairs, call: CallContext) -> int:
        return self._kv(request.name).write(request.pairs, sync=request.sync, key=call.key)

    def do_kv_sync(self, request: d.OfName, _: CallContext) -> None:
        self._kv(request.name).sync()

    def do_kv_flush(self, request: d.OfName, _: CallContext) -> None:
        self._kv(request.name).flush()

    def do_kv_compact(self, request: d.OfName, _: CallContext) -> None:
        self._kv(request.name).compact()

    def do_kv_snapshot(self, request: d.OfName, call: CallContext) -> d.HeldSnapshot:
        snapshot = self._kv(request.name).snapshot()
        return d.HeldSnapshot(self._holdings.add(call.client, SNAPSHOT, snapshot), snapshot.lsn)

    def do_kv_scan(self, request: d.ScanPairs, call: CallContext) -> d.PairPage:
        if request.snapshot:
            with self._holdings.use(call.client, request.snapshot, SNAPSHOT) as held:
                page, is_all = _pairs(held, request)
            return d.PairPage(page.keys, page.values, "" if is_all else request.snapshot)
        snapshot = self._kv(request.name).snapshot()
        try:
            page, is_all = _pairs(snapshot, request)
        except BaseException:
            snapshot.close()
            raise
        if is_all:
            snapshot.close()
            return page
        return d.PairPage(page.keys, page.values, self._holdings.add(call.client, SNAPSHOT, snapshot))


def _page(stream: Stream, start: int, stop: int) -> d.RecordPage:
    """Return records from `start` on, as many as fit into a response."""
    if start >= stop:
        next(stream.read(start, start), None)  # raises if `start` is no longer retained, or beyond the end
        return d.RecordPage([], stop, stop)
    records: list[StreamRecord] = []
    size = 0
    for record in islice(stream.read(start, stop), d.PAGE_ROWS):
        records.append(record)
        size += len(record.payload) + d.PAIR_BYTES
        if size >= d.PAGE_BYTES:
            break
    return d.RecordPage(records, records[-1].id + 1 if records else stop, stop)


def _values(kv: Kv | KvSnapshot, keys: list[bytes]) -> list[bytes | None]:
    if len(keys) == 1:
        return [kv.get(keys[0])]
    if len(keys) > KEYS_MAX:
        raise OutOfRange("too many keys for one call", hint="request fewer at once", keys=len(keys), max=KEYS_MAX)
    if isinstance(kv, Kv):
        with kv.snapshot() as snapshot:
            return _values(snapshot, keys)
    values: list[bytes | None] = []
    size = 0
    for start in range(0, len(keys), KEYS_AT_ONCE):
        some = kv.get_many(keys[start : start + KEYS_AT_ONCE])
        size += sum(len(value) for value in some if value is not None)
        if size > VALUES_BYTES_MAX:
            hint = "request fewer keys at once"
            raise OutOfRange("the values are too long for one answer", hint=hint, keys=len(keys), max=VALUES_BYTES_MAX)
        values += some
    return values


def _pairs(snapshot: KvSnapshot, request: d.ScanPairs) -> tuple[d.PairPage, bool]:
    """Return the pairs of one response, and whether they are the last."""
    keys: list[bytes] = []
    values: list[bytes] = []
    size = 0
    scan: Any = snapshot.scan(low=request.low, high=request.high, reverse=request.reverse)
    for key, value in scan:
        keys.append(key)
        values.append(value)
        size += len(key) + len(value) + d.PAIR_BYTES
        if size >= d.PAGE_BYTES or len(keys) >= d.PAGE_ROWS:
            return d.PairPage(keys, values), False
    return d.PairPage(keys, values), True
