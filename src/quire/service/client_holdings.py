"""Resources that clients hold open at the owner: snapshots of key-value sets, SQL connections; each ends with its client.

Rules
  1. A holding has an id that cannot be guessed and belongs to the client that opened it. For other clients it does not exist.
  2. A client with its own connection (`frame_server.py`) keeps its holdings while it has one and for `GRACE_SECONDS` after,
     because a connection may break while the client lives on. A client that uses Flight keeps them until `IDLE_SECONDS` after
     the last use.
  3. A client has at most `PER_CLIENT_MAX` holdings, all clients together `ALL_MAX`.
  4. A holding is used by one call at a time, and is never closed during a call. A call that uses a resource which is to be
     closed, or whose caller has left, is interrupted if the resource allows it.

Threads: any; a sweeper thread, started with the first holding, ends expired ones.
Raises `LeaseExpired` for a holding that does not exist or has ended, `Overloaded`.
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
from quire.core.errors import LeaseExpired, Overloaded
from quire.core.events import emit

GRACE_SECONDS = 10.0
IDLE_SECONDS = 30.0
SWEEP_SECONDS = 1.0
INTERRUPT_SECONDS = 0.1
"""How long a resource that is to be closed waits for the call that uses it, before it interrupts that call."""
PER_CLIENT_MAX = 256
ALL_MAX = 4_096


@runtime_checkable
class Idling(Protocol):
    """A resource that gives up part of its state while it is not used."""

    def on_idle(self, seconds: float) -> None:
        """Called by the sweeper with the time since the last use."""


@runtime_checkable
class Interruptible(Protocol):
    """A resource whose calls can be interrupted."""

    def interrupt(self) -> None:
        """Make the call that uses the resource fail; do nothing if there is none. Called by any thread."""


@dataclass(slots=True, eq=False)
class Holding:
    """A resource held for a client. `lock` is held while it is used or closed."""

    holding_id: str
    client: str
    kind: str
    value: Any
    used_at: float
    """When a call last used it, on the monotonic clock."""
    seen_at: float
    """When its client last showed that it is alive."""
    has_connection: bool = False
    """Whether its client has, or had, its own connection."""
    lock: threading.Lock = field(default_factory=threading.Lock)
    is_closed: bool = False
    has_left: Callable[[], bool] | None = None
    """Returns whether the caller of the call that uses it has left; `None` if no caller can leave."""

    def interrupt(self) -> None:
        """Interrupt the call that uses the resource, if its kind can be."""
        if isinstance(self.value, Interruptible):
            self.value.interrupt()

    def end(self) -> None:
        """Close the resource, after the call that uses it (rule 4)."""
        while not self.lock.acquire(timeout=INTERRUPT_SECONDS):
            self.interrupt()  # repeatedly: the call may just have begun, or have several statements
        try:
            if not self.is_closed:
                self.is_closed = True
                self.value.close()
        except Exception as error:  # whatever its kind raises: it has ended, and so must the holdings after it
            emit("warning", "service.holding_not_closed", kind=self.kind, error=str(error))
        finally:
            self.lock.release()


class Holdings:
    """The holdings of all clients. See the rules above."""

    def __init__(self, clock: Clock, has_connection: Callable[[str], bool]) -> None:
        """`has_connection` returns whether a client has its own connection."""
        self._clock = clock
        self._has_connection = has_connection
        # guarded by _lock
        self._lock = threading.Lock()
        self._all: dict[str, Holding] = {}
        self._sweeper: threading.Thread | None = None
        self._stopping = threading.Event()

    def __len__(self) -> int:
        return len(self._all)

    def add(self, client: str, kind: str, value: Closable) -> str:
        """Hold a resource for a client and return the holding's id (rule 3)."""
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
            raise Overloaded("the client has too many open snapshots and connections", hint=hint, kind=kind, held=own)
        return holding.holding_id

    @contextmanager
    def use(self, client: str, holding_id: str, kind: str, has_left: Callable[[], bool] | None = None) -> Iterator[Any]:
        """Yield the resource and keep it open for the duration of the block (rules 1 and 4). The block is interrupted if
        `has_left` returns true: its caller has left."""
        holding = self._all.get(holding_id)
        if holding is None or holding.client != client or holding.kind != kind:
            raise _ended(kind)
        with holding.lock:
            if holding.is_closed:
                raise _ended(kind)
            holding.has_left = has_left
            try:
                yield holding.value
            finally:
                holding.has_left = None
                holding.used_at = holding.seen_at = self._clock.monotonic()

    def peek(self, client: str, holding_id: str, kind: str) -> Any:
        """Return the resource even while a call uses it, for operations that any thread may do. `None` if it does not exist."""
        holding = self._all.get(holding_id)
        return holding.value if holding is not None and (holding.client, holding.kind) == (client, kind) else None

    def renew(self, client: str, holding_id: str) -> None:
        """Extend the lease of a holding."""
        holding = self._all.get(holding_id)
        if holding is None or holding.client != client:
            raise _ended("lease")
        holding.seen_at = self._clock.monotonic()

    def release(self, client: str, holding_id: str) -> None:
        """Close a holding; do nothing if it does not exist."""
        with self._lock:
            holding = self._all.get(holding_id)
            if holding is None or holding.client != client:
                return
            # Before its lock is taken: a call in progress ends first, and no later call finds the holding.
            del self._all[holding_id]
        holding.end()

    def end_client(self, client: str, kind: str) -> None:
        """Close the holdings of one kind at once: the client's last connection has ended."""
        with self._lock:
            gone = [holding for holding in self._all.values() if (holding.client, holding.kind) == (client, kind)]
            for holding in gone:
                del self._all[holding.holding_id]
        self._end(gone)

    def sweep(self) -> int:
        """Close expired holdings (rule 2), report idle time to the rest, and return how many were closed."""
        now = self._clock.monotonic()
        with self._lock:
            holdings = list(self._all.values())
            gone = [holding for holding in holdings if self._has_expired(holding, now)]
            for holding in gone:
                del self._all[holding.holding_id]
        self._end(gone)
        for holding in holdings:
            try:
                self._look_after(holding, now)
            except Exception as error:  # of this holding: the next ones are still looked after
                _emit_bug(error)
        return len(gone)

    def _look_after(self, holding: Holding, now: float) -> None:
        # Never waits: a call that uses the holding may take as long as its statement.
        if holding.lock.acquire(blocking=False):
            try:
                if isinstance(holding.value, Idling) and not holding.is_closed:
                    holding.value.on_idle(now - holding.used_at)
            finally:
                holding.lock.release()
        elif (has_left := holding.has_left) is not None and has_left():
            holding.interrupt()

    def _end(self, gone: list[Holding]) -> None:
        for holding in gone:
            holding.end()
            emit("info", "service.holding_ended", kind=holding.kind)

    def _has_expired(self, holding: Holding, now: float) -> bool:
        if holding.lock.locked():
            return False  # in use by a call
        if self._has_connection(holding.client):
            holding.seen_at, holding.has_connection = now, True
        return now - holding.seen_at > (GRACE_SECONDS if holding.has_connection else IDLE_SECONDS)

    def _sweep(self) -> None:
        while not self._stopping.wait(SWEEP_SECONDS):
            try:
                self.sweep()
            except Exception as error:  # if the loop ended, holdings of dead clients would stay open
                _emit_bug(error)

    def close(self) -> None:
        """End all holdings and the sweeper: the server stops."""
        self._stopping.set()
        if self._sweeper is not None:
            self._sweeper.join()
        with self._lock:
            holdings, self._all = list(self._all.values()), {}
        for holding in holdings:
            holding.end()


def _emit_bug(error: Exception) -> None:
    emit("error", "service.bug", action="holdings.sweep", error=error)


def _ended(kind: str) -> LeaseExpired:
    hint = "it ended with its client or its server; open another one"
    return LeaseExpired(f"the {kind} does not exist, or has ended", hint=hint)
