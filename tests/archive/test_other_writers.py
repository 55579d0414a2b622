"""Files that other processes write into the store's directory are archived when the owner adopts them."""

from __future__ import annotations

import pickle
from pathlib import Path

import pyarrow as pa

from quire.durable.files import OsDisk
from quire.lsm.backup import back_up, read_backup, restore
from quire.lsm.bulk import BulkWriter, LoadTarget, begin_load
from quire.lsm.remote_compaction import plan_major, run_task
from quire.lsm.table_options import TableOptions
from tests.archive.archived_store import archived_store, contents, fill, read


def test_tables_that_executors_load_are_archived(tmp_path: Path) -> None:
    """Executors write to the directory with their own disk: the archive referred to tables that the bucket never
    received."""
    with archived_store(tmp_path) as archived:
        fill(archived.store, 0)
        kv = archived.store.kv("pairs")
        with begin_load(kv) as load:
            target = LoadTarget(directory=kv.home.path, lsn=load.lsn, table_bytes=8 << 10, options=TableOptions())
            writer = BulkWriter(OsDisk(), target, load.allocate)
            keys = [b"loaded %04d" % number for number in range(500)]
            writer.add(pa.array(keys, pa.binary()), pa.array([b"v" * 50 for _ in keys], pa.binary()))
            load.publish(list(writer.finish()))
        archived.wait_archived()
        expected = contents(archived.store)
    assert len(expected["pairs"]) == 520
    assert read(archived.restore()) == expected


def test_tables_that_executors_merge_are_archived(tmp_path: Path) -> None:
    with archived_store(tmp_path) as archived:
        for start in range(0, 400, 100):
            fill(archived.store, start, 100)
            archived.store.kv("pairs").flush()
        with plan_major(archived.store.kv("pairs"), tasks=3) as plan:
            tasks = [pickle.loads(pickle.dumps(task)) for task in plan.tasks]
            plan.publish([sst_id for task in tasks for sst_id in run_task(task, OsDisk())])
        archived.wait_archived()
        expected = contents(archived.store)
    assert read(archived.restore()) == expected


def test_a_restored_backup_is_archived(tmp_path: Path) -> None:
    with archived_store(tmp_path) as archived:
        fill(archived.store, 0)
        back_up(archived.store.kv("pairs"), archived.store.objects, "pairs")
        chosen = read_backup(archived.store.objects, "pairs")
        archived.store.kvs.adopt(
            "again", lambda target: restore(archived.store.objects, chosen, archived.store.disk, target)
        )
        archived.wait_archived()
        expected = contents(archived.store)
    assert expected["again"] == expected["pairs"]
    assert read(archived.restore()) == expected
