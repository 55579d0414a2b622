"""Power loss at every step of the writer: no committed record is lost, and no uncommitted one is there in part."""

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
from tests.stream.logs import STREAM, all_values, append_all, files_at, open_writer, opened, same_state
from tests.stream.random_history import RandomHistory

EAGER = ManifestLogSettings(chunk_bytes=16 << 10, record_bytes_max=1024, snapshot_chunks=2, sealed_kept=1)
STEPS = ["append", "append", "append", "commit", "large", "rotate", "reopen"]


def mostly(kind: CrashOutcome, seed: int) -> Chooser:
    """Choose one outcome nine times out of ten: a single lost sector among many is the hardest case to detect."""
    rng = random.Random(seed)
    return lambda options: rng.choice(options) if rng.random() < 0.1 or kind not in options else kind


CHOOSERS = st.one_of(
    st.just(keep_all),
    st.just(drop_all),
    st.integers(0, 2**32).map(lambda seed: random.Random(seed).choice),
    st.builds(mostly, st.sampled_from(list(CrashOutcome)), st.integers(0, 2**32)),
)


class LogWorkload:
    """A writer on some disk, the appended records, and how many of them a returned call has promised."""

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
        """The records on disk are a prefix of the appended ones that includes all promised ones, and writing continues
        after them.
        """
        files = files_at(disk.root, disk)
        values = all_values(files)
        assert values == self.values[: len(values)]
        assert len(values) >= self.promised, "a committed record is lost"
        with open_writer(files) as writer:
            assert all_values(files) == values
            writer.append(opened(999), 1)
            writer.commit()
            writer.append(opened(1000), 1)
        assert all_values(files) == [*values, opened(999), opened(1000)]


@contextmanager
def workload_until(root: str, steps: Sequence[str], fail_at: int) -> Iterator[tuple[LogWorkload, CrashDisk, bool]]:
    disk = CrashDisk(root)
    faulty = FaultyDisk(disk, Fault.POWER_CUT, fail_at=fail_at)
    workload = LogWorkload()
    try:
        workload.run(faulty, root, steps)
    except PowerCut:
        pass
    try:
        yield workload, disk, faulty.fired
    finally:
        if workload.writer is not None:
            workload.writer.abandon()


def crash(workload: LogWorkload, disk: CrashDisk, choose: Chooser) -> None:
    with tempfile.TemporaryDirectory() as folder:
        workload.check(disk.crash(f"{folder}/after", choose))


def at_every_step(steps: Sequence[str], choosers: Sequence[Chooser]) -> int:
    """Cut the power at the first, second, … call to the disk, and return how many calls there were."""
    fail_at = 0
    while True:
        fail_at += 1
        with tempfile.TemporaryDirectory() as root, workload_until(root, steps, fail_at) as (workload, disk, fired):
            for choose in choosers:
                crash(workload, disk, choose)
        if not fired:
            return fail_at


SCRIPT = ["append", "commit", "append", "append", "commit", "rotate", "append", "large", "commit", "append", "reopen"]


def test_power_loss_at_every_step_of_a_workload() -> None:
    choosers = [keep_all, drop_all, *(mostly(kind, seed) for kind in CrashOutcome for seed in range(1))]
    assert at_every_step(SCRIPT, choosers) > 40


@given(steps=st.lists(st.sampled_from(STEPS), max_size=12), fail_at=st.integers(1, 60), choose=CHOOSERS)
def test_power_loss_anywhere_in_any_workload(steps: list[str], fail_at: int, choose: Chooser) -> None:
    with tempfile.TemporaryDirectory() as root, workload_until(root, steps, fail_at) as (workload, disk, _):
        crash(workload, disk, choose)


def test_without_the_sync_between_copy_and_header_a_loss_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    """A planted bug: header and copy are written without a sync between them, so both may be torn, or the header may
    precede its payload.
    """

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


class FullLogWorkload:
    """A `ManifestLog` on some disk, an object store that survives, and what was promised."""

    def __init__(self, objects: LogObjects) -> None:
        self.objects = objects
        self.history = RandomHistory(3)
        self.records: list[tuple[r.Payload, int]] = []
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
                records = self.history.many(3)
                self.records += records
                append_all(self.log, records)
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
            self.promised = len(self.records)

    def check(self, disk: CrashDisk) -> None:
        """The rebuilt state is the fold of a prefix of the history that includes all promised records, and the log can
        be continued.
        """
        with self.open(disk, disk.root) as log:
            expected_states = [self._facts(index) for index in self._folds()]
            state = self._facts(log.index)
            assert state in expected_states[self.promised :], "a committed record is lost, or another one appeared"
            assert log.index.rejected == 0
            segment = log.index.opened_max + 1
            append_all(log, [(opened(1), segment)])
            log.snapshot()
            log.tick()
            live = log.index
        with self.open(disk, disk.root) as log:
            assert same_state(log.index, live)

    def _folds(self) -> Iterator[ManifestIndex]:
        index = ManifestIndex()
        yield index
        for value, segment in self.records:
            index.fold_raw(mlog_format.encode_record(value.TYPE, segment, r.encode(value)))
            yield index

    def _facts(self, index: ManifestIndex) -> list[tuple[int, SegmentFacts]]:
        return [(info.segment_id, facts_of(info)) for info in index.segments()]


@given(steps=st.lists(st.sampled_from(LOG_STEPS), max_size=14), fail_at=st.integers(1, 120), choose=CHOOSERS)
def test_power_loss_anywhere_with_snapshots_uploads_and_retention(
    steps: list[str], fail_at: int, choose: Chooser
) -> None:
    with tempfile.TemporaryDirectory() as root:
        store = open_store("memory://")
        workload = FullLogWorkload(LogObjects(store, STREAM))
        disk = CrashDisk(root)
        try:
            workload.run(FaultyDisk(disk, Fault.POWER_CUT, fail_at=fail_at), root, steps)
        except PowerCut:
            pass
        with tempfile.TemporaryDirectory() as folder:
            after = disk.crash(f"{folder}/after", choose)
            if workload.log is not None:
                workload.log.abandon()
            workload.check(after)
        store.close()
