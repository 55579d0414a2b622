"""The process that forks Spark's Python workers: pyspark's own, but for one thing that it says aloud.

Spark closes the socket of a worker whose rows nobody wants any more: a limit was reached, a query was stopped. The worker
then meets a broken pipe with its next word, and pyspark prints the stack. Nothing is wrong, so here nothing is printed; the
worker ends as it would have. Named in `spark.python.daemon.module` by `session.py`; runs where workers run, and loads
nothing of quire: what is loaded before the fork every worker has.
"""

from __future__ import annotations

from typing import Any

from pyspark import daemon

_work = daemon.worker


def worker(sock: Any, authenticated: bool) -> int:
    """What pyspark calls in the forked process, for each task; 0 if it may have another one."""
    try:
        return _work(sock, authenticated)
    except BrokenPipeError:
        return 1


if __name__ == "__main__":
    daemon.worker = worker
    daemon.manager()
