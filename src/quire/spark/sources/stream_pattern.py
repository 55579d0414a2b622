"""A streaming query over a pattern of streams: `quire.stream` with `databases` or `tags`.

    spark.readStream.format("quire.stream").options(store=path, databases="clicks-*", consumer="etl").load()

Records begin with `_database`, the name that their stream has when the batch is planned.

- The query has a consumer of the same name in every stream, which holds the records that it has not read. Spark's commits are
  acknowledgements (K4); they trail by one batch.
- An offset is {"store": id, "consumer": name, "streams": {stream id: n}, "begun": {stream id: n}}: in each stream everything
  below n has been read. `begun` has the streams that are new in the batch that ends here, and where it begins to read them, so
  that a batch that is planned again has the same records. Streams are identified by their ids: renaming one changes nothing.
- A stream that matches later begins at the position of its consumer, or with its first record. `start` = `latest` is for the
  streams that exist when the query begins: records of later ones would be lost otherwise.
- A dropped stream ends, also in a batch that is planned and was not read yet; its position is removed when it cannot be brought
  back any more. One that no longer matches is not read, but keeps its position, and continues from there if it matches again.
- `max_records` of a batch are divided equally; what a stream does not need goes to others.
- A poll lists the streams and requests their ends, 256 in a call (`stream/poll.py`). A query without new records waits at
  least four times as long as its poll took.

Importable on executors. Raises `CursorLost` as a query of one stream does, with the name of the stream.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import pyarrow as pa
from pyspark.sql.datasource import InputPartition
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadLimit, ReadMaxRows, ReadMinRows
from pyspark.sql.types import StructType

from quire.core.decoding import described
from quire.core.errors import DatabaseTombstoned, InvalidInput, QuireError, StalePlan, UnknownCursor, UnknownDatabase
from quire.core.timeline import distance, skip_gap, step
from quire.spark.sources.base import WAIT_SECONDS, HeldQueryReader, Offset, Options
from quire.spark.sources.stream_records import RecordRange, Records, refuse_range, select_streams
from quire.spark.sources.views import balanced_groups
from quire.stream.gaps import begin_at, of_positions
from quire.stream.remote_read import PolledStream

if TYPE_CHECKING:
    from quire.service.channel import Channel
    from quire.service.client import Client

POLLED_AT_ONCE = 256
"""Streams in a call: after a restart of the owner each of them is opened."""

PAUSE_FACTOR = 4
"""A query without new records waits this many times as long as its poll took."""

PLANS_MAX = 5
"""How often a batch is planned again because one of its streams was renamed or dropped meanwhile."""

Positions = dict[int, int]
"""Stream id → the first record that was not read."""

_STORED_POSITIONS = dict[Annotated[int, msgspec.Meta(ge=1, lt=1 << 32)], Annotated[int, msgspec.Meta(ge=1, lt=1 << 62)]]
"""Positions as an offset has them, with the limits of ids and records."""


class StreamsQueryReader(HeldQueryReader):
    """A streaming query whose offsets are the positions of a consumer in each stream."""

    HOLDER = "consumer"
    POSITION = "streams"

    def __init__(self, options: Options, schema: StructType) -> None:
        refuse_range(options)
        super().__init__(options, schema)
        self.records = Records(options, schema)
        self.selection = select_streams(options)
        self._start = options.one_of("start", ("oldest", "latest"))
        self._records_max = options.number("max_records", 0)
        self._target: Positions | None = None
        """With the trigger `availableNow`: where the streams ended when the query began."""
        self._ends: Positions = {}
        """Where the streams ended at the last poll."""
        self._served_last = 0
        """The last stream of a batch that had no record for some others."""

    def connect(self) -> Client:
        return self.access.connect()

    def identity(self) -> dict[str, Any]:
        return {"store": self.owner.server.store_id, "consumer": self.holder}

    def initialOffset(self) -> Offset:  # noqa: N802 - Spark gives these names
        """Return the position before everything. Spark calls this again when it plans the first batch."""
        return {**self._offset({}, {}), "is_initial": True}

    def _offset(self, positions: Positions, begun: Positions) -> Offset:
        return {**self.identity(), self.POSITION: _named(positions), "begun": _named(begun)}

    def latestOffset(self, start: Offset, limit: ReadLimit) -> Offset:  # noqa: N802
        self.need_own(start)
        started = time.monotonic()
        positions = _numbered(start, self.POSITION)
        selected = {stream.db_id: stream.name for stream in self.selection.matching(self.owner)}
        is_initial = start.get("is_initial", False)
        self._register([name for number, name in selected.items() if number not in positions], is_initial)
        streams = self._poll(selected, self.holder)
        begun = {
            number: stream.position
            for number, stream in streams.items()
            if number not in positions and stream.position and (self._target is None or number in self._target)
        }
        # Streams that no longer match keep their positions while they exist; those that do not exist are removed.
        others = self._poll(positions.keys() - selected.keys(), consumer="")
        left = {number: first for number, first in positions.items() if number in streams or number in others}
        moved = self._moved({**left, **begun}, streams, limit)
        if moved or begun or is_initial:
            return self._offset({**left, **begun, **moved}, begun)
        if self._target is None:
            threading.Event().wait(max(WAIT_SECONDS, PAUSE_FACTOR * (time.monotonic() - started)))
        return start

    def _register(self, names: Iterable[str], is_initial: bool) -> None:
        """Create the consumer in new streams. A record of a stream that was created later must not be missed."""
        for name in names:
            with suppress(UnknownDatabase, DatabaseTombstoned):  # the next poll finds out what became of it
                self.owner.register_consumer(name, self.holder, self._start if is_initial else "oldest")

    def _moved(self, positions: Positions, streams: Mapping[int, PolledStream], limit: ReadLimit) -> Positions:
        """Return the streams that the next batch reads, and where it ends in each."""
        ends, waiting = dict[int, int](), dict[int, int]()
        for number, stream in streams.items():
            if number in positions and stream.name:
                self._need_consumer(stream)
                with naming(stream.name):
                    self.need_existing(positions[number], stream.end_record)
                ends[number] = stream.end_record if self._target is None else self._target.get(number, 0)
                waiting[number] = distance(of_positions(stream.gaps), positions[number], ends[number])
        self._ends = {number: streams[number].end_record for number in ends}
        waiting = {number: count for number, count in waiting.items() if count}
        if isinstance(limit, ReadMinRows) and sum(waiting.values()) < limit.min_rows:
            return {}
        if not isinstance(limit, ReadMaxRows) or sum(waiting.values()) <= limit.max_rows:
            return {number: ends[number] for number in waiting}
        taken = divided(waiting, limit.max_rows, after=self._served_last)
        self._served_last = next(reversed(taken), 0) if len(taken) < len(waiting) else self._served_last
        return {
            number: step(of_positions(streams[number].gaps), positions[number], count)
            for number, count in taken.items()
        }

    def _need_consumer(self, stream: PolledStream) -> None:
        with naming(stream.name), self.holder_required():
            if not stream.position:
                raise UnknownCursor("the stream has no such consumer")

    def _poll(
        self, streams: Iterable[int], consumer: str, positions: Mapping[int, int] | None = None
    ) -> dict[int, PolledStream]:
        """Return the streams that still exist, by id; renew the consumer's hold, or acknowledge positions."""
        requests = [(number, (positions or {}).get(number, 0)) for number in streams]
        polled: dict[int, PolledStream] = {}
        for place in range(0, len(requests), POLLED_AT_ONCE):
            some = requests[place : place + POLLED_AT_ONCE]
            for (number, _), stream in zip(some, self.owner.poll_streams(consumer, some), strict=True):
                if stream is not None:
                    polled[number] = stream
        return polled

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        """Fix the end of this query: later records, and later streams, do not belong to it."""
        selected = [stream.db_id for stream in self.selection.matching(self.owner)]
        self._target = {number: stream.end_record for number, stream in self._poll(selected, consumer="").items()}

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802
        return ReadMaxRows(self._records_max) if self._records_max else ReadAllAvailable()

    def reportLatestOffset(self) -> Offset:  # noqa: N802
        return self._offset(self._ends, {})

    def partitions(self, start: Offset, end: Offset) -> Sequence[InputPartition]:
        self.need_own(start)
        self.need_own(end)
        # `start` overrides: `begun` is for streams that `start` does not have.
        firsts, stops = {**_numbered(end, "begun"), **_numbered(start, self.POSITION)}, _numbered(end, self.POSITION)
        if unknown := stops.keys() - firsts.keys():
            raise _damaged(f"stream {min(unknown)} ends, but does not begin")
        ranges = {number: (firsts[number], stop) for number, stop in stops.items() if firsts[number] < stop}
        parts = self._planned(ranges)
        return [InputPartition(part) for part in balanced_groups(parts, self.records.partitions_max)]

    def _planned(self, ranges: Mapping[int, tuple[int, int]]) -> list[RecordRange]:
        """Return the parts of a batch. Names are looked up again if a stream lost its name after it was polled."""
        for plans_left in reversed(range(PLANS_MAX)):
            try:
                with closing(self.access.channel()) as channel:
                    streams = self._poll(ranges, self.holder)
                    return [part for number in streams for part in self._parts(channel, number, streams, ranges)]
            except (UnknownDatabase, DatabaseTombstoned, StalePlan):
                if not plans_left:
                    raise
        raise AssertionError("the last plan is returned or raises")

    def _parts(
        self,
        channel: Channel,
        number: int,
        streams: Mapping[int, PolledStream],
        ranges: Mapping[int, tuple[int, int]],
    ) -> Iterator[RecordRange]:
        """Yield the parts of a stream's range; none if it was dropped."""
        stream = streams[number]
        if not stream.name:
            return
        self._need_consumer(stream)
        with naming(stream.name):
            # Both ends: a batch that was planned before a takeover may end with records that are lost.
            first, stop = (begin_at(stream.gaps, record) for record in ranges[number])
            self.need_unacknowledged(first, skip_gap(stream.gaps, stream.position))
            self.need_existing(stop, stream.end_record)
            for part in self.records.of(stream.name).parts(channel, first, stop):
                if part.share.stream_id != number:
                    raise StalePlan("another stream has this name now", hint="start the query again")
                yield part

    def batches(self, part: list[RecordRange], schema: pa.Schema) -> Iterator[pa.RecordBatch]:
        return self.records.named_batches(part, schema)

    def commit(self, end: Offset) -> None:
        """Acknowledge: Spark has processed everything below `end`."""
        self.need_own(end)
        positions = _numbered(end, self.POSITION)
        for stream in self._poll(positions, self.holder, positions).values():
            if stream.name:
                self._need_consumer(stream)


def divided(waiting: Mapping[int, int], limit: int, *, after: int = 0) -> Positions:
    """Divide a number of records among streams: equally, and what a stream does not need goes to others. If there are fewer
    records than streams, each of the streams behind the id `after`, in order, gets one; the last of them comes last.

    >>> divided({1: 5, 2: 100, 3: 100}, 45), divided({1: 5, 2: 5, 3: 5}, 2, after=2)
    ({1: 5, 2: 20, 3: 20}, {3: 1, 1: 1})
    """
    numbers = sorted(waiting, key=lambda number: (number <= after, number))[:limit]
    taken = dict.fromkeys(numbers, 0)
    for place, number in enumerate(sorted(numbers, key=waiting.__getitem__)):
        taken[number] = min(waiting[number], limit // (len(numbers) - place))
        limit -= taken[number]
    return taken


@contextmanager
def naming(stream: str) -> Iterator[None]:
    """Name the stream in errors of the block."""
    try:
        yield
    except QuireError as error:
        error.where = {**error.where, "stream": stream}
        raise


def _named(positions: Positions) -> dict[str, int]:
    """Return positions as JSON, in order: Spark compares the texts of offsets."""
    return {str(number): positions[number] for number in sorted(positions)}


def _numbered(offset: Offset, name: str) -> Positions:
    """Return positions of an offset, which anything may have been done to in a checkpoint."""
    try:
        return msgspec.convert(offset.get(name), described(_STORED_POSITIONS), str_keys=True)
    except msgspec.ValidationError as error:
        raise _damaged(f"`{name}`: {error}") from None


def _damaged(what: str) -> InvalidInput:
    hint = "restore the checkpoint location, or start again with another consumer and a new one"
    return InvalidInput(f"the checkpoint has an offset that this query did not write: {what}", hint=hint)
