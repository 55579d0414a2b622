"""One owner, many readers, fork and sudden death, with real processes."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

import quire
from tests.store.conftest import Script, line

OWNER = """
import sys, quire
store = quire.open(sys.argv[1])
print("open", flush=True)
for number in range(10**6):
    store.create(f"db-{number}", "pages")
    print(number, flush=True)
    sys.stdin.readline()
"""

READER = """
import sys, quire
with quire.open(sys.argv[1], "r") as store:
    for _ in sys.stdin:
        print(len(store.databases()), flush=True)
"""

FORKER = """
import os, sys, quire
store = quire.open(sys.argv[1])
store.create("shop", "pages")
pid = os.fork()
if pid == 0:
    refused = 0
    for use in (store.databases, store.info, lambda: store.create("x", "pages"), lambda: store.manifest, lambda: store.objects):
        try:
            use()
        except quire.StoreClosed:
            refused += 1
    store.close()
    print("refused", refused, flush=True)
    os._exit(0)
os.waitpid(pid, 0)
print("parent", len(store.databases()), flush=True)
sys.stdin.readline()
"""


def test_a_second_owner_gets_the_pid_of_the_first(path: Path, script: Script) -> None:
    owner = script(OWNER, str(path))
    assert line(owner) == "open"
    with pytest.raises(quire.StoreLocked) as caught:
        quire.open(path)
    assert caught.value.where["pid"] == owner.pid
    assert str(owner.pid) in str(caught.value)


def test_after_kill_9_the_store_reopens_with_everything_acknowledged(path: Path, script: Script) -> None:
    owner = script(OWNER, str(path))
    assert line(owner) == "open"
    acknowledged = 0
    for _ in range(5):
        acknowledged = int(line(owner)) + 1
        assert owner.stdin is not None
        owner.stdin.write("\n")
        owner.stdin.flush()
    os.kill(owner.pid, signal.SIGKILL)
    owner.wait()
    with quire.open(path) as store:
        assert len(store.databases()) in (acknowledged, acknowledged + 1)


def test_readers_in_other_processes_follow_an_owner_that_writes(path: Path, script: Script) -> None:
    with quire.open(path) as store:
        readers = [script(READER, str(path)) for _ in range(2)]
        for expected in range(5):
            for reader in readers:
                assert reader.stdin is not None
                reader.stdin.write("\n")
                reader.stdin.flush()
                assert int(line(reader)) == expected
            store.create(f"db-{expected}", "pages")


def test_after_fork_the_child_is_refused_and_the_parent_continues(path: Path, script: Script) -> None:
    parent = script(FORKER, str(path))
    assert line(parent) == "refused 5"
    assert line(parent) == "parent 1"
    with pytest.raises(quire.StoreLocked):
        quire.open(path)
    parent.communicate("\n", timeout=20)
    assert parent.returncode == 0


def test_concurrent_creation_in_several_processes_makes_one_store(path: Path, script: Script) -> None:
    racer = """
import sys, time, quire
for _ in range(200):
    try:
        with quire.open(sys.argv[1]) as store:
            print(store.info().store_id, flush=True)
        break
    except quire.StoreLocked:
        time.sleep(0.02)
"""
    racers = [script(racer, str(path)) for _ in range(3)]
    assert len({line(racer) for racer in racers}) == 1
