"""A mirror's target in Apache Iceberg, through `pyiceberg`: a table of a catalog (SQL, REST, Glue …).

The catalog is configured in pyiceberg (`~/.pyiceberg.yaml`, or `PYICEBERG_CATALOG__NAME__URI` in the environment); options of
the mirror that begin with `catalog.` are added to that configuration. Credentials belong in the configuration.

A batch is one overwrite snapshot, and its number is a property of the table that is set in the same transaction. The table is
created with `commit.retry.num-retries=0`: the library's own retries would put a commit after another one that its plan does not
take into account. Files have no field ids: the table has a name mapping, as for files that are added to an existing table.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pyiceberg.catalog import load_catalog
from pyiceberg.exceptions import (
    CommitFailedException,
    CommitStateUnknownException,
    NoSuchTableError,
    TableAlreadyExistsError,
    ValidationException,
)
from pyiceberg.io.pyarrow import parquet_file_to_data_file
from pyiceberg.manifest import DataFile
from pyiceberg.schema import Schema
from pyiceberg.table import Table, TableProperties
from pyiceberg.types import (
    BinaryType,
    BooleanType,
    DoubleType,
    IcebergType,
    LongType,
    NestedField,
    StringType,
)

from quire.core.clock import Clock
from quire.core.errors import InvalidInput, StalePlan, Unavailable
from quire.jobs.mirror.run import Column, WrittenFile
from quire.jobs.mirror.target import FileSize, TargetState, require_same, unsupported_type
from quire.sqlite.tables import DATABASE

CATALOG = "catalog."
"""Prefix of the mirror's options for the catalog."""
RETRIES = "commit.retry.num-retries"

TO_ICEBERG: dict[str, IcebergType] = {
    "bigint": LongType(),
    "double": DoubleType(),
    "string": StringType(),
    "binary": BinaryType(),
    "boolean": BooleanType(),
}


def open_table(
    where: str,
    app_id: str,
    options: Mapping[str, str],
    clock: Clock,  # noqa: ARG001 - all targets are opened with the same arguments
) -> IcebergTarget:
    """Open the table with this name: CATALOG.NAMESPACE.TABLE."""
    return IcebergTarget(where, app_id, options)


class IcebergTarget:
    """A target that is an Iceberg table."""

    def __init__(self, where: str, app_id: str, options: Mapping[str, str]) -> None:
        name, dot, self._identifier = where.partition(".")
        if not dot or "." not in self._identifier:
            hint = "use iceberg:CATALOG.NAMESPACE.TABLE"
            raise InvalidInput("an Iceberg target needs a catalog and a namespace", hint=hint, target=where)
        if unknown := [option for option in options if not option.startswith(CATALOG)]:
            hint = f"options of the catalog begin with {CATALOG}"
            raise InvalidInput("an Iceberg target has no such option", hint=hint, options=unknown)
        settings = {option.removeprefix(CATALOG): value for option, value in options.items()}
        try:
            self._catalog = load_catalog(name, **settings)
        except ValueError as error:
            hint = f"name it in ~/.pyiceberg.yaml, or pass catalog.uri and catalog.type: {error}"
            raise InvalidInput("pyiceberg does not know this catalog", hint=hint, catalog=name) from error
        self._property = f"quire.batch.{app_id}"
        self._location = ""
        self._table: Table | None = None
        self._state: TargetState | None = None
        self._files: dict[str, DataFile] = {}

    @property
    def location(self) -> str:
        """See `Target`."""
        return self._location

    def read(self) -> TargetState | None:
        """See `Target`."""
        try:
            self._table = table = self._catalog.load_table(self._identifier)
        except NoSuchTableError:
            self._table, self._files, self._state = None, {}, None
            return None
        self._location = table.location()
        tasks = list(table.scan().plan_files())
        if any(task.delete_files for task in tasks):
            hint = "rewrite the table's data files with Iceberg first"
            raise InvalidInput("another program has deleted rows of the target", hint=hint, target=self._identifier)
        root = self.location.rstrip("/") + "/"
        if strange := [task.file.file_path for task in tasks if not task.file.file_path.startswith(root)]:
            hint = "rewrite the table so that all its files are below its own location"
            raise InvalidInput("a file of the target is outside its table's location", hint=hint, file=strange[0])
        self._files = {task.file.file_path.removeprefix(root): task.file for task in tasks}
        sizes = {path: FileSize(file.file_size_in_bytes, file.record_count) for path, file in self._files.items()}
        batch_id = int(table.properties.get(self._property, "0"))
        self._state = TargetState(batch_id, tuple(_columns(table.schema())), sizes)
        return self._state

    def create(self) -> None:
        """See `Target`."""
        schema = Schema(NestedField(1, DATABASE, StringType(), required=False))
        properties = {
            RETRIES: "0",
            TableProperties.DEFAULT_NAME_MAPPING: schema.name_mapping.model_dump_json(),
        }
        self._catalog.create_namespace_if_not_exists(self._identifier.rpartition(".")[0])
        try:
            self._catalog.create_table(self._identifier, schema, properties=properties)
        except TableAlreadyExistsError as error:
            raise self._stale(error) from error

    def add_columns(self, columns: Sequence[Column]) -> None:
        """See `Target`."""
        assert self._table is not None, "the table was read"
        try:
            with self._table.update_schema() as update:
                for name, kind in columns:
                    update.add_column((name,), TO_ICEBERG[kind])  # as text, a name with a dot would be a path
        except CommitFailedException as error:
            raise self._stale(error) from error
        require_same(self._state, self.read(), self._identifier)

    def commit(self, batch_id: int, add: Sequence[WrittenFile], remove: Sequence[str]) -> None:
        """See `Target`."""
        table = self._table
        assert table is not None, "the table was read"
        is_taken = batch_id <= int(table.properties.get(self._property, "0"))
        if is_taken or not self._files.keys() >= set(remove):
            raise StalePlan("the target holds a different batch", hint="plan it again", target=self._identifier)
        if table.properties.get(RETRIES) != "0":
            table.transaction().set_properties({RETRIES: "0"}).commit_transaction()
            raise StalePlan("the target was set to retry commits", hint="plan it again", target=self._identifier)
        root = self.location.rstrip("/")
        try:
            with table.transaction() as transaction:
                transaction.set_properties({self._property: str(batch_id)})
                with transaction.update_snapshot().overwrite() as snapshot:
                    for path in remove:
                        snapshot.delete_data_file(self._files[path])
                    for file in add:
                        snapshot.append_data_file(
                            parquet_file_to_data_file(table.io, transaction.table_metadata, f"{root}/{file.path}")
                        )
        except (CommitFailedException, ValidationException) as error:
            raise self._stale(error) from error
        except CommitStateUnknownException as error:
            what = f"whether the catalog committed is unknown: {error}"
            hint = "run it again: the batch number in the table prevents duplicates"
            raise Unavailable(what, hint=hint, target=self._identifier) from error
        finally:
            self._table, self._files = None, {}

    def _stale(self, error: Exception) -> StalePlan:
        return StalePlan(f"another commit came first: {error}", hint="plan it again", target=self._identifier)


def _columns(schema: Schema) -> list[Column]:
    names = {type(kind): name for name, kind in TO_ICEBERG.items()}
    columns: list[Column] = []
    for field in schema.fields:
        if field.name != DATABASE:
            if type(field.field_type) not in names:
                raise unsupported_type(field.name, str(field.field_type))
            columns.append((field.name, names[type(field.field_type)]))
    return columns
