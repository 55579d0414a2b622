"""What a client holds open at its owner, kept alive: over the network one thread renews all of it, while there is something.

On the owner's machine a connection says that its client lives, and there is nothing to renew.

Threads: any, and one of its own. `forget` may be called by a finalizer: it takes no lock.
"""

from __future__ import annotations

import threading
from collections import deque
from contextlib import suppress

from quire.core.errors import LeaseExpired, QuireError
from quire.core.events import emit
from quire.service import data_actions as d
from quire.service.channel import Channel

RENEW_SECONDS = 8.0
"""Several times within what the owner waits for."""


class LeaseRenewal:
    """See above; one for each client."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._over = threading.Event()
        self._forgotten: deque[str] = deque()
        # guarded by _lock
        self._lock = threading.Lock()
        self._held: set[str] = set()
        self._thread: threading.Thread | None = None

    def add(self, holding_id: str) -> None:
        """Keep it from now on."""
        self._release_forgotten()
        with self._lock:
            self._held.add(holding_id)
            if self._thread is None and not self._channel.is_connected:
                self._thread = threading.Thread(target=self._run, name="quire-client-renew", daemon=True)
                self._thread.start()

    def holds(self, holding_id: str) -> bool:
        """Whether the owner still had it when it was last asked."""
        return holding_id in self._held

    def discard(self, holding_id: str) -> None:
        """It need not be kept any more."""
        with self._lock:
            self._held.discard(holding_id)

    def forget(self, holding_id: str) -> None:
        """The same, and the owner is told with the next round, or before something else is held."""
        self._forgotten.append(holding_id)

    def close(self) -> None:
        """Keep nothing any more."""
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
        """One round."""
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
