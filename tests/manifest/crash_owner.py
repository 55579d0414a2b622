"""The owner of a manifest in the crash machine: runs in a child process, does what it is told, and is killed for it.

It answers in the order in which it was asked, and a batch only when its guard has resolved: what is answered is
acknowledged. Messages are pickles; both ends are this file.
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
from tests.manifest.batches import outcome
from tests.manifest.crash_plants import PLANTS
from tests.nursery import Line

POINTS = ("manifest.commit.applied", "manifest.commit.flushed", "manifest.commit.durable")
WITHIN = "within"
"""Not a point: while LMDB itself writes and syncs, a moment after `manifest.commit.flushed`."""

DAWDLE_SECONDS = 0.002
"""How long a commit waits at its last point: an answer given too early gets out."""

EPOCH_MS = 1_750_000_000_000


# ── what it is told ───────────────────────────────────────────────────────────────────────────────────────────────────
@dataclass(frozen=True, slots=True)
class Open:
    """First of all."""

    path: str
    now_ms: int
    """The time in this life: it stands, so that rows can be predicted to the byte."""
    settings: ManifestSettings
    plant: str = ""


@dataclass(frozen=True, slots=True)
class Request:
    """A batch, or a call of a method that hands something out."""

    number: int
    ops: tuple[Op, ...] = ()
    key: bytes | None = None
    call: str = ""
    arguments: tuple[Any, ...] = ()


@dataclass(frozen=True, slots=True)
class Arm:
    """Die at a point, after it was passed so many times."""

    point: str
    passes: int
    delay_us: int
    """For `WITHIN`: how long after the point."""


@dataclass(frozen=True, slots=True)
class Rush:
    """Several threads at once submit batches that say who they are; see `marked`."""

    home: int
    first: int
    threads: int
    batches: int


@dataclass(frozen=True, slots=True)
class Close:
    """Close the manifest and end."""


# ── what it says ──────────────────────────────────────────────────────────────────────────────────────────────────────
@dataclass(frozen=True, slots=True)
class Answer:
    """What became of a request."""

    number: int
    receipt: Receipt | None = None
    value: int = 0
    error: QuireError | None = None

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Answer) and self.facts() == other.facts()

    def facts(self) -> tuple[object, ...]:
        receipt = self.receipt
        told = receipt and (receipt.sequence, receipt.committed_at_ms, receipt.generations, receipt.repeated)
        return (self.number, told, self.value, type(self.error), str(self.error))


def perform(manifest: ManifestStore, request: Request) -> Answer:
    """Do what a request says, and wait for it. The model does the same to its own manifest."""
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


def marked(home: int, number: int) -> tuple[Op, ...]:
    """A batch whose rows, logged and local, say its number and how many they are."""
    rows = 1 + number % 5
    chunk = ChunkRecord(Residency.LOCAL, size_bytes=number, created_at_ms=0, page_count=rows)
    return (
        *(PutChunk(home, number, row, chunk) for row in range(1, rows + 1)),
        *([RecordMetric(number, rows, [1.0])] if number % 2 else ()),
    )


class Owner:
    """A manifest, and a thread that answers when guards resolve."""

    def __init__(self, line: Line, told: Open) -> None:
        self._line = line
        self._armed = ExitStack()
        self._unanswered: SimpleQueue[tuple[int, ManifestGuard] | Answer | None] = SimpleQueue()
        self._manifest = ManifestStore.open(told.path, settings=told.settings, clock=ManualClock(told.now_ms))
        self._answering = threading.Thread(target=self._answer, name="answering", daemon=True)
        self._answering.start()
        self._say(Answer(0))

    def _say(self, answer: Answer) -> None:
        self._line.send(pickle.dumps(answer))

    def _answer(self) -> None:
        while (item := self._unanswered.get()) is not None:
            self._say(item if isinstance(item, Answer) else self._await(*item))

    def _await(self, number: int, guard: ManifestGuard) -> Answer:
        result = outcome(guard)
        return Answer(number, result) if isinstance(result, Receipt) else Answer(number, error=result)

    def obey(self, told: Any) -> bool:
        """Whether to go on."""
        match told:
            case Request(number=number, ops=ops, key=key, call=""):
                try:
                    self._unanswered.put((number, self._manifest.submit(ops, key=key)))
                except QuireError as error:
                    self._unanswered.put(Answer(number, error=error))
            case Request(number=number, call="copy", arguments=(path,)):
                self._manifest.env.copy(path)
                self._unanswered.put(Answer(number))
            case Request():
                self._unanswered.put(perform(self._manifest, told))
            case Arm(point=point, passes=passes, delay_us=delay_us):
                self._arm(point, passes, delay_us / 1e6)
            case Rush():
                self._rush(told)
            case Close():
                self._manifest.close()
                self._unanswered.put(None)
                self._answering.join()
                return False
        return True

    def _arm(self, point: str, passes: int, delay: float) -> None:
        left = passes

        def pass_or_die(_name: str) -> None:
            nonlocal left
            left -= 1
            if left >= 0:
                time.sleep(DAWDLE_SECONDS / 2)  # batches queue up behind a slow commit: groups
            elif point != WITHIN:
                _die(DAWDLE_SECONDS)
            elif left == -1:
                threading.Thread(target=_die, args=(delay,), daemon=True).start()

        self._armed.close()
        self._armed.enter_context(armed(POINTS[1] if point == WITHIN else point, pass_or_die))

    def _rush(self, told: Rush) -> None:
        def produce(thread: int) -> None:
            first = told.first + thread * told.batches
            waiting: list[tuple[int, ManifestGuard]] = []
            for number in range(first, first + told.batches):
                waiting.append((number, self._manifest.submit(marked(told.home, number))))
                if number % 3 == 0 or number == first + told.batches - 1:  # some wait for each other, some run ahead
                    for item in waiting:
                        self._say(self._await(*item))
                    waiting.clear()

        threads = [threading.Thread(target=produce, args=(n,)) for n in range(told.threads)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()


def _die(after: float) -> None:
    time.sleep(after)
    os.kill(os.getpid(), signal.SIGKILL)


def warm_up() -> None:
    """Opening a manifest imports a hundred modules: once is enough."""
    with tempfile.TemporaryDirectory() as directory, ManifestStore.open(directory + "/manifest.lmdb") as manifest:
        perform(manifest, Request(1, marked(1, 1)))


def main(line: Line) -> None:
    """The life of an owner."""
    opening = line.receive()
    if opening is None:
        return
    told: Open = pickle.loads(opening)
    if told.plant:
        PLANTS[told.plant]()
    owner = Owner(line, told)
    while (message := line.receive()) is not None and owner.obey(pickle.loads(message)):
        pass
