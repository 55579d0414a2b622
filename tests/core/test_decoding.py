"""Types are described to msgspec by one thread at a time; JSON with a digest is read only as it was written."""

from __future__ import annotations

import subprocess

from msgspec import Struct

from quire.core.decoding import decode_with_digest, encode_with_digest
from tests.programs import run_program

FIRST_DECODES = """
import sys, threading
import msgspec
from quire.core.decoding import described

others = []

def look():  # called while `Inner` is described, as a part of `Record`
    if not others:
        others.append(threading.Thread(target=decode))
        others[0].start()
        others[0].join(0.2)
    return int

class Inner(msgspec.Struct):
    number: "look()"

class Record(msgspec.Struct):
    inner: Inner
    last: int

def decode():
    record = msgspec.json.decode(b'{"inner": {"number": 1}, "last": 2}', type=described(Record))
    assert (record.inner.number, record.last) == (1, 2)

sys.modules[Inner.__module__].look = look
decode()
others[0].join()
print("decoded twice")
"""


def test_threads_may_decode_a_type_for_the_first_time_together() -> None:
    """The process ended with a segmentation fault."""
    ended = run_program(["-c", FIRST_DECODES], stdout=subprocess.PIPE, text=True, timeout=60)
    assert (ended.returncode, ended.stdout) == (0, "decoded twice\n")


class Record(Struct, frozen=True):
    name: str
    size: int = 0


def test_a_record_with_a_digest_is_read_only_as_it_was_written() -> None:
    data = encode_with_digest(Record("shop", 7))
    assert decode_with_digest(data, Record) == Record("shop", 7)
    for at in range(len(data)):
        assert decode_with_digest(data[:at], Record) is None
        assert decode_with_digest(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :], Record) is None
