"""Runs in its own processes, to be killed: an owner that writes, checkpoints, truncates and recycles endlessly, and
readers that open the store with mode="r" and check everything they read.

A database describes its own expected contents: page 0 lists, for each page, the number of the transaction that wrote it
last, and a page's bytes follow from its own number and that one. So a reader needs no other source. Readers send `ok N`
(pages they checked), `gone N` (versions that ended with an error) and `bad WHAT`; the owner sends `at N` (transactions)
and `recycled N`.
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
from tests.fork_server import Channel
from tests.pages.engine_harness import PAGES_PER_CHUNK, image, segment_bytes

PAGE = 512
TABLE = struct.Struct("<120I")
"""Page 0: for each page the transaction that wrote it last; 0 for zeros."""
SNAPSHOTS = 4

SETTINGS = StoreSettings(
    pages=PagesSettings(page_size=PAGE, publish_seconds=0.02, publish_bytes=8192, seal_seconds=0.05),
    maintenance=MaintenanceSettings(enabled=False, delete_grace_seconds=0.0),
)


def warm_up() -> None:
    """Import everything, and make segments small."""
    size = segment_bytes(12)
    setattr(wal_files, "next_file_bytes", lambda *_: size)  # noqa: B010 - for mypy these are other modules' names
    setattr(wal_files, "FILE_BYTES_MAX", size)  # noqa: B010


def run(channel: Channel) -> None:
    """Run the role that the message names: `owner`, `careless` (an owner that ignores leases) or `reader`."""
    task = json.loads(channel.receive() or b"{}")
    arm_from(task["failpoints"])
    rng = random.Random(task["seed"])
    if task["role"] == "careless":
        LeaseFiles.of = lambda *_: []  # type: ignore[method-assign]  # this owner ignores readers
    if task["role"] == "reader":
        run_reader(channel, task["path"], rng, lenient=task["lenient"])
    else:
        run_owner(channel, task["path"], rng)


# ── the owner ─────────────────────────────────────────────────────────────────────────────────────────────────────────
def run_owner(channel: Channel, path: str, rng: random.Random) -> None:
    """Write until the process is killed."""
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
            if not channel.send(b"at %d" % number):
                return
            if rng.random() < 0.2:
                upkeep(store, rng, shop.db_id)
                channel.send(b"recycled %d" % shop.wal.recycled)


def upkeep(store: Store, rng: random.Random, db_id: int) -> None:
    """A checkpoint or merge with the jobs that follow, and a snapshot created or dropped."""
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
def run_reader(channel: Channel, path: str, rng: random.Random, *, lenient: bool) -> None:
    """Check until the process is killed, with up to four snapshots open at a time; `lenient` if versions may end with
    an error."""
    with quire.open(path, mode="r", settings=SETTINGS) as store:
        snapshots: list[Snapshot] = []
        while True:
            try:
                if len(snapshots) < 4 and rng.random() < 0.6:
                    snapshots.append(store.pages.open_published("shop", tags={"seed": str(rng.random())}))
                checked = sum(check(rng, snapshot) for snapshot in snapshots)
                checked += check_view(store, rng)
                if snapshots and rng.random() < 0.4:
                    snapshots.pop(rng.randrange(len(snapshots))).close()
            except (SnapshotGone, LeaseExpired) as error:
                if not lenient:
                    channel.send(f"bad {type(error).__name__}: {error}".encode())
                    raise
                while snapshots:
                    snapshots.pop().close()
                channel.send(b"gone 1")
                continue
            except (QuireError, AssertionError) as error:
                channel.send(f"bad {type(error).__name__}: {error}".encode())
                raise
            if not channel.send(b"ok %d" % checked):
                return
            if rng.random() < 0.2:
                time.sleep(rng.random() * 0.1)


def check_view(store: Store, rng: random.Random) -> int:
    """Check a named snapshot, if one exists; it may be dropped at any time, which raises an error."""
    try:
        with store.pages.open_view("shop", f"s{rng.randrange(SNAPSHOTS)}") as view:
            return check(rng, view)
    except (UnknownSnapshot, SnapshotGone):
        return 0


def check(rng: random.Random, reader: Snapshot) -> int:
    """All pages belong to one version; returns the number of pages that were checked."""
    if not reader.size_pages:
        return 0
    table = TABLE.unpack(reader.read_page(0)[: TABLE.size])
    pages = list(range(1, reader.size_pages))
    method = rng.randrange(3)
    if method == 0:
        contents = {page: reader.read_page(page) for page in rng.sample(pages, min(len(pages), 20))}
    elif method == 1:
        contents = reader.read_pages(pages)
    else:
        contents = dict(reader.scan(1, cold=True))
    for page, data in contents.items():
        number = table[page]
        expected = image(f"{page}:{number}") if number else bytes(PAGE)
        assert data == expected, f"page {page} at lsn {reader.lsn} is not that of transaction {number}"
    return len(contents)
