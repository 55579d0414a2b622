"""A served store and a client of it. The manifest is checked when the test ends."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import quire
from quire.service.client import Client, connect
from quire.store.store import Store
from tests.service.owners import OWNER, end, line, process, served

Start = Callable[..., tuple[subprocess.Popen[str], str]]


@pytest.fixture
def path(tmp_path: Path) -> Iterator[Path]:
    root = tmp_path / "store"
    yield root
    with quire.open(root) as store:
        assert store.manifest.check() == []


@pytest.fixture
def service(path: Path) -> Iterator[tuple[Store, Any]]:
    with served(path) as store_and_server:
        yield store_and_server


@pytest.fixture
def store(service: tuple[Store, Any]) -> Store:
    return service[0]


@pytest.fixture
def server(service: tuple[Store, Any]) -> Any:
    return service[1]


@pytest.fixture
def client(server: Any) -> Iterator[Client]:
    with connect(server.address) as connected:
        yield connected


@pytest.fixture
def owner(path: Path) -> Iterator[Start]:
    """Start an owner in a separate process; returns (process, address)."""
    started: list[subprocess.Popen[str]] = []

    def start(*arguments: str, **environment: str) -> tuple[subprocess.Popen[str], str]:
        started.append(process(OWNER, str(path), *arguments, **environment))
        return started[-1], line(started[-1])

    yield start
    for owner_process in started:
        end(owner_process)
