"""What must hold for a manifest whose owner is killed again and again, and the handle through which it is killed.

Terms
  life       the time from one owner process to the next; each ends by SIGKILL or by a clean close
  twin       a manifest in this process that is never killed: every batch whose outcome is known is applied to it, one by one
  replica    an environment that began empty and follows the change feed, page by page, as a subscriber would
  reader     this process's read-only view of the owner's manifest: it plans batches on it and verifies the state after a crash
  lost       requests of the life that has ended that were not answered

What holds after each life
  1. Every acknowledged batch is there, and its change record has exactly the operations that were submitted.
  2. Of the lost requests of one producer a prefix was committed, each completely, and the others not at all: every table
     equals, byte for byte, that of the twin after some prefix of them.
  3. New ids and sequences are higher than all that were returned before.
  4. `check` reports no problem, and the replica, after applying the rest of the change log, has the same logged tables (M2).
  5. A clean close loses nothing.
"""

from __future__ import annotations

import os
import pickle
import shutil
import signal
import tempfile
import time
from collections import Counter
from random import Random
from typing import Any, NoReturn

from hypothesis import currently_in_test_context, event

from quire.core.errors import QuireError
from quire.core.settings import ManifestSettings
from quire.manifest import tables as t
from quire.manifest.env import ManifestEnv
from quire.manifest.migrations import migrate
from quire.manifest.ops.base import Op
from quire.manifest.reads import ReadTxn
from quire.manifest.replay import replay
from quire.manifest.store import ManifestStore
from quire.testing.clock import ManualClock
from quire.testing.manifest import NOT_FROM_THE_FEED, assert_clean, assert_replays, difference
from tests.fork_server import Child, ForkServer
from tests.manifest.batches import HOLDER, BatchMaker
from tests.manifest.crash_owner import EPOCH_MS, Answer, Arm, Burst, Close, Open, Request, marked, perform
from tests.manifest.crash_reader import ReaderView, rows_of

OPENING, CLOSING, COPYING, IDLE, BUSY = "opening", "closing", "copying", "between commits", "at any moment"
HOME = "home"
"""The database of marked batches; `BatchMaker` does not use its name."""

COUNTERS = {"register_db": "db", "reserve_db_id": "db", "reserve_job_id": "job", "register_cursor": "cursor"}

OUTCOMES: Counter[str] = Counter()
"""Counts of the events in this process: how owners died, which lost requests were committed, how many batches there were."""


class CrashModel:
    """One manifest, its owners, and the expected state. No method depends on whether the owner is still alive."""

    def __init__(
        self, fork_server: ForkServer, settings: ManifestSettings, *, fault: str = "", kills_owners: bool = True
    ) -> None:
        self.is_consistent = True
        self._fork_server, self._settings, self._fault, self._kills_owners = fork_server, settings, fault, kills_owners
        self._directory = tempfile.mkdtemp()
        self.path = os.path.join(self._directory, "manifest.lmdb")
        self._child: Child | None = None
        self._is_open = False
        self.reader = ReaderView(self.path)
        self._armed = self._cause = ""
        self._life = 0
        self._history: list[str] = []
        self._errors_before = len(fork_server.errors())
        self._numbers = 0
        self._unanswered: list[Request] = []
        self._burst: Burst | None = None
        self._burst_answers: dict[int, Answer] = {}
        self._acknowledged: dict[int, tuple[Op, ...]] = {}
        self._last_ids: dict[str, int] = {}
        self._keyed: dict[bytes, tuple[Op, ...]] = {}
        self._twin = self._new_twin()
        self._replica = ManifestEnv(os.path.join(self._directory, "replica.lmdb"), ManifestSettings(), write=True)
        migrate(self._replica, ManualClock())
        self.home_db_id = 0

    def begin(self) -> None:
        """Start the first life."""
        if self._child is None:
            self._start_owner()
        self.call("register_cursor", HOLDER)
        self.call("register_db", HOME)
        self.home_db_id = self._last_ids["db"]

    def _new_twin(self) -> ManifestStore:
        clock = ManualClock(EPOCH_MS + 1000 * self._life)
        return ManifestStore.open(os.path.join(self._directory, "twin.lmdb"), settings=self._settings, clock=clock)

    # ── owners ────────────────────────────────────────────────────────────────────────────────────────────────────────
    def _spawn(self) -> Child:
        assert self._child is None
        self._child = self._fork_server.spawn()
        self._send(Open(self.path, EPOCH_MS + 1000 * (self._life + 1), self._settings, self._fault))
        return self._child

    def _start_owner(self) -> None:
        """Have a new owner open the manifest, and verify what the last one left."""
        child = self._spawn()
        self.require(child.channel.receive() is not None, "the manifest cannot be opened")
        self._is_open = True
        self._life += 1
        self._verify()
        self._twin.close()
        self._twin = self._new_twin()

    def _send(self, command: object) -> None:
        assert self._child is not None
        self._child.channel.send(pickle.dumps(command))

    def _receive(self) -> Answer | None:
        """The owner's next answer; `None` if it has died."""
        assert self._child is not None
        message = self._child.channel.receive()
        return None if message is None else pickle.loads(message)

    def _reap(self, cause: str = "", *, closed: bool = False) -> None:
        """Read the remaining answers of an owner that is dead or dying. Without a cause, it must have died at the armed
        failpoint."""
        assert self._child is not None
        while (answer := self._receive()) is not None:
            if self._is_open:
                self._process(answer)
        status = self._child.wait()
        self._child.channel.close()
        self._child, self._is_open = None, False
        self._cause, self._armed = cause or self._armed, ""
        if status == 0 and closed:
            self.require(not self._unanswered, "closing left requests unanswered")
            self._record("closed")
        else:
            self.require(status == -signal.SIGKILL and self._cause != "", f"the owner ended with {status}")
            self._record(f"killed {self._cause}, {'with' if self.reader.is_open else 'without'} a reader")

    def _record(self, outcome: str) -> None:
        OUTCOMES[outcome] += 1
        self._history.append(f"life {self._life}: {outcome}")
        if currently_in_test_context():
            event(outcome)

    def kill(self, cause: str, delay_us: int = 0) -> None:
        """Send SIGKILL after a delay, then start a new life."""
        assert self._child is not None
        if not self._kills_owners:
            if self._is_open:
                self.close()
            return
        self.reader.prepare_for_kill()
        time.sleep(delay_us / 1e6)
        self._child.kill()
        self._reap(cause, closed=cause == CLOSING)  # it may have closed before
        self._start_owner()

    def kill_while_opening(self, delay_us: int) -> None:
        """Kill the owner, and then its successor before that has reported that the manifest is open."""
        if not self._kills_owners:
            return
        if self._child is not None:
            self.reader.prepare_for_kill()
            self._child.kill()
            self._reap(BUSY)
        self._spawn()
        self.kill(OPENING, delay_us)

    def close(self, kill_after_us: int | None = None) -> None:
        """Close cleanly, or kill the owner while it closes."""
        self._send(Close())
        if kill_after_us is not None and self._kills_owners:
            self.kill(CLOSING, kill_after_us)
            return
        self.reader.prepare_for_kill()
        self._reap(closed=True)
        self._start_owner()

    def arm(self, point: str, passes: int, delay_us: int) -> None:
        """Have the owner die at a step of a commit."""
        if self._kills_owners:
            self.reader.prepare_for_kill()
            self._armed = point
            self._send(Arm(point, passes, delay_us))

    # ── requests ──────────────────────────────────────────────────────────────────────────────────────────────────────
    def plan(self, seed: int, stories: int) -> tuple[Op, ...]:
        """A batch planned on the committed state."""
        return tuple(BatchMaker(Random(seed), spare={self.home_db_id}).batch(self.reader.manifest(), stories))

    def submit(self, ops: tuple[Op, ...], key: bytes | None = None) -> None:
        """Submit a batch without waiting for it."""
        if key is not None:
            self._keyed[key] = ops
        self._request(Request(self._next(), ops, key))

    def submit_again(self, key: bytes) -> None:
        """Submit the same batch with the same key again, as a caller does that got no answer."""
        if key in self._keyed:
            self.submit(self._keyed[key], key)

    def call(self, name: str, *arguments: Any) -> None:
        """Call a method of the manifest."""
        self.settle()  # the method plans on the committed state
        self._request(Request(self._next(), call=name, arguments=arguments))
        self.settle()

    def _next(self) -> int:
        self._numbers += 1
        return self._numbers

    def _request(self, request: Request) -> None:
        self._unanswered.append(request)
        self._send(request)

    def settle(self) -> bool:
        """Wait for every answer; False if the owner died first and a new one was started."""
        while self._unanswered:
            if (answer := self._receive()) is None:
                self._reap()
                self._start_owner()
                return False
            self._process(answer)
        return True

    def follow(self, *, acknowledge: bool) -> None:
        """Act as a subscriber: apply new changes, then acknowledge them."""
        self.settle()
        with self.reader.manifest().read() as txn:
            upto = self._replay(txn)
        if acknowledge:
            self.call("acknowledge", HOLDER, upto)

    def burst(self, threads: int, batches: int, kill_after_us: int | None) -> None:
        """Have several producers submit batches at once."""
        if not self.settle() or not self.home_db_id:
            return
        self._burst = Burst(self.home_db_id, 1_000_000 + self._numbers * 1000, threads, batches)
        self._numbers += 1
        self._send(self._burst)
        if kill_after_us is not None and self._kills_owners:
            self.kill(BUSY, kill_after_us)
            return
        while len(self._burst_answers) < threads * batches:
            if (answer := self._receive()) is None:
                self._reap()
                self._start_owner()
                return
            self._process(answer)
        self._resolve_burst()

    def copy(self, *, settled: bool, kill_after_us: int | None) -> None:
        """Make a hot backup: a separate manifest, of some point in time between the request and the answer."""
        settled = settled or not self._kills_owners  # otherwise a copy may show what a crash would show
        if settled and not self.settle():
            return
        with self.reader.manifest().read() as txn:
            before = txn.feed_bounds()[1]
        path = os.path.join(self._directory, f"copy-{self._next()}.lmdb")
        self._request(Request(self._numbers, call="copy", arguments=(path,)))
        if kill_after_us is not None and self._kills_owners:
            self.kill(COPYING, kill_after_us)
        elif self.settle():
            self._verify_copy(path, before, settled)

    # ── answers ───────────────────────────────────────────────────────────────────────────────────────────────────────
    def require(self, condition: bool, problem: str) -> None:
        if not condition:
            self._fail(problem)

    def _fail(self, problem: str) -> NoReturn:
        self.is_consistent = False
        OUTCOMES["broken promises"] += 1
        history, errors = "\n  ".join(self._history[-40:]), self._fork_server.errors()[self._errors_before :]
        raise AssertionError(f"life {self._life}: {problem}\nHistory:\n  {history}\n{errors}")

    def _process(self, answer: Answer) -> None:
        """Process an answer: the request is acknowledged or rejected."""
        if self._burst is not None and answer.number >= self._burst.first:
            self._burst_answers[answer.number] = answer
            return
        self.require(
            bool(self._unanswered) and self._unanswered[0].number == answer.number, f"an answer out of order: {answer}"
        )
        request = self._unanswered.pop(0)
        expected = self._predict(request)
        self.require(answer == expected, f"{request} was answered with {answer}, expected {expected}")
        self._record_answer(request, answer)

    def _predict(self, request: Request) -> Answer:
        """Apply a request to the twin."""
        return Answer(request.number) if request.call == "copy" else perform(self._twin, request)

    def _record_answer(self, request: Request, answer: Answer) -> None:
        if answer.value:
            counter = COUNTERS.get(request.call) or f"generation of {request.arguments[0]}"
            last = self._last_ids.get(counter, 0)
            self.require(answer.value > last, f"{request} returned {answer.value} after {last}")
            self._last_ids[counter] = answer.value
        OUTCOMES["refused" if answer.error else "acknowledged"] += 1
        receipt = answer.receipt
        if receipt is not None and receipt.sequence and not receipt.repeated:
            last = max(self._acknowledged, default=0)
            self.require(receipt.sequence > last, f"sequence {receipt.sequence} was assigned after {last}")
            self._acknowledged[receipt.sequence] = tuple(op for op in request.ops if op.logged)

    # ── verification ──────────────────────────────────────────────────────────────────────────────────────────────────
    def _verify(self) -> None:
        """Verify everything that holds after each life. The owner is idle."""
        if self._burst is not None:
            self._resolve_burst()
        self._resolve_lost()
        self.require(self.reader.snapshot_is_unchanged(), "an open snapshot has changed")
        self._verify_one(self.reader.manifest())
        with self.reader.manifest().read() as txn:
            self._replay(txn)
            for policy in (t.Policy.LOGGED, t.Policy.DERIVED):
                tables = [t.TABLES[n] for n, x in t.TABLES.items() if x.policy is policy and n not in NOT_FROM_THE_FEED]
                with ReadTxn(self._replica) as replica:
                    differing = [x.name for x in tables if [*txn.raw_scan(x)] != [*replica.raw_scan(x)]]
                self.require(not differing, f"the replica has different rows in {differing}")

    def _verify_one(self, manifest: ManifestStore, upto: int = 2**63) -> None:
        """Verify rule 1 for batches acknowledged up to a sequence, and the rules of `check`."""
        with manifest.read() as txn:
            oldest, _ = txn.feed_bounds()
            log = {change.sequence: change.operations for change in txn.changes(oldest)}
        for sequence, ops in self._acknowledged.items():
            if oldest <= sequence <= upto:
                actual = log.get(sequence)
                self.require(actual == ops, f"change {sequence} was acknowledged with {ops}, found {actual}")
        problems = [problem for problem in manifest.check() if not problem.leak]
        self.require(not problems, "; ".join(map(str, problems)))

    def _resolve_lost(self) -> None:
        """Find the prefix of the lost requests that was committed (rule 2)."""
        lost, self._unanswered = self._unanswered, []
        actual, differences, committed = rows_of(self.reader.manifest()), [], 0
        while changed := difference(rows_of(self._twin), actual):
            differences.append(changed)
            if committed == len(lost):
                closest = min(differences, key=lambda tables: sum(map(len, tables.values())))
                self.require(False, f"no prefix of the lost requests {lost} yields the actual tables: {closest}")
            request = lost[committed]
            committed += 1
            self._record_answer(request, self._predict(request))
        self._record_lost(committed, len(lost))

    def _record_lost(self, committed: int, lost: int) -> None:
        if lost:
            part = "all" if committed == lost else "some" if committed else "none"
            self._record(f"{part} of what was lost {self._cause} had been committed")

    def _resolve_burst(self) -> None:
        """Take the commit order of the producers' batches from the log: a prefix of each producer's batches."""
        burst, answers = self._burst, self._burst_answers
        assert burst is not None
        self._burst, self._burst_answers = None, {}
        next_numbers = [burst.first + n * burst.batches for n in range(burst.threads)]
        with self._twin.read() as txn:
            head = txn.feed_bounds()[1]
        with self.reader.manifest().read() as txn:
            changes = list(txn.changes(head + 1))
        self._record_lost(len(changes) - len(answers), burst.threads * burst.batches - len(answers))
        for change in changes:
            number = int(getattr(change.operations[0], "chunk_id", 0))
            self.require(number in next_numbers, f"change {change.sequence} is not the next of its producer")
            next_numbers[next_numbers.index(number)] += 1
            request = Request(number, marked(burst.home_db_id, number))
            expected = self._predict(request)
            answer = answers.pop(number, expected)
            self.require(answer == expected, f"batch {number} was answered with {answer}, expected {expected}")
            self._record_answer(request, answer)
        self.require(not answers, f"acknowledged but lost: {answers}")

    def _replay(self, txn: ReadTxn) -> int:
        return replay(txn.changes(txn.feed_bounds()[0]), self._replica)

    def _verify_copy(self, path: str, before: int, settled: bool) -> None:
        try:
            copy = ManifestStore.open(path, settings=self._settings)
        except QuireError as error:
            self._fail(f"the copy cannot be opened: {error}")
        with copy:
            with copy.read() as txn, self.reader.manifest().read() as current:
                oldest, head = txn.feed_bounds()
                self.require(before <= head, f"the copy ends at {head}, but {before} had been committed")
                since = max(oldest, current.feed_bounds()[0])
                expected = [change for change in current.changes(since) if change.sequence <= head]
                self.require([*txn.changes(since)] == expected, "the copy has a different change log")
            self._verify_one(copy, head)
            if settled:
                changed = difference(rows_of(self._twin), rows_of(copy))
                self.require(not changed, f"the copy differs: {changed}")
            if oldest == 1:
                assert_replays(copy)
        os.unlink(path)
        self._record("copied")

    def end(self) -> None:
        """Close cleanly, then open the manifest in this process and verify everything once more."""
        try:
            if self.is_consistent and self._child is not None and self._is_open:
                self.reader.close()
                self._send(Close())
                self._reap(closed=True)
                self._verify()
                self.reader.close()
                with ManifestStore.open(self.path, settings=self._settings) as manifest:
                    assert_clean(manifest, leaks=True)
                    if manifest.writer.oldest == 1:  # a trimmed log cannot be replayed from the start
                        assert_replays(manifest)
        finally:
            if self._child is not None:
                self._child.close()
            self.reader.close()
            self._twin.close()
            self._replica.close()
            shutil.rmtree(self._directory)
