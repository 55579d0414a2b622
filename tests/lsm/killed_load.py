"""Runs in a child process that tests kill: loads five hundred rows into a key-value database. Its options are JSON."""

from __future__ import annotations

import json

import pyarrow as pa

from quire.durable.failpoints import arm_from
from quire.durable.files import OsDisk
from quire.lsm.bulk import BulkWriter, LoadTarget, begin_load
from quire.lsm.kv import Kv
from quire.lsm.table_options import TableOptions
from tests.fork_server import Channel
from tests.lsm.kv_helpers import TINY


def load_rows(kv: Kv, number: int) -> None:
    with begin_load(kv) as load:
        target = LoadTarget(directory=kv.home.path, lsn=load.lsn, table_bytes=2_000, options=TableOptions())
        writer = BulkWriter(kv.disk, target, load.allocate)
        writer.add(pa.array([b"load%04d" % number for number in range(500)]), pa.array([b"x"] * 500))
        load.publish(writer.finish(), number=number)


def warm_up() -> None:
    """Import everything that a load imports."""
    import tempfile

    with tempfile.TemporaryDirectory() as directory, Kv.open(OsDisk(), directory, TINY, background=False) as kv:
        load_rows(kv, 1)


def run(channel: Channel) -> None:
    options = json.loads(channel.receive() or b"{}")
    with Kv.open(OsDisk(), options["path"], TINY, background=False) as kv:
        kv.put(b"before", b"1")
        arm_from(options["failpoints"])
        load_rows(kv, options["number"])
