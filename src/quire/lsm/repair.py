"""Puts a key-value database together again, as a survey says (inventory.py).

What is on disk, step by step; the database is refused until the last one, and a repair can begin again at any of them
  new tables, the new WAL      files that no manifest names
  the old manifest moves       into quarantine
  the new snapshot             names what is live; without a log beside it nothing opens it
  leftovers move               damaged tables, logs whose batches are in a table now, files that nothing names
  the new log                  the database is whole

Nothing is removed: `quire quarantine` lists what was moved.

Threads: one, with nobody else in the database. Raises `Corruption` for a copy that is damaged too, and what the disk raises.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING

from quire.core.errors import Corruption, StorageFault
from quire.durable.failpoints import hit
from quire.durable.files import write_atomic, write_new
from quire.durable.log_writer import LogWriter
from quire.durable.names import TEMPORARY, sst_entry_path
from quire.lsm.inventory import KvSurvey, checked, readable_blocks
from quire.lsm.manifest_data import ManifestData, ManifestSstEntry
from quire.lsm.manifest_format import LOG_NEXT, encode_snapshot
from quire.lsm.memtable import Memtable
from quire.lsm.recovery import set_aside
from quire.lsm.sst_writer import TableOptions, TableWriter
from quire.lsm.wal import Items, KvWal

if TYPE_CHECKING:
    import pyarrow as pa


def carry_out(survey: KvSurvey, options: TableOptions) -> None:
    """Do what the survey says. The database can be opened afterwards."""
    disk, home = survey.disk, survey.home
    for part in ("sst", "wal", "manifest"):
        disk.make_dirs(f"{home.path}/{part}")
    live = {sst_id: ManifestSstEntry(sst_id, sst_entry_path(sst_id)) for sst_id in (*survey.sound, *survey.copies)}
    for sst_id in survey.copies:
        _bring_back(survey, sst_id)
    fresh = iter(range(survey.next_sst_id, survey.next_sst_id + len(survey.damaged) + 1))
    for sst_id in survey.damaged:
        blocks = readable_blocks(disk, home.sst(sst_id), sst_id)
        _add(live, _write(survey, next(fresh), blocks, options))
    _add(live, _write(survey, next(fresh), _rows(survey.batches), options))
    KvWal.create(disk, home.wal(survey.next_wal), survey.next_wal, survey.facts.owner).close()
    hit("lsm.repair.written")
    _replace_manifest(survey, live)


def _bring_back(survey: KvSurvey, sst_id: int) -> None:
    """Have the copy of a table under its name; what was there goes to quarantine when the copy is whole."""
    disk, path = survey.disk, survey.home.sst(sst_id)
    write_new(disk, path + TEMPORARY, survey.copies[sst_id][1](), overwrite=True)
    table, trouble = checked(disk, path + TEMPORARY, sst_id, survey.facts.rows.get(sst_id))
    if table is None:
        text = "the copy of a table is damaged too"
        raise Corruption(text, hint="remove that copy, then repair again", path=path, cause=trouble)
    table.close()
    if disk.exists(path):
        set_aside(disk, survey.home, path, "this table was replaced by a copy", survey.facts)
    disk.rename(path + TEMPORARY, path)
    disk.sync_dir(os.path.dirname(path))
    survey.moved.pop(path, None)


def _rows(batches: Mapping[int, Items]) -> Iterator[pa.RecordBatch]:
    memtable = Memtable()
    for lsn in sorted(batches):
        memtable.put_all(lsn, batches[lsn], 0, 0)
    yield from memtable.rows_between(b"", None)


def _write(survey: KvSurvey, sst_id: int, blocks: Iterator[pa.RecordBatch], options: TableOptions) -> int:
    """A table of these rows, if there are any: its id, else 0."""
    writer = TableWriter(sst_id, 0, options)
    for batch in blocks:
        writer.add(batch)
    if not writer.rows:
        return 0
    writer.write(survey.disk, survey.home.sst(sst_id))
    return sst_id


def _add(live: dict[int, ManifestSstEntry], sst_id: int) -> None:
    if sst_id:
        live[sst_id] = ManifestSstEntry(sst_id, sst_entry_path(sst_id))


def _replace_manifest(survey: KvSurvey, live: dict[int, ManifestSstEntry]) -> None:
    disk, home, facts = survey.disk, survey.home, survey.facts
    for path in (home.manifest_log, home.manifest_snapshot):
        if disk.exists(path):
            set_aside(disk, home, path, "the database was repaired", facts)
    state = ManifestData(
        version=survey.version + 1,
        last_lsn=survey.last_lsn,
        active_wal=survey.next_wal,
        tables=live,
        next_sst_id=max([survey.next_sst_id, *(sst_id + 1 for sst_id in live)]),
    )
    # As if a checkpoint had covered the log that was recorded: so the next open finds what it expects.
    covered = facts.ends.manifest.salt if facts.ends is not None else 0
    write_atomic(disk, home.manifest_snapshot, encode_snapshot(state, covered))
    hit("lsm.repair.named")
    for path, why in sorted(survey.moved.items()):
        with suppress(FileNotFoundError, StorageFault):
            set_aside(disk, home, path, why, facts)
    hit("lsm.repair.moved")
    LogWriter.create(disk, home.manifest_log, kind=LOG_NEXT, identity=facts.owner.identity(0), replace=True).close()
