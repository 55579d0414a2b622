"""Runs in processes of their own, to be killed: an owner that writes, checkpoints, truncates and recycles without end, and
readers that open the store with mode="r" and check everything they see.

A database says itself what it must hold: page 0 lists, for each page, the number of the transaction that wrote it last, and a
page's bytes follow from its own number and that. So a reader needs nobody to tell it what is right. Readers tell `ok N` (pages
they checked), `gone N` (versions that vanished and said so) and `bad WHAT`; the owner tells `at N` (transactions) and
`recycled N`.
"""

from __future__ import annotations

import json
import random
import struct
import time
from contextlib import suppress

import quire
from quire.core.errors import JobAlreadyPending, LeaseExpired, NameTaken, QuireError, SnapshotGone, UnknownSnapshot
from quire.core.settings import MaintenanceSettings, PagesSettings, StoreSettings
from quire.durable.failpoints import arm_from
from quire.manifest.records import DbKind, JobKind
from quire.pages import wal_files
from quire.pages.leasefiles import LeaseFiles
from quire.pages.snapshot import Snapshot
from quire.store.store import Store
from tests.nursery import Line
from tests.pages.world import PAGES_PER_CHUNK, image, segment_bytes

PAGE = 512
TABLE = struct.Struct("<120I")
"""Page 0: per page the transaction that wrote it last, 0 for zeros."""
SNAPSHOTS = 4

SETTINGS = StoreSettings(
    pages=PagesSettings(page_size=PAGE, publish_seconds=0.02, publish_bytes=8192, seal_seconds=0.05),
    maintenance=MaintenanceSettings(enabled=False, delete_grace_seconds=0.0),
)


def warm_up() -> None:
    """Everything is imported by now; segments are small from here on."""
    size = segment_bytes(12)
    setattr(wal_files, "next_file_bytes", lambda *_: size)  # noqa: B010 - for mypy these are other modules' names
    setattr(wal_files, "FILE_BYTES_MAX", size)  # noqa: B010


def run(line: Line) -> None:
    """What the line says: `owner`, `careless` (an owner that ignores leases) or `reader`."""
    told = json.loads(line.receive() or b"{}")
    arm_from(told["failpoints"])
    rng = random.Random(told["seed"])
    if told["role"] == "careless":
        LeaseFiles.of = lambda *_: []  # type: ignore[method-assign]  # an owner that does not care who reads
    if told["role"] == "reader":
        read(line, told["path"], rng, lenient=told["lenient"])
    else:
        own(line, told["path"], rng)


# ── the owner ─────────────────────────────────────────────────────────────────────────────────────────────────────────
def own(line: Line, path: str, rng: random.Random) -> None:
    """Write until death."""
    with quire.open(path, settings=SETTINGS) as store:
        if not store.databases():
            store.manifest.register_db("shop", DbKind.PAGES, page_size=PAGE, pages_per_chunk=PAGES_PER_CHUNK)
        shop = store.pages.open("shop")
        while True:
            with shop.begin() as txn:
                table = list(TABLE.unpack(txn.read_page(0)[: TABLE.size])) if txn.size_pages else [0] * 120
                number, size = max(table) + 1, max(txn.size_pages, 2)
                table[0] = number
                for page in {rng.randint(1, min(size, 100)) for _ in range(rng.randint(1, 14))}:
                    table[page] = number
                    txn.write_page(page, image(f"{page}:{number}"))
                for page in range(txn.size_pages, len(table)):
                    table[page] = 0
                txn.write_page(0, TABLE.pack(*table).ljust(PAGE, b"\0"))
            if not line.send(b"at %d" % number):
                return
            if rng.random() < 0.2:
                upkeep(store, rng, shop.db_id)
                line.send(b"recycled %d" % shop.wal.recycled)


def upkeep(store: Store, rng: random.Random, db_id: int) -> None:
    """A checkpoint or merge with all that follows, and a snapshot made or dropped."""
    with suppress(JobAlreadyPending):
        store.manifest.jobs.enqueue(JobKind.MERGE if rng.random() < 0.2 else JobKind.CHECKPOINT, db_id)
    store.worker.drain()
    name = f"s{rng.randrange(SNAPSHOTS)}"
    try:
        store.pages.snapshot("shop", name)
    except NameTaken:
        with store.manifest.read() as txn:
            snapshot_id, _ = txn.require_snapshot(db_id, name)
        store.manifest.snapshots.drop(db_id, snapshot_id)


# ── readers ───────────────────────────────────────────────────────────────────────────────────────────────────────────
def read(line: Line, path: str, rng: random.Random, *, lenient: bool) -> None:
    """Check until death, with up to four snapshots open at a time; `lenient` if versions may vanish, as long as they say so."""
    with quire.open(path, mode="r", settings=SETTINGS) as store:
        open_ones: list[Snapshot] = []
        while True:
            try:
                if len(open_ones) < 4 and rng.random() < 0.6:
                    open_ones.append(store.pages.open_published("shop", tags={"seed": str(rng.random())}))
                checked = sum(check(rng, each) for each in open_ones)
                checked += check_view(store, rng)
                if open_ones and rng.random() < 0.4:
                    open_ones.pop(rng.randrange(len(open_ones))).close()
            except (SnapshotGone, LeaseExpired) as error:
                if not lenient:
                    line.send(f"bad {type(error).__name__}: {error}".encode())
                    raise
                while open_ones:
                    open_ones.pop().close()
                line.send(b"gone 1")
                continue
            except (QuireError, AssertionError) as error:
                line.send(f"bad {type(error).__name__}: {error}".encode())
                raise
            if not line.send(b"ok %d" % checked):
                return
            if rng.random() < 0.2:
                time.sleep(rng.random() * 0.1)


def check_view(store: Store, rng: random.Random) -> int:
    """A named snapshot, if there is one; it may be dropped at any moment, and then says so."""
    try:
        with store.pages.open_view("shop", f"s{rng.randrange(SNAPSHOTS)}") as view:
            return check(rng, view)
    except (UnknownSnapshot, SnapshotGone):
        return 0


def check(rng: random.Random, reader: Snapshot) -> int:
    """Everything in it is of one version; how many pages were looked at."""
    if not reader.size_pages:
        return 0
    table = TABLE.unpack(reader.read_page(0)[: TABLE.size])
    pages = list(range(1, reader.size_pages))
    how = rng.randrange(3)
    if how == 0:
        found = {page: reader.read_page(page) for page in rng.sample(pages, min(len(pages), 20))}
    elif how == 1:
        found = reader.read_pages(pages)
    else:
        found = dict(reader.scan(1, cold=True))
    for page, data in found.items():
        number = table[page]
        expected = image(f"{page}:{number}") if number else bytes(PAGE)
        assert data == expected, f"page {page} at lsn {reader.lsn} is not that of transaction {number}"
    return len(found)
