"""Python programs in separate processes, forked within milliseconds from a process that has imported quire.

`Program` and `run_program` take the arguments of `subprocess.Popen` and `subprocess.run`, without the interpreter:
`["-c", code, …]`, `["-m", module, …]` or `[file, …]`. Use them in every test that is not about how a program
starts or what it imports: starting Python and importing a store takes half a second of CPU time.

Rules
  1. The process is a child of this one, as if it had been started here: it is waited for, killed and listed as usual.
  2. It has the environment, directory, files, arguments and `sys.path` of a started program, and ends like Python:
     `atexit`, threads and tracebacks included.
  3. It differs in two ways: modules of quire are already imported, and values that modules read from the environment at
     import are those of the time when the first program was started. (`QUIRE_FAILPOINTS` is read again.)
  4. The forking process has one thread, and ends with this one, because its socket is closed.

Threads: any thread may start programs.
Raises `AssertionError` if the forking process has ended.

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
"""`PR_SET_CHILD_SUBREAPER`: orphaned descendants become children of this process."""

_libc = ctypes.CDLL(None, use_errno=True)
_lock = threading.Lock()
_started: dict[int, tuple[socket.socket, subprocess.Popen[bytes]]] = {}
"""The forking process and the socket to it, by the pid of the process that started it: a fork of this process starts
its own."""


class Program(subprocess.Popen[str]):
    """A running program."""

    def __init__(self, arguments: Sequence[str], **options: Any) -> None:
        super().__init__([sys.executable, *map(os.fspath, arguments)], **{"text": True, **options})

    def _execute_child(self, *arguments: Any) -> None:
        args, _, preexec_fn, _, pass_fds, cwd, env = arguments[:7]
        stdin, _, _, stdout, _, stderr = pipes = arguments[10:16]
        assert preexec_fn is None, "the program is forked by another process"
        request = {
            "arguments": args[1:],
            "environment": dict(os.environ if env is None else env),
            "directory": os.path.abspath(cwd or os.curdir),
            "files": [0, 1, 2, *pass_fds],
            "session": arguments[-2],
        }
        standard = [
            number if descriptor == -1 else descriptor for number, descriptor in enumerate((stdin, stdout, stderr))
        ]
        with _lock:
            self.pid = _fork(json.dumps(request).encode(), [*standard, *pass_fds])
        self._child_created = True
        self._close_pipe_fds(*pipes)  # type: ignore[attr-defined]


def run_program(
    arguments: Sequence[str],
    *,
    input: str | None = None,  # noqa: A002 — the name in `subprocess.run`
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
    result = subprocess.CompletedProcess(process.args, process.returncode, out, err)
    if check:
        result.check_returncode()
    return result


def _fork(request: bytes, descriptors: list[int]) -> int:
    """Fork a child of this process; returns its pid."""
    control, _ = _started.get(os.getpid()) or _start()
    _libc.prctl(_SUBREAPER, 1, 0, 0, 0)  # only for these milliseconds: other orphans must not become our children
    try:
        socket.send_fds(control, [request], descriptors)
        answer = control.recv(_NUMBER.size)
    finally:
        _libc.prctl(_SUBREAPER, 0, 0, 0, 0)
    assert answer, "the forking process has ended; see its stderr"
    return int(_NUMBER.unpack(answer)[0])


def _start() -> tuple[socket.socket, subprocess.Popen[bytes]]:
    client_end, server_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    environment = {k: v for k, v in os.environ.items() if k not in (failpoints.VARIABLE, "PYTHONPATH")}
    with server_end:
        process = subprocess.Popen(
            [sys.executable, "-c", _PROGRAM, str(server_end.fileno()), *(path or os.curdir for path in sys.path)],
            pass_fds=(server_end.fileno(),),
            stdin=subprocess.DEVNULL,
            env=environment,
        )
    atexit.register(_end, os.getpid())
    return _started.setdefault(os.getpid(), (client_end, process))


def _end(starter: int) -> None:
    if starter == os.getpid():
        control, process = _started.pop(starter)
        control.close()
        process.wait()


# ── in the forking process ────────────────────────────────────────────────────────────────────────────────────────────
def _serve(control_fd: int) -> None:
    """Fork on request. Returns in a forked program, after that has ended."""
    for module in IMPORTED:
        importlib.import_module(module)
    assert threading.active_count() == 1, "fork() would lose the other threads"
    del sys.path[: len(sys.argv) - 2], sys.path[0]
    gc.freeze()  # children share these pages until one is written
    with socket.socket(fileno=control_fd) as control:
        while True:
            message, descriptors, _, _ = socket.recv_fds(control, 1 << 20, 64)
            if not message:
                return
            reading, writing = os.pipe()
            intermediate_pid = os.fork()
            if intermediate_pid == 0:
                parent, pid = os.getpid(), os.fork()
                if pid:  # the program becomes an orphan, and thereby a child of the requesting process
                    os.write(writing, _NUMBER.pack(pid))
                    os._exit(0)
                os.close(reading)
                os.close(writing)
                while os.getppid() == parent:
                    time.sleep(0)
                break
            os.close(writing)
            os.waitpid(intermediate_pid, 0)
            control.send(os.read(reading, _NUMBER.size))
            os.close(reading)
            for descriptor in descriptors:
                os.close(descriptor)
    _run_requested(json.loads(message), descriptors)


def _run_requested(request: dict[str, Any], descriptors: list[int]) -> None:
    """Run the requested program in this process, which was forked for it."""
    target_fds = request["files"]
    moved_fds = [fcntl.fcntl(descriptor, fcntl.F_DUPFD, max(target_fds) + 1) for descriptor in descriptors]
    for descriptor, number in zip(moved_fds, target_fds, strict=True):
        os.dup2(descriptor, number)
    for descriptor in {*moved_fds, *descriptors} - set(target_fds):
        os.close(descriptor)
    if request["session"]:
        os.setsid()
    os.chdir(request["directory"])
    os.environ.clear()
    os.environ.update(request["environment"])
    time.tzset()
    _open_streams()
    failpoints.arm_from(os.environ.get(failpoints.VARIABLE, ""))
    for action in filter(None, os.environ.get("PYTHONWARNINGS", "").split(",")):
        warnings.simplefilter(action)  # type: ignore[arg-type]
    first, *arguments = request["arguments"]
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
        assert not first.startswith("-"), f"start the interpreter itself for its option {first}"
        sys.path.insert(0, os.path.dirname(os.path.abspath(first)))
        sys.argv[:] = [first, *arguments]
        runpy.run_path(first, run_name="__main__")


def _open_streams() -> None:
    """Open the streams that Python opens when it starts."""
    is_unbuffered = bool(os.environ.get("PYTHONUNBUFFERED"))
    encoding = os.environ.get("PYTHONIOENCODING") or "utf-8"
    for name, fd, mode in (("stdin", 0, "r"), ("stdout", 1, "w"), ("stderr", 2, "w")):
        errors = "backslashreplace" if name == "stderr" else getattr(sys, name).errors
        lines = name == "stderr" or os.isatty(fd)
        stream = open(fd, mode, encoding=encoding, errors=errors, closefd=False)  # noqa: SIM115 — lives as long as we do
        stream.reconfigure(line_buffering=lines, write_through=is_unbuffered)  # type: ignore[attr-defined]
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
