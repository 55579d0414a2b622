"""The change feed against what it is built on: a raw cursor over the same log, the commit itself, a writer without subscribers.

Trimming is proportional if removing ten times the records takes ten times as long, within a factor of two. It does not stall
writers if the longest commit while a log is trimmed takes no longer than the longest commit without trimming plus one commit of
the trimmer, or plus the longest time that a group may take.

Changes are operations of the manifest, submitted without waiting: the cost of cursors is small against that of a public call.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import msgspec

import quire
from bench.manifest import chunk_op, fresh
from bench.report import Report, alternate, rate, seconds
from quire.manifest.change import CHANGE_LOG, ChangeRecord
from quire.manifest.ops.cursors import TRIM_ROWS, AcknowledgeChanges, TrimChanges
from quire.manifest.store import ManifestStore

CURSORS = 100
SUBSCRIBERS = 10
"""Threads that acknowledge, each for ten cursors, so that every cursor is acknowledged about once a second."""

BLOCK = 25
"""Commits in one turn of a contender."""


@contextmanager
def opened(directory: Path, changes: int = 0) -> Iterator[ManifestStore]:
    """Open a new manifest with one database and `changes` further changes of one operation each."""
    with ManifestStore.open(fresh(directory, "ours")) as manifest:
        manifest.register_db("bench", quire.DbKind.PAGES)
        write(manifest, changes)
        yield manifest


def write(manifest: ManifestStore, changes: int) -> None:
    """Submit changes of one operation each without waiting in between, then wait for all."""
    for guard in [manifest.submit((chunk_op(number),)) for number in range(changes)]:
        guard.result()


# ── fetching ──────────────────────────────────────────────────────────────────────────────────────────────────────────
def fetching(report: Report, directory: Path, quick: bool) -> None:
    """Fetch all changes in pages, against a cursor of LMDB that decodes the same records."""
    count = 100_000 if quick else 1_000_000
    with opened(directory, count) as manifest:
        cursor, feed = manifest.feed.register().cursor_id, manifest.feed
        handle, unpack = manifest.env.handles[CHANGE_LOG.name], msgspec.msgpack.Decoder(ChangeRecord).decode

        def raw() -> float:
            def work() -> None:
                with manifest.read() as txn:
                    for _, row in txn._txn.cursor(db=handle).iternext():
                        unpack(row[2:-4])  # without the version of the record and its checksum

            return seconds(work) / count

        def pages(*, filtered: bool = False) -> float:
            only = {"databases": ["bench"]} if filtered else {}

            def work() -> None:
                position = 0
                while not (page := feed.fetch(cursor, after=position, **only)).at_head:  # type: ignore[arg-type]
                    position = page.next_sequence - 1

            return seconds(work) / count

        ours, filtered, limit = alternate(1 if quick else 3, pages, lambda: pages(filtered=True), raw)
    detail = f"{rate(1 / ours)} in pages of 256 against {rate(1 / limit)}"
    report.ratio("fetch_vs_raw_scan", limit / ours, 0.5, "higher", detail)
    detail = f"{rate(1 / filtered)}, all of them pass"
    report.ratio("filtered_fetch_vs_raw_scan", limit / filtered, None, "higher", detail)
    report.figure("fetch_per_second", 1 / ours)


# ── waking ────────────────────────────────────────────────────────────────────────────────────────────────────────────
class Waiter:
    """A thread that waits for one change after the other and records when it wakes."""

    def __init__(self, manifest: ManifestStore) -> None:
        self.woken = threading.Event()
        self.at = 0.0
        self._feed = manifest.feed
        self._stop = False
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._after = self._feed.head()
        self._thread.start()

    def _run(self) -> None:
        while not self._stop:
            self._after = self._feed.wait(self._after)
            self.at = time.perf_counter()
            self.woken.set()

    def end(self, change: Callable[[], object]) -> None:
        self._stop = True
        change()
        self._thread.join()


def waking(report: Report, directory: Path, quick: bool) -> None:
    """Measure the time from submitting a change until a waiting thread wakes, against the commit alone."""
    count = 200 if quick else 2_000
    commits: list[float] = []
    wakes: list[float] = []
    numbers = iter(range(10 * count))
    with opened(directory) as manifest:

        def commit() -> float:
            started = time.perf_counter()
            manifest.submit((chunk_op(next(numbers)),)).result()
            return started

        for _ in range(0, count, BLOCK):  # short turns, because the speed of the disk changes within seconds
            for _ in range(BLOCK):
                started = commit()
                commits.append(time.perf_counter() - started)
            waiter = Waiter(manifest)
            for _ in range(BLOCK):
                time.sleep(0.001)  # until the thread waits again
                waiter.woken.clear()
                started = commit()
                waiter.woken.wait()
                wakes.append(waiter.at - started)
            waiter.end(commit)
    alone, woken = statistics.median(commits), statistics.median(wakes)
    detail = f"p50 {woken * 1e6:.0f} µs from submit to waking, {alone * 1e6:.0f} µs the commit alone"
    report.ratio("wake_vs_commit", woken / alone, 1.5, "lower", detail)


# ── many cursors ──────────────────────────────────────────────────────────────────────────────────────────────────────
def many_cursors(report: Report, directory: Path, quick: bool) -> None:
    """Write while 100 cursors acknowledge, against a writer without cursors."""
    count = 50_000 if quick else 1_000_000
    acknowledged: list[float] = []

    def without() -> float:
        with opened(directory) as manifest:
            return count / seconds(lambda: write(manifest, count))

    def with_cursors(trims: bool) -> float:
        with opened(directory) as manifest:
            cursors = [manifest.feed.register().cursor_id for _ in range(CURSORS)]
            if not trims:
                manifest.feed.register()  # never acknowledges, so that nothing can be trimmed
            stop, acks = threading.Event(), [0] * SUBSCRIBERS

            def acknowledge(index: int) -> None:
                own = cursors[index::SUBSCRIBERS]
                while not stop.wait(1 / len(own)):
                    manifest.feed.acknowledge(own[acks[index] % len(own)], manifest.feed.head())
                    acks[index] += 1

            subscribers = [threading.Thread(target=acknowledge, args=(index,)) for index in range(SUBSCRIBERS)]
            for subscriber in subscribers:
                subscriber.start()
            taken = seconds(lambda: write(manifest, count))
            stop.set()
            for subscriber in subscribers:
                subscriber.join()
            acknowledged.append(sum(acks) / taken)
            return count / taken

    ours, acknowledging, alone = alternate(
        1 if quick else 3, partial(with_cursors, True), partial(with_cursors, False), without
    )
    detail = f"{rate(ours)} with {statistics.median(acknowledged):.0f} acknowledgements/s against {rate(alone)}"
    report.ratio("writes_with_100_cursors", ours / alone, 0.95, "higher", detail)
    detail = f"{rate(acknowledging)}: nothing is trimmed, because one cursor stays where it is"
    report.ratio("writes_with_100_cursors_untrimmed", acknowledging / alone, None, "higher", detail)


# ── trimming ──────────────────────────────────────────────────────────────────────────────────────────────────────────
def trimming(report: Report, directory: Path, quick: bool) -> None:
    """Trim a short log and one that is ten times as long."""
    few, many = (10_000, 100_000) if quick else (100_000, 1_000_000)

    def rows_per_second(count: int) -> float:
        with opened(directory, count) as manifest:
            cursor = manifest.feed.register().cursor_id
            return count / seconds(lambda: trim(manifest, cursor))

    small, large = alternate(1 if quick else 3, lambda: rows_per_second(few), lambda: rows_per_second(many))
    detail = f"{rate(small)} of {few:,} records, {rate(large)} of {many:,}"
    report.ratio("trim_proportional", max(small, large) / min(small, large), 2, "lower", detail)
    report.figure("trim_rows_per_second", large)


def trim(manifest: ManifestStore, cursor: int) -> None:
    """Acknowledge everything, and wait until the log is empty."""
    manifest.feed.acknowledge(cursor, manifest.feed.head())
    while manifest.feed.tail_rows():
        time.sleep(0.001)


def stalls(report: Report, directory: Path, quick: bool) -> None:
    """Commit while a long log is trimmed."""
    count = 50_000 if quick else 500_000
    numbers = iter(range(count, 100 * count))
    with opened(directory, count) as manifest:
        cursor = manifest.feed.register().cursor_id

        def timed(*ops: object) -> float:
            started = time.perf_counter()
            manifest.submit(ops).result()
            return time.perf_counter() - started

        manifest.submit([AcknowledgeChanges(cursor, manifest.feed.head())]).result()
        pieces = [timed(TrimChanges()) for _ in range(20)]
        during: list[float] = []
        manifest.feed.maintain()  # starts the trimmer
        while manifest.feed.tail_rows():
            during.append(timed(chunk_op(next(numbers))))
        alone = [timed(chunk_op(next(numbers))) for _ in during]
        budget = max(alone) + max(max(pieces), manifest.env.settings.group_seconds_max)
    detail = (
        f"longest of {len(during):,} commits {max(during) * 1e3:.1f} ms, {max(alone) * 1e3:.1f} ms without trimming; "
        f"a trim of {TRIM_ROWS} records takes {statistics.median(pieces) * 1e3:.1f} ms"
    )
    report.ratio("longest_stall_vs_budget", max(during) / budget, 1, "lower", detail)
    report.ratio("commit_during_trim", statistics.median(during) / statistics.median(alone), None, "lower", "p50")


PARTS = (fetching, waking, many_cursors, trimming, stalls)
