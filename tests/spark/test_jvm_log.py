"""The output of the JVM is passed on, except for the traceback of a worker that Spark has released."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.spark.jvm_log import TracebackFilter

STACK = (
    b"Traceback (most recent call last):\n"
    b'  File "/venv/pyspark/python/lib/pyspark.zip/pyspark/daemon.py", line 264, in manager\n'
    b"    code = worker(sock, authenticated)\n"
    b'  File "/venv/pyspark/python/lib/pyspark.zip/pyspark/daemon.py", line 95, in worker\n'
    b"BrokenPipeError: [Errno 32] Broken pipe\n"
)
LINES = st.sampled_from(
    [
        b"26/11/16 WARN Utils: a warning\n",
        b"Traceback (most recent call last):\n",
        b'  File "/venv/pyspark/daemon.py", line 264, in manager\n',
        b"    code = worker(sock, authenticated)\n",
        b'  File "/srv/mine.py", line 3, in worker\n',
        b"ValueError: mine\n",
        b"\n",
        b"Trace",
        b"50%\r",
    ]
)


def filtered(text: bytes, cuts: list[int]) -> bytes:
    log, output, begin = TracebackFilter(), b"", 0
    for end in [*sorted(cut % (len(text) + 1) for cut in cuts), len(text)]:
        output += log.feed(text[begin:end])
        begin = end
    return output + log.rest()


@given(st.lists(LINES), st.lists(st.integers(0, 10_000)))
def test_other_output_is_passed_on_completely(lines: list[bytes], cuts: list[int]) -> None:
    assert filtered(b"".join(lines), cuts) == b"".join(lines)


@given(st.lists(st.sampled_from([b"a line\n", b"\n", STACK])), st.lists(st.integers(0, 10_000)))
def test_the_traceback_is_removed_however_it_is_divided(lines: list[bytes], cuts: list[int]) -> None:
    assert filtered(b"".join(lines), cuts) == b"".join(line for line in lines if line != STACK)


def test_a_broken_pipe_of_other_code_is_passed_on() -> None:
    other = STACK.replace(b"line 95, in worker", b"line 95, in mine")
    assert filtered(other, []) == other
    assert filtered(STACK.replace(b"BrokenPipeError", b"ValueError"), [40]) != b""


def test_output_without_a_line_break_is_not_delayed() -> None:
    log = TracebackFilter()
    assert log.feed(b"[Stage 1:==>  (1 + 2) / 8]\r") == b"[Stage 1:==>  (1 + 2) / 8]\r"
    assert log.feed(b"Traceback (most recent") == b""
    assert log.feed(b" surprise") == b"Traceback (most recent surprise"


IDLE = """
import sys, time
from quire.spark.sessions import session

def same(batches):
    yield from batches

def fail(batches):
    print("of a worker", file=sys.stderr)
    yield from batches

spark = session("local[2]")
spark.range(4).mapInArrow(same, "id bigint").collect()
time.sleep(float(sys.argv[1]))
spark.range(1).mapInArrow(fail, "id bigint").collect()
spark.stop()
print("done")
"""


def stderr_of_idle_session(idle_seconds: float) -> str:
    """The standard error of a process with its own session."""
    environment = {**os.environ, "PYTHONWARNINGS": ""}
    command = [sys.executable, "-c", textwrap.dedent(IDLE), str(idle_seconds)]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=240, env=environment, check=True)
    assert ran.stdout == "done\n"
    return ran.stderr


@pytest.mark.slow
def test_an_idle_session_prints_no_traceback_and_other_output_is_kept() -> None:
    output = stderr_of_idle_session(80)
    assert "of a worker" in output
    assert "BrokenPipeError" not in output
    assert "Traceback" not in output
