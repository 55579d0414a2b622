"""`quire.rows`: the rows of a table that differ between two versions of a database, or of many (L1).

    options = {"store": path, "databases": "tenant-*", "table": "orders", "from": "monday", "to": "tuesday"}
    spark.read.format("quire.rows").options(**options).load()
    spark.readStream.format("quire.rows").options(…, databases="tenant-*", table="orders", consumer="warehouse").load()

A row begins with `_database`, `_table`, `_op` (`insert`, `update`, `delete`), `_key` (the rowid, as text; in tables WITHOUT
ROWID the primary key, as a JSON array), `_epoch` and `_committed_at` (number and time of the later version). The table's
columns follow: the row after the change, for a delete the deleted row. With `before` = `true` a struct `_before` follows: the
row before the change, NULL for an insert.

- Rows are searched where pages of the table differ, and compared as SQLite stores them (`sqlite/row_changes.py`). Executors
  do this: small databases share tasks, a large one is planned here and cut into ranges of rowids.
- Without `from` all rows of the later version are inserts. A table that one version does not have is empty there.
- A column that a version does not have counts as NULL. The columns are those of the later version; if `columns` names some,
  only these are compared.
- With `notices` = `true` there are rows that are not changes: `_op` is `compared`, and `_key` gives the reason why everything
  was compared (`altered`, `rewritten`: more than half of its pages differ, as after VACUUM, and others); `replaced`, if
  another database has the name now, as after a rewind; `dropped`.
- A streaming query returns all rows first, then the changes. Its consumer holds the versions that it has read up to
  (`pages/held_versions.py`): a position is the id of a lease, and the version of a database at a position is the newest one in
  a lease at or below it. A batch is the databases that have a version above its start; it is the same whenever it is planned.
  A version is released when the batch that replaces it is committed. A dropped database is all deletes; one that was
  replaced by another under its name is compared with it.

Options: `table`, `columns`, `types`, `merge_schema` and `misfits` as for `quire.sqlite`; `before`, `notices`; `from`, `to`
(default: the newest version), `absent` (`error`, `skip`, or `empty`: a database without the snapshot `from` had no rows
then), and those of `views.py` except `snapshot`. For streams: `consumer`; `start` (`all`, or `latest`: only changes from now
on) or `from` (changes since a snapshot), `max_databases` and `max_pages` (page versions written since) in a batch,
`keep_seconds` (a day: how long versions are kept when the query does not run); databases without the table are skipped unless
`absent` is `error`.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import accumulate, chain
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from pyspark.sql.datasource import InputPartition
from pyspark.sql.streaming.datasource import ReadLimit
from pyspark.sql.types import StructType

from quire.core.errors import CursorLost, InvalidInput, NotFound, StalePlan, UnknownDatabase
from quire.manifest.leases import HeldVersion
from quire.pages.view_changes import changed_pages
from quire.spark.sources.base import (
    HeldQueryReader,
    Offset,
    Options,
    QuireSource,
    SourceReader,
    default_partitions,
    kept,
)
from quire.spark.sources.row_columns import BEFORE, RESERVED, RowForm, rows_schema
from quire.spark.sources.sqlite import PIECE_BYTES, SHAPING, chosen_schema, columns_of
from quire.spark.sources.views import (
    COMPARING,
    LENT_AT_ONCE,
    LocatedVersion,
    VersionPair,
    VersionReaders,
    VersionRequest,
    balanced_groups,
)
from quire.sqlite.arrow_rows import coalesced
from quire.sqlite.column_types import SampledColumn
from quire.sqlite.read_ahead import ReadAhead
from quire.sqlite.row_changes import Candidates, ComparedVersion, changed_rows, find_candidates
from quire.sqlite.row_reads import naming
from quire.sqlite.tables import SqliteTable, connected
from quire.sqlite.trees import EVERYTHING, by_number, rowid_ranges

if TYPE_CHECKING:
    from quire.pages.view import ViewReader
    from quire.service.client import Client

COMPARED, REPLACED, DROPPED = "compared", "replaced", "dropped"
"""Notices: the whole table was compared; another database has the name now; the database is gone."""

OPTIONS = (*COMPARING, *SHAPING, "before", "notices")
STREAMING = ("consumer", "start", "max_databases", "max_pages")

STREAM_KEEP_SECONDS = 24 * 3_600
"""Seconds that the versions of a streaming query are kept after its last sign of life."""

POLL_SECONDS = 1.0
"""Seconds that a query without new rows waits before it checks again."""


@dataclass(frozen=True, slots=True)
class RowsPiece:
    """The part of a database that a task compares."""

    pair: VersionPair
    candidates: Candidates | None
    """Where to look, if already known."""
    size_bytes: int
    is_first: bool = True
    """Whether it is the first of the database, which has the notices."""


@dataclass(frozen=True, slots=True)
class RowsQuery:
    """What executors need in addition to their pieces."""

    table: str
    columns: tuple[str, ...]
    """The columns of the table that are compared."""
    notices: bool
    null_misfits: bool
    skip_absent: bool
    is_streaming: bool = False
    """Whether the columns were those of an earlier version: of the one that was the newest when the query started."""

    @classmethod
    def of(cls, options: Options, schema: StructType) -> RowsQuery:
        """Return the query that the options define; the schema may be the user's."""
        nested = schema[BEFORE].dataType if BEFORE in schema.names else StructType([])
        if not isinstance(nested, StructType):
            raise InvalidInput(f"`{BEFORE}` must be a struct of the table's columns", given=nested.simpleString())
        columns = [name for name in schema.names if name not in RESERVED]
        return cls(
            options.need("table"),
            tuple(dict.fromkeys([*columns, *nested.names])),
            options.flag("notices"),
            options.one_of("misfits", ("error", "null")) == "null",
            options.text("absent", "error").lower() != "error",
        )

    def batches(self, part: list[RowsPiece], schema: pa.Schema) -> Iterator[pa.RecordBatch]:
        """Yield the rows of a task."""
        with VersionReaders() as readers:
            yield from coalesced(chain.from_iterable(self._compared(piece, schema, readers) for piece in part))

    def _compared(self, piece: RowsPiece, schema: pa.Schema, readers: VersionReaders) -> Iterator[pa.RecordBatch]:
        """Yield the rows of a piece, in small batches."""
        with ExitStack() as stack:
            sides = _Sides(stack, piece.pair, readers)
            if piece.candidates is not None:
                tables, candidates = sides.tables(self.table), piece.candidates
            else:
                tables, candidates = sides.candidates(self.table)
            if tables == (None, None) and not self.skip_absent:
                raise NotFound("the database has no such table", table=self.table, database=sides.after.database)
            if self.is_streaming:
                self._need_same_columns(*tables, sides.after.database)
            form = RowForm(self.table, self.columns, piece.pair.after, schema, null_misfits=self.null_misfits)
            if self.notices and piece.is_first:
                yield from (form.notice(*notice) for notice in _notices(piece.pair, candidates))
            if candidates.is_empty:
                return
            if candidates.full_compare_reason:
                sides.read_ahead(stack)
            versions: tuple[ComparedVersion | None, ComparedVersion | None] = sides.before, sides.after
            if piece.pair.is_dropped:
                versions, tables = (sides.after, None), (tables[1], None)
            with naming(self.table, sides.after.database):
                yield from form.batches(changed_rows(*versions, tables, self.columns, candidates))

    def _need_same_columns(self, old: SqliteTable | None, new: SqliteTable | None, database: str) -> None:
        """Refuse a version in which other columns have replaced some of the query's: what is written there would be missed.
        A column that was only dropped is NULL, one that was only added is read after a restart."""
        if old is None or new is None:
            return
        lost = [name for name in self.columns if old.column(name) is not None and new.column(name) is None]
        known = {name.lower() for name in self.columns}
        gained = [
            column.name
            for column in new.columns
            if column.name.lower() not in known and old.column(column.name) is None
        ]
        if lost and gained:
            raise StalePlan(
                "columns of the table were renamed or replaced while the query ran",
                hint="restart the query with the same checkpoint: it then reads the current columns; if other databases "
                "still have the old ones, add merge_schema=true",
                database=database,
                table=self.table,
                before=lost,
                now=gained,
            )


class _Sides:
    """Both versions of a piece, opened."""

    def __init__(self, stack: ExitStack, pair: VersionPair, readers: VersionReaders) -> None:
        self.readers: list[ViewReader | None] = [
            readers.open(version) if version is not None else None for version in (pair.before, pair.after)
        ]
        self._name = pair.after.database
        self.before, self.after = self._versions(stack, self.readers)

    def _versions(self, stack: ExitStack, pages: Sequence[Any]) -> tuple[ComparedVersion | None, ComparedVersion]:
        before, after = (
            ComparedVersion(reader, stack.enter_context(connected(reader)), self._name) if reader is not None else None
            for reader in pages
        )
        assert after is not None, "a pair has a later version"
        return before, after

    def read_ahead(self, stack: ExitStack) -> None:
        """Switch to reading in long runs: much of the database is read in order."""
        ahead = [ReadAhead(reader) if reader is not None else None for reader in self.readers]
        self.before, self.after = self._versions(stack, ahead)

    def tables(self, name: str) -> tuple[SqliteTable | None, SqliteTable | None]:
        """Return the table in each version."""
        return self.before.table(name) if self.before is not None else None, self.after.table(name)

    def candidates(self, name: str) -> tuple[tuple[SqliteTable | None, SqliteTable | None], Candidates]:
        """Return the table in each version, and where its rows may differ."""
        if self.before is None:
            table = self.after.table(name)
            reason = "created" if table is not None else ""
            return (None, table), Candidates(
                (EVERYTHING,) if table is not None and table.rowid else (), full_compare_reason=reason
            )
        old, new, candidates = find_candidates(self.before, self.after, name, self._changed)
        return (old, new), candidates

    def _changed(self) -> set[int]:
        """Return the pages that differ, with SQLite's numbers."""
        before, after = self.readers
        assert before is not None, "there is an earlier version"
        assert after is not None, "there is a later version"
        size = max(before.size_pages, after.size_pages)
        return {page + 1 for page, _, _ in changed_pages(before, after, 0, size)}


def _notices(pair: VersionPair, candidates: Candidates) -> Iterator[tuple[str, str]]:
    """Yield the notices for a piece."""
    if pair.is_dropped:
        yield DROPPED, "the database was dropped or renamed"
    if pair.is_replaced:
        yield REPLACED, "another database has this name now"
    if pair.before is not None and candidates.full_compare_reason:
        yield COMPARED, candidates.full_compare_reason


def planned(pairs: list[VersionPair], table: str, partitions: int) -> Iterator[RowsPiece]:
    """Yield pairs as pieces: a small database is one, a large one is cut where its rows may differ."""
    for pair in pairs:
        size = pair.after.size_bytes
        if pair.before is not None and _identity(pair.before) == _identity(pair.after):
            continue
        if size <= PIECE_BYTES:
            yield RowsPiece(pair, None, size)
            continue
        with ExitStack() as stack:
            sides = _Sides(stack, pair, stack.enter_context(VersionReaders()))
            tables, candidates = sides.candidates(table)
            if tables != (None, None) and candidates.is_empty and not pair.is_replaced:
                continue
            old, new = tables
            ranges = candidates.ranges
            # A table that had no rowids is compared as a whole: each task would delete all of its old rows.
            if ranges == (EVERYTHING,) and new is not None and (old is None or old.rowid):
                ranges = tuple(rowid_ranges(by_number(sides.after.pages), new.root, partitions))
        for start in range(max(min(partitions, len(ranges)), 1)):
            some = replace(candidates, ranges=ranges[start::partitions])
            yield RowsPiece(pair, some, size // partitions, is_first=not start)


def _identity(version: LocatedVersion) -> tuple[int, int]:
    return version.view.db_id, version.view.lsn


class RowsReader(SourceReader):
    """Reads pieces of databases: a whole one, or ranges of its rowids."""

    def __init__(self, options: Options, schema: StructType) -> None:
        options.refuse(STREAMING, "streaming queries", "use `from` and `to`, or readStream")
        super().__init__(options, schema)
        self.request = VersionRequest(options, snapshot=options.text("to"))
        self.keep_seconds = self.request.keep_seconds
        self.query = RowsQuery.of(options, schema)
        self.earlier = options.text("from")

    def plan(self) -> list[list[RowsPiece]]:
        with self.access.connect() as client:
            pairs = self.request.pairs(client, self.request.names(client), self.earlier)
        return balanced_groups(planned(pairs, self.query.table, self.partitions_max), self.partitions_max)

    def lease_of(self, part: list[RowsPiece]) -> int:
        return part[0].pair.after.lease_id

    def batches(self, part: list[RowsPiece], schema: pa.Schema) -> Iterator[pa.RecordBatch]:
        return self.query.batches(part, schema)


class RowsSource(QuireSource):
    """The data source `quire.rows`."""

    NAME = "quire.rows"
    KNOWN = (*OPTIONS, *STREAMING)
    READER = RowsReader

    def streamReader(self, schema: StructType) -> RowsQueryReader:  # noqa: N802 - Spark gives the name
        return RowsQueryReader(self.parse(self.options), schema)

    def schema(self) -> StructType:
        options = self.parse(self.options)
        if options.text("consumer"):
            _refuse_end(options)
        with options.access().connect() as client:
            table = chosen_schema(_columns_of_both(client, options), options)
        return rows_schema(table, with_before=options.flag("before"))


def _refuse_end(options: Options) -> None:
    """Refuse the option `to` of a streaming query. Spark requests the schema first, which is that of the version `to`."""
    options.refuse(("to",), "batch queries", "a streaming query goes on to the newest version")


def _columns_of_both(client: Client, options: Options) -> list[SampledColumn]:
    """Return the columns of the later version, with types that also take the values of the earlier one: deleted rows and
    `_before` have them. If only one version has the table, its columns are returned."""
    later, earlier = (_columns_at(client, options, option) for option in ("to", "from"))
    if isinstance(later, NotFound):
        if isinstance(earlier, NotFound) or not earlier:
            raise later
        return earlier  # dropped since `from`
    if isinstance(earlier, NotFound):
        return later
    by_name = {column.name.lower(): column for column in earlier}
    return [
        column.with_values_of(by_name[column.name.lower()]) if column.name.lower() in by_name else column
        for column in later
    ]


def _columns_at(client: Client, options: Options, option: str) -> list[SampledColumn] | NotFound:
    """Return the columns at the version that the option `from` or `to` names, or why there are none."""
    snapshot = options.text(option)
    if option == "from" and not snapshot:
        return []
    try:
        return columns_of(client, VersionRequest(options, snapshot=snapshot), options)
    except NotFound as error:
        return error


# ── a streaming query ─────────────────────────────────────────────────────────────────────────────────────────────────
Held = dict[str, HeldVersion]
"""The versions of databases at a position, by name; a marker for a dropped database."""


class RowsQueryReader(HeldQueryReader):
    """A streaming query whose offsets are leases of a consumer. An offset also has the number of databases at that position,
    so that missing versions are detected."""

    HOLDER = "consumer"
    POSITION = "lease"

    def __init__(self, options: Options, schema: StructType) -> None:
        _refuse_end(options)
        super().__init__(options, schema)
        self.request = VersionRequest(options)
        self.request.keep_seconds = options.number("keep_seconds", STREAM_KEEP_SECONDS, least=1)
        skip = options.text("absent", "skip").lower() != "error"
        self.query = replace(RowsQuery.of(options, schema), skip_absent=skip, is_streaming=True)
        self.partitions_max = options.number("partitions", default_partitions(), least=1)
        self._earlier, self._start = options.text("from"), options.one_of("start", ("all", "latest"))
        self._databases_max = options.number("max_databases", 0)
        self._pages_max = options.number("max_pages", 0)
        self._target: dict[tuple[str, int], int] | None = None
        """With the trigger `availableNow`: how far each database, (name, id), had been written when the query began."""

    def connect(self) -> Client:
        return self.access.connect()

    def identity(self) -> dict[str, Any]:
        return {"store": self.owner.server.store_id, "table": self.query.table, "consumer": self.holder}

    def initialOffset(self) -> Offset:  # noqa: N802 - Spark gives these names
        """Return the position before everything, or that of the databases when the query began. Spark calls this again when
        it plans the first batch, and after a restart before that was done; the result is then the same."""
        if self._start == "all":
            return self._offset(0)
        if held := self.owner.held(self.holder):
            return self._offset(held[0].lease_id)
        names = [database.name for database in self.request.matching(self.owner)]
        return self._offset(self.request.lend_to(self.owner, self.holder, names) if names else 0)

    def latestOffset(self, start: Offset, _: ReadLimit) -> Offset:  # noqa: N802
        position, held = self.position(start), self.owner.held(self.holder)
        before = self._known(start, held)
        # Left by an offset that Spark did not record before it ended, or by a query whose checkpoint was abandoned.
        self._release([version for version in held if version.lease_id > position])
        if kept_versions := list(before.values()):
            self.owner.renew_lease(kept_versions[0].lease_id)  # renews all others with it
        try:
            reached = self._hold_changed(before)
        except UnknownDatabase:  # dropped concurrently: the next call finds out
            reached = 0
        if not reached and self._target is None:
            threading.Event().wait(POLL_SECONDS)
        return self._offset(reached) if reached else start

    def _hold_changed(self, before: Held) -> int:
        """Hold the newest versions of databases that changed; return the new position, 0 if there are none."""
        newest = self._newest()
        changed = [name for name, version in newest.items() if _has_changed(before.get(name), *version)]
        gone = {name: version for name, version in before.items() if name not in newest}
        if (target := self._target) is not None:
            begun = {name: (newest[name][0], target.get((name, newest[name][0]), 0)) for name in changed}
            changed = [
                name for name, version in begun.items() if version[1] and _has_changed(before.get(name), *version)
            ]
        written = {name: _pages_since(before.get(name), *newest[name]) for name in changed}
        chosen = self._limited({**written, **{name: version.lsn for name, version in gone.items()}}, before)
        reached = 0
        if dropped := [(gone[name].db_id, name) for name in chosen if name in gone]:
            reached = self.owner.mark_dropped(self.holder, dropped, self.request.keep_seconds)
        if wanted := [name for name in chosen if name in written]:
            reached = self.request.lend_to(self.owner, self.holder, wanted)
        return reached

    def _limited(self, pages: Mapping[str, int], before: Held) -> list[str]:
        """Return the databases that a batch takes; `pages` were written to each. At least one: its changes are not divided."""
        # The databases read longest ago go first, so that a limit starves none.
        names = sorted(pages, key=lambda name: before[name].lease_id if name in before else 0)
        names = names[: self._databases_max or None]
        sums = accumulate(pages[name] for name in names)
        return [
            name for place, (name, sum_) in enumerate(zip(names, sums)) if not place or not 0 < self._pages_max < sum_
        ]

    def _newest(self) -> dict[str, tuple[int, int]]:
        """Return (id, newest lsn) of the requested databases that were ever written, by name. A dropped database whose name an
        empty one has is gone."""
        databases = self.request.matching(self.owner)
        names = [database.name for database in databases]
        lsns = self.owner.newest_lsns(names)
        return {database.name: (database.db_id, lsn) for database, lsn in zip(databases, lsns, strict=True) if lsn}

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        """Fix the end of this query: later versions do not belong to it."""
        self._target = {(name, db_id): lsn for name, (db_id, lsn) in self._newest().items()}

    def partitions(self, start: Offset, end: Offset) -> Sequence[InputPartition]:
        first, last = self.position(start), self.position(end)
        if first == last:
            return []
        held = self.owner.held(self.holder)
        before, after = self._known(start, held), self._known(end, held)
        marks = {version.label: version for version in held if first < version.lease_id <= last}
        changed = {name: version for name, version in marks.items() if version.lsn}
        dropped = {name: before[name] for name, version in marks.items() if not version.lsn and name in before}
        earlier = self._versions({name: before[name] for name in changed if name in before})
        if not first and self._earlier:
            earlier = self._at_snapshot(list(changed))
        later = self._versions({name: after[name] for name in changed})
        pairs = [VersionPair(earlier.get(name), version) for name, version in later.items()]
        pairs += [VersionPair(None, version, is_dropped=True) for version in self._versions(dropped).values()]
        pieces = planned(pairs, self.query.table, self.partitions_max)
        return [InputPartition(part) for part in balanced_groups(pieces, self.partitions_max)]

    def batches(self, part: list[RowsPiece], schema: pa.Schema) -> Iterator[pa.RecordBatch]:
        with kept(self.access, part[0].pair.after.lease_id, self.request.keep_seconds):
            yield from self.query.batches(part, schema)

    def commit(self, end: Offset) -> None:
        """Release versions that newer ones have replaced: Spark has processed everything up to `end`."""
        position = self.position(end)
        reached = [version for version in self.owner.held(self.holder) if version.lease_id <= position]
        # The versions at `end` stay: the next batch is compared with them, and Spark may plan it more than once.
        newest = {version.label: version for version in reached}
        self._release(
            [
                version
                for version in reached
                if version.lease_id < position and (version is not newest[version.label] or not version.lsn)
            ]
        )

    def _release(self, versions: list[HeldVersion]) -> None:
        if versions:
            self.owner.release_versions([(version.lease_id, version.db_id) for version in versions])

    def _offset(self, position: int) -> Offset:
        return {**self.offset(position), "databases": len(_at(self.owner.held(self.holder), position))}

    def _known(self, offset: Offset, held: list[HeldVersion]) -> Held:
        """Return the versions at an offset. Raises `CursorLost` if some are gone."""
        versions = _at(held, self.position(offset))
        if len(versions) == offset["databases"]:
            return versions
        if held:
            why = "the query continues from an older checkpoint than its consumer has committed, or another one uses it"
        else:
            why = "the versions that the query read last are no longer kept"
        raise CursorLost(
            why,
            hint="start again with a new checkpoint location: its first batch has all rows; "
            "`keep_seconds` keeps versions for longer, but not across a restore of the store",
            consumer=self.holder,
            databases=offset["databases"],
            held=len(versions),
        )

    def _versions(self, held: Held) -> dict[str, LocatedVersion]:
        """Return held versions in the form in which executors open them."""
        names, versions = list(held), list[LocatedVersion]()
        for start in range(0, len(names), LENT_AT_ONCE):
            some = names[start : start + LENT_AT_ONCE]
            views = self.owner.held_views([(held[name].lease_id, held[name].db_id) for name in some])
            lease_id = held[some[0]].lease_id  # renewed together with all others
            versions += self.request.of_views(self.owner, dict(zip(some, views, strict=True)), lease_id)
        return {version.database: version for version in versions}

    def _at_snapshot(self, names: list[str]) -> dict[str, LocatedVersion]:
        versions = self.request.of_snapshot(self.owner, names, self._earlier)
        return {version.database: version for version in versions if version is not None}


def _at(held: list[HeldVersion], position: int) -> Held:
    """Return the versions of databases at a position; `held` is in the order of leases."""
    newest = {version.label: version for version in held if version.lease_id <= position}
    return {name: version for name, version in newest.items() if version.lsn}


def _has_changed(before: HeldVersion | None, db_id: int, lsn: int) -> bool:
    """Return whether a database has changes that its consumer has not read."""
    return before is None or before.db_id != db_id or lsn > before.lsn


def _pages_since(before: HeldVersion | None, db_id: int, lsn: int) -> int:
    """Return the page versions written since a consumer has read a database; all of them if it has not."""
    return lsn - before.lsn if before is not None and before.db_id == db_id else lsn
