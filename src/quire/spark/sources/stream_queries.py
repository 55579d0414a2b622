"""`readStream.format("quire.stream")`: Spark's progress is the position of a consumer (K4).

Terms
  consumer   whose position Spark's checkpoint and the stream share; its name is the option `consumer`
  offset     {"store": id, "stream": id, "record": n}: everything below n has been read
  position   what the consumer has acknowledged: nothing from there on is retired while it holds (`stream/state.py`)

Rules (1 to 3 are those of following.py)
  4. A checkpoint belongs to its store and its stream: an offset of another one is refused, also if it has the same name.
  5. A new query begins where its consumer stands. One that is not there is registered: `start` says where.

Options: `stream`, `consumer`; `start` for a new consumer: `oldest` (the default), `latest`, or the id of the first record
wanted; `max_records` in a batch; `columns`, `upload`, `partitions`.

Raises `CursorLost`, `InvalidInput`, and what a client raises.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from pyspark.sql.datasource import InputPartition
from pyspark.sql.types import StructType

from quire.core.errors import CursorLost, InvalidInput, UnknownCursor
from quire.service.tickets import (
    STREAM_ACK,
    STREAM_POSITION,
    STREAM_REGISTER,
    STREAM_WAIT,
    AckRecords,
    OfConsumer,
    RegisterConsumer,
    WaitForRecord,
)
from quire.spark.sources.following import WAIT_SECONDS, FollowingReader, Offset
from quire.spark.sources.options import Options
from quire.spark.sources.stream import Records, StreamPartition

if TYPE_CHECKING:
    import pyarrow as pa

    from quire.service.channel import Channel
    from quire.stream.remote_read import SharedStream


class StreamQueryReader(FollowingReader):
    """See the rules above."""

    def __init__(self, options: Options, schema: StructType) -> None:
        super().__init__(options.number("max_records", 0))
        if options.text("end"):
            raise InvalidInput("`end` is for ranges", hint="a streaming query has none; read instead of readStream")
        self.consumer = options.need("consumer")
        self.records = Records(options, schema)
        self._start: int | str = options.text("start", "oldest").lower()
        if self._start not in ("oldest", "latest"):
            self._start = options.number("start", 0, least=1)
        self._channel: Channel | None = None
        self._share: SharedStream | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Executors get the reader without its connection."""
        return {**self.__dict__, "_channel": None, "_share": None}

    def _owner(self) -> Channel:
        if self._channel is None:
            self._channel = self.records.access.channel()
        return self._channel

    def _now(self) -> SharedStream:
        """The stream as it is now, without its segments."""
        self._share = self.records.share(self._owner(), None, 1)
        return self._share

    def _ours(self) -> SharedStream:
        """Whose offsets these are."""
        return self._share if self._share is not None else self._now()

    # ── offsets ───────────────────────────────────────────────────────────────────────────────────────────────────────
    def initialOffset(self) -> Offset:  # noqa: N802 - Spark gives these names
        """Where the consumer stands; one that is not there is registered at `start` (rule 5)."""
        request = RegisterConsumer(self.records.stream, self.consumer, self._start)
        return self.offset(self._owner().ask(STREAM_REGISTER, request))

    def end(self) -> int:
        """Behind the last durable record."""
        return self._now().end_record

    def end_beyond(self, position: int) -> int:
        """The same, after waiting a little for a record from `position` on."""
        end = int(self._owner().ask(STREAM_WAIT, WaitForRecord(self.records.stream, position, WAIT_SECONDS)))
        if end <= position:
            # A query that idles commits nothing: without a heartbeat its consumer would lose its hold.
            with self._knowing():
                self._owner().ask(STREAM_ACK, AckRecords(self.records.stream, self.consumer, 0))
        return end

    def offset(self, position: int) -> Offset:
        """Everything below a record."""
        ours = self._ours()
        return {"store": ours.store_id, "stream": ours.stream_id, "record": position}

    def position(self, offset: Offset) -> int:
        """The record of an offset; one of another store or stream is refused (rule 4)."""
        theirs, found = (offset.get("store"), offset.get("stream")), self._ours()
        if theirs != (found.store_id, found.stream_id):
            raise InvalidInput(
                "the checkpoint is of another stream",
                hint="use a checkpoint location of its own",
                theirs=theirs,
                ours=(found.store_id, found.stream_id),
            )
        return int(offset["record"])

    # ── batches ───────────────────────────────────────────────────────────────────────────────────────────────────────
    def partitions(self, start: Offset, end: Offset) -> Sequence[InputPartition]:
        """The parts of a batch, checked (rule 3)."""
        first, stop = self.position(start), self.position(end)
        if first >= stop:
            return []
        with self._knowing():
            position = int(
                self._owner().ask(STREAM_POSITION, OfConsumer(self.records.stream, self.consumer))
            )  # before the parts: what it holds is there when they are found
        if first < position:
            raise CursorLost(
                "the query goes on from an older checkpoint than its consumer has acknowledged",
                hint="restore the newer checkpoint, or begin again with another consumer",
                consumer=self.consumer,
                record=first,
                position=position,
            )
        return [StreamPartition(each) for each in self.records.parts(self._owner(), first, stop)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """The records of a part, on an executor."""
        return self.records.read(partition.value)

    def commit(self, end: Offset) -> None:
        """Spark has done with everything below `end` (rules 1 and 2)."""
        with self._knowing():
            self._owner().ask(STREAM_ACK, AckRecords(self.records.stream, self.consumer, self.position(end)))

    def stop(self) -> None:
        """The query has ended."""
        if self._channel is not None:
            self._channel.close()
            self._channel = None

    # ── helpers ───────────────────────────────────────────────────────────────────────────────────────────────────────
    @contextmanager
    def _knowing(self) -> Iterator[None]:
        """A query that has begun has a consumer, unless somebody dropped it."""
        try:
            yield
        except UnknownCursor as error:
            raise CursorLost(
                "the consumer of this query was dropped",
                hint="begin again, with another consumer and a new checkpoint location",
                consumer=self.consumer,
            ) from error
