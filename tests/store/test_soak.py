"""Many databases of which some are active, for a long time: memory, disk and descriptors stay flat.

`QUIRE_SOAK_SECONDS` (60) is the duration, `QUIRE_SOAK_DATABASES` (20,000) the number of databases, and
`QUIRE_SOAK_ACTIVE` (200) the number of active ones; `make torture SECONDS=1800` runs a soak of half an hour.
"""

from __future__ import annotations

import gc
import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest

import quire
from quire.core.settings import MaintenanceSettings, PagesSettings, StoreSettings
from tests.programs import run_program
from tests.rules.tree import ROOT

SECONDS = float(os.environ.get("QUIRE_SOAK_SECONDS", "60"))
DATABASES = int(os.environ.get("QUIRE_SOAK_DATABASES", "20000"))
ACTIVE = int(os.environ.get("QUIRE_SOAK_ACTIVE", "200"))
ROWS = 50


def _measured(path: Path) -> dict[str, float]:
    gc.collect()
    status = Path("/proc/self/status").read_text()
    memory = next(int(line.split()[1]) for line in status.splitlines() if line.startswith("RssAnon"))
    disk = sum(entry.stat().st_blocks for entry in path.rglob("*") if entry.exists()) / 2
    return {"memory_kib": memory, "disk_kib": disk, "descriptors": len(os.listdir("/proc/self/fd"))}


@pytest.mark.slow
@pytest.mark.timeout(SECONDS + 600)
def test_memory_disk_and_descriptors_stay_flat(tmp_path: Path) -> None:
    """In a process of its own: that of the tests has the memory and the descriptors that other tests have left."""
    code = "import sys; from tests.store.test_soak import soak; soak(sys.argv[1])"
    soaked = run_program(["-c", code, str(tmp_path / "store")], cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    samples = [json.loads(line) for line in soaked.stdout.splitlines()]
    sys.stderr.write(soaked.stdout)
    assert len(samples) >= 8
    # The number of open files varies between samples, so the halves are compared by their maxima.
    early, late = (
        {name: max(sample[name] for sample in half) for name in samples[0]}
        for half in (samples[: len(samples) // 2], samples[len(samples) // 2 :])
    )
    assert late["memory_kib"] <= 1.25 * early["memory_kib"] + 16_384
    assert late["descriptors"] <= min(early["descriptors"], StoreSettings().open_files_max) + 64
    # Every database that becomes active for the first time allocates its own files: at most 64 KiB each.
    assert late["disk_kib"] <= early["disk_kib"] + 64 * late["ever_active"]


def soak(path: str) -> None:
    """Use a store and print samples. The set of active databases changes, so that many databases have been active in the
    end: whatever each leaves behind adds up."""
    settings = StoreSettings(
        maintenance=MaintenanceSettings(interval_seconds=1.0, checkpoint_seconds=10.0, delete_grace_seconds=1.0),
        pages=PagesSettings(open_max=2 * ACTIVE, idle_seconds=5.0, seal_seconds=5.0),
    )
    taken = 0
    chosen = random.Random(1)
    with quire.open(path, settings=settings) as store:
        with store.sqlite("template", create=True) as connection:
            connection.execute("CREATE TABLE t(id INTEGER PRIMARY KEY, x BLOB)")
        store.fork_many("template", [f"tenant-{number}" for number in range(DATABASES)])
        started = time.monotonic()
        active = chosen.sample(range(DATABASES), ACTIVE)
        ever_active = set(active)
        while (elapsed := time.monotonic() - started) < SECONDS:
            for number in active:
                with store.sqlite(f"tenant-{number}") as connection:
                    row = chosen.randrange(ROWS)
                    connection.execute("INSERT OR REPLACE INTO t VALUES (?, randomblob(200))", (row,))
                    connection.execute("DELETE FROM t WHERE id = ?", (chosen.randrange(ROWS),))
            active[chosen.randrange(ACTIVE)] = newcomer = chosen.randrange(DATABASES)
            ever_active.add(newcomer)
            store.stream("events", create=True).append(b"round").result()
            if elapsed >= SECONDS * (taken + 1) / 10:
                taken += 1
                sample = _measured(Path(path)) | {"ever_active": len(ever_active), "seconds": round(elapsed)}
                sys.stdout.write(json.dumps(sample) + "\n")
        assert len(store.pages.stores()) <= 2 * ACTIVE + 1
