"""Runs in a process of its own, to be killed: writes to a key-value database and tells over its line what was acknowledged.

It is told, as JSON: where (`path`), which failpoint dies when (`failpoints`), the number of the first batch, and how many.
It tells `try N` before a batch and `ack N` when it returned.
"""

from __future__ import annotations

import json
from random import Random

from quire.durable.failpoints import arm_from
from quire.durable.files import OsDisk
from quire.lsm.kv import Kv
from tests.lsm.worlds import TINY
from tests.nursery import Line


def batch(number: int) -> dict[bytes, bytes | None]:
    """The changes of batch `number`: everyone can work them out."""
    rng = Random(number)
    return {b"k%03d" % rng.randrange(200): rng.choice([None, rng.randbytes(50), rng.randbytes(5)]) for _ in range(6)}


def warm_up() -> None:
    """Import what a database imports when it works."""
    import tempfile

    with tempfile.TemporaryDirectory() as directory, Kv.open(OsDisk(), directory, TINY, background=False) as kv:
        kv.write({b"a": b"b", b"c": b"d"})
        kv.flush()
        kv.write({b"a": b"b"})
        kv.compact()
        list(kv.scan())


def run(line: Line) -> None:
    told = json.loads(line.receive() or b"{}")
    arm_from(told["failpoints"])
    with Kv.open(OsDisk(), told["path"], TINY) as kv:
        line.send(b"open 0")
        for number in range(told["first"], told["first"] + told["count"]):
            line.send(b"try %d" % number)
            kv.write(batch(number), sync=number % 3 != 0)
            line.send(b"ack %d" % number)
            if number % 40 == 39:
                kv.compact()
            if number % 25 == 24:
                kv.manifest.checkpoint()
