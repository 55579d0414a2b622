"""Standbys register in the bucket, and the owner puts heartbeats for them into its log (A11).

Terms
  registration   `{store_id}/standby/{id}`: a small object that a standby replaces every REFRESH_SECONDS. A standby whose
                 object has not changed for FORGET_SECONDS counts as gone
  heartbeat      a `StandbyEvent` in the log, with the standbys that the owner has seen. It is put when a standby appears, and,
                 while any is known, after HEARTBEAT_SECONDS without another change

A standby measures silence only after a heartbeat that names it: an owner that has not seen it yet may simply be idle.

Threads: the watch has its own. Raises nothing; requests that the bucket does not answer are repeated.
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
"""While a standby follows, the owner's log is never silent for much longer than this."""
LIST_SECONDS = 60.0
FIRST_LIST_SECONDS = 2.0
"""Delay of the first listing, so that a command that opens the store for a second does not list standbys."""
REFRESH_SECONDS = 20.0
FORGET_SECONDS = 180.0
TICK_SECONDS = 0.5


class Registration(msgspec.Struct, frozen=True, kw_only=True):
    """The registration object of a standby; informational."""

    format: int = 1
    standby_id: str
    host: str = ""
    pid: int = 0
    position: Position
    at_ms: int
    """The standby's clock."""


def register(store: ObjectStore, store_id: str, registration: Registration) -> None:
    """Register a standby, or refresh its registration."""
    store.put(standby_key(store_id, registration.standby_id), msgspec.json.encode(registration) + b"\n")


def registrations(store: ObjectStore, store_id: str) -> list[Registration]:
    """Return the standbys that are or were registered, for reports."""
    registered = []
    for info in list_objects(store, standby_prefix(store_id)):
        try:
            registered.append(msgspec.json.decode(store.get(info.key), type=Registration))
        except (QuireError, msgspec.MsgspecError):
            continue  # removed meanwhile, or not a registration
    return registered


class StandbyWatch:
    """The owner's side: watches for standbys, and queues heartbeats for them."""

    def __init__(self, queue: EventQueue, objects: Callable[[], ObjectStore]) -> None:
        # constant after construction
        self._queue = queue
        self._objects = objects
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        # used by the thread only
        self._seen: dict[str, tuple[object, float]] = {}
        """Standby → (identity of its object, when that was first seen)."""
        self.standby_ids: tuple[str, ...] = ()

    def start(self, store_id: str) -> None:
        """Start the watch."""
        self._thread = threading.Thread(target=self._run, args=(store_id,), name="quire-archive-standbys", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop the watch. No heartbeat follows."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(1.0)

    def _run(self, store_id: str) -> None:
        due = time.monotonic() + FIRST_LIST_SECONDS
        end, changed_at = -1, time.monotonic()
        while not self._stop.wait(TICK_SECONDS if self.standby_ids else max(due - time.monotonic(), 0.01)):
            now = time.monotonic()
            named = self.standby_ids
            if now >= due:
                self._list_standbys(store_id, now)
                due = now + LIST_SECONDS
            if self._queue.end != end:
                end, changed_at = self._queue.end, now
            if self.standby_ids and (self.standby_ids != named or now - changed_at >= HEARTBEAT_SECONDS):
                self._queue.append(StandbyEvent(self.standby_ids))
                end, changed_at = self._queue.end, now

    def _list_standbys(self, store_id: str, now: float) -> None:
        try:
            present = {info.key: info for info in list_objects(self._objects(), standby_prefix(store_id))}
        except (QuireError, OSError):
            return  # the standbys already known still get heartbeats
        for key, info in present.items():
            # By changes of the object, not by its age: the clocks of the bucket and of this machine may differ.
            mark = (info.etag, info.modified_ms, info.size_bytes)
            if self._seen.get(key, (None,))[0] != mark:
                self._seen[key] = (mark, now)
        self._seen = {key: seen for key, seen in self._seen.items() if key in present}
        fresh = [key for key, (_, at) in self._seen.items() if now - at < FORGET_SECONDS]
        self.standby_ids = tuple(sorted(key.rsplit("/", 1)[-1] for key in fresh))


# ── results ───────────────────────────────────────────────────────────────────────────────────────────────────────────
class StandbyStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The progress of a standby."""

    path: str
    store_id: str
    url: str
    phase: str
    position: Position
    at_ms: int
    """The owner's clock in the last object applied."""
    objects: int
    """Objects applied since the standby was opened."""
    rebuilds: int
    is_named: bool
    """Whether a heartbeat of the owner has named this standby."""
    silent_seconds: float


class Promoted(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a promotion."""

    path: str
    store_id: str
    owner_epoch: int
    position: Position
    """The last log object of the former owner that was applied: the directory has everything up to it."""
    newest: Position
    """The former owner's last log object. Those after `position` could not be applied, and were given up (`discard`)."""
    seconds: float

    @property
    def dropped(self) -> int:
        """The number of log objects of the former owner that were given up."""
        return self.newest.number - self.position.number
