"""`quire.kv`: the keys and values of a key-value database, as of now or of any snapshot.

    (spark.read.format("quire.kv").option("store", path).option("database", "cart")
        .option("snapshot", "monday").option("prefix", "user/").load())

Terms
  piece   a range of keys: what one task reads, merged from all tables that have keys of it

Rules
  1. A DataFrame reads one version: the snapshot that is asked for, or what is newest when its first query is planned, which is
     kept until `keep_seconds` after it was last read (`leases.py`). Executors read its tables, which nobody changes.
  2. Pieces are cut at the tables' blocks, so that each has about the same number of bytes. No key is in two pieces.
  3. `prefix`, or `low` and `high`, say which keys are read.
  4. Executors must see the directory of the store.

Options: `database`, `snapshot`, `keep_seconds`, `prefix`, or `low` and `high` (UTF-8, or `hex:…` for bytes), `keys` and
`values` (`binary` or `string`), `columns` (with commas), `partitions`. For writing: `kv_writer.py`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition
from pyspark.sql.types import BinaryType, StringType, StructField, StructType

from quire.core.errors import InvalidInput, UnknownSnapshot
from quire.core.limits import MIB
from quire.durable.files import OsDisk
from quire.durable.names import LsmHome
from quire.lsm.merge import parts, scan_parts
from quire.lsm.sst_reader import SSTable
from quire.lsm.view import LSN_MAX, prefix_end
from quire.spark.sources.leases import KEEP_SECONDS, kept
from quire.spark.sources.options import Options
from quire.spark.sources.shapes import arrow_schema, default_partitions

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql.datasource import DataSourceWriter

    from quire.lsm.engine import KvVersion

READING = ("database", "snapshot", "keep_seconds", "prefix", "low", "high", "keys", "values", "columns", "partitions")
WRITING = ("database", "create")

PIECE_BYTES = 4 * MIB
"""Less than this is not cut: a task costs more."""

KINDS = {"binary": BinaryType(), "string": StringType()}


@dataclass(frozen=True, slots=True)
class Range:
    """Keys in [low, high); `None` for no end."""

    low: bytes = b""
    high: bytes | None = None

    @property
    def is_empty(self) -> bool:
        return self.high is not None and self.low >= self.high


class KvSource(DataSource):
    """See the rules above."""

    @classmethod
    def name(cls) -> str:
        return "quire.kv"

    def schema(self) -> StructType:
        options = _options(self.options)
        kinds = {name: options.one_of(f"{name}s", ("binary", "string")) for name in ("key", "value")}
        chosen = options.names("columns") or list(kinds)
        if unknown := [name for name in chosen if name not in kinds]:
            raise InvalidInput("the columns are `key` and `value`", given=unknown)
        return StructType([StructField(name, KINDS[kinds[name]], nullable=False) for name in chosen])

    def reader(self, schema: StructType) -> KvReader:
        return KvReader(_options(self.options), schema)

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
        from quire.spark.sources.kv_writer import KvWriter

        return KvWriter(Options(self.options, source="writing to quire.kv", known=WRITING), schema, overwrite=overwrite)


@dataclass(frozen=True, slots=True)
class Piece:
    """What a task reads."""

    directory: str
    sst_ids: tuple[int, ...]
    range: Range
    lease_id: int = 0


class KvPartition(InputPartition):
    """A piece, for Spark."""

    def __init__(self, piece: Piece) -> None:
        super().__init__(piece)


class KvReader(DataSourceReader):
    """Plans where the query is planned, reads on executors."""

    def __init__(self, options: Options, schema: StructType) -> None:
        self.access = options.access()
        self.database = options.need("database")
        self.snapshot = options.text("snapshot")
        self.range = asked_range(options)
        self.schema = schema
        self._keep_seconds = options.number("keep_seconds", KEEP_SECONDS, least=1)
        self._wanted = options.number("partitions", default_partitions(), least=1)

    def partitions(self) -> Sequence[InputPartition]:
        """Pieces of one version, cut at the tables' blocks so that no key is in two of them (rules 1 and 2)."""
        if self.range.is_empty:
            return [InputPartition(None)]
        lease_id, version = self._version()
        pieces = cut(version.directory, version.sst_ids, self.range, self._wanted)
        return [KvPartition(replace(piece, lease_id=lease_id)) for piece in pieces] or [InputPartition(None)]

    def _version(self) -> tuple[int, KvVersion]:
        """(what keeps it, if no snapshot does; the version)."""
        with self.access.connect() as client:
            if not self.snapshot:
                lent = client.lend_kv(self.database, self._keep_seconds)
                return lent.lease_id, lent.version
            try:
                return 0, client.kv_version(self.database, self.snapshot)
            except UnknownSnapshot:
                if not self.snapshot.isdecimal():
                    raise
                return 0, client.kv_version(self.database, int(self.snapshot))

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """The rows of a task's piece."""
        piece: Piece | None = partition.value
        if piece is None:
            return
        wanted = arrow_schema(self.schema)
        keep = kept(self.access, piece.lease_id, self._keep_seconds)
        with keep, opened(piece.directory, piece.sst_ids) as tables:
            for batch in scan_parts(tables, piece.range.low, piece.range.high, LSN_MAX):
                yield _shaped(batch, wanted)


def cut(directory: str, sst_ids: Sequence[int], asked: Range, wanted: int) -> Iterator[Piece]:
    """A range as about so many pieces (rule 2)."""
    with opened(directory, sst_ids) as tables:
        total = sum(size for table in tables for _, size in table.marks(asked.low, asked.high))
        share = max(PIECE_BYTES, -(-total // wanted))
        for low, high in parts(tables, asked.low, asked.high, first_bytes=share, bytes_max=share):
            ids = [t.meta.sst_id for t in tables if t.meta.key_max >= low and (high is None or t.meta.key_min < high)]
            if ids:
                yield Piece(directory, tuple(ids), Range(low, high))


@contextmanager
def opened(directory: str, sst_ids: Sequence[int]) -> Iterator[list[SSTable]]:
    """Tables of a snapshot, for as long as the block lasts."""
    if not os.path.isdir(directory):
        raise InvalidInput(
            "the snapshot's directory is not seen from here, or the snapshot has gone",
            hint="executors share a disk with the owner; `keep_seconds` says how long a version stays that nobody reads",
            path=directory,
        )
    home, tables = LsmHome(directory), list[SSTable]()
    try:
        for sst_id in sst_ids:
            tables.append(SSTable.open(OsDisk(), home.sst(sst_id), sst_id))
        yield tables
    finally:
        for table in tables:
            table.close()


def _shaped(batch: pa.RecordBatch, wanted: pa.Schema) -> pa.RecordBatch:
    import pyarrow as pa

    columns = []
    for field in wanted:
        try:
            columns.append(batch.column(field.name).cast(field.type))
        except pa.ArrowInvalid as error:
            raise InvalidInput(
                f"a {field.name} is not UTF-8", hint=f"read it as binary: option {field.name}s", cause=str(error)
            ) from error
    return pa.RecordBatch.from_arrays(columns, schema=wanted)


def asked_range(options: Options) -> Range:
    """What `prefix`, or `low` and `high`, say."""
    prefix, low, high = (options.text(name) for name in ("prefix", "low", "high"))
    if prefix and (low or high):
        raise InvalidInput("a query has a prefix or a range", hint="leave `prefix`, or `low` and `high`, out")
    if prefix:
        begin = _key("prefix", prefix)
        return Range(begin, prefix_end(begin))
    return Range(_key("low", low), _key("high", high) if high else None)


def _key(name: str, text: str) -> bytes:
    if not text.startswith("hex:"):
        return text.encode()
    try:
        return bytes.fromhex(text.removeprefix("hex:"))
    except ValueError as error:
        raise InvalidInput(f"the option `{name}` is not hexadecimal", given=text) from error


def _options(given: Any) -> Options:
    return Options(given, source="quire.kv", known=READING)
