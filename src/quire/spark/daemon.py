"""The process that forks Spark's Python workers: pyspark's own, with one message suppressed.

Spark closes the socket of a worker whose rows are no longer needed: a limit was reached, or a query was stopped. The worker's
next write then fails with a broken pipe, and pyspark prints the stack. This is not a fault, so nothing is printed here; the
worker ends as it would have. `sessions.py` names this module in `spark.python.daemon.module`. It runs where workers run, and
imports nothing of quire, because every worker inherits what is loaded before the fork.
"""

from __future__ import annotations

from typing import Any

from pyspark import daemon

_work = daemon.worker


def worker(sock: Any, authenticated: bool) -> int:
    """Run one task in the forked process, as pyspark does; return 0 if the process may get another task."""
    try:
        return _work(sock, authenticated)
    except BrokenPipeError:
        return 1


if __name__ == "__main__":
    daemon.worker = worker
    daemon.manager()
