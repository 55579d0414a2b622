"""An engine per test; afterwards its manifest must be clean, and a second life must find everything."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.pages.world import Pages


@pytest.fixture
def pages(tmp_path: Path) -> Iterator[Pages]:
    """An engine over a directory, with a clock that stands still."""
    made = Pages(tmp_path)
    yield made
    made.stop()
