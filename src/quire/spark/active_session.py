"""The session in which this thread's Spark work runs, and the description of that work in Spark's user interface.

Threads: any.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def make_active(spark: SparkSession) -> None:
    """Make a session the active one of this thread: Spark looks there for a source that is written to.

    A thread has no active session before it creates its first frame from data, and no public call sets one.
    """
    if is_connect(spark):
        return
    classic: Any = spark
    type(classic)._activeSession = classic
    type(classic)._get_j_spark_session_class(classic._jvm).setActiveSession(classic._jsparkSession)


@contextmanager
def job_description(spark: SparkSession, text: str) -> Iterator[None]:
    """Describe the jobs that this thread starts in the block, in Spark's user interface. Connect has no such setting."""
    if is_connect(spark):
        yield
        return
    context: Any = spark.sparkContext
    before = context.getLocalProperty("spark.job.description")
    context.setJobDescription(text)
    try:
        yield
    finally:
        context.setJobDescription(before)


def is_connect(spark: SparkSession) -> bool:
    """Return whether a session is one of Spark Connect: it has no JVM here."""
    return type(spark).__module__.startswith("pyspark.sql.connect")
