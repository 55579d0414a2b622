"""Whether a database accepts writes: checked before every write of every engine, but read from LMDB only after a
database has changed.

Threads: any; two threads that check at the same time both read. Raises `ReadOnly`, `DatabaseTombstoned`.
"""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING

from quire.core.errors import DatabaseTombstoned, ReadOnly
from quire.manifest.ops.base import Component
from quire.manifest.records import DbStatus

if TYPE_CHECKING:
    from quire.manifest.store import ManifestStore

_DATABASES = int(Component.DATABASE)


class Writability:
    """Whether one database accepts writes."""

    __slots__ = ("_active_at", "_checked", "_db_id", "_manifest", "_marks")

    def __init__(self, manifest: ManifestStore, db_id: int) -> None:
        self._manifest = manifest
        self._marks = manifest.writer
        self._db_id = db_id
        self._checked: dict[int, int] | None = None
        """The writer's generations at the last check that passed. Every commit replaces them, so the same dict means that
        nothing was committed since."""
        self._active_at = -1
        """The generation of the component DATABASE at which this database was last found to accept writes."""

    def require(self) -> None:
        """Raise unless the database accepts writes."""
        generations = self._marks.generations
        if generations is self._checked:
            return
        if self._active_at != (generation := generations.get(_DATABASES, 0)):
            self._require_active()
            self._active_at = generation
        self._checked = generations

    def _require_active(self) -> None:
        """Raise unless the database accepts writes, according to its row."""
        with self._manifest.read() as txn:
            record = txn.database(self._db_id)
        if record is None or record.status is DbStatus.TOMBSTONED:
            raise DatabaseTombstoned("the database was dropped", hint="create a new one", db_id=self._db_id)
        if record.former_name:
            hint = f"`quire undrop {shlex.quote(record.former_name)}` restores it"
            raise DatabaseTombstoned("the database was dropped", hint=hint, database=record.former_name)
        if record.status is DbStatus.READ_ONLY:
            hint = f"run `quire db set-status {shlex.quote(record.name)} active` to write to it again"
            raise ReadOnly("the database is read-only", hint=hint, database=record.name)
