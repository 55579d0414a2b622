"""The writer: acknowledged records survive every crash and every fault, and a doubtful write stops it."""

from __future__ import annotations

import itertools
import os
import random
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.core.errors import AlreadyExists, Corruption, OutOfRange, QuireError, StoreClosed, StoreUnusable, WrongKind
from quire.durable.files import Disk, OsDisk
from quire.durable.log_format import HEADER_BYTES, OVERHEAD_BYTES
from quire.durable.log_reader import read_log
from quire.durable.log_writer import LogWriter
from quire.testing.crashdisk import CrashDisk, keep_all
from quire.testing.faults import LOUD, Fault, FaultyDisk, PowerCut, each_fault

KIND = b"test"


def new_path(tmp_path: Path) -> str:
    return str(tmp_path / "a.log")


def payloads_after_reopening(disk: Disk, path: str) -> list[bytes]:
    writer, contents = LogWriter.open(disk, path, kind=KIND)
    writer.close()
    return contents.payloads


def test_appended_records_are_there_after_reopening(tmp_path: Path) -> None:
    disk, path = OsDisk(), new_path(tmp_path)
    with LogWriter.create(disk, path, kind=KIND) as writer:
        writer.append(b"one")
        end = writer.append_many([bytearray(b"two"), memoryview(b"three")])
        assert writer.end == end == HEADER_BYTES + 3 * OVERHEAD_BYTES + 11
        assert writer.durable == HEADER_BYTES
        assert writer.sync() == writer.durable == end
    writer, contents = LogWriter.open(disk, path, kind=KIND)
    assert contents.payloads == [b"one", b"two", b"three"]
    with writer:
        writer.append(b"four")
    assert read_log(disk, path, kind=KIND).payloads == [b"one", b"two", b"three", b"four"]


def test_opening_and_closing_does_not_make_a_log_grow(tmp_path: Path) -> None:
    disk, path = OsDisk(), new_path(tmp_path)
    writer = LogWriter.create(disk, path, kind=KIND)
    assert writer.is_empty
    writer.close()
    size = disk.size(path)
    for _ in range(3):
        LogWriter.open(disk, path, kind=KIND)[0].close()
    assert disk.size(path) == size


def test_an_empty_batch_writes_nothing(tmp_path: Path) -> None:
    with LogWriter.create(OsDisk(), new_path(tmp_path), kind=KIND) as writer:
        assert writer.append_many([]) == HEADER_BYTES


def test_a_rejected_record_does_not_stop_the_writer(tmp_path: Path) -> None:
    path = new_path(tmp_path)
    with LogWriter.create(OsDisk(), path, kind=KIND) as writer:
        with pytest.raises(OutOfRange):
            writer.append_many([b"fine", b""])
        writer.append(b"good")
    assert payloads_after_reopening(OsDisk(), path) == [b"good"]


def test_create_keeps_an_existing_log_unless_replace_is_given(tmp_path: Path) -> None:
    disk, path = OsDisk(), new_path(tmp_path)
    with LogWriter.create(disk, path, kind=KIND) as writer:
        writer.append(b"one")
    with pytest.raises(AlreadyExists):
        LogWriter.create(disk, path, kind=KIND)
    with pytest.raises(WrongKind):
        LogWriter.open(disk, path, kind=b"othr")
    LogWriter.create(disk, path, kind=KIND, replace=True).close()
    assert payloads_after_reopening(disk, path) == []


def test_a_torn_tail_is_truncated_before_anything_is_appended(tmp_path: Path) -> None:
    disk, path = OsDisk(), new_path(tmp_path)
    with LogWriter.create(disk, path, kind=KIND) as writer:
        writer.append(b"one")
    with open(path, "ab") as file:
        file.write(b"half a fra")
    writer, contents = LogWriter.open(disk, path, kind=KIND)
    assert contents.torn_bytes == 10
    assert disk.size(path) == contents.end == writer.end
    writer.append(b"two")
    writer.close()
    assert payloads_after_reopening(disk, path) == [b"one", b"two"]


def test_damage_after_a_clean_close_is_corruption(tmp_path: Path) -> None:
    disk, path = OsDisk(), new_path(tmp_path)
    with LogWriter.create(disk, path, kind=KIND) as writer:
        end = writer.append(b"the last record")
    with open(path, "r+b") as file:
        file.seek(end - 12)
        file.write(b"!")
    with pytest.raises(Corruption) as caught:
        LogWriter.open(disk, path, kind=KIND)
    assert caught.value.where == {"path": path, "offset": HEADER_BYTES, "bytes_lost": end - HEADER_BYTES}


def test_a_closed_writer_rejects_use(tmp_path: Path) -> None:
    writer = LogWriter.create(OsDisk(), new_path(tmp_path), kind=KIND)
    writer.close()
    writer.close()
    with pytest.raises(StoreClosed):
        writer.append(b"x")
    with pytest.raises(StoreClosed):
        writer.sync()


@pytest.mark.parametrize("fault", [Fault.ENOSPC, Fault.EIO, Fault.SHORT_WRITE, Fault.LOST_ANSWER])
@pytest.mark.parametrize("operation", ["write", "sync"])
def test_after_a_doubtful_append_or_sync_nothing_more_is_accepted(tmp_path: Path, fault: Fault, operation: str) -> None:
    path = new_path(tmp_path)
    LogWriter.create(OsDisk(), path, kind=KIND).close()
    disk = FaultyDisk(OsDisk(), fault, fail_at=1 if operation == "write" else 2, operation=operation)
    writer, _ = LogWriter.open(disk, path, kind=KIND)
    if operation == "sync":
        writer.append(b"doubtful")
    with pytest.raises(StoreUnusable) as first:
        writer.sync() if operation == "sync" else writer.append(b"doubtful")
    assert "injected" in first.value.where["cause"]
    with pytest.raises(StoreUnusable):
        writer.append(b"x")
    with pytest.raises(StoreUnusable):
        writer.sync()
    writer.close()
    with pytest.raises(StoreClosed):
        writer.append(b"x")
    assert payloads_after_reopening(OsDisk(), path) in ([], [b"doubtful"])


@pytest.mark.parametrize("fault", LOUD)
def test_acknowledged_records_survive_a_failure_of_any_call(tmp_path: Path, fault: Fault) -> None:
    """Fail the first, second, … last call of a short history, reopen, and compare."""
    count = itertools.count()
    for disk in each_fault(lambda: CrashDisk(str(tmp_path / f"disk{next(count)}")), fault):
        inner = disk.inner
        assert isinstance(inner, CrashDisk)
        path = inner.path("a.log")
        appended, acknowledged = _history(disk, path)
        assert disk.fired or acknowledged == len(appended) == 5
        for seed in range(3):
            crashed = inner.crash(str(tmp_path / f"after{next(count)}"), random.Random(seed).choice)
            if not crashed.exists(crashed.path("a.log")):
                assert acknowledged == 0
                continue
            payloads = payloads_after_reopening(crashed, crashed.path("a.log"))
            assert payloads == appended[: len(payloads)]
            assert len(payloads) >= acknowledged


def _history(disk: Disk, path: str) -> tuple[list[bytes], int]:
    """Append groups with a sync after each, and reopen in between; returns all records and the number of acknowledged
    ones."""
    groups = [[b"one"], [b"two", b"three" * 300], [b"four"], [b"five" * 10]]
    appended: list[bytes] = []
    acknowledged = 0
    try:
        writer = LogWriter.create(disk, path, kind=KIND)
        for number, group in enumerate(groups):
            if number == 2:
                writer.close()
                writer, _ = LogWriter.open(disk, path, kind=KIND)
            appended += group
            writer.append_many(group)
            writer.sync()
            acknowledged = len(appended)
        writer.close()
    except (QuireError, PowerCut):
        pass
    return appended, acknowledged


STEPS = st.lists(
    st.one_of(
        st.lists(st.binary(min_size=1, max_size=700), min_size=1, max_size=4),
        st.sampled_from(["sync", "reopen", "kill", "crash"]),
    ),
    max_size=12,
)


@given(steps=STEPS, seed=st.integers(0, 2**32))
def test_synced_records_survive_any_number_of_power_losses(
    steps: list[list[bytes] | str], seed: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """After each crash: every synced record, in order, then a prefix of the other records; nothing else."""
    base = tmp_path_factory.mktemp("crash")
    choose = random.Random(seed).choice
    disk = CrashDisk(str(base / "0"))
    writer = LogWriter.create(disk, disk.path("a.log"), kind=KIND)
    appended: list[bytes] = []
    synced = 0
    for number, step in enumerate([*steps, "crash"], 1):
        if isinstance(step, list):
            writer.append_many(step)
            appended += step
        elif step == "sync":
            writer.sync()
            synced = len(appended)
        else:
            if step == "reopen":
                writer.close()
                synced = len(appended)
            else:
                writer.abandon()
            if step == "crash":
                disk = disk.crash(str(base / str(number)), choose)
            writer, contents = LogWriter.open(disk, disk.path("a.log"), kind=KIND)
            payloads = contents.payloads
            assert payloads == appended[: len(payloads)]
            assert len(payloads) >= synced
            # Opening syncs the records that it reads, including those that a killed process left in the cache.
            appended, synced = payloads, len(payloads)
    writer.abandon()


def test_creation_is_atomic_over_every_power_loss(tmp_path: Path) -> None:
    count = itertools.count()
    for disk in each_fault(lambda: CrashDisk(str(tmp_path / f"disk{next(count)}")), Fault.POWER_CUT):
        inner = disk.inner
        assert isinstance(inner, CrashDisk)
        try:
            LogWriter.create(disk, inner.path("a.log"), kind=KIND).abandon()
        except PowerCut:
            pass
        for seed in range(4):
            crashed = inner.crash(str(tmp_path / f"after{next(count)}"), random.Random(seed).choice)
            if crashed.exists(crashed.path("a.log")):
                assert payloads_after_reopening(crashed, crashed.path("a.log")) == []
            else:
                assert disk.fired
                LogWriter.create(crashed, crashed.path("a.log"), kind=KIND).close()


def test_threads_share_syncs_and_all_their_records_are_there(tmp_path: Path) -> None:
    disk, path = FaultyDisk(OsDisk(), operation="sync"), new_path(tmp_path)
    writer = LogWriter.create(disk, path, kind=KIND)

    def work(name: int) -> None:
        for number in range(25):
            end = writer.append(f"{name}:{number}".encode())
            assert writer.sync(end) >= end

    threads = [threading.Thread(target=work, args=(name,)) for name in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    writer.close()
    payloads = payloads_after_reopening(OsDisk(), path)
    assert sorted(payloads) == sorted(f"{name}:{number}".encode() for name in range(8) for number in range(25))
    for name in range(8):
        of_thread = [payload for payload in payloads if payload.startswith(b"%d:" % name)]
        assert of_thread == [f"{name}:{number}".encode() for number in range(25)]
    assert len(disk.calls) <= 200 + 5


def test_acknowledged_records_of_a_killed_process_are_there(tmp_path: Path) -> None:
    code = """
import sys
from quire.durable.files import OsDisk
from quire.durable.log_writer import LogWriter
writer = LogWriter.create(OsDisk(), sys.argv[1], kind=b"test")
for number in range(10**9):
    writer.append(b"%d" % number)
    writer.sync()
    print(number, flush=True)
"""
    path = new_path(tmp_path)
    process = subprocess.Popen([sys.executable, "-c", code, path], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    last = 0
    while last < 50:
        last = int(process.stdout.readline())
    os.kill(process.pid, signal.SIGKILL)
    last = max([last, *(int(line) for line in process.stdout.read().split("\n")[:-1])])
    process.stdout.close()
    process.wait()
    payloads = payloads_after_reopening(OsDisk(), path)
    assert payloads == [b"%d" % number for number in range(len(payloads))]
    assert len(payloads) > last


def test_a_crash_that_keeps_everything_is_a_clean_end(tmp_path: Path) -> None:
    disk = CrashDisk(str(tmp_path / "disk"))
    writer = LogWriter.create(disk, disk.path("a.log"), kind=KIND)
    writer.append_many([b"one", b"two"])
    crashed = disk.crash(str(tmp_path / "after"), keep_all)
    assert payloads_after_reopening(crashed, crashed.path("a.log")) == [b"one", b"two"]
    writer.abandon()
