"""A store whose SQL is served. The manifest is checked when the test ends."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import quire
from quire.store.store import Store
from tests.service.sql.hrana_client import HranaClient, sql_served


@pytest.fixture
def path(tmp_path: Path) -> Iterator[Path]:
    root = tmp_path / "store"
    yield root
    with quire.open(root) as store:
        assert store.manifest.check() == []


@pytest.fixture
def served(path: Path) -> Iterator[tuple[Store, HranaClient]]:
    with sql_served(path) as store_and_client:
        yield store_and_client


@pytest.fixture
def hrana(served: tuple[Store, HranaClient]) -> HranaClient:
    return served[1]


@pytest.fixture
def store(served: tuple[Store, HranaClient]) -> Store:
    return served[0]
