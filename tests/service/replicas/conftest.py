"""A store that another process serves, shared by the tests of a module. Each test has its own databases."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.service.replicas.served_store import ServedStore


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedStore]:
    store = ServedStore(tmp_path_factory.mktemp("served") / "store")
    yield store
    store.close()


@pytest.fixture
def name(request: pytest.FixtureRequest, served: ServedStore) -> str:
    """A database with a table `t` of three rows."""
    name = f"db{abs(hash(request.node.name)) % 10**9}"
    served.sql("CREATE TABLE t(a)", "INSERT INTO t VALUES (1), (2), (3)", name=name)
    return name


@pytest.fixture
def local(tmp_path: Path) -> Path:
    """The path of the replica."""
    return tmp_path / "replica.db"
