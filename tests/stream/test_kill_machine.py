"""Real processes that do anything to a stream and are killed at any moment, a model of what they said, and a follower.

After each death, and at the end: every record that was acknowledged and not retired is read once, in order, from whatever tier;
an append that was under way is there whole or not at all; nothing that was retired comes back, and nothing goes that nobody
retired; the state rebuilt from the log equals the live one, LMDB says the same, and so does a follower that sees tier 2 alone
and lives through it all.
"""

from __future__ import annotations

import json
import random
import re
import signal
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from quire.core.clock import SystemClock
from quire.durable.files import OsDisk
from quire.objects.open import open_store
from quire.stream.files import LogFiles
from quire.stream.mlog_follower import LogFollower
from quire.stream.mlog_recovery import recover
from quire.stream.mlog_tier2 import LogObjects
from quire.stream.stream import Stream
from quire.stream.verify import problems
from tests.nursery import Child, Nursery
from tests.stream.kill_told import size_of
from tests.stream.logs import same_state
from tests.stream.stream_killed import open_at
from tests.stream.streams import record
from tests.stream.test_mlog_kill import POINTS as LOG_POINTS
from tests.stream.test_stream_kill import POINTS

EVERY_POINT = sorted({*POINTS, *LOG_POINTS} - {"stream.recovery.sealed", "stream.recovery.swept"})
MOVES = ("compress", "upload", "upload", "evict", "evict", "evict_warm", "hydrate", "retire")


@pytest.fixture(scope="module")
def nursery() -> Iterator[Nursery]:
    with Nursery("tests.stream.kill_told:run", warm_up="tests.stream.stream_killed:warm_up") as made:
        yield made


class Model:
    """What was promised, and the follower."""

    def __init__(self, base: Path, nursery: Nursery, seed: int) -> None:
        self.base = base
        self.nursery = nursery
        self.draw = random.Random(seed)
        self.acknowledged = 1
        """Everything below was promised."""
        self.low = 1
        """Everything below was retired."""
        self.may_retire = False
        """Whether something that retires was begun since `low` was last told."""
        self.ends = {1}
        """Where an append ended: where a recovered stream may end."""
        self.deaths = 0
        self.done: Counter[str] = Counter()
        self.follower: LogFollower | None = None
        self.prefixes: tuple[str, ...] = ()
        """Where the log's objects are in the bucket, as every life says."""
        self.scheduled: set[int] = set()
        self.objects = open_store(str(base / "store" / "objects"))

    def close(self) -> None:
        self.objects.close()

    # ── a life ────────────────────────────────────────────────────────────────────────────────────────────────────────
    def live(self, steps: int) -> None:
        """One process: told `steps` things, and killed before the end or at it."""
        with self.nursery.spawn() as child:
            child.line.send(json.dumps({"base": str(self.base)}).encode())
            told = self._hear(child)
            assert told is not None, self.nursery.errors()
            kill_at = self.draw.randrange(steps * 2)
            for number in range(steps):
                step = self._choose()
                self.done[step["do"]] += 1
                self._foresee(step, told)
                child.line.send(json.dumps(step).encode())
                if number == kill_at:
                    child.kill()  # in the middle of it
                answer = self._hear(child)
                if answer is None:
                    break
                told = answer
                if self.draw.random() < 0.1:
                    self._poll()
            else:
                child.line.send(b'{"do": "end"}')
                while self._hear(child) is not None:
                    pass
            status = child.wait()
        assert status in (0, -signal.SIGKILL), self.nursery.errors()
        self.deaths += status != 0

    def _hear(self, child: Child) -> dict[str, Any] | None:
        message = child.line.receive()
        if message is None:
            return None
        told: dict[str, Any] = json.loads(message)
        assert told["end"] >= self.acknowledged
        assert told["first"] >= self.low
        assert self.may_retire or told["first"] == self.low, "something went that nobody retired"
        self.acknowledged, self.low, self.may_retire = told["end"], told["first"], False
        self.ends.add(told["next"])
        assert self.prefixes in ((), tuple(told["prefixes"])), "another life looks for its objects elsewhere"
        self.prefixes = tuple(told["prefixes"])
        return told

    def _choose(self) -> dict[str, Any]:
        draw, kind = self.draw, self.draw.random()
        if kind < 0.4:
            return {
                "do": "append",
                "count": draw.randint(1, 40),
                "together": draw.random() < 0.5,
                "wait": draw.random() < 0.7,
            }
        if kind < 0.5:
            return {"do": draw.choice(("seal", "seal", "sync", "keep"))}
        if kind < 0.7:
            return {"do": draw.choice(MOVES), "which": draw.randrange(100)}
        if kind < 0.82:
            return {"do": "tick"}
        if kind < 0.88:
            return {"do": "arm", "failpoints": f"{draw.choice(EVERY_POINT)}={draw.randint(0, 6)}*off->kill"}
        if kind < 0.92:
            return {"do": "retain", "bytes": draw.choice((0, 20_000, 60_000)), "consumed": draw.random() < 0.2}
        if kind < 0.95:
            return {"do": "consume", "percent": draw.randint(0, 100)}
        if kind < 0.98:
            return {"do": "snapshot"}
        return {"do": "switch", "mode": draw.choice(("on", "on", "shadow", "off"))}

    def _foresee(self, step: dict[str, Any], told: dict[str, Any]) -> None:
        if step["do"] in ("retire", "tick"):
            self.may_retire = True
        if step["do"] == "append":
            first, count = told["next"], step["count"]
            self.ends |= {first + count} if step["together"] else set(range(first + 1, first + count + 1))

    # ── what must hold ────────────────────────────────────────────────────────────────────────────────────────────────
    def look(self) -> None:
        """Open the stream and compare everything."""
        with open_at(self.base) as store:
            stream = store.stream("clicks", create=True)
            first, end = stream.first_record, stream.end_record
            assert end >= self.acknowledged, "something acknowledged is gone"
            assert end in self.ends, "a part of an append is there"
            assert first >= self.low, "something retired came back"
            assert self.may_retire or first == self.low, "something went that nobody retired"
            self.acknowledged, self.low, self.may_retire, self.ends = end, first, False, {end}
            found = list(stream.read())
            assert [each.id for each in found] == list(range(first, end))
            assert all(each.payload == record(each.id, size_of(each.id)) for each in found)
            assert [each for each in problems(stream) if not each.leak] == []
            assert store.manifest.check() == []
            self._compare(stream)

    def _compare(self, stream: Stream) -> None:
        log = stream.ledger.log
        assert log.objects is not None
        assert same_state(recover(log.files, SystemClock(), log.objects.fetch).index, log.index)
        assert log.index.rejected == 0
        assert stream.compare() == []
        log.rotate()
        log.upload()
        follower = self._poll()
        assert same_state(follower.index, log.index), "the follower says something else"

    def _poll(self) -> LogFollower:
        """Have the follower look, now and then as a new process on its old mirror."""
        if self.follower is None or self.draw.random() < 0.2:
            mirror = LogFiles(OsDisk(), str(self.base / "mirror"), 1)
            self.follower = LogFollower(LogObjects(self.objects, 1, self.prefixes), mirror, scheduled=self.scheduled)
        new = [each.segment_id for each in self.follower.poll().hydrations]
        assert not self.scheduled & set(new), "a hydration is scheduled twice"
        assert len(set(new)) == len(new)
        self.scheduled |= set(new)
        return self.follower


def lives(base: Path, nursery: Nursery, *, seed: int, deaths: int, steps: int) -> Model:
    """Lives until so many were ended by SIGKILL."""
    model = Model(base, nursery, seed)
    try:
        while model.deaths < deaths:
            model.live(steps)
            model.look()
    finally:
        model.close()
    return model


def test_every_step_has_a_test_that_dies_there() -> None:
    room = Path(__file__).parents[2] / "src/quire/stream"
    steps = {name for path in room.glob("*.py") for name in re.findall(r'hit\("([^"]+)"\)', path.read_text("utf-8"))}
    batches = {"stream.batch.announced", "stream.batch.appended"}  # tests/service/test_killed_batches.py
    assert steps == {*POINTS, *LOG_POINTS, *batches}


def test_killed_at_random_against_a_model(tmp_path: Path, nursery: Nursery) -> None:
    model = lives(tmp_path, nursery, seed=7, deaths=6, steps=40)
    assert model.done["append"] > 20
    assert model.low > 1, "nothing was retired: the test does not drive what it should"
    assert model.scheduled, "the follower saw no segment"


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(8))
def test_long_killed_at_random_against_a_model(tmp_path: Path, nursery: Nursery, seed: int) -> None:
    model = lives(tmp_path, nursery, seed=1_000 + seed, deaths=10, steps=100)
    wanted = {*MOVES, "append", "seal", "sync", "keep", "tick", "arm", "retain", "consume", "snapshot", "switch"}
    assert wanted <= model.done.keys()
    assert model.low > 1
