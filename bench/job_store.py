"""What the benchmarks of jobs on Spark share: a store with dirty pages, and a runner whose session is warm."""

from __future__ import annotations

import random
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import quire
from bench.report import GIB

if TYPE_CHECKING:
    from quire.spark import SparkRunner

PAGE = 4096
PROCESSES = 2
"""Of the loop by hand; Spark has as many cores."""
TRANSACTION_PAGES = 4_096
QUICK_DIVISOR = 16
"""Sizes are divided by this with `--quick`. Spark's fixed costs stay the same, so that they weigh more."""
SETTINGS = quire.StoreSettings(
    pages=quire.PagesSettings(
        wal_bytes_max=64 * GIB, store_wal_bytes_max=64 * GIB, cold_bytes_per_second=0, seal_seconds=3_600.0
    ),
    maintenance=quire.MaintenanceSettings(enabled=False, delete_grace_seconds=0, workers=PROCESSES),
)
TEXT = (b"quire keeps every version " * PAGE)[: PAGE // 2]


def new_store(directory: Path, name: str) -> quire.Store:
    """Create a store without background maintenance."""
    shutil.rmtree(directory / name, ignore_errors=True)
    return quire.open(directory / name, settings=SETTINGS)


def remove(store: quire.Store) -> None:
    """Close a store and remove its directory."""
    store.close()
    shutil.rmtree(store.path)


def fill(store: quire.Store, database: str, pages: Sequence[int]) -> None:
    """Write pages that zstd compresses to about a half."""
    generator, engine = random.Random(len(pages)), store.pages.open(database)
    for start in range(0, len(pages), TRANSACTION_PAGES):
        with engine.begin() as txn:
            for page in pages[start : start + TRANSACTION_PAGES]:
                txn.write_page(page, generator.randbytes(PAGE // 2) + TEXT)


# ── Spark ─────────────────────────────────────────────────────────────────────────────────────────────────────────────
def spark_runner(store: quire.Store) -> SparkRunner:
    """Return a runner on the running session, or on a new one."""
    from quire.spark import SparkRunner, session

    return SparkRunner(session(), root=store.path, objects_url=store.objects_url)


@dataclass(frozen=True, slots=True)
class NoTask:
    """A task without work."""

    weight_bytes: int = 0


def warm_up(runner: Any) -> None:
    """Run actions of both kinds, without pages. The first ones of a session start its Python workers, and make the JVM load
    what it needs: a second and a half for an action that shuffles."""
    list(runner.map(nothing, list(range(8))))
    for _ in range(2):
        tasks = {(1, number): NoTask() for number in range(8)}
        list(runner.regroup(one_key, list(range(8)), how_many, tasks))


def nothing(number: int, _tools: Any) -> int:
    """Do the least that a task can do."""
    return number


def one_key(number: int, _tools: Any) -> list[tuple[tuple[int, int], int]]:
    """Split an input into one value."""
    return [((1, number), number)]


def how_many(_key: tuple[int, int], _task: NoTask | None, values: list[int], _tools: Any) -> int:
    """Join the values of a slot that has no pages."""
    return len(values)
