"""One Spark session for all tests of this folder, in one process of the test run: starting a JVM takes ten seconds."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from quire.spark.session import session

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

HERE = Path(__file__).parent


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist looks for the marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """All of them go to one worker (`--dist loadgroup`)."""
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.xdist_group("spark"))


@pytest.fixture(scope="session")
def spark() -> Iterator[SparkSession]:
    """The session: two cores of this machine."""
    made = session("local[2]", memory="1g")
    yield made
    stop(made)


def stop(made: SparkSession) -> None:
    """End a session, with the sockets that its gateway leaves to the collector."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        made.stop()
        gc.collect()
