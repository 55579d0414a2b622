"""Standbys make themselves known in the bucket, and the owner lets them see that it is alive (A11).

Terms
  registration   `{store_id}/standby/{id}`: a small object that a standby replaces every REFRESH_SECONDS. One that has not
                 changed for FORGET_SECONDS is of a standby that is gone
  heartbeat      a `StandbyEvent` in the log: it names the standbys that the owner knows. It is put when a standby appears, and
                 while any is known, after HEARTBEAT_SECONDS without another change

A standby counts silence only after a heartbeat that names it: an owner that does not know it yet may be idle.

Threads: the watch has one of its own. Raises nothing; what the bucket does not answer is asked again.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import msgspec

from quire.archive.format import Position, StandbyEvent
from quire.archive.queue import EventQueue
from quire.core.errors import QuireError
from quire.durable.object_names import standby_key, standby_prefix
from quire.objects.api import ObjectStore, list_objects

HEARTBEAT_SECONDS = 5.0
"""The owner's log is never silent for much longer than this while a standby follows it."""
LIST_SECONDS = 60.0
FIRST_LIST_SECONDS = 2.0
"""A command that opens the store for a second asks for no standbys."""
REFRESH_SECONDS = 20.0
FORGET_SECONDS = 180.0
TICK_SECONDS = 0.5


class Registration(msgspec.Struct, frozen=True, kw_only=True):
    """What a standby says of itself, for people."""

    format: int = 1
    standby_id: str
    host: str = ""
    pid: int = 0
    position: Position
    at_ms: int
    """The standby's clock."""


def register(store: ObjectStore, store_id: str, registration: Registration) -> None:
    """Make a standby known, or say that it is still there."""
    store.put(standby_key(store_id, registration.standby_id), msgspec.json.encode(registration) + b"\n")


def registrations(store: ObjectStore, store_id: str) -> list[Registration]:
    """The standbys that are or were registered, for people."""
    known = []
    for info in list_objects(store, standby_prefix(store_id)):
        try:
            known.append(msgspec.json.decode(store.get(info.key), type=Registration))
        except (QuireError, msgspec.MsgspecError):
            continue  # gone meanwhile, or not ours
    return known


class StandbyWatch:
    """The owner's side: who follows, and the heartbeats for them."""

    def __init__(self, queue: EventQueue, objects: Callable[[], ObjectStore]) -> None:
        # constant after construction
        self._queue = queue
        self._objects = objects
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        # the thread's own
        self._seen: dict[str, tuple[object, float]] = {}
        """Standby → (what its object was, when that was new)."""
        self.known: tuple[str, ...] = ()

    def start(self, store_id: str) -> None:
        """Begin to look."""
        self._thread = threading.Thread(target=self._run, args=(store_id,), name="quire-archive-standbys", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """No heartbeat after this."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(1.0)

    def _run(self, store_id: str) -> None:
        due = time.monotonic() + FIRST_LIST_SECONDS
        end, changed_at = -1, time.monotonic()
        while not self._stop.wait(TICK_SECONDS if self.known else max(due - time.monotonic(), 0.01)):
            now = time.monotonic()
            named = self.known
            if now >= due:
                self._look(store_id, now)
                due = now + LIST_SECONDS
            if self._queue.end != end:
                end, changed_at = self._queue.end, now
            if self.known and (self.known != named or now - changed_at >= HEARTBEAT_SECONDS):
                self._queue.append(StandbyEvent(self.known))
                end, changed_at = self._queue.end, now

    def _look(self, store_id: str, now: float) -> None:
        try:
            present = {info.key: info for info in list_objects(self._objects(), standby_prefix(store_id))}
        except (QuireError, OSError):
            return  # those that were known are still served
        for key, info in present.items():
            mark = (info.etag, info.modified_ms, info.size_bytes)
            if self._seen.get(key, (None,))[0] != mark:
                self._seen[key] = (mark, now)
        self._seen = {key: seen for key, seen in self._seen.items() if key in present}
        fresh = [key for key, (_, at) in self._seen.items() if now - at < FORGET_SECONDS]
        self.known = tuple(sorted(key.rsplit("/", 1)[-1] for key in fresh))
