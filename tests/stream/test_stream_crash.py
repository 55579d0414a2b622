"""Power loss just before every call that changes the disk, of a stream's whole life: appends, rolls, moves, retirement.

What was not synced is kept, dropped or garbled, sector by sector and name by name; then the stream is opened again. LMDB and
the object store are not on this disk: they keep what they were told.
"""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import pytest

from quire.core.clock import SystemClock
from quire.stream.mlog_recovery import recover
from quire.stream.stream import Stream
from quire.testing.crashdisk import Chooser, CrashDisk, CrashOutcome, drop_all, keep_all
from quire.testing.faults import Fault, FaultyDisk, PowerCut
from tests.stream.logs import same_state
from tests.stream.streams import LOG, SMALL, StreamWorld, record

HARMLESS = ("open", "read", "size", "names")
"""Calls before which the disk holds what it held before the call that follows."""
SIZE = 1_500
SETTINGS = msgspec.structs.replace(SMALL, pending_bytes_max=4 << 10)
Step = Callable[["Life", Stream], object]


def mostly(kind: CrashOutcome, seed: int) -> Chooser:
    """One outcome nine times out of ten: one lost sector among many is the hardest case to see."""
    draw = random.Random(seed)
    return lambda options: draw.choice(options) if draw.random() < 0.1 or kind not in options else kind


class Life:
    """A stream on a disk that loses power, and what was promised."""

    def __init__(self, root: Path, fail_at: int) -> None:
        self.inner = CrashDisk(str(root / "disk"))
        self.world = StreamWorld(
            root, settings=SETTINGS, log_settings=LOG, disk=self.inner, stream_root=self.inner.root
        )
        self.world.stream.close()
        self.disk = FaultyDisk(self.inner, Fault.POWER_CUT, fail_at=fail_at)
        self.world.disk = self.disk
        self.acknowledged = 1
        self.low = self.low_max = 1
        """What a returned `retire` has taken; what one that was begun may have taken."""
        self.ends = {1}
        """Where appends ended."""

    def run(self, script: Sequence[Step]) -> None:
        """Open the stream and go through a script until its end, or until the power goes off."""
        try:
            self.world.stream = self.world.open()
            for step in script:
                step(self, self.world.stream)
        except PowerCut:
            self.world.stream.abandon()

    def append(self, stream: Stream, count: int, *, wait: bool, together: bool = True) -> None:
        first = stream.hot.next_record
        payloads = [record(first + number, SIZE) for number in range(count)]
        self.ends |= {first + count} if together else set(range(first, first + count + 1))
        guards = [stream.append(payloads)] if together else [stream.append(each) for each in payloads]
        if wait:
            guards[-1].result()
            self.acknowledged = first + count

    def retire(self, stream: Stream) -> None:
        segment = stream.ledger.view.sealed[0]
        self.low_max = segment.end_record
        stream.tiers.retire(segment.segment_id)
        self.low = segment.end_record

    def look(self, after: CrashDisk) -> None:
        """Open what the crash left, hold it against what was promised, and go on with it."""
        world = self.world
        world.disk, world.stream_root = after, after.root
        world.stream = stream = world.open()
        first, end = stream.first_record, stream.end_record
        assert end >= self.acknowledged, "something acknowledged is gone"
        assert end in self.ends, "a part of an append is there"
        assert self.low <= first <= self.low_max, "something retired came back, or something else went"
        assert world.payloads() == [record(number, SIZE) for number in range(first, end)]
        log = stream.ledger.log
        assert log.objects is not None
        assert same_state(recover(log.files, SystemClock(), log.objects.fetch).index, log.index)
        world.check()
        stream.append(record(end, SIZE)).result()
        stream.tick()
        assert len(world.payloads()) == end + 1 - first


def power_off_at_every_step(
    base: Path, script: Sequence[Step], choosers: Sequence[Chooser], *, stride: int = 1, least: int
) -> None:
    """Cut the power before each call that changes something, and look at what each chooser leaves."""
    clean = Life(base / "clean", 0)
    clean.run(script)
    steps = [number for number, (call, _) in enumerate(clean.disk.calls, 1) if call not in HARMLESS]
    clean.world.close()
    assert len(steps) >= least
    for number in steps[::stride]:
        for turn, choose in enumerate(choosers):
            root = base / f"{number}-{turn}"
            life = Life(root, number)
            life.run(script)
            assert life.disk.fired
            life.look(life.inner.crash(str(root / "after"), choose))
            life.world.close()
            shutil.rmtree(root)


ROLLING: list[Step] = [
    lambda life, stream: life.append(stream, 2, wait=True),
    lambda life, stream: life.append(stream, 1, wait=False),
    lambda life, stream: life.append(stream, 5, wait=False, together=False),  # written, not synced
    lambda life, stream: life.append(stream, 5, wait=True),  # into the next segment
    lambda life, stream: life.append(stream, 20, wait=False),  # a segment of its own, and not synced
    lambda life, stream: life.append(stream, 1, wait=True),
]
WHOLE: list[Step] = [
    *ROLLING,
    lambda _, stream: stream.seal(),
    lambda _, stream: stream.keep(),
    lambda _, stream: stream.compress(),
    lambda _, stream: stream.upload(1),
    lambda _, stream: stream.evict(1, 2, warm=True),
    lambda _, stream: stream.ledger.log.snapshot(),
    lambda life, stream: life.append(stream, 12, wait=True),  # into a file that was another segment's
    lambda _, stream: stream.hydrate(1, 2),
    lambda life, stream: life.retire(stream),
    lambda _, stream: stream.tick(),
    lambda life, stream: life.append(stream, 1, wait=True),
]


@pytest.mark.slow
def test_power_off_at_every_step_of_appending_and_rolling(tmp_path: Path) -> None:
    choosers = [drop_all, mostly(CrashOutcome.KEEP, 3)]
    power_off_at_every_step(tmp_path, ROLLING, choosers, least=30)


@pytest.mark.slow
@pytest.mark.timeout(1800)  # five minutes by itself on a machine with two busy cores
def test_long_power_off_at_every_step_of_a_whole_life(tmp_path: Path) -> None:
    choosers = [keep_all, drop_all, mostly(CrashOutcome.KEEP, 1), mostly(CrashOutcome.GARBLE, 2)]
    power_off_at_every_step(tmp_path, WHOLE, choosers, least=100)


def test_power_off_at_some_steps_of_a_whole_life(tmp_path: Path) -> None:
    power_off_at_every_step(tmp_path, WHOLE, [drop_all], stride=9, least=100)


def test_what_recovery_has_seen_survives_power_loss(tmp_path: Path) -> None:
    """A process dies with bytes written and not synced, the next one counts them in, and then the power goes off."""
    life = Life(tmp_path, 0)
    stream = life.world.stream = life.world.open()
    life.append(stream, 2, wait=True)
    life.append(stream, 6, wait=False)
    assert (stream.end_record, stream.hot.segment is not None and stream.hot.segment.written) == (3, 9)
    stream.abandon()
    life.world.stream = life.world.open()
    life.acknowledged = life.world.stream.end_record
    assert life.acknowledged == 9, "the next process reads what the last one wrote"
    after = life.inner.crash(str(tmp_path / "after"), drop_all)
    life.world.stream.abandon()
    life.look(after)
    life.world.close()
