"""`python -m bench` lists the benchmarks; `python -m bench NAME [--quick]` runs one."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import platform
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from bench.draw import RESULTS
from bench.profiles import profiled
from bench.report import Report

BENCHMARKS = {
    "manifest": "the LMDB manifest: writes, reads, exports, opening",
    "feed": "the change feed: pages, waking, many cursors, trimming",
    "pages": "page databases: commits, reads, recovery, chunks",
    "kv": "the key-value engine: writes, reads, scans, compaction, its manifest",
    "snapshots": "snapshots and forks: one more, among many, a year of them",
    "stream": "streams: appending, reading, tailing; the manifest log",
    "forks": "a database for each test: forks against copies of a file and template databases of PostgreSQL",
    "sqlite": "SQLite on quire against SQLite on a file: writes, reads, forks",
    "checkpoint": "checkpoint and merge on Spark against a loop by hand; ten thousand databases in one run",
    "spark_jobs": "verification on Spark against reading and checksums on all cores",
    "wire": "SQL over the wire against the owner, a bare endpoint, and PostgreSQL",
    "replicas": "embedded replicas: catching up against fetching everything",
    "clients": "clients of a store's owner: Flask with four workers against a SQLite file, single calls",
    "archive": "the store in its bucket: commit rates, lag, requests, mode sync, restore, replay",
    "many": "a store as it grows: opening it, by the length of its feed",
    "cli": "starting the command line against starting Python",
    "lakehouse": "mirrors of a thousand databases: increments against a full load; row changes against a loop by hand",
    "tpch": "TPC-H queries 1 and 3 through Spark against the same rows in Parquet",
    "spark": "data sources on Spark against SQLite, the local feed and Spark's own floor",
}
MODULES = {
    "archive": ("archive", "archive_restore"),
    "kv": ("kv", "kv_tables", "kv_spark"),
    "lakehouse": ("lakehouse", "row_changes"),
    "many": ("many_opening", "many", "many_spark"),
    "spark": ("spark", "spark_changes"),
    "sqlite": ("sqlite", "sqlite_fork"),
    "stream": ("stream_records", "stream"),
}
"""Benchmarks whose parts are in more than one module: parts that use the public API, and parts that measure one component
(docs/decisions/079-benchmarks-of-components.md)."""


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument("name", nargs="?", choices=sorted(BENCHMARKS))
    parser.add_argument("--quick", action="store_true", help="a tenth of the data, one round")
    parser.add_argument("--only", default="", help="run only the parts whose name contains this")
    parser.add_argument("--dir", default=None, help="where to put the data (default: a temporary directory)")
    parser.add_argument(
        "--save",
        action="store_true",
        help="keep the result in docs/results, for `python -m bench.draw` (with --only: of these parts)",
    )
    parser.add_argument("--profile", action="store_true", help="print where quire's time goes, instead of the result")
    options = parser.parse_args()
    if options.name is None:
        for name, description in BENCHMARKS.items():
            sys.stdout.write(f"{name:<12} {description}\n")
        return 0
    modules = [importlib.import_module(f"bench.{name}") for name in MODULES.get(options.name, (options.name,))]
    report = Report(options.name, _run(options.quick))
    sys.stdout.write(f"{options.name} on Python {platform.python_version()}, {platform.machine()}\n")
    with tempfile.TemporaryDirectory(dir=options.dir, prefix="quire-bench-") as directory:
        parts = [part for module in modules for part in module.PARTS if options.only in part.__name__]

        def work() -> None:
            for part in parts:
                part(report, Path(directory), options.quick)

        if options.profile:
            sys.stdout.write(profiled(work) + "\n")
            return 0
        work()
    result = report.finish()
    sys.stdout.write(result + "\n")
    if options.save:
        save(json.loads(result), RESULTS / f"{options.name}.json", is_partial=bool(options.only))
    return 0


def save(result: dict[str, Any], path: Path, *, is_partial: bool) -> None:
    """Write the result of a run. A partial run replaces only what it measured; the rest keeps the date of its own run."""
    if is_partial and path.exists():
        saved = json.loads(path.read_text("utf-8"))
        kept = {name: ratio for name, ratio in saved["ratios"].items() if name not in result["ratios"]}
        earlier = {name: {"run": saved["run"], **ratio} for name, ratio in kept.items()}
        merged = {name: {**earlier, **result["ratios"]}[name] for name in {**saved["ratios"], **result["ratios"]}}
        result = {**result, "ratios": merged, "figures": {**saved["figures"], **result["figures"]}}
    path.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n", "utf-8")


def _run(quick: bool) -> dict[str, Any]:
    """Return the date, the size and the machine of a run, for readers of its result."""
    return {
        "date": time.strftime("%Y-%m-%d"),
        "size": "quick" if quick else "full",
        "cores": os.cpu_count(),
        "load": round(os.getloadavg()[0], 1),
        "python": platform.python_version(),
        "machine": platform.machine(),
    }


if __name__ == "__main__":
    sys.exit(main())
