"""Power loss just before every call that changes the disk, during a stream's whole lifetime: appends, rolls, moves,
retirement.

Data that was not synced is kept, dropped or garbled, sector by sector and name by name; then the stream is opened
again. LMDB
and the object store are not on this disk: they keep everything.
"""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from quire.core.clock import SystemClock
from quire.core.errors import StorageFault, StoreUnusable
from quire.durable.files import DiskLayer, File, FileLayer, OsDisk, drop_cached_pages
from quire.stream.mlog_recovery import recover
from quire.stream.stream import Stream
from quire.testing.crashdisk import Chooser, CrashDisk, CrashOutcome, drop_all, keep_all
from quire.testing.faults import Fault, FaultyDisk, PowerCut
from tests.stream.logs import same_state
from tests.stream.streams import LOG, SMALL, StreamHarness, record

HARMLESS = ("open", "read", "size", "names")
"""Calls that do not change the disk: power loss before them is power loss before the next call."""
SIZE = 1_500
SETTINGS = msgspec.structs.replace(SMALL, pending_bytes_max=4 << 10)
Step = Callable[["StreamWorkload", Stream], object]


def mostly(kind: CrashOutcome, seed: int) -> Chooser:
    """Choose one outcome nine times out of ten: a single lost sector among many is the hardest case to detect."""
    rng = random.Random(seed)
    return lambda options: rng.choice(options) if rng.random() < 0.1 or kind not in options else kind


class StreamWorkload:
    """A stream on a disk that loses power, and what was promised."""

    def __init__(self, root: Path, fail_at: int) -> None:
        self.crash_disk = CrashDisk(str(root / "disk"))
        self.harness = StreamHarness(
            root, settings=SETTINGS, log_settings=LOG, disk=self.crash_disk, stream_root=self.crash_disk.root
        )
        self.harness.stream.close()
        self.disk = FaultyDisk(self.crash_disk, Fault.POWER_CUT, fail_at=fail_at)
        self.harness.disk = self.disk
        self.acknowledged = 1
        self.low = self.low_max = 1
        """What a returned `retire` has removed; what a started one may have removed."""
        self.ends = {1}
        """Ends of appends."""

    def run(self, script: Sequence[Step]) -> None:
        """Open the stream and run a script until its end or until power loss."""
        try:
            self.harness.stream = self.harness.open()
            for step in script:
                step(self, self.harness.stream)
        except PowerCut:
            self.harness.stream.abandon()

    def append(self, stream: Stream, count: int, *, wait: bool, together: bool = True) -> None:
        first = stream.hot.next_record
        payloads = [record(first + number, SIZE) for number in range(count)]
        self.ends |= {first + count} if together else set(range(first, first + count + 1))
        guards = [stream.append(payloads)] if together else [stream.append(payload) for payload in payloads]
        if wait:
            guards[-1].result()
            self.acknowledged = first + count

    def retire(self, stream: Stream) -> None:
        segment = stream.ledger.view.sealed[0]
        self.low_max = segment.end_record
        stream.tiers.retire(segment.segment_id)
        self.low = segment.end_record

    def check(self, after: CrashDisk) -> None:
        """Open the stream after the crash, check every guarantee, and continue writing."""
        harness = self.harness
        harness.disk, harness.stream_root = after, after.root
        harness.stream = stream = harness.open()
        first, end = stream.first_record, stream.end_record
        assert end >= self.acknowledged, "an acknowledged record is lost"
        assert end in self.ends, "an append is there in part"
        assert self.low <= first <= self.low_max, "retired records reappeared, or others are missing"
        assert harness.payloads() == [record(number, SIZE) for number in range(first, end)]
        log = stream.ledger.log
        assert log.objects is not None
        assert same_state(recover(log.files, SystemClock(), log.objects.fetch).index, log.index)
        harness.check()
        stream.append(record(end, SIZE)).result()
        stream.tick()
        assert len(harness.payloads()) == end + 1 - first


def power_loss_at_every_step(
    base: Path, script: Sequence[Step], choosers: Sequence[Chooser], *, stride: int = 1, least: int
) -> None:
    """Cut the power before each call that changes the disk, and check what each chooser leaves."""
    clean = StreamWorkload(base / "clean", 0)
    clean.run(script)
    steps = [number for number, (call, _) in enumerate(clean.disk.calls, 1) if call not in HARMLESS]
    clean.harness.close()
    assert len(steps) >= least
    for number in steps[::stride]:
        for i, choose in enumerate(choosers):
            root = base / f"{number}-{i}"
            workload = StreamWorkload(root, number)
            workload.run(script)
            assert workload.disk.fired
            workload.check(workload.crash_disk.crash(str(root / "after"), choose))
            workload.harness.close()
            shutil.rmtree(root)


ROLLING: list[Step] = [
    lambda workload, stream: workload.append(stream, 2, wait=True),
    lambda workload, stream: workload.append(stream, 1, wait=False),
    lambda workload, stream: workload.append(stream, 5, wait=False, together=False),  # written, not synced
    lambda workload, stream: workload.append(stream, 5, wait=True),  # into the next segment
    lambda workload, stream: workload.append(stream, 20, wait=False),  # its own segment, not synced
    lambda workload, stream: workload.append(stream, 1, wait=True),
]
LIFECYCLE: list[Step] = [
    *ROLLING,
    lambda _, stream: stream.seal(),
    lambda _, stream: stream.keep(),
    lambda _, stream: stream.compress(),
    lambda _, stream: stream.upload(1),
    lambda _, stream: stream.evict(1, 2, warm=True),
    lambda _, stream: stream.ledger.log.snapshot(),
    lambda workload, stream: workload.append(stream, 12, wait=True),  # into a reused file
    lambda _, stream: stream.hydrate(1, 2),
    lambda workload, stream: workload.retire(stream),
    lambda _, stream: stream.tick(),
    lambda workload, stream: workload.append(stream, 1, wait=True),
]


@pytest.mark.slow
def test_power_loss_at_every_step_of_appending_and_rolling(tmp_path: Path) -> None:
    choosers = [drop_all, mostly(CrashOutcome.KEEP, 3)]
    power_loss_at_every_step(tmp_path, ROLLING, choosers, least=30)


@pytest.mark.slow
@pytest.mark.timeout(1800)  # takes five minutes on a machine with two busy cores
def test_long_power_loss_at_every_step_of_the_lifecycle(tmp_path: Path) -> None:
    choosers = [keep_all, drop_all, mostly(CrashOutcome.KEEP, 1), mostly(CrashOutcome.GARBLE, 2)]
    power_loss_at_every_step(tmp_path, LIFECYCLE, choosers, least=100)


def test_power_loss_at_some_steps_of_the_lifecycle(tmp_path: Path) -> None:
    power_loss_at_every_step(tmp_path, LIFECYCLE, [drop_all], stride=9, least=100)


def test_records_that_recovery_has_counted_survive_power_loss(tmp_path: Path) -> None:
    """A process dies with bytes written but not synced, the next one counts them as records, and then the power fails."""
    workload = StreamWorkload(tmp_path, 0)
    stream = workload.harness.stream = workload.harness.open()
    workload.append(stream, 2, wait=True)
    workload.append(stream, 6, wait=False)
    assert (stream.end_record, stream.hot.segment is not None and stream.hot.segment.written) == (3, 9)
    stream.abandon()
    workload.harness.stream = workload.harness.open()
    workload.acknowledged = workload.harness.stream.end_record
    assert workload.acknowledged == 9, "the next process reads what the previous one wrote"
    after = workload.crash_disk.crash(str(tmp_path / "after"), drop_all)
    workload.harness.stream.abandon()
    workload.check(after)
    workload.harness.close()


class StaleCacheDisk(DiskLayer):
    """A disk with a sync that fails as on Linux: the cached pages stay readable and count as clean, and the disk lacks them."""

    failing: str | None = None
    """A sync of a file with this in its path fails: the next one, or that after `skip` others."""
    skip = 0

    def __init__(self, inner: OsDisk) -> None:
        super().__init__(inner)
        self.unsynced: dict[int, list[tuple[int, bytes]]] = {}
        """What the disk has where the cache has something else: inode → (offset, bytes), oldest write first."""
        self.lost: dict[int, list[tuple[int, bytes]]] = {}

    def open(self, path: str, **how: Any) -> File:
        return StaleCacheFile(self, self._inner.open(path, **how))

    def evict(self, root: Path) -> None:
        """Evict the pages that were never written, as memory pressure does."""
        for path in root.rglob("*"):
            if path.stat().st_ino in self.lost:
                file = self.open(str(path))
                drop_cached_pages(file)
                file.close()


class StaleCacheFile(FileLayer):
    __slots__ = ("_disk", "_inode")

    def __init__(self, disk: StaleCacheDisk, inner: File) -> None:
        super().__init__(inner)
        self._disk = disk
        self._inode = os.fstat(inner.fileno()).st_ino

    def write_at(self, data: bytes | bytearray | memoryview, offset: int) -> None:
        before = self._inner.read_at(len(data), offset)
        self._disk.unsynced.setdefault(self._inode, []).append((offset, before))
        self._inner.write_at(data, offset)

    def sync(self) -> None:
        unsynced = self._disk.unsynced.pop(self._inode, [])
        if self._disk.failing is not None and self._disk.failing in self.path and self._disk.skip:
            self._disk.skip -= 1
        elif self._disk.failing is not None and self._disk.failing in self.path:
            self._disk.failing, self._disk.lost[self._inode] = None, unsynced
            raise StorageFault("the write-back failed", path=self.path)
        self._inner.sync()

    def drop_cached_pages(self) -> None:
        for offset, before in reversed(self._disk.lost.pop(self._inode, [])):
            self._inner.write_at(before, offset)


def test_records_that_only_the_page_cache_has_are_not_recovered(tmp_path: Path) -> None:
    """Hazard: after a failed sync, reopening sealed blocks that were not on disk; once they were evicted from the cache, the
    segment was damaged."""
    disk = StaleCacheDisk(OsDisk())
    harness = StreamHarness(tmp_path, disk=disk)
    harness.stream.append(b"a").result()
    disk.failing = "/hot/"
    with pytest.raises((StorageFault, StoreUnusable)):
        harness.stream.append(b"b").result()
    harness.crash()
    disk.evict(tmp_path)
    assert harness.payloads() == [b"a"]
    harness.stream.append(b"c").result()
    harness.stream.seal()
    harness.stream.compress()
    assert harness.payloads() == [b"a", b"c"]
    harness.check()
    harness.close()


def test_steps_that_only_the_page_cache_has_are_not_recovered(tmp_path: Path) -> None:
    """Hazard: after a failed sync, the manifest log counted a record that was not on disk, and the stream refused to open when
    it was evicted from the cache."""
    disk = StaleCacheDisk(OsDisk())
    harness = StreamHarness(tmp_path, disk=disk)
    payloads = harness.fill(1)
    disk.failing, disk.skip = "/manifest/", 1  # the sync of the header
    with pytest.raises(StoreUnusable):
        harness.stream.compress()
    harness.crash()
    harness.stream.close()
    disk.evict(tmp_path)
    harness.stream = harness.open()
    assert harness.payloads() == payloads
    harness.stream.compress()
    harness.check()
    harness.close()
