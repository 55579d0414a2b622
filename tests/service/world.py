"""Owners and clients for the tests of the service: in this process and in others."""

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
"""Serves a store until its stdin ends; the first line it says is the address."""
HTTP_OWNER = OWNER.replace("store.serve(*sys.argv[2:3])", "store.serve_http(sys.argv[2])")
"""The same, over HTTP."""


def settings(**service: Any) -> StoreSettings:
    """Of an owner that does nothing by itself."""
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
    """A Python program of its own; stdin and stdout are pipes."""
    return Program(
        ["-c", program, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": f"{SRC}{os.pathsep}{SRC.parent}", **environment},
    )


def line(started: subprocess.Popen[str]) -> str:
    """The next line a program says."""
    assert started.stdout is not None
    return started.stdout.readline().strip()


def end(started: subprocess.Popen[str]) -> None:
    """Kill a program, if it has not ended."""
    started.kill()
    started.communicate()


def reserve(*numbers: int) -> list[Op]:
    """Operations that are easy to count in the feed."""
    return [ReserveIds(Counter.JOB, number) for number in numbers]


class Broken(flight.FlightUnavailableError, ConnectionError):  # type: ignore[misc]
    """What a broken connection is to either transport."""


@contextmanager
def losing_answers(times: int = 1) -> Iterator[list[str]]:
    """Answers are lost after the owner has done what they tell of, so many times; which points were passed."""
    lost: list[str] = []

    def lose(name: str) -> None:
        if len(lost) < times:
            lost.append(name)
            raise Broken("the connection broke")

    with armed("service.answer", lose):
        yield lost


class Relay:
    """Stands between a client and an owner's socket, and harms what the owner says when it is told to.

    `harm` is looked at for every piece of the owner's: "" passes it on, "drop" closes the connection, "swallow" keeps it open.
    """

    def __init__(self, path: Path, target: str) -> None:
        self.harm: Callable[[], str] = lambda: ""
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
                near, _ = self._listener.accept()
                far = socket.socket(socket.AF_UNIX)
                far.connect(self._target)
                self._open += [near, far]
                threading.Thread(target=self._pump, args=(near, far, lambda: ""), daemon=True).start()
                threading.Thread(target=self._pump, args=(far, near, lambda: self.harm()), daemon=True).start()

    def _pump(self, source: socket.socket, sink: socket.socket, harm: Callable[[], str]) -> None:
        with suppress(OSError):
            while piece := source.recv(65_536):
                verdict = harm()
                if verdict == "drop":
                    break
                if verdict != "swallow":
                    sink.sendall(piece)
        for each in (source, sink):
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        for each in (self._listener, *self._open):
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()
