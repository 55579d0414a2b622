"""Records of a stream: appending in groups, reading, tailing; run as part of `python -m bench stream`.

How the opponents are made fair: the raw loop writes the records' bytes, without ids or checksums, into a file that was filled
ahead, as segments are and as large as they are, and syncs as often as the stream: once a group. The bare reader reads the same
file in pieces of the same size and takes one checksum of all of it. Contenders take turns.
"""

from __future__ import annotations

import os
import shutil
import statistics
import threading
import time
from functools import partial
from pathlib import Path

import pyarrow as pa

import quire
from bench.report import Report, alternate, rate, seconds
from quire.durable.checksums import crc64
from quire.durable.files import OsDisk, preallocate
from quire.durable.names import Tier

RECORD_SIZE = 256
SEGMENT_BYTES = 256 << 20
"""Of the stream's segment and of the raw loop's file: both were just filled with zeros, which the disk still remembers."""
GROUPS = (1, 10, 100)
"""Records appended one by one that are made durable together."""
THREADS = 16
BATCH = 1_000
"""Records of a batch."""


class _Engine:
    """A stream in a store of its own, without upkeep: what is measured is the stream."""

    def __init__(self, directory: Path, name: str) -> None:
        root = directory / name
        shutil.rmtree(root, ignore_errors=True)
        settings = quire.StoreSettings(
            maintenance=quire.MaintenanceSettings(enabled=False),
            stream=quire.StreamSettings(segment_bytes=SEGMENT_BYTES),
        )
        self.store = quire.open(root, settings=settings)
        self.stream = self.store.stream("clicks", create=True)
        # A segment as large as they become: growing up from a quiet stream is not what is measured.
        self.stream.hot._used_bytes = SEGMENT_BYTES // 2
        self.stream.append(b"first").result()

    def close(self) -> None:
        self.store.close()


def _raw(directory: Path, records: int, groups: int) -> float:
    """Records per second of a loop that writes and syncs as many bytes in as many groups."""
    path = directory / "raw"
    path.unlink(missing_ok=True)
    group = os.urandom(RECORD_SIZE * records)
    file = preallocate(OsDisk(), str(path), max(SEGMENT_BYTES, len(group) * groups))

    def work() -> None:
        at = 0
        for _ in range(groups):
            file.write_at(group, at)
            file.sync()
            at += len(group)

    spent = seconds(work)
    file.close()
    return groups * records / spent


def stream_append(report: Report, directory: Path, quick: bool) -> None:
    """Append records one by one, each group with one wait; against writing and syncing the same bytes in the same groups."""
    for group in GROUPS:
        groups = 200 if quick else 2_000
        mine, raw = alternate(
            3 if quick else 5, partial(_appended, directory, group, groups), partial(_raw, directory, group, groups)
        )
        name = "" if group == GROUPS[-1] else f"_{group}"
        report.figure(f"stream_append{name}_per_second", mine)
        detail = f"{rate(mine)} of {rate(raw)}, groups of {group}"
        target = 0.6 if group == GROUPS[-1] else 0.5
        report.ratio(f"stream_append{name}_vs_raw", mine / raw, target, "higher", detail)


def _appended(directory: Path, group: int, groups: int) -> float:
    """Records per second of a stream."""
    payloads = [os.urandom(RECORD_SIZE) for _ in range(group)]
    engine = _Engine(directory, "append")
    append = engine.stream.append

    def work() -> None:
        for _ in range(groups):
            for payload in payloads:
                guard = append(payload)
            guard.result()

    spent = seconds(work)
    engine.close()
    return groups * group / spent


def stream_threads(report: Report, directory: Path, quick: bool) -> None:
    """Threads that each wait for every record of theirs; against the same bytes in as many groups as they came to form."""
    rounds = 100 if quick else 1_000

    def ours() -> tuple[float, int]:
        engine = _Engine(directory, "append")
        payload = os.urandom(RECORD_SIZE)

        def one() -> None:
            for _ in range(rounds):
                engine.stream.append(payload).result()

        threads = [threading.Thread(target=one) for _ in range(THREADS)]

        def work() -> None:
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()

        before = engine.stream.hot.syncs
        spent = seconds(work)
        syncs = engine.stream.hot.syncs - before
        engine.close()
        return THREADS * rounds / spent, syncs

    pairs = []
    for _ in range(1 if quick else 5):
        mine, syncs = ours()
        group = max(round(THREADS * rounds / syncs), 1)
        pairs.append((mine, _raw(directory, group, syncs), group))
    mine, raw = (statistics.median(pair[place] for pair in pairs) for place in (0, 1))
    report.figure("stream_append_threads_per_second", mine)
    detail = (
        f"{rate(mine)} of {rate(raw)}, {THREADS} threads in groups of {statistics.median(pair[2] for pair in pairs):g}"
    )
    report.ratio("stream_append_threads_vs_raw", mine / raw, 0.5, "higher", detail)


def stream_batches(report: Report, directory: Path, quick: bool) -> None:
    """The same in batches, as an Arrow column each."""
    groups = 60 if quick else 400
    column = pa.array([os.urandom(RECORD_SIZE) for _ in range(BATCH)])

    def ours() -> float:
        engine = _Engine(directory, "append")
        append = engine.stream.append

        def work() -> None:
            for _ in range(groups):
                append(column).result()

        spent = seconds(work)
        engine.close()
        return groups * BATCH / spent

    mine, raw = alternate(3 if quick else 5, ours, lambda: _raw(directory, BATCH, groups))
    report.figure("stream_append_batch_per_second", mine)
    detail = f"{rate(mine)} of {rate(raw)}, batches of {BATCH:,}"
    report.ratio("stream_append_batch_vs_raw", mine / raw, 0.8, "higher", detail)


def stream_read(report: Report, directory: Path, quick: bool) -> None:
    """Read everything as Arrow batches; against reading the same file and taking one checksum of it."""
    groups = 60 if quick else 400
    engine = _Engine(directory, "read")
    column = pa.array([os.urandom(RECORD_SIZE) for _ in range(BATCH)])
    for _ in range(groups):
        engine.stream.append(column)
    engine.stream.sync()
    engine.stream.seal()
    segment = engine.stream.ledger.view.sealed[0]
    path = engine.stream.files.segment(Tier.HOT, segment.segment_id)

    def ours() -> float:
        def work() -> None:
            rows = sum(batch.num_rows for batch in engine.stream.read_batches())
            assert rows == groups * BATCH + 1

        return groups * BATCH / seconds(work)

    def bare() -> float:
        def work() -> None:
            found = 0
            file = OsDisk().open(path, write=False)
            for offset in range(0, segment.durable_bytes, 1 << 20):
                found = crc64(file.read_at(min(1 << 20, segment.durable_bytes - offset), offset), found)
            file.close()
            assert found == segment.crc64

        return groups * BATCH / seconds(work)

    ours()
    mine, loop = alternate(3 if quick else 7, ours, bare)
    engine.close()
    report.figure("stream_read_per_second", mine)
    report.ratio("stream_read_batch_vs_read_crc64", mine / loop, 0.7, "higher", f"{rate(mine)} of {rate(loop)}")


def stream_tail(report: Report, directory: Path, quick: bool) -> None:
    """From the beginning of a commit until a tail has the record; against the commit."""
    rounds = 200 if quick else 1_000
    engine = _Engine(directory, "tail")
    stream = engine.stream
    came: list[float] = []
    ready = threading.Semaphore(0)

    def follow() -> None:
        for number, _ in enumerate(stream.tail(2), 1):
            came.append(time.perf_counter())
            ready.release()
            if number == rounds:
                return

    thread = threading.Thread(target=follow)
    thread.start()
    began, commits = [], []
    payload = os.urandom(RECORD_SIZE)
    for _ in range(rounds):
        while not stream.hot.waiters:
            time.sleep(0)
        start = time.perf_counter()
        stream.append(payload).result()
        commits.append(time.perf_counter() - start)
        began.append(start)
        ready.acquire()
    thread.join()
    engine.close()
    commit = statistics.median(commits)
    wake = statistics.median(there - start for there, start in zip(came, began))
    report.figure("stream_commit_seconds", commit)
    report.figure("stream_tail_seconds", wake)
    detail = f"{wake * 1e6:.0f} µs, the commit takes {commit * 1e6:.0f} µs"
    report.ratio("stream_tail_wake_vs_commit", wake / commit, 1.5, "lower", detail)
