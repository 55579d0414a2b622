"""Records of a stream: appending in groups, reading, tailing. Run as part of `python -m bench stream`.

How the opponents are made fair: the raw loop writes the bytes of the records, without ids or checksums, into a file that was
filled with zeros before, of the size of a segment. It syncs once per group, as the stream does. The bare reader reads the same
file in pieces of the same size, and computes one checksum of all of it. Contenders alternate.
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
from awscrt.checksums import crc64nvme

import quire
from bench.report import MIB, Report, alternate, rate, seconds

RECORD_SIZE = 256
SEGMENT_BYTES = 256 * MIB
"""Size of the stream's segment and of the raw loop's file. Both have just been filled with zeros, which affects the disk's
speed."""
GROUPS = (1, 10, 100)
"""Records that are appended one by one and become durable together."""
THREADS = 16
BATCH = 1_000
"""Records of a batch."""


class _Engine:
    """A stream in a new store without background maintenance."""

    def __init__(self, directory: Path, name: str) -> None:
        root = directory / name
        shutil.rmtree(root, ignore_errors=True)
        settings = quire.StoreSettings(
            maintenance=quire.MaintenanceSettings(enabled=False),
            stream=quire.StreamSettings(segment_bytes=SEGMENT_BYTES),
        )
        self.store = quire.open(root, settings=settings)
        self.stream = self.store.stream("clicks", create=True)
        # Segments of a new stream are small and grow with its use, which is not measured: begin with a full-sized one.
        self.stream.hot._used_bytes = SEGMENT_BYTES // 2
        self.stream.append(b"first").result()

    def close(self) -> None:
        self.store.close()


def _raw(directory: Path, records: int, groups: int) -> float:
    """Return records per second of a loop that writes and syncs as many bytes in as many groups."""
    path = directory / "raw"
    path.unlink(missing_ok=True)
    group = os.urandom(RECORD_SIZE * records)
    fd = zero_filled(path, max(SEGMENT_BYTES, len(group) * groups))

    def work() -> None:
        offset = 0
        for _ in range(groups):
            os.pwrite(fd, group, offset)
            os.fdatasync(fd)
            offset += len(group)

    spent = seconds(work)
    os.close(fd)
    return groups * records / spent


def zero_filled(path: Path, size: int) -> int:
    """Create a file of zeros, sync it, and return its descriptor. Later syncs then move no metadata, as in a segment."""
    fd, zeros = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL), bytes(MIB)
    os.posix_fallocate(fd, 0, size)
    for offset in range(0, size, MIB):
        os.pwrite(fd, zeros[: size - offset], offset)
    os.fdatasync(fd)
    return fd


def stream_append(report: Report, directory: Path, quick: bool) -> None:
    """Append records one by one and wait once per group, against writing and syncing the same bytes in the same groups."""
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
    """Return records per second of a stream."""
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
    """Append from threads that each wait for every record, against the same bytes in as many groups as the stream formed."""
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
    """Append batches, each of which is an Arrow column."""
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
    """Read everything as Arrow batches, against reading the same file and computing one checksum of it."""
    groups = 60 if quick else 400
    engine = _Engine(directory, "read")
    column = pa.array([os.urandom(RECORD_SIZE) for _ in range(BATCH)])
    for _ in range(groups):
        engine.stream.append(column)
    engine.stream.sync()
    engine.stream.seal()
    segment = next(iter(engine.stream.segments()))
    (path,) = Path(engine.store.path).glob(f"streams/*/hot/{segment.segment_id:016x}.seg")

    def ours() -> float:
        def work() -> None:
            rows = sum(batch.num_rows for batch in engine.stream.read_batches())
            assert rows == groups * BATCH + 1

        return groups * BATCH / seconds(work)

    def bare() -> float:
        def work() -> None:
            checksum, fd = 0, os.open(path, os.O_RDONLY)
            for offset in range(0, segment.stored_bytes, MIB):
                checksum = crc64nvme(os.pread(fd, min(MIB, segment.stored_bytes - offset), offset), checksum)
            os.close(fd)
            assert checksum == segment.crc64

        return groups * BATCH / seconds(work)

    ours()
    mine, loop = alternate(3 if quick else 7, ours, bare)
    engine.close()
    report.figure("stream_read_per_second", mine)
    report.ratio("stream_read_batch_vs_read_crc64", mine / loop, 0.7, "higher", f"{rate(mine)} of {rate(loop)}")


def stream_tail(report: Report, directory: Path, quick: bool) -> None:
    """Measure the time from the start of a commit until a tail yields the record, against the commit."""
    rounds = 200 if quick else 1_000
    engine = _Engine(directory, "tail")
    stream = engine.stream
    arrivals: list[float] = []
    ready = threading.Semaphore(0)

    def follow() -> None:
        for number, _ in enumerate(stream.tail(2), 1):
            arrivals.append(time.perf_counter())
            ready.release()
            if number == rounds:
                return

    thread = threading.Thread(target=follow)
    thread.start()
    starts, commits = [], []
    payload = os.urandom(RECORD_SIZE)
    for _ in range(rounds):
        while not stream.hot.waiters:
            time.sleep(0)
        start = time.perf_counter()
        stream.append(payload).result()
        commits.append(time.perf_counter() - start)
        starts.append(start)
        ready.acquire()
    thread.join()
    engine.close()
    commit = statistics.median(commits)
    wake = statistics.median(arrival - start for arrival, start in zip(arrivals, starts))
    report.figure("stream_commit_seconds", commit)
    report.figure("stream_tail_seconds", wake)
    detail = f"{wake * 1e6:.0f} µs, the commit takes {commit * 1e6:.0f} µs"
    report.ratio("stream_tail_wake_vs_commit", wake / commit, 1.5, "lower", detail)


PARTS = (stream_append, stream_threads, stream_batches, stream_read, stream_tail)
