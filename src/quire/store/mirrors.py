"""Manages mirrors, lakehouse tables that are kept in step with a table of many SQLite databases (L3): `store.mirrors`.

Terms
  target    the lakehouse table: `delta:URL`, `iceberg:CATALOG.NAMESPACE.TABLE` or `parquet:URL`
  run       one job that brings the target up to date, with one commit (`quire.jobs.mirror.job`)

Dropping a mirror leaves its target unchanged.

Threads: any. Raises `InvalidInput`, `InvalidName`, `NameTaken`, `NotFound`, and the errors of a run.
"""

from __future__ import annotations

import os
import secrets
import shlex
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import msgspec

from quire.core.barrier import changes
from quire.core.decoding import described
from quire.core.errors import InvalidInput, NameTaken
from quire.durable.names import check_name
from quire.jobs.handler import Progress
from quire.jobs.mirror.change_detection import (
    LiveDatabase,
    differences,
    failed_runs,
    find_mirror,
    held_databases,
    newest_versions,
)
from quire.jobs.runner import no_tick
from quire.manifest import tables as t
from quire.manifest.ops.mirrors import DropMirror, PutMirror
from quire.manifest.reads import ReadTxn
from quire.manifest.records import JobKind, MirrorDatabaseRecord, MirrorRecord
from quire.service.values import MirrorRun, MirrorStatus

if TYPE_CHECKING:
    from quire.store.store import Store
    from quire.store.wiring import Wiring

FILE_BYTES_MIN = 64 << 10
OPTIONS = ("file_bytes", "misfits")
"""Options of the mirror itself; all others belong to its target."""


def mirror_status(
    txn: ReadTxn, mirror_id: int, record: MirrorRecord, now_ms: int, newest: Mapping[int, int] | None = None
) -> MirrorStatus:
    """Return the status of a mirror. `newest` maps open databases to their newest versions; only the owner has it, other
    processes use the published versions."""
    held = held_databases(txn, mirror_id)
    differ = differences(txn, record, held, newest)
    is_behind = bool(differ.changed or differ.gone)
    since_ms = record.synced_at_ms or record.created_at_ms
    failures, error = failed_runs(txn, record)
    return MirrorStatus(
        name=record.name,
        databases=record.databases,
        table=record.table,
        target=record.target,
        options=record.options,
        every_seconds=record.every_ms / 1000,
        created_at_ms=record.created_at_ms,
        started_at_ms=record.started_at_ms,
        synced_at_ms=record.synced_at_ms,
        batch_id=record.batch_id,
        followed=differ.followed,
        held=len(held),
        rows=sum(row.rows for row in held.values()),
        size_bytes=sum(row.size_bytes for row in held.values()),
        changed=len(differ.changed),
        dropped=len(differ.gone),
        lag_seconds=max(now_ms - since_ms, 0) / 1000 if is_behind else 0.0,
        lag_frames=sum(_frames_behind(database, held) for database in differ.changed),
        failures=failures,
        error=error,
    )


def _frames_behind(database: LiveDatabase, held: Mapping[int, MirrorDatabaseRecord]) -> int:
    """Return the number of frames written to a database since the version that the target holds."""
    row = held.get(database.db_id)
    return max((database.lsn or 0) - (row.lsn if row is not None else 0), 0)


def mirror_statuses(txn: ReadTxn, now_ms: int, newest: Mapping[int, int] | None = None) -> list[MirrorStatus]:
    """Return the status of every mirror, sorted by name."""
    statuses = [mirror_status(txn, mirror_id, record, now_ms, newest) for (mirror_id,), record in txn.scan(t.MIRROR)]
    return sorted(statuses, key=lambda status: status.name)


class Mirrors:
    """The mirrors of an opened store: `store.mirrors`."""

    def __init__(self, store: Store, wiring: Wiring) -> None:
        self._store = store
        self._wiring = wiring
        self._manifest = store.manifest
        self._manifest.cover(self)

    @changes
    def create(
        self,
        name: str,
        databases: str | Sequence[str],
        table: str,
        target: str,
        *,
        every_seconds: float = 0,
        options: Mapping[str, str] | None = None,
    ) -> MirrorStatus:
        """Create a mirror of one table in all page databases whose names match. Nothing is written before its first run.

        `databases` are names and patterns (`tenant-*`), in a list or separated by commas.
        With `every_seconds`, the owner runs it at that interval. Options: `misfits` (what happens to a value that does not have
        its column's type: `error` or `null`), `file_bytes` (approximate size of the files that databases are packed into), and
        those of the target.
        """
        from quire.jobs.mirror.job import check_target  # loads Arrow and SQLite

        check_name("mirror", name)
        self._need_free(name)
        given_patterns = [databases] if isinstance(databases, str) else databases
        patterns = [pattern.strip() for text in given_patterns for pattern in text.split(",")]
        if not patterns or not all(patterns) or not table:
            raise InvalidInput(
                "a mirror needs databases and a table", hint="for example `tenant-*` and `orders`", name=name
            )
        given = dict(options or {})
        _check_options(given)
        if every_seconds < 0 or 0 < every_seconds < 1:
            raise InvalidInput("a mirror can run at most once per second", every_seconds=every_seconds)
        mirror_id = secrets.randbits(63)
        record = MirrorRecord(
            name,
            patterns,
            table,
            absolute_target(target),
            self._manifest.clock.now_ms(),
            int(every_seconds * 1000),
            given,
        )
        check_target(self._wiring.context, mirror_id, record)
        self._manifest.submit([PutMirror(mirror_id, t.MIRROR.codec.checked(record))]).result()
        return self.status(name)

    def _need_free(self, name: str) -> None:
        """Raise `NameTaken` before the target is read, which would be found to belong to the mirror of that name."""
        with self._manifest.read() as txn:
            if any(record.name == name for _, record in txn.scan(t.MIRROR)):
                hint = f"`quire mirror status {shlex.quote(name)}` shows it; choose another name, or drop it"
                raise NameTaken("a mirror with this name already exists", hint=hint, name=name)

    @changes
    def run(self, name: str, *, runner: str = "", full: bool = False, progress: Progress = no_tick) -> MirrorRun:
        """Bring a mirror's target up to date now and return what was done. With `full`, write everything again."""
        with self._manifest.read() as txn:
            find_mirror(txn, name)
        payload = {"mirror": name, "runner": runner, "full": full}
        job = self._wiring.worker.run_new(JobKind.MIRROR, 0, payload, watch=progress, reraise=True)
        return msgspec.convert(job.result, described(MirrorRun))

    def status(self, name: str) -> MirrorStatus:
        """Return a mirror's status, including how far its target lags behind."""
        with self._manifest.read() as txn:
            return mirror_status(txn, *find_mirror(txn, name), self._manifest.clock.now_ms(), self._newest())

    def list(self) -> list[MirrorStatus]:
        """Return the status of every mirror, sorted by name."""
        with self._manifest.read() as txn:
            return mirror_statuses(txn, self._manifest.clock.now_ms(), self._newest())

    @changes
    def drop(self, name: str) -> MirrorStatus:
        """Drop a mirror and return its last status. Its target is left in place."""
        with self._manifest.read() as txn:
            mirror_id, record = find_mirror(txn, name)
            status = mirror_status(txn, mirror_id, record, self._manifest.clock.now_ms(), self._newest())
        while True:
            self._manifest.submit([DropMirror(mirror_id)]).result()
            with self._manifest.read() as txn:
                if txn.get(t.MIRROR, mirror_id) is None:
                    return status

    def _newest(self) -> dict[int, int]:
        return newest_versions(self._store.pages.stores())


def absolute_target(target: str) -> str:
    """Return a target with its path, if it has one, made absolute.

    >>> (
    ...     absolute_target("delta:s3://lake/orders"),
    ...     absolute_target("parquet:/srv/lake/"),
    ...     absolute_target("iceberg:lake.a.b"),
    ... )
    ('delta:s3://lake/orders', 'parquet:/srv/lake', 'iceberg:lake.a.b')
    """
    kind, _, where = target.partition(":")
    is_path = kind in ("delta", "parquet") and where and "://" not in where
    return f"{kind}:{os.path.abspath(where)}" if is_path else target


def _check_options(given: Mapping[str, str]) -> None:
    size = given.get("file_bytes", str(FILE_BYTES_MIN))
    if not size.isdecimal() or int(size) < FILE_BYTES_MIN:
        raise InvalidInput("file_bytes must be a number of bytes", hint=f"{FILE_BYTES_MIN} or more", file_bytes=size)
    if given.get("misfits", "error") not in ("error", "null"):
        raise InvalidInput("misfits must be error or null", misfits=given["misfits"])
