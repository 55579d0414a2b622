"""A store per test; afterwards its manifest must be clean, its feed must replay, and every promised copy must be there."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest

from quire.testing.manifest import assert_clean
from tests.jobs.world import World

_names = itertools.count(1)


@pytest.fixture(params=["path", "memory"])
def world(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[World]:
    """A store with its objects in a directory, and one with them in memory: another store than the file system."""
    url = str(tmp_path / "objects") if request.param == "path" else f"memory://jobs-{next(_names)}"
    yield from _life(tmp_path, url)


@pytest.fixture
def local(tmp_path: Path) -> Iterator[World]:
    """The same, with its objects in a directory."""
    yield from _life(tmp_path, str(tmp_path / "objects"))


def _life(tmp_path: Path, url: str) -> Iterator[World]:
    made = World(str(tmp_path), url)
    try:
        yield made
        if made.manifest.writer.failure is None:
            assert_clean(made.manifest, leaks=True)
            if not made.is_damaged:
                made.assert_sound()
            made.assert_replays()
    finally:
        made.close()
