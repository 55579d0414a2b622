"""`readStream.format("quire.changes")`: Spark's progress is the acknowledgement of a cursor (K4).

Terms
  cursor   whose position Spark's checkpoint and the feed share; its name is the option `cursor`
  offset   {"store": id, "sequence": n}: everything up to n has been read
  acked    what the cursor has acknowledged: nothing above it is trimmed

Rules
  1. Spark commits batch N while it plans batch N + 1, never after the last one: the acknowledgement trails by one batch, and
     a stream that idles or ends leaves its last batch unacknowledged. It is read again by nobody: Spark's checkpoint knows.
  2. Acknowledging is idempotent and moves forward only: a restarted query repeats it without harm.
  3. A restart asks for no initial offset. Its first range is checked instead: one that begins below what the cursor has
     acknowledged, or below what is kept, is of an older checkpoint; reading on would double, or leave a gap. `CursorLost`.
  4. A checkpoint belongs to its store: an offset with another store's id is refused.
  5. A new query begins where its cursor stands. A cursor that is not there is registered: `start` says where.

Options: `cursor`; `start` for a new cursor: `oldest` (the default), `latest`, a sequence to begin after, or `snapshot` with
`database` and `snapshot`: behind the change that published it, so that reading the snapshot and then the stream leaves no gap.
`max_changes` in a batch; `partitions`; `columns`.

One process of Spark's for each query, one thread. Raises `CursorLost`, `InvalidInput`, and what a client raises.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxRows,
    ReadMinRows,
    SupportsTriggerAvailableNow,
)
from pyspark.sql.types import StructType

from quire.core.errors import CursorLost, InvalidInput, TimedOut, UnknownCursor
from quire.manifest.records import AuditAction, CursorState
from quire.spark.sources.changes import Span, gone, read_span, same_schema, split
from quire.spark.sources.options import Options
from quire.spark.sources.shapes import default_partitions

if TYPE_CHECKING:
    import pyarrow as pa

    from quire.manifest.change import CursorInfo
    from quire.service.client import Client

WAIT_SECONDS = 0.2
"""How long a query that has read everything waits at the owner for a change before it says so: it would ask a hundred times
a second otherwise."""

Offset = dict[str, Any]


class ChangesStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """See the rules above."""

    def __init__(self, options: Options, schema: StructType) -> None:
        same_schema(schema, options)
        self.schema = schema
        if options.text("first") or options.text("last"):
            raise InvalidInput("`first` and `last` are for ranges", hint="use start, or read instead of readStream")
        self.access = options.access()
        self.cursor = options.need("cursor")
        self._start = _Start(options)
        self._max_changes = options.number("max_changes", 0)
        self._wanted = options.number("partitions", default_partitions(), least=1)
        self._target: int | None = None
        """Where a query of what is there now ends."""
        self._client: Client | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Executors get the reader without its connection."""
        return {**self.__dict__, "_client": None}

    def _owner(self) -> Client:
        if self._client is None:
            self._client = self.access.connect()
        return self._client

    # ── offsets ───────────────────────────────────────────────────────────────────────────────────────────────────────
    def initialOffset(self) -> Offset:  # noqa: N802 - Spark gives these names
        """Rule 5."""
        feed = self._owner().feed
        try:
            found = feed.cursor(self.cursor)
        except UnknownCursor:
            found = self._start.register(self._owner(), self.cursor)
        self._check_alive(found)
        return self._offset(found.acked_sequence)

    def latestOffset(self, start: Offset, limit: ReadLimit) -> Offset:  # noqa: N802
        """How far the next batch goes."""
        position = self._position(start)
        head = self._owner().feed.head() if self._target is None else self._target
        if head <= position and self._target is None:
            with suppress(TimedOut):
                head = self._owner().feed.wait(position, WAIT_SECONDS)
        if isinstance(limit, ReadMaxRows):
            head = min(head, position + limit.max_rows)
        if isinstance(limit, ReadMinRows) and head - position < limit.min_rows:
            head = position
        return self._offset(max(head, position))

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802
        """The option `max_changes`."""
        return ReadMaxRows(self._max_changes) if self._max_changes else ReadAllAvailable()

    def reportLatestOffset(self) -> Offset:  # noqa: N802
        """The head, for the query's progress."""
        return self._offset(self._owner().feed.head())

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        """What is committed from here on is not this query's."""
        self._target = self._owner().feed.head()

    # ── batches ───────────────────────────────────────────────────────────────────────────────────────────────────────
    def partitions(self, start: Offset, end: Offset) -> Sequence[InputPartition]:
        """The parts of a batch, checked (rule 3)."""
        first, last = self._position(start) + 1, self._position(end)
        if first > last:
            return []
        with self._knowing():
            found = self._owner().feed.cursor(self.cursor)
        self._check_alive(found)
        if first <= found.acked_sequence:
            raise CursorLost(
                "the query goes on from an older checkpoint than its cursor has acknowledged",
                hint="restore the newer checkpoint, or begin again with another cursor",
                cursor=self.cursor,
                position=first - 1,
                acked_sequence=found.acked_sequence,
            )
        if first < found.oldest_sequence:
            raise gone(first, found.oldest_sequence)
        return split(Span(first, last), self._wanted)

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """The changes of a part, on an executor."""
        return read_span(self.access, partition.value, self.schema)

    def commit(self, end: Offset) -> None:
        """Spark has done with everything up to `end` (rules 1 and 2)."""
        with self._knowing():
            self._owner().feed.acknowledge(self.cursor, self._position(end))

    def stop(self) -> None:
        """The query has ended."""
        if self._client is not None:
            self._client.close()
            self._client = None

    # ── helpers ───────────────────────────────────────────────────────────────────────────────────────────────────────
    def _offset(self, sequence: int) -> Offset:
        return {"store": self._owner().server.store_id, "sequence": sequence}

    def _position(self, offset: Offset) -> int:
        """Rule 4."""
        theirs, ours = offset.get("store"), self._owner().server.store_id
        if theirs != ours:
            raise InvalidInput(
                "the checkpoint is of another store",
                hint="use a checkpoint location of its own",
                theirs=theirs,
                ours=ours,
            )
        return int(offset["sequence"])

    @contextmanager
    def _knowing(self) -> Iterator[None]:
        """A query that has begun has a cursor, unless somebody dropped it."""
        try:
            yield
        except UnknownCursor as error:
            raise CursorLost(
                "the cursor of this query was dropped",
                hint="begin again from a snapshot, with a new checkpoint location",
                cursor=self.cursor,
            ) from error

    def _check_alive(self, found: CursorInfo) -> None:
        if found.state is CursorState.LOST:
            raise CursorLost(
                f"the cursor was given up: {found.lost_reason}",
                hint="begin again from a snapshot, with a new cursor and checkpoint location",
                cursor=self.cursor,
            )


class _Start:
    """Where a new cursor begins (rule 5)."""

    def __init__(self, options: Options) -> None:
        self.where = options.text("start", "oldest").lower()
        if self.where not in ("oldest", "latest", "snapshot") and not self.where.isdecimal():
            raise InvalidInput("a stream starts at oldest, latest, snapshot or a sequence", start=self.where)
        if self.where == "snapshot":
            self.database, self.snapshot = options.need("database"), options.need("snapshot")

    def register(self, owner: Client, name: str) -> CursorInfo:
        from quire.manifest.change import Start

        if self.where in ("oldest", "latest"):
            return owner.feed.register(Start(self.where), name=name)
        wanted = self._published(owner) if self.where == "snapshot" else int(self.where)
        made = owner.feed.register(wanted, name=name)
        if made.acked_sequence > wanted:  # the feed clamps to what is kept: that would be a gap
            owner.feed.drop(made.cursor_id)
            raise gone(wanted + 1, made.oldest_sequence)
        return made

    def _published(self, owner: Client) -> int:
        """The sequence of the change that published a snapshot."""
        info = owner.get_snapshot(self.database, self.snapshot)
        for batch in owner.scan("audit", prefix=(info.db_id,), columns=("sequence", "action", "number")):
            for row in batch.to_pylist():
                if row["action"] == AuditAction.SNAPSHOT_CREATED and row["number"] == info.snapshot_id:
                    return int(row["sequence"])
        raise CursorLost("nobody remembers when this snapshot was made", hint="make a new one", snapshot=self.snapshot)
