"""What the owner does for actions about streams (`stream_messages.py`).

A stream that is not open is opened. A long poll ends when the server stops or its client has left.

Threads: any; one call is one thread.
"""

from __future__ import annotations

from quire.core.errors import AccessDenied, CursorLost, InvalidInput, OutOfRange
from quire.service import stream_messages as m
from quire.service.api import Asked, StoreApi
from quire.service.tickets import Access
from quire.stream.remote_layout import share
from quire.stream.remote_read import SharedStream

WAIT_PIECE_SECONDS = 0.25


class StreamHandlers:
    """The actions about streams of one store."""

    def __init__(self, store: StoreApi) -> None:
        self._store = store

    def do_stream_share(self, request: m.OfStream, asked: Asked) -> SharedStream:
        if request.upload and asked.role != Access.ADMIN.value:
            raise AccessDenied("to upload needs the admin token", hint="ask without upload")
        stream = self._store.stream(request.name)
        return share(
            stream,
            request.start,
            request.stop,
            upload=request.upload,
            store_id=self._store.manifest.feed.store_id(),
            objects_url=self._store.namespaces.url_of(request.name),
        )

    def do_stream_wait(self, request: m.WaitForRecord, asked: Asked) -> int:
        """The end, behind `record` or as it is when the time is over."""
        stream, clock = self._store.stream(request.name), self._store.manifest.clock
        deadline = clock.monotonic() + min(max(request.seconds, 0.0), self._store.settings.service.wait_seconds_max)
        hot = stream.hot
        while stream.end_record <= request.record and hot.failure is None:
            rest = deadline - clock.monotonic()
            if rest <= 0 or asked.is_over():
                break
            hot.waiters.sleep_until(
                lambda: hot.durable > request.record or hot.failure is not None, min(rest, WAIT_PIECE_SECONDS)
            )
        end: int = stream.end_record
        return end

    def do_stream_position(self, request: m.OfConsumer, _: Asked) -> int:
        position: int = self._store.stream(request.name).position(request.consumer)
        return position

    def do_stream_register(self, request: m.RegisterConsumer, _: Asked) -> int:
        stream = self._store.stream(request.name)
        first, end = stream.first_record, stream.end_record
        ends = {"oldest": first, "latest": end}
        start = request.start if isinstance(request.start, int) else ends.get(request.start)
        if start is None:
            raise InvalidInput("a consumer starts at `oldest`, `latest` or a record", start=request.start)
        if request.consumer not in stream.consumers:
            if start < first:
                raise CursorLost(
                    "these records are no longer retained",
                    hint=f"the first one is {first}",
                    start=start,
                    first=first,
                )
            if start > end:
                raise OutOfRange("there is no such record yet", hint=f"the next one is {end}", start=start, end=end)
        position: int = stream.register(request.consumer, start)
        return position

    def do_stream_ack(self, request: m.AckRecords, _: Asked) -> None:
        self._store.stream(request.name).ack(request.consumer, request.position)

    def do_stream_log_mode(self, request: m.LogMode, _: Asked) -> str:
        engine = self._store.streams
        if request.mode:
            engine.switch(request.mode)
        mode: str = engine.mode.value
        return mode
