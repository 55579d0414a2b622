"""`readStream.format("quire.changes")`: Spark's progress is the acknowledgement of a cursor (K4).

Terms
  cursor   whose position Spark's checkpoint and the feed share; its name is the option `cursor`
  offset   {"store": id, "sequence": n}: everything up to n has been read
  acked    what the cursor has acknowledged: nothing above it is trimmed

Rules (1 to 3 are those of following.py)
  4. A checkpoint belongs to its store: an offset with another store's id is refused.
  5. A new query begins where its cursor stands. A cursor that is not there is registered: `start` says where.

Options: `cursor`; `start` for a new cursor: `oldest` (the default), `latest`, a sequence to begin after, or `snapshot` with
`database` and `snapshot`: behind the change that published it, so that reading the snapshot and then the stream leaves no gap.
`max_changes` in a batch; `partitions`; `columns`.

Raises `CursorLost`, `InvalidInput`, and what a client raises.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

from pyspark.sql.datasource import InputPartition
from pyspark.sql.types import StructType

from quire.core.errors import CursorLost, InvalidInput, TimedOut, UnknownCursor
from quire.manifest.records import AuditAction, CursorState
from quire.spark.sources.changes import Span, gone, read_span, same_schema, split
from quire.spark.sources.following import WAIT_SECONDS, FollowingReader, Offset
from quire.spark.sources.options import Options
from quire.spark.sources.shapes import default_partitions

if TYPE_CHECKING:
    import pyarrow as pa

    from quire.manifest.change import CursorInfo
    from quire.service.client import Client


class ChangesStreamReader(FollowingReader):
    """See the rules above."""

    def __init__(self, options: Options, schema: StructType) -> None:
        super().__init__(options.number("max_changes", 0))
        same_schema(schema, options)
        self.schema = schema
        if options.text("first") or options.text("last"):
            raise InvalidInput("`first` and `last` are for ranges", hint="use start, or read instead of readStream")
        self.access = options.access()
        self.cursor = options.need("cursor")
        self._start = _Start(options)
        self._wanted = options.number("partitions", default_partitions(), least=1)
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
        """Where the cursor stands; one that is not there is registered at `start` (rule 5)."""
        feed = self._owner().feed
        try:
            found = feed.cursor(self.cursor)
        except UnknownCursor:
            found = self._start.register(self._owner(), self.cursor)
        self._check_alive(found)
        return self.offset(found.acked_sequence)

    def end(self) -> int:
        """The head of the feed."""
        return self._owner().feed.head()

    def end_beyond(self, position: int) -> int:
        """The head, after waiting a little for one beyond `position`."""
        head = self.end()
        if head <= position:
            with suppress(TimedOut):
                head = self._owner().feed.wait(position, WAIT_SECONDS)
        return head

    def offset(self, position: int) -> Offset:
        """Everything up to a sequence."""
        return {"store": self._owner().server.store_id, "sequence": position}

    def position(self, offset: Offset) -> int:
        """The sequence of an offset; one with another store's id is refused (rule 4)."""
        theirs, ours = offset.get("store"), self._owner().server.store_id
        if theirs != ours:
            raise InvalidInput(
                "the checkpoint is of another store",
                hint="use a checkpoint location of its own",
                theirs=theirs,
                ours=ours,
            )
        return int(offset["sequence"])

    # ── batches ───────────────────────────────────────────────────────────────────────────────────────────────────────
    def partitions(self, start: Offset, end: Offset) -> Sequence[InputPartition]:
        """The parts of a batch, checked (rule 3)."""
        first, last = self.position(start) + 1, self.position(end)
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
            self._owner().feed.acknowledge(self.cursor, self.position(end))

    def stop(self) -> None:
        """The query has ended."""
        if self._client is not None:
            self._client.close()
            self._client = None

    # ── helpers ───────────────────────────────────────────────────────────────────────────────────────────────────────
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
