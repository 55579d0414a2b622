"""The owner of a manifest in the crash machine: runs in a child process, executes commands, and gets killed.

It answers in the order of the requests, and answers a batch only when its guard has resolved: an answered batch is
acknowledged. Messages are pickles; both sides use this module.
"""

from __future__ import annotations

import os
import pickle
import signal
import tempfile
import threading
import time
from contextlib import ExitStack
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any

from quire.core.errors import QuireError
from quire.core.settings import ManifestSettings
from quire.durable.failpoints import armed
from quire.manifest.guard import ManifestGuard, Receipt
from quire.manifest.ops.artifacts import PutChunk
from quire.manifest.ops.base import Op
from quire.manifest.ops.local import RecordMetric
from quire.manifest.records import ChunkRecord, DbKind, Residency
from quire.manifest.store import ManifestStore
from quire.testing.clock import ManualClock
from tests.fork_server import Channel
from tests.manifest.batches import outcome
from tests.manifest.crash_faults import FAULTS

POINTS = ("manifest.commit.applied", "manifest.commit.flushed", "manifest.commit.durable")
WITHIN = "within"
"""Not a failpoint: while LMDB itself writes and syncs, shortly after `manifest.commit.flushed`."""

DELAY_SECONDS = 0.002
"""How long a commit waits at its last failpoint, so that an answer that is given too early is received."""

EPOCH_MS = 1_750_000_000_000


# ── commands ──────────────────────────────────────────────────────────────────────────────────────────────────────────
@dataclass(frozen=True, slots=True)
class Open:
    """Open the manifest; the first command."""

    path: str
    now_ms: int
    """The time during this life. It does not advance, so that rows can be predicted exactly."""
    settings: ManifestSettings
    fault: str = ""


@dataclass(frozen=True, slots=True)
class Request:
    """Submit a batch, or call a method that returns an id or changes a cursor."""

    number: int
    ops: tuple[Op, ...] = ()
    key: bytes | None = None
    call: str = ""
    arguments: tuple[Any, ...] = ()


@dataclass(frozen=True, slots=True)
class Arm:
    """Die at a failpoint after it was passed `passes` times."""

    point: str
    passes: int
    delay_us: int
    """For `WITHIN`: how long after the failpoint."""


@dataclass(frozen=True, slots=True)
class Burst:
    """Submit batches from several threads at once; each batch contains its number, see `marked`."""

    home_db_id: int
    first: int
    threads: int
    batches: int


@dataclass(frozen=True, slots=True)
class Close:
    """Close the manifest and end."""


# ── answers ───────────────────────────────────────────────────────────────────────────────────────────────────────────
@dataclass(frozen=True, slots=True)
class Answer:
    """The result of a request."""

    number: int
    receipt: Receipt | None = None
    value: int = 0
    error: QuireError | None = None

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Answer) and self.facts() == other.facts()

    def facts(self) -> tuple[object, ...]:
        receipt = self.receipt
        result = receipt and (receipt.sequence, receipt.committed_at_ms, receipt.generations, receipt.repeated)
        return (self.number, result, self.value, type(self.error), str(self.error))


def perform(manifest: ManifestStore, request: Request) -> Answer:
    """Execute a request and wait for it. The model does the same with its own manifest."""
    number = request.number
    try:
        match request.call, request.arguments:
            case "", _:
                return Answer(number, manifest.submit(request.ops, key=request.key).result(60))
            case "register_db", (name,):
                return Answer(number, value=manifest.register_db(name, DbKind.PAGES))
            case "reserve_db_id", ():
                return Answer(number, value=manifest.reserve_db_id())
            case "reserve_job_id", ():
                return Answer(number, value=manifest.reserve_job_id())
            case "reserve_generation", (db_id,):
                return Answer(number, value=manifest.reserve_generation(db_id))
            case "register_cursor", (name,):
                return Answer(number, value=manifest.feed.register(name=name).cursor_id)
            case "acknowledge", (cursor, upto):
                manifest.feed.acknowledge(cursor, upto)
                return Answer(number)
            case "drop_cursor", (cursor,):
                manifest.feed.drop(cursor)
                return Answer(number)
            case call, _:
                raise AssertionError(f"no such call: {call}")
    except QuireError as error:
        return Answer(number, error=error)


def marked(home_db_id: int, number: int) -> tuple[Op, ...]:
    """A batch whose rows, logged and local, contain its number and their count."""
    rows = 1 + number % 5
    chunk = ChunkRecord(Residency.LOCAL, size_bytes=number, created_at_ms=0, page_count=rows)
    return (
        *(PutChunk(home_db_id, number, row, chunk) for row in range(1, rows + 1)),
        *([RecordMetric(number, rows, [1.0])] if number % 2 else ()),
    )


class Owner:
    """A manifest, and a thread that sends an answer when a guard resolves."""

    def __init__(self, channel: Channel, command: Open) -> None:
        self._line = channel
        self._armed = ExitStack()
        self._unanswered: SimpleQueue[tuple[int, ManifestGuard] | Answer | None] = SimpleQueue()
        self._manifest = ManifestStore.open(command.path, settings=command.settings, clock=ManualClock(command.now_ms))
        self._answer_thread = threading.Thread(target=self._send_answers, name="answering", daemon=True)
        self._answer_thread.start()
        self._send(Answer(0))

    def _send(self, answer: Answer) -> None:
        self._line.send(pickle.dumps(answer))

    def _send_answers(self) -> None:
        while (item := self._unanswered.get()) is not None:
            self._send(item if isinstance(item, Answer) else self._answer_of(*item))

    def _answer_of(self, number: int, guard: ManifestGuard) -> Answer:
        result = outcome(guard)
        return Answer(number, result) if isinstance(result, Receipt) else Answer(number, error=result)

    def execute(self, command: Any) -> bool:
        """Execute a command; False if it was the last."""
        match command:
            case Request(number=number, ops=ops, key=key, call=""):
                try:
                    self._unanswered.put((number, self._manifest.submit(ops, key=key)))
                except QuireError as error:
                    self._unanswered.put(Answer(number, error=error))
            case Request(number=number, call="copy", arguments=(path,)):
                self._manifest.env.copy(path)
                self._unanswered.put(Answer(number))
            case Request():
                self._unanswered.put(perform(self._manifest, command))
            case Arm(point=point, passes=passes, delay_us=delay_us):
                self._arm(point, passes, delay_us / 1e6)
            case Burst():
                self._run_burst(command)
            case Close():
                self._manifest.close()
                self._unanswered.put(None)
                self._answer_thread.join()
                return False
        return True

    def _arm(self, point: str, passes: int, delay: float) -> None:
        remaining = passes

        def pass_or_die(_name: str) -> None:
            nonlocal remaining
            remaining -= 1
            if remaining >= 0:
                time.sleep(DELAY_SECONDS / 2)  # batches queue up behind a slow commit and form groups
            elif point != WITHIN:
                _die(DELAY_SECONDS)
            elif remaining == -1:
                threading.Thread(target=_die, args=(delay,), daemon=True).start()

        self._armed.close()
        self._armed.enter_context(armed(POINTS[1] if point == WITHIN else point, pass_or_die))

    def _run_burst(self, command: Burst) -> None:
        def produce(thread: int) -> None:
            first = command.first + thread * command.batches
            pending: list[tuple[int, ManifestGuard]] = []
            for number in range(first, first + command.batches):
                pending.append((number, self._manifest.submit(marked(command.home_db_id, number))))
                if number % 3 == 0 or number == first + command.batches - 1:  # some wait, some are pipelined
                    for item in pending:
                        self._send(self._answer_of(*item))
                    pending.clear()

        threads = [threading.Thread(target=produce, args=(n,)) for n in range(command.threads)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()


def _die(after: float) -> None:
    time.sleep(after)
    os.kill(os.getpid(), signal.SIGKILL)


def warm_up() -> None:
    """Import everything that opening a manifest imports, before children are forked."""
    with tempfile.TemporaryDirectory() as directory, ManifestStore.open(directory + "/manifest.lmdb") as manifest:
        perform(manifest, Request(1, marked(1, 1)))


def main(channel: Channel) -> None:
    """One life of an owner."""
    opening = channel.receive()
    if opening is None:
        return
    command: Open = pickle.loads(opening)
    if command.fault:
        FAULTS[command.fault]()
    owner = Owner(channel, command)
    while (message := channel.receive()) is not None and owner.execute(pickle.loads(message)):
        pass
