"""These tests ask a disk, wherever the others have their files: they are about what a file system does."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    """A directory that outlives the machine being switched off."""
    with tempfile.TemporaryDirectory(dir="/var/tmp") as name:
        yield Path(name)
