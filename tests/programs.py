"""Python programs as processes of their own, forked within milliseconds from one that has imported quire.

`Program` and `run_program` take what `subprocess.Popen` and `subprocess.run` take, but without the interpreter's name:
`["-c", code, …]`, `["-m", module, …]` or `[file, …]`. To be used wherever a test is not about how a program starts or what
it imports: starting Python and importing a store takes half a second of a core.

Rules
  1. The process is a child of this one, as if it had been started here: it is waited for, killed and listed as usual.
  2. It has the environment, directory, files, arguments and `sys.path` that it would have had, and ends as Python ends:
     `atexit`, threads and tracebacks included.
  3. It differs in two things: modules of quire are there before they are imported, and what modules read from the environment
     when they are imported is what it was when the first program was started. (`QUIRE_FAILPOINTS` is read again.)
  4. The process that forks has one thread, and ends with this one: its line ends.

Threads: any may start programs.
Raises `AssertionError` if the process that forks has ended.

    >>> run_program(
    ...     ["-c", "import sys; print(sys.argv, 'quire' in sys.modules)", "shop"], stdout=subprocess.PIPE
    ... ).stdout
    "['-c', 'shop'] True\\n"
"""

from __future__ import annotations

import atexit
import ctypes
import fcntl
import gc
import importlib
import json
import os
import runpy
import socket
import struct
import subprocess
import sys
import threading
import time
import types
import warnings
from collections.abc import Sequence
from typing import Any

from quire.durable import failpoints

IMPORTED = (
    "quire.cli.main",
    "quire.jobs.registry",
    "quire.service.client",
    "quire.service.server",
    "quire.store.store",
)
_PROGRAM = "import sys; sys.path[:0] = sys.argv[2:]; from tests.programs import _serve; _serve(int(sys.argv[1]))"
_NUMBER = struct.Struct("<i")
_SUBREAPER = 36
"""`PR_SET_CHILD_SUBREAPER`: orphans among our descendants become our children."""

_libc = ctypes.CDLL(None, use_errno=True)
_lock = threading.Lock()
_started: dict[int, tuple[socket.socket, subprocess.Popen[bytes]]] = {}
"""The process that forks, and the line to it, by the process that started it: a fork of ours starts its own."""


class Program(subprocess.Popen[str]):
    """A running program."""

    def __init__(self, arguments: Sequence[str], **options: Any) -> None:
        super().__init__([sys.executable, *map(os.fspath, arguments)], **{"text": True, **options})

    def _execute_child(self, *given: Any) -> None:
        args, _, preexec_fn, _, pass_fds, cwd, env = given[:7]
        stdin, _, _, stdout, _, stderr = pipes = given[10:16]
        assert preexec_fn is None, "the program is not forked here"
        told = {
            "arguments": args[1:],
            "environment": dict(os.environ if env is None else env),
            "directory": os.path.abspath(cwd or os.curdir),
            "files": [0, 1, 2, *pass_fds],
            "session": given[-2],
        }
        standard = [ours if theirs == -1 else theirs for ours, theirs in enumerate((stdin, stdout, stderr))]
        with _lock:
            self.pid = _fork(json.dumps(told).encode(), [*standard, *pass_fds])
        self._child_created = True
        self._close_pipe_fds(*pipes)  # type: ignore[attr-defined]


def run_program(
    arguments: Sequence[str],
    *,
    input: str | None = None,  # noqa: A002 — the name that `subprocess.run` has for it
    capture_output: bool = False,
    timeout: float = 250.0,
    check: bool = False,
    **options: Any,
) -> subprocess.CompletedProcess[str]:
    """Run a program to its end."""
    if input is not None:
        options["stdin"] = subprocess.PIPE
    if capture_output:
        options["stdout"] = options["stderr"] = subprocess.PIPE
    with Program(arguments, **options) as process:
        try:
            out, err = process.communicate(input, timeout=timeout)
        except BaseException:
            process.kill()
            raise
    ended = subprocess.CompletedProcess(process.args, process.returncode, out, err)
    if check:
        ended.check_returncode()
    return ended


def _fork(told: bytes, descriptors: list[int]) -> int:
    """The number of a new child of this process."""
    control, _ = _started.get(os.getpid()) or _start()
    _libc.prctl(_SUBREAPER, 1, 0, 0, 0)  # for these milliseconds only: other orphans are none of our business
    try:
        socket.send_fds(control, [told], descriptors)
        answer = control.recv(_NUMBER.size)
    finally:
        _libc.prctl(_SUBREAPER, 0, 0, 0, 0)
    assert answer, "the process that forks programs has ended; its last words are on stderr"
    return int(_NUMBER.unpack(answer)[0])


def _start() -> tuple[socket.socket, subprocess.Popen[bytes]]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    environment = {k: v for k, v in os.environ.items() if k not in (failpoints.VARIABLE, "PYTHONPATH")}
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-c", _PROGRAM, str(theirs.fileno()), *(path or os.curdir for path in sys.path)],
            pass_fds=(theirs.fileno(),),
            stdin=subprocess.DEVNULL,
            env=environment,
        )
    atexit.register(_end, os.getpid())
    return _started.setdefault(os.getpid(), (ours, process))


def _end(starter: int) -> None:
    if starter == os.getpid():
        control, process = _started.pop(starter)
        control.close()
        process.wait()


# ── in the process that forks ─────────────────────────────────────────────────────────────────────────────────────────
def _serve(control_fd: int) -> None:
    """Fork for everyone who asks. Returns in a program, after that has ended."""
    for module in IMPORTED:
        importlib.import_module(module)
    assert threading.active_count() == 1, "fork() would lose the other threads"
    del sys.path[: len(sys.argv) - 2], sys.path[0]
    gc.freeze()  # children share these pages for as long as nobody writes to them
    with socket.socket(fileno=control_fd) as control:
        while True:
            message, descriptors, _, _ = socket.recv_fds(control, 1 << 20, 64)
            if not message:
                return
            reading, writing = os.pipe()
            between = os.fork()
            if between == 0:
                parent, pid = os.getpid(), os.fork()
                if pid:  # the program becomes an orphan, and thereby a child of the process that asked
                    os.write(writing, _NUMBER.pack(pid))
                    os._exit(0)
                os.close(reading)
                os.close(writing)
                while os.getppid() == parent:
                    time.sleep(0)
                break
            os.close(writing)
            os.waitpid(between, 0)
            control.send(os.read(reading, _NUMBER.size))
            os.close(reading)
            for descriptor in descriptors:
                os.close(descriptor)
    _become(json.loads(message), descriptors)


def _become(told: dict[str, Any], descriptors: list[int]) -> None:
    """Be a program: this process was forked for it."""
    wanted = told["files"]
    above = [fcntl.fcntl(descriptor, fcntl.F_DUPFD, max(wanted) + 1) for descriptor in descriptors]
    for descriptor, number in zip(above, wanted, strict=True):
        os.dup2(descriptor, number)
    for descriptor in {*above, *descriptors} - set(wanted):
        os.close(descriptor)
    if told["session"]:
        os.setsid()
    os.chdir(told["directory"])
    os.environ.clear()
    os.environ.update(told["environment"])
    time.tzset()
    _open_streams()
    failpoints.arm_from(os.environ.get(failpoints.VARIABLE, ""))
    for action in filter(None, os.environ.get("PYTHONWARNINGS", "").split(",")):
        warnings.simplefilter(action)  # type: ignore[arg-type]
    first, *arguments = told["arguments"]
    sys.path[:0] = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    if first == "-c":
        sys.path.insert(0, "")
        sys.argv[:] = [first, *arguments[1:]]
        main = sys.modules["__main__"] = types.ModuleType("__main__")
        exec(compile(arguments[0], "<string>", "exec"), main.__dict__)
    elif first == "-m":
        sys.path.insert(0, os.getcwd())
        sys.argv[:] = arguments
        runpy.run_module(arguments[0], run_name="__main__", alter_sys=True)
    else:
        assert not first.startswith("-"), f"start Python itself for its option {first}"
        sys.path.insert(0, os.path.dirname(os.path.abspath(first)))
        sys.argv[:] = [first, *arguments]
        runpy.run_path(first, run_name="__main__")


def _open_streams() -> None:
    """Those that Python opens when it starts."""
    at_once = bool(os.environ.get("PYTHONUNBUFFERED"))
    encoding = os.environ.get("PYTHONIOENCODING") or "utf-8"
    for name, fd, mode in (("stdin", 0, "r"), ("stdout", 1, "w"), ("stderr", 2, "w")):
        errors = "backslashreplace" if name == "stderr" else getattr(sys, name).errors
        lines = name == "stderr" or os.isatty(fd)
        stream = open(fd, mode, encoding=encoding, errors=errors, closefd=False)  # noqa: SIM115 — lives as long as we do
        stream.reconfigure(line_buffering=lines, write_through=at_once)  # type: ignore[attr-defined]
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
