"""A mirror's target in Delta Lake, through `deltalake`.

The batch's number is the version of an application transaction, in the commit that adds and removes files. The library does
not enforce it: it is read from the handle that commits, and a number that is not above it is refused. Nor does the library
notice that a file to be removed is already gone: that is checked, too. Commits are not retried: a retry would put this commit
after another one that its plan does not take into account.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pyarrow as pa
from deltalake import CommitProperties, DeltaTable, Field, Schema, Transaction
from deltalake.exceptions import CommitFailedError, DeltaError, TableNotFoundError
from deltalake.schema import PrimitiveType
from deltalake.transaction import AddAction, RemoveAction

from quire.core.clock import Clock
from quire.core.errors import InvalidInput, StalePlan
from quire.jobs.mirror.run import Column, WrittenFile, arrow_schema
from quire.jobs.mirror.target import FileSize, TargetState, require_same, unsupported_type
from quire.sqlite.tables import DATABASE

TO_DELTA = {"bigint": "long", "double": "double", "string": "string", "binary": "binary", "boolean": "boolean"}
_MAPPED = frozenset(" ,;{}()\n\t=")
FROM_DELTA = {delta: name for name, delta in TO_DELTA.items()}


def open_table(where: str, app_id: str, options: Mapping[str, str], clock: Clock) -> DeltaTarget:
    """Open the table in this directory."""
    return DeltaTarget(where, app_id, options, clock)


class DeltaTarget:
    """A target that is a Delta table."""

    def __init__(self, location: str, app_id: str, options: Mapping[str, str], clock: Clock) -> None:
        self.location = location
        self._app_id = app_id
        self._clock = clock
        self._storage = dict(options) or None
        self._table: DeltaTable | None = None
        self._state: TargetState | None = None

    def read(self) -> TargetState | None:
        """See `Target`."""
        try:
            self._table = table = DeltaTable(self.location, storage_options=self._storage)
        except TableNotFoundError:
            self._table = self._state = None
            return None
        actions = pa.table(table.get_add_actions(flatten=True))
        columns = (actions[name].to_pylist() for name in ("path", "size_bytes", "num_records"))
        files = {path: FileSize(size, rows or 0) for path, size, rows in zip(*columns, strict=True)}
        if len(table.metadata().partition_columns):
            raise InvalidInput(
                "the table is partitioned", hint="use a new table: the mirror creates it", target=self.location
            )
        batch_id = table.transaction_version(self._app_id) or 0
        self._state = TargetState(batch_id, tuple(self._columns(table)), files)
        return self._state

    def _columns(self, table: DeltaTable) -> list[Column]:
        columns: list[Column] = []
        for field in table.schema().fields:
            kind = field.type.type if isinstance(field.type, PrimitiveType) else str(field.type)
            if field.name != DATABASE:
                if kind not in FROM_DELTA:
                    raise unsupported_type(field.name, kind)
                columns.append((field.name, FROM_DELTA[kind]))
        return columns

    def create(self) -> None:
        """See `Target`."""
        try:
            DeltaTable.create(self.location, schema=arrow_schema(()), mode="error", storage_options=self._storage)
        except DeltaError as error:
            raise _refused(error, self.location) from error

    def add_columns(self, columns: Sequence[Column]) -> None:
        """See `Target`."""
        assert self._table is not None, "the table was read"
        _check_names([name for name, _ in columns], self.location)
        fields = [Field(name, PrimitiveType(TO_DELTA[kind]), nullable=True) for name, kind in columns]
        try:
            self._table.alter.add_columns(fields, commit_properties=CommitProperties(max_commit_retries=0))
        except CommitFailedError as error:
            raise _stale(error, self.location) from error
        except DeltaError as error:
            raise _refused(error, self.location) from error
        require_same(self._state, self.read(), self.location)

    def commit(self, batch_id: int, add: Sequence[WrittenFile], remove: Sequence[str]) -> None:
        """See `Target`."""
        table, state = self._table, self._state
        assert table is not None, "the table was read"
        assert state is not None, "the table was read"
        if batch_id <= (table.transaction_version(self._app_id) or 0) or not state.files.keys() >= set(remove):
            raise StalePlan("the target holds a different batch", hint="plan it again", target=self.location)
        # Not the start of the run: `VACUUM` counts its retention from here.
        at_ms = self._clock.now_ms()
        actions: list[AddAction | RemoveAction] = [
            AddAction(file.path, file.size_bytes, {}, at_ms, True, file.stats) for file in add
        ]
        actions += [RemoveAction(path, True, at_ms, state.files[path].size_bytes, {}) for path in remove]
        properties = CommitProperties(
            custom_metadata={"quire.mirror": self._app_id, "quire.batch": str(batch_id)},
            max_commit_retries=0,
            app_transactions=[Transaction(self._app_id, batch_id)],
        )
        schema: Schema = table.schema()
        self._table = self._state = None  # a handle does not see its own commit, so the next read opens a new one
        try:
            table.create_write_transaction(actions, "append", schema, commit_properties=properties)
        except CommitFailedError as error:
            raise _stale(error, self.location) from error
        except DeltaError as error:
            raise _refused(error, self.location) from error


def _check_names(names: Sequence[str], location: str) -> None:
    """Raise for names that Delta allows only with column mapping: the library would write them, and other readers refuse the
    table."""
    if refused := [name for name in names if _MAPPED.intersection(name)]:
        raise InvalidInput(
            "Delta does not allow a space or one of ,;{}()= in the name of a column, nor a tab or a line break",
            hint="rename the column, or mirror into Iceberg or Parquet",
            column=refused[0],
            target=location,
        )


def _stale(error: Exception, location: str) -> StalePlan:
    return StalePlan(f"another commit came first: {error}", hint="plan it again", target=location)


def _refused(error: Exception, location: str) -> InvalidInput:
    return InvalidInput(f"Delta rejected the commit: {error}", hint="see Delta's message", target=location)
