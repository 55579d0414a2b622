"""What clients hold open at the owner: snapshots of key-value sets, and whatever else must end when its client does.

Rules
  1. A holding has an id that cannot be guessed, and belongs to the client that opened it: others are told that it is not there.
  2. A client with a connection of its own (`frame_server.py`) keeps what it holds as long as it has one and `GRACE_SECONDS`
     longer, as a connection may break without its client having gone. One that comes by Flight keeps it until `IDLE_SECONDS`
     after its last use.
  3. A client holds at most `PER_CLIENT_MAX`, all together `ALL_MAX`.
  4. A holding is used by one call at a time, and never closed while one uses it.

Threads: any; a thread of its own looks for what has ended, while there is something.
Raises `LeaseExpired` for what is not there (any more), `Overloaded`.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from quire.core.clock import Clock
from quire.core.closing import Closable
from quire.core.errors import LeaseExpired, Overloaded, QuireError
from quire.core.events import emit

GRACE_SECONDS = 10.0
IDLE_SECONDS = 30.0
SWEEP_SECONDS = 1.0
PER_CLIENT_MAX = 256
ALL_MAX = 4_096


@runtime_checkable
class Idling(Protocol):
    """Something that gives up part of what it has when it is not used."""

    def is_idle(self, seconds: float) -> None:
        """Nobody has used it for so long."""


@dataclass(slots=True, eq=False)
class Holding:
    """One of them. `lock` is taken by whoever uses or closes it."""

    holding_id: str
    client: str
    kind: str
    value: Any
    used_at: float
    """When a call last used it."""
    seen_at: float
    """When its client was last known to live."""
    has_connection: bool = False
    """Whether its client has, or had, a connection of its own."""
    lock: threading.Lock = field(default_factory=threading.Lock)
    is_closed: bool = False

    def end(self) -> None:
        """Close what is held. REQUIRES the lock."""
        if not self.is_closed:
            self.is_closed = True
            try:
                self.value.close()
            except QuireError as error:
                emit("warning", "service.holding_not_closed", kind=self.kind, error=str(error))


class Holdings:
    """See the rules above."""

    def __init__(self, clock: Clock, lives: Callable[[str], bool]) -> None:
        """`lives` says whether a client has a connection of its own."""
        self._clock = clock
        self._lives = lives
        # guarded by _lock
        self._lock = threading.Lock()
        self._all: dict[str, Holding] = {}
        self._sweeper: threading.Thread | None = None
        self._stopping = threading.Event()

    def __len__(self) -> int:
        return len(self._all)

    def add(self, client: str, kind: str, value: Closable) -> str:
        """Hold something for a client; its id (rule 3)."""
        holding = Holding(secrets.token_hex(16), client, kind, value, now := self._clock.monotonic(), now)
        with self._lock:
            own = sum(1 for other in self._all.values() if other.client == client)
            is_full = own >= PER_CLIENT_MAX or len(self._all) >= ALL_MAX or self._stopping.is_set()
            if not is_full:
                self._all[holding.holding_id] = holding
                if self._sweeper is None:
                    self._sweeper = threading.Thread(target=self._sweep, name="quire-holdings", daemon=True)
                    self._sweeper.start()
        if is_full:
            value.close()
            hint = "close snapshots and connections that are no longer needed"
            raise Overloaded("the client holds too much open at the owner", hint=hint, kind=kind, held=own)
        return holding.holding_id

    @contextmanager
    def use(self, client: str, holding_id: str, kind: str) -> Iterator[Any]:
        """What is held, for the length of a block (rules 1 and 4)."""
        holding = self._all.get(holding_id)
        if holding is None or holding.client != client or holding.kind != kind:
            raise _ended(kind)
        with holding.lock:
            if holding.is_closed:
                raise _ended(kind)
            try:
                yield holding.value
            finally:
                holding.used_at = holding.seen_at = self._clock.monotonic()

    def peek(self, client: str, holding_id: str, kind: str) -> Any:
        """What is held, also while a call uses it: for what any thread may do. `None` if it is not there."""
        holding = self._all.get(holding_id)
        return holding.value if holding is not None and (holding.client, holding.kind) == (client, kind) else None

    def renew(self, client: str, holding_id: str) -> None:
        """Somebody still needs it."""
        holding = self._all.get(holding_id)
        if holding is None or holding.client != client:
            raise _ended("lease")
        holding.seen_at = self._clock.monotonic()

    def release(self, client: str, holding_id: str) -> None:
        """Close it; one that is not there is fine."""
        with self._lock:
            holding = self._all.get(holding_id)
            if holding is None or holding.client != client:
                return
            del self._all[holding_id]
        with holding.lock:
            holding.end()

    def left(self, client: str, kind: str) -> None:
        """A client's last connection has ended: close what it holds of a kind, now."""
        with self._lock:
            gone = [holding for holding in self._all.values() if (holding.client, holding.kind) == (client, kind)]
            for holding in gone:
                del self._all[holding.holding_id]
        self._end(gone)

    def sweep(self) -> int:
        """Close what nobody holds any more (rule 2), and have the rest see to what has waited for too long; how many."""
        now = self._clock.monotonic()
        with self._lock:
            rest = list(self._all.values())
            gone = [holding for holding in rest if self._is_over(holding, now)]
            for holding in gone:
                del self._all[holding.holding_id]
        self._end(gone)
        for holding in rest:
            if isinstance(holding.value, Idling) and holding.lock.acquire(blocking=False):
                try:
                    if not holding.is_closed:
                        holding.value.is_idle(now - holding.used_at)
                finally:
                    holding.lock.release()
        return len(gone)

    def _end(self, gone: list[Holding]) -> None:
        for holding in gone:
            with holding.lock:
                holding.end()
            emit("info", "service.holding_ended", kind=holding.kind)

    def _is_over(self, holding: Holding, now: float) -> bool:
        if holding.lock.locked():
            return False  # a call uses it
        if self._lives(holding.client):
            holding.seen_at, holding.has_connection = now, True
        return now - holding.seen_at > (GRACE_SECONDS if holding.has_connection else IDLE_SECONDS)

    def _sweep(self) -> None:
        while not self._stopping.wait(SWEEP_SECONDS):
            self.sweep()

    def close(self) -> None:
        """The server ends, and all this with it."""
        self._stopping.set()
        if self._sweeper is not None:
            self._sweeper.join()
        with self._lock:
            rest, self._all = list(self._all.values()), {}
        for holding in rest:
            with holding.lock:
                holding.end()


def _ended(kind: str) -> LeaseExpired:
    hint = "it ended with its client or its server; open another one"
    return LeaseExpired(f"the {kind} does not exist, or has ended", hint=hint)
