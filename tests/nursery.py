"""Processes to be killed: forked within milliseconds from one that has imported everything, and spoken to over a line.

Terms
  nursery   a process that imports a module once and forks a child whenever one is wanted
  child     a process that runs `target(line)` until it returns, or until somebody kills it
  line      messages of bytes, in both directions, each whole or not at all

Rules
  1. What a child has sent before it died is received: it is the kernel's by then. A message that death cut off is not.
  2. A child that died is a zombie until `wait`, so killing twice never hits a stranger of the same number.
  3. The nursery has one thread: neither importing the target's module nor `warm_up` may leave another one behind, nor
     anything open that fork breaks.
  4. Nursery and children end when the process that made them is gone: their lines end.

Threads: a nursery and a child's handle belong to one thread; any thread may send on a line, one receives.
Raises `TimedOut`, and `AssertionError` with what the processes wrote to stderr if the nursery ends.

    >>> with Nursery("tests.nursery:echo") as nursery, nursery.spawn() as child:
    ...     _ = child.line.send(b"hello")
    ...     print(child.line.receive(), child.kill(), child.line.receive())
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
"""How long an answer may take before the test is told instead of left hanging."""

_LENGTH = struct.Struct("<I")
_NUMBER = struct.Struct("<i")
_PROGRAM = "import sys; from tests.nursery import _serve; _serve(int(sys.argv[1]), *sys.argv[2:])"


class Line:
    """One end of a line."""

    def __init__(self, end: socket.socket, timeout: float | None = None) -> None:
        end.settimeout(timeout)
        self._end = end
        self._sending = threading.Lock()

    def send(self, message: bytes) -> bool:
        """Send a message; False if nobody is at the other end."""
        try:
            with self._sending:
                self._end.sendall(_LENGTH.pack(len(message)) + message)
        except (BrokenPipeError, ConnectionResetError):
            return False
        except TimeoutError as error:
            raise _silent() from error
        return True

    def receive(self) -> bytes | None:
        """The next message; `None` when the other end is gone and everything it sent has been received."""
        head = self._exactly(_LENGTH.size)
        return None if head is None else self._exactly(_LENGTH.unpack(head)[0])

    def _exactly(self, size: int) -> bytes | None:
        got = bytearray()
        while len(got) < size:
            try:
                piece = self._end.recv(size - len(got))
            except ConnectionResetError:  # it died with messages unread
                return None
            except TimeoutError as error:
                raise _silent() from error
            if not piece:
                return None
            got += piece
        return bytes(got)

    def close(self) -> None:
        """Hang up."""
        self._end.close()


def _silent() -> TimedOut:
    return TimedOut("the other end of a line neither answers nor ends", hint="look at its threads: it may be stuck")


class Child:
    """A process forked by a nursery."""

    def __init__(self, nursery: Nursery, pid: int, line: Line) -> None:
        self.pid = pid
        self.line = line
        self._nursery = nursery
        self._status: int | None = None

    def kill(self) -> int:
        """SIGKILL, now; how it ended (-9, unless it had ended before)."""
        if self._status is None:
            os.kill(self.pid, signal.SIGKILL)
        return self.wait()

    def wait(self) -> int:
        """Wait for its end: its exit code, or minus the signal that ended it."""
        if self._status is None:
            self._status = os.waitstatus_to_exitcode(self._nursery._ask(_NUMBER.pack(self.pid)))
        return self._status

    def close(self) -> None:
        """Kill it, if it lives, and hang up."""
        self.kill()
        self.line.close()

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Nursery:
    """Forks children that run `target`, given as "package.module:function".

    `warm_up`, given likewise, is called once before: what it imports and fills need not be done again in every child.
    """

    def __init__(self, target: str, *, warm_up: str = "", timeout: float = TIMEOUT_SECONDS) -> None:
        self._timeout = timeout
        self._errors = os.memfd_create("stderr")
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._control.settimeout(timeout)
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path or os.curdir for path in sys.path)}
        environment.pop(VARIABLE, None)  # a test arms its children, not the process that forks them
        with theirs:
            self._process = Program(
                ["-c", _PROGRAM, str(theirs.fileno()), target, warm_up],
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
                stderr=self._errors,
                env=environment,
            )

    def spawn(self) -> Child:
        """A new child; what it is told comes next, over its line."""
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                pid = self._ask(b"spawn", theirs.fileno())
        except BaseException:
            ours.close()
            raise
        return Child(self, pid, Line(ours, self._timeout))

    def is_killed(self, told: dict[str, str]) -> bool:
        """Have a child do what it is told, as JSON, to its end; whether something killed it."""
        with self.spawn() as child:
            child.line.send(json.dumps(told).encode())
            while child.line.receive() is not None:
                pass
            return child.wait() == -signal.SIGKILL

    def errors(self) -> str:
        """What the nursery and its children have written to stderr."""
        written = os.pread(self._errors, os.fstat(self._errors).st_size, 0)  # a seek would move where children write
        return written.decode(errors="replace")

    def _ask(self, message: bytes, *descriptors: int) -> int:
        try:
            socket.send_fds(self._control, [message], descriptors)
            answer = self._control.recv(_NUMBER.size)
        except TimeoutError as error:
            raise TimedOut("the nursery does not answer", hint="a child that was waited for may be alive") from error
        except (BrokenPipeError, ConnectionResetError):
            answer = b""
        if not answer:
            raise AssertionError(f"the nursery has ended: {self.errors()}")
        return int(_NUMBER.unpack(answer)[0])

    def close(self) -> None:
        """End the nursery. Children end when their lines do."""
        self._control.close()
        self._process.wait(self._timeout)
        os.close(self._errors)

    def __enter__(self) -> Nursery:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def echo(line: Line) -> None:
    """A target that sends back what it receives."""
    while (message := line.receive()) is not None:
        line.send(message)


# ── in the nursery ────────────────────────────────────────────────────────────────────────────────────────────────────
def _serve(control_fd: int, target: str, warm_up: str) -> None:
    run = _named(target)
    if warm_up:
        _named(warm_up)()
    if threading.active_count() > 1:
        raise InternalError("there are threads already, which fork() would lose", target=target, warm_up=warm_up)
    gc.freeze()  # children share these pages for as long as nobody writes to them
    with socket.socket(fileno=control_fd) as control:
        while True:
            message, descriptors, _, _ = socket.recv_fds(control, 64, 1)
            if descriptors:
                pid = os.fork()
                if pid == 0:
                    control.close()
                    _live(run, descriptors[0])
                os.close(descriptors[0])
                control.send(_NUMBER.pack(pid))
            elif message:
                _, status = os.waitpid(_NUMBER.unpack(message)[0], 0)
                control.send(_NUMBER.pack(status))
            else:
                return


def _named(target: str) -> Callable[..., None]:
    module, _, name = target.partition(":")
    found: Callable[..., None] = getattr(importlib.import_module(module), name)
    return found


def _live(run: Callable[[Line], None], descriptor: int) -> NoReturn:
    status = 1
    try:
        run(Line(socket.socket(fileno=descriptor)))
        status = 0
    except BaseException:  # a process ends here: its last words go where `errors` finds them
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(status)
