"""The command `tour`: a small store at work in ten seconds, written to be read as an example of the API.

Rules
  1. It can be run again and again: what is there is used, what the last run left for trying out is dropped first, so the
     store grows only by its change feed.
  2. It touches only databases it has made, which it knows by their tag: in a store of somebody's own it is harmless.
  3. It makes catalog rows, not objects: the chunks it names have no bytes. So what nobody refers to any more may go at
     once, where a collector would first delete objects and wait.
  4. Everything it says it has measured or read back.

Each step is a function of the store; `Guide` is how they talk to people.
"""

from __future__ import annotations

import os
import shlex
import shutil
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import typer

from quire.cli.command import Cli, Verdict, command
from quire.cli.exits import OK, PROBLEMS
from quire.cli.output import Facts
from quire.cli.plain import count_of, moment, size
from quire.core.clock import SystemClock
from quire.core.errors import NameTaken, QuireError

if TYPE_CHECKING:
    from rich.console import JustifyMethod

    from quire.manifest.guard import ManifestGuard
    from quire.manifest.reads import ReadTxn
    from quire.manifest.records import ChunkRecord, DeltaRecord
    from quire.store.store import Store

DATABASES = (("shop", "pages"), ("warehouse", "pages"), ("clicks", "stream"), ("sessions", "lsm"))
TAGS = {"made by": "quire tour"}
DIRECTORY = "quire-data"
"""Where the tour goes when nobody says where: never the current directory itself."""
SNAPSHOT = "tour"
FORK = "shop-experiment"
BURST_OPS = 20_000
BATCH_OPS = 10
SLOTS = 8
CLOCK = SystemClock()


def add_to(app: typer.Typer) -> None:
    """Register this command."""
    command(app, "tour", example="quire tour --store ./quire-data")(tour)


def tour(cli: Cli) -> Verdict:
    """Watch a store at work, step by step.

    Makes the store if need be, in ./quire-data unless --store says otherwise.
    """
    from quire.store.store import open as open_quire

    path = DIRECTORY if cli.path == "." else cli.path
    guide = Guide(quiet=cli.as_json)
    began = CLOCK.monotonic()
    with open_quire(path) as store:
        guide.title("A store", f"a directory, owned by one process: {store.path}")
        facts: dict[str, Any] = {
            "path": store.path,
            "databases": register(store, guide),
            "burst": burst(store, guide),
            "collected": collect(store, guide),
            "refused": one_bad_batch(store, guide),
            "checkpoint": checkpoint(store, guide),
            "branch": branch(store, guide),
            "tables": show_tables(store, guide),
            "changes": show_changes(store, guide),
            "problems": check(store, guide),
        }
    facts["seconds"] = round(CLOCK.monotonic() - began, 2)
    guide.farewell(path, facts["seconds"])
    code = PROBLEMS if facts["problems"] else OK
    return Verdict(Facts(lines=[], data=facts) if cli.as_json else None, code)


# ── the steps ─────────────────────────────────────────────────────────────────────────────────────────────────────────
def register(store: Store, guide: Guide) -> list[str]:
    """Databases of all kinds; those that are there stay, what the last tour left for trying out goes."""
    guide.title("Databases", "page databases, streams and key-value sets, all in one manifest")
    present = {each.name: each for each in store.databases()}
    for name, _ in DATABASES:
        if name in present and present[name].tags != TAGS:
            raise NameTaken(
                "the store has a database of this name that is not the tour's",
                hint=f"`quire tour --store ./{DIRECTORY}` takes it elsewhere",
                name=name,
            )
    if FORK in present and present[FORK].parent_db_id in _mine(store):
        store.drop(FORK, snapshots=True)
    for name, kind in DATABASES:
        found = present.get(name) or store.create(name, kind, tags=TAGS)
        guide.say(f"{found.name:<12}{found.kind.name.lower():<10}{'found' if name in present else 'made'}")
    return [each.name for each in store.databases()]


def _mine(store: Store) -> set[int]:
    """The tour's databases and forks of them, dropped ones included."""
    with store.manifest.read() as txn:
        records = dict(txn.databases())
    mine = {db_id for db_id, record in records.items() if record.tags == TAGS}
    return mine | {db_id for db_id, record in records.items() if record.parent_db_id in mine}


def burst(store: Store, guide: Guide) -> dict[str, Any]:
    """Many small batches, pipelined: nobody waits for one before the next is on its way. A reader looks on meanwhile."""
    from quire.manifest.ops.artifacts import PutChunk

    guide.title("A burst", f"{BURST_OPS:,} operations in batches of {BATCH_OPS}, while a reader takes snapshots")
    manifest = store.manifest
    warehouse = store.database("warehouse").db_id
    generation = manifest.reserve_generation(warehouse)
    record = _chunk(lsn=generation)
    guards: list[ManifestGuard] = []
    with guide.progress("committing", BURST_OPS) as advance, Onlooker(store) as onlooker:
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
    from quire.core.ids import ArtifactKind
    from quire.core.limits import SLOTS_PER_LEAF
    from quire.manifest import tables as t
    from quire.manifest.ops.base import Op
    from quire.manifest.ops.slots import SetSlots
    from quire.manifest.records import LeafRef
    from quire.manifest.slots import Leaf, Link, pack_leaf

    link = Link(ArtifactKind.BASE, db_id, generation, covered_lsn=generation)
    ops: list[Op] = []
    with store.manifest.read() as txn:
        for leaf, first in enumerate(range(0, BURST_OPS, SLOTS_PER_LEAF)):
            held = txn.get(t.LIVE_LEAF, db_id, leaf) or LeafRef(0, 0)
            chains: Leaf = dict.fromkeys(range(min(SLOTS_PER_LEAF, BURST_OPS - first)), (link,))
            ops.append(SetSlots(db_id, leaf, generation, held.origin_db_id, held.generation, pack_leaf(chains)))
    store.manifest.submit(ops).result()


def collect(store: Store, guide: Guide) -> int:
    """What nobody refers to any more: rows of earlier generations and of the last tour (rule 2)."""
    from quire.core.ids import ArtifactKind
    from quire.manifest import tables as t
    from quire.manifest.ops.base import Op
    from quire.manifest.ops.databases import RemoveDb
    from quire.manifest.ops.refs import RemoveArtifact
    from quire.manifest.ops.slots import CollectLeaf

    mine = _mine(store)
    removed = 0
    while True:
        with store.manifest.read() as txn:
            doomed = [key for key, _ in txn.scan(t.GC_ZERO) if key[0] in mine]
            dropped = [each for each, record in txn.databases() if record.dropped_at_ms and each in mine]
        ops: list[Op] = [
            CollectLeaf(origin, number, generation)
            if kind == ArtifactKind.LEAF
            else RemoveArtifact(origin, ArtifactKind(kind), number, generation, delta)
            for origin, kind, number, generation, delta in doomed
        ]
        guards = [store.manifest.submit(ops[first : first + 1000]) for first in range(0, len(ops), 1000)]
        for guard in guards:
            guard.result()
        removed += len(ops)
        if not ops:  # collected leaves may have doomed more; now nothing is left of the dropped databases either
            for db_id in dropped:
                store.manifest.submit([RemoveDb(db_id)]).result()
            break
    if removed:
        guide.title("Collection", "what nobody refers to any more is removed, and never comes back")
        guide.say(f"{count_of(removed, 'artifact')} of the last tour removed from the catalog")
    return removed


def one_bad_batch(store: Store, guide: Guide) -> str:
    """Three batches in one go; the second is impossible and fails alone (M3)."""
    from quire.manifest.ops.databases import RenameDb, UpdateDbStatus
    from quire.manifest.records import DbStatus

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


def checkpoint(store: Store, guide: Guide) -> dict[str, int]:
    """A sealed WAL segment, a checkpoint that rewrites slots, another one that lays deltas over two of them."""
    from quire.manifest.ops.wal import MoveWalState
    from quire.manifest.records import WalState
    from quire.manifest.store import DeltaChunk, FullChunk, WalChunkUpdate

    guide.title("Checkpoints", "the log of shop is absorbed into chunks, then deltas")
    manifest = store.manifest
    shop = store.database("shop").db_id
    with manifest.read() as txn:
        wal = txn.wal_state(shop)
    assert wal is not None, "every database has a WAL state"
    segment, lsn = wal.next_segment_id, wal.last_applied_lsn
    sealed = WalChunkUpdate(segment_id=segment, first_lsn=lsn + 1, last_lsn=lsn + 100, used_bytes=4096 * 100)
    manifest.append_wal_chunk(shop, 0, sealed).result()
    base = manifest.reserve_generation(shop)
    rewritten = [FullChunk(slot=slot, record=_chunk(lsn + 60)) for slot in range(SLOTS)]
    manifest.checkpoint_apply(shop, base, rewritten, covered_lsn=lsn + 60).result()
    over = manifest.reserve_generation(shop)
    deltas = [DeltaChunk(slot=slot, delta_id=1, record=_delta(base, lsn + 100)) for slot in (0, 1)]
    manifest.checkpoint_apply(shop, over, deltas, covered_lsn=lsn + 100).result()
    life = (WalState.INDEXED, WalState.CHECKPOINT_READY, WalState.CHECKPOINTED, WalState.TRUNCATED)
    manifest.submit([MoveWalState(shop, segment, state) for state in life]).result()
    with manifest.read() as txn:
        chain = " + ".join(f"{link.kind.name.lower()}:{link.generation}" for link in txn.chain(shop, 0))
    guide.say(f"segment {segment} sealed, {SLOTS} chunks and {len(deltas)} deltas published, segment truncated")
    guide.say(f"slot 0 of shop is now {chain}")
    return {"segment": segment, "chunks": SLOTS, "deltas": len(deltas)}


def branch(store: Store, guide: Guide) -> dict[str, Any]:
    """A named snapshot and a fork of it: they share everything and copy nothing."""
    from quire.manifest.ops.base import Op
    from quire.manifest.ops.snapshots import DropSnapshot, ForkDb, PublishSnapshot
    from quire.manifest.records import SnapshotKind

    guide.title("Snapshot and fork", "they share everything and copy nothing")
    manifest = store.manifest
    shop = store.database("shop").db_id
    with manifest.read() as txn:
        record, wal = txn.database(shop), txn.wal_state(shop)
        assert record is not None, "shop was registered above"
        assert wal is not None, "every database has a WAL state"
        snapshot_id = record.next_snapshot_id
        earlier = _snapshots_named(txn, shop, SNAPSHOT)
    ops: list[Op] = [DropSnapshot(shop, each) for each in earlier]
    ops.append(PublishSnapshot(shop, snapshot_id, SnapshotKind.NAMED, SNAPSHOT, wal.last_applied_lsn))
    fork_id = manifest.reserve_db_id()
    began = CLOCK.monotonic()
    manifest.submit([*ops, ForkDb(fork_id, shop, FORK, snapshot_id)]).result()
    milliseconds = round((CLOCK.monotonic() - began) * 1000, 1)
    guide.say(f"shop@{SNAPSHOT} and its fork {FORK}, in one durable batch of {milliseconds} ms")
    return {"snapshot_id": snapshot_id, "fork": FORK, "milliseconds": milliseconds}


def show_tables(store: Store, guide: Guide) -> dict[str, int]:
    """The manifest's tables, those that have rows."""
    from quire.manifest.tables import TABLES

    guide.title("Tables", "the manifest is one LMDB environment")
    with store.manifest.read() as txn:
        counts = {table.name: txn.count(table) for table in TABLES.values()}
    rows = [
        [name, f"{count:,}", TABLES[name].policy.value, TABLES[name].purpose] for name, count in counts.items() if count
    ]
    guide.table([("table", "left"), ("rows", "right"), ("policy", "left"), ("what it holds", "left")], rows)
    guide.say(f"{size(store.info().manifest_bytes)} on disk")
    return counts


def show_changes(store: Store, guide: Guide) -> int:
    """The end of the change feed: every batch, in order, as the values that were applied."""
    from quire.cli.feed import summary

    guide.title("Change feed", "every committed batch, for subscribers to replay")
    head = store.info().newest_change
    with store.manifest.read() as txn:
        rows = [
            [f"{each.sequence:,}", moment(each.committed_at_ms), summary(each)]
            for each in txn.changes(max(1, head - 4))
        ]
    guide.table([("sequence", "right"), ("committed", "left"), ("operations", "left")], rows)
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
    from quire.core.limits import CHUNK_BYTES
    from quire.manifest.records import ChunkRecord, Residency

    return ChunkRecord(Residency.LOCAL, CHUNK_BYTES, CLOCK.now_ms(), lsn_end=lsn)


def _delta(base_generation: int, lsn: int) -> DeltaRecord:
    from quire.core.limits import MIB
    from quire.manifest.records import DeltaRecord, Residency

    return DeltaRecord(base_generation, Residency.LOCAL, MIB, CLOCK.now_ms(), lsn_end=lsn)


def _snapshots_named(txn: ReadTxn, db_id: int, name: str) -> list[int]:
    from quire.manifest import tables as t

    return [key[1] for key, record in txn.scan(t.SNAPSHOT_INDEX, db_id) if record.name == name]


class Onlooker:
    """Reads snapshots of the catalog in its own thread, and counts those that show half a batch."""

    def __init__(self, store: Store) -> None:
        self.snapshots = 0
        self.halves = 0
        self._store = store
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
            self.halves += bool((self._rows() - self._before) % BATCH_OPS)
            self.snapshots += 1

    def _rows(self) -> int:
        from quire.manifest.tables import CHUNK_CATALOG

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

    def table(self, columns: list[tuple[str, JustifyMethod]], rows: list[list[str]]) -> None:
        """Rows, the last column as wide as there is room."""
        from rich.box import SIMPLE_HEAD
        from rich.padding import Padding
        from rich.table import Table
        from rich.text import Text

        table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold")
        for name, justify in columns:
            table.add_column(name, justify=justify, no_wrap=name != columns[-1][0])
        for row in rows:
            table.add_row(*(Text(cell, overflow="ellipsis", no_wrap=True) for cell in row))
        self._console.print(Padding(table, (0, 0, 0, 2), expand=False))

    @contextmanager
    def progress(self, text: str, total: int) -> Iterator[Callable[[int], None]]:
        """A bar with the rate and the time that is left; only on a terminal."""
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        columns = (TextColumn(f"  {text}"), BarColumn(bar_width=30), MofNCompleteColumn(), TimeRemainingColumn())
        with Progress(*columns, console=self._console, disable=not self._console.is_terminal) as progress:
            task = progress.add_task(text, total=total)
            yield lambda count: progress.advance(task, count)

    def farewell(self, path: str, seconds: float) -> None:
        """What to try next: real commands."""
        self.title("What next", f"that took {seconds:.1f} s; run it again, or try")
        where = f"--store {shlex.quote(path)}"
        if shutil.which("quire") is None:
            self.say(f"(quire is here: {os.path.relpath(sys.argv[0])})")
        for line in (
            f"quire ls {where}",
            f"quire feed tail {where} --limit 5",
            f"quire manifest dump slot_leaf {where} --limit 3",
            f"quire create mine --kind pages {where}",
            f"quire doctor {where}",
        ):
            self.say(line, "bold")
        self._console.print()
