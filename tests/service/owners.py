"""Owners and clients for the tests of the service, in this process and in others."""

from __future__ import annotations

import os
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pyarrow.flight as flight

import quire
from quire.core.settings import MaintenanceSettings, ServiceSettings, StoreSettings
from quire.durable.failpoints import armed
from quire.manifest.ops.base import Counter, Op, ReserveIds
from quire.service.wire import VERSION_HEADER, WIRE_VERSION
from quire.store.store import Store
from tests.programs import Program
from tests.rules.tree import SRC

HEADERS = [(VERSION_HEADER.encode(), str(WIRE_VERSION).encode())]

OWNER = """
import signal, sys, threading
import quire
with quire.open(sys.argv[1]) as store, store.serve(*sys.argv[2:3]) as server:
    print(server.address, flush=True)
    sys.stdin.read()
"""
"""Serves a store until its stdin is closed. The first line of its output is the address."""
HTTP_OWNER = OWNER.replace("store.serve(*sys.argv[2:3])", "store.serve_http(sys.argv[2])")
"""The same over HTTP."""


def settings(**service: Any) -> StoreSettings:
    """Settings of an owner without background maintenance."""
    return StoreSettings(maintenance=MaintenanceSettings(enabled=False), service=ServiceSettings(**service))


@contextmanager
def served(path: Path, address: str | None = None, **service: Any) -> Iterator[tuple[Store, Any]]:
    """A store and its server."""
    is_http = address is not None and address.startswith("http")
    with (
        quire.open(path, settings=settings(**service)) as store,
        store.serve_http(str(address)) if is_http else store.serve(address) as server,
    ):
        yield store, server


def process(program: str, *arguments: str, **environment: str) -> subprocess.Popen[str]:
    """A Python program in a separate process; stdin and stdout are pipes."""
    return Program(
        ["-c", program, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": f"{SRC}{os.pathsep}{SRC.parent}", **environment},
    )


def line(started: subprocess.Popen[str]) -> str:
    """The next line of a program's output."""
    assert started.stdout is not None
    return started.stdout.readline().strip()


def end(started: subprocess.Popen[str]) -> None:
    """Kill a program, if it is still running."""
    started.kill()
    started.communicate()


def reserve(*numbers: int) -> list[Op]:
    """Operations that are easy to count in the change feed."""
    return [ReserveIds(Counter.JOB, number) for number in numbers]


class BrokenConnection(flight.FlightUnavailableError, ConnectionError):  # type: ignore[misc]
    """A broken connection, as either transport reports it."""


@contextmanager
def losing_answers(times: int = 1) -> Iterator[list[str]]:
    """Drop the connection `times` times, after the owner has executed a call and before it answers. Yields the
    failpoints that were hit."""
    lost: list[str] = []

    def drop_connection(name: str) -> None:
        if len(lost) < times:
            lost.append(name)
            raise BrokenConnection("the connection broke")

    with armed("service.answer", drop_connection):
        yield lost


class Relay:
    """A proxy between a client and an owner's socket that can disturb the owner's answers.

    `fault` is called for every piece of data from the owner: "" forwards it, "drop" closes the connection, "swallow"
    discards it and keeps the connection open.
    """

    def __init__(self, path: Path, target: str) -> None:
        self.fault: Callable[[], str] = lambda: ""
        self.uri = f"grpc+unix://{path}"
        self._target = target
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(path))
        self._listener.listen()
        self._open: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client_side, _ = self._listener.accept()
                owner_side = socket.socket(socket.AF_UNIX)
                owner_side.connect(self._target)
                self._open += [client_side, owner_side]
                threading.Thread(target=self._pump, args=(client_side, owner_side, lambda: ""), daemon=True).start()
                threading.Thread(
                    target=self._pump, args=(owner_side, client_side, lambda: self.fault()), daemon=True
                ).start()

    def _pump(self, source: socket.socket, sink: socket.socket, fault: Callable[[], str]) -> None:
        with suppress(OSError):
            while piece := source.recv(65_536):
                verdict = fault()
                if verdict == "drop":
                    break
                if verdict != "swallow":
                    sink.sendall(piece)
        for end in (source, sink):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        for connection in (self._listener, *self._open):
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
            connection.close()
