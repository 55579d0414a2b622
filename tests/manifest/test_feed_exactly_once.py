"""Consumers that are killed again and again miss nothing, and with stored positions see nothing twice.

This file is also the consumer: `python test_feed_exactly_once.py PATH SINK MODE LIFE` runs in a separate process that gets
killed. It records the changes that it sees, its effect, in an SQLite database. Each of its lives has a number.
"""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from itertools import pairwise
from pathlib import Path
from random import Random

import pytest

from quire.core.errors import StoreClosed, TimedOut
from quire.manifest.feed import ChangeFeed
from quire.manifest.store import ManifestStore
from tests.manifest.helpers import chunk, commit, register
from tests.programs import Program

NAME = "app"
ROOT = Path(__file__).resolve().parents[2]


# ── the consumer ──────────────────────────────────────────────────────────────────────────────────────────────────────
def open_sink(path: str) -> sqlite3.Connection:
    con = sqlite3.connect(path, isolation_level=None, timeout=30)
    con.executescript(
        "PRAGMA journal_mode=WAL; PRAGMA synchronous=OFF;"  # data passed to the kernel survives a SIGKILL
        "CREATE TABLE IF NOT EXISTS seen(n INTEGER PRIMARY KEY AUTOINCREMENT, sequence INTEGER, life INTEGER);"
        "CREATE TABLE IF NOT EXISTS position(one INTEGER PRIMARY KEY, sequence INTEGER);"
        "INSERT OR IGNORE INTO position VALUES (1, 0);"
    )
    return con


def position_of(sink: sqlite3.Connection) -> int:
    return int(sink.execute("SELECT sequence FROM position").fetchone()[0])


def follow(feed: ChangeFeed, sink: sqlite3.Connection, life: int, rng: Random, timeout: float | None) -> None:
    """At least once: the effect and the acknowledgement are separate, and the process may be killed between them."""
    for change in feed.follow(NAME, limit=rng.randint(1, 9), timeout=timeout):
        sink.execute("INSERT INTO seen(sequence, life) VALUES (?, ?)", (change.sequence, life))
        sleep_sometimes(rng)


def store_positions(feed: ChangeFeed, sink: sqlite3.Connection, life: int, rng: Random, timeout: float | None) -> None:
    """Exactly once: the position is stored in the transaction of the effect. Acknowledgements do not matter."""
    position = position_of(sink)
    while True:
        page = feed.fetch(NAME, rng.randint(1, 9), after=position)
        for change in page.changes:
            sink.execute("BEGIN IMMEDIATE")
            sink.execute("INSERT INTO seen(sequence, life) VALUES (?, ?)", (change.sequence, life))
            sleep_sometimes(rng)
            sink.execute("UPDATE position SET sequence = ?", (change.sequence,))
            sink.execute("COMMIT")
        position = page.next_sequence - 1
        if not feed._manifest.read_only:
            feed.acknowledge(NAME, position)
        if page.at_head:
            try:
                feed.wait(position, timeout)
            except TimedOut:
                return


def sleep_sometimes(rng: Random) -> None:
    """Sleep sometimes, so that a kill may interrupt this step."""
    if rng.random() < 0.05:
        time.sleep(rng.random() / 500)


CONSUMERS: dict[str, Callable[[ChangeFeed, sqlite3.Connection, int, Random, float | None], None]] = {
    "follow": follow,
    "positions": store_positions,
    "reader": store_positions,
}


def produce(manifest: ManifestStore, stop: threading.Event) -> None:
    """Commit changes one by one, each durable before the next."""
    try:
        while not stop.is_set():
            for number in range(50):
                commit(manifest, chunk(number))
    except StoreClosed:
        return


def main(path: str, sink_path: str, mode: str, seed: int) -> None:
    sink = open_sink(sink_path)
    with ManifestStore.open(path, mode="r" if mode == "reader" else "rw") as manifest:
        if mode != "reader":
            threading.Thread(target=produce, args=(manifest, threading.Event()), daemon=True).start()
        CONSUMERS[mode](manifest.feed, sink, seed, Random(seed), None)


# ── kills ─────────────────────────────────────────────────────────────────────────────────────────────────────────────
class Consumer:
    """One consumer and its successive processes."""

    def __init__(self, directory: Path, mode: str) -> None:
        self.path, self.sink_path, self.mode = str(directory / "manifest.lmdb"), str(directory / "sink.db"), mode
        with closing(open_sink(self.sink_path)):
            pass

    def effects(self) -> list[tuple[int, int]]:
        """(life, sequence) in the order of the effects."""
        with closing(sqlite3.connect(self.sink_path, timeout=30)) as sink:
            return sink.execute("SELECT life, sequence FROM seen ORDER BY n").fetchall()

    def run_and_kill(self, life: int, rng: Random) -> None:
        """Start the consumer, let it see some changes, and kill it at any time."""
        before, count = len(self.effects()), rng.randint(1, 60)
        child = Program(
            [__file__, self.path, self.sink_path, self.mode, str(life)],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
            cwd=ROOT,
            stderr=subprocess.PIPE,
        )
        deadline = time.monotonic() + 120
        while len(self.effects()) < before + count:
            assert child.poll() is None, child.communicate()[1]
            assert time.monotonic() < deadline, "the consumer makes no progress"
            time.sleep(0.005)
        time.sleep(rng.random() / 50)
        child.kill()
        _, stderr = child.communicate(timeout=60)
        assert child.returncode == -signal.SIGKILL, stderr

    def finish(self, manifest: ManifestStore) -> int:
        """A last life without a kill, up to the head; returns the head."""
        with closing(open_sink(self.sink_path)) as sink:
            CONSUMERS[self.mode](manifest.feed, sink, 0, Random(0), 0)
        return manifest.feed.head()


@contextmanager
def producing(consumer: Consumer) -> Iterator[ManifestStore]:
    """A producer in this process. It also acknowledges what the consumer has stored, so that the log is trimmed."""
    stop = threading.Event()
    with ManifestStore.open(consumer.path) as manifest:

        def acknowledge() -> None:
            with closing(open_sink(consumer.sink_path)) as sink:
                while not stop.wait(0.01):
                    manifest.feed.acknowledge(NAME, position_of(sink))

        threads = [threading.Thread(target=produce, args=(manifest, stop)), threading.Thread(target=acknowledge)]
        for thread in threads:
            thread.start()
        try:
            yield manifest
        finally:
            stop.set()
            for thread in threads:
                thread.join(60)


def prepare(tmp_path: Path, mode: str) -> Consumer:
    consumer = Consumer(tmp_path, mode)
    with ManifestStore.open(consumer.path) as manifest:
        manifest.feed.register(name=NAME)
        commit(manifest, register(1))
    return consumer


def check_at_least_once(consumer: Consumer, head: int) -> None:
    effects = consumer.effects()
    assert {sequence for _, sequence in effects} == set(range(1, head + 1)), "a change was missed"
    for (life, previous), (next_life, following) in pairwise(effects):
        if life == next_life:
            assert following == previous + 1, "out of order"
        else:
            assert following <= previous + 1, "a new life skipped a change"


def check_exactly_once(consumer: Consumer, head: int) -> None:
    assert [sequence for _, sequence in consumer.effects()] == list(range(1, head + 1))


def in_the_owner(tmp_path: Path, mode: str, kills: int) -> tuple[Consumer, int]:
    consumer, rng = prepare(tmp_path, mode), Random(kills)
    for life in range(1, kills + 1):
        consumer.run_and_kill(life, rng)
    with ManifestStore.open(consumer.path) as manifest:
        return consumer, consumer.finish(manifest)


def in_a_reader(tmp_path: Path, kills: int) -> tuple[Consumer, int]:
    consumer, rng = prepare(tmp_path, "reader"), Random(kills)
    with producing(consumer):
        for life in range(1, kills + 1):
            consumer.run_and_kill(life, rng)
    with ManifestStore.open(consumer.path) as manifest:
        return consumer, consumer.finish(manifest)


@pytest.mark.slow
def test_a_killed_follower_misses_nothing(tmp_path: Path) -> None:
    check_at_least_once(*in_the_owner(tmp_path, "follow", 8))


def test_a_killed_consumer_that_stores_its_position_sees_everything_exactly_once(tmp_path: Path) -> None:
    check_exactly_once(*in_the_owner(tmp_path, "positions", 8))


def test_a_killed_consumer_in_another_process_sees_everything_exactly_once(tmp_path: Path) -> None:
    """The producer keeps running, and trims what the consumer has stored."""
    consumer, head = in_a_reader(tmp_path, 8)
    check_exactly_once(consumer, head)
    with ManifestStore.open(consumer.path) as manifest, manifest.read() as txn:
        assert txn.feed_bounds()[0] > 1, "nothing was trimmed, so the test has not covered trimming"


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["follow", "positions", "reader"])
def test_consumers_survive_many_kills(tmp_path: Path, mode: str) -> None:
    consumer, head = in_a_reader(tmp_path, 50) if mode == "reader" else in_the_owner(tmp_path, mode, 50)
    (check_at_least_once if mode == "follow" else check_exactly_once)(consumer, head)


def test_the_checks_can_fail(tmp_path: Path) -> None:
    for rows, check in (
        ([(1, 1), (1, 3)], check_at_least_once),
        ([(1, 1), (1, 2), (2, 2), (2, 4), (3, 3)], check_at_least_once),
        ([(1, 1), (2, 3), (2, 4), (3, 2)], check_at_least_once),
        ([(1, 1), (2, 1), (2, 2)], check_exactly_once),
    ):
        consumer = Consumer(tmp_path, "follow")
        with closing(open_sink(consumer.sink_path)) as sink:
            sink.execute("DELETE FROM seen")
            sink.executemany("INSERT INTO seen(life, sequence) VALUES (?, ?)", rows)
        with pytest.raises(AssertionError):
            check(consumer, max(sequence for _, sequence in rows))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4]))
