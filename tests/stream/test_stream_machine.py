"""A model beside a stream, through every operation and fault, including power loss at any moment.

Checked after every step: every record that was acknowledged and not retired is read once, in order, from whatever tier;
nothing
else is read but later appends; the state rebuilt from the log alone equals the live one, and LMDB; a follower that
reads only
tier 2 has the same state, as far as it has read.
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
from tests.stream.streams import StreamHarness, ids, record


class Streams(RuleBasedStateMachine):
    """The state machine."""

    @initialize()
    def begin(self) -> None:
        self.base = Path(tempfile.mkdtemp())
        self.open_count = 0
        root = self._new_directory()
        root.mkdir()
        disk = CrashDisk(str(root))
        self.harness = StreamHarness(self.base, disk=disk, stream_root=disk.root)
        self.follower: LogFollower | None = None
        self.scheduled: set[int] = set()
        self.appended: dict[int, bytes] = {}
        self.acknowledged = 1
        """Every record below was acknowledged."""
        self.low = 1

    def _new_directory(self) -> Path:
        self.open_count += 1
        return self.base / f"life-{self.open_count}"

    @property
    def stream(self) -> Any:
        return self.harness.stream

    # ── appending ─────────────────────────────────────────────────────────────────────────────────────────────────────
    @rule(count=st.integers(1, 30), size=st.integers(0, 3_000), together=st.booleans(), wait=st.booleans())
    def append(self, count: int, size: int, together: bool, wait: bool) -> None:
        first = self.stream.hot.next_record
        payloads = [record(first + number, size) for number in range(count)]
        guards = [self.stream.append(payloads)] if together else [self.stream.append(payload) for payload in payloads]
        assert guards[0].record == first
        self.appended.update(enumerate(payloads, first))
        if wait:
            guards[-1].result()
            self.acknowledged = first + count

    @rule()
    def write(self) -> None:
        """What an appending thread does when too much is pending: write without a sync."""
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
        target = sealed[which % len(sealed)]
        try:
            if move == "retire":
                self.stream.tiers.retire(sealed[0].segment_id)
            elif move == "evict":
                self.stream.tiers.evict(target.segment_id, warm=which % 2 == 0)
            else:
                getattr(self.stream.tiers, move)(target.segment_id)
        except (ObjectStoreUnavailable, IllegalTransition):
            pass  # the object store is down, or it is the last copy

    @rule(down=st.booleans())
    def object_store(self, down: bool) -> None:
        self.harness.objects.down = down

    @rule(seconds=st.sampled_from([0.0, 1.0, 100.0]))
    def tick(self, seconds: float) -> None:
        self.harness.clock.advance(seconds)
        self.stream.tick()

    @rule()
    def keep(self) -> None:
        self.stream.keep(sync=False)

    @rule(seconds=st.integers(-50, 50))
    def clock_jumps(self, seconds: int) -> None:
        self.harness.clock.jump(seconds)

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

    # ── crashing ──────────────────────────────────────────────────────────────────────────────────────────────────────
    @rule(kind=st.sampled_from(["keep", "drop", "mixed"]), seed=st.integers(0, 2**32))
    def power_loss(self, kind: str, seed: int) -> None:
        mode = self.stream.mode.value
        self.stream.abandon()
        rng = random.Random(seed)
        choosers = {"keep": keep_all, "drop": drop_all, "mixed": lambda options: rng.choice(options)}
        disk = self.harness.disk
        assert isinstance(disk, CrashDisk)
        after = disk.crash(str(self._new_directory()), choosers[kind])
        self._open(after, mode)

    @rule()
    def killed(self) -> None:
        """The process dies and the machine stays up: everything written is there, synced or not."""
        mode = self.stream.mode.value
        self.stream.abandon()
        self._open(self.harness.disk, mode)

    @rule()
    def restart(self) -> None:
        mode = self.stream.mode.value
        self.stream.close()
        self.acknowledged = self.stream.hot.durable
        self._open(self.harness.disk, mode)

    def _open(self, disk: Any, mode: str) -> None:
        self.harness.disk, self.harness.stream_root = disk, disk.root
        self.harness.stream = self.harness.open(mode)
        end = self.stream.end_record
        assert end >= self.acknowledged, "an acknowledged record is lost"
        self.appended = {number: payload for number, payload in self.appended.items() if number < end}
        self.acknowledged = end

    # ── invariants ────────────────────────────────────────────────────────────────────────────────────────────────────
    @invariant()
    def everything_promised_is_there(self) -> None:
        if not hasattr(self, "harness"):
            return
        stream = self.stream
        first, end = stream.first_record, stream.end_record
        assert first >= self.low, "a retired record reappeared"
        self.low = first
        assert end >= self.acknowledged
        if self.harness.objects.down:
            return
        records = list(stream.read())
        assert [record.id for record in records] == list(range(first, end))
        assert [record.payload for record in records] == [self.appended[number] for number in range(first, end)]
        stamps = [record.timestamp_ms for record in records]
        assert stamps == sorted(stamps)
        if records:
            middle = records[len(records) // 2]
            batches = list(stream.read_batches(middle.id, end))
            assert [number for batch in batches for number in batch["id"].to_pylist()] == list(range(middle.id, end))
            expected = next(record.id for record in records if record.timestamp_ms >= middle.timestamp_ms)
            assert stream.seek(middle.timestamp_ms) == expected

    @invariant()
    def the_log_rebuilds_the_state(self) -> None:
        if not hasattr(self, "harness") or self.stream.mode.value != "on":
            return
        log = self.stream.ledger.log
        assert log.objects is not None
        fetch = None if self.harness.objects.down else log.objects.fetch
        again = recover(log.files, SystemClock(), fetch)
        assert same_state(again.index, log.index)
        assert log.index.rejected == 0
        self.stream.ledger.project_now()
        assert self.stream.compare() == []

    @precondition(lambda self: hasattr(self, "harness") and not self.harness.objects.down)
    @rule(again=st.booleans())
    def follow(self, again: bool) -> None:
        if self.stream.mode.value != "on":
            return
        log = self.stream.ledger.log
        assert log.objects is not None
        log.rotate()
        log.upload()
        if self.follower is None or again:  # at random as a new process on its old mirror
            mirror = LogFiles(OsDisk(), str(self.base / "mirror"), self.harness.stream_id)
            self.follower = LogFollower(log.objects, mirror, scheduled=self.scheduled)
        polled = self.follower.poll()
        assert polled.waiting_for is None
        assert same_state(self.follower.index, log.index), "the follower has read everything, but has another state"
        new = {hydration.segment_id for hydration in polled.hydrations}
        assert not new & self.scheduled, "a hydration is scheduled twice"
        assert new | self.scheduled >= {segment.segment_id for segment in self.stream.ledger.view if segment.is_remote}
        self.scheduled |= new

    def teardown(self) -> None:
        if hasattr(self, "harness"):
            self.harness.objects.down = False
            try:
                self.harness.check()
            finally:  # a failing history is run a thousand times while it is shrunk
                self.harness.close()
                shutil.rmtree(self.base)


# A step costs more than elsewhere: fewer steps than the profile has, and proportionally more in `make torture`.
Streams.TestCase.settings = settings(
    max_examples=settings().max_examples * 5 // 12, stateful_step_count=settings().stateful_step_count * 5 // 6
)
TestStreams = Streams.TestCase


def test_reading_below_what_is_retained_is_an_error(tmp_path: Path) -> None:
    harness = StreamHarness(tmp_path)
    harness.fill(3)
    harness.stream.tiers.retire(harness.segments()[0].segment_id)
    with pytest.raises(CursorLost, match="no longer retained"):
        list(harness.stream.read(1))
    assert ids(harness.stream.read()) == list(range(21, 61))
    harness.close()
