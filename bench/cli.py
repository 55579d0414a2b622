"""Starting the command line against starting Python: what a person waits for before anything is done.

Commands and `python -c pass` take turns, as processes of their own; the ratio is of medians. Light commands are those people
type most and scripts call in loops; the others load typer and the whole manifest.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import quire
from bench.report import Report, alternate

ROUNDS = 15
TARGET = 6.0

LIGHT = {
    "help": ["--help"],
    "ls": ["ls"],
    "info": ["info"],
    "tree": ["tree"],
    "snapshot_ls": ["snapshot", "ls", "shop"],
}
OTHERS = {"jobs_ls": ["jobs", "ls"], "feed_tail": ["feed", "tail"], "why": ["why", "shop"]}


def start(report: Report, directory: Path, quick: bool) -> None:
    """Every command on a small store."""
    root = directory / "store"
    with quire.open(root) as store:
        for name in ("shop", "cart"):
            store.create(name, "pages")
            store.snapshot(name, "monday")
        store.fork("shop", "shop-test", at="monday")
    commands = {**LIGHT, **OTHERS}
    lines = [[sys.executable, "-c", "pass"], *([sys.executable, "-m", "quire", *each] for each in commands.values())]
    python, *took = alternate(3 if quick else ROUNDS, *(_timed(line, root) for line in lines))
    report.figure("python_seconds", python)
    for name, seconds in zip(commands, took, strict=True):
        target = TARGET if name in LIGHT else None
        detail = f"{seconds * 1000:.0f} ms, Python {python * 1000:.0f} ms"
        report.ratio(f"{name}_vs_python", seconds / python, target, "lower", detail)
        report.figure(f"{name}_seconds", seconds)


def _timed(line: list[str], root: Path) -> Callable[[], float]:
    env = {**os.environ, "QUIRE_STORE": str(root)}

    def run() -> float:
        started = time.perf_counter()
        subprocess.run(line, check=True, stdout=subprocess.DEVNULL, env=env)
        return time.perf_counter() - started

    return run


PARTS = (start,)
