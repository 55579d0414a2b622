"""The change feed on Spark against the feed in the owner's process, where every record is decoded too.

Run as part of `python -m bench spark`. A change is the smallest operation of the manifest, which no public call submits: the
time of larger ones is spent on converting them to JSON, not on reading the feed.
"""

from __future__ import annotations

from pathlib import Path

import quire
from bench.report import Report, alternate, seconds
from bench.spark import SETTINGS, drain, spark
from quire.manifest.ops.base import Counter, ReserveIds
from quire.spark import options_of


def changes(report: Report, directory: Path, quick: bool) -> None:
    """Read changes with `quire.changes`, against `feed.fetch` in the owner's process."""
    count, rounds = (20_000, 1) if quick else (1_000_000, 3)
    with quire.open(directory / "changes", settings=SETTINGS) as store:
        store.feed.register(name="bench")
        guards = [store.manifest.submit([ReserveIds(Counter.JOB, number)]) for number in range(1_000, 1_000 + count)]
        guards[-1].result()
        frame = spark().read.format("quire.changes").options(**options_of(store), last=str(count)).load()
        assert frame.count() == count

        def fetch() -> None:
            done = 0
            while done < count:
                done = store.feed.fetch("bench", 10_000, after=done).next_sequence - 1

        times = alternate(rounds, lambda: seconds(fetch), lambda: seconds(lambda: drain(frame)))
    local, ours = times
    report.figure("changes_per_second", count / ours)
    detail = f"{count / ours:,.0f} changes/s; fetched where they are {count / local:,.0f}"
    report.ratio("changes_vs_local_fetch", local / ours, 0.8, "higher", detail)


PARTS = (changes,)
