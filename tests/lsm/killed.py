"""Runs in a child process that tests kill: writes to a key-value database and reports what was acknowledged.

Its options are JSON: the database (`path`), the failpoints to arm (`failpoints`), the number of the first batch
(`first`) and how
many to write (`count`). It sends `try N` before a batch and `ack N` after it.
"""

from __future__ import annotations

import json
from random import Random

from quire.durable.failpoints import arm_from
from quire.durable.files import OsDisk
from quire.lsm.kv import Kv
from tests.fork_server import Channel
from tests.lsm.kv_helpers import TINY


def batch(number: int) -> dict[bytes, bytes | None]:
    """The changes of batch `number`, which the test can compute as well."""
    rng = Random(number)
    return {b"k%03d" % rng.randrange(200): rng.choice([None, rng.randbytes(50), rng.randbytes(5)]) for _ in range(6)}


def warm_up() -> None:
    """Import everything that a working database imports."""
    import tempfile

    with tempfile.TemporaryDirectory() as directory, Kv.open(OsDisk(), directory, TINY, background=False) as kv:
        kv.write({b"a": b"b", b"c": b"d"})
        kv.flush()
        kv.write({b"a": b"b"})
        kv.compact()
        list(kv.scan())


def run(channel: Channel) -> None:
    options = json.loads(channel.receive() or b"{}")
    arm_from(options["failpoints"])
    with Kv.open(OsDisk(), options["path"], TINY) as kv:
        channel.send(b"open 0")
        for number in range(options["first"], options["first"] + options["count"]):
            channel.send(b"try %d" % number)
            kv.write(batch(number), sync=number % 3 != 0)
            channel.send(b"ack %d" % number)
            if number % 40 == 39:
                kv.compact()
            if number % 25 == 24:
                kv.manifest.checkpoint()
