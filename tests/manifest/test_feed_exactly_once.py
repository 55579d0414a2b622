"""Consumers that are killed again and again: nothing is missed, and with stored positions nothing comes twice.

This file is also the consumer: `python test_feed_exactly_once.py PATH SINK MODE LIFE` runs in a process of its own, to be
killed. It notes what it sees, its effect, in an SQLite database; each of its lives has a number.
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
from tests.manifest.helpers import chunk, does, register
from tests.programs import Program

NAME = "app"
ROOT = Path(__file__).resolve().parents[2]


# ── the consumer ──────────────────────────────────────────────────────────────────────────────────────────────────────
def open_sink(path: str) -> sqlite3.Connection:
    con = sqlite3.connect(path, isolation_level=None, timeout=30)
    con.executescript(
        "PRAGMA journal_mode=WAL; PRAGMA synchronous=OFF;"  # what the kernel has survives a SIGKILL
        "CREATE TABLE IF NOT EXISTS seen(n INTEGER PRIMARY KEY AUTOINCREMENT, sequence INTEGER, life INTEGER);"
        "CREATE TABLE IF NOT EXISTS position(one INTEGER PRIMARY KEY, sequence INTEGER);"
        "INSERT OR IGNORE INTO position VALUES (1, 0);"
    )
    return con


def position_of(sink: sqlite3.Connection) -> int:
    return int(sink.execute("SELECT sequence FROM position").fetchone()[0])


def follow(feed: ChangeFeed, sink: sqlite3.Connection, life: int, rng: Random, timeout: float | None) -> None:
    """At least once: the effect and the acknowledgement are two things, and a kill may come between them."""
    for change in feed.follow(NAME, limit=rng.randint(1, 9), timeout=timeout):
        sink.execute("INSERT INTO seen(sequence, life) VALUES (?, ?)", (change.sequence, life))
        dawdle(rng)


def store_positions(feed: ChangeFeed, sink: sqlite3.Connection, life: int, rng: Random, timeout: float | None) -> None:
    """Exactly once: the position is stored in the effect's own transaction. Whether it is acknowledged does not matter."""
    position = position_of(sink)
    while True:
        page = feed.fetch(NAME, rng.randint(1, 9), after=position)
        for change in page.changes:
            sink.execute("BEGIN IMMEDIATE")
            sink.execute("INSERT INTO seen(sequence, life) VALUES (?, ?)", (change.sequence, life))
            dawdle(rng)
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


def dawdle(rng: Random) -> None:
    """Give the kill something to hit."""
    if rng.random() < 0.05:
        time.sleep(rng.random() / 500)


CONSUMERS: dict[str, Callable[[ChangeFeed, sqlite3.Connection, int, Random, float | None], None]] = {
    "follow": follow,
    "positions": store_positions,
    "reader": store_positions,
}


def produce(manifest: ManifestStore, stop: threading.Event) -> None:
    """Changes, one after the other, each durable before the next."""
    try:
        while not stop.is_set():
            for number in range(50):
                does(manifest, chunk(number))
    except StoreClosed:
        return


def main(path: str, sink_path: str, mode: str, seed: int) -> None:
    sink = open_sink(sink_path)
    with ManifestStore.open(path, mode="r" if mode == "reader" else "rw") as manifest:
        if mode != "reader":
            threading.Thread(target=produce, args=(manifest, threading.Event()), daemon=True).start()
        CONSUMERS[mode](manifest.feed, sink, seed, Random(seed), None)


# ── killing it ────────────────────────────────────────────────────────────────────────────────────────────────────────
class Lives:
    """One consumer and its many lives."""

    def __init__(self, directory: Path, mode: str) -> None:
        self.path, self.sink_path, self.mode = str(directory / "manifest.lmdb"), str(directory / "sink.db"), mode
        with closing(open_sink(self.sink_path)):
            pass

    def seen(self) -> list[tuple[int, int]]:
        """(life, sequence) in the order of the effects."""
        with closing(sqlite3.connect(self.sink_path, timeout=30)) as sink:
            return sink.execute("SELECT life, sequence FROM seen ORDER BY n").fetchall()

    def live_and_die(self, life: int, rng: Random) -> None:
        """Start the consumer, let it see some changes, kill it at any moment."""
        before, wanted = len(self.seen()), rng.randint(1, 60)
        child = Program(
            [__file__, self.path, self.sink_path, self.mode, str(life)],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
            cwd=ROOT,
            stderr=subprocess.PIPE,
        )
        deadline = time.monotonic() + 120
        while len(self.seen()) < before + wanted:
            assert child.poll() is None, child.communicate()[1]
            assert time.monotonic() < deadline, "the consumer makes no progress"
            time.sleep(0.005)
        time.sleep(rng.random() / 50)
        child.kill()
        _, stderr = child.communicate(timeout=60)
        assert child.returncode == -signal.SIGKILL, stderr

    def finish(self, manifest: ManifestStore) -> int:
        """A last life, in peace, up to the head; the head."""
        with closing(open_sink(self.sink_path)) as sink:
            CONSUMERS[self.mode](manifest.feed, sink, 0, Random(0), 0)
        return manifest.feed.head()


@contextmanager
def producing(lives: Lives) -> Iterator[ManifestStore]:
    """A producer in this process, which acknowledges for the consumer what that has stored, so that the log is trimmed."""
    stop = threading.Event()
    with ManifestStore.open(lives.path) as manifest:

        def acknowledge() -> None:
            with closing(open_sink(lives.sink_path)) as sink:
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


def prepare(tmp_path: Path, mode: str) -> Lives:
    lives = Lives(tmp_path, mode)
    with ManifestStore.open(lives.path) as manifest:
        manifest.feed.register(name=NAME)
        does(manifest, register(1))
    return lives


def check_at_least_once(lives: Lives, head: int) -> None:
    seen = lives.seen()
    assert {sequence for _, sequence in seen} == set(range(1, head + 1)), "something was missed"
    for (life, before), (same, after) in pairwise(seen):
        if life == same:
            assert after == before + 1, "out of order"
        else:
            assert after <= before + 1, "a new life skipped something"


def check_exactly_once(lives: Lives, head: int) -> None:
    assert [sequence for _, sequence in lives.seen()] == list(range(1, head + 1))


def in_the_owner(tmp_path: Path, mode: str, kills: int) -> tuple[Lives, int]:
    lives, rng = prepare(tmp_path, mode), Random(kills)
    for life in range(1, kills + 1):
        lives.live_and_die(life, rng)
    with ManifestStore.open(lives.path) as manifest:
        return lives, lives.finish(manifest)


def in_a_reader(tmp_path: Path, kills: int) -> tuple[Lives, int]:
    lives, rng = prepare(tmp_path, "reader"), Random(kills)
    with producing(lives):
        for life in range(1, kills + 1):
            lives.live_and_die(life, rng)
    with ManifestStore.open(lives.path) as manifest:
        return lives, lives.finish(manifest)


@pytest.mark.slow
def test_a_killed_follower_misses_nothing(tmp_path: Path) -> None:
    check_at_least_once(*in_the_owner(tmp_path, "follow", 8))


def test_a_killed_consumer_that_stores_its_position_sees_everything_exactly_once(tmp_path: Path) -> None:
    check_exactly_once(*in_the_owner(tmp_path, "positions", 8))


def test_a_killed_consumer_in_another_process_sees_everything_exactly_once(tmp_path: Path) -> None:
    """The producer lives on, and trims what the consumer has stored."""
    lives, head = in_a_reader(tmp_path, 8)
    check_exactly_once(lives, head)
    with ManifestStore.open(lives.path) as manifest, manifest.read() as txn:
        assert txn.feed_bounds()[0] > 1, "nothing was trimmed: this showed less than it says"


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["follow", "positions", "reader"])
def test_long_killed_consumers(tmp_path: Path, mode: str) -> None:
    lives, head = in_a_reader(tmp_path, 50) if mode == "reader" else in_the_owner(tmp_path, mode, 50)
    (check_at_least_once if mode == "follow" else check_exactly_once)(lives, head)


def test_the_checks_can_fail(tmp_path: Path) -> None:
    for rows, check in (
        ([(1, 1), (1, 3)], check_at_least_once),
        ([(1, 1), (1, 2), (2, 2), (2, 4), (3, 3)], check_at_least_once),
        ([(1, 1), (2, 3), (2, 4), (3, 2)], check_at_least_once),
        ([(1, 1), (2, 1), (2, 2)], check_exactly_once),
    ):
        lives = Lives(tmp_path, "follow")
        with closing(open_sink(lives.sink_path)) as sink:
            sink.execute("DELETE FROM seen")
            sink.executemany("INSERT INTO seen(life, sequence) VALUES (?, ?)", rows)
        with pytest.raises(AssertionError):
            check(lives, max(sequence for _, sequence in rows))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4]))
