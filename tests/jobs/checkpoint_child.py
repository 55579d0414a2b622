"""A store with a page database whose checkpoint or merge is to be interrupted; and the process that is killed in it.

`Scene.make` brings a database to the point where one more job writes full chunks, deltas, or merges them; the job is enqueued
and not run. A scene is a directory and what must be readable in it, so it can be copied, died in, and looked at by others.
"""

from __future__ import annotations

import os
import pickle
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from quire.core.settings import MaintenanceSettings
from quire.durable.failpoints import arm_from
from quire.jobs.context import JobContext
from quire.jobs.locations import remote_name
from quire.jobs.registry import HANDLERS
from quire.jobs.worker import Worker
from quire.manifest import tables as t
from quire.manifest.jobqueue import Job
from quire.manifest.namespaces import collector_of
from quire.manifest.records import JobKind, JobState, PlanRecord, WalState
from quire.objects.api import list_objects
from quire.objects.open import open_store
from quire.testing.clock import ManualClock
from quire.testing.manifest import assert_clean
from tests.jobs.world import _rows
from tests.nursery import Line
from tests.pages.world import GRACE_SECONDS, Model, Pages, Version, assert_reads, image, write

KINDS = ("full", "delta", "merge", "window")
"""What the job writes; `window` writes deltas, too, and first keeps the old live set for time travel."""

WINDOW_SECONDS = 1e6
"""Longer than any test lives by its clock: every version stays."""

BEGIN_MS = 1_750_000_000_000
RETRY_SECONDS = 400.0
"""Beyond any backoff."""


def images(*numbers: int) -> dict[int, bytes]:
    """New contents of these pages."""
    return {number: image() for number in numbers}


@dataclass
class Owner(Pages):
    """A store's page engine with the maintenance settings a test wants."""

    maintenance: MaintenanceSettings = field(
        default_factory=lambda: MaintenanceSettings(delete_grace_seconds=GRACE_SECONDS)
    )

    def context(self) -> JobContext:
        """What jobs of this store work with."""
        return JobContext(
            manifest=self.manifest,
            root=self.root,
            disk=self.disk,
            objects_url=self.objects_url,
            open_store=self.stores,
            collector=collector_of(self.manifest, self.objects_url, self.stores),
            settings=self.maintenance,
            pages=self.engine,
        )

    def worker(self, *kinds: JobKind, **more: Any) -> Worker:
        return Worker(self.context(), {kind: HANDLERS[kind] for kind in kinds or HANDLERS}, **more)

    def ask(self, kind: JobKind = JobKind.CHECKPOINT, payload: Any = None) -> int:
        """Enqueue a job for the first database."""
        job_id: int = self.manifest.jobs.enqueue(kind, 1, payload)
        return job_id

    def retry(self) -> None:
        """Do what is due when every backoff is over."""
        self.clock.advance(RETRY_SECONDS)
        self.worker().drain()

    # ── looking ───────────────────────────────────────────────────────────────────────────────────────────────────────
    def plans(self, db_id: int = 1) -> dict[int, PlanRecord]:
        """Generation → plan that is stored."""
        with self.manifest.read() as txn:
            return {key[1]: record for key, record in txn.scan(t.CHECKPOINT_PLAN, db_id)}

    def objects(self) -> dict[str, tuple[int, int]]:
        """Key → what changes if an object is written again; for stores that are directories."""
        found = {}
        for info in list_objects(open_store(self.objects_url)):
            status = os.stat(os.path.join(self.objects_url, info.key))
            found[info.key] = (status.st_ino, status.st_mtime_ns)
        return found

    def promised(self) -> set[str]:
        """The objects that rows speak of."""
        with self.manifest.read() as txn:
            rows = [
                *(key for key, _ in txn.scan(t.CHUNK_CATALOG)),
                *(key for key, _ in txn.scan(t.CHUNK_DELTA_INDEX)),
            ]
            named = [(key, row) for key, row in _rows(txn) if key.kind.name != "WAL"]
            assert len(rows) == len(named)
            return {remote_name(key, row, txn.namespace(row.namespace_id), "")[1] for key, row in named}

    def job(self, job_id: int) -> Job:
        return self.manifest.jobs.get(job_id)

    def state(self, job_id: int) -> JobState:
        return self.job(job_id).state

    def segments(self) -> list[WalState]:
        """The states of segments that the first database has not let go."""
        with self.manifest.read() as txn:
            return [row.state for _, row in txn.scan(t.WAL_CATALOG, 1) if row.state is not WalState.TRUNCATED]

    def assert_newest(self, model: Model) -> None:
        """The first database shows its newest version."""
        with self.database().open_snapshot() as reader:
            assert_reads(reader, model.newest)

    def chain(self, slot: int, db_id: int = 1) -> list[tuple[str, int]]:
        """(kind, generation) of a slot's chunks."""
        with self.manifest.read() as txn:
            return [(link.kind.name, link.generation) for link in txn.chain(db_id, slot)]

    def settle(self) -> None:
        """Everything that is due, until nothing is left to do; then there is no object that nobody speaks of."""
        for _ in range(8):
            self.worker().drain()
            self.clock.advance(RETRY_SECONDS)
        assert_clean(self.manifest, leaks=True)
        assert not self.plans()
        with self.manifest.read() as txn:
            assert not list(txn.raw_scan(t.GC_ZERO)), "something is still to be deleted"
        assert {info.key for info in list_objects(open_store(self.objects_url))} == self.promised()


@dataclass
class Scene:
    """What must be readable in a store, and the job that is to be done in it."""

    kind: str
    model: Model = field(default_factory=Model)
    fork: Model = field(default_factory=Model)
    kept: dict[str, Version] = field(default_factory=dict)
    """Snapshot → what it shows."""
    job_id: int = 0
    now_ms: int = BEGIN_MS

    @classmethod
    def make(cls, base: Path, kind: str) -> Scene:
        """Slots 0 to 3 of eight pages; the job that comes next is of this kind."""
        scene = cls(kind)
        owner = scene.open(base)
        store, model = owner.database(), scene.model
        write(store, model, {page: image() for page in range(30)})
        scene._keep(owner, "first")
        if kind != "full":
            owner.checkpoint(store)
            write(store, model, {page: image() for page in (1, 9, 17)})
            scene._keep(owner, "second")
        if kind == "merge":
            owner.checkpoint(store)
            write(store, model, {page: image() for page in (2, 9)})
            owner.checkpoint(store)
        else:
            write(store, model, {page: image() for page in (2, 10)}, truncate=20)  # slot 3 goes
        owner.engine.fork("shop", "branch")
        scene.fork = model.copy(model.newest.lsn)
        owner.engine.flush(store.db_id)
        scene.job_id = owner.manifest.jobs.enqueue(JobKind.MERGE if kind == "merge" else JobKind.CHECKPOINT, 1)
        scene.now_ms = owner.clock.now_ms()
        owner.stop()
        return scene

    def _keep(self, owner: Owner, name: str) -> None:
        owner.engine.snapshot("shop", name)
        self.kept[name] = self.model.newest

    def open(self, base: Path, later_seconds: float = 0.0, **more: Any) -> Owner:
        """The store's next owner."""
        window = WINDOW_SECONDS if self.kind == "window" else 0.0
        settings = MaintenanceSettings(delete_grace_seconds=GRACE_SECONDS, time_travel_seconds=window)
        clock = ManualClock(self.now_ms + int(later_seconds * 1000))
        owner = Owner(base, clock=clock, maintenance=settings, **more)
        owner.manifest.jobs.recover()
        return owner

    def assert_readable(self, owner: Owner) -> None:
        """Every page of every live version, the snapshots' and the fork's included."""
        assert_clean(owner.manifest)
        for name, model in (("shop", self.model), ("branch", self.fork)):
            with owner.database(name).open_snapshot() as reader:
                assert_reads(reader, model.newest)
        for name, version in self.kept.items():
            assert_reads(owner.engine.open_view("shop", name), version)
        for version in self.model.versions[1:] if self.kind == "window" else ():
            with owner.database().open_snapshot(at=version.lsn) as earlier:
                assert_reads(earlier, version)


@dataclass(frozen=True, slots=True)
class Life:
    """What a child is told."""

    base: str
    scene: Scene
    failpoints: str
    later_seconds: float = 0.0


def live(line: Line) -> None:
    """The target of the nursery: an owner that does what is due, and dies where it was told to."""
    message = line.receive()
    assert message is not None
    told: Life = pickle.loads(message)
    arm_from(told.failpoints)
    owner = told.scene.open(Path(told.base), told.later_seconds)
    owner.database()
    owner.clock.advance(RETRY_SECONDS)
    owner.worker().drain()
    owner.stop()
