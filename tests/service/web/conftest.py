"""A populated store with its HTTP server, and clients with and without a token."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import quire
from quire.service.web.server import WebServer
from quire.store.store import Store
from tests.service.web.http_client import HttpClient, admin_client, populate, web_served


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Without the manifest check of the parent's fixture: some tests write catalog rows by hand."""
    return tmp_path / "store"


@pytest.fixture
def store_and_web(path: Path) -> Iterator[tuple[Store, WebServer]]:
    with web_served(path) as pair:
        yield pair
    with quire.open(path) as store:
        assert store.manifest.check() == []


@pytest.fixture
def store(store_and_web: tuple[Store, WebServer]) -> Store:
    return store_and_web[0]


@pytest.fixture
def web(store_and_web: tuple[Store, WebServer]) -> WebServer:
    return store_and_web[1]


@pytest.fixture
def anonymous(web: WebServer) -> HttpClient:
    return HttpClient(web.address)


@pytest.fixture
def admin(web: WebServer, store: Store) -> HttpClient:
    return admin_client(web, store)


@pytest.fixture
def populated(store: Store, web: WebServer) -> Store:
    populate(store)
    web._web.watched.cached.forget()  # metrics are cached for a moment
    return store
