"""These tests use a disk, even if other tests keep their files in memory: they test what a file system does."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    """A directory on a persistent file system."""
    with tempfile.TemporaryDirectory(dir="/var/tmp") as name:
        yield Path(name)
