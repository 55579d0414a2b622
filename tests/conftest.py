"""Settings for the whole test run, and the one Spark session that tests share: starting a JVM takes ten seconds and more."""

from __future__ import annotations

import gc
import os
import warnings
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

# Deadlines measure the machine, not the code: a slow disk would make a property fail.
settings.register_profile(
    "default", deadline=None, max_examples=60, stateful_step_count=30, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile(
    "torture", settings.get_profile("default"), max_examples=2_000, stateful_step_count=100, print_blob=True
)
settings.load_profile(os.environ.get("QUIRE_HYPOTHESIS_PROFILE", "default"))


@pytest.fixture(scope="session")
def spark() -> Iterator[SparkSession]:
    """The session: two cores of this machine. Tests that use it belong to the xdist group "spark": one process has it."""
    from quire.spark.session import session

    made = session("local[2]", memory="1g")
    yield made
    stop(made)


def stop(made: SparkSession) -> None:
    """End a session, with the sockets that its gateway leaves to the collector."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        made.stop()
        gc.collect()


@pytest.fixture
def lent_spark(spark: SparkSession, monkeypatch: pytest.MonkeyPatch) -> SparkSession:
    """The session, for a program that makes and stops its own: it gets this one, and stopping it does nothing."""
    monkeypatch.setattr(type(spark), "stop", lambda _: None)
    return spark
