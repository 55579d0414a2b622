"""Where an owner listens on its own machine, and how clients find it (K8).

The socket is in the store. If that path is too long for a socket, or cannot be part of an address unescaped (it has a space,
say), the socket is in a directory that a pointer in the store names.

Terms
  place     the path of the socket that clients connect to
  pointer   `quire.sock.at` in the store: contains the place if it is not `quire.sock` itself
  stale     a socket that no process listens on: its owner was killed

Rules
  1. A process that may open the socket is admitted: the socket has mode 0600 from the moment it can be connected to. It is
     bound in a directory of mode 0700, gets its mode, and only then its name; the umask belongs to the whole process and is
     left alone.
  2. Only the owner of the store creates, replaces or removes any of these files: it holds the store's lock. So a socket that
     exists when the owner begins to listen is either its own, and live, or stale.
  3. A directory for sockets outside the store must be ours alone (owner, mode 0700, not a link), or it is not used.

Threads: any for `await_owner`, `register_server` and `registered_servers`; one at a time for the rest. Raises
`InvalidInput` if the store is already served, `NotWritable` and `StorageFault` for errors of the system.
"""

from __future__ import annotations

import os
import re
import shutil
import socket
import stat
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any
from weakref import WeakSet

from quire.core.errors import InvalidInput, NotWritable, StorageFault
from quire.durable import names
from quire.durable.files import Disk, OsDisk, read_all, translated, write_atomic

START_POLL_SECONDS = 0.05
"""Time between two looks for an owner that is starting."""

SOCKET_BYTES_MAX = 100
"""The longest path of a socket: the system's limit is 107 bytes, and the path at which the socket is bound must fit, too."""

SCHEME = "grpc+unix://"
_PLAIN = re.compile(r"[A-Za-z0-9._~!$&'()*+,;=:@/-]*")
"""Characters that the path of an address may contain unescaped (RFC 3986): Flight accepts no others, and decodes none."""
RUNTIME_VARIABLE = "XDG_RUNTIME_DIR"

_PRIVATE = ".d"
"""The suffix of the directory in which the socket is bound; with the name in it, four bytes."""


@dataclass(frozen=True, slots=True)
class SocketPath:
    """The place of a store's socket."""

    path: str
    pointer: str
    """The file that contains the place; empty if the socket is in the store."""

    @property
    def uri(self) -> str:
        return SCHEME + self.path


def place_of(root: str) -> SocketPath:
    """Return the place of a store's socket; create the directory outside the store if it is needed."""
    inside = os.path.join(root, names.SOCKET)
    if len(os.fsencode(inside)) <= SOCKET_BYTES_MAX and _PLAIN.fullmatch(inside):
        return SocketPath(inside, "")
    digest = blake2b(os.fsencode(os.path.realpath(root)), digest_size=8).hexdigest()
    outside = os.path.join(runtime_directory(), f"{digest}.sock")
    if len(os.fsencode(outside)) > SOCKET_BYTES_MAX or not _PLAIN.fullmatch(outside):
        raise InvalidInput(
            "no directory is short and plain enough for the socket",
            hint=f"set {RUNTIME_VARIABLE} or TMPDIR",
            path=outside,
        )
    return SocketPath(outside, os.path.join(root, names.SOCKET_POINTER))


def runtime_directory() -> str:
    """Return a directory for sockets outside the store, if it is ours alone (rule 3)."""
    given = os.environ.get(RUNTIME_VARIABLE, "")
    path = os.path.join(given, "quire") if given else os.path.join(tempfile.gettempdir(), f"quire-{os.getuid()}")
    with translated(path, "creating the directory for sockets"):
        with suppress(FileExistsError):
            os.mkdir(path, 0o700)
        status = os.lstat(path)
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise NotWritable(
            "other users can access the directory for sockets", hint=f"remove it, or set {RUNTIME_VARIABLE}", path=path
        )
    return path


def is_alive(path: str) -> bool:
    """Return whether a process listens on a socket."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(path)
        except OSError:
            return False
        return True


def where_owner_listens(disk: Disk, root: str) -> str:
    """Return the path of the socket of a store's owner; empty if there is none. It may be stale."""
    inside = os.path.join(root, names.SOCKET)
    if os.path.exists(inside):
        return inside
    try:
        return read_all(disk, os.path.join(root, names.SOCKET_POINTER)).decode()
    except (FileNotFoundError, StorageFault, UnicodeDecodeError):
        return ""


def await_owner(root: str, seconds: float) -> str:
    """Return where the owner listens, as soon as it does; an empty string if none listens after this time."""
    deadline = time.monotonic() + seconds
    while True:
        path = where_owner_listens(OsDisk(), root)
        if path and is_alive(path):
            return path
        if time.monotonic() >= deadline:
            return ""
        time.sleep(START_POLL_SECONDS)


@contextmanager
def binding(place: SocketPath) -> Iterator[str]:
    """Yield the path to bind at; when the block ends without an error, the socket gets its mode and its place (rule 1)."""
    if is_alive(place.path):
        raise InvalidInput(
            "this store already has a server", hint="connect to that server, or stop it first", address=place.uri
        )
    private = place.path + _PRIVATE
    shutil.rmtree(private, ignore_errors=True)  # left by an owner that was killed at this point
    with translated(private, "creating the socket"):
        os.mkdir(private, 0o700)
    bound = os.path.join(private, "q")
    try:
        yield bound
        with translated(place.path, "creating the socket"):
            os.chmod(bound, 0o600)
            os.rename(bound, place.path)
    finally:
        shutil.rmtree(private, ignore_errors=True)


def announce(disk: Disk, root: str, place: SocketPath) -> None:
    """Write the pointer to the socket, if it is not in the store; remove the other of the two files."""
    if place.pointer:
        write_atomic(disk, place.pointer, place.path.encode())
        with suppress(FileNotFoundError):
            # left from a time when the path was shorter: clients would try it first
            os.unlink(os.path.join(root, names.SOCKET))
    else:
        with suppress(FileNotFoundError):
            os.unlink(os.path.join(root, names.SOCKET_POINTER))


def retract(place: SocketPath) -> None:
    """Remove the socket and the pointer: the owner no longer listens."""
    for path in (place.path, place.pointer):
        if path:
            with suppress(FileNotFoundError):
                os.unlink(path)


# ── closing connections ───────────────────────────────────────────────────────────────────────────────────────────────
DESCRIPTORS = "/proc/self/fd"


def hang_up(bound: str | int) -> int:
    """Shut down the connections accepted at a socket's path or at a TCP port; return their number."""
    ended = 0
    for name in os.listdir(DESCRIPTORS):
        with suppress(OSError):
            # Only sockets are duplicated: `socket()` would leave a duplicate of another file open, and closing a duplicate of
            # LMDB's lock file would release this process's lock on it.
            if not stat.S_ISSOCK(os.stat(os.path.join(DESCRIPTORS, name)).st_mode):
                continue
            with socket.socket(fileno=os.dup(int(name))) as copy:
                if _is_ours(copy, bound):
                    copy.shutdown(socket.SHUT_RDWR)
                    ended += 1
    return ended


def _is_ours(connection: socket.socket, bound: str | int) -> bool:
    """Return whether a connection was accepted at `bound`; raise `OSError` for a listening socket, which has no peer."""
    here = connection.getsockname()
    if isinstance(bound, str):
        if connection.family != socket.AF_UNIX or here != bound:
            return False
    elif connection.family not in (socket.AF_INET, socket.AF_INET6) or here[1] != bound:
        return False
    connection.getpeername()
    return True


# ── servers of this process ───────────────────────────────────────────────────────────────────────────────────────────
_lock = threading.Lock()
_servers: WeakSet[Any] = WeakSet()


def register_server(server: Any) -> None:
    """Register a server, which has a `path` and `figures()`: metrics include its figures."""
    with _lock:
        _servers.add(server)


def registered_servers(path: str) -> list[Any]:
    """Return the servers of a store in this process."""
    with _lock:
        return [server for server in _servers if server.path == path]
