"""Shared parts of all data sources: options, schemas, leases, batch readers and streaming readers.

A source declares its name, its options and its reader. A reader defines what each task reads (`plan`) and reads it
(`batches`).

- An unknown option is an error: a misspelt `snapshot` would otherwise read another version. Option names are
  case-insensitive.
- Spark has no unsigned numbers: up to 16 bits become `int`, 32 and 64 bits `bigint`. Hashes above 2**63 appear as negative
  numbers with the same bits.
- All tasks of a query share one lease, and each renews it while it reads. Spark does not report the end of a query, so the
  lease ends `keep_seconds` after the last read (`manifest/leases.py`).
- Spark commits batch N while it plans batch N + 1 (K4): the acknowledgement trails by one batch, and the last batch of a
  query that idles or ends stays unacknowledged. Acknowledging is idempotent and only moves forward.

    >>> given = Options({"Store": "/data", "LIMIT": "7"}, source="quire.table", known=("limit",))
    >>> given.number("limit", 1), given.text("table")
    (7, '')

Threads: a lease has its own thread while a task reads; a streaming query has one process of Spark's and one thread.
Importable on executors. Raises `InvalidInput`, `SnapshotGone`, `CursorLost`, and a client's errors.
"""

from __future__ import annotations

import os
import threading
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from typing import Any, ClassVar

import pyarrow as pa
from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    DataSourceStreamReader,
    InputPartition,
)
from pyspark.sql.pandas.types import from_arrow_schema, to_arrow_schema
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxRows,
    ReadMinRows,
    SupportsTriggerAvailableNow,
)
from pyspark.sql.types import StructType

from quire.core.errors import CursorLost, InvalidInput, LeaseExpired, QuireError, SnapshotGone, UnknownCursor
from quire.core.timeline import Gaps, distance, step
from quire.service.archive_copies import IDLE_SECONDS
from quire.service.tickets import LEASE_RENEW, OfLease
from quire.spark.access import OwnerAddress, access_of
from quire.spark.sources.error_messages import ReadableErrors

COMMON = ("store", "archived_at", "path", "token", "token_file", "tls_ca_file")
SINK_OPTIONS = ("checkpointlocation", "queryname", "outputmode")
"""Spark's own options among those of a sink."""

KEEP_SECONDS = 300
"""Seconds that a version without a name is kept after the last read."""

RENEWALS = 4
"""Renewals within the length of a lease."""

RENEW_SECONDS = 5.0
"""Seconds that one renewal may take."""

WAIT_SECONDS = 0.2
"""Seconds that a query without new rows waits at the owner; it would poll a hundred times a second otherwise."""

_SIGNED = {pa.uint8(): pa.int32(), pa.uint16(): pa.int32(), pa.uint32(): pa.int64(), pa.uint64(): pa.int64()}

Offset = dict[str, Any]


# ── options ───────────────────────────────────────────────────────────────────────────────────────────────────────────
class Options:
    """The checked options of a source."""

    def __init__(self, given: Mapping[str, str], *, source: str, known: Iterable[str]) -> None:
        self._given = {name.lower(): value for name, value in given.items()}
        self._source = source
        allowed = {*COMMON, *known}
        if unknown := sorted(self._given.keys() - allowed):
            hint = f"options: {', '.join(sorted(allowed - {'path', 'token'}))}"
            raise InvalidInput(f"{source} has no such option", hint=hint, options=unknown)

    def access(self) -> OwnerAddress:
        """Return how to reach the owner."""
        return access_of(self._given)

    def text(self, name: str, default: str = "") -> str:
        """Return an option as text."""
        return self._given.get(name, default)

    def need(self, name: str) -> str:
        """Return an option that must be given."""
        if not (value := self.text(name)):
            raise InvalidInput(f"{self._source} needs the option `{name}`", hint=f'add .option("{name}", …)')
        return value

    def names(self, name: str) -> list[str]:
        """Return a comma-separated list; empty if it is not given."""
        return [part for word in self.text(name).split(",") if (part := word.strip())]

    def columns(self, known: Sequence[str], *, of: str) -> list[str]:
        """Return the option `columns`, checked; all columns if it is not given."""
        names = self.names("columns") or list(known)
        if unknown := [name for name in names if name not in known]:
            raise InvalidInput(f"{of} has no such column", hint=f"columns: {', '.join(known)}", columns=unknown[:5])
        return names

    def columns_of(self, name: str, schema: StructType) -> list[str]:
        """Return an option that names written columns, checked."""
        names = self.names(name)
        if unknown := [column for column in names if column not in schema.names]:
            hint = f"columns: {', '.join(schema.names)}"
            raise InvalidInput(
                f"the option `{name}` names a column that is not written", hint=hint, columns=unknown[:5]
            )
        return names

    def number(self, name: str, default: int, *, least: int = 0) -> int:
        """Return a whole number."""
        text = self.text(name)
        if not text:
            return default
        if not text.strip().isdecimal() or int(text) < least:
            raise InvalidInput(f"the option `{name}` must be a whole number of at least {least}", given=text)
        return int(text)

    def one_of(self, name: str, choices: tuple[str, ...]) -> str:
        """Return one of the given words; the first is the default."""
        given = self.text(name, choices[0]).lower()
        if given not in choices:
            raise InvalidInput(f"the option `{name}` must be one of {', '.join(choices)}", given=given)
        return given

    def flag(self, name: str) -> bool:
        """Return whether an option is `true`; `false` is the default."""
        return self.one_of(name, ("false", "true")) == "true"

    def refuse(self, names: Iterable[str], use: str, hint: str) -> None:
        """Refuse options that belong to the other way of reading this source."""
        for name in names:
            if self.text(name):
                raise InvalidInput(f"`{name}` is for {use}", hint=hint)

    def need_schema(self, schema: StructType, expected: StructType) -> None:
        """Refuse any schema but the source's own."""
        if schema.simpleString() != expected.simpleString():
            raise InvalidInput(f"the schema of {self._source} is fixed", hint="omit .schema(…); use `columns`")


# ── schemas ───────────────────────────────────────────────────────────────────────────────────────────────────────────
def default_partitions() -> int:
    """Return two partitions per local core, so that a slow one delays little."""
    return 2 * (os.cpu_count() or 1)


def spark_schema(schema: pa.Schema) -> StructType:
    """Return the Spark schema of an Arrow schema."""
    return from_arrow_schema(pa.schema([pa.field(field.name, _SIGNED.get(field.type, field.type)) for field in schema]))


def arrow_schema(schema: StructType) -> pa.Schema:
    """Return the Arrow schema that Spark expects of a batch."""
    return to_arrow_schema(schema, timezone="UTC")


def fitted(batch: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    """Return a batch with exactly the columns, order and types that Spark expects."""
    columns = [_column(batch.column(field.name), field.type) for field in schema]
    return pa.RecordBatch.from_arrays(columns, schema=schema)


def _column(column: pa.Array, kind: pa.DataType) -> pa.Array:
    if column.type == kind:
        return column
    if column.type == pa.uint64() and kind == pa.int64():
        return column.view(kind)  # the same bits; a cast would refuse large hashes
    return column.cast(kind)


# ── leases ────────────────────────────────────────────────────────────────────────────────────────────────────────────
@contextmanager
def kept(access: OwnerAddress, lease_id: int, keep_seconds: float) -> Iterator[None]:
    """Renew a lease while the block runs. A copy of an archive is called even without a lease, because it would end
    otherwise.

    A read that fails after the lease has ended raises `SnapshotGone`. It never returns wrong rows: names of objects are never
    used twice, and frames of an earlier use of a file fail their checks.
    """
    if not lease_id and not access.is_copy:
        yield
        return
    every_seconds = min(keep_seconds, IDLE_SECONDS if access.is_copy else keep_seconds) / RENEWALS
    done = threading.Event()
    thread = threading.Thread(
        target=_renew, args=(access, lease_id, every_seconds, done), name="quire-lease", daemon=True
    )
    thread.start()
    try:
        yield
    except QuireError as error:
        if lease_id and has_ended(access, lease_id):
            raise SnapshotGone(
                "the version that this DataFrame reads is no longer kept",
                hint="load it again for the newest one; to keep one, use a named snapshot or a longer `keep_seconds`",
                cause=str(error),
            ) from error
        raise
    finally:
        done.set()


def has_ended(access: OwnerAddress, lease_id: int) -> bool:
    """Return whether the owner reports that a lease has ended; renew it if it has not."""
    try:
        with closing(access.channel()) as channel:
            channel.ask(LEASE_RENEW, OfLease(lease_id), timeout=RENEW_SECONDS)
    except LeaseExpired:
        return True
    except QuireError:
        return False  # reading does not need the owner: an unreachable one fails no task
    return False


def _renew(access: OwnerAddress, lease_id: int, every_seconds: float, done: threading.Event) -> None:
    while not done.is_set():
        if has_ended(access, lease_id) and lease_id:
            return
        done.wait(every_seconds)


# ── reading ───────────────────────────────────────────────────────────────────────────────────────────────────────────
class QuireSource(ReadableErrors, DataSource):
    """A data source, defined by its name, its options and its reader."""

    NAME: ClassVar[str]
    KNOWN: ClassVar[tuple[str, ...]]
    """The options of reading, in addition to `COMMON`."""
    READER: ClassVar[type[SourceReader]]

    @classmethod
    def name(cls) -> str:
        return cls.NAME

    @classmethod
    def parse(cls, given: Mapping[str, str]) -> Options:
        """Return the options of reading, checked."""
        return Options(given, source=cls.NAME, known=cls.KNOWN)

    def reader(self, schema: StructType) -> SourceReader:
        return self.READER(self.parse(self.options), schema)


class SourceReader(ReadableErrors, DataSourceReader):
    """Plans where the query is planned, reads on executors."""

    keep_seconds: float = KEEP_SECONDS

    def __init__(self, options: Options, schema: StructType) -> None:
        self.access = options.access()
        self.schema = schema
        self.partitions_max = options.number("partitions", default_partitions(), least=1)

    @abstractmethod
    def plan(self) -> Iterable[Any]:
        """Return what each task reads: small, picklable."""

    @abstractmethod
    def batches(self, part: Any, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
        """Yield the rows of a task."""

    def lease_of(self, _part: Any) -> int:
        """Return the lease that keeps what a task reads; 0 if a snapshot does, or nothing has to."""
        return 0

    def partitions(self) -> Sequence[InputPartition]:
        return [InputPartition(part) for part in self.plan()]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        if partition.value is None:  # Spark creates one partition if there is none
            return
        with kept(self.access, self.lease_of(partition.value), self.keep_seconds):
            yield from self.batches(partition.value, arrow_schema(self.schema))


# ── streaming ─────────────────────────────────────────────────────────────────────────────────────────────────────────
def next_end(position: int, end: int, limit: ReadLimit, gaps: Gaps = ()) -> int:
    """Return the end of the next batch.

    >>> next_end(10, 100, ReadMaxRows(5)), next_end(10, 12, ReadMinRows(5)), next_end(10, 8, ReadAllAvailable())
    (15, 10, 10)
    """
    if isinstance(limit, ReadMaxRows):
        end = min(end, step(gaps, position, limit.max_rows))
    if isinstance(limit, ReadMinRows) and distance(gaps, position, end) < limit.min_rows:
        end = position
    return max(end, position)


class HeldQueryReader(ReadableErrors, DataSourceStreamReader, SupportsTriggerAvailableNow):
    """A streaming query whose offsets are positions that a holder keeps at the owner."""

    HOLDER: ClassVar[str]
    """The option that names the holder of the position; errors use this word too."""
    POSITION: ClassVar[str]
    """The position's name in an offset."""

    def __init__(self, options: Options, schema: StructType) -> None:
        self.access = options.access()
        self.schema = schema
        self.holder = options.need(self.HOLDER)
        self._connection: Any = None

    def __getstate__(self) -> dict[str, Any]:
        """Drop the connection: executors get the reader without it."""
        return {**self.__dict__, "_connection": None}

    @abstractmethod
    def connect(self) -> Any:
        """Open a connection to the owner."""

    @abstractmethod
    def identity(self) -> dict[str, Any]:
        """Return what an offset belongs to: a checkpoint of another store or stream is refused."""

    @abstractmethod
    def batches(self, part: Any, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
        """Yield the rows of a task."""

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        return self.batches(partition.value, arrow_schema(self.schema))

    @property
    def owner(self) -> Any:
        """The connection, opened on first use."""
        if self._connection is None:
            self._connection = self.connect()
        return self._connection

    def offset(self, position: int) -> Offset:
        """Return a position as an offset of Spark."""
        return {**self.identity(), self.POSITION: position}

    def position(self, offset: Offset) -> int:
        """Return the position of an offset of this query."""
        self.need_own(offset)
        return int(offset[self.POSITION])

    def need_own(self, offset: Offset) -> None:
        """Refuse an offset of another query."""
        ours = self.identity()
        theirs = {name: offset.get(name) for name in ours}
        if theirs != ours:
            raise InvalidInput(
                f"the checkpoint belongs to another {list(ours)[-1]}",
                hint="use a separate checkpoint location for each query",
                theirs=theirs,
                ours=ours,
            )

    @contextmanager
    def holder_required(self) -> Iterator[None]:
        """Translate the error of a holder that was dropped while its query ran."""
        try:
            yield
        except UnknownCursor as error:
            raise CursorLost(
                f"the {self.HOLDER} of this query was dropped",
                hint=f"start again with another {self.HOLDER} and a new checkpoint location",
                **{self.HOLDER: self.holder},
            ) from error

    def need_unacknowledged(self, first: int, acknowledged: int) -> None:
        """Refuse a batch that begins at `first` if everything below `acknowledged` was acknowledged before."""
        if first < acknowledged:
            raise CursorLost(
                f"the query continues from an older checkpoint than its {self.HOLDER} has acknowledged",
                hint=f"restore the newer checkpoint, or start again with another {self.HOLDER}",
                **{self.HOLDER: self.holder, "first": first, "acknowledged": acknowledged},
            )

    def need_existing(self, position: int, end: int) -> None:
        """Refuse a position beyond the end: what comes to be below it was never read, and would be passed over."""
        if position > end:
            raise CursorLost(
                "the checkpoint is ahead of the store, which may have been restored from an older copy",
                hint=f"start again with another {self.HOLDER} and a new checkpoint location",
                **{self.HOLDER: self.holder, "position": position, "end": end},
            )

    def stop(self) -> None:
        """Close the connection when the query has ended."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None


class QueryReader(HeldQueryReader):
    """A streaming query: Spark's offsets are positions of a cursor or consumer, its commits are acknowledgements (K4).

    Spark requests no initial offset after a restart, so the first range is checked instead: one that begins below what is
    acknowledged belongs to an older checkpoint, and continuing would return rows twice.
    """

    def __init__(self, options: Options, schema: StructType, rows_max: int) -> None:
        super().__init__(options, schema)
        self._rows_max = rows_max
        self._target: int | None = None
        """Where a query with the trigger `availableNow` ends."""

    @abstractmethod
    def end(self) -> int:
        """Return the end of what can be read now."""

    @abstractmethod
    def end_beyond(self, position: int) -> int:
        """Do the same, after a short wait if there is nothing beyond `position`."""

    @abstractmethod
    def gaps(self) -> Gaps:
        """Return positions that takeovers have skipped; no batch contains them."""

    def latestOffset(self, start: Offset, limit: ReadLimit) -> Offset:  # noqa: N802 - Spark gives these names
        position = self.position(start)
        end = self._target if self._target is not None else self.end_beyond(position)
        self.need_existing(position, end)
        return self.offset(next_end(position, end, limit, self.gaps()))

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802
        return ReadMaxRows(self._rows_max) if self._rows_max else ReadAllAvailable()

    def reportLatestOffset(self) -> Offset:  # noqa: N802
        return self.offset(self.end())

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        """Fix the end of this query: later positions do not belong to it."""
        self._target = self.end()
