"""Opening a manifest by the length of its feed: a part of `python -m bench many`.

The opponent is reading the same rows once and decoding them, which any check of everything has to do.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

import quire
from bench.manifest import chunk_op, fresh
from bench.report import Report, alternate
from quire.manifest import tables as t
from quire.manifest.change import CHANGE_LOG
from quire.manifest.checked_point import SUFFIX
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


def filled(directory: Path, changes: int) -> str:
    """Create a manifest with `changes` chunks, each added by its own change; close it cleanly and return its path."""
    with ManifestStore.open(fresh(directory, f"many-{changes}")) as manifest:
        manifest.register_db("bench", quire.DbKind.PAGES)
        for guard in [manifest.submit((chunk_op(number),)) for number in range(changes)]:
            guard.result()
        return manifest.env.path


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
    with ManifestStore.open(path, mode="r") as manifest, manifest.read() as txn:
        started = time.process_time()
        for _ in txn.scan(CHANGE_LOG):
            pass
        for _ in txn.scan(t.CHUNK_CATALOG):
            pass
        return time.process_time() - started


PARTS = (opening,)
