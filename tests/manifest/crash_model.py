"""What must be true of a manifest whose owner is killed again and again, and the handle through which it is killed.

Terms
  life       the time from one owner process to the next; each ends by SIGKILL or by a clean close
  twin       a manifest in this process that was never killed: every batch whose fate is known was applied to it, one by one
  replica    an environment that began empty and follows the change feed, page by page, as a subscriber would
  outlook    this process's read-only view of the owner's manifest: it plans batches on it and looks what a crash left
  lost       requests of the life that has ended that were not answered

What holds after each life
  1. Everything that was answered is there, and its change record has exactly the operations that were submitted.
  2. Of the lost requests of one producer the first so many are there, whole, and the others not at all: every table is
     byte for byte that of the twin after some prefix of them.
  3. Ids and sequences that were handed out are above all that were handed out before.
  4. `check` finds nothing, and the replica, fed with the rest of the change log, has the same logged tables (M2).
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
from tests.manifest.batches import HOLDER, BatchMaker
from tests.manifest.crash_outlook import Outlook, rows_of
from tests.manifest.crash_owner import EPOCH_MS, Answer, Arm, Close, Open, Request, Rush, marked, perform
from tests.nursery import Child, Nursery

OPENING, CLOSING, COPYING, IDLE, BUSY = "opening", "closing", "copying", "between commits", "at any moment"
HOME = "home"
"""The database of marked batches; its name is none that `BatchMaker` uses."""

COUNTERS = {"register_db": "db", "reserve_db_id": "db", "reserve_job_id": "job", "register_cursor": "cursor"}

SEEN: Counter[str] = Counter()
"""What has happened in this process so far: how owners died, what became of lost requests, how many batches there were."""


class CrashModel:
    """One manifest, its owners, and what is known about it. No method depends on whether the owner is still alive."""

    def __init__(self, nursery: Nursery, settings: ManifestSettings, *, plant: str = "", deadly: bool = True) -> None:
        self.sound = True
        self._nursery, self._settings, self._plant, self._deadly = nursery, settings, plant, deadly
        self._directory = tempfile.mkdtemp()
        self.path = os.path.join(self._directory, "manifest.lmdb")
        self._child: Child | None = None
        self._opened = False
        self.outlook = Outlook(self.path)
        self._armed = self._cause = ""
        self._life = 0
        self._story: list[str] = []
        self._errors_before = len(nursery.errors())
        self._numbers = 0
        self._asked: list[Request] = []
        self._rush: Rush | None = None
        self._rushed: dict[int, Answer] = {}
        self._acknowledged: dict[int, tuple[Op, ...]] = {}
        self._handed_out: dict[str, int] = {}
        self._keyed: dict[bytes, tuple[Op, ...]] = {}
        self._twin = self._new_twin()
        self._replica = ManifestEnv(os.path.join(self._directory, "replica.lmdb"), ManifestSettings(), write=True)
        migrate(self._replica, ManualClock())
        self.home = 0

    def begin(self) -> None:
        """The first life."""
        if self._child is None:
            self._live()
        self.call("register_cursor", HOLDER)
        self.call("register_db", HOME)
        self.home = self._handed_out["db"]

    def _new_twin(self) -> ManifestStore:
        clock = ManualClock(EPOCH_MS + 1000 * self._life)
        return ManifestStore.open(os.path.join(self._directory, "twin.lmdb"), settings=self._settings, clock=clock)

    # ── the owner's life ──────────────────────────────────────────────────────────────────────────────────────────────
    def _spawn(self) -> Child:
        assert self._child is None
        self._child = self._nursery.spawn()
        self._tell(Open(self.path, EPOCH_MS + 1000 * (self._life + 1), self._settings, self._plant))
        return self._child

    def _live(self) -> None:
        """Have a new owner open the manifest, and look at what the last one left."""
        child = self._spawn()
        self.require(child.line.receive() is not None, "the manifest does not open")
        self._opened = True
        self._life += 1
        self._verify()
        self._twin.close()
        self._twin = self._new_twin()

    def _tell(self, what: object) -> None:
        assert self._child is not None
        self._child.line.send(pickle.dumps(what))

    def _hear(self) -> Answer | None:
        """The owner's next answer; `None` if it has died."""
        assert self._child is not None
        message = self._child.line.receive()
        return None if message is None else pickle.loads(message)

    def _bury(self, cause: str = "", *, closed: bool = False) -> None:
        """The owner is dead or dying: hear its last words. Without a cause it must be the point that was armed."""
        assert self._child is not None
        while (answer := self._hear()) is not None:
            if self._opened:
                self._learn(answer)
        status = self._child.wait()
        self._child.line.close()
        self._child, self._opened = None, False
        self._cause, self._armed = cause or self._armed, ""
        if status == 0 and closed:
            self.require(not self._asked, "closing left requests unanswered")
            self._seen("closed")
        else:
            self.require(status == -signal.SIGKILL and self._cause != "", f"the owner ended with {status}")
            self._seen(f"killed {self._cause}, {'with' if self.outlook.is_open else 'without'} a reader")

    def _seen(self, what: str) -> None:
        SEEN[what] += 1
        self._story.append(f"life {self._life}: {what}")
        if currently_in_test_context():
            event(what)

    def kill(self, cause: str, delay_us: int = 0) -> None:
        """SIGKILL, a moment from now; then a new life."""
        assert self._child is not None
        if not self._deadly:
            if self._opened:
                self.close()
            return
        self.outlook.step_back()
        time.sleep(delay_us / 1e6)
        self._child.kill()
        self._bury(cause, closed=cause == CLOSING)  # it may have been quicker
        self._live()

    def kill_while_opening(self, delay_us: int) -> None:
        """Two deaths: the second before the new owner has said that it is open."""
        if not self._deadly:
            return
        if self._child is not None:
            self.outlook.step_back()
            self._child.kill()
            self._bury(BUSY)
        self._spawn()
        self.kill(OPENING, delay_us)

    def close(self, kill_after_us: int | None = None) -> None:
        """Close cleanly; or die while closing."""
        self._tell(Close())
        if kill_after_us is not None and self._deadly:
            self.kill(CLOSING, kill_after_us)
            return
        self.outlook.step_back()
        self._bury(closed=True)
        self._live()

    def arm(self, point: str, passes: int, delay_us: int) -> None:
        """Have the owner die at a step of a commit."""
        if self._deadly:
            self.outlook.step_back()
            self._armed = point
            self._tell(Arm(point, passes, delay_us))

    # ── asking ────────────────────────────────────────────────────────────────────────────────────────────────────────
    def plan(self, seed: int, stories: int) -> tuple[Op, ...]:
        """A batch planned on what is committed now."""
        return tuple(BatchMaker(Random(seed), spare={self.home}).batch(self.outlook.look(), stories))

    def submit(self, ops: tuple[Op, ...], key: bytes | None = None) -> None:
        """Submit a batch, and don't wait for it."""
        if key is not None:
            self._keyed[key] = ops
        self._ask(Request(self._next(), ops, key))

    def submit_again(self, key: bytes) -> None:
        """What a caller does that got no answer: the same batch with the same key."""
        if key in self._keyed:
            self.submit(self._keyed[key], key)

    def call(self, name: str, *arguments: Any) -> None:
        """Call a method of the manifest."""
        self.settle()  # these plan on what is committed
        self._ask(Request(self._next(), call=name, arguments=arguments))
        self.settle()

    def _next(self) -> int:
        self._numbers += 1
        return self._numbers

    def _ask(self, request: Request) -> None:
        self._asked.append(request)
        self._tell(request)

    def settle(self) -> bool:
        """Wait for every answer; False if the owner died instead, and a new one lives."""
        while self._asked:
            if (answer := self._hear()) is None:
                self._bury()
                self._live()
                return False
            self._learn(answer)
        return True

    def follow(self, *, acknowledge: bool) -> None:
        """Be a subscriber: apply what is new, then say so."""
        self.settle()
        with self.outlook.look().read() as txn:
            upto = self._replay(txn)
        if acknowledge:
            self.call("acknowledge", HOLDER, upto)

    def rush(self, threads: int, batches: int, kill_after_us: int | None) -> None:
        """Several producers at once."""
        if not self.settle() or not self.home:
            return
        self._rush = Rush(self.home, 1_000_000 + self._numbers * 1000, threads, batches)
        self._numbers += 1
        self._tell(self._rush)
        if kill_after_us is not None and self._deadly:
            self.kill(BUSY, kill_after_us)
            return
        while len(self._rushed) < threads * batches:
            if (answer := self._hear()) is None:
                self._bury()
                self._live()
                return
            self._learn(answer)
        self._resolve_rush()

    def copy(self, *, settled: bool, kill_after_us: int | None) -> None:
        """A hot backup: a manifest in its own right, of some moment between the question and the answer."""
        settled = settled or not self._deadly  # else a copy may show what a crash would
        if settled and not self.settle():
            return
        with self.outlook.look().read() as txn:
            before = txn.feed_bounds()[1]
        path = os.path.join(self._directory, f"copy-{self._next()}.lmdb")
        self._ask(Request(self._numbers, call="copy", arguments=(path,)))
        if kill_after_us is not None and self._deadly:
            self.kill(COPYING, kill_after_us)
        elif self.settle():
            self._verify_copy(path, before, settled)

    # ── learning ──────────────────────────────────────────────────────────────────────────────────────────────────────
    def require(self, holds: bool, what: str) -> None:
        if not holds:
            self._fail(what)

    def _fail(self, what: str) -> NoReturn:
        self.sound = False
        SEEN["broken promises"] += 1
        story, errors = "\n  ".join(self._story[-40:]), self._nursery.errors()[self._errors_before :]
        raise AssertionError(f"life {self._life}: {what}\nThe story until then:\n  {story}\n{errors}")

    def _learn(self, answer: Answer) -> None:
        """An answer: the request is acknowledged, or refused."""
        if self._rush is not None and answer.number >= self._rush.first:
            self._rushed[answer.number] = answer
            return
        self.require(bool(self._asked) and self._asked[0].number == answer.number, f"an answer out of order: {answer}")
        request = self._asked.pop(0)
        expected = self._predict(request)
        self.require(answer == expected, f"{request} was answered with {answer}, expected {expected}")
        self._remember(request, answer)

    def _predict(self, request: Request) -> Answer:
        """Apply a request to the twin."""
        return Answer(request.number) if request.call == "copy" else perform(self._twin, request)

    def _remember(self, request: Request, answer: Answer) -> None:
        if answer.value:
            counter = COUNTERS.get(request.call) or f"generation of {request.arguments[0]}"
            last = self._handed_out.get(counter, 0)
            self.require(answer.value > last, f"{request} gave {answer.value} after {last}")
            self._handed_out[counter] = answer.value
        SEEN["refused" if answer.error else "acknowledged"] += 1
        receipt = answer.receipt
        if receipt is not None and receipt.sequence and not receipt.repeated:
            last = max(self._acknowledged, default=0)
            self.require(receipt.sequence > last, f"sequence {receipt.sequence} was given after {last}")
            self._acknowledged[receipt.sequence] = tuple(op for op in request.ops if op.logged)

    # ── looking ───────────────────────────────────────────────────────────────────────────────────────────────────────
    def _verify(self) -> None:
        """All that holds after each life. The owner is idle."""
        if self._rush is not None:
            self._resolve_rush()
        self._resolve_lost()
        self.require(self.outlook.held_is_unchanged(), "a snapshot has changed under its reader")
        self._verify_one(self.outlook.look())
        with self.outlook.look().read() as txn:
            self._replay(txn)
            for policy in (t.Policy.LOGGED, t.Policy.DERIVED):
                tables = [t.TABLES[n] for n, x in t.TABLES.items() if x.policy is policy and n not in NOT_FROM_THE_FEED]
                with ReadTxn(self._replica) as theirs:
                    differing = [x.name for x in tables if [*txn.raw_scan(x)] != [*theirs.raw_scan(x)]]
                self.require(not differing, f"the replica has other rows in {differing}")

    def _verify_one(self, manifest: ManifestStore, upto: int = 2**63) -> None:
        """Rule 1 for what was acknowledged up to a sequence, and the rules of `check`."""
        with manifest.read() as txn:
            oldest, _ = txn.feed_bounds()
            log = {change.sequence: change.operations for change in txn.changes(oldest)}
        for sequence, ops in self._acknowledged.items():
            if oldest <= sequence <= upto:
                found = log.get(sequence)
                self.require(found == ops, f"change {sequence} was acknowledged with {ops}, found {found}")
        problems = [problem for problem in manifest.check() if not problem.leak]
        self.require(not problems, "; ".join(map(str, problems)))

    def _resolve_lost(self) -> None:
        """Find the prefix of the lost requests that was committed (rule 2)."""
        lost, self._asked = self._asked, []
        actual, differences, committed = rows_of(self.outlook.look()), [], 0
        while changed := difference(rows_of(self._twin), actual):
            differences.append(changed)
            if committed == len(lost):
                closest = min(differences, key=lambda each: sum(map(len, each.values())))
                self.require(
                    False, f"after no prefix of the lost requests {lost} are the tables as they are: {closest}"
                )
            request = lost[committed]
            committed += 1
            self._remember(request, self._predict(request))
        self._seen_lost(committed, len(lost))

    def _seen_lost(self, committed: int, lost: int) -> None:
        if lost:
            part = "all" if committed == lost else "some" if committed else "none"
            self._seen(f"{part} of what was lost {self._cause} had been committed")

    def _resolve_rush(self) -> None:
        """The log says in which order the producers' batches were committed: of each, a prefix."""
        rush, answers = self._rush, self._rushed
        assert rush is not None
        self._rush, self._rushed = None, {}
        ahead = [rush.first + n * rush.batches for n in range(rush.threads)]
        with self._twin.read() as txn:
            head = txn.feed_bounds()[1]
        with self.outlook.look().read() as txn:
            changes = list(txn.changes(head + 1))
        self._seen_lost(len(changes) - len(answers), rush.threads * rush.batches - len(answers))
        for change in changes:
            number = int(getattr(change.operations[0], "chunk_id", 0))
            self.require(number in ahead, f"change {change.sequence} is not the next of its producer")
            ahead[ahead.index(number)] += 1
            request = Request(number, marked(rush.home, number))
            expected = self._predict(request)
            answer = answers.pop(number, expected)
            self.require(answer == expected, f"batch {number} was answered with {answer}, expected {expected}")
            self._remember(request, answer)
        self.require(not answers, f"acknowledged and gone: {answers}")

    def _replay(self, txn: ReadTxn) -> int:
        return replay(txn.changes(txn.feed_bounds()[0]), self._replica)

    def _verify_copy(self, path: str, before: int, settled: bool) -> None:
        try:
            copied = ManifestStore.open(path, settings=self._settings)
        except QuireError as error:
            self._fail(f"the copy does not open: {error}")
        with copied:
            with copied.read() as txn, self.outlook.look().read() as now:
                oldest, head = txn.feed_bounds()
                self.require(before <= head, f"the copy ends at {head}, but {before} had been committed")
                since = max(oldest, now.feed_bounds()[0])
                ours = [change for change in now.changes(since) if change.sequence <= head]
                self.require([*txn.changes(since)] == ours, "the copy has another change log")
            self._verify_one(copied, head)
            if settled:
                changed = difference(rows_of(self._twin), rows_of(copied))
                self.require(not changed, f"the copy differs: {changed}")
            if oldest == 1:
                assert_replays(copied)
        os.unlink(path)
        self._seen("copied")

    def end(self) -> None:
        """A clean close; then this process opens the manifest itself and holds it to everything once more."""
        try:
            if self.sound and self._child is not None and self._opened:
                self.outlook.close()
                self._tell(Close())
                self._bury(closed=True)
                self._verify()
                self.outlook.close()
                with ManifestStore.open(self.path, settings=self._settings) as manifest:
                    assert_clean(manifest, leaks=True)
                    if manifest.writer.oldest == 1:  # a trimmed log cannot be replayed from the start
                        assert_replays(manifest)
        finally:
            if self._child is not None:
                self._child.close()
            self.outlook.close()
            self._twin.close()
            self._replica.close()
            shutil.rmtree(self._directory)
