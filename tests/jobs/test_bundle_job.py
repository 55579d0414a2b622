"""The bundle job: the runner bundles the manifest logs of many streams; records retire the chunks that a bundle
contains."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import quire
from quire.core.errors import StalePlan
from quire.durable.failpoints import VARIABLE, armed, hits, recording
from quire.manifest import tables as t
from quire.manifest.records import JobKind, JobState
from quire.stream.mlog_index import ManifestIndex
from quire.stream.mlog_tier2 import LogListing, LogObjects
from quire.stream.stream import Stream
from tests.jobs.small_stream import SETTINGS, check, fill
from tests.programs import run_program

ROOT = Path(__file__).parents[2]
TWO_WEEKS = 14 * 86_400


def with_chunks(stream: Stream, chunks: int = 6) -> None:
    """Create sealed chunks in tier 2 that are two weeks old, and a snapshot after them."""
    log = stream.ledger.log
    for _ in range(chunks):
        fill(stream, 1, records=2)
        log.rotate()
    log.snapshot()
    fill(stream, 1, records=2)
    log.rotate()
    log.upload()
    age(stream.files.root)


def age(root: str) -> None:
    """Make all log objects two weeks old."""
    for path in Path(root, "objects").rglob("*.mlog"):
        os.utime(path, (time.time() - TWO_WEEKS,) * 2)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[quire.Store]:
    with quire.open(tmp_path / "store", settings=SETTINGS) as store:
        for name in ("clicks", "taps", "empty"):
            stream = store.stream(name, create=True)
            if name != "empty":
                with_chunks(stream)
        yield store
        for name in ("clicks", "taps"):
            store.stream(name)
        check(store)


def listing(store: quire.Store, name: str) -> LogListing:
    return objects_of(store, name).listing()


def objects_of(store: quire.Store, name: str) -> LogObjects:
    with store.manifest.read() as txn:
        return LogObjects(store.objects, store.database(name).db_id, txn.object_prefixes())


def superseded(store: quire.Store, name: str) -> list[int]:
    """Chunks that still exist although a bundle contains them."""
    log_objects = listing(store, name)
    return [index for index in log_objects.chunks if log_objects.bundle_of(index) is not None]


def state_of(index: ManifestIndex) -> dict[int, object]:
    return {segment.segment_id: (segment.state, segment.key) for segment in index.segments()}


def test_old_chunks_of_all_streams_become_bundles(store: quire.Store) -> None:
    before = {name: state_of(store.stream(name).ledger.index) for name in ("clicks", "taps")}
    job = store.heavy.bundle(runner="threads", period_seconds=1e9)
    assert job.result["bundles"] == 0, "the period is not over"
    job = store.heavy.bundle(runner="threads")
    assert job.record.state is JobState.SUCCEEDED
    result = job.result
    assert (result["streams"], result["failed"]) == (3, [])
    assert result["bundles"] >= 2
    for name in ("clicks", "taps"):
        log_objects = listing(store, name)
        assert log_objects.bundles, name
        assert superseded(store, name) == []
        assert not store.stream(name).ledger.log.index.own_deletes, "recorded as deleted"
        store.streams.close_stream(name)
        assert state_of(store.stream(name).ledger.index) == before[name]
    assert store.heavy.bundle(runner="threads").result["retired"] == 0


def test_streams_that_are_not_open_are_closed_again(store: quire.Store) -> None:
    store.streams.close_stream("clicks")
    clicks = store.database("clicks").db_id
    before = {stream.stream_id for stream in store.streams.streams()}
    assert store.heavy.bundle("clicks", runner="threads").result["retired"] > 0
    assert {stream.stream_id for stream in store.streams.streams()} == before
    assert clicks not in before
    assert listing(store, "taps").bundles == {}, "only the named stream is bundled"
    assert superseded(store, "clicks") == []


def test_a_damaged_log_does_not_prevent_bundling_of_others(store: quire.Store) -> None:
    store.streams.close_stream("clicks")
    objects = objects_of(store, "clicks")
    data = store.objects.get(objects.chunk_key(1))
    store.objects.put(objects.chunk_key(1), data[:80] + bytes([data[80] ^ 1]) + data[81:])
    age(store.path)
    job = store.heavy.bundle(runner="threads")
    assert job.record.state is not JobState.SUCCEEDED
    assert "ManifestIntegrityError" in job.record.error
    assert listing(store, "taps").bundles
    store.objects.put(objects.chunk_key(1), data)
    age(store.path)
    assert store.heavy.bundle(runner="threads").result["failed"] == []


def test_chunks_that_a_killed_job_left_are_retired_by_the_next(store: quire.Store) -> None:
    def interrupt(_: str) -> None:
        raise StalePlan("stopped for the test")

    with armed("jobs.bundle.queued", interrupt):
        job = store.heavy.bundle(runner="threads")
    assert job.record.state is not JobState.SUCCEEDED
    bundles = listing(store, "taps").bundles.keys()
    store.manifest.jobs.cancel(job.job_id)
    result = store.heavy.bundle(runner="threads").result
    assert (result["bundles"], result["retired"] > 0) == (0, True), "no chunk is bundled twice"
    assert listing(store, "taps").bundles.keys() == bundles


def test_upkeep_enqueues_a_bundle_once_a_day(store: quire.Store) -> None:
    done = store.upkeep.round(everything=True)
    assert done.bundles == 1
    assert store.upkeep.round(everything=True).bundles == 0
    store.worker.drain()
    with store.manifest.read() as txn:
        (job,) = [record for _, record in txn.scan(t.JOB_QUEUE) if record.kind is JobKind.BUNDLE]
    assert job.state is JobState.SUCCEEDED


def test_every_step_is_hit(store: quire.Store) -> None:
    store.streams.close_stream("clicks")
    with recording():
        store.heavy.bundle(runner="threads")
    assert {"jobs.bundle.made", "jobs.bundle.queued", "jobs.bundle.deleted"} <= hits().keys()


PROGRAM = """
import sys, quire
from pathlib import Path
from tests.jobs.small_stream import SETTINGS
from tests.jobs.test_bundle_job import with_chunks
with quire.open(Path(sys.argv[1]), settings=SETTINGS) as store:
    if not store.databases():
        with_chunks(store.stream("clicks", create=True))
        store.streams.close_stream("clicks")
    store.heavy.bundle(runner="threads")
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "point", ["jobs.bundle.made", "jobs.bundle.queued", "jobs.bundle.deleted", "stream.mlog.own_deleted"]
)
def test_work_continues_after_a_crash_at_any_step(tmp_path: Path, point: str) -> None:
    def run(failpoints: str) -> int:
        environment = {**os.environ, VARIABLE: failpoints, "PYTHONPATH": str(ROOT)}
        arguments = ["-c", PROGRAM, str(tmp_path / "store")]
        process = run_program(arguments, env=environment, cwd=ROOT, capture_output=True, timeout=120)
        assert process.returncode in (0, -9), process.stderr
        return process.returncode

    assert run(f"{point}=kill") == -9
    with quire.open(tmp_path / "store", settings=SETTINGS) as store:
        before = state_of(store.stream("clicks").ledger.index)
    assert run("") == 0
    with quire.open(tmp_path / "store", settings=SETTINGS) as store:
        assert state_of(store.stream("clicks").ledger.index) == before
        store.stream("clicks").ledger.log.tick()
        log_objects = listing(store, "clicks")
        assert log_objects.bundles
        assert superseded(store, "clicks") == []
        check(store)
