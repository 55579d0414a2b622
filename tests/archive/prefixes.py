"""Every prefix of a recorded queue, opened as a store: the invariant on which the archive is based.

    python -m tests.archive.prefixes FIRST_SEED SEEDS [STRIDE]

A run of the whole-store simulation uses a store with an archive whose queue is recorded event by event. Each prefix of
that queue is replayed into a directory, with the base before it, and opened as its owner. Recovery must raise nothing,
the manifest's rules must hold, and the store must equal the model before or after the change that was in progress at
that event.

Thread: one. Raises `PrefixFailed` with the seed and the event.
"""

from __future__ import annotations

import hashlib
import os
import random
import shutil
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

import quire
from quire.archive.archiver import Archiver
from quire.archive.base_writer import base_records
from quire.archive.format import AnyEvent, ArtifactEvent, CommitEvent
from quire.archive.queue import Entry, EventQueue, PendingArtifact, PendingBase, Slot
from quire.archive.recorder import REMOTE_FILES, sha256_of
from quire.archive.replay import Replay
from quire.core.settings import ArchiveSettings
from quire.durable.files import OsDisk, write_atomic
from quire.durable.names import MANIFEST
from quire.manifest.check import check
from quire.manifest.row_image import RowImage
from quire.objects.local import LocalStore
from quire.store.restoring import correct_rows
from quire.store.store import Store
from quire.testing.clock import ManualClock
from quire.testing.simulation_lives import SETTINGS, START_MS
from quire.testing.simulation_steps import Model, NoReader, Steps, observe

ARCHIVED = msgspec.structs.replace(SETTINGS, archive=ArchiveSettings(mode="async", interval_seconds=1e6))


@dataclass
class _Rows:
    """The part of a `Replay` that the corrections of a restore need."""

    image: RowImage

    def rows(self) -> RowImage:
        return self.image


class PrefixFailed(AssertionError):
    """A prefix of the queue is not a state that a killed process could have left."""


class RecordedQueue(EventQueue):
    """A queue from which nothing is taken, and that keeps everything."""

    def __init__(self, keep: Callable[[PendingArtifact], ArtifactEvent]) -> None:
        super().__init__()
        self.entries: list[Entry | Slot] = []
        self._keep = keep

    def append(self, event: Entry) -> None:
        if isinstance(event, PendingArtifact):
            event = self._keep(event)
        with self._lock:
            self.entries.append(event)
            self._end += 1

    def reserve(self) -> Slot:
        slot = Slot(self)
        with self._lock:
            self.entries.append(slot)
            self._end += 1
        return slot

    def events(self, start: int, stop: int) -> list[AnyEvent]:
        entries = (entry.event if isinstance(entry, Slot) else entry for entry in self.entries[start:stop])
        return [
            entry for entry in entries if entry is not None and not isinstance(entry, PendingArtifact | PendingBase)
        ]


@dataclass
class Moment:
    """From this many events on, the store has one of these models."""

    end: int
    models: list[Model]


class RecordedSteps(Steps):
    """Steps that record where in the queue each change began and ended."""

    queue: RecordedQueue
    moments: list[Moment]

    def _change(self, after: Model, act: Callable[[], object], what: str = "") -> bool:
        self.moments.append(Moment(self.queue.end, [self.model, after]))
        done = super()._change(after, act, what)
        self.moments.append(Moment(self.queue.end, [self.model]))
        return done


@dataclass
class Recording:
    """A recorded run."""

    base: list[AnyEvent]
    queue: RecordedQueue
    moments: list[Moment]
    steps: list[str]
    now_ms: list[int] = field(default_factory=list)

    def models_at(self, end: int) -> list[Model]:
        """What the store may contain after this many events: completed changes are included, one in progress is or is
        not."""
        possible: list[Model] = [{}]
        for moment in self.moments:
            if moment.end > end:
                break
            # a change that begins at this event has done nothing yet, and one that ends here is complete
            possible = moment.models
        return possible


def record(home: Path, seed: int, steps: int) -> Recording:
    """Record a run of the simulation. Objects are never deleted: their retention is a matter of the window."""
    root, bucket = str(home / "store"), str(home / "bucket")
    clock, draw = ManualClock(START_MS), random.Random(f"prefixes {seed}")
    log: list[str] = ["begins"]

    def keep_artifact(artifact: PendingArtifact) -> ArtifactEvent:
        inode, size, changed = artifact.identity
        data = Path(artifact.kept).read_bytes()
        key = f"kept/{hashlib.sha256(data).hexdigest()}-{inode:x}-{changed:x}"
        target = Path(bucket) / key
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(data)
        os.unlink(artifact.kept)
        return ArtifactEvent(inode, artifact.path, key, size, sha256_of(str(target)))

    def begin(archiver: Archiver) -> None:
        recording.queue = archiver.recorder.queue = archiver.queue = RecordedQueue(keep_artifact)
        manifest = archiver._manifest
        recording.base = list(
            base_records(manifest, archiver._disk, root, archiver.recorder, lambda *_: _no_artifact())
        )
        manifest.writer.archive = archiver
        manifest.writer.record_rows()

    os.makedirs(bucket)
    recording = Recording([], RecordedQueue(keep_artifact), [], log)
    quire.open(root, settings=SETTINGS, clock=clock).close()
    original_start, Archiver.start = Archiver.start, begin  # type: ignore[method-assign, assignment]
    original_close, Archiver.close = Archiver.close, lambda _: True  # type: ignore[method-assign, assignment]
    original_delete = LocalStore.delete
    LocalStore.delete = lambda *_: None  # type: ignore[method-assign]
    try:
        store = quire.open(root, settings=ARCHIVED, clock=clock)
        steps_run = RecordedSteps(store, {}, clock, draw, log, NoReader(), 1)
        steps_run.queue, steps_run.moments = recording.queue, recording.moments
        steps_run.run(steps)
        if steps_run.findings:
            raise PrefixFailed(f"seed {seed}: the run itself: {steps_run.findings}")
        store.close()
    finally:
        Archiver.start, Archiver.close = original_start, original_close  # type: ignore[method-assign]
        LocalStore.delete = original_delete  # type: ignore[method-assign]
    recording.now_ms.append(clock.now_ms())
    return recording


def _no_artifact() -> AnyEvent:
    raise AssertionError("a new store has no tables")


def check_prefix(home: Path, recording: Recording, replayed: Path, end: int) -> list[str]:
    """What is wrong with the store that this many events produce."""
    target = home / "prefix"
    if target.exists():
        shutil.rmtree(target)
    target.mkdir()
    shutil.copytree(replayed, target / "store", ignore=shutil.ignore_patterns(".files"))
    shutil.copytree(home / "bucket", target / "bucket", copy_function=os.link)
    shutil.rmtree(target / "bucket" / _store_id(home) / "owner", ignore_errors=True)
    root = str(target / "store")
    with RowImage(os.path.join(root, MANIFEST)) as rows:
        correct_rows(_Rows(rows), root, SETTINGS.object_store)  # type: ignore[arg-type]
    findings: list[str] = []
    try:
        with quire.open(root, settings=SETTINGS, clock=ManualClock(recording.now_ms[0]), create=False) as store:
            findings += _compare(store, recording.models_at(end))
    except Exception:
        findings.append(traceback.format_exc()[-3_000:])
    return findings


def _compare(store: Store, models: list[Model]) -> list[str]:
    with store.manifest.read() as txn:
        findings = [f"the manifest breaks a rule: {problem}" for problem in check(txn) if not problem.leak]
    differences = [observe(store, model) for model in models]
    if [] not in differences:
        findings += [f"model {number}: {text}" for number, texts in enumerate(differences) for text in texts]
    return findings


def _store_id(home: Path) -> str:
    with quire.open(str(home / "store"), "r") as store, store.manifest.read() as txn:
        return txn.store_id()


def run(seed: int, *, steps: int = 80, stride: int = 1, home: Path | None = None) -> int:
    """Record a run and check its prefixes; returns their number."""
    with tempfile.TemporaryDirectory(prefix="quire-prefixes-", dir=home) as directory:
        base = Path(directory)
        recording = record(base, seed, steps)
        return check_all(base, recording, seed, stride)


def check_all(base: Path, recording: Recording, seed: int, stride: int) -> int:
    replayed = base / "replayed"
    checked, last = 0, 0
    total = len(recording.queue.entries)
    first = random.Random(f"first {seed}").randrange(stride)
    with Replay(OsDisk(), str(replayed)) as replay:
        replay.apply(recording.base)
        replay.is_lenient = False
        for end in range(first, total + 1, stride):
            replay.apply(recording.queue.events(last, end))
            last = end
            write_atomic(OsDisk(), str(replayed / REMOTE_FILES), msgspec.json.encode(replay.remote))
            findings = check_prefix(base, recording, replayed, end)
            if findings:
                raise PrefixFailed(_report(seed, end, recording, findings))
            checked += 1
    return checked


def _report(seed: int, end: int, recording: Recording, findings: list[str]) -> str:
    around = [
        f"  {number}: {_short(event)}"
        for number in range(max(end - 12, 0), min(end + 4, len(recording.queue.entries)))
        for event in recording.queue.events(number, number + 1)
    ]
    head = f"seed {seed}, event {end} of {len(recording.queue.entries)}:"
    return "\n".join([head, *findings, "events:", *around, "steps:", *recording.steps])


def _short(event: AnyEvent) -> str:
    if isinstance(event, CommitEvent):
        return "commit " + ", ".join(f"{name} +{len(puts)} -{len(deletes)}" for name, puts, deletes in event.tables)
    return repr(event)[:160]


def main(first: int, seeds: int, stride: int = 1) -> int:
    failed = 0
    for seed in range(first, first + seeds):
        started = time.monotonic()
        try:
            count = run(seed, stride=stride)
        except PrefixFailed as failure:
            failed += 1
            print(failure, flush=True)
            continue
        print(f"seed {seed}: {count} prefixes in {time.monotonic() - started:.1f} s", flush=True)
    return failed


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:])))
