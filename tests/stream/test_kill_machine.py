"""Real processes that run random commands on a stream and are killed at random, compared with a model and with a
follower.

After each kill, and at the end: every record that was acknowledged and not retired is read once, in order, from
whatever tier;
an append in progress is there completely or not at all; retired records do not reappear, and only retired ones are
missing;
the state rebuilt from the log equals the live one and LMDB, and so does that of a follower that reads only tier 2
throughout.
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
from tests.fork_server import Child, ForkServer
from tests.stream.command_child import size_of
from tests.stream.logs import same_state
from tests.stream.stream_killed import open_at
from tests.stream.streams import record
from tests.stream.test_mlog_kill import POINTS as LOG_POINTS
from tests.stream.test_stream_kill import POINTS

EVERY_POINT = sorted({*POINTS, *LOG_POINTS} - {"stream.recovery.sealed", "stream.recovery.swept"})
MOVES = ("compress", "upload", "upload", "evict", "evict", "evict_warm", "hydrate", "retire")


@pytest.fixture(scope="module")
def fork_server() -> Iterator[ForkServer]:
    with ForkServer("tests.stream.command_child:run", warm_up="tests.stream.stream_killed:warm_up") as fork_server:
        yield fork_server


class Model:
    """The records that were promised, and a follower."""

    def __init__(self, base: Path, fork_server: ForkServer, seed: int) -> None:
        self.base = base
        self.fork_server = fork_server
        self.rng = random.Random(seed)
        self.acknowledged = 1
        """Every record below was acknowledged."""
        self.low = 1
        """Every record below was retired."""
        self.may_retire = False
        """Whether a command that may retire was sent since `low` was last reported."""
        self.ends = {1}
        """Ends of appends: where a recovered stream may end."""
        self.deaths = 0
        self.command_counts: Counter[str] = Counter()
        self.follower: LogFollower | None = None
        self.prefixes: tuple[str, ...] = ()
        """The prefixes of the log's objects, as every process reports them."""
        self.scheduled: set[int] = set()
        self.objects = open_store(str(base / "store" / "objects"))

    def close(self) -> None:
        self.objects.close()

    # ── a process ─────────────────────────────────────────────────────────────────────────────────────────────────────
    def run_process(self, steps: int) -> None:
        """Run one process with `steps` commands, and kill it before the end or let it end."""
        with self.fork_server.spawn() as child:
            child.channel.send(json.dumps({"base": str(self.base)}).encode())
            state = self._receive_state(child)
            assert state is not None, self.fork_server.errors()
            kill_at = self.rng.randrange(steps * 2)
            for number in range(steps):
                command = self._random_command()
                self.command_counts[command["do"]] += 1
                self._note_command(command, state)
                child.channel.send(json.dumps(command).encode())
                if number == kill_at:
                    child.kill()  # while it executes the command
                next_state = self._receive_state(child)
                if next_state is None:
                    break
                state = next_state
                if self.rng.random() < 0.1:
                    self._poll()
            else:
                child.channel.send(b'{"do": "end"}')
                while self._receive_state(child) is not None:
                    pass
            status = child.wait()
        assert status in (0, -signal.SIGKILL), self.fork_server.errors()
        self.deaths += status != 0

    def _receive_state(self, child: Child) -> dict[str, Any] | None:
        message = child.channel.receive()
        if message is None:
            return None
        state: dict[str, Any] = json.loads(message)
        assert state["end"] >= self.acknowledged
        assert state["first"] >= self.low
        assert self.may_retire or state["first"] == self.low, "records are missing that were not retired"
        self.acknowledged, self.low, self.may_retire = state["end"], state["first"], False
        self.ends.add(state["next"])
        assert self.prefixes in ((), tuple(state["prefixes"])), "another process uses other prefixes"
        self.prefixes = tuple(state["prefixes"])
        return state

    def _random_command(self) -> dict[str, Any]:
        rng, kind = self.rng, self.rng.random()
        if kind < 0.4:
            return {
                "do": "append",
                "count": rng.randint(1, 40),
                "together": rng.random() < 0.5,
                "wait": rng.random() < 0.7,
            }
        if kind < 0.5:
            return {"do": rng.choice(("seal", "seal", "sync", "keep"))}
        if kind < 0.7:
            return {"do": rng.choice(MOVES), "which": rng.randrange(100)}
        if kind < 0.82:
            return {"do": "tick"}
        if kind < 0.88:
            return {"do": "arm", "failpoints": f"{rng.choice(EVERY_POINT)}={rng.randint(0, 6)}*off->kill"}
        if kind < 0.92:
            return {"do": "retain", "bytes": rng.choice((0, 20_000, 60_000)), "consumed": rng.random() < 0.2}
        if kind < 0.95:
            return {"do": "consume", "percent": rng.randint(0, 100)}
        if kind < 0.98:
            return {"do": "snapshot"}
        return {"do": "switch", "mode": rng.choice(("on", "on", "shadow", "off"))}

    def _note_command(self, command: dict[str, Any], state: dict[str, Any]) -> None:
        if command["do"] in ("retire", "tick"):
            self.may_retire = True
        if command["do"] == "append":
            first, count = state["next"], command["count"]
            self.ends |= {first + count} if command["together"] else set(range(first + 1, first + count + 1))

    # ── invariants ────────────────────────────────────────────────────────────────────────────────────────────────────
    def check(self) -> None:
        """Open the stream and check everything."""
        with open_at(self.base) as store:
            stream = store.stream("clicks", create=True)
            first, end = stream.first_record, stream.end_record
            assert end >= self.acknowledged, "an acknowledged record is lost"
            assert end in self.ends, "an append is there in part"
            assert first >= self.low, "a retired record reappeared"
            assert self.may_retire or first == self.low, "records are missing that were not retired"
            self.acknowledged, self.low, self.may_retire, self.ends = end, first, False, {end}
            records = list(stream.read())
            assert [record.id for record in records] == list(range(first, end))
            assert all(entry.payload == record(entry.id, size_of(entry.id)) for entry in records)
            assert [problem for problem in problems(stream) if not problem.leak] == []
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
        assert same_state(follower.index, log.index), "the follower has another state"

    def _poll(self) -> LogFollower:
        """Poll the follower; at random as a new process on its old mirror."""
        if self.follower is None or self.rng.random() < 0.2:
            mirror = LogFiles(OsDisk(), str(self.base / "mirror"), 1)
            self.follower = LogFollower(LogObjects(self.objects, 1, self.prefixes), mirror, scheduled=self.scheduled)
        new = [hydration.segment_id for hydration in self.follower.poll().hydrations]
        assert not self.scheduled & set(new), "a hydration is scheduled twice"
        assert len(set(new)) == len(new)
        self.scheduled |= set(new)
        return self.follower


def run_until_killed(base: Path, fork_server: ForkServer, *, seed: int, deaths: int, steps: int) -> Model:
    """Run processes until SIGKILL has ended `deaths` of them."""
    model = Model(base, fork_server, seed)
    try:
        while model.deaths < deaths:
            model.run_process(steps)
            model.check()
    finally:
        model.close()
    return model


def test_every_failpoint_has_a_test_that_kills_there() -> None:
    source_dir = Path(__file__).parents[2] / "src/quire/stream"
    failpoints = {
        name for path in source_dir.glob("*.py") for name in re.findall(r'hit\("([^"]+)"\)', path.read_text("utf-8"))
    }
    batches = {"stream.batch.announced", "stream.batch.appended"}  # tests/service/test_killed_batches.py
    readers = {"stream.reader.rows_read"}  # a process that only reads leaves nothing behind
    assert failpoints == {*POINTS, *LOG_POINTS, *batches, *readers}


def test_killed_at_random_against_a_model(tmp_path: Path, fork_server: ForkServer) -> None:
    model = run_until_killed(tmp_path, fork_server, seed=7, deaths=6, steps=40)
    assert model.command_counts["append"] > 20
    assert model.low > 1, "nothing was retired: the test does not cover retention"
    assert model.scheduled, "the follower saw no segment"


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(8))
def test_long_killed_at_random_against_a_model(tmp_path: Path, fork_server: ForkServer, seed: int) -> None:
    model = run_until_killed(tmp_path, fork_server, seed=1_000 + seed, deaths=10, steps=100)
    expected = {*MOVES, "append", "seal", "sync", "keep", "tick", "arm", "retain", "consume", "snapshot", "switch"}
    assert expected <= model.command_counts.keys()
    assert model.low > 1
