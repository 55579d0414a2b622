"""Opening by the length of the feed, and after an owner was killed: a part of `python -m bench many`.

The opponent of a long feed is reading the same rows once and decoding them, which any check of everything has to do. Opening
after a kill is compared with its bound, 3 s, and with a check of everything.
"""

from __future__ import annotations

import multiprocessing
import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from itertools import chain, islice
from pathlib import Path

import quire
from bench.manifest import chunk_op, fresh
from bench.report import Report, alternate, drop_page_cache
from quire.manifest import tables as t
from quire.manifest.change import CHANGE_LOG
from quire.manifest.checked_point import SUFFIX
from quire.manifest.ops.base import Op
from quire.manifest.ops.databases import SetDbOptions
from quire.manifest.store import ManifestStore


def opening(report: Report, directory: Path, quick: bool) -> None:
    """Compare opening a manifest with a long feed and many rows, after a clean close, with reading its rows."""
    few, many = (5_000, 50_000) if quick else (100_000, 1_000_000)
    paths = {count: filled(directory, count) for count in (few, many)}
    rounds = 3 if quick else 5
    short, long, read, full = alternate(
        rounds,
        lambda: open_seconds(paths[few]),
        lambda: open_seconds(paths[many]),
        lambda: read_seconds(paths[many]),
        lambda: open_seconds(paths[many], whole=True),
    )
    detail = (
        f"{long * 1e3:.1f} ms with {many:,} changes, {read * 1e3:.0f} ms to read them, {full * 1e3:.0f} ms to check all"
    )
    report.ratio("open_vs_reading_rows", long / read, 0.2, "lower", detail)
    detail = f"{long * 1e3:.1f} ms with {many:,} changes, {short * 1e3:.1f} ms with {few:,}"
    report.ratio("open_long_feed_vs_short", long / short, 2, "lower", detail)
    report.figure("open_ms", long * 1e3)
    report.figure("check_all_ms", full * 1e3)


def cold_opening(report: Report, directory: Path, quick: bool) -> None:
    """Compare opening a manifest with a feed of 1 GiB, the page cache dropped, with reading its rows, in wall time."""
    changes, feed_bytes = (50_000, 32 << 20) if quick else (1_000_000, 1 << 30)
    path = filled(directory, changes, feed_bytes)
    if why := drop_page_cache():
        report.ratio("open_cold_vs_reading_rows", None, 0.2, "lower", why)
        return
    opened, read = alternate(3, lambda: cold_seconds(path, ManifestStore.open), lambda: cold_seconds(path, read_rows))
    detail = f"{opened * 1e3:.1f} ms with {changes:,} chunks and a feed of {feed_bytes >> 20:,} MiB, {read:.1f} s to read them"
    report.ratio("open_cold_vs_reading_rows", opened / read, 0.2, "lower", detail)


def cold_seconds(path: str, act: Callable[[str], ManifestStore | None]) -> float:
    """Return the wall time of `act` on a manifest none of whose pages are in memory."""
    drop_page_cache()
    started = time.perf_counter()
    manifest = act(path)
    taken = time.perf_counter() - started
    if manifest is not None:
        manifest.close()
    return taken


def filled(directory: Path, changes: int, feed_bytes: int = 0) -> str:
    """Create a manifest with `changes` chunks, each added by its own change, and then more changes until the feed has
    `feed_bytes`; close it cleanly and return its path."""
    with ManifestStore.open(fresh(directory, f"many-{changes}-{feed_bytes}")) as manifest:
        db_id = manifest.register_db("bench", quire.DbKind.PAGES)
        operations: Iterator[Op] = chain(
            (chunk_op(number) for number in range(changes)),
            (SetDbOptions(db_id, {"note": f"{number:1000}"}) for number in range(feed_bytes // 1000)),
        )
        while some := [manifest.submit((operation,)) for operation in islice(operations, 100_000)]:
            for guard in some:
                guard.result()
        if feed_bytes:
            assert feed_size(manifest) >= feed_bytes
        return manifest.env.path


def feed_size(manifest: ManifestStore) -> int:
    with manifest.read() as txn:
        return sum(len(row) for _, row in txn.raw_scan(CHANGE_LOG))


def open_seconds(path: str, *, whole: bool = False) -> float:
    """Return the processor time of opening a manifest. `whole` removes the record of what was checked, so that all rows are."""
    if whole:
        os.unlink(path + SUFFIX)
    started = time.process_time()
    manifest = ManifestStore.open(path)
    taken = time.process_time() - started
    manifest.close()
    return taken


def read_seconds(path: str) -> float:
    """Return the processor time of reading and decoding every row of the log and of the chunks."""
    started = time.process_time()
    read_rows(path)
    return time.process_time() - started


def read_rows(path: str) -> None:
    """Read and decode every row of the log and of the chunks."""
    with ManifestStore.open(path, mode="r") as manifest, manifest.read() as txn:
        for _ in txn.scan(CHANGE_LOG):
            pass
        for _ in txn.scan(t.CHUNK_CATALOG):
            pass


def after_kill(report: Report, directory: Path, quick: bool) -> None:
    """Open a store of many databases after its owner, which wrote to some of them, was killed by SIGKILL."""
    count, active = (2_000, 100) if quick else (100_000, 1_000)
    path, rounds = directory / "killed", 1 if quick else 3
    with quire.open(path) as store:
        with store.sqlite("template", create=True) as database:
            database.execute("CREATE TABLE t(x)")
        store.fork_many("template", [f"tenant-{number}" for number in range(count)])
    writer = multiprocessing.get_context("spawn").Process(target=write_and_die, args=(path, active))
    writer.start()
    writer.join()
    assert writer.exitcode == -signal.SIGKILL, "the owner did not reach its end"
    warm, whole = alternate(rounds, lambda: open_copy(path), lambda: open_copy(path, whole=True))
    detail = f"{warm:.2f} s with {count:,} databases, {active:,} of them written; {whole:.2f} s to check everything"
    report.ratio("open_after_kill_vs_3_seconds", warm / 3, 1, "lower", detail)
    if why := drop_page_cache():
        report.ratio("open_cold_after_kill_vs_3_seconds", None, 1, "lower", why)
    else:
        (cold,) = alternate(rounds, lambda: open_copy(path, cold=True))
        report.ratio("open_cold_after_kill_vs_3_seconds", cold / 3, 1, "lower", f"{cold:.2f} s, the page cache dropped")


def write_and_die(path: Path, active: int) -> None:
    """Write to databases, wait until their commits are published, and die. Without upkeep no later point is recorded."""
    store = quire.open(path, settings=quire.StoreSettings(maintenance=quire.MaintenanceSettings(enabled=False)))
    for number in range(active):
        with store.sqlite(f"tenant-{number}") as database:
            database.execute("INSERT INTO t VALUES (1)")
    time.sleep(PUBLISHED_SECONDS)
    os.kill(os.getpid(), signal.SIGKILL)


PUBLISHED_SECONDS = 3.0


def open_copy(path: Path, *, whole: bool = False, cold: bool = False) -> float:
    """Return the wall time of opening a copy of a store. `whole` removes the record of what was checked."""
    copy = path.with_name("copy")
    shutil.copytree(path, copy)
    if whole:
        (copy / f"manifest.lmdb{SUFFIX}").unlink()
    if cold:
        drop_page_cache()
    started = time.perf_counter()
    store = quire.open(copy)
    taken = time.perf_counter() - started
    store.close()
    shutil.rmtree(copy)
    return taken


PARTS = (opening, cold_opening, after_kill)
