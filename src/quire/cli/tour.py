"""The command `tour`: demonstrates a small store in ten seconds, and serves as an example of the API.

Rules
  1. It can be repeated: existing databases are used, and what the last run left for experiments is dropped first, so the store
     grows only by its change feed and its audit.
  2. It touches only databases that it has created, which it recognises by their tag.
  3. The burst writes catalog rows without objects: the chunks of warehouse have no bytes, so warehouse is dropped after it has
     been measured.
  4. Everything that the tour reports was measured or read back.

Each step is a function of the store; those about databases are in `tour_steps`.
"""

from __future__ import annotations

import os
import shlex
import shutil
import sys
import threading
from contextlib import suppress
from shutil import get_terminal_size
from typing import TYPE_CHECKING, Annotated, Any

import quire
from quire.cli import tour_steps as steps
from quire.cli.declarations import Option, command
from quire.cli.errors import OK, PROBLEMS
from quire.cli.feed import summary
from quire.cli.formatting import count_of, kind_text, size, visible
from quire.cli.job_progress import bar
from quire.cli.output import (
    CliResult,
    Facts,
    Listing,
    ListingRow,
    TerminalStyle,
    Tree,
    text_parts,
    tree_lines,
    wrapped,
    write_out,
)
from quire.cli.tour_steps import FORK, SHOP
from quire.core.clock import SystemClock, moment
from quire.core.errors import NameTaken, QuireError, UnknownArtifact
from quire.core.ids import ArtifactKind
from quire.core.limits import CHUNK_BYTES, SLOTS_PER_LEAF
from quire.manifest import tables as t
from quire.manifest.ops.artifacts import PutChunk
from quire.manifest.ops.base import Op
from quire.manifest.ops.databases import RenameDb, UpdateDbStatus
from quire.manifest.ops.refs import RemoveArtifact
from quire.manifest.ops.slots import CollectLeaf, SetSlots
from quire.manifest.records import ChunkRecord, DbStatus, LeafRef, Residency
from quire.manifest.slots import Leaf, Link, pack_leaf
from quire.manifest.tables import CHUNK_CATALOG, TABLES

if TYPE_CHECKING:
    from quire.cli.command import Cli
    from quire.cli.output import Node
    from quire.manifest.guard import ManifestGuard
    from quire.service.values import DatabaseInfo
    from quire.store.store import Store

WAREHOUSE = "warehouse"
DATABASES = ((SHOP, "pages"), (WAREHOUSE, "pages"), (steps.CLICKS, "stream"), (steps.SESSIONS, "lsm"))
TAGS = {"made by": "quire tour"}
DIRECTORY = "./quire-data"
"""The default directory: never the current directory itself."""
INDENT = "  "
GREEN, RED = "32", "31"
BURST_OPS = 5_000
BATCH_OPS = 10
CLOCK = SystemClock()

NEXT = (
    "tree --sizes",
    "why shop",
    "snapshot diff shop before",
    "fork shop mine",
    "retention plan shop",
    "jobs ls",
    "gc --dry-run",
    "feed tail --limit 5",
    "doctor",
)
"""Commands to try next."""


@command("tour", example="quire tour --store ./quire-data", store=DIRECTORY)
def tour(
    cli: Cli, spark: Annotated[bool, Option("--spark", help="Run jobs and queries on Spark as well.")] = False
) -> CliResult:
    """Demonstrate quire step by step. Creates the store if it does not exist; can be repeated."""
    guide = Guide(quiet=cli.as_json)
    began = CLOCK.monotonic()
    with quire.open(cli.path) as store:
        guide.title("A store", f"a directory, owned by one process: {os.path.relpath(store.path)}")
        facts: dict[str, Any] = {
            "path": store.path,
            "databases": register(store, guide),
            "burst": burst(store, guide),
            "collected": collect(store, guide),
            "refused": one_bad_batch(store, guide),
            "sqlite": steps.sqlite(store, guide),
            "checkpoint": steps.checkpoint(store, guide),
            "branch": steps.branch(store, guide),
            "lineage": steps.lineage(store, guide),
            "retention": steps.retention(store, guide),
            "collector": steps.collection(store, guide),
            "audit": steps.audit(store, guide),
            "stream": steps.stream(store, guide),
            "kv": steps.key_values(store, guide),
            "spark": steps.spark(store, guide) if spark else None,
            "tables": show_tables(store, guide),
            "changes": show_changes(store, guide),
            "problems": check(store, guide),
        }
    facts["seconds"] = round(CLOCK.monotonic() - began, 2)
    guide.farewell(cli.path, facts["seconds"])
    code = PROBLEMS if facts["problems"] else OK
    return CliResult(Facts(lines=[], data=facts) if cli.as_json else None, code)


# ── the steps ─────────────────────────────────────────────────────────────────────────────────────────────────────────
def register(store: Store, guide: Guide) -> list[str]:
    """Create databases of all kinds. Existing ones are kept; the fork that the last tour left for experiments is dropped."""
    guide.title("Databases", "page databases, streams and key-value sets, all in one manifest")
    present = {info.name: info for info in store.databases()}
    for name in (*(name for name, _ in DATABASES), FORK):
        if name in present and not _is_tours(store, present[name]):
            raise NameTaken(
                "a database with this name exists, and the tour did not create it",
                hint=f"`quire tour --store {DIRECTORY}` uses another store",
                name=name,
            )
    if FORK in present:
        store.drop(FORK, snapshots=True)
    for name, kind in DATABASES:
        info = present.get(name) or store.create(name, kind, tags=TAGS)
        guide.say(f"{info.name:<12}{kind_text(info.kind):<10}{'exists' if name in present else 'created'}")
    return [info.name for info in store.databases()]


def _is_tours(store: Store, info: DatabaseInfo) -> bool:
    """Return whether the tour has created a database: by its tag, or for the fork by that of its parent, dropped or not."""
    if info.name != FORK:
        return info.tags == TAGS
    with store.manifest.read() as txn:
        parent = txn.database(info.parent_db_id)
    return parent is not None and parent.tags == TAGS


def _without_bytes(store: Store) -> set[int]:
    """Return the tour's databases, also dropped ones, that no engine has ever opened: their chunks have no bytes (rule 3)."""
    with store.manifest.read() as txn:
        return {db_id for db_id, record in txn.databases() if record.tags == TAGS and not record.page_size}


def burst(store: Store, guide: Guide) -> dict[str, Any]:
    """Submit many small batches without waiting for each one, while a reader takes snapshots."""
    guide.title("Burst", f"{BURST_OPS:,} operations in batches of {BATCH_OPS}, while a reader takes snapshots")
    manifest = store.manifest
    warehouse = store.database(WAREHOUSE).db_id
    generation = manifest.reserve_generation(warehouse)
    record = _chunk(lsn=generation)
    guards: list[ManifestGuard] = []
    with bar("committing") as report, SnapshotSampler(store, BATCH_OPS) as sampler:
        began = CLOCK.monotonic()
        for first in range(0, BURST_OPS, BATCH_OPS):
            guards.append(
                manifest.submit([PutChunk(warehouse, first + n, generation, record) for n in range(BATCH_OPS)])
            )
            if not len(guards) % 100:
                report(len(guards) * BATCH_OPS, BURST_OPS)
        for guard in guards:
            guard.result()
        seconds = CLOCK.monotonic() - began
    publish_slots(store, warehouse, generation)
    rate = round(BURST_OPS / seconds)
    guide.say(f"{len(guards):,} durable batches in {seconds:.2f} s: {rate:,} operations per second")
    guide.say(f"{count_of(sampler.snapshots, 'snapshot')} read meanwhile; none showed a partial batch")
    assert not sampler.partial_batches, "a snapshot showed a partial batch"
    return {
        "operations": BURST_OPS,
        "batches": len(guards),
        "seconds": round(seconds, 3),
        "per_second": rate,
        "snapshots": sampler.snapshots,
    }


def publish_slots(store: Store, db_id: int, generation: int) -> None:
    """Make the chunks part of a database by naming them in its slots, in one atomic batch."""
    link = Link(ArtifactKind.BASE, db_id, generation, covered_lsn=generation)
    ops: list[Op] = []
    with store.manifest.read() as txn:
        for leaf, first in enumerate(range(0, BURST_OPS, SLOTS_PER_LEAF)):
            held = txn.get(t.LIVE_LEAF, db_id, leaf) or LeafRef(0, 0)
            chains: Leaf = dict.fromkeys(range(min(SLOTS_PER_LEAF, BURST_OPS - first)), (link,))
            ops.append(SetSlots(db_id, leaf, generation, held.origin_db_id, held.generation, pack_leaf(chains)))
    store.manifest.submit(ops).result()


def collect(store: Store, guide: Guide) -> int:
    """Drop the burst's database and collect what nothing refers to any more: only rows, without bytes (rule 3)."""
    store.drop(WAREHOUSE, snapshots=True)
    hollow = _without_bytes(store)
    removed = 0
    while True:
        with store.manifest.read() as txn:
            doomed = [key for key, _ in txn.scan(t.GC_ZERO) if key[0] in hollow]
        ops: list[Op] = [
            CollectLeaf(origin, number, generation)
            if kind == ArtifactKind.LEAF
            else RemoveArtifact(origin, ArtifactKind(kind), number, generation, delta)
            for origin, kind, number, generation, delta in doomed
        ]
        guards = [store.manifest.submit(ops[first : first + 1000]) for first in range(0, len(ops), 1000)]
        for guard in guards:
            with suppress(UnknownArtifact):  # the store's delete job was faster: the next iteration sees what is left
                guard.result()
        removed += len(ops)
        if not ops:  # else repeat: collected leaves may have brought more artifacts to zero
            break
    store.maintain()  # delete jobs find nothing left to delete, and remove the tombstones of dropped databases
    if removed:
        guide.title("Garbage collection", "artifacts without references are removed")
        guide.say(f"{WAREHOUSE} dropped: {count_of(removed, 'artifact')} removed from the catalog")
    return removed


def one_bad_batch(store: Store, guide: Guide) -> str:
    """Submit three batches at once; the second is invalid and fails alone (M3)."""
    guide.title("One bad batch", "three are submitted at once; the second is invalid")
    shop, clicks = store.database("shop").db_id, store.database("clicks").db_id
    guards = [
        store.manifest.submit([UpdateDbStatus(clicks, DbStatus.READ_ONLY)]),
        store.manifest.submit([RenameDb(shop, "clicks")]),
        store.manifest.submit([UpdateDbStatus(clicks, DbStatus.ACTIVE)]),
    ]
    refusal = ""
    for number, guard in enumerate(guards, 1):
        try:
            guide.say(f"batch {number}: committed as change {guard.result().sequence:,}", GREEN)
        except QuireError as error:
            refusal = type(error).__name__
            guide.say(f"batch {number}: {refusal}: {error.what}", RED)
    return refusal


def show_tables(store: Store, guide: Guide) -> dict[str, int]:
    """Show the manifest's tables that have rows."""
    guide.title("Tables", "the manifest is one LMDB environment")
    with store.manifest.read() as txn:
        counts = {table.name: txn.count(table) for table in TABLES.values()}
    rows = [
        [name, f"{count:,}", TABLES[name].policy.value, TABLES[name].purpose] for name, count in counts.items() if count
    ]
    guide.table(["table", ">rows", "policy", "purpose"], rows)
    guide.say(f"{size(store.info().manifest_bytes)} on disk")
    return counts


def show_changes(store: Store, guide: Guide) -> int:
    """Show the end of the change feed: every batch, in order, as the operations that were applied."""
    guide.title("Change feed", "every committed batch, for subscribers to replay")
    head = store.info().newest_change
    with store.manifest.read() as txn:
        rows = [
            [f"{change.sequence:,}", moment(change.committed_at_ms), summary(change)]
            for change in txn.changes(max(1, head - 4))
        ]
    guide.table([">sequence", "committed", "operations"], rows)
    return head


def check(store: Store, guide: Guide) -> list[str]:
    """Run the manifest's checker, which also runs at every opening."""
    guide.title("Check", "references recounted, indexes compared, rows decoded")
    began = CLOCK.monotonic()
    problems = [str(problem) for problem in store.manifest.check()]
    seconds = CLOCK.monotonic() - began
    for problem in problems[:5]:
        guide.say(problem, RED)
    if not problems:
        guide.say(f"all rules hold (checked in {seconds:.2f} s)", GREEN)
    return problems


# ── helpers ───────────────────────────────────────────────────────────────────────────────────────────────────────────
def _chunk(lsn: int) -> ChunkRecord:
    return ChunkRecord(Residency.LOCAL, CHUNK_BYTES, CLOCK.now_ms(), lsn_end=lsn)


# ── the guide ─────────────────────────────────────────────────────────────────────────────────────────────────────────
class SnapshotSampler:
    """Reads snapshots of the catalog in its own thread, and counts those that show a partial batch."""

    def __init__(self, store: Store, batch_ops: int) -> None:
        self.snapshots = 0
        self.partial_batches = 0
        self._store = store
        self._batch_ops = batch_ops
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._sample, name="quire-tour")

    def __enter__(self) -> SnapshotSampler:
        self._before = self._rows()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()

    def _sample(self) -> None:
        while not self._done.wait(0.002):
            self.partial_batches += bool((self._rows() - self._before) % self._batch_ops)
            self.snapshots += 1

    def _rows(self) -> int:
        with self._store.manifest.read() as txn:
            return txn.count(CHUNK_CATALOG)


class Guide:
    """Writes the steps to stdout as text; writes nothing with --json."""

    def __init__(self, *, quiet: bool) -> None:
        self._quiet = quiet
        style = TerminalStyle.of(sys.stdout)
        self._style = TerminalStyle(get_terminal_size().columns - len(INDENT), style.colours)  # 80 columns for a pipe

    def title(self, title: str, text: str) -> None:
        """Write the title of a step."""
        self._write("")
        self._write(f"{self._style.styled(title, '1;36')} · {self._style.styled(text, '2')}")

    def say(self, text: str, style: str = "") -> None:
        """Write a line about the current step."""
        for line in wrapped(visible(text), self._style.width):
            self._write(INDENT + (self._style.styled(line, style) if style else line))

    def table(self, columns: list[str], rows: list[list[str]]) -> None:
        """Write rows under columns. Columns whose title begins with `>` are right-aligned."""
        for line in text_parts(Listing(columns=columns, rows=[ListingRow(row, None) for row in rows]), self._style):
            self._write(INDENT + line.rstrip("\n"))

    def tree(self, root: Node) -> None:
        """Write a lineage, as `quire tree` draws it."""
        for line in tree_lines(Tree(roots=[root], data=None), self._style):
            self._write(INDENT + line)

    def farewell(self, path: str, seconds: float) -> None:
        """Write commands to try next."""
        self.title("What next", f"that took {seconds:.1f} s; run it again, or try")
        where = f"--store {shlex.quote(path)}"
        if shutil.which("quire") is None:
            self.say(f"(quire is here: {os.path.relpath(sys.argv[0])})")
        for line in NEXT:
            self.say(f"quire {line} {where}", "1")
        self._write("")

    def _write(self, line: str) -> None:
        if not self._quiet:
            write_out([line + "\n"])
