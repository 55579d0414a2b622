"""Runs in a process of its own, to be killed: writes to page databases and tells over its line what was acknowledged.

It is told, as JSON: where (`base`), which failpoint dies when (`failpoints`), with which seed, and how many databases. It tells
`try DB SIZE CUT PAGE:FILL,…` before a commit, with everything the commit is made of, and `ack DB LSN` when it is durable.
"""

from __future__ import annotations

import json
import random
from contextlib import suppress
from pathlib import Path

from quire.core.clock import SystemClock
from quire.core.errors import JobAlreadyPending
from quire.core.settings import MaintenanceSettings, PagesSettings
from quire.durable.failpoints import arm_from
from quire.durable.files import OsDisk
from quire.jobs.context import JobContext, StorePool
from quire.jobs.handlers import HANDLERS
from quire.jobs.worker import Worker
from quire.manifest.records import DbKind, JobKind
from quire.manifest.store import ManifestStore
from quire.objects.open import open_store
from quire.pages import wal_files
from quire.pages.engine import PageEngine
from quire.testing.crash import Line
from tests.pages.world import PAGE, PAGES_PER_CHUNK, image, segment_bytes

SETTINGS = PagesSettings(page_size=PAGE, publish_seconds=0.01, publish_bytes=4096, seal_seconds=0.03)
FRAMES = 12


def warm_up() -> None:
    """Everything is imported by now; segments are small from here on."""
    size = segment_bytes(FRAMES)
    setattr(wal_files, "next_file_bytes", lambda *_: size)  # noqa: B010 - for mypy these are other modules' names
    setattr(wal_files, "FILE_BYTES_MAX", size)  # noqa: B010


def start(base: Path) -> tuple[ManifestStore, PageEngine]:
    """A manifest and an engine with a real clock and a ticker."""
    manifest = ManifestStore.open(str(base / "manifest.lmdb"))
    manifest.jobs.recover()
    engine = PageEngine(
        manifest=manifest,
        root=str(base / "store"),
        disk=OsDisk(),
        clock=SystemClock(),
        open_store=StorePool(open_store),
        objects_url=str(base / "objects"),
        settings=SETTINGS,
    )
    return manifest, engine


def worker(manifest: ManifestStore, engine: PageEngine, base: Path) -> Worker:
    """Runs jobs of this store."""
    context = JobContext(
        manifest=manifest,
        root=str(base / "store"),
        disk=OsDisk(),
        objects_url=str(base / "objects"),
        open_store=StorePool(open_store),
        settings=MaintenanceSettings(delete_grace_seconds=0.05),
        pages=engine,
    )
    return Worker(context, HANDLERS)


def run(line: Line) -> None:
    """Write until death, or until told to stop."""
    told = json.loads(line.receive() or b"{}")
    base, rng = Path(told["base"]), random.Random(told["seed"])
    arm_from(told["failpoints"])
    manifest, engine = start(base)
    with manifest.read() as txn:
        known = {record.name for _, record in txn.databases()}
    names = [f"db-{number}" for number in range(told["databases"])]
    for name in names:
        if name not in known:
            manifest.register_db(name, DbKind.PAGES, page_size=PAGE, pages_per_chunk=PAGES_PER_CHUNK)
    line.send(b"open")
    for number in range(told["commits"]):
        name = rng.choice(names)
        store = engine.open(name)
        txn_ = store.begin()
        cut = rng.randint(1, 12) if rng.random() < 0.1 else 0
        if cut:
            txn_.truncate(cut)
        fills = {rng.randint(0, 25): rng.getrandbits(60) for _ in range(rng.randint(1, 16))}
        for page, fill in fills.items():
            txn_.write_page(page, image(fill))
        writes = ",".join(f"{page}:{fill}" for page, fill in fills.items())
        line.send(f"try {name} {txn_.size_pages} {cut} {writes}".encode())
        guard = txn_.commit()
        if rng.random() < 0.7:
            line.send(f"ack {name} {guard.result()}".encode())
        if rng.random() < 0.05:
            with suppress(JobAlreadyPending):  # one of an earlier life waits for its next attempt
                manifest.enqueue_job(rng.choice([JobKind.CHECKPOINT, JobKind.CHECKPOINT, JobKind.MERGE]), store.db_id)
            worker(manifest, engine, base).drain()
        if rng.random() < 0.05:
            info = engine.snapshot(name, f"kept-{told['seed']}-{number}")
            line.send(f"kept {name} {info.name} {info.anchor_lsn}".encode())
    engine.close()
    manifest.close()
    line.send(b"done")
