"""Files that somebody else writes into the store's directory are archived when the owner takes them."""

from __future__ import annotations

import pickle
from pathlib import Path

import pyarrow as pa

from quire.durable.files import OsDisk
from quire.lsm.backup import back_up, read_backup, restore
from quire.lsm.bulk import BulkWriter, LoadTarget, begin_load
from quire.lsm.compaction import TableOptions
from quire.lsm.remote_compaction import plan_major, run_task
from tests.archive.world import contents, fill, read, world


def test_tables_that_executors_load_are_archived(tmp_path: Path) -> None:
    """They write to the directory with a disk of their own: the archive named tables that the bucket never got."""
    with world(tmp_path) as w:
        fill(w.store, 0)
        kv = w.store.kv("pairs")
        with begin_load(kv) as load:
            target = LoadTarget(directory=kv.home.path, lsn=load.lsn, table_bytes=8 << 10, options=TableOptions())
            writer = BulkWriter(OsDisk(), target, load.allocate)
            keys = [b"loaded %04d" % number for number in range(500)]
            writer.add(pa.array(keys, pa.binary()), pa.array([b"v" * 50 for _ in keys], pa.binary()))
            load.publish(list(writer.finish()))
        w.archived()
        expected = contents(w.store)
    assert len(expected["pairs"]) == 520
    assert read(w.restore()) == expected


def test_tables_that_executors_merge_are_archived(tmp_path: Path) -> None:
    with world(tmp_path) as w:
        for start in range(0, 400, 100):
            fill(w.store, start, 100)
            w.store.kv("pairs").flush()
        with plan_major(w.store.kv("pairs"), tasks=3) as plan:
            tasks = [pickle.loads(pickle.dumps(task)) for task in plan.tasks]
            plan.publish([sst_id for task in tasks for sst_id in run_task(task, OsDisk())])
        w.archived()
        expected = contents(w.store)
    assert read(w.restore()) == expected


def test_a_restored_backup_is_archived(tmp_path: Path) -> None:
    with world(tmp_path) as w:
        fill(w.store, 0)
        back_up(w.store.kv("pairs"), w.store.objects, "pairs")
        chosen = read_backup(w.store.objects, "pairs")
        w.store.kvs.adopt("again", lambda target: restore(w.store.objects, chosen, w.store.disk, target))
        w.archived()
        expected = contents(w.store)
    assert expected["again"] == expected["pairs"]
    assert read(w.restore()) == expected
