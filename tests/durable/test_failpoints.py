"""Failpoints: no effect when nothing is armed, exact when something is."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import threading
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.core.errors import InvalidConfig
from quire.durable import failpoints
from quire.durable.failpoints import armed, hit, hits, recording


def failing_hits(name: str, times: int) -> list[int]:
    """The numbers of the hits that raised."""
    failed = []
    for number in range(1, times + 1):
        try:
            hit(name)
        except OSError:
            failed.append(number)
    return failed


def test_nothing_happens_and_nothing_is_counted_when_nothing_is_armed() -> None:
    with recording():
        pass
    hit("a")
    assert hits() == {}


def test_an_armed_point_raises_its_errno_and_names_itself() -> None:
    with armed("a", "raise:ENOSPC"):
        hit("b")
        with pytest.raises(OSError, match="failpoint a") as caught:
            hit("a")
    assert caught.value.errno == errno.ENOSPC
    hit("a")


def test_a_script_applies_to_successive_hits() -> None:
    with armed("a", "2*off->1*raise:EIO->1*off->2*raise:EIO"):
        assert failing_hits("a", 10) == [3, 5, 6]
    with armed("a", "3*off->raise:EIO"):
        assert failing_hits("a", 6) == [4, 5, 6]


def test_a_callable_gets_the_name_and_an_outer_arming_is_restored() -> None:
    names: list[str] = []
    with armed("a", "raise:EIO"):
        with armed("a", names.append):
            hit("a")
        with pytest.raises(OSError, match="failpoint a"):
            hit("a")
    assert names == ["a"]


def test_sleep_waits() -> None:
    with armed("a", "sleep:30"):
        start = time.monotonic()
        hit("a")
        assert time.monotonic() - start >= 0.03


def test_steps_are_enumerated_by_recording_and_then_failed_one_by_one() -> None:
    def work() -> None:
        for name in ("begin", "write", "write", "end"):
            hit(name)

    with recording():
        work()
    assert hits() == {"begin": 1, "write": 2, "end": 1}
    for step in range(sum(hits().values())):
        with armed("*", f"{step}*off->raise:EIO"), pytest.raises(OSError, match="failpoint"):
            work()
    with armed("*", "4*off->raise:EIO"):
        work()


def test_threads_share_one_count() -> None:
    failed: list[int] = []
    with armed("a", "1000*off->1*raise:EIO->off"):
        threads = [threading.Thread(target=lambda: failed.extend(failing_hits("a", 300))) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(failed) == 1


@pytest.mark.parametrize(
    "script", ["", "boom", "raise", "raise:ENOTHING", "sleep", "sleep:x", "kill:1", "2*", "-1*off"]
)
def test_an_invalid_script_is_rejected(script: str) -> None:
    with pytest.raises(InvalidConfig), armed("a", script):
        pass


@given(text=st.text(max_size=30))
def test_no_text_crashes_the_parser(text: str) -> None:
    before = dict(failpoints._armed)
    try:
        failpoints.arm_from(text)
    except InvalidConfig:
        pass
    finally:
        failpoints._armed.clear()
        failpoints._armed.update(before)


def test_the_environment_arms_a_child_and_kills_it_at_the_third_hit() -> None:
    code = """
from quire.durable.failpoints import hit
for number in range(5):
    print(number, flush=True)
    hit("child.step")
"""
    environment = os.environ | {"QUIRE_FAILPOINTS": " other=raise:EIO ; child.step = 2*off -> kill"}
    result = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60, check=False
    )
    assert result.returncode == -signal.SIGKILL
    assert result.stdout.split() == ["0", "1", "2"]
