"""A model beside a stream, through everything that can happen to it, power loss at any moment included.

What is checked after every step: every record that was acknowledged and not retired is read once, in order, from whatever
tier; nothing else is read but what was appended behind it; the state rebuilt from the log alone equals the live one; LMDB
says the same; a follower that sees tier 2 alone says the same of what it has seen.
"""

from __future__ import annotations

import random
import shutil
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from quire.core.clock import SystemClock
from quire.core.errors import CursorLost, IllegalTransition, ObjectStoreUnavailable
from quire.durable.files import OsDisk
from quire.stream.files import LogFiles
from quire.stream.mlog_follower import LogFollower
from quire.stream.mlog_recovery import recover
from quire.stream.state import Retention
from quire.testing.crashdisk import CrashDisk, drop_all, keep_all
from tests.stream.logs import same_state
from tests.stream.streams import StreamWorld, ids, record


class Streams(RuleBasedStateMachine):
    """The machine."""

    @initialize()
    def begin(self) -> None:
        self.base = Path(tempfile.mkdtemp())
        self.lives = 0
        root = self._fresh()
        root.mkdir()
        disk = CrashDisk(str(root))
        self.world = StreamWorld(self.base, disk=disk, stream_root=disk.root)
        self.follower: LogFollower | None = None
        self.scheduled: set[int] = set()
        self.appended: dict[int, bytes] = {}
        self.acknowledged = 1
        """Everything below was promised."""
        self.low = 1

    def _fresh(self) -> Path:
        self.lives += 1
        return self.base / f"life-{self.lives}"

    @property
    def stream(self) -> Any:
        return self.world.stream

    # ── appending ─────────────────────────────────────────────────────────────────────────────────────────────────────
    @rule(count=st.integers(1, 30), size=st.integers(0, 3_000), together=st.booleans(), wait=st.booleans())
    def append(self, count: int, size: int, together: bool, wait: bool) -> None:
        first = self.stream.hot.next_record
        payloads = [record(first + number, size) for number in range(count)]
        guards = [self.stream.append(payloads)] if together else [self.stream.append(each) for each in payloads]
        assert guards[0].record == first
        self.appended.update(enumerate(payloads, first))
        if wait:
            guards[-1].result()
            self.acknowledged = first + count

    @rule()
    def write(self) -> None:
        """As an appending thread does when too much is pending: written, and not synced."""
        with self.stream.hot.paused():
            self.stream.hot._write_out()

    @rule()
    def sync(self) -> None:
        self.acknowledged = self.stream.sync()

    @rule()
    def seal(self) -> None:
        self.stream.seal()
        self.acknowledged = self.stream.end_record

    # ── moving ────────────────────────────────────────────────────────────────────────────────────────────────────────
    @rule(move=st.sampled_from(["compress", "upload", "evict", "evict", "hydrate", "retire"]), which=st.integers(0, 9))
    def move(self, move: str, which: int) -> None:
        sealed = self.stream.ledger.view.sealed
        if not sealed:
            return
        chosen = sealed[which % len(sealed)]
        try:
            if move == "retire":
                self.stream.tiers.retire(sealed[0].segment_id)
            elif move == "evict":
                self.stream.tiers.evict(chosen.segment_id, warm=which % 2 == 0)
            else:
                getattr(self.stream.tiers, move)(chosen.segment_id)
        except (ObjectStoreUnavailable, IllegalTransition):
            pass  # it is down, or the last copy was to be given up

    @rule(down=st.booleans())
    def object_store(self, down: bool) -> None:
        self.world.objects.down = down

    @rule(seconds=st.sampled_from([0.0, 1.0, 100.0]))
    def tick(self, seconds: float) -> None:
        self.world.clock.advance(seconds)
        self.stream.tick()

    @rule()
    def keep(self) -> None:
        self.stream.keep(sync=False)

    @rule(seconds=st.integers(-50, 50))
    def clock_jumps(self, seconds: int) -> None:
        self.world.clock.jump(seconds)

    @rule(limit=st.sampled_from([0, 8 << 10, 40 << 10]), consumed=st.booleans())
    def retention(self, limit: int, consumed: bool) -> None:
        self.stream.retain(Retention(bytes=limit, consumed=consumed))

    @rule(name=st.sampled_from(["ann", "bob"]), part=st.floats(0, 1))
    def consume(self, name: str, part: float) -> None:
        first, end = self.stream.first_record, self.stream.end_record
        self.stream.register(name)
        self.stream.ack(name, first + int((end - first) * part))

    @rule()
    def snapshot_of_the_log(self) -> None:
        if self.stream.mode.value == "on":
            self.stream.ledger.log.snapshot()

    @rule(mode=st.sampled_from(["on", "on", "shadow", "off"]))
    def switch(self, mode: str) -> None:
        self.stream.switch(mode)

    # ── dying ─────────────────────────────────────────────────────────────────────────────────────────────────────────
    @rule(kind=st.sampled_from(["keep", "drop", "mixed"]), seed=st.integers(0, 2**32))
    def power_loss(self, kind: str, seed: int) -> None:
        mode = self.stream.mode.value
        self.stream.abandon()
        draw = random.Random(seed)
        choosers = {"keep": keep_all, "drop": drop_all, "mixed": lambda options: draw.choice(options)}
        disk = self.world.disk
        assert isinstance(disk, CrashDisk)
        after = disk.crash(str(self._fresh()), choosers[kind])
        self._open(after, mode)

    @rule()
    def killed(self) -> None:
        """The process dies, the machine stays up: what was written is there, synced or not."""
        mode = self.stream.mode.value
        self.stream.abandon()
        self._open(self.world.disk, mode)

    @rule()
    def restart(self) -> None:
        mode = self.stream.mode.value
        self.stream.close()
        self.acknowledged = self.stream.hot.durable
        self._open(self.world.disk, mode)

    def _open(self, disk: Any, mode: str) -> None:
        self.world.disk, self.world.stream_root = disk, disk.root
        self.world.stream = self.world.open(mode)
        end = self.stream.end_record
        assert end >= self.acknowledged, "something acknowledged is gone"
        self.appended = {number: payload for number, payload in self.appended.items() if number < end}
        self.acknowledged = end

    # ── what must hold ────────────────────────────────────────────────────────────────────────────────────────────────
    @invariant()
    def everything_promised_is_there(self) -> None:
        if not hasattr(self, "world"):
            return
        stream = self.stream
        first, end = stream.first_record, stream.end_record
        assert first >= self.low, "what was retired came back"
        self.low = first
        assert end >= self.acknowledged
        if self.world.objects.down:
            return
        found = list(stream.read())
        assert [each.id for each in found] == list(range(first, end))
        assert [each.payload for each in found] == [self.appended[number] for number in range(first, end)]
        stamps = [each.timestamp_ms for each in found]
        assert stamps == sorted(stamps)
        if found:
            middle = found[len(found) // 2]
            batches = list(stream.read_batches(middle.id, end))
            assert [number for batch in batches for number in batch["id"].to_pylist()] == list(range(middle.id, end))
            expected = next(each.id for each in found if each.timestamp_ms >= middle.timestamp_ms)
            assert stream.seek(middle.timestamp_ms) == expected

    @invariant()
    def the_log_rebuilds_the_state(self) -> None:
        if not hasattr(self, "world") or self.stream.mode.value != "on":
            return
        log = self.stream.ledger.log
        assert log.objects is not None
        fetch = None if self.world.objects.down else log.objects.fetch
        again = recover(log.files, SystemClock(), fetch)
        assert same_state(again.index, log.index)
        assert log.index.rejected == 0
        self.stream.ledger.project_now()
        assert self.stream.compare() == []

    @precondition(lambda self: hasattr(self, "world") and not self.world.objects.down)
    @rule(again=st.booleans())
    def follow(self, again: bool) -> None:
        if self.stream.mode.value != "on":
            return
        log = self.stream.ledger.log
        assert log.objects is not None
        log.rotate()
        log.upload()
        if self.follower is None or again:  # now and then as a new process on its old mirror
            mirror = LogFiles(OsDisk(), str(self.base / "mirror"), self.world.stream_id)
            self.follower = LogFollower(log.objects, mirror, scheduled=self.scheduled)
        polled = self.follower.poll()
        assert polled.waiting_for is None
        assert same_state(self.follower.index, log.index), "it has seen everything, and says something else"
        new = {each.segment_id for each in polled.hydrations}
        assert not new & self.scheduled, "a hydration is scheduled twice"
        assert new | self.scheduled >= {each.segment_id for each in self.stream.ledger.view if each.is_remote}
        self.scheduled |= new

    def teardown(self) -> None:
        if hasattr(self, "world"):
            self.world.objects.down = False
            try:
                self.world.check()
            finally:  # a failing history is tried a thousand times over while it is made shorter
                self.world.close()
                shutil.rmtree(self.base)


# A step costs more than elsewhere: fewer than a profile asks for, and as many more in `make torture`.
Streams.TestCase.settings = settings(
    max_examples=settings().max_examples * 5 // 12, stateful_step_count=settings().stateful_step_count * 5 // 6
)
TestStreams = Streams.TestCase


def test_reading_below_what_is_retained_is_an_error(tmp_path: Path) -> None:
    world = StreamWorld(tmp_path)
    world.fill(3)
    world.stream.tiers.retire(world.segments()[0].segment_id)
    with pytest.raises(CursorLost, match="no longer retained"):
        list(world.stream.read(1))
    assert ids(world.stream.read()) == list(range(21, 61))
    world.close()
