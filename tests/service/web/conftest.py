"""A furnished store with its HTTP side, and those who ask."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import quire
from quire.service.web.server import WebServer
from quire.store.store import Store
from tests.service.web.world import Asker, admin, furnish, web_served


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Without the check of the neighbours' fixture: some catalogs here are made up."""
    return tmp_path / "store"


@pytest.fixture
def both(path: Path) -> Iterator[tuple[Store, WebServer]]:
    with web_served(path) as pair:
        yield pair
    with quire.open(path) as store:
        assert store.manifest.check() == []


@pytest.fixture
def store(both: tuple[Store, WebServer]) -> Store:
    return both[0]


@pytest.fixture
def web(both: tuple[Store, WebServer]) -> WebServer:
    return both[1]


@pytest.fixture
def anybody(web: WebServer) -> Asker:
    return Asker(web.address)


@pytest.fixture
def boss(web: WebServer, store: Store) -> Asker:
    return admin(web, store)


@pytest.fixture
def furnished(store: Store, web: WebServer) -> Store:
    furnish(store)
    web._web.watched.cached.forget()  # figures are kept for a moment
    return store
