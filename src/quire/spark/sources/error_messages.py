"""Readable quire errors in Spark's messages: the sentence and its hint first, Python's traceback after them.

Spark runs data sources in workers and shows what a worker has printed of an exception: a page of frames, with the sentence
that matters at its end. A quire error is shown the other way round. Spark is made to leave out the traceback, as by its
setting `spark.sql.execution.pyspark.udf.hideTraceback.enabled`, and the error carries it as a note, which is printed below
the text. The worker ends with the error, so no other error is shown without its traceback.

Threads: any. Importable on executors.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

from quire.core.errors import QuireError

ENTRIES = frozenset(
    {
        "abort",
        "commit",
        "initialOffset",
        "latestOffset",
        "partitions",
        "prepareForTriggerAvailableNow",
        "read",
        "reader",
        "reportLatestOffset",
        "schema",
        "streamReader",
        "streamWriter",
        "write",
        "writer",
    }
)
"""The methods that Spark calls."""

HIDE = "SPARK_HIDE_TRACEBACK"
WORKERS = ("pyspark.", "quire.spark.daemon")
"""Prefixes of the name of a Python worker's main module."""


class ReadableErrors:
    """Base of sources, readers and writers: makes the errors of methods that Spark calls readable."""

    def __init_subclass__(cls, **more: Any) -> None:
        super().__init_subclass__(**more)
        for name in ENTRIES & vars(cls).keys():
            setattr(cls, name, _explained(vars(cls)[name]))


def _explained(method: Callable[..., Any]) -> Callable[..., Any]:
    if method.__name__ == "read":  # a generator: its errors are raised while Spark iterates

        @wraps(method)
        def rows(*arguments: Any, **named: Any) -> Iterator[Any]:
            with readable_errors():
                yield from method(*arguments, **named)

        return rows

    @wraps(method)
    def call(*arguments: Any, **named: Any) -> Any:
        with readable_errors():
            return method(*arguments, **named)

    return call


@contextmanager
def readable_errors() -> Iterator[None]:
    """Make Spark print a quire error with its traceback below; only in a worker."""
    try:
        yield
    except QuireError as error:
        if _is_worker() and not hasattr(error, "__notes__"):
            error.add_note("".join(traceback.format_exception(error)))
            os.environ[HIDE] = "1"
        raise


def _is_worker() -> bool:
    spec = getattr(sys.modules.get("__main__"), "__spec__", None)
    return spec is not None and spec.name.startswith(WORKERS)
