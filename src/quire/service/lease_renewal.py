"""Keeps a client's holdings at its owner alive: over a network, one thread renews all of them.

On the owner's machine an open connection shows that the client lives, and nothing is renewed.

The child of a fork() is another client, and holds nothing.

Threads: any, and one renewal thread. `forget` may be called by a finalizer, so it takes no lock.
"""

from __future__ import annotations

import threading
from collections import deque
from contextlib import suppress

from quire.core.errors import LeaseExpired, QuireError
from quire.core.events import emit
from quire.service import data_actions as d
from quire.service.channel import Channel
from quire.service.client_forks import reset_after_fork

RENEW_SECONDS = 8.0
"""Several renewals fit into `client_holdings.IDLE_SECONDS`."""


class LeaseRenewal:
    """The holdings of one client. See above."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        reset_after_fork(self, LeaseRenewal._reset)

    def _reset(self) -> None:
        """Hold nothing: see `client_forks.py`."""
        self._over = threading.Event()
        self._forgotten: deque[str] = deque()
        # guarded by _lock
        self._lock = threading.Lock()
        self._held: set[str] = set()
        self._thread: threading.Thread | None = None

    def add(self, holding_id: str) -> None:
        """Renew a holding from now on."""
        self._release_forgotten()
        with self._lock:
            self._held.add(holding_id)
            if self._thread is None and not self._channel.is_connected:
                self._thread = threading.Thread(target=self._run, name="quire-client-renew", daemon=True)
                self._thread.start()

    def holds(self, holding_id: str) -> bool:
        """Return whether the owner still had the holding at the last renewal."""
        return holding_id in self._held

    def discard(self, holding_id: str) -> None:
        """Stop renewing a holding."""
        with self._lock:
            self._held.discard(holding_id)

    def forget(self, holding_id: str) -> None:
        """Stop renewing a holding, and release it at the owner in the next round or before the next `add`."""
        self._forgotten.append(holding_id)

    def close(self) -> None:
        """Stop the renewal thread."""
        self._over.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()

    def _release_forgotten(self) -> None:
        with suppress(IndexError):
            while True:
                holding_id = self._forgotten.popleft()
                self.discard(holding_id)
                with suppress(QuireError):
                    self._channel.call("holding.release", d.OfHolding(holding_id))

    def _run(self) -> None:
        while not self._over.wait(RENEW_SECONDS):
            self.renew_all()

    def renew_all(self) -> None:
        """Renew all holdings once."""
        self._release_forgotten()
        for holding_id in list(self._held):
            try:
                self._channel.call("holding.renew", d.OfHolding(holding_id))
            except LeaseExpired:
                self.discard(holding_id)
                emit("warning", "client.lease_lost", holding=holding_id[:8])
            except QuireError as error:
                emit("warning", "client.cannot_renew", error=str(error))
                return
