"""Child processes for kill tests, forked within milliseconds from a process that has imported everything.

Terms
  fork server   a process that imports a module once and forks a child on request
  child         a process that runs `target(channel)` until it returns or is killed
  channel       a bidirectional stream of messages; each arrives complete or not at all

Rules
  1. Messages that a child sent before it died are received, because the kernel holds them. A truncated message is not.
  2. A dead child is a zombie until `wait`, so that a second kill cannot hit another process with the same pid.
  3. The fork server has one thread: neither the import of the target's module nor `warm_up` may leave another
     thread, or open resources that fork breaks.
  4. Fork server and children end with the process that created them, because their channels are closed.

Threads: a fork server and a child's handle belong to one thread. Any thread may send on a channel; one receives.
Raises `TimedOut`, and `AssertionError` with the processes' stderr if the fork server ends.

    >>> with ForkServer("tests.fork_server:echo") as fork_server, fork_server.spawn() as child:
    ...     _ = child.channel.send(b"hello")
    ...     print(child.channel.receive(), child.kill(), child.channel.receive())
    b'hello' -9 None
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable
from typing import NoReturn

from quire.core.errors import InternalError, TimedOut
from quire.durable.failpoints import VARIABLE
from tests.programs import Program

TIMEOUT_SECONDS = 60.0
"""Seconds to wait for an answer before the test fails."""

_LENGTH = struct.Struct("<I")
_NUMBER = struct.Struct("<i")
_PROGRAM = "import sys; from tests.fork_server import _serve; _serve(int(sys.argv[1]), *sys.argv[2:])"


class Channel:
    """One end of a channel."""

    def __init__(self, end: socket.socket, timeout: float | None = None) -> None:
        end.settimeout(timeout)
        self._end = end
        self._sending = threading.Lock()

    def send(self, message: bytes) -> bool:
        """Send a message; False if the other end is closed."""
        try:
            with self._sending:
                self._end.sendall(_LENGTH.pack(len(message)) + message)
        except (BrokenPipeError, ConnectionResetError):
            return False
        except TimeoutError as error:
            raise _timed_out() from error
        return True

    def receive(self) -> bytes | None:
        """The next message; `None` when the other end is closed and everything it sent has been received."""
        head = self._exactly(_LENGTH.size)
        return None if head is None else self._exactly(_LENGTH.unpack(head)[0])

    def _exactly(self, size: int) -> bytes | None:
        received = bytearray()
        while len(received) < size:
            try:
                piece = self._end.recv(size - len(received))
            except ConnectionResetError:  # it died with unread messages
                return None
            except TimeoutError as error:
                raise _timed_out() from error
            if not piece:
                return None
            received += piece
        return bytes(received)

    def close(self) -> None:
        """Close this end."""
        self._end.close()


def _timed_out() -> TimedOut:
    return TimedOut(
        "the other end of a channel neither answers nor closes", hint="look at its threads: it may be stuck"
    )


class Child:
    """A process forked by a fork server."""

    def __init__(self, fork_server: ForkServer, pid: int, channel: Channel) -> None:
        self.pid = pid
        self.channel = channel
        self._fork_server = fork_server
        self._status: int | None = None

    def kill(self) -> int:
        """Kill it with SIGKILL; returns its exit status (-9, unless it had ended before)."""
        if self._status is None:
            os.kill(self.pid, signal.SIGKILL)
        return self.wait()

    def wait(self) -> int:
        """Wait for its end; returns its exit code, or the negative number of the signal that ended it."""
        if self._status is None:
            self._status = os.waitstatus_to_exitcode(self._fork_server._ask(_NUMBER.pack(self.pid)))
        return self._status

    def close(self) -> None:
        """Kill it if it is running, and close the channel."""
        self.kill()
        self.channel.close()

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class ForkServer:
    """Forks children that run `target`, given as "package.module:function".

    `warm_up`, in the same form, is called once before the first fork: children share what it imports and caches.
    """

    def __init__(self, target: str, *, warm_up: str = "", timeout: float = TIMEOUT_SECONDS) -> None:
        self._timeout = timeout
        self._errors = os.memfd_create("stderr")
        self._control, server_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._control.settimeout(timeout)
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path or os.curdir for path in sys.path)}
        environment.pop(VARIABLE, None)  # a test arms failpoints of its children, not of the process that forks them
        with server_end:
            self._process = Program(
                ["-c", _PROGRAM, str(server_end.fileno()), target, warm_up],
                pass_fds=(server_end.fileno(),),
                stdin=subprocess.DEVNULL,
                stderr=self._errors,
                env=environment,
            )

    def spawn(self) -> Child:
        """Fork a child, which then receives its instructions over its channel."""
        parent_end, child_end = socket.socketpair()
        try:
            with child_end:
                pid = self._ask(b"spawn", child_end.fileno())
        except BaseException:
            parent_end.close()
            raise
        return Child(self, pid, Channel(parent_end, self._timeout))

    def is_killed(self, request: dict[str, str]) -> bool:
        """Run a child with a JSON request to its end; returns whether it was killed."""
        with self.spawn() as child:
            child.channel.send(json.dumps(request).encode())
            while child.channel.receive() is not None:
                pass
            return child.wait() == -signal.SIGKILL

    def errors(self) -> str:
        """The stderr of the fork server and its children."""
        written = os.pread(
            self._errors, os.fstat(self._errors).st_size, 0
        )  # a seek would move the position at which children write
        return written.decode(errors="replace")

    def _ask(self, message: bytes, *descriptors: int) -> int:
        try:
            socket.send_fds(self._control, [message], descriptors)
            answer = self._control.recv(_NUMBER.size)
        except TimeoutError as error:
            raise TimedOut(
                "the fork server does not answer", hint="a child that was waited for may be alive"
            ) from error
        except (BrokenPipeError, ConnectionResetError):
            answer = b""
        if not answer:
            raise AssertionError(f"the fork server has ended: {self.errors()}")
        return int(_NUMBER.unpack(answer)[0])

    def close(self) -> None:
        """End the fork server. Children end when their channels are closed."""
        self._control.close()
        self._process.wait(self._timeout)
        os.close(self._errors)

    def __enter__(self) -> ForkServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def echo(channel: Channel) -> None:
    """A target that sends back what it receives."""
    while (message := channel.receive()) is not None:
        channel.send(message)


# ── in the fork server ────────────────────────────────────────────────────────────────────────────────────────────────
def _serve(control_fd: int, target: str, warm_up: str) -> None:
    run = _import_function(target)
    if warm_up:
        _import_function(warm_up)()
    if threading.active_count() > 1:
        raise InternalError("there are threads already, which fork() would lose", target=target, warm_up=warm_up)
    gc.freeze()  # children share these pages until one is written
    with socket.socket(fileno=control_fd) as control:
        while True:
            message, descriptors, _, _ = socket.recv_fds(control, 64, 1)
            if descriptors:
                pid = os.fork()
                if pid == 0:
                    control.close()
                    _run_child(run, descriptors[0])
                os.close(descriptors[0])
                control.send(_NUMBER.pack(pid))
            elif message:
                _, status = os.waitpid(_NUMBER.unpack(message)[0], 0)
                control.send(_NUMBER.pack(status))
            else:
                return


def _import_function(target: str) -> Callable[..., None]:
    module, _, name = target.partition(":")
    function: Callable[..., None] = getattr(importlib.import_module(module), name)
    return function


def _run_child(run: Callable[[Channel], None], descriptor: int) -> NoReturn:
    status = 1
    try:
        run(Channel(socket.socket(fileno=descriptor)))
        status = 0
    except BaseException:  # the process ends here: `errors` returns the traceback
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(status)
