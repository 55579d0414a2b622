"""Power loss at every step of the writer: nothing committed is lost, nothing uncommitted is half there."""

from __future__ import annotations

import random
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.core.errors import ManifestIntegrityError
from quire.core.settings import ManifestLogSettings
from quire.durable.files import Disk, File
from quire.objects.open import open_store
from quire.stream import mlog_format, mlog_writer
from quire.stream import mlog_records as r
from quire.stream.mlog_format import ChunkFacts
from quire.stream.mlog_index import ManifestIndex
from quire.stream.mlog_log import ManifestLog
from quire.stream.mlog_modes import SegmentFacts, facts_of
from quire.stream.mlog_tier2 import LogObjects
from quire.stream.mlog_writer import ManifestLogWriter
from quire.testing.clock import ManualClock
from quire.testing.crashdisk import Chooser, CrashDisk, CrashOutcome, drop_all, keep_all
from quire.testing.faults import Fault, FaultyDisk, PowerCut
from tests.stream.logs import STREAM, all_values, files_at, open_writer, opened, same_state
from tests.stream.stories import Story

EAGER = ManifestLogSettings(chunk_bytes=16 << 10, record_bytes_max=1024, snapshot_chunks=2, sealed_kept=1)
STEPS = ["append", "append", "append", "commit", "large", "rotate", "reopen"]


def mostly(kind: CrashOutcome, seed: int) -> Chooser:
    """One outcome nine times out of ten: one lost sector among many is the hardest case to see."""
    draw = random.Random(seed)
    return lambda options: draw.choice(options) if draw.random() < 0.1 or kind not in options else kind


CHOOSERS = st.one_of(
    st.just(keep_all),
    st.just(drop_all),
    st.integers(0, 2**32).map(lambda seed: random.Random(seed).choice),
    st.builds(mostly, st.sampled_from(list(CrashOutcome)), st.integers(0, 2**32)),
)


class Life:
    """A writer on some disk, what was appended, and how much of it a returned call has promised."""

    def __init__(self) -> None:
        self.values: list[r.Payload] = []
        self.promised = 0
        self.writer: ManifestLogWriter | None = None

    def run(self, disk: Disk, root: str, steps: Sequence[str]) -> None:
        files = files_at(root, disk)
        self.writer = open_writer(files)
        for step in steps:
            if step in ("append", "large"):
                value: r.Payload = opened(len(self.values))
                if step == "large":
                    value = r.UploadStarted(f"{len(self.values)}" + "k" * 9_000)
                self.values.append(value)
                self.writer.append(value, 1)
                continue
            if step == "commit":
                self.writer.commit()
            elif step == "rotate":
                self.writer.rotate()
            else:
                self.writer.close()
                self.writer = None
                self.writer = open_writer(files)
            self.promised = len(self.values)
        self.writer.commit()
        self.promised = len(self.values)

    def check(self, disk: CrashDisk) -> None:
        """What survived is a beginning of what was appended, with everything promised; and writing goes on behind it."""
        files = files_at(disk.root, disk)
        found = all_values(files)
        assert found == self.values[: len(found)]
        assert len(found) >= self.promised, "something committed is gone"
        with open_writer(files) as writer:
            assert all_values(files) == found
            writer.append(opened(999), 1)
            writer.commit()
            writer.append(opened(1000), 1)
        assert all_values(files) == [*found, opened(999), opened(1000)]


@contextmanager
def life_until(root: str, steps: Sequence[str], fail_at: int) -> Iterator[tuple[Life, CrashDisk, bool]]:
    disk = CrashDisk(root)
    faulty = FaultyDisk(disk, Fault.POWER_CUT, fail_at=fail_at)
    life = Life()
    try:
        life.run(faulty, root, steps)
    except PowerCut:
        pass
    try:
        yield life, disk, faulty.fired
    finally:
        if life.writer is not None:
            life.writer.abandon()


def crash(life: Life, disk: CrashDisk, choose: Chooser) -> None:
    with tempfile.TemporaryDirectory() as folder:
        life.check(disk.crash(f"{folder}/after", choose))


def at_every_step(steps: Sequence[str], choosers: Sequence[Chooser]) -> int:
    """Cut the power at the first, second, … call of the disk; how many there were."""
    fail_at = 0
    while True:
        fail_at += 1
        with tempfile.TemporaryDirectory() as root, life_until(root, steps, fail_at) as (life, disk, fired):
            for choose in choosers:
                crash(life, disk, choose)
        if not fired:
            return fail_at


SCRIPT = ["append", "commit", "append", "append", "commit", "rotate", "append", "large", "commit", "append", "reopen"]


def test_power_off_at_every_step_of_a_life() -> None:
    choosers = [keep_all, drop_all, *(mostly(kind, seed) for kind in CrashOutcome for seed in range(1))]
    assert at_every_step(SCRIPT, choosers) > 40


@given(steps=st.lists(st.sampled_from(STEPS), max_size=12), fail_at=st.integers(1, 60), choose=CHOOSERS)
def test_power_off_anywhere_in_any_life(steps: list[str], fail_at: int, choose: Chooser) -> None:
    with tempfile.TemporaryDirectory() as root, life_until(root, steps, fail_at) as (life, disk, _):
        crash(life, disk, choose)


def test_without_the_sync_between_copy_and_header_the_harness_finds_a_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    """A planted bug: header and copy in one go, so that both may be torn, and the header may come before its payload."""

    def careless(file: File, size: int, facts: ChunkFacts) -> None:
        file.write_at(facts.encode(), size - mlog_format.COPY_BYTES)
        file.write_at(facts.header.encode(), 0)
        file.sync()

    monkeypatch.setattr(mlog_writer, "write_header", careless)
    choosers = [mostly(kind, seed) for kind in CrashOutcome for seed in range(2)]
    with pytest.raises((AssertionError, ManifestIntegrityError)):
        at_every_step(SCRIPT, choosers)


# ── the whole log: state, snapshots, retention ────────────────────────────────────────────────────────────────────────
LOG_STEPS = ["tell", "tell", "tell", "snapshot", "rotate", "tick", "reopen"]


class WholeLife:
    """A `ManifestLog` on some disk with a store of objects that survives; and what was promised."""

    def __init__(self, objects: LogObjects) -> None:
        self.objects = objects
        self.story = Story(3)
        self.told: list[tuple[r.Payload, int]] = []
        self.promised = 0
        self.log: ManifestLog | None = None

    def open(self, disk: Disk, root: str) -> ManifestLog:
        clock = ManualClock()
        store: Any = self.objects.store
        return ManifestLog.open(
            files_at(root, disk), clock=clock, settings=EAGER, objects=self.objects, collect=store.delete_many
        )

    def run(self, disk: Disk, root: str, steps: Sequence[str]) -> None:
        self.log = self.open(disk, root)
        for step in steps:
            if step == "tell":
                told = self.story.many(3)
                self.told += told
                self.log.append_all(told)
            elif step == "snapshot":
                self.log.snapshot()
            elif step == "rotate":
                self.log.rotate()
            elif step == "tick":
                self.log.tick()
            else:
                self.log.close()
                self.log = None
                self.log = self.open(disk, root)
            self.promised = len(self.told)

    def check(self, disk: CrashDisk) -> None:
        """What is rebuilt is the fold of a beginning of what was told, with everything promised; and it goes on."""
        with self.open(disk, disk.root) as log:
            ours = [self._facts(index) for index in self._folds()]
            found = self._facts(log.index)
            assert found in ours[self.promised :], "a committed record is gone, or one appeared"
            assert log.index.rejected == 0
            segment = log.index.opened_max + 1
            log.append_all([(opened(1), segment)])
            log.snapshot()
            log.tick()
            live = log.index
        with self.open(disk, disk.root) as log:
            assert same_state(log.index, live)

    def _folds(self) -> Iterator[ManifestIndex]:
        index = ManifestIndex()
        yield index
        for value, segment in self.told:
            index.fold_raw(mlog_format.encode_record(value.TYPE, segment, r.encode(value)))
            yield index

    def _facts(self, index: ManifestIndex) -> list[tuple[int, SegmentFacts]]:
        return [(info.segment_id, facts_of(info)) for info in index.segments()]


@given(steps=st.lists(st.sampled_from(LOG_STEPS), max_size=14), fail_at=st.integers(1, 120), choose=CHOOSERS)
def test_power_off_anywhere_with_snapshots_uploads_and_retention(
    steps: list[str], fail_at: int, choose: Chooser
) -> None:
    with tempfile.TemporaryDirectory() as root:
        store = open_store("memory://")
        life = WholeLife(LogObjects(store, STREAM))
        disk = CrashDisk(root)
        try:
            life.run(FaultyDisk(disk, Fault.POWER_CUT, fail_at=fail_at), root, steps)
        except PowerCut:
            pass
        with tempfile.TemporaryDirectory() as folder:
            after = disk.crash(f"{folder}/after", choose)
            if life.log is not None:
                life.log.abandon()
            life.check(after)
        store.close()
