"""Runs in a process of its own, to be killed: loads five hundred rows into a key-value database. It is told JSON."""

from __future__ import annotations

import json

import pyarrow as pa

from quire.durable.failpoints import arm_from
from quire.durable.files import OsDisk
from quire.lsm.bulk import BulkWriter, LoadTarget, begin_load
from quire.lsm.compaction import TableOptions
from quire.lsm.kv import Kv
from tests.lsm.worlds import TINY
from tests.nursery import Line


def load_rows(kv: Kv, number: int) -> None:
    with begin_load(kv) as load:
        place = LoadTarget(directory=kv.home.path, lsn=load.lsn, table_bytes=2_000, options=TableOptions())
        writer = BulkWriter(kv.disk, place, load.allocate)
        writer.add(pa.array([b"load%04d" % each for each in range(500)]), pa.array([b"x"] * 500))
        load.publish(writer.finish(), number=number)


def warm_up() -> None:
    """Import what a load imports."""
    import tempfile

    with tempfile.TemporaryDirectory() as directory, Kv.open(OsDisk(), directory, TINY, background=False) as kv:
        load_rows(kv, 1)


def run(line: Line) -> None:
    told = json.loads(line.receive() or b"{}")
    with Kv.open(OsDisk(), told["path"], TINY, background=False) as kv:
        kv.put(b"before", b"1")
        arm_from(told["failpoints"])
        load_rows(kv, told["number"])
