"""All tests of this folder belong to the process that has the Spark session (tests/conftest.py)."""

from __future__ import annotations

from pathlib import Path

import pytest

HERE = Path(__file__).parent


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist looks for the marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """All of them go to one worker (`--dist loadgroup`)."""
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.xdist_group("spark"))
