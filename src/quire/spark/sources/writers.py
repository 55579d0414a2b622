"""Writes rows into a store: parts that tasks send to the owner, and the single step in which it takes them (L4).

A part is what one attempt of one task has sent. The owner keeps parts as files until the load that they belong to ends; they
are not visible before. When all tasks are done Spark names the parts that count, and the owner takes exactly those in one
transaction. Executors need only the owner's address, not its directory.

A load is one attempt to write:

- of a job (`PartWriter`): its number is drawn where the job is planned;
- of a batch of a streaming query (`SinkWriter`): its number follows from the ids of the query, the run and the batch, which
  tasks find among their local properties. A restarted query has another run, so it never sees the parts of the previous one.

A batch is taken once: the owner records the query's id and the number of the batch in the same transaction, and takes no
batch that is not newer. Spark does not pass the query's id to `commit`, so tasks put it in their messages. `abort`, which
Spark also calls after a commit whose answer it has not received, removes only parts. A new checkpoint directory is a new
query, from batch 0.

Importable on executors. Raises `InvalidInput`, and the owner's errors.
"""

from __future__ import annotations

import secrets
from abc import abstractmethod
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from hashlib import sha256
from typing import TYPE_CHECKING

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql.datasource import DataSourceArrowWriter, DataSourceStreamArrowWriter, WriterCommitMessage

from quire.core.errors import InvalidInput
from quire.core.limits import MIB
from quire.service.tickets import LOAD_PUT, PutPart
from quire.spark.sources.error_messages import ReadableErrors

if TYPE_CHECKING:
    from quire.service.channel import Channel
    from quire.service.client import Client
    from quire.spark.access import OwnerAddress

BODY_BYTES = 4 * MIB
"""Rows are sent in calls of about this size."""

QUERY, RUN, BATCH = "sql.streaming.queryId", "spark.jobGroup.id", "streaming.sql.batchId"
"""Local properties of the tasks of a streaming query."""


@dataclass
class PartMessage(WriterCommitMessage):
    """A task's message to the driver: the part that its attempt has sent."""

    part: str
    rows: int
    load: int = 0
    query: str = ""


@dataclass(frozen=True, slots=True)
class BatchId:
    """A batch of a streaming query."""

    query: str
    batch: int


class PartTarget:
    """The target of a load's parts; small and picklable."""

    @abstractmethod
    def take(self, client: Client, load: int, parts: list[str], batch: BatchId | None) -> None:
        """Make the owner take parts in one step: those of a job, or of a query's batch."""


class PartWriter(ReadableErrors, DataSourceArrowWriter):
    """Sends the rows of a job."""

    def __init__(self, access: OwnerAddress, target: PartTarget) -> None:
        self.access = access
        self.target = target
        self.load = secrets.randbits(62) | 1

    def write(self, iterator: Iterator[pa.RecordBatch]) -> PartMessage:
        """Send a task's rows."""
        return send_part(self.access, self.load, iterator)

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        """Make the owner take all parts."""
        with self.access.connect() as client:
            self.target.take(client, self.load, _counting(messages), None)

    def abort(self, _: list[WriterCommitMessage | None]) -> None:
        """Remove the parts of a job that failed."""
        with self.access.connect() as client:
            client.drop_load(self.load)


class SinkWriter(ReadableErrors, DataSourceStreamArrowWriter):
    """Sends the rows of a streaming query, batch by batch. Spark creates one for the tasks and another one for each commit."""

    def __init__(self, access: OwnerAddress, target: PartTarget) -> None:
        self.access = access
        self.target = target

    def write(self, iterator: Iterator[pa.RecordBatch]) -> PartMessage:
        """Send a task's rows."""
        context = _task()
        query, run, batch = (context.getLocalProperty(name) or "" for name in (QUERY, RUN, BATCH))
        if not query:
            raise InvalidInput(
                "this task does not belong to a streaming query", hint="use df.write, or writeStream with its own sink"
            )
        message = send_part(self.access, load_number(query, run, batch), iterator)
        message.query = query
        return message

    def commit(self, messages: list[WriterCommitMessage | None], batch: int) -> None:
        """Make the owner take the batch, unless it already has."""
        sent = [message for message in messages if isinstance(message, PartMessage)]
        if not sent:
            return  # a batch without tasks has no rows
        with self.access.connect() as client:
            self.target.take(client, sent[0].load, _counting(messages), BatchId(sent[0].query, batch))

    def abort(self, messages: list[WriterCommitMessage | None], _batch: int) -> None:
        """Remove the parts of a batch that failed. A recorded batch stays."""
        loads = {message.load for message in messages if isinstance(message, PartMessage)}
        if not loads:
            return
        with self.access.connect() as client:
            for load in loads:
                client.drop_load(load)


def load_number(query: str, run: str, batch: str) -> int:
    """Return the number of the load for a batch in one run of its query.

    >>> load_number("q", "first", "7") == load_number("q", "second", "7")
    False
    """
    digest = sha256("\0".join((query, run, batch)).encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 2 | 1


def send_part(access: OwnerAddress, load: int, batches: Iterator[pa.RecordBatch]) -> PartMessage:
    """Send the rows of a task."""
    context = _task()
    part = f"{context.partitionId()}-{context.taskAttemptId()}"
    with closing(access.channel()) as channel:
        return PartMessage(part, _send(channel, load, part, batches), load)


def _task() -> TaskContext:
    context = TaskContext.get()
    assert context is not None, "Spark calls this in a task"
    return context


def _counting(messages: list[WriterCommitMessage | None]) -> list[str]:
    """Return the parts that have rows."""
    return [message.part for message in messages if isinstance(message, PartMessage) and message.rows]


class _Sender:
    """A file that the owner keeps: bytes are sent in calls of `BODY_BYTES`."""

    closed = False

    def __init__(self, channel: Channel, load: int, part: str) -> None:
        self._channel, self._load, self._part = channel, load, part
        self._waiting = bytearray()
        self._sent = 0

    def write(self, data: bytes) -> int:
        self._waiting += data
        while len(self._waiting) >= BODY_BYTES:
            self._send(BODY_BYTES)
        return len(data)

    def flush(self) -> None:
        if self._waiting:
            self._send(len(self._waiting))

    def _send(self, size: int) -> None:
        body = bytes(self._waiting[:size])
        self._channel.ask(LOAD_PUT, PutPart(self._load, self._part, self._sent, body))
        self._sent += size
        del self._waiting[:size]


def _send(channel: Channel, load: int, part: str, batches: Iterator[pa.RecordBatch]) -> int:
    """Send batches as an Arrow stream and return the number of rows."""
    rows, sender = 0, _Sender(channel, load, part)
    writer: pa.ipc.RecordBatchStreamWriter | None = None
    for batch in batches:
        writer = writer or pa.ipc.new_stream(sender, batch.schema)
        writer.write_batch(batch)
        rows += batch.num_rows
    if writer is not None:
        writer.close()
        sender.flush()
    return rows
