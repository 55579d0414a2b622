"""Checks a key-value database and yields the problems found.

Rules
  V0  the database can be opened
  V1  every table that the manifest names exists, has the id in its name, and is sound (see `SSTable.verify`)
  V2  tables of a level above 0 have disjoint key ranges
  V3  the ids of the tables were allocated, and no lsn is above the last one
  V4  the open tables are those that the manifest names
  V5  every file in the database's directories is named, or waits for its last reader
  V6  every WAL that the manifest names, and the manifest's own log, exists and has everything that was acknowledged
  V7  the rows of the store's manifest are those of the live tables (S1)
  V8  the directory of every snapshot exists, with a manifest that can be read

Threads: any. A database in use may be flushed or compacted meanwhile, so the check holds the view that it began with.
Damage does not raise: it is yielded.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

from quire.core.errors import Corruption, FormatTooNew, QuireError
from quire.durable.log_reader import read_log
from quire.durable.names import LsmHome, lsm_number
from quire.lsm.sst_reader import SSTable
from quire.lsm.wal import LOG_KIND, batches_of
from quire.lsm.witnesses import log_end

if TYPE_CHECKING:
    from quire.lsm.engine import KvEngine
    from quire.lsm.kv import Kv


@dataclass(frozen=True, slots=True)
class KvProblem:
    """One violation of a rule."""

    rule: str
    what: str
    path: str = ""

    def __str__(self) -> str:
        return f"{self.rule}: {self.what}" + (f" ({self.path})" if self.path else "")


class Stored(NamedTuple):
    """The files of a database: its tables, which the caller has yet to read, and the problems of all other files."""

    tables: list[tuple[str, int, int]]
    """(path, id, bytes) of every table, including those of snapshots, for which bytes is 0."""
    logs: list[str]
    """Manifests and write-ahead logs that were checked."""
    problems: list[KvProblem]


def stored(engine: KvEngine, db_id: int, snapshots: Sequence[int]) -> Stored:
    """Check everything of a database except its tables: manifest, write-ahead logs, directories of `snapshots` (by id)."""
    stored = Stored([], [], [])
    try:
        kv = engine.open(db_id)
        stored.problems.extend(problems(kv, tables=False))
        stored.tables.extend((table.path, table.meta.sst_id, table.size_bytes) for table in kv.view.levels)
        state = kv.manifest.state()
        stored.logs.append(kv.home.manifest_log)
        stored.logs.extend(kv.home.wal(number) for number in sorted({*state.frozen_wals, state.active_wal}))
    except (Corruption, FormatTooNew) as error:
        stored.problems.append(
            KvProblem("V0", f"the database cannot be opened: {error.what}", str(error.where.get("path", "")))
        )
    for snapshot_id in snapshots:
        try:
            version = engine.version(db_id, snapshot_id)
        except (Corruption, FormatTooNew) as error:
            what = f"a snapshot cannot be read: {error.what}"
            stored.problems.append(KvProblem("V8", what, str(error.where.get("path", ""))))
            continue
        home = LsmHome(version.directory)
        stored.logs.extend((home.manifest_snapshot, home.manifest_log))
        stored.tables.extend((home.sst(sst_id), sst_id, 0) for sst_id in version.sst_ids)
    return stored


def problems(kv: Kv, *, tables: bool = True) -> Iterator[KvProblem]:
    """Yield the current problems. Without `tables`, the blocks of tables are not read."""
    with kv.upkeep.paused():  # no flush or compaction between reading the manifest and the view
        view, state = kv.view, kv.manifest.state()
        dead = kv.upkeep.dead_paths()  # before the listing: a listed file may be removed meanwhile
        files = kv.disk.names(f"{kv.home.path}/sst")
        yield from _wals(kv)
        if kv.projection is not None:
            for what in kv.projection.differences(view.levels):
                yield KvProblem("V7", what)
    named = {entry.id for entry in state.sstables}
    opened = {table.meta.sst_id for table in view.levels}
    if named != opened:
        yield KvProblem("V4", f"the manifest names tables {sorted(named ^ opened)} differently from what is open")
    for table in view.levels:
        if tables:
            yield from _table(table)
        if table.meta.sst_id >= state.next_sst_id:
            yield KvProblem("V3", f"table {table.meta.sst_id} has an id that was never allocated", table.path)
        if table.meta.lsn_max > kv.last_lsn:
            yield KvProblem("V3", f"table {table.meta.sst_id} has an lsn above the last one", table.path)
    for level in view.levels.deeper:
        for left, right in pairwise(level):
            if left.meta.key_max >= right.meta.key_min:
                yield KvProblem("V2", f"tables {left.meta.sst_id} and {right.meta.sst_id} overlap", right.path)
    for name in files:
        path = f"{kv.home.path}/sst/{name}"
        if f"sst/{name}" not in {entry.path for entry in state.sstables} and path not in dead:
            yield KvProblem("V5", "the manifest does not name this file", path)


def _table(table: SSTable) -> Iterator[KvProblem]:
    try:
        for what in table.verify():
            yield KvProblem("V1", what, table.path)
    except QuireError as error:
        yield KvProblem("V1", error.what, table.path)


def _wals(kv: Kv) -> Iterator[KvProblem]:
    # Read the ends first: the logs may grow meanwhile, and then hold more than these.
    ends, state = kv.ends(), kv.manifest.state()
    recorded_ends = {end.number: log_end(end) for end in ends.wals}
    try:
        read_log(kv.disk, kv.home.manifest_log, vouched=log_end(ends.manifest))
    except (QuireError, FileNotFoundError) as error:
        yield KvProblem(
            "V6", error.what if isinstance(error, QuireError) else "the manifest's log is missing", kv.home.manifest_log
        )
    numbers = {lsm_number(name, ".log") for name in kv.disk.names(f"{kv.home.path}/wal")}
    for number in sorted({*state.frozen_wals, state.active_wal}):
        path = kv.home.wal(number)
        if number not in numbers:
            yield KvProblem("V6", "a write-ahead log is missing", path)
            continue
        try:
            for _ in batches_of(read_log(kv.disk, path, kind=LOG_KIND, vouched=recorded_ends.get(number))):
                pass
        except QuireError as error:
            yield KvProblem("V6", error.what, path)
