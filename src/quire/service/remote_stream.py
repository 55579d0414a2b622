"""A stream of a store that another process owns: the API of `quire.stream.stream.Stream`, over a channel.

Appends are collected and sent together: by whoever asks for a result, by whoever appends what is too much, and by a thread when
nobody asks. What is sent together is durable together, once: it carries a key that is written with the records. Reads and tails
come in pages; a connection that breaks between two of them is not noticed, since records never change.

Threads: any; an iterator belongs to one. Raises what a stream in this process raises, and what the channel raises.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Generator, Iterator
from typing import TYPE_CHECKING, Any

from quire.core.errors import InvalidInput, OutOfRange, QuireError, StoreClosed, TimedOut
from quire.core.limits import IDEMPOTENCY_KEY_BYTES
from quire.core.waiting import in_thread
from quire.service import data_actions as d
from quire.service import tickets
from quire.service.channel import Channel
from quire.service.data_actions import STREAM_TAIL
from quire.stream.append_buffer import Records, many
from quire.stream.spans import StreamRecord
from quire.stream.state import Consumer, Retention
from quire.stream.stream import StreamInfo

if TYPE_CHECKING:
    import pyarrow as pa

SEND_SECONDS = 0.02
"""What nobody asks for is sent after so long."""
CARRIAGE_APPENDS_MAX = 4_096
CARRIAGE_BYTES = 4 << 20
"""Appends are sent together up to this size; a single one may be larger, up to what the owner takes."""
RECORD_BYTES = 8
"""What a record takes beside its payload, at most."""
WAIT_SECONDS = 10.0
"""One long poll of a tail."""


class RemoteAppended:
    """What `append` returns: that the records are durable, and their ids, when asked."""

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
        """The id of the first record: the owner gives it, so it is asked for."""
        return self.result()

    @property
    def done(self) -> bool:
        """Whether the records are durable."""
        return self._is_settled and self._error is None

    @property
    def is_settled(self) -> bool:
        """Whether it is known what became of them."""
        return self._is_settled

    def result(self) -> int:
        """Return when the records are durable: the id of the first one."""
        if not self._is_settled:
            self._stream.settle(self)
        if self._error is not None:
            raise self._error.with_traceback(None)
        return self._first

    def end(self, first: int, error: QuireError | None) -> None:
        """For the stream: what became of them."""
        self._first, self._error, self.payloads = first, error, []
        self._is_settled = True

    def __await__(self) -> Generator[Any, None, int]:
        if not self._is_settled:
            return (yield from in_thread(self.result))
        return self.result()


class RemoteStream:
    """A stream. Made by `client.stream(name)`."""

    def __init__(self, channel: Channel, name: str, body_bytes_max: int) -> None:
        # constant after construction
        self._channel = channel
        self.name = name
        self._bytes_max = body_bytes_max
        # held by whoever sends: appends arrive in the order they were made
        self._sending = threading.Lock()
        # guarded by _lock, which comes after _sending
        self._lock = threading.Lock()
        self._line: deque[RemoteAppended] = deque()
        self._line_bytes = 0
        self._closed = False
        self._sender: threading.Thread | None = None
        self._bell = threading.Event()

    # ── writing ───────────────────────────────────────────────────────────────────────────────────────────────────────
    def append(self, records: Records, *, key: bytes = b"") -> RemoteAppended:
        """Add a record (`bytes`) or many (a sequence, an Arrow column), which are durable together or not at all.

        `.result()` (or `await`) returns when they are durable; `.record`, the id of the first one, waits for that, too.
        They are appended once, however often an answer is lost; with a `key` of your own, 16 random bytes, you may repeat the
        call, too.
        """
        if key and len(key) != IDEMPOTENCY_KEY_BYTES:
            raise InvalidInput("an idempotency key has 16 bytes", bytes=len(key))
        payloads = _payloads(records)
        size = sum(map(len, payloads)) + RECORD_BYTES * len(payloads)
        if size > self._bytes_max - RECORD_BYTES:
            hint = "append fewer records at once, or raise service.body_bytes_max at the owner"
            raise OutOfRange("the records are too long for one call", hint=hint, bytes=size, max=self._bytes_max)
        appended = RemoteAppended(self, payloads, size, key)
        with self._lock:
            if self._closed:
                raise StoreClosed("the client is closed", hint="connect again")
            self._line.append(appended)
            self._line_bytes += size
            is_much = self._line_bytes > CARRIAGE_BYTES
            if self._sender is None:
                self._sender = threading.Thread(target=self._run, name="quire-client-append", daemon=True)
                self._sender.start()
        self._bell.set()
        if is_much:
            self.settle(appended)
        return appended

    def settle(self, appended: RemoteAppended) -> None:
        """Send what is in the line until this is answered. Whoever waits for the lock finds most of it done."""
        while not appended.is_settled:
            with self._sending:
                if not appended.is_settled:
                    self._send_some()

    def _send_some(self) -> bool:
        """Send what fits into one call; False if there is nothing. REQUIRES `_sending`."""
        with self._lock:
            carriage, size = list[RemoteAppended](), 0
            while self._line and len(carriage) < CARRIAGE_APPENDS_MAX:
                first = self._line[0]
                if carriage and (first.key or carriage[-1].key or size + first.size > CARRIAGE_BYTES):
                    break  # who brings a key of his own travels alone
                carriage.append(self._line.popleft())
                size += first.size
            self._line_bytes -= size
        if carriage:
            self._send(carriage)
        return bool(carriage)

    def _send(self, carriage: list[RemoteAppended]) -> None:
        records = [payload for appended in carriage for payload in appended.payloads]
        error: QuireError = TimedOut("the append was interrupted", hint="it may still be done")
        first = -1
        try:
            key = carriage[0].key
            first = self._channel.call("stream.append", d.AppendRecords(self.name, records), key=key)
        except OutOfRange as refused:  # nothing was appended: one of them is to blame
            error = refused
            if len(carriage) > 1:
                for appended in carriage:
                    self._send([appended])
                return
        except QuireError as failed:
            error = failed
        finally:
            if not all(appended.is_settled for appended in carriage):
                for appended in carriage:
                    appended.end(first, None if first >= 0 else error)
                    first += appended.count if first >= 0 else 0

    def _run(self) -> None:
        """The sender's loop: what nobody asks for is sent, too."""
        while not self._closed:
            self._bell.wait()
            time.sleep(SEND_SECONDS)
            self._bell.clear()
            self._send_all()

    def _send_all(self) -> None:
        while self._line:
            with self._sending:
                self._send_some()

    def sync(self) -> int:
        """Return when everything that was appended is durable: the id behind it."""
        self._send_all()
        return self._channel.call("stream.sync", d.OfName(self.name))

    def seal(self) -> bool:
        """End the open segment, so that it can move on; False if there is none."""
        self._send_all()
        return self._channel.call("stream.seal", d.OfName(self.name))

    def close(self) -> None:
        """Send what was appended. A second time: nothing. The client does this when it is closed."""
        with self._lock:
            self._closed = True
        self._bell.set()
        self._send_all()
        if self._sender is not None:
            self._sender.join()

    # ── reading ───────────────────────────────────────────────────────────────────────────────────────────────────────
    def _marks(self) -> d.StreamMarks:
        return self._channel.call("stream.marks", d.OfName(self.name))

    @property
    def first_record(self) -> int:
        """The id of the first record that is retained."""
        return self._marks().first_record

    @property
    def end_record(self) -> int:
        """The id behind the last durable record."""
        return self._marks().end_record

    def read(self, start: int | None = None, stop: int | None = None) -> Iterator[StreamRecord]:
        """Records from `start` (default: the first) to before `stop` (default: the end as it is now), from any tier."""
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
        """The same as Arrow record batches with the columns id, timestamp and payload."""
        for page in self._pages(start, stop):
            if page.records:
                yield _batch(page.records)

    def tail(self, start: int | None = None, *, timeout: float | None = None) -> Iterator[StreamRecord]:
        """Records from `start` (default: what comes from now on), for ever; ends if none comes for `timeout` seconds."""
        position = self.end_record if start is None else start
        since = time.monotonic()
        while True:
            rest = WAIT_SECONDS if timeout is None else since + timeout - time.monotonic()
            request = d.ReadRecords(self.name, position, None, max(min(rest, WAIT_SECONDS), 0.0))
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
            position = max(position, page.next_record)  # over ids that a takeover has left out
            if not page.records and timeout is not None and time.monotonic() - since >= timeout:
                return

    def wait(self, record: int, timeout: float | None = None) -> bool:
        """Sleep until a record is durable; False if the time was up first."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            rest = WAIT_SECONDS if deadline is None else max(deadline - time.monotonic(), 0.0)
            request = tickets.WaitForRecord(self.name, record, min(rest, WAIT_SECONDS))
            end: int = self._channel.call(
                "stream.wait",
                request,
                timeout=self._channel.call_seconds + WAIT_SECONDS,
                attempt_seconds=2 * WAIT_SECONDS,
            )
            if end > record or (deadline is not None and time.monotonic() >= deadline):
                return end > record

    def seek(self, timestamp_ms: int) -> int:
        """The id of the first record that is not before a moment; the end if there is none."""
        return self._channel.call("stream.seek", d.SeekRecord(self.name, timestamp_ms))

    # ── consumers ─────────────────────────────────────────────────────────────────────────────────────────────────────
    @property
    def consumers(self) -> dict[str, Consumer]:
        """Who has read how far, by name."""
        return self._channel.call("stream.consumers", d.OfName(self.name))

    def register(self, consumer: str, start: int | None = None) -> int:
        """Make a consumer that begins at `start` (default: the first record), or leave it where it is; its position."""
        begin: int | str = "oldest" if start is None else start
        return self._channel.call("stream.register", tickets.RegisterConsumer(self.name, consumer, begin))

    def position(self, consumer: str) -> int:
        """The id of the first record that a consumer has not read."""
        return self._channel.call("stream.position", tickets.OfConsumer(self.name, consumer))

    def ack(self, consumer: str, position: int) -> None:
        """A consumer has read everything below `position`; durable on return. The same position again is a heartbeat: it keeps
        the consumer's hold on what it has not read."""
        self._channel.call("stream.ack", tickets.AckRecords(self.name, consumer, position))

    def drop_consumer(self, consumer: str) -> None:
        """Forget a consumer: it holds nothing any more."""
        self._channel.call("stream.drop_consumer", tickets.OfConsumer(self.name, consumer))

    # ── retention ─────────────────────────────────────────────────────────────────────────────────────────────────────
    @property
    def retention(self) -> Retention:
        """What holds for this stream: its own, or the store's."""
        return self._channel.call("stream.retention", d.OfName(self.name))

    def retain(self, retention: Retention | None) -> None:
        """Give the stream its own retention, or with `None` that of the store's settings."""
        self._channel.call("stream.retain", d.Retain(self.name, retention))

    def retire(self) -> int:
        """Let go now what retention says; how many segments."""
        return self._channel.call("stream.retire", d.OfName(self.name))

    def info(self) -> StreamInfo:
        """The stream in numbers."""
        return self._channel.call("stream.info", d.OfName(self.name))


def _payloads(records: Records) -> list[bytes]:
    """What is appended, as a list of bytes; refused in the words of a stream in this process."""
    if isinstance(records, bytes | bytearray | memoryview):
        return [bytes(records)]
    given = many(records).given
    return given if isinstance(given, list) else given.to_pylist()


def _batch(records: list[StreamRecord]) -> pa.RecordBatch:
    from quire.stream.arrow_batches import batch_of  # loads Arrow: most programs want records

    return batch_of(records)
