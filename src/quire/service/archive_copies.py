"""Copies of archived stores that are served to Spark: `store="s3://…"`, and the directory of a standby or a restore.

Spark sources are clients. If no process serves the store that they need, a process is started next to the driver that opens a
copy of the archive (`quire.open_archive`) and serves it: `store/archive_copy_server.py`.

Rules
  1. Each driver has its own copies. A copy ends with its driver, or when it has had no request for `IDLE_SECONDS`; tasks send a
     request every minute while they read.
  2. Queries share a copy for `FRESH_SECONDS`; the next query gets a newer one. The older copy is served meanwhile.
  3. Credentials are passed through the environment, or in the quire.toml of the requested directory; never as arguments, and
     never in the note that names a copy.

Threads and processes: any; a file lock lets one at a time start a copy. Importable on executors. Raises `Unavailable`, and what
opening the archive raises.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from contextlib import closing, suppress
from hashlib import blake2b

import msgspec

from quire.core.clock import SystemClock
from quire.core.decoding import UNDECODABLE, described
from quire.core.errors import StoreLocked, Unavailable
from quire.core.time_parsing import parse_moment
from quire.durable.files import OsDisk, read_all, write_atomic
from quire.durable.locks import FileLock
from quire.service.sockets import is_alive, runtime_directory, where_owner_listens
from quire.service.wire import error_of, read_form

FRESH_SECONDS = 60
"""How long queries share a copy: restoring one takes seconds."""
IDLE_SECONDS = 300
"""How long a copy is served without a request."""
START_SECONDS = 600.0
"""How long restoring a copy may take before another process gives up waiting for it."""
ANSWER_BYTES_MAX = 65_536
MODULE = "quire.store.archive_copy_server"
READY = b"ready "


class CopyRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Identifies a copy."""

    url: str
    store_id: str = ""
    at: str = ""
    """A moment in the syntax of `core/time_parsing.py`; empty: the newest."""
    config: str = ""
    """A directory whose quire.toml configures access to the bucket; empty: the environment does."""
    driver: int = 0
    """The process whose end also ends the copy."""


class ServedCopy(msgspec.Struct, frozen=True, kw_only=True):
    """The contents of the note that names a copy."""

    path: str
    at_ms: int
    """When the copy was requested."""


def served_copy(request: CopyRequest) -> str:
    """Return the socket of a copy that is fresh, or of a new one."""
    if request.at:
        parse_moment(request.at, "archived_at", now_ms=SystemClock().now_ms())  # fail before anything is started
    request = msgspec.structs.replace(request, driver=driver_of(os.getpid()))
    name = blake2b(msgspec.json.encode(request), digest_size=12).hexdigest()
    note = os.path.join(runtime_directory(), f"copy-{name}.json")
    with closing(_locked(f"{note}.lock")):
        if socket_path := _fresh(note):
            return socket_path
        now_ms = SystemClock().now_ms()  # before the restore, which takes seconds
        path = _start(request)
        write_atomic(OsDisk(), note, msgspec.json.encode(ServedCopy(path=path, at_ms=now_ms)))
        return where_owner_listens(OsDisk(), path)


def driver_of(pid: int) -> int:
    """Return the JVM below which a process runs, for Spark; otherwise the process itself."""
    above = pid
    with suppress(OSError, ValueError, IndexError):
        while above > 1:
            with open(f"/proc/{above}/stat", encoding="utf-8", errors="replace") as file:
                command, _, rest = file.read().partition("(")[2].rpartition(")")
            if command == "java":
                return above
            above = int(rest.split()[1])
    return pid


def _locked(path: str) -> FileLock:
    ends = time.monotonic() + START_SECONDS
    while True:
        try:
            return FileLock.acquire(path)
        except StoreLocked:
            if time.monotonic() > ends:
                raise
            time.sleep(0.1)


def _fresh(note: str) -> str:
    """Return the socket of the copy that a note names if it is fresh and alive; otherwise an empty string."""
    try:
        copy = msgspec.json.decode(read_all(OsDisk(), note), type=described(ServedCopy))
    except (FileNotFoundError, *UNDECODABLE):
        return ""
    if not 0 <= SystemClock().now_ms() - copy.at_ms < FRESH_SECONDS * 1_000:
        return ""
    socket_path = where_owner_listens(OsDisk(), copy.path)
    return socket_path if socket_path and is_alive(socket_path) else ""


def _start(request: CopyRequest) -> str:
    """Start a process that serves a copy and return the copy's directory."""
    process = subprocess.Popen(
        [sys.executable, "-m", MODULE],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        start_new_session=True,  # an interrupt in a notebook is meant for the query
    )
    assert process.stdin is not None
    assert process.stdout is not None
    with process.stdout as answers:
        with process.stdin as asked, suppress(BrokenPipeError):
            asked.write(msgspec.json.encode(request))
        answer = answers.read(ANSWER_BYTES_MAX)
    if answer.startswith(READY):
        # The process keeps running; when it ends, it must be waited for, or it stays in the process table.
        threading.Thread(target=process.wait, name="quire-copy-wait", daemon=True).start()
        return os.fsdecode(answer.removeprefix(READY))
    process.wait()
    if answer:
        raise error_of(read_form(answer))
    raise Unavailable("a copy of the archive could not be opened", url=request.url, exit_code=process.returncode)
