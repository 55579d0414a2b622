"""Forking a database of 10 GiB: a part of `python -m bench sqlite`.

The database is nearly all holes, which only the manifest can create: a transaction writes zeros for the pages that it adds.
"""

from __future__ import annotations

import statistics
import time
from pathlib import Path

import quire
from bench.report import GIB, Report
from bench.sqlite import SETTINGS
from quire.manifest.ops.wal import AdvanceWal


def fork_and_query(report: Report, directory: Path, quick: bool) -> None:
    """Fork a database of 10 GiB, nearly all of which are holes, and one of a few pages: both must cost the same."""
    root, rounds = directory / "fork", 7 if quick else 21
    store = quire.open(root, settings=SETTINGS)
    for name in ("large", "small"):
        with store.sqlite(name, create=True) as connection:
            connection.execute("create table t(a); insert into t values ('kept')")
        connection.close()
    store.close()
    store = quire.open(root, settings=SETTINGS)
    pages = 10 * GIB // 4096
    _stretch(store, "large", pages)
    commits: list[float] = []
    writer = store.sqlite("small")
    for number in range(rounds * 5):
        started = time.perf_counter()
        writer.execute("insert into t values (?)", (number,))
        commits.append(time.perf_counter() - started)
    commit = statistics.median(commits)
    times: dict[str, list[float]] = {"large": [], "small": []}
    for number in range(rounds):
        for name, durations in times.items():
            started = time.perf_counter()
            fork = store.sqlite(f"{name}-{number}", fork_of=name)
            value = fork.execute("select a from t limit 1").get
            durations.append(time.perf_counter() - started)
            assert value == "kept"
            fork.close()
    large, small = (statistics.median(times[name]) for name in ("large", "small"))
    detail = (
        f"{large * 1e3:.2f} ms against {commit * 1e3:.2f} ms for a commit; of a small database {small * 1e3:.2f} ms"
    )
    report.ratio("fork_10gib_and_query_vs_commit", large / commit, 10, "lower", detail)
    writer.close()
    store.close()


def _stretch(store: quire.Store, name: str, pages: int) -> None:
    """Grow a database without writing pages: those that were never written are zeros."""
    db_id = store.database(name).db_id
    store.manifest.submit([AdvanceWal(db_id, 0, size_pages=pages)]).result()
    with store.pages.open(name).begin() as txn:
        assert txn.size_pages == pages, "the engine takes the size from the manifest"
        header = txn.read_page(0)
        txn.write_page(0, header[:28] + pages.to_bytes(4, "big") + header[32:])


PARTS = (fork_and_query,)
