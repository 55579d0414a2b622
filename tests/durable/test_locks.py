"""The lock: one holder, which is reported to others, released with its process, unaffected by forks."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from quire.core.errors import NotWritable, StorageFault, StoreClosed, StoreFenced, StoreLocked
from quire.durable import locks
from quire.durable.locks import FileLock, holder, is_held
from quire.testing.clock import ManualClock

HOLD = """
import sys
from quire.durable.locks import FileLock
lock = FileLock.acquire(sys.argv[1])
print("held", flush=True)
sys.stdin.read()
"""


@contextmanager
def held_elsewhere(path: str) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", HOLD, path]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        try:
            yield process
        finally:
            process.kill()


def in_child(work: Callable[[], bool]) -> bool:
    """Run `work` in a forked child; whether it returned true."""
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            status = 0 if work() else 1
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_a_second_process_gets_an_error_that_names_the_holder(tmp_path: Path) -> None:
    path = str(tmp_path / "store.lock")
    with held_elsewhere(path) as process:
        with pytest.raises(StoreLocked) as caught:
            FileLock.acquire(path)
        assert caught.value.where["pid"] == process.pid
        assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\dZ", str(caught.value.where["since"])), "a readable time"
        assert str(process.pid) in caught.value.hint
        assert is_held(path)


def test_the_lock_ends_with_a_killed_holder(tmp_path: Path) -> None:
    path = str(tmp_path / "store.lock")
    with held_elsewhere(path) as process:
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        assert not is_held(path)
        with FileLock.acquire(path):
            current = holder(path)
            assert current is not None
            assert current.pid == os.getpid()


def test_a_process_can_take_the_lock_again_but_not_twice_at_once(tmp_path: Path) -> None:
    path = str(tmp_path / "store.lock")
    with FileLock.acquire(path, ManualClock(now_ms=42)) as lock:
        lock.check()
        current = holder(path)
        assert current is not None
        assert (current.pid, current.since_ms) == (os.getpid(), 42)
        with pytest.raises(StoreLocked, match="already open in this process"):
            FileLock.acquire(path)
    assert not is_held(path)
    assert holder(path) is None
    lock.close()
    with pytest.raises(StoreClosed):
        lock.check()
    with pytest.raises(StoreClosed), lock:
        pass
    FileLock.acquire(path).close()


def test_a_forked_child_neither_holds_nor_releases_the_parents_lock(tmp_path: Path) -> None:
    path = str(tmp_path / "store.lock")
    lock = FileLock.acquire(path)

    def child() -> bool:
        with pytest.raises(StoreClosed, match="parent of a fork"):
            lock.check()
        with pytest.raises(StoreLocked):
            FileLock.acquire(path)
        lock.close()
        return True

    assert in_child(child)
    lock.check()
    assert is_held(path)
    lock.close()
    assert in_child(lambda: FileLock.acquire(path).path == path)


def test_a_surviving_child_does_not_keep_a_dead_parents_lock(tmp_path: Path) -> None:
    code = """
import os, sys, time
from quire.durable.locks import FileLock
lock = FileLock.acquire(sys.argv[1])
if os.fork() == 0:
    print("child", flush=True)
    sys.stdin.read()
    os._exit(0)
time.sleep(600)
"""
    path = str(tmp_path / "store.lock")
    command = [sys.executable, "-c", code, path]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "child\n"
        assert is_held(path)
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        FileLock.acquire(path).close()


@pytest.mark.parametrize("contents", [b"", b"{", b"[]", b'{"pid": "x"}', b"\xff" * 5000, b"[" * 4096])
def test_unreadable_contents_have_no_effect(tmp_path: Path, contents: bytes) -> None:
    path = tmp_path / "store.lock"
    path.write_bytes(contents)
    assert holder(str(path)) is None
    assert not is_held(str(path))
    with FileLock.acquire(str(path)):
        path.write_bytes(contents)
        with pytest.raises(StoreLocked) as caught:
            FileLock.acquire(str(path))
        assert caught.value.where["pid"] is None


def test_a_missing_file_has_no_holder(tmp_path: Path) -> None:
    assert not is_held(str(tmp_path / "none"))
    assert holder(str(tmp_path / "none")) is None


def test_a_path_that_cannot_be_opened_is_a_typed_error(tmp_path: Path) -> None:
    with pytest.raises((StorageFault, NotWritable)):
        FileLock.acquire(str(tmp_path))


def test_a_lock_detects_that_its_path_names_another_file(tmp_path: Path) -> None:
    """A lock file that is renamed leaves its holder with a lock that no other process checks."""
    path = str(tmp_path / "store.lock")
    with FileLock.acquire(path) as lock:
        lock.verify()
        os.rename(path, path + ".old")
        with pytest.raises(StoreFenced, match="removed"):
            lock.verify()
        with FileLock.acquire(path):
            with pytest.raises(StoreFenced, match="renamed or replaced") as caught:
                lock.verify()
            assert caught.value.where["successor_pid"] == os.getpid()
        os.rename(path + ".old", path)
        lock.verify()


def test_a_file_that_is_moved_between_opening_and_locking_is_not_locked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = str(tmp_path / "store.lock")
    moved: list[str] = []

    def rename_and_lock(fd: int) -> bool:
        if not moved:
            os.rename(path, path + ".old")
            moved.append(path)
        return try_lock(fd)

    try_lock = locks._try_lock
    monkeypatch.setattr(locks, "_try_lock", rename_and_lock)
    with FileLock.acquire(path) as lock:
        lock.verify()
        with pytest.raises(StoreLocked):
            FileLock.acquire(path)
