"""Standbys register in the bucket, and the owner puts heartbeats there for them (A11).

Terms
  registration   `{store_id}/standby/{id}`: a small object that a standby replaces every REFRESH_SECONDS. A standby whose
                 object has not changed for FORGET_SECONDS counts as gone
  heartbeat      `{store_id}/standby/heartbeat`: a small object with the standbys that the owner has seen. The owner replaces it
                 when they change, and every HEARTBEAT_SECONDS while there are any

A standby measures silence only after a heartbeat that names it: an owner that has not seen it yet may simply be idle. A
heartbeat fences no one: it only shows that the owner runs and reaches the bucket. It is not part of the log, because the log is
silent during the upload of a large file, and for as long as `archive.interval_seconds` (docs/decisions/086-heartbeats.md).

Threads: the owner's watch has its own; it raises nothing, and repeats requests that the bucket does not answer. `OwnerContact`
belongs to the standby's thread, and raises the object store's errors.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from uuid import uuid4

import msgspec

from quire.archive.format import Position
from quire.archive.queue import EventQueue
from quire.core.decoding import UNDECODABLE, described
from quire.core.errors import ObjectNotFound, QuireError, StoreFenced
from quire.durable.object_names import heartbeat_key, parse_standby_key, standby_key, standby_prefix
from quire.objects.api import DeletableStore, ObjectStore, list_objects
from quire.objects.collector import withdraw

HEARTBEAT_SECONDS = 5.0
"""Interval between two heartbeats of an owner that has standbys."""
LIST_SECONDS = 60.0
FIRST_LIST_SECONDS = 2.0
"""Delay of the first listing, so that a command that opens the store for a second does not list standbys; and of the next one
after a listing that failed: a standby that an earlier process of this owner has named is already counting."""
REFRESH_SECONDS = 20.0
FORGET_SECONDS = 180.0
TICK_SECONDS = 0.5
LISTEN_SECONDS = 1.0
"""Interval between a standby's reads of the heartbeat while no log object arrives."""
COUNTED_SECONDS_MAX = 2.0
"""Most silence that one poll interval may add: a standby that was suspended did not observe any."""


class Registration(msgspec.Struct, frozen=True, kw_only=True):
    """The registration object of a standby; informational."""

    format: int = 1
    standby_id: str
    host: str = ""
    pid: int = 0
    position: Position
    at_ms: int
    """The standby's clock."""


class Heartbeat(msgspec.Struct, frozen=True, kw_only=True):
    """The heartbeat object of an owner."""

    format: int = 1
    owner_epoch: int
    """A standby ignores the heartbeats of an owner that it does not follow: a deposed one may still run."""
    standbys: tuple[str, ...]
    """The standbys that the owner has seen."""
    nonce: str
    """Different in each heartbeat, so that no clock decides whether a heartbeat is new."""


def registrations(store: ObjectStore, store_id: str) -> list[Registration]:
    """Return the standbys that are or were registered, for reports."""
    registered = []
    for info in list_objects(store, standby_prefix(store_id)):
        if parse_standby_key(info.key) is None:
            continue
        try:
            registered.append(msgspec.json.decode(store.get(info.key), type=described(Registration)))
        except (QuireError, *UNDECODABLE):
            continue  # removed meanwhile, or not a registration
    return registered


def read_heartbeat(store: ObjectStore, store_id: str) -> Heartbeat | None:
    """Return the newest heartbeat; `None` if no owner has put one, or it cannot be read."""
    try:
        return msgspec.json.decode(store.get(heartbeat_key(store_id)), type=described(Heartbeat))
    except (ObjectNotFound, *UNDECODABLE):
        return None


class StandbyWatch:
    """The owner's side: watches for standbys, and puts heartbeats for them."""

    def __init__(self, queue: EventQueue, objects: Callable[[], ObjectStore], confirm: Callable[[], None]) -> None:
        """Create the watch. `confirm` checks in the bucket that the store is still ours, and raises `StoreFenced` if not."""
        # constant after construction
        self._queue = queue
        self._objects = objects
        self._confirm = confirm
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        # used by the thread only
        self._seen: dict[str, tuple[object, float]] = {}
        """Standby → (identity of its object, when that was first seen)."""
        self.standby_ids: tuple[str, ...] = ()

    def start(self, store_id: str, owner_epoch: int) -> None:
        """Start the watch."""
        arguments = (store_id, owner_epoch)
        self._thread = threading.Thread(target=self._run, args=arguments, name="quire-archive-standbys", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop the watch. No heartbeat follows."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(1.0)

    def _run(self, store_id: str, owner_epoch: int) -> None:
        due = time.monotonic() + FIRST_LIST_SECONDS
        named: tuple[str, ...] = ()
        put_at = float("-inf")
        while not self._stop.wait(TICK_SECONDS if self.standby_ids or named else max(due - time.monotonic(), 0.01)):
            # Closed by an archiver that has failed or was fenced: what this owner changes is not archived any more.
            if not self._queue.is_open:
                return
            now = time.monotonic()
            if now >= due:
                due = now + (LIST_SECONDS if self._list_standbys(store_id, now) else FIRST_LIST_SECONDS)
            # Also when the last standby is gone: it may only have lost the bucket for a while, and must not take the end
            # of the heartbeats for silence when it is back.
            if self.standby_ids != named or (named and now - put_at >= HEARTBEAT_SECONDS):
                try:
                    if self._put_heartbeat(store_id, owner_epoch):
                        named, put_at = self.standby_ids, now
                except StoreFenced:
                    return

    def _put_heartbeat(self, store_id: str, owner_epoch: int) -> bool:
        """Put a heartbeat and return whether the bucket has it. Raise `StoreFenced` if the store has another owner."""
        heartbeat = Heartbeat(owner_epoch=owner_epoch, standbys=self.standby_ids, nonce=uuid4().hex)
        try:
            self._objects().put(heartbeat_key(store_id), msgspec.json.encode(heartbeat) + b"\n")
            # An owner without changes uploads nothing, and would not meet its successor's seal. After the put: a listing
            # that fails is no reason to be taken for dead.
            self._confirm()
        except StoreFenced:
            raise
        except (QuireError, OSError):
            return False
        return True

    def _list_standbys(self, store_id: str, now: float) -> bool:
        """Update the known standbys. Return whether the bucket answered."""
        try:
            present = {info.key: info for info in list_objects(self._objects(), standby_prefix(store_id))}
        except (QuireError, OSError):
            return False  # the standbys already known still get heartbeats
        for key, info in present.items():
            # By changes of the object, not by its age: the clocks of the bucket and of this machine may differ.
            mark = (info.etag, info.modified_ms, info.size_bytes)
            if self._seen.get(key, (None,))[0] != mark:
                self._seen[key] = (mark, now)
        self._seen = {key: seen for key, seen in self._seen.items() if key in present}
        fresh = [key for key, (_, at) in self._seen.items() if now - at < FORGET_SECONDS]
        self.standby_ids = tuple(sorted(filter(None, map(parse_standby_key, fresh))))
        return True


class OwnerContact:
    """The standby's side: its registration, the owner's heartbeats, and how long the owner has been silent."""

    def __init__(self, store: DeletableStore) -> None:
        # constant after construction
        self._store = store
        self.standby_id = str(uuid4())
        """Random for each process, so a heartbeat that contains it was written after this process registered."""
        # owned by the standby's thread
        self._registered_key = ""
        self._registered_at = self._listened_at = float("-inf")
        self._heartbeat: Heartbeat | None = None
        """The newest heartbeat of the owner that the standby follows or followed."""
        self.silent_seconds = 0.0

    def register_if_due(self, store_id: str, position: Position, now_ms: int) -> None:
        """Register the standby, or refresh its registration."""
        if time.monotonic() - self._registered_at >= REFRESH_SECONDS:
            host, pid = os.uname().nodename, os.getpid()
            registration = Registration(standby_id=self.standby_id, host=host, pid=pid, position=position, at_ms=now_ms)
            self._registered_key = standby_key(store_id, self.standby_id)
            self._store.put(self._registered_key, msgspec.json.encode(registration) + b"\n")
            self._registered_at = time.monotonic()

    def withdraw(self) -> None:
        """Remove the registration."""
        if self._registered_key:
            withdraw(self._store, self._registered_key)

    def has_new_heartbeat(self, store_id: str, owner_epoch: int) -> bool:
        """Return whether the owner has put another heartbeat since the last call."""
        if time.monotonic() - self._listened_at < LISTEN_SECONDS:
            return False
        self._listened_at = time.monotonic()
        heartbeat = read_heartbeat(self._store, store_id)
        # Those of another owner do not count: one that was deposed may still run.
        if heartbeat is None or heartbeat.owner_epoch != owner_epoch or heartbeat == self._heartbeat:
            return False
        self._heartbeat = heartbeat
        return True

    def is_named(self, owner_epoch: int) -> bool:
        """Return whether the owner has named this standby, and has not forgotten it since."""
        heartbeat = self._heartbeat
        return heartbeat is not None and heartbeat.owner_epoch == owner_epoch and self.standby_id in heartbeat.standbys

    def count_silence(self, seconds: float, owner_epoch: int) -> None:
        """Count time in which the bucket answered and had no sign of life of the owner."""
        if self.is_named(owner_epoch):
            self.silent_seconds += min(seconds, COUNTED_SECONDS_MAX)
        else:
            self.silent_seconds = 0.0


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
