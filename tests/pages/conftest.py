"""An engine per test; afterwards its manifest must be clean."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.pages.engine_harness import Pages


@pytest.fixture
def pages(tmp_path: Path) -> Iterator[Pages]:
    """An engine on a directory, with a clock that only tests advance."""
    pages = Pages(tmp_path)
    yield pages
    pages.stop()
