"""The owner's side of frames: a Unix socket, and a thread for each connection.

A thread reads a call, executes it and answers: a call costs no change of thread (docs/decisions/055-frames.md).

Rules
  1. Connections are bounded; one beyond the limit gets an error and is closed. A slow or silent client costs only its thread.
  2. A process that can open the socket may do everything that its gate admits: the socket's mode is 0600 (`sockets.binding`).
  3. A client is the set of its connections. When the last of them ends, `on_client_end` is called to release its holdings.
  4. Closing lets calls in progress end for `stop_seconds`, then disconnects.

Threads: one that accepts, one per connection; `close` from any other. Raises `InvalidInput` if the path is in use.
"""

from __future__ import annotations

import select
import socket
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any, Protocol

from quire.core.errors import Incompatible, InvalidInput, Overloaded, QuireError
from quire.core.events import emit
from quire.durable.failpoints import hit
from quire.service.admission import Admission, FlightGate
from quire.service.frames import (
    ENVELOPE_BYTES_MAX,
    MAGIC,
    PREFACE,
    PREFACE_BYTES,
    SUFFIX,
    FrameError,
    FrameReader,
    read_framed,
    send_parts,
)
from quire.service.sockets import SocketPath, binding, retract
from quire.service.wire import version_error, write_error

BACKLOG = 128
PREFACE_SECONDS = 10.0
"""A connection that has not sent its preface by then is closed."""


class Act(Protocol):
    """Executes an action: `Service.act`."""

    def __call__(self, name: str, body: Any, gate: Any, context: Any, /) -> Iterator[bytes]: ...


class FrameContext:
    """One connection, in the shape in which a gate and the service see a Flight call."""

    __slots__ = ("_admission", "_connection")

    def __init__(self, connection: socket.socket, admission: Admission) -> None:
        self._connection = connection
        self._admission = admission

    def get_middleware(self, _: str) -> Admission:
        """Return the caller's admission."""
        return self._admission

    def peer(self) -> str:
        """Return the caller, for the log."""
        return "frames"

    def is_cancelled(self) -> bool:
        """Return whether the client has disconnected."""
        if (descriptor := self._connection.fileno()) < 0:
            return True
        poll = select.poll()
        poll.register(descriptor, select.POLLRDHUP | select.POLLHUP | select.POLLERR)
        return bool(poll.poll(0))


class FrameServer:
    """A server of frames. See the rules above."""

    def __init__(
        self,
        path: str,
        act: Act,
        gate: FlightGate,
        *,
        on_client_end: Callable[[str], None],
        connections_max: int,
        body_bytes_max: int,
        stop_seconds: float,
    ) -> None:
        # constant after construction
        self._place = SocketPath(path + SUFFIX, "")
        self._act = act
        self._gate = gate
        self._on_client_end = on_client_end
        self._connections_max = connections_max
        self._frame_bytes_max = body_bytes_max + ENVELOPE_BYTES_MAX
        self._stop_seconds = stop_seconds
        self._pause = threading.Event()
        # guarded by _changed
        self._changed = threading.Condition()
        self._connections: dict[socket.socket, bool] = {}
        """Whether a call is in progress on it."""
        self._clients: Counter[str] = Counter()
        self._closed = False
        self.refused = 0
        with binding(self._place) as bound:
            self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            self._listener.bind(bound)
            self._listener.listen(BACKLOG)
        self._thread = threading.Thread(target=self._accept, name="quire-frames", daemon=True)
        self._thread.start()

    @property
    def connections(self) -> int:
        """The number of open connections."""
        return len(self._connections)

    def has_client(self, client: str) -> bool:
        """Return whether a client has a connection."""
        return self._clients[client] > 0

    # ── connections ───────────────────────────────────────────────────────────────────────────────────────────────────
    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                if self._closed:
                    return
                self._pause.wait(0.05)  # out of descriptors, say: pending connections are accepted later
                continue
            with self._changed:
                is_full = self._closed or len(self._connections) >= self._connections_max
                if not is_full:
                    self._connections[connection] = False
            if is_full:
                self._refuse(connection)
                continue
            self._start(connection)

    def _start(self, connection: socket.socket) -> None:
        """Start the thread of a connection."""
        try:
            # The name does not begin with "quire-": those threads never wait for the archive (`core/barrier.py`), but a call
            # must if the mode is `sync` (A9).
            threading.Thread(target=self._serve, args=(connection,), name="frames-call", daemon=True).start()
        except RuntimeError as error:  # the system has no more threads: later connections may find one
            emit("warning", "service.no_thread", error=str(error))
            self._refuse(connection)
            self._ended(connection, "")

    def _refuse(self, connection: socket.socket) -> None:
        with self._changed:
            self.refused += 1
        full = Overloaded("the owner has too many connections", hint="try again later", places=self._connections_max)
        with suppress(OSError), connection:
            connection.settimeout(1.0)
            send_parts(connection, list(write_error(full)))

    def _serve(self, connection: socket.socket) -> None:
        """Serve one connection, in its own thread."""
        client = ""
        try:
            reader = FrameReader(connection)
            connection.settimeout(PREFACE_SECONDS)
            magic, version, caller = PREFACE.unpack(reader.exactly(PREFACE_BYTES))
            if magic != MAGIC:
                raise FrameError("the first frame of a connection must name the caller")
            if (wrong := version_error(str(version))) is not None:
                raise wrong
            connection.settimeout(None)
            client = caller.hex()
            with self._changed:
                self._clients[client] += 1
            self._answer_all(connection, reader, client)
        except (FrameError, Incompatible) as error:
            with self._changed:
                self.refused += 1
            emit("warning", "service.bad_frame", error=str(error))
            bad = InvalidInput(str(error), hint="connect with a quire client")
            with suppress(OSError):
                connection.settimeout(1.0)
                send_parts(connection, list(write_error(error if isinstance(error, Incompatible) else bad)))
        except (EOFError, OSError):
            pass  # the client is gone, or the server is closing
        finally:
            self._ended(connection, client)

    def _answer_all(self, connection: socket.socket, reader: FrameReader, client: str) -> None:
        while True:
            call = read_framed(reader.frame(self._frame_bytes_max))
            with self._changed:
                self._connections[connection] = True
            context = FrameContext(connection, self._gate.admitted(call.trace, client))
            try:
                parts = list(self._act(call.name, call.body, self._gate, context))
            except QuireError as error:
                parts = list(write_error(error))
            hit("service.answer")  # tests lose the answer here
            send_parts(connection, parts)
            with self._changed:
                self._connections[connection] = False
                if self._closed:
                    return

    def _ended(self, connection: socket.socket, client: str) -> None:
        with self._changed:
            self._connections.pop(connection, None)
            is_last = False
            if client:
                self._clients[client] -= 1
                is_last = self._clients[client] <= 0
                if is_last:
                    del self._clients[client]
            self._changed.notify_all()
        connection.close()
        if is_last:
            self._on_client_end(client)  # rule 3

    # ── closing ───────────────────────────────────────────────────────────────────────────────────────────────────────
    def close(self) -> None:
        """Stop accepting, let calls end, disconnect (rule 4). Idempotent."""
        with self._changed:
            if self._closed:
                return
            self._closed = True
            # For reading only: a connection that looks idle may just have received a call, which is still answered.
            self._hang_up(socket.SHUT_RD, idle_only=True)
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the accepting thread
        self._listener.close()
        retract(self._place)
        with self._changed:
            self._changed.wait_for(lambda: not self._connections, self._stop_seconds)
            self._hang_up(socket.SHUT_RDWR)
            self._changed.wait_for(lambda: not self._connections, self._stop_seconds)
        self._thread.join(self._stop_seconds)

    def _hang_up(self, how: int, *, idle_only: bool = False) -> None:
        """Shut down all connections, or only those without a call. REQUIRES the lock."""
        for connection, is_busy in self._connections.items():
            if not (idle_only and is_busy):
                with suppress(OSError):
                    connection.shutdown(how)
