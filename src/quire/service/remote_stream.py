"""A stream of a store that another process owns: the API of `quire.stream.stream.Stream`, over a channel.

Appends are queued and sent together: by a thread that waits for a result, by an append that makes the queue too large, and by a
background thread for the rest. The records of one call become durable together, and once: the call carries an idempotency key
that is written with them. An append that fails is reported by its result, or else by the next `sync` or `close`. Reads and
tails fetch pages. A connection may break between two pages unnoticed, because records never change.

Threads: any; an iterator belongs to one thread. Raises what a stream in this process raises, and what the channel raises.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Generator, Iterator
from typing import TYPE_CHECKING, Any

from quire.core.errors import InternalError, InvalidInput, OutOfRange, QuireError, StoreClosed, TimedOut
from quire.core.limits import IDEMPOTENCY_KEY_BYTES
from quire.core.waiting import in_thread
from quire.service import data_actions as d
from quire.service import tickets
from quire.service.channel import Channel
from quire.service.client_forks import reset_after_fork
from quire.service.data_actions import STREAM_TAIL
from quire.stream.append_buffer import Records, check_records
from quire.stream.spans import StreamRecord
from quire.stream.state import Consumer, Retention
from quire.stream.stream import StreamInfo

if TYPE_CHECKING:
    import pyarrow as pa

SEND_SECONDS = 0.02
"""How long the background thread waits before it sends appends whose result is not awaited."""
CALL_APPENDS_MAX = 4_096
CALL_BYTES = 4 << 20
"""The size up to which appends share a call. A single append may be larger, up to the owner's limit."""
RECORD_BYTES = 8
"""The most bytes that a record takes in addition to its payload."""
WAIT_SECONDS = 10.0
"""The longest wait of one long poll of a tail."""


class RemoteAppended:
    """The result of `append`: whether the records are durable, and their ids."""

    __slots__ = ("_error", "_first", "_is_settled", "_stream", "count", "key", "payloads", "size")

    def __init__(self, stream: RemoteStream, payloads: list[bytes], size: int, key: bytes) -> None:
        self._stream = stream
        self.payloads = payloads
        self.size = size
        self.key = key
        self.count = len(payloads)
        self._is_settled = False
        self._first = 0
        self._error: QuireError | None = None

    @property
    def record(self) -> int:
        """The id of the first record. Waits until the append is durable, because the owner assigns the id."""
        return self.result()

    @property
    def done(self) -> bool:
        """Whether the records are durable."""
        return self._is_settled and self._error is None

    @property
    def is_settled(self) -> bool:
        """Whether the append has ended, with or without an error."""
        return self._is_settled

    def result(self) -> int:
        """Wait until the records are durable and return the id of the first one."""
        if not self._is_settled:
            self._stream.settle(self)
        if self._error is not None:
            self._stream.unreported.pop(self, None)
            raise self._error.with_traceback(None)
        return self._first

    def end(self, first: int, error: QuireError | None) -> None:
        """Record the outcome. Called by the stream."""
        self._first, self._error, self.payloads = first, error, []
        if error is not None:
            self._stream.unreported[self] = None
        self._is_settled = True

    def __await__(self) -> Generator[Any, None, int]:
        if not self._is_settled:
            return (yield from in_thread(self.result))
        return self.result()


class RemoteStream:
    """A remote stream. Created by `client.stream(name)`."""

    def __init__(self, channel: Channel, name: str, body_bytes_max: int) -> None:
        # constant after construction
        self._channel = channel
        self.name = name
        self._bytes_max = body_bytes_max
        reset_after_fork(self, RemoteStream._reset)

    def _reset(self) -> None:
        """Start with an empty queue: see `client_forks.py`."""
        # held while sending, so that appends arrive in the order in which they were made
        self._sending = threading.Lock()
        # guarded by _lock, which is taken after _sending
        self._lock = threading.Lock()
        self._append_queue: deque[RemoteAppended] = deque()
        self._append_queue_bytes = 0
        self.unreported: dict[RemoteAppended, None] = {}
        """Failed appends whose error has not been raised yet."""
        self._closed = False
        self._sender: threading.Thread | None = None
        self._appends_queued = threading.Event()

    # ── writing ───────────────────────────────────────────────────────────────────────────────────────────────────────
    def append(self, records: Records, *, key: bytes = b"") -> RemoteAppended:
        """Add a record (`bytes`) or many (a sequence, an Arrow column), which are durable together or not at all.

        `.result()` (or `await`) returns when they are durable; so does `.record`, the id of the first one.
        They are appended once, however often a response is lost. With your own `key`, 16 random bytes, you may also repeat the
        call.
        """
        if key and len(key) != IDEMPOTENCY_KEY_BYTES:
            raise InvalidInput("an idempotency key must be 16 bytes", bytes=len(key))
        payloads = _payloads(records)
        size = sum(map(len, payloads)) + RECORD_BYTES * len(payloads)
        if size > self._bytes_max - RECORD_BYTES:
            hint = "append fewer records at once, or raise service.body_bytes_max at the owner"
            raise OutOfRange("the records are too long for one call", hint=hint, bytes=size, max=self._bytes_max)
        appended = RemoteAppended(self, payloads, size, key)
        with self._lock:
            if self._closed:
                raise StoreClosed("the client is closed", hint="connect again")
            self._append_queue.append(appended)
            self._append_queue_bytes += size
            is_full = self._append_queue_bytes > CALL_BYTES
            if self._sender is None:
                self._sender = threading.Thread(target=self._run, name="quire-client-append", daemon=True)
                self._sender.start()
        self._appends_queued.set()
        if is_full:
            self.settle(appended)
        return appended

    def settle(self, appended: RemoteAppended) -> None:
        """Send queued appends until this one has ended. A thread that waits for the lock finds most of them already sent."""
        while not appended.is_settled:
            with self._sending:
                if not appended.is_settled and not self._send_one_call():
                    # It is not queued, and no thread is sending it: the process that appended it was this one's parent.
                    appended.end(-1, TimedOut("the append was interrupted", hint="it may still take effect"))

    def _send_one_call(self) -> bool:
        """Send the appends that fit into one call; return False if the queue is empty. REQUIRES `_sending`."""
        with self._lock:
            call_appends, size = list[RemoteAppended](), 0
            while self._append_queue and len(call_appends) < CALL_APPENDS_MAX:
                first = self._append_queue[0]
                if call_appends and (first.key or call_appends[-1].key or size + first.size > CALL_BYTES):
                    break  # a call has one key, so an append with its own key is sent alone
                call_appends.append(self._append_queue.popleft())
                size += first.size
            self._append_queue_bytes -= size
        if call_appends:
            self._send(call_appends)
        return bool(call_appends)

    def _send(self, call_appends: list[RemoteAppended]) -> None:
        records = [payload for appended in call_appends for payload in appended.payloads]
        error: QuireError = TimedOut("the append was interrupted", hint="it may still take effect")
        first = -1
        try:
            key = call_appends[0].key
            first = self._channel.call("stream.append", d.AppendRecords(self.name, records), key=key)
        except OutOfRange as refused:  # nothing was appended: send each append alone to find the one that is refused
            error = refused
            if len(call_appends) > 1:
                for appended in call_appends:
                    self._send([appended])
        except QuireError as failed:
            error = failed
        except (
            Exception
        ) as bug:  # whatever it is, every waiting caller must get an error, and the background thread go on
            error = InternalError(f"a bug in quire: {type(bug).__name__}: {bug}")
        finally:
            for appended in call_appends:
                if not appended.is_settled:
                    appended.end(first, None if first >= 0 else error)
                    first += appended.count if first >= 0 else 0

    def _run(self) -> None:
        """Send queued appends in the background."""
        while not self._closed:
            self._appends_queued.wait()
            time.sleep(SEND_SECONDS)
            self._appends_queued.clear()  # before sending: a later append sets it again
            self._send_all()

    def _send_all(self) -> None:
        """Send the queued appends, and wait for those that another thread is sending."""
        is_sending = True
        while is_sending:
            with self._sending:
                is_sending = self._send_one_call()

    def _report(self) -> None:
        """Raise the error of the first failed append whose result no caller has requested."""
        with self._lock:
            failed, self.unreported = list(self.unreported), {}
        if failed:
            failed[0].result()

    def sync(self) -> int:
        """Wait until every append is durable and return the id after the last record. Raises the error of an append that
        failed and whose result no caller has requested."""
        self._send_all()
        self._report()
        return self._channel.call("stream.sync", d.OfName(self.name))

    def seal(self) -> bool:
        """Seal the open segment, so that it can move to the next tier; return False if there is none."""
        self._send_all()
        return self._channel.call("stream.seal", d.OfName(self.name))

    def close(self) -> None:
        """Send the queued appends and stop the background thread; raise as `sync` does. Idempotent. The client does this when
        it is closed."""
        with self._lock:
            self._closed = True
        self._appends_queued.set()
        self._send_all()
        if self._sender is not None:
            self._sender.join()
        self._report()

    # ── reading ───────────────────────────────────────────────────────────────────────────────────────────────────────
    def _marks(self) -> d.StreamMarks:
        return self._channel.call("stream.marks", d.OfName(self.name))

    @property
    def first_record(self) -> int:
        """The id of the first record that is retained."""
        return self._marks().first_record

    @property
    def end_record(self) -> int:
        """The id after the last durable record."""
        return self._marks().end_record

    def read(self, start: int | None = None, stop: int | None = None) -> Iterator[StreamRecord]:
        """Yield the records from `start` (default: the first) up to `stop` (default: the current end), from any tier."""
        for page in self._pages(start, stop):
            yield from page.records

    def _pages(self, start: int | None, stop: int | None) -> Iterator[d.RecordPage]:
        while True:
            page: d.RecordPage = self._channel.call("stream.read", d.ReadRecords(self.name, start, stop))
            yield page
            start, stop = page.next_record, page.stop
            if start >= stop:
                return

    def read_batches(self, start: int | None = None, stop: int | None = None) -> Iterator[Any]:
        """Yield the same records as Arrow record batches with the columns id, timestamp and payload."""
        for page in self._pages(start, stop):
            if page.records:
                yield _batch(page.records)

    def tail(self, start: int | None = None, *, timeout: float | None = None) -> Iterator[StreamRecord]:
        """Yield records from `start` (default: the current end) on, forever; stop if none comes for `timeout` seconds."""
        position = self.end_record if start is None else start
        since = time.monotonic()
        while True:
            remaining = WAIT_SECONDS if timeout is None else since + timeout - time.monotonic()
            request = d.ReadRecords(self.name, position, None, max(min(remaining, WAIT_SECONDS), 0.0))
            page: d.RecordPage = self._channel.call(
                STREAM_TAIL,
                request,
                timeout=self._channel.call_seconds + WAIT_SECONDS,
                attempt_seconds=2 * WAIT_SECONDS,
            )
            for record in page.records:
                yield record
                position = record.id + 1
                since = time.monotonic()
            position = max(position, page.next_record)  # skip the ids that a takeover left out
            if not page.records and timeout is not None and time.monotonic() - since >= timeout:
                return

    def wait(self, record: int, timeout: float | None = None) -> bool:
        """Wait until a record is durable; return False on a timeout."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            remaining = WAIT_SECONDS if deadline is None else max(deadline - time.monotonic(), 0.0)
            request = tickets.WaitForRecord(self.name, record, min(remaining, WAIT_SECONDS))
            end: int = self._channel.call(
                "stream.wait",
                request,
                timeout=self._channel.call_seconds + WAIT_SECONDS,
                attempt_seconds=2 * WAIT_SECONDS,
            )
            if end > record or (deadline is not None and time.monotonic() >= deadline):
                return end > record

    def seek(self, timestamp_ms: int) -> int:
        """Return the id of the first record at or after a moment; the end if there is none."""
        return self._channel.call("stream.seek", d.SeekRecord(self.name, timestamp_ms))

    # ── consumers ─────────────────────────────────────────────────────────────────────────────────────────────────────
    @property
    def consumers(self) -> dict[str, Consumer]:
        """The consumers and their positions, by name."""
        return self._channel.call("stream.consumers", d.OfName(self.name))

    def register(self, consumer: str, start: int | None = None) -> int:
        """Create a consumer at `start` (default: the first record) unless it exists; return its position."""
        begin: int | str = "oldest" if start is None else start
        return self._channel.call("stream.register", tickets.RegisterConsumer(self.name, consumer, begin))

    def position(self, consumer: str) -> int:
        """Return the id of the first record that a consumer has not read."""
        return self._channel.call("stream.position", tickets.OfConsumer(self.name, consumer))

    def ack(self, consumer: str, position: int) -> None:
        """Acknowledge everything below `position` for a consumer; durable on return. Repeating a position is a heartbeat: the
        records that the consumer has not read remain held for it."""
        self._channel.call("stream.ack", tickets.AckRecords(self.name, consumer, position))

    def drop_consumer(self, consumer: str) -> None:
        """Drop a consumer: records are no longer held for it."""
        self._channel.call("stream.drop_consumer", tickets.OfConsumer(self.name, consumer))

    # ── retention ─────────────────────────────────────────────────────────────────────────────────────────────────────
    @property
    def retention(self) -> Retention:
        """The retention that applies to this stream: its own, or the store's."""
        return self._channel.call("stream.retention", d.OfName(self.name))

    def retain(self, retention: Retention | None) -> None:
        """Set the stream's own retention, or with `None` return to that of the store's settings."""
        self._channel.call("stream.retain", d.Retain(self.name, retention))

    def retire(self) -> int:
        """Remove the segments that retention no longer covers, now; return their number."""
        return self._channel.call("stream.retire", d.OfName(self.name))

    def info(self) -> StreamInfo:
        """Return the stream's figures."""
        return self._channel.call("stream.info", d.OfName(self.name))


def _payloads(records: Records) -> list[bytes]:
    """Return the records as a list of bytes; raise the errors of a stream in this process."""
    if isinstance(records, bytes | bytearray | memoryview):
        return [bytes(records)]
    given = check_records(records).given
    return given if isinstance(given, list) else given.to_pylist()


def _batch(records: list[StreamRecord]) -> pa.RecordBatch:
    from quire.stream.arrow_batches import batch_of  # imports Arrow, which most programs do not need

    return batch_of(records)
