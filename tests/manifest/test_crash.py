"""Processes that are killed by SIGKILL: acknowledged batches are complete, others are complete or not there at all.

The child is `crash_child.py`. It is killed at a chosen step of a commit or at any time; then the parent opens the manifest and
verifies it.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random

import pytest

from quire.durable.failpoints import VARIABLE
from quire.manifest import tables as t
from quire.manifest.records import DbKind
from quire.manifest.store import ManifestStore
from quire.testing.manifest import assert_clean, assert_replays
from tests.manifest.crash_child import HOME
from tests.programs import Program

CHILD = Path(__file__).with_name("crash_child.py")
ROOT = Path(__file__).resolve().parents[2]
# Delays a commit before it is durable, so that a guard that resolves too early is noted before the process dies.
SLOWLY = "manifest.commit.applied=sleep:3;manifest.commit.flushed=sleep:3"
COMMIT_POINTS = ("manifest.commit.applied", "manifest.commit.flushed", "manifest.commit.durable")


@dataclass
class Notes:
    """The notes that the child wrote before it died."""

    tried: set[int]
    acknowledged: dict[int, tuple[int, int]]
    """Batch → (rows, sequence)."""
    ids: list[int]


class Crashes:
    """One store and the successive children that are killed on it."""

    def __init__(self, directory: Path) -> None:
        self.path = str(directory / "manifest.lmdb")
        self.notes_path = directory / "notes"
        self.notes_path.touch()

    def start(self, seed: int, *, threads: int = 1, batches: int = 1000, failpoints: str = "") -> subprocess.Popen[str]:
        arguments = [self.path, str(self.notes_path), str(seed), str(threads), str(batches)]
        environment = {**os.environ, VARIABLE: failpoints, "PYTHONPATH": os.pathsep.join(sys.path)}
        return Program([str(CHILD), *arguments], env=environment, stderr=subprocess.PIPE, cwd=ROOT)

    def notes(self) -> Notes:
        notes = Notes(set(), {}, [])
        for line in self.notes_path.read_text().splitlines():
            match line.split():
                case ["try", number]:
                    notes.tried.add(int(number))
                case ["ack", number, rows, sequence]:
                    notes.acknowledged[int(number)] = (int(rows), int(sequence))
                case ["id", db_id]:
                    notes.ids.append(int(db_id))
        return notes

    def expect_death(self, child: subprocess.Popen[str], timeout: float = 60.0) -> None:
        _, stderr = child.communicate(timeout=timeout)
        assert child.returncode == -signal.SIGKILL, stderr

    def kill_after(self, child: subprocess.Popen[str], acknowledged: int, seconds: float) -> None:
        """Kill the child some time after it has acknowledged that many more batches."""
        before, deadline = len(self.notes().acknowledged), time.monotonic() + 60
        while len(self.notes().acknowledged) < before + acknowledged:
            assert child.poll() is None, child.communicate()[1]
            assert time.monotonic() < deadline, "the child makes no progress"
            time.sleep(0.005)
        time.sleep(seconds)
        child.kill()
        self.expect_death(child)

    def verify(self) -> Notes:
        """Verify everything that must hold after a crash."""
        notes = self.notes()
        assert len(set(notes.ids)) == len(notes.ids), "an id was returned twice"
        with ManifestStore.open(self.path) as manifest:
            manifest.recount.finish()
            assert not manifest.env.refused
            assert_clean(manifest, leaks=True)
            assert_replays(manifest)
            self._verify_rows(manifest, notes)
            fresh = manifest.register_db(f"after-{time.monotonic_ns()}", DbKind.LSM)
            assert fresh > max(notes.ids, default=0), "an id was reused after a crash"
        return notes

    def _verify_rows(self, manifest: ManifestStore, notes: Notes) -> None:
        with manifest.read() as txn:
            home = next((db_id for db_id, record in txn.databases() if record.name == HOME), None)
            if home is None:
                assert not notes.acknowledged
                return
            logged: dict[int, list[tuple[int, int]]] = {}
            for (_, number, row), chunk in txn.scan(t.CHUNK_CATALOG, home):
                if chunk.page_count:
                    assert chunk.size_bytes == number
                    logged.setdefault(number, []).append((row, chunk.page_count))
            local = {scope: (kind, metric.count) for (scope, kind), metric in txn.scan(t.METRICS) if scope >= 1_000_000}
            sequences = {
                change.operations[0].chunk_id: change.sequence  # type: ignore[attr-defined]  # PutChunk, by construction
                for change in txn.changes()
                if getattr(change.operations[0], "origin_db_id", None) == home
                and getattr(change.operations[0], "chunk_id", 0) >= 1_000_000
            }
        for number, rows in logged.items():
            assert rows == [(row, len(rows)) for row in range(1, len(rows) + 1)], f"batch {number} is incomplete"
            assert rows[0][1] == len(rows)
            assert local[number] == (len(rows), 1), f"the local rows of batch {number} are missing"
        assert local.keys() == logged.keys() == sequences.keys()
        assert logged.keys() <= notes.tried, "a batch that was not submitted"
        for number, (count, sequence) in notes.acknowledged.items():
            assert len(logged.get(number, ())) == count, f"batch {number} was acknowledged but is lost"
            assert sequences[number] == sequence


@pytest.fixture
def crashes(tmp_path: Path) -> Crashes:
    return Crashes(tmp_path)


@pytest.mark.parametrize("point", COMMIT_POINTS)
def test_a_manifest_killed_at_a_step_of_a_commit_keeps_every_promise(crashes: Crashes, point: str) -> None:
    """The same store is killed again and again, each time at a later commit; every child begins with what the last one
    left."""
    for seed, commits in enumerate((0, 3, 40), 1):
        child = crashes.start(seed, threads=2, failpoints=f"{SLOWLY};{point}={commits}*sleep:3->kill")
        crashes.expect_death(child)
        notes = crashes.verify()
    assert notes.acknowledged


def test_a_manifest_killed_at_any_time_keeps_every_promise(crashes: Crashes) -> None:
    rng = Random(2)
    for seed, failpoints in enumerate(("", SLOWLY, SLOWLY, ""), 1):
        child = crashes.start(seed, threads=3, failpoints=failpoints)
        crashes.kill_after(child, rng.randint(1, 40), rng.random() / 50)
        crashes.verify()


def _torture(crashes: Crashes, seeds: range, kill: Callable[[int, Random], None]) -> None:
    for seed in seeds:
        kill(seed, Random(seed))
        crashes.verify()
        if os.stat(crashes.path).st_size > 64 << 20:
            return


@pytest.mark.slow
@pytest.mark.parametrize("point", COMMIT_POINTS)
def test_many_kills_at_every_step_of_a_commit(crashes: Crashes, point: str) -> None:
    def kill(seed: int, rng: Random) -> None:
        slowly = rng.choice(("", SLOWLY + ";"))
        script = f"{slowly}{point}={rng.randint(0, 200)}*off->kill"
        crashes.expect_death(crashes.start(seed, threads=rng.randint(1, 4), failpoints=script))

    _torture(crashes, range(1, 25), kill)


@pytest.mark.slow
def test_many_kills_at_any_time(crashes: Crashes) -> None:
    def kill(seed: int, rng: Random) -> None:
        child = crashes.start(seed, threads=rng.randint(1, 6), failpoints=rng.choice(("", SLOWLY)))
        crashes.kill_after(child, rng.randint(0, 100), rng.random() / 10)

    _torture(crashes, range(1, 40), kill)
