"""A store with a page database whose checkpoint or merge is interrupted, and the process that is killed while it runs.

`Scene.make` prepares a database so that the next job writes full chunks or deltas, or merges them; the job is enqueued
but not run. A scene is a directory and the versions that must be readable in it, so tests can copy it, crash in it and
reopen it.
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
from tests.fork_server import Channel
from tests.jobs.job_store import _rows
from tests.pages.engine_harness import GRACE_SECONDS, Model, Pages, Version, assert_reads, image, write

KINDS = ("full", "delta", "merge", "window")
"""What the job writes. `window` also writes deltas, and first keeps the old live set for time travel."""

WINDOW_SECONDS = 1e6
"""Longer than any test runs by its clock: every version is kept."""

BEGIN_MS = 1_750_000_000_000
RETRY_SECONDS = 400.0
"""Longer than any backoff."""


def images(*numbers: int) -> dict[int, bytes]:
    """New contents of these pages."""
    return {number: image() for number in numbers}


@dataclass
class Owner(Pages):
    """A store's page engine, with the maintenance settings of a test."""

    maintenance: MaintenanceSettings = field(
        default_factory=lambda: MaintenanceSettings(delete_grace_seconds=GRACE_SECONDS)
    )

    def context(self) -> JobContext:
        """The context of this store's jobs."""
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

    def worker(self, *kinds: JobKind, **options: Any) -> Worker:
        return Worker(self.context(), {kind: HANDLERS[kind] for kind in kinds or HANDLERS}, **options)

    def enqueue(self, kind: JobKind = JobKind.CHECKPOINT, payload: Any = None) -> int:
        """Enqueue a job for the first database."""
        job_id: int = self.manifest.jobs.enqueue(kind, 1, payload)
        return job_id

    def retry(self) -> None:
        """Run what is due after every backoff has passed."""
        self.clock.advance(RETRY_SECONDS)
        self.worker().drain()

    # ── reading ──────────────────────────────────────────────────────────────────────────────────────────────────────
    def plans(self, db_id: int = 1) -> dict[int, PlanRecord]:
        """The stored plans by generation."""
        with self.manifest.read() as txn:
            return {key[1]: record for key, record in txn.scan(t.CHECKPOINT_PLAN, db_id)}

    def objects(self) -> dict[str, tuple[int, int]]:
        """Key → inode and modification time, which change if an object is written again. For stores that are
        directories."""
        stamps = {}
        for info in list_objects(open_store(self.objects_url)):
            status = os.stat(os.path.join(self.objects_url, info.key))
            stamps[info.key] = (status.st_ino, status.st_mtime_ns)
        return stamps

    def promised(self) -> set[str]:
        """The objects that rows refer to."""
        with self.manifest.read() as txn:
            rows = [
                *(key for key, _ in txn.scan(t.CHUNK_CATALOG)),
                *(key for key, _ in txn.scan(t.CHUNK_DELTA_INDEX)),
            ]
            rows_by_key = [(key, row) for key, row in _rows(txn) if key.kind.name != "WAL"]
            assert len(rows) == len(rows_by_key)
            return {remote_name(key, row, txn.namespace(row.namespace_id), "")[1] for key, row in rows_by_key}

    def job(self, job_id: int) -> Job:
        return self.manifest.jobs.get(job_id)

    def state(self, job_id: int) -> JobState:
        return self.job(job_id).state

    def segments(self) -> list[WalState]:
        """The states of the first database's segments that are not truncated."""
        with self.manifest.read() as txn:
            return [row.state for _, row in txn.scan(t.WAL_CATALOG, 1) if row.state is not WalState.TRUNCATED]

    def assert_newest(self, model: Model) -> None:
        """A reader of the first database sees its newest version."""
        with self.database().open_snapshot() as reader:
            assert_reads(reader, model.newest)

    def chain(self, slot: int, db_id: int = 1) -> list[tuple[str, int]]:
        """(kind, generation) of a slot's chunks."""
        with self.manifest.read() as txn:
            return [(link.kind.name, link.generation) for link in txn.chain(db_id, slot)]

    def settle(self) -> None:
        """Run everything that is due until nothing remains; then every object has a row."""
        for _ in range(8):
            self.worker().drain()
            self.clock.advance(RETRY_SECONDS)
        assert_clean(self.manifest, leaks=True)
        assert not self.plans()
        with self.manifest.read() as txn:
            assert not list(txn.raw_scan(t.GC_ZERO)), "an artifact still waits to be deleted"
        assert {info.key for info in list_objects(open_store(self.objects_url))} == self.promised()


@dataclass
class Scene:
    """The versions that must be readable in a store, and the job to run in it."""

    kind: str
    model: Model = field(default_factory=Model)
    fork: Model = field(default_factory=Model)
    snapshots: dict[str, Version] = field(default_factory=dict)
    """Snapshot → the version it must show."""
    job_id: int = 0
    now_ms: int = BEGIN_MS

    @classmethod
    def make(cls, base: Path, kind: str) -> Scene:
        """Slots 0 to 3 of eight pages each; the enqueued job is of this kind."""
        scene = cls(kind)
        owner = scene.open(base)
        store, model = owner.database(), scene.model
        write(store, model, {page: image() for page in range(30)})
        scene._snapshot(owner, "first")
        if kind != "full":
            owner.checkpoint(store)
            write(store, model, {page: image() for page in (1, 9, 17)})
            scene._snapshot(owner, "second")
        if kind == "merge":
            owner.checkpoint(store)
            write(store, model, {page: image() for page in (2, 9)})
            owner.checkpoint(store)
        else:
            write(store, model, {page: image() for page in (2, 10)}, truncate=20)  # slot 3 is dropped
        owner.engine.fork("shop", "branch")
        scene.fork = model.copy(model.newest.lsn)
        owner.engine.flush(store.db_id)
        scene.job_id = owner.manifest.jobs.enqueue(JobKind.MERGE if kind == "merge" else JobKind.CHECKPOINT, 1)
        scene.now_ms = owner.clock.now_ms()
        owner.stop()
        return scene

    def _snapshot(self, owner: Owner, name: str) -> None:
        owner.engine.snapshot("shop", name)
        self.snapshots[name] = self.model.newest

    def open(self, base: Path, later_seconds: float = 0.0, **options: Any) -> Owner:
        """Open the store as its next owner."""
        window = WINDOW_SECONDS if self.kind == "window" else 0.0
        settings = MaintenanceSettings(delete_grace_seconds=GRACE_SECONDS, time_travel_seconds=window)
        clock = ManualClock(self.now_ms + int(later_seconds * 1000))
        owner = Owner(base, clock=clock, maintenance=settings, **options)
        owner.manifest.jobs.recover()
        return owner

    def assert_readable(self, owner: Owner) -> None:
        """Every page of every live version is readable, including those of the snapshots and the fork."""
        assert_clean(owner.manifest)
        for name, model in (("shop", self.model), ("branch", self.fork)):
            with owner.database(name).open_snapshot() as reader:
                assert_reads(reader, model.newest)
        for name, version in self.snapshots.items():
            assert_reads(owner.engine.open_view("shop", name), version)
        for version in self.model.versions[1:] if self.kind == "window" else ():
            with owner.database().open_snapshot(at=version.lsn) as past:
                assert_reads(past, version)


@dataclass(frozen=True, slots=True)
class ChildTask:
    """What a child process does: open this scene, then stop at these failpoints."""

    base: str
    scene: Scene
    failpoints: str
    later_seconds: float = 0.0


def run_child(channel: Channel) -> None:
    """Entry point of the child process: an owner that runs what is due, and dies at its failpoint."""
    message = channel.receive()
    assert message is not None
    task: ChildTask = pickle.loads(message)
    arm_from(task.failpoints)
    owner = task.scene.open(Path(task.base), task.later_seconds)
    owner.database()
    owner.clock.advance(RETRY_SECONDS)
    owner.worker().drain()
    owner.stop()
