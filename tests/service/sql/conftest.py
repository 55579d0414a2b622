"""A store whose SQL is served; it is sound when the test ends."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import quire
from quire.store.store import Store
from tests.service.sql.world import SqlAsker, sql_served


@pytest.fixture
def path(tmp_path: Path) -> Iterator[Path]:
    root = tmp_path / "store"
    yield root
    with quire.open(root) as store:
        assert store.manifest.check() == []


@pytest.fixture
def served(path: Path) -> Iterator[tuple[Store, SqlAsker]]:
    with sql_served(path) as both:
        yield both


@pytest.fixture
def asker(served: tuple[Store, SqlAsker]) -> SqlAsker:
    return served[1]


@pytest.fixture
def store(served: tuple[Store, SqlAsker]) -> Store:
    return served[0]
