"""The command `tour`: a small store at work in ten seconds, written to be read as an example of the API.

Rules
  1. It can be run again and again: what is there is used, what the last run left for trying out is dropped first, so the
     store grows only by its change feed and its audit.
  2. It touches only databases it has made, which it knows by their tag: in a store of somebody's own it is harmless.
  3. For the burst it makes catalog rows, not objects: the chunks of warehouse have no bytes. So warehouse is dropped when it
     has been measured, and its rows go at once; what shop holds is real, and goes as the collector lets it.
  4. Everything it says it has measured or read back.

Each step is a function of the store, those about versions in `tour_versions`, about
streams, key-value databases and Spark in `tour_engines`; `Guide` is how they talk to people.
"""

from __future__ import annotations

import os
import shlex
import shutil
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Annotated, Any

import quire
from quire.cli import tour_steps as steps
from quire.cli.command import Cli, Verdict
from quire.cli.declarations import Group, Option, command
from quire.cli.exit_codes import OK, PROBLEMS
from quire.cli.feed import summary
from quire.cli.formatting import count_of, moment, size
from quire.cli.output import Facts, Look, Tree, tree_lines
from quire.cli.tour_steps import FORK, SHOP
from quire.core.clock import SystemClock
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
from quire.manifest.tables import CHUNK_CATALOG, LIVE_LEAF, TABLES

if TYPE_CHECKING:
    from rich.console import JustifyMethod

    from quire.cli.output import Node
    from quire.manifest.guard import ManifestGuard
    from quire.service.values import DatabaseInfo
    from quire.store.store import Store

WAREHOUSE = "warehouse"
DATABASES = ((SHOP, "pages"), (WAREHOUSE, "pages"), (steps.CLICKS, "stream"), (steps.SESSIONS, "lsm"))
TAGS = {"made by": "quire tour"}
DIRECTORY = "./quire-data"
"""Where the tour goes when nobody says where: never the current directory itself."""
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
"""What to try next: real commands."""


def add_to(app: Group) -> None:
    """Register this command."""
    command(app, "tour", example="quire tour --store ./quire-data", store=DIRECTORY)(tour)


def tour(
    cli: Cli, spark: Annotated[bool, Option("--spark", help="Run jobs and queries on Spark as well.")] = False
) -> Verdict:
    """Watch a store at work, step by step. Makes the store if need be; can be run again and again."""
    guide = Guide(quiet=cli.as_json)
    began = CLOCK.monotonic()
    with quire.open(cli.path) as store:
        guide.title("A store", f"a directory, owned by one process: {store.path}")
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
    return Verdict(Facts(lines=[], data=facts) if cli.as_json else None, code)


# ── the steps ─────────────────────────────────────────────────────────────────────────────────────────────────────────
def register(store: Store, guide: Guide) -> list[str]:
    """Databases of all kinds; those that are there stay, what the last tour left for trying out goes."""
    guide.title("Databases", "page databases, streams and key-value sets, all in one manifest")
    present = {each.name: each for each in store.databases()}
    for name in (*(name for name, _ in DATABASES), FORK):
        if name in present and not _is_tours(store, present[name]):
            raise NameTaken(
                "the store has a database of this name that is not the tour's",
                hint=f"`quire tour --store {DIRECTORY}` takes it elsewhere",
                name=name,
            )
    if FORK in present:
        store.drop(FORK, snapshots=True)
    if SHOP in present and _is_hollow(store, present[SHOP]):
        store.drop(SHOP, snapshots=True)
        del present[SHOP]
    for name, kind in DATABASES:
        found = present.get(name) or store.create(name, kind, tags=TAGS)
        guide.say(f"{found.name:<12}{found.kind.name.lower():<10}{'exists' if name in present else 'created'}")
    return [each.name for each in store.databases()]


def _is_tours(store: Store, found: DatabaseInfo) -> bool:
    """Whether a database is the tour's own: its tag says so, or for the fork that of its parent, dropped or not."""
    if found.name != FORK:
        return found.tags == TAGS
    with store.manifest.read() as txn:
        parent = txn.database(found.parent_db_id)
    return parent is not None and parent.tags == TAGS


def _is_hollow(store: Store, found: DatabaseInfo) -> bool:
    """Whether a tour of before there was a page engine has made it up, or one of before there was SQLite has filled it."""
    if found.page_size:
        with store.pages.open(found.db_id).open_snapshot() as reader:
            return reader.size_pages > 0 and not reader.read_page(0).startswith(b"SQLite format 3")
    with store.manifest.read() as txn:
        return any(txn.raw_scan(LIVE_LEAF, found.db_id))


def _without_bytes(store: Store) -> set[int]:
    """The tour's databases that no engine has ever opened, dropped ones included: their chunks have no bytes (rule 3)."""
    with store.manifest.read() as txn:
        return {db_id for db_id, record in txn.databases() if record.tags == TAGS and not record.page_size}


def burst(store: Store, guide: Guide) -> dict[str, Any]:
    """Many small batches, pipelined: nobody waits for one before the next is on its way. A reader looks on meanwhile."""
    guide.title("A burst", f"{BURST_OPS:,} operations in batches of {BATCH_OPS}, while a reader takes snapshots")
    manifest = store.manifest
    warehouse = store.database(WAREHOUSE).db_id
    generation = manifest.reserve_generation(warehouse)
    record = _chunk(lsn=generation)
    guards: list[ManifestGuard] = []
    with guide.progress("committing", BURST_OPS) as advance, Onlooker(store, BATCH_OPS) as onlooker:
        began = CLOCK.monotonic()
        for first in range(0, BURST_OPS, BATCH_OPS):
            guards.append(
                manifest.submit([PutChunk(warehouse, first + n, generation, record) for n in range(BATCH_OPS)])
            )
            if not len(guards) % 100:
                advance(100 * BATCH_OPS)
        for guard in guards:
            guard.result()
        seconds = CLOCK.monotonic() - began
    publish_slots(store, warehouse, generation)
    rate = round(BURST_OPS / seconds)
    guide.say(f"{len(guards):,} durable batches in {seconds:.2f} s: {rate:,} operations per second")
    guide.say(f"{count_of(onlooker.snapshots, 'snapshot')} read meanwhile; none showed half a batch")
    assert not onlooker.halves, "a snapshot showed half a batch"
    return {
        "operations": BURST_OPS,
        "batches": len(guards),
        "seconds": round(seconds, 3),
        "per_second": rate,
        "snapshots": onlooker.snapshots,
    }


def publish_slots(store: Store, db_id: int, generation: int) -> None:
    """Chunks become part of a database when its slots name them: one batch, all or nothing."""
    link = Link(ArtifactKind.BASE, db_id, generation, covered_lsn=generation)
    ops: list[Op] = []
    with store.manifest.read() as txn:
        for leaf, first in enumerate(range(0, BURST_OPS, SLOTS_PER_LEAF)):
            held = txn.get(t.LIVE_LEAF, db_id, leaf) or LeafRef(0, 0)
            chains: Leaf = dict.fromkeys(range(min(SLOTS_PER_LEAF, BURST_OPS - first)), (link,))
            ops.append(SetSlots(db_id, leaf, generation, held.origin_db_id, held.generation, pack_leaf(chains)))
    store.manifest.submit(ops).result()


def collect(store: Store, guide: Guide) -> int:
    """The burst's database is dropped, and what nobody refers to any more goes: its rows, which have no bytes (rule 3)."""
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
            with suppress(UnknownArtifact):  # the store's own delete job was quicker: the next look sees what is left
                guard.result()
        removed += len(ops)
        if not ops:  # collected leaves may have doomed more
            break
    store.maintain()  # delete jobs find nothing left to delete, and take the tombstones of dropped databases
    if removed:
        guide.title("Collection", "what nobody refers to any more is removed, and never comes back")
        guide.say(f"{WAREHOUSE} dropped: {count_of(removed, 'artifact')} removed from the catalog")
    return removed


def one_bad_batch(store: Store, guide: Guide) -> str:
    """Three batches in one go; the second is impossible and fails alone (M3)."""
    guide.title("One bad batch", "three are sent at once; the second cannot be")
    shop, clicks = store.database("shop").db_id, store.database("clicks").db_id
    guards = [
        store.manifest.submit([UpdateDbStatus(clicks, DbStatus.READ_ONLY)]),
        store.manifest.submit([RenameDb(shop, "clicks")]),
        store.manifest.submit([UpdateDbStatus(clicks, DbStatus.ACTIVE)]),
    ]
    refusal = ""
    for number, guard in enumerate(guards, 1):
        try:
            guide.say(f"batch {number}: committed as change {guard.result().sequence:,}", "green")
        except QuireError as error:
            refusal = type(error).__name__
            guide.say(f"batch {number}: {refusal}: {error.what}", "red")
    return refusal


def show_tables(store: Store, guide: Guide) -> dict[str, int]:
    """The manifest's tables, those that have rows."""
    guide.title("Tables", "the manifest is one LMDB environment")
    with store.manifest.read() as txn:
        counts = {table.name: txn.count(table) for table in TABLES.values()}
    rows = [
        [name, f"{count:,}", TABLES[name].policy.value, TABLES[name].purpose] for name, count in counts.items() if count
    ]
    guide.table(["table", ">rows", "policy", "what it holds"], rows)
    guide.say(f"{size(store.info().manifest_bytes)} on disk")
    return counts


def show_changes(store: Store, guide: Guide) -> int:
    """The end of the change feed: every batch, in order, as the values that were applied."""
    guide.title("Change feed", "every committed batch, for subscribers to replay")
    head = store.info().newest_change
    with store.manifest.read() as txn:
        rows = [
            [f"{each.sequence:,}", moment(each.committed_at_ms), summary(each)]
            for each in txn.changes(max(1, head - 4))
        ]
    guide.table([">sequence", "committed", "operations"], rows)
    return head


def check(store: Store, guide: Guide) -> list[str]:
    """The one checker, which also runs at every opening."""
    guide.title("Check", "references counted again, indexes compared, rows decoded")
    began = CLOCK.monotonic()
    problems = [str(problem) for problem in store.manifest.check()]
    seconds = CLOCK.monotonic() - began
    for problem in problems[:5]:
        guide.say(problem, "red")
    if not problems:
        guide.say(f"all rules hold (checked in {seconds:.2f} s)", "green")
    return problems


# ── helpers ───────────────────────────────────────────────────────────────────────────────────────────────────────────
def _chunk(lsn: int) -> ChunkRecord:
    return ChunkRecord(Residency.LOCAL, CHUNK_BYTES, CLOCK.now_ms(), lsn_end=lsn)


# ── the guide ─────────────────────────────────────────────────────────────────────────────────────────────────────────
class Onlooker:
    """Reads snapshots of the catalog in its own thread, and counts those that show half a batch."""

    def __init__(self, store: Store, batch_ops: int) -> None:
        self.snapshots = 0
        self.halves = 0
        self._store = store
        self._batch_ops = batch_ops
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._look, name="onlooker")

    def __enter__(self) -> Onlooker:
        self._before = self._rows()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._done.wait(0.002):
            self.halves += bool((self._rows() - self._before) % self._batch_ops)
            self.snapshots += 1

    def _rows(self) -> int:
        with self._store.manifest.read() as txn:
            return txn.count(CHUNK_CATALOG)


class Guide:
    """Tells people what happens; says nothing when a program listens."""

    def __init__(self, *, quiet: bool) -> None:
        from rich.console import Console

        self._console = Console(quiet=quiet, highlight=False, markup=False, emoji=False)

    def title(self, title: str, text: str) -> None:
        """A step begins."""
        from rich.text import Text

        self._console.print()
        self._console.print(Text.assemble((title, "bold cyan"), " · ", (text, "dim")))

    def say(self, text: str, style: str = "") -> None:
        """One line about the step."""
        from rich.padding import Padding
        from rich.text import Text

        self._console.print(Padding(Text(text, style=style), (0, 0, 0, 2), expand=False))

    def table(self, columns: list[str], rows: list[list[str]]) -> None:
        """Rows, the last column as wide as there is room; columns that begin with `>` are aligned to the right."""
        from rich.box import SIMPLE_HEAD
        from rich.padding import Padding
        from rich.table import Table
        from rich.text import Text

        table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold")
        for name in columns:
            justify: JustifyMethod = "right" if name.startswith(">") else "left"
            table.add_column(name.removeprefix(">"), justify=justify, no_wrap=name != columns[-1])
        for row in rows:
            table.add_row(*(Text(cell, overflow="ellipsis", no_wrap=True) for cell in row))
        self._console.print(Padding(table, (0, 0, 0, 2), expand=False))

    def tree(self, root: Node) -> None:
        """A lineage, as `quire tree` draws it."""
        from rich.text import Text

        look = Look(self._console.width - 2, self._console.is_terminal and not self._console.no_color)
        for line in tree_lines(Tree(roots=[root], data=None), look):
            self._console.print(Text.from_ansi(f"  {line}"), soft_wrap=True)

    @contextmanager
    def progress(self, text: str, total: int) -> Iterator[Callable[[int], None]]:
        """A bar with the rate and the time that is left; only on a terminal."""
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        columns = (TextColumn(f"  {text}"), BarColumn(bar_width=30), MofNCompleteColumn(), TimeRemainingColumn())
        with Progress(*columns, console=self._console, disable=not self._console.is_terminal) as progress:
            task = progress.add_task(text, total=total)
            yield lambda count: progress.advance(task, count)

    def farewell(self, path: str, seconds: float) -> None:
        """What to try next."""
        self.title("What next", f"that took {seconds:.1f} s; run it again, or try")
        where = f"--store {shlex.quote(path)}"
        if shutil.which("quire") is None:
            self.say(f"(quire is here: {os.path.relpath(sys.argv[0])})")
        for line in NEXT:
            self.say(f"quire {line} {where}", "bold")
        self._console.print()
